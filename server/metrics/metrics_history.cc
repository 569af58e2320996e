#include "server/metrics/metrics_history.h"

#include <algorithm>
#include <utility>

namespace moeserve::server {
namespace {

// The clock that calls Add() once a second is not exact. Without this, every third call might be
// kept in place of every second one.
constexpr absl::Duration kSlack = absl::Milliseconds(500);

void AddCounts(const std::vector<uint64_t>& counts, std::vector<uint64_t>& sums) {
  sums.resize(std::max(sums.size(), counts.size()));
  for (size_t i = 0; i < counts.size(); ++i) sums[i] += counts[i];
}

OrderedJson ReadingJson(const MetricsReading& reading, double age_seconds) {
  const double total = static_cast<double>(reading.kv_blocks_total);
  const double used = static_cast<double>(reading.kv_blocks_used);
  OrderedJson out;
  out["age_seconds"] = age_seconds;
  out["requests_running"] = reading.requests_running;
  out["requests_waiting"] = reading.requests_waiting;
  out["kv_cache_usage_ratio"] = total > 0 ? used / total : 0.0;
  out["requests_finished_total"] = reading.requests_finished;
  out["generation_tokens_total"] = reading.generation_tokens;
  out["prompt_tokens_total"] = reading.prompt_tokens;
  out["time_to_first_token_seconds"] = reading.time_to_first_token;
  out["inter_token_latency_seconds"] = reading.inter_token_latency;
  out["request_duration_seconds"] = reading.request_duration;
  return out;
}

}  // namespace

void MetricsReading::Add(const EngineStats& stats, const RequestMetrics& requests) {
  requests_running += stats.running;
  requests_waiting += stats.waiting;
  kv_blocks_used += stats.kv_blocks_used;
  kv_blocks_total += stats.kv_blocks_total;
  requests_finished += stats.finished();
  generation_tokens += stats.generation_tokens;
  prompt_tokens += stats.prompt_tokens;
  AddCounts(requests.time_to_first_token.Read().counts, time_to_first_token);
  AddCounts(requests.inter_token_latency.Read().counts, inter_token_latency);
  AddCounts(requests.request_duration.Read().counts, request_duration);
}

void MetricsReading::Add(const MetricsReading& other) {
  requests_running += other.requests_running;
  requests_waiting += other.requests_waiting;
  kv_blocks_used += other.kv_blocks_used;
  kv_blocks_total += other.kv_blocks_total;
  requests_finished += other.requests_finished;
  generation_tokens += other.generation_tokens;
  prompt_tokens += other.prompt_tokens;
  AddCounts(other.time_to_first_token, time_to_first_token);
  AddCounts(other.inter_token_latency, inter_token_latency);
  AddCounts(other.request_duration, request_duration);
}

bool MetricsHistory::DueLocked(absl::Time now) const {
  return entries_.empty() || now - entries_.back().time >= kInterval - kSlack;
}

bool MetricsHistory::Due(absl::Time now) const {
  MutexLock lock(mutex_);
  return DueLocked(now);
}

void MetricsHistory::Add(absl::Time now, std::vector<ModelReading> readings) {
  MutexLock lock(mutex_);
  if (!DueLocked(now)) return;
  entries_.push_back({now, std::move(readings)});
  while (now - entries_.front().time > kSpan) entries_.pop_front();
}

OrderedJson MetricsHistory::ToJson(absl::Time now, std::string_view model) const {
  // All models have the same bounds.
  static const RequestMetrics* const kBounds = new RequestMetrics();
  OrderedJson out;
  out["interval_seconds"] = absl::ToDoubleSeconds(kInterval);
  out["bounds"] = {{"time_to_first_token_seconds", kBounds->time_to_first_token.bounds()},
                   {"inter_token_latency_seconds", kBounds->inter_token_latency.bounds()},
                   {"request_duration_seconds", kBounds->request_duration.bounds()}};
  OrderedJson readings = OrderedJson::array();
  MutexLock lock(mutex_);
  for (const auto& [time, models] : entries_) {
    MetricsReading sum;
    bool known = model.empty();
    for (const auto& [name, reading] : models) {
      if (!model.empty() && name != model) continue;
      sum.Add(reading);
      known = true;
    }
    if (!known) continue;
    readings.push_back(ReadingJson(sum, std::max(0.0, absl::ToDoubleSeconds(now - time))));
  }
  out["readings"] = std::move(readings);
  return out;
}

}  // namespace moeserve::server
