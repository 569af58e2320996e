#include "server/base/api_error.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/cord.h"
#include "base/error_text.h"

namespace moeserve::server {
namespace {

constexpr char kCodeUrl[] = "moeserve/code";
constexpr char kParamUrl[] = "moeserve/param";
constexpr char kRetryAfterUrl[] = "moeserve/retry_after_seconds";

std::string Payload(const absl::Status& status, const char* url) {
  const auto payload = status.GetPayload(url);
  return payload ? std::string(*payload) : std::string();
}

absl::Cord ToCord(std::string_view text) {
  return absl::Cord(absl::string_view(text.data(), text.size()));
}

}  // namespace

absl::Status MakeError(absl::StatusCode code, std::string_view api_code, std::string message,
                       std::string_view param) {
  absl::Status status(code, message);
  status.SetPayload(kCodeUrl, ToCord(api_code));
  if (!param.empty()) status.SetPayload(kParamUrl, ToCord(param));
  return status;
}

absl::Status InvalidValue(std::string_view param, std::string message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "invalid_value", std::move(message), param);
}

absl::Status UnsupportedParameter(std::string_view param) {
  return UnsupportedParameter(
      param,
      Concat("'", param, "' is not supported by this server; leave it out or at its default"));
}

absl::Status UnsupportedParameter(std::string_view param, std::string message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "unsupported_parameter", std::move(message),
                   param);
}

absl::Status MissingField(std::string_view param) {
  return MakeError(absl::StatusCode::kInvalidArgument, "missing_field",
                   Concat("the required field '", param, "' is missing"), param);
}

absl::Status RateLimitExceeded(std::string message, absl::Duration retry_after) {
  absl::Status status =
      MakeError(absl::StatusCode::kResourceExhausted, "rate_limit_exceeded", std::move(message));
  const int64_t seconds = absl::ToInt64Seconds(absl::Ceil(retry_after, absl::Seconds(1)));
  status.SetPayload(kRetryAfterUrl, ToCord(std::to_string(std::clamp<int64_t>(seconds, 1, 3600))));
  return status;
}

int RetryAfterSeconds(const absl::Status& status) {
  const std::string text = Payload(status, kRetryAfterUrl);
  return text.empty() ? 0 : std::stoi(text);
}

std::string ApiCode(const absl::Status& status) {
  if (status.ok()) return {};
  if (std::string code = Payload(status, kCodeUrl); !code.empty()) return code;
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      return "invalid_value";
    case absl::StatusCode::kNotFound:
      return "model_not_found";
    case absl::StatusCode::kAlreadyExists:
      return "duplicate_request_id";
    case absl::StatusCode::kUnauthenticated:
      return "invalid_api_key";
    case absl::StatusCode::kPermissionDenied:
      return "forbidden";
    case absl::StatusCode::kResourceExhausted:
      return "queue_full";
    case absl::StatusCode::kUnavailable:
      return "draining";
    case absl::StatusCode::kDeadlineExceeded:
      return "timeout";
    case absl::StatusCode::kUnimplemented:
      return "unsupported_parameter";
    default:
      return "internal_error";
  }
}

std::string ApiParam(const absl::Status& status) { return Payload(status, kParamUrl); }

absl::Status WithApiCode(absl::Status status, std::string_view api_code) {
  if (!status.ok() && !status.GetPayload(kCodeUrl)) status.SetPayload(kCodeUrl, ToCord(api_code));
  return status;
}

}  // namespace moeserve::server
