// Statuses as clients see them: one function for HTTP, one for gRPC.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace grpc {
class Status;
}

namespace moeserve::server {

struct HttpError {
  int status = 500;
  std::string type = "server_error";
  std::string code;  // empty: null
  std::string message;
  std::string param;            // empty: null
  int retry_after_seconds = 0;  // 0: no header
  bool never_retry = false;     // x-should-retry: false
};

// `status` must not be OK. Messages of internal errors are kept for the log only.
HttpError ToHttpError(const absl::Status& status);

// {"error": {"message", "type", "param", "code"}}, one line.
std::string ErrorJson(const HttpError& error);

// OK maps to OK; never UNKNOWN.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace moeserve::server
