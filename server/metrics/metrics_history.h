// The values of the last minutes that the page's charts of requests show.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "engine/engine.h"
#include "server/base/json.h"
#include "server/metrics/request_metrics.h"

namespace moeserve::server {

// The counters and gauges of one moment, of one model or summed over several. The members have the
// meaning of the families of the same names; each histogram has one count per bound and one above
// the last.
struct MetricsReading {
  int requests_running = 0;
  int requests_waiting = 0;
  int64_t kv_blocks_used = 0;
  int64_t kv_blocks_total = 0;
  uint64_t requests_finished = 0;
  uint64_t generation_tokens = 0;
  uint64_t prompt_tokens = 0;
  std::vector<uint64_t> time_to_first_token;
  std::vector<uint64_t> inter_token_latency;
  std::vector<uint64_t> request_duration;

  // Adds the values of one model.
  void Add(const EngineStats& stats, const RequestMetrics& requests);
  void Add(const MetricsReading& other);
};

struct ModelReading {
  std::string model;
  MetricsReading reading;
};

// Keeps the readings of all models every two seconds, of the last five minutes.
// Thread-safe.
class MetricsHistory {
 public:
  static constexpr absl::Duration kInterval = absl::Seconds(2);
  static constexpr absl::Duration kSpan = absl::Minutes(5);

  // Returns whether Add() would keep a reading at `now`, so that the caller need not make one.
  bool Due(absl::Time now) const;
  // Keeps the readings of all models if they are due, and drops those older than kSpan. `now` is on
  // the steady clock.
  void Add(absl::Time now, std::vector<ModelReading> readings);

  // Returns the body of GET /v1/metrics/history: the readings, the oldest first, with their ages.
  // If `model` is empty, they are summed over the models; else they are those of that model, and
  // times at which it was not known are left out.
  OrderedJson ToJson(absl::Time now, std::string_view model = {}) const;

 private:
  struct Entry {
    absl::Time time;
    std::vector<ModelReading> readings;
  };

  bool DueLocked(absl::Time now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moeserve::server
