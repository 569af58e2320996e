// The gRPC listener: the service, health and reflection on one port.
#pragma once

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "base/status.h"
#include "server/context.h"

namespace moeserve::server::rpc {

struct GrpcServerOptions {
  std::string host = "127.0.0.1";
  int port = 8081;  // 0: any free one
};

class GrpcServer {
 public:
  // Binds and starts with health NOT_SERVING. Block SIGTERM and SIGINT in the calling thread
  // before: the threads started here inherit the mask. `context` outlives the server. Unavailable:
  // cannot listen on the address.
  static Result<std::unique_ptr<GrpcServer>> Start(const GrpcServerOptions& options,
                                                   ServerContext& context);
  ~GrpcServer();  // Stop(zero)

  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  std::string address() const;  // with the real port
  int port() const;

  // Sets the health of "", of the service and of model/<name> for every served name.
  void SetServing(bool serving);

  // Sets health to NOT_SERVING for good, refuses new calls, waits up to `grace` for the running
  // ones and then cancels them. Idempotent.
  void Stop(absl::Duration grace);

 private:
  class Impl;
  explicit GrpcServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moeserve::server::rpc
