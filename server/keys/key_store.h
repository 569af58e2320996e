// The API keys in force. The key file can replace them while the server runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/status.h"
#include "server/keys/api_key.h"
#include "server/metrics/prometheus.h"

namespace moeserve::server {

// Thread-safe.
class KeyStore {
 public:
  // Without keys, every request is authorized.
  explicit KeyStore(std::vector<KeySpec> keys);

  bool required() const { return required_; }

  // Checks the value of an `authorization` header ("Bearer <key>") and returns its key; null if the
  // server has no keys. Unauthenticated for an unknown or expired key. The run time depends neither
  // on how much of a wrong key is correct nor on which key matches.
  Result<std::shared_ptr<const ApiKey>> Authenticate(std::string_view authorization,
                                                     absl::Time now = absl::Now()) const;

  // Puts `keys`, at least one, in force. Requests that are running keep their key. A key that was
  // in force before, by its name or, without a name, by its digest, keeps its usage.
  void Replace(std::vector<KeySpec> keys);

  void CountReload(bool ok) { ++(ok ? reloads_ok_ : reloads_failed_); }

  // Writes the families key_*, nothing without keys.
  void WriteMetrics(PrometheusText& text) const;

 private:
  using Table = std::vector<std::shared_ptr<const ApiKey>>;

  std::shared_ptr<const Table> table() const;
  std::shared_ptr<const Table> MakeTable(std::vector<KeySpec> keys, const Table& before)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(replace_mutex_);

  const bool required_;
  uint64_t next_serial_ ABSL_GUARDED_BY(replace_mutex_) = 1;
  uint64_t next_text_name_ ABSL_GUARDED_BY(replace_mutex_) = 1;
  std::atomic<uint64_t> reloads_ok_{0};
  std::atomic<uint64_t> reloads_failed_{0};
  mutable std::atomic<uint64_t> unknown_{0};
  Mutex replace_mutex_;
  mutable Mutex mutex_;
  std::shared_ptr<const Table> table_ ABSL_GUARDED_BY(mutex_);
};

// Returns the specifications of keys with all rights, as a text file declares them.
std::vector<KeySpec> PlainKeys(const std::vector<std::string>& keys);

}  // namespace moeserve::server
