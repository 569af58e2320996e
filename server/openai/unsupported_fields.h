// Request fields that clients of other servers send and this one does not implement. They are
// accepted with their default value and refused otherwise, never ignored.
#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace moeserve::server {

bool IsKnownUnsupportedField(std::string_view name);

// InvalidArgument, code "unsupported_parameter", for the first field with another value;
// code "invalid_value" for a value that is invalid in any case.
absl::Status CheckUnsupportedFields(const nlohmann::json& body);

}  // namespace moeserve::server
