// Accepts connections for gRPC and passes their bytes on, so that connections and what their
// clients send are limited. gRPC's own listener has no limit, and stops listening for good when the
// process has no file descriptor left; frame_guard.h tells what else it does not limit.
#pragma once

#include <grpcpp/server_builder.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "server/base/memory_budget.h"
#include "server/connections/address_limit.h"
#include "server/metrics/metrics.h"
#include "server/rpc/http2/frame_guard.h"

namespace moeserve::server {
class TlsStore;
}

namespace moeserve::server::rpc {

struct ConnectionGateOptions {
  std::string host = "127.0.0.1";
  int port = 0;  // 0 picks a free port
  int max_connections = 4096;
  AddressLimit address_limit;
  TlsStore* tls = nullptr;  // must outlive the gate; null: no TLS
  FrameLimits frames;
  // Is charged for the calls of all connections. If it has no room, the connection that holds most
  // of it is closed.
  std::shared_ptr<MemoryBudget> memory;
};

// What the gate counts. Must outlive the gate.
struct ConnectionCounters {
  std::atomic<int64_t>& open;
  std::atomic<uint64_t>& dropped;  // closed because of what their client sent, or for its memory
  Metrics::OverLimit& over_limit;
};

class ConnectionGate {
 public:
  // Binds the address. Unavailable if the address is in use or is not a numeric address or
  // localhost. Connections wait in the system's queue until Start().
  static Result<std::unique_ptr<ConnectionGate>> Listen(const ConnectionGateOptions& options,
                                                        const ConnectionCounters& counters);
  ~ConnectionGate();  // calls Stop() and Close()
  ConnectionGate(const ConnectionGate&) = delete;
  ConnectionGate& operator=(const ConnectionGate&) = delete;

  int port() const;

  // Starts a thread that hands accepted connections to `acceptor`, which belongs to a started
  // server. If there are `max_connections`, a new connection replaces the one that has been silent
  // for longest, if that is at least for some seconds; else the new one is closed. The same is done
  // among the connections of a client that has as many as `address_limit` allows.
  void Start(std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor);

  // Stops accepting; the connections go on. Must be called before the gRPC server shuts down.
  // Idempotent.
  void Stop();

  // Waits up to `grace` until the connections, which the gRPC server has closed, have passed on
  // their last bytes, and closes the rest. Idempotent.
  void Close(std::chrono::milliseconds grace);

 private:
  class Impl;
  explicit ConnectionGate(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace moeserve::server::rpc
