// Converts statuses to the errors of HTTP and of gRPC.
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

// `status` must not be OK. The message of an internal error is replaced by a fixed text.
HttpError ToHttpError(const absl::Status& status);

// {"error": {"message", "type", "param", "code"}}, one line.
std::string ErrorJson(const HttpError& error);

// OK maps to OK. Never returns UNKNOWN.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace moeserve::server
