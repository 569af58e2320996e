// Decodes parts of a request's URL.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moeserve::server::http {

// Returns nullopt for a malformed escape or an escaped NUL.
std::optional<std::string> PercentDecode(std::string_view text);

// Decodes a value of a query, where "+" stands for a space, as in forms. Fails as PercentDecode()
// does.
std::optional<std::string> FormDecode(std::string_view text);

// Returns the value of the parameter `name` in a query such as "a=1&b=2", without percent-decoding:
// nullopt if the parameter is absent, an empty text for "a" and for "a=".
std::optional<std::string_view> QueryText(std::string_view query, std::string_view name);

// Returns the number that the parameter `name` has in a query; nullopt if the parameter is absent.
// InvalidArgument unless the value is a number in [min, max].
Result<std::optional<double>> QueryNumber(std::string_view query, std::string_view name, double min,
                                          double max);

// Returns the integer that the parameter `name` has in a query; nullopt if the parameter is absent.
// InvalidArgument unless the value is an integer in [min, max].
Result<std::optional<int64_t>> QueryInteger(std::string_view query, std::string_view name,
                                            int64_t min, int64_t max);

}  // namespace moeserve::server::http
