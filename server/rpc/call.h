// The common part of all gRPC calls: id, authorization, deadline, trailers, log line.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/work_pool.h"
#include "server/context.h"
#include "server/rpc/methods.h"

namespace moeserve::server::rpc {

class Call {
 public:
  // `context` and `server` must outlive the call. `method` must be one of kMethods.
  Call(grpc::CallbackServerContext* context, ServerContext& server, const Method& method);

  // Returns Unauthenticated without a valid API key, PermissionDenied without a scope of the
  // method, ResourceExhausted beyond the key's limit on requests, and DeadlineExceeded if the
  // deadline had passed when the call arrived. Sets key(). Must be called first, and once.
  absl::Status Check();
  // Returns whose call it is; null on a server without keys.
  const std::shared_ptr<const ApiKey>& key() const { return key_; }

  // Returns whose tasks it gives to a work pool: those of the key, or of the peer.
  ClientId client() const;

  // Returns why gRPC cancelled the call: Cancelled or DeadlineExceeded, because gRPC reports passed
  // deadlines as cancellations, too. The client's clock starts before the server's, so a call that
  // is cancelled in the last tenth of its time (at most 100 ms) counts as DeadlineExceeded.
  absl::Status CancelReason() const;

  // Returns the SteadyNow() time at which the engine must end the request: the server's own limit,
  // or a second after the client's deadline if that is earlier. gRPC cancels the call at the
  // client's deadline, so the client gets DEADLINE_EXCEEDED and not an answer that was cut there.
  absl::Time engine_deadline() const { return engine_deadline_; }
  const std::string& id() const { return id_; }
  // Learns what the call does. Never null.
  const std::shared_ptr<RequestRecord>& record() const { return record_; }

  // Adds trailers, updates the metrics and writes the log line. Returns the status with which to
  // finish the call. Must be called once.
  grpc::Status End(const absl::Status& status);

 private:
  grpc::CallbackServerContext* const context_;
  ServerContext& server_;
  const Method& method_;
  const std::chrono::steady_clock::time_point start_;
  std::string id_;
  std::shared_ptr<RequestRecord> record_;
  std::shared_ptr<const ApiKey> key_;
  bool checked_ = false;        // whether Check() has succeeded
  absl::Time deadline_;         // the client's, or the server's own limit if that is earlier
  absl::Time engine_deadline_;  // see engine_deadline()
  absl::Duration cancel_margin_;
};

// Runs `prepare`, which may throw, on the work pool, and then `done` with its status. Returns
// ResourceExhausted, which is counted, if too many requests wait.
absl::Status PrepareLater(ServerContext& server, ClientId client,
                          std::function<absl::Status()> prepare,
                          std::function<void(const absl::Status&)> done);

}  // namespace moeserve::server::rpc
