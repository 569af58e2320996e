// Errors of the public interfaces: an absl::Status that also carries the error code and the field
// that the client sees. A Status without them (from the engine, say) has the defaults of its code.
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
// InvalidArgument, code "unsupported_parameter": known, not implemented, not at its default.
absl::Status UnsupportedParameter(std::string_view param);
// InvalidArgument, code "missing_field".
absl::Status MissingField(std::string_view param);

// The code that was attached, else the default of the status code; empty for OK.
std::string ApiCode(const absl::Status& status);
// The request field that was attached, or empty.
std::string ApiParam(const absl::Status& status);

// Adds `api_code` to an error that has none yet.
absl::Status WithApiCode(absl::Status status, std::string_view api_code);

}  // namespace moeserve::server
