// The TLS contexts of new connections.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <memory>
#include <thread>

#include "base/mutex.h"
#include "base/status.h"
#include "server/base/file_version.h"
#include "server/metrics/prometheus.h"
#include "server/tls/client_stream.h"
#include "server/tls/tls_context.h"

namespace moeserve::server {

// Checks once a second, on its own thread, whether the files have changed, and reads them when they
// were the same at two checks. If they cannot be used, the contexts before stay in use, and an
// error is logged and counted. Thread-safe.
class TlsStore {
 public:
  // Errors: those of LoadTls().
  static Result<std::unique_ptr<TlsStore>> Start(const TlsOptions& options);

  TlsStore(const TlsStore&) = delete;
  TlsStore& operator=(const TlsStore&) = delete;

  ConnectionTls http() const;
  ConnectionTls grpc() const;
  // Is charged for all connections. Its size is no limit: the listeners limit the connections.
  MemoryBudget& memory() const { return *memory_; }
  // Returns whether clients must have a certificate.
  bool requires_client() const { return !options_.client_ca.empty(); }

  // Makes the thread read the files now, changed or not.
  void RequestReload();

  void CountFailedHandshake(bool grpc) { ++(grpc ? failed_grpc_ : failed_http_); }
  void WriteMetrics(PrometheusText& text) const;

 private:
  using Versions = std::array<FileVersion, 3>;

  TlsStore(TlsOptions options, TlsContexts contexts, const Versions& loaded);
  static Versions Look(const TlsOptions& options);
  void Run(const std::stop_token& stop);
  void Reload();

  const TlsOptions options_;
  mutable Mutex mutex_;
  const std::shared_ptr<MemoryBudget> memory_ =
      std::make_shared<MemoryBudget>(std::numeric_limits<size_t>::max());
  TlsContexts contexts_ ABSL_GUARDED_BY(mutex_);
  bool requested_ ABSL_GUARDED_BY(mutex_) = false;
  std::condition_variable_any changed_;
  Versions loaded_;
  std::atomic<uint64_t> reloads_{0};
  std::atomic<uint64_t> failed_reloads_{0};
  std::atomic<uint64_t> failed_http_{0};
  std::atomic<uint64_t> failed_grpc_{0};
  std::jthread thread_;  // last, because it uses the other members
};

}  // namespace moeserve::server
