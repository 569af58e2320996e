#include "server/http/error_response.h"

#include "server/logging/logging.h"

namespace moeserve::server::http {

HttpError ReportedError(const absl::Status& status) {
  HttpError error = ToHttpError(status);
  if (error.status == 500) LogError("http", std::string(status.message()));
  return error;
}

Response ErrorResponse(const HttpError& error, ErrorBody* body) {
  Response response;
  response.status = error.status;
  response.body = body(error);
  if (error.status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  if (error.retry_after_seconds > 0) {
    response.headers.emplace_back("Retry-After", std::to_string(error.retry_after_seconds));
  }
  if (error.never_retry) response.headers.emplace_back("x-should-retry", "false");
  return response;
}

Response ErrorResponse(const absl::Status& status, ErrorBody* body) {
  return ErrorResponse(ReportedError(status), body);
}

Response ProtocolError(int status, std::string_view code, std::string_view message) {
  HttpError error;
  error.status = status;
  error.type = "invalid_request_error";
  error.code = std::string(code);
  error.message = std::string(message);
  return ErrorResponse(error);
}

}  // namespace moeserve::server::http
