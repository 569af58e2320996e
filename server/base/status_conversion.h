// Converts an absl::Status to an HTTP error or a gRPC status.
#pragma once

#include <exception>
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
  std::string code;  // empty is sent as JSON null
  std::string message;
  std::string param;            // empty is sent as JSON null
  int retry_after_seconds = 0;  // 0 sends no Retry-After header
  bool never_retry = false;     // sends the header x-should-retry: false
};

// `status` must not be OK. An internal error gets a fixed message, so that no details reach the
// client.
HttpError ToHttpError(const absl::Status& status);

// Returns {"error": {"message", "type", "param", "code"}} in one line.
std::string ErrorJson(const HttpError& error);

// Converts OK to OK, and codes that should not reach a client, such as UNKNOWN, to INTERNAL. An
// INTERNAL error gets a fixed message, so that no details reach the client.
grpc::Status ToGrpcStatus(const absl::Status& status);

// Returns the status that `function` returns, or Internal with the text of an exception that it
// throws.
template <typename Function>
absl::Status Caught(const Function& function) {
  try {
    return function();
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

}  // namespace moeserve::server
