// The common part of every call: id, authorization, deadline, trailers, log line.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/context.h"

namespace moeserve::server::rpc {

class Call {
 public:
  // `context` and `server` outlive the call. `method` is a literal.
  Call(grpc::CallbackServerContext* context, ServerContext& server, const char* method);

  // Unauthenticated without a valid key; DeadlineExceeded if the deadline had passed on arrival.
  absl::Status Check() const;

  // The reason for a cancellation by gRPC, which also reports passed deadlines as cancellations.
  // The client's clock starts before ours, so a call cancelled in the last tenth of its time (at
  // most 100 ms) counts as DeadlineExceeded.
  absl::Status CancelReason() const;

  // The client's deadline, no later than the server's own limit.
  absl::Time deadline() const { return deadline_; }
  const std::string& id() const { return id_; }

  // Adds trailers, counts and logs. Returns the status to finish with. Call once.
  grpc::Status End(const absl::Status& status);

 private:
  grpc::CallbackServerContext* const context_;
  ServerContext& server_;
  const char* const method_;
  const std::chrono::steady_clock::time_point start_;
  std::string id_;
  absl::Time deadline_;
  absl::Duration cancel_margin_;
};

}  // namespace moeserve::server::rpc
