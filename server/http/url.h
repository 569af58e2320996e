// Decodes parts of request targets.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moeserve::server::http {

// Returns no value for a malformed escape or an escaped NUL.
std::optional<std::string> PercentDecode(std::string_view text);

// Returns the value of `name` in a query such as "a=1&b=2", not decoded; none if absent, empty for
// "a" and "a=".
std::optional<std::string_view> QueryText(std::string_view query, std::string_view name);

// Returns the number that `name` has in a query; none if absent. InvalidArgument unless it is a
// number in [min, max].
Result<std::optional<double>> QueryNumber(std::string_view query, std::string_view name, double min,
                                          double max);

// The same for whole numbers.
Result<std::optional<int64_t>> QueryInteger(std::string_view query, std::string_view name,
                                            int64_t min, int64_t max);

}  // namespace moeserve::server::http
