// Accepts connections for gRPC, so that their number is limited. gRPC's own listener has no limit,
// and stops listening for good when the process has no file descriptor left.
#pragma once

#include <grpcpp/server_builder.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"

namespace moeserve::server::rpc {

class ConnectionGate {
 public:
  // Binds the address; port 0 picks a free port. Unavailable if the address is in use or is not a
  // numeric address or localhost. Connections wait in the system's queue until Start(). `open` is
  // kept at the number of open connections and must outlive the gate.
  static Result<std::unique_ptr<ConnectionGate>> Listen(const std::string& host, int port,
                                                        int max_connections,
                                                        std::atomic<int64_t>& open);
  ~ConnectionGate();  // calls Stop()
  ConnectionGate(const ConnectionGate&) = delete;
  ConnectionGate& operator=(const ConnectionGate&) = delete;

  int port() const;

  // Starts a thread that hands accepted connections to `acceptor`, which belongs to a started
  // server. If there are `max_connections`, a new connection replaces the one that has been silent
  // for longest, if that is at least for some seconds; else the new one is closed.
  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor);

  // Stops accepting; the connections go on. Must be called before the gRPC server is destroyed.
  // Idempotent.
  void Stop();

 private:
  class Impl;
  explicit ConnectionGate(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace moeserve::server::rpc
