// The HTTP listener: one thread for all sockets, and a small thread pool for requests with large
// bodies and for slow handlers.
#pragma once

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "base/status.h"
#include "server/base/limits.h"
#include "server/base/memory_budget.h"
#include "server/connections/address_limit.h"
#include "server/http/checks/cors.h"
#include "server/http/checks/host_check.h"
#include "server/http/router.h"
#include "server/metrics/metrics.h"
#include "server/tracing/request_observer.h"

namespace moeserve::server {
class TlsStore;
}

namespace moeserve::server::http {

struct HttpServerOptions {
  std::string host = "127.0.0.1";
  int port = 8080;  // 0 picks a free port
  HttpLimits limits;
  // Logs requests and exports their spans; null: one that logs.
  std::shared_ptr<RequestObserver> observer;
  AddressLimit address_limit;
  TlsStore* tls = nullptr;  // must outlive the server; null: no TLS
  HostCheck hosts;          // does not apply to routes with Access::Operator()
  Cors cors;
};

class HttpServer {
 public:
  // Binds the address and starts the threads. `router` and `metrics` must outlive the server.
  // Bodies and answers are charged to `memory`; null: no limit. Unavailable if the address is in
  // use; InvalidArgument if `host` is not a numeric address.
  static Result<std::unique_ptr<HttpServer>> Start(const HttpServerOptions& options,
                                                   const Router& router, Metrics& metrics,
                                                   std::shared_ptr<MemoryBudget> memory = nullptr);
  ~HttpServer();  // calls Stop() without a grace period

  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  std::string address() const;  // such as "127.0.0.1:8080", with the actual port
  int port() const;

  // Blocks until no handler runs on the work pool, or until `deadline`, a SteadyNow() time. Must
  // not be called after Stop().
  void WaitForHandlers(absl::Time deadline);

  // From now on, every response says that its connection will be closed. May be called by any
  // thread.
  void BeginDrain();

  // Stops accepting connections, closes idle connections, waits up to `grace` for the answers that
  // are being made or read, and at most 5 s of it for requests that are still arriving, and then
  // closes the connections. Idempotent.
  void Stop(absl::Duration grace);

 private:
  class Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moeserve::server::http
