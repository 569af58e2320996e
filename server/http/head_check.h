// Strict checks of a request head before it is parsed. Refuses what programs parse differently,
// because a proxy in front could have understood it in another way.
#pragma once

#include <optional>
#include <string_view>

#include "server/base/limits.h"
#include "server/http/types.h"

namespace moeserve::server::http {

// `received` is the start of a head that is not complete. Returns the answer if it cannot become an
// acceptable head.
std::optional<Response> CheckPartialHead(std::string_view received, const HttpLimits& limits);

// `head` ends with the empty line. Returns the answer if the head is refused: too large (414, 431),
// control characters, bare LF, folded lines, a malformed request line, a missing or repeated Host,
// or a body length that is ambiguous (400).
std::optional<Response> CheckHead(std::string_view head, const HttpLimits& limits);

}  // namespace moeserve::server::http
