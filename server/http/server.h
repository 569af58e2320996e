// The HTTP listener: one thread for all sockets, a small pool for large bodies.
#pragma once

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "base/status.h"
#include "server/base/limits.h"
#include "server/http/router.h"
#include "server/metrics/metrics.h"

namespace moeserve::server::http {

struct HttpServerOptions {
  std::string host = "127.0.0.1";
  int port = 8080;  // 0: any free one
  HttpLimits limits;
};

class HttpServer {
 public:
  // Binds and starts. `router` and `metrics` outlive the server. Unavailable: the address is taken.
  // InvalidArgument: it is not a numeric address.
  static Result<std::unique_ptr<HttpServer>> Start(const HttpServerOptions& options,
                                                   const Router& router, Metrics& metrics);
  ~HttpServer();  // Stop(zero)

  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  std::string address() const;  // "127.0.0.1:8080", with the real port
  int port() const;

  // Blocks until no handler runs outside the io thread, or until `deadline`. Not after Stop().
  void WaitForHandlers(absl::Time deadline);

  // Stops accepting, closes idle connections, waits up to `grace` for the others and then closes
  // them. Idempotent.
  void Stop(absl::Duration grace);

 private:
  class Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moeserve::server::http
