// Pieces of request targets.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moeserve::server::http {

// No value for a malformed escape or an escaped NUL.
std::optional<std::string> PercentDecode(std::string_view text);

// What `name` has in "a=1&b=2", as sent; none if absent, empty for "a" and "a=".
std::optional<std::string_view> QueryText(std::string_view query, std::string_view name);

// The number that `name` has in "a=1&b=2"; none if absent. InvalidArgument for anything that is no
// number in [min, max].
Result<std::optional<double>> QueryNumber(std::string_view query, std::string_view name, double min,
                                          double max);

// The same for whole numbers.
Result<std::optional<int64_t>> QueryInteger(std::string_view query, std::string_view name,
                                            int64_t min, int64_t max);

}  // namespace moeserve::server::http
