// Errors of the public interfaces: an absl::Status that also carries the error code and the field
// that the client sees. A Status without them, such as the engine's, gets defaults for its code.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace moeserve::server {

// `api_code` is one of the documented codes, such as "invalid_value"; `param` names a request field
// or is empty. `code` must not be OK.
absl::Status MakeError(absl::StatusCode code, std::string_view api_code, std::string message,
                       std::string_view param = {});

// InvalidArgument, code "invalid_value".
absl::Status InvalidValue(std::string_view param, std::string message);
// InvalidArgument, code "unsupported_parameter": a known field that is not implemented.
absl::Status UnsupportedParameter(std::string_view param);
// InvalidArgument, code "missing_field".
absl::Status MissingField(std::string_view param);

// Returns the attached code, else the default for the status code; empty for OK.
std::string ApiCode(const absl::Status& status);
// Returns the attached request field, or an empty string.
std::string ApiParam(const absl::Status& status);

// Adds `api_code` to an error that has none yet.
absl::Status WithApiCode(absl::Status status, std::string_view api_code);

}  // namespace moeserve::server
