// The gRPC listener: the inference service, health and reflection on one port.
#pragma once

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "base/status.h"
#include "server/connections/address_limit.h"
#include "server/context.h"

namespace moeserve::server {
class TlsStore;
}

namespace moeserve::server::rpc {

struct GrpcServerOptions {
  std::string host = "127.0.0.1";
  int port = 8081;  // 0 picks a free port
  int max_connections = 4096;
  AddressLimit address_limit;
  TlsStore* tls = nullptr;  // must outlive the server; null: no TLS
  bool reflection = true;
};

class GrpcServer {
 public:
  // Binds the address and starts the threads, with health NOT_SERVING. SIGTERM and SIGINT must be
  // blocked in the calling thread, because the new threads inherit its signal mask. `context` must
  // outlive the server. Unavailable if the address cannot be used.
  static Result<std::unique_ptr<GrpcServer>> Start(const GrpcServerOptions& options,
                                                   ServerContext& context);
  ~GrpcServer();  // calls Stop() without a grace period

  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  std::string address() const;  // with the actual port
  int port() const;

  // Sets the health status of the services "", the inference service, and model/<name> for every
  // served name.
  void SetServing(bool serving);

  // Sets the health status to NOT_SERVING for good, refuses new calls, waits up to `grace` for the
  // running calls and then cancels them. Idempotent.
  void Stop(absl::Duration grace);

 private:
  class Impl;
  explicit GrpcServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moeserve::server::rpc
