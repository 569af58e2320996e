// Strict checks of a request head before it is parsed. They refuse heads that HTTP programs
// interpret differently, because a proxy in front of the server could have interpreted the head in
// another way.
#pragma once

#include <optional>
#include <string_view>

#include "server/base/limits.h"
#include "server/http/types.h"

namespace moeserve::server::http {

// `received` is the start of a head that is not complete yet. Returns the error response if the
// head cannot become acceptable, else nullopt.
std::optional<Response> CheckPartialHead(std::string_view received, const HttpLimits& limits);

// `head` is a complete head, which ends with the empty line. Returns the error response if the head
// is refused, else nullopt. Refuses a head that is too large (414, 431), and with 400: control
// characters, bare LF, folded lines, a malformed request line, a missing or repeated Host, or an
// ambiguous body length.
std::optional<Response> CheckHead(std::string_view head, const HttpLimits& limits);

}  // namespace moeserve::server::http
