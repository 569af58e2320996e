// Request fields that clients of other servers send and this one does not implement. They pass at
// their default and are refused otherwise: silence would change what the client asked for.
#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace moeserve::server {

bool IsKnownUnsupportedField(std::string_view name);

// InvalidArgument, code "unsupported_parameter", for the first field with a value that matters;
// code "invalid_value" for one whose value no server would take.
absl::Status CheckUnsupportedFields(const nlohmann::json& body);

}  // namespace moeserve::server
