// Strict checks of a request head before any parser sees it: what different programs read
// differently is refused, because a proxy in front might have read it the other way.
#pragma once

#include <optional>
#include <string_view>

#include "server/base/limits.h"
#include "server/http/types.h"

namespace moeserve::server::http {

// `received` is what has arrived of a head that is not complete. The answer if it can no longer
// become an acceptable one.
std::optional<Response> CheckPartialHead(std::string_view received, const HttpLimits& limits);

// `head` ends with the empty line. The answer if the head is refused: too large (414, 431), control
// characters, bare LF, folded lines, a malformed request line, a missing or repeated Host, or a
// body length that is not unambiguous (400).
std::optional<Response> CheckHead(std::string_view head, const HttpLimits& limits);

}  // namespace moeserve::server::http
