// Builds responses that report an error.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "server/base/status_conversion.h"
#include "server/http/types.h"

namespace moeserve::server::http {

// Writes the body of a response that reports an error.
using ErrorBody = std::string(const HttpError& error);

// Returns the error of a status that is not OK. Clients do not learn what is wrong inside the
// server, so the log gets the messages of such errors.
HttpError ReportedError(const absl::Status& status);

// `status` must not be OK; it is reported.
Response ErrorResponse(const HttpError& error, ErrorBody* body = &ErrorJson);
Response ErrorResponse(const absl::Status& status, ErrorBody* body = &ErrorJson);

// Returns a response for an error that exists in HTTP only (405, 408, 413 ...). Its type is always
// "invalid_request_error".
Response ProtocolError(int status, std::string_view code, std::string_view message);

}  // namespace moeserve::server::http
