// Request fields that other servers implement and this server does not. A field is accepted if its
// value means the same as an absent field, and refused otherwise; it is never silently ignored.
#pragma once

#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace moeserve::server {

bool IsKnownUnsupportedField(std::string_view name);

// Returns InvalidArgument for the first such field that is refused: with API error code
// "unsupported_parameter", or with "invalid_value" if the value is invalid for every server.
// Fields of `supported` are not checked.
absl::Status CheckUnsupportedFields(const nlohmann::json& body,
                                    std::span<const std::string_view> supported = {});

}  // namespace moeserve::server
