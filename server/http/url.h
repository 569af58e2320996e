// Pieces of request targets.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "kernels/base/status.h"

namespace moeserve::server::http {

// No value for a malformed escape or an escaped NUL.
std::optional<std::string> PercentDecode(std::string_view text);

// The number that `name` has in "a=1&b=2"; none if absent. InvalidArgument for anything that is no
// number in [min, max].
Result<std::optional<double>> QueryNumber(std::string_view query, std::string_view name, double min,
                                          double max);

}  // namespace moeserve::server::http
