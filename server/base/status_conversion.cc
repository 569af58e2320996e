#include "server/base/status_conversion.h"

#include <grpcpp/support/status.h>

#include "server/base/api_error.h"
#include "server/base/json.h"
#include "server/base/utf8.h"

namespace moeserve::server {
namespace {

constexpr char kInternalMessage[] = "internal error; the server's log has the details";

// Errors quote names that clients have sent. Over gRPC they travel in trailers, which clients
// refuse if they exceed some KiB, often 8, in their encoded form.
constexpr size_t kMaxMessageBytes = 1500;
constexpr size_t kMaxParamBytes = 256;

std::string BoundedMessage(const absl::Status& status) {
  return Shortened({status.message().data(), status.message().size()}, kMaxMessageBytes);
}

std::string PublicMessage(const absl::Status& status, int http_status) {
  if (http_status == 500) return kInternalMessage;
  return BoundedMessage(status);
}

}  // namespace

HttpError ToHttpError(const absl::Status& status) {
  HttpError error;
  error.code = ApiCode(status);
  error.param = Shortened(ApiParam(status), kMaxParamBytes);
  error.type = "invalid_request_error";
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
      error.status = 400;
      break;
    case absl::StatusCode::kUnauthenticated:
      error.status = 401;
      error.type = "authentication_error";
      break;
    case absl::StatusCode::kPermissionDenied:
      error.status = 403;
      error.type = "permission_error";
      break;
    case absl::StatusCode::kNotFound:
      error.status = 404;
      break;
    case absl::StatusCode::kAlreadyExists:
      error.status = 409;
      error.never_retry = true;
      break;
    case absl::StatusCode::kCancelled:
      error.status = 499;
      error.code = "cancelled";
      break;
    case absl::StatusCode::kResourceExhausted:
      if (error.code == "request_too_large") {
        error.status = 413;
        error.never_retry = true;
        break;
      }
      if (const int seconds = RetryAfterSeconds(status); seconds > 0) {
        error.status = 429;
        error.type = "rate_limit_error";
        error.retry_after_seconds = seconds;
        break;
      }
      error.status = 503;
      error.type = "overloaded_error";
      error.retry_after_seconds = 1;
      break;
    case absl::StatusCode::kUnavailable:
      error.status = 503;
      error.type = "unavailable_error";
      error.retry_after_seconds = 5;
      break;
    case absl::StatusCode::kDeadlineExceeded:
      error.status = 504;
      error.type = "server_error";
      break;
    default:
      error.status = 500;
      error.type = "server_error";
      error.code = "internal_error";
      break;
  }
  error.message = PublicMessage(status, error.status);
  return error;
}

std::string ErrorJson(const HttpError& error) {
  const auto or_null = [](const std::string& text) {
    return text.empty() ? OrderedJson(nullptr) : OrderedJson(text);
  };
  OrderedJson inner;
  inner["message"] = error.message;
  inner["type"] = error.type;
  inner["param"] = or_null(error.param);
  inner["code"] = or_null(error.code);
  OrderedJson outer;
  outer["error"] = std::move(inner);
  return outer.dump(-1, ' ', false, Json::error_handler_t::replace);
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return grpc::Status::OK;
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
      return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, BoundedMessage(status));
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      // The codes of both libraries have the same numbers.
      return grpc::Status(static_cast<grpc::StatusCode>(status.code()), BoundedMessage(status));
    default:
      return grpc::Status(grpc::StatusCode::INTERNAL, kInternalMessage);
  }
}

}  // namespace moeserve::server
