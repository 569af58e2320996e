// The TLS contexts of new connections.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "server/base/file_watcher.h"
#include "server/metrics/prometheus.h"
#include "server/tls/client_stream.h"
#include "server/tls/tls_context.h"

namespace moeserve::server {

// Watches the files of certificates and keys. If changed ones cannot be used, the contexts before
// stay in use, and an error is logged and counted. Thread-safe.
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

  // Makes a thread read the files now, changed or not.
  void RequestReload() { watcher_.RequestReload(); }

  void CountFailedHandshake(bool grpc) { ++(grpc ? failed_grpc_ : failed_http_); }
  void WriteMetrics(PrometheusText& text) const;

 private:
  TlsStore(TlsOptions options, TlsContexts contexts, std::vector<FileVersion> loaded);
  absl::Status Reload();
  void CountReload(const absl::Status& status);

  const TlsOptions options_;
  mutable Mutex mutex_;
  const std::shared_ptr<MemoryBudget> memory_ =
      std::make_shared<MemoryBudget>(std::numeric_limits<size_t>::max());
  TlsContexts contexts_ ABSL_GUARDED_BY(mutex_);
  std::atomic<uint64_t> reloads_{0};
  std::atomic<uint64_t> failed_reloads_{0};
  std::atomic<uint64_t> failed_http_{0};
  std::atomic<uint64_t> failed_grpc_{0};
  FileWatcher watcher_;  // last, because its thread uses the other members
};

}  // namespace moeserve::server
