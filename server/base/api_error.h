// Errors of the public interfaces: an absl::Status with two attached texts that the client
// receives, an API error code and the name of a request field. A Status without them, such as one
// from the engine, gets the default API error code for its status code and no field.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace moeserve::server {

// Returns a Status with status code `code`, which must not be OK. `api_code` is one of the
// documented API error codes, such as "invalid_value". `param` names a request field or is empty.
absl::Status MakeError(absl::StatusCode code, std::string_view api_code, std::string message,
                       std::string_view param = {});

// Returns InvalidArgument with API error code "invalid_value".
absl::Status InvalidValue(std::string_view param, std::string message);
// Returns InvalidArgument with API error code "unsupported_parameter", for a request field that the
// server recognises but does not implement.
absl::Status UnsupportedParameter(std::string_view param);
// The same with a message of its own, for a field of which the server implements a part.
absl::Status UnsupportedParameter(std::string_view param, std::string message);
// Returns InvalidArgument with API error code "missing_field".
absl::Status MissingField(std::string_view param);

// Returns ResourceExhausted with API error code "rate_limit_exceeded", for a client that may try
// again after `retry_after`.
absl::Status RateLimitExceeded(std::string message, absl::Duration retry_after);
// Returns after how many seconds the client may try again, at least 1; 0 if `status` does not tell.
int RetryAfterSeconds(const absl::Status& status);

// Returns the attached API error code, else the default for the status code; empty if the status is
// OK.
std::string ApiCode(const absl::Status& status);
// Returns the attached name of a request field, or an empty string.
std::string ApiParam(const absl::Status& status);

// Returns `status`, with `api_code` attached if it is an error without an API error code.
absl::Status WithApiCode(absl::Status status, std::string_view api_code);

}  // namespace moeserve::server
