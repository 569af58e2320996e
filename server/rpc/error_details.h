// What a call that fails tells its client: the status and, in the trailer grpc-status-details-bin,
// messages of proto/google/rpc.
#pragma once

#include <grpcpp/support/status.h>

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace moeserve::server::rpc {

// Returns ToGrpcStatus(), with the API error code as ErrorInfo, when to try again as RetryInfo if
// an answer over HTTP would have Retry-After, the invalid field as BadRequest, and `request_id` as
// RequestInfo. OK gets no details.
grpc::Status DetailedStatus(const absl::Status& status, const std::string& request_id);

// The same for an error that ToGrpcStatus() does not return. `reason` is an API error code.
grpc::Status DetailedStatus(grpc::StatusCode code, std::string_view message,
                            std::string_view reason, const std::string& request_id);

}  // namespace moeserve::server::rpc
