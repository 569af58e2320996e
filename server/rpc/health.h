// Implements gRPC's health checking protocol, proto/grpc/health/v1/health.proto, without keys.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "grpc/health/v1/health.pb.h"
#include "server/context.h"
#include "server/rpc/router.h"

namespace moeserve::server::rpc {

// Thread-safe.
class HealthService final {
 public:
  using State = grpc::health::v1::HealthCheckResponse::ServingStatus;
  class WatchCall;  // internal to health.cc

  // Adds the calls to `router`. `server` and the service must outlive every call.
  HealthService(Router& router, ServerContext& server);

  // Sets the state of a service; the empty name stands for the server as a whole. Has no effect
  // after Shutdown().
  void SetServing(const std::string& service, bool serving);
  // Makes the state of every service NOT_SERVING for good, and then ends every Watch call, so that
  // they do not keep the server.
  void Shutdown();

 private:
  State Find(const std::string& service) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Begins to tell `call` about `service`, first what its state is.
  void Watch(const std::string& service, const std::shared_ptr<WatchCall>& call);
  std::vector<std::shared_ptr<WatchCall>> WatchersOf(const std::string& service)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  std::map<std::string, State> states_ ABSL_GUARDED_BY(mutex_);
  // Also some that have ended.
  std::multimap<std::string, std::weak_ptr<WatchCall>> watchers_ ABSL_GUARDED_BY(mutex_);
  bool shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace moeserve::server::rpc
