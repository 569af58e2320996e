#include "server/rpc/error_details.h"

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/base/api_error.h"
#include "server/base/status_conversion.h"
#include "server/base/utf8.h"

namespace moeserve::server::rpc {
namespace {

// Clients limit the size of trailers, often to 8 KiB, so a long message is not sent a third time.
constexpr size_t kMaxDescriptionBytes = 1024;

// Fills what every error has.
google::rpc::Status Begin(grpc::StatusCode code, const std::string& message,
                          std::string_view reason, const std::string& request_id) {
  google::rpc::Status out;
  out.set_code(code);
  out.set_message(message);
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(reason));
  info.set_domain("moeserve");
  out.add_details()->PackFrom(info);
  google::rpc::RequestInfo request;
  request.set_request_id(request_id);
  out.add_details()->PackFrom(request);
  return out;
}

grpc::Status ToStatus(const google::rpc::Status& details) {
  return {static_cast<grpc::StatusCode>(details.code()), details.message(),
          details.SerializeAsString()};
}

}  // namespace

grpc::Status DetailedStatus(const absl::Status& status, const std::string& request_id) {
  if (status.ok()) return grpc::Status::OK;
  const grpc::Status plain = ToGrpcStatus(status);
  const HttpError http = ToHttpError(status);
  google::rpc::Status out =
      Begin(plain.error_code(), ReplaceInvalidUtf8(plain.error_message()), http.code, request_id);
  if (http.retry_after_seconds > 0) {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_seconds(http.retry_after_seconds);
    out.add_details()->PackFrom(retry);
  }
  if (!http.param.empty() && plain.error_code() == grpc::StatusCode::INVALID_ARGUMENT) {
    google::rpc::BadRequest bad;
    auto& violation = *bad.add_field_violations();
    violation.set_field(ReplaceInvalidUtf8(http.param));
    if (out.message().size() <= kMaxDescriptionBytes) violation.set_description(out.message());
    out.add_details()->PackFrom(bad);
  }
  return ToStatus(out);
}

grpc::Status DetailedStatus(grpc::StatusCode code, std::string_view message,
                            std::string_view reason, const std::string& request_id) {
  return ToStatus(Begin(code, ReplaceInvalidUtf8(message), reason, request_id));
}

}  // namespace moeserve::server::rpc
