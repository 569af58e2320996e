#include "server/metrics/metrics_history.h"

#include <algorithm>
#include <utility>

namespace moeserve::server {
namespace {

// The clock that calls Add() once a second is not exact. Without this, every third call might be
// kept in place of every second one.
constexpr absl::Duration kSlack = absl::Milliseconds(500);

void AddCounts(const Histogram& histogram, std::vector<uint64_t>& sums) {
  const std::vector<uint64_t> counts = histogram.Read().counts;
  sums.resize(std::max(sums.size(), counts.size()));
  for (size_t i = 0; i < counts.size(); ++i) sums[i] += counts[i];
}

}  // namespace

void MetricsReading::Add(const EngineStats& stats, const RequestMetrics& requests) {
  requests_running += stats.running;
  requests_waiting += stats.waiting;
  kv_blocks_used += stats.kv_blocks_used;
  kv_blocks_total += stats.kv_blocks_total;
  requests_finished +=
      stats.finished_stop + stats.finished_length + stats.finished_abort + stats.finished_error;
  generation_tokens += stats.generation_tokens;
  prompt_tokens += stats.prompt_tokens;
  AddCounts(requests.time_to_first_token, time_to_first_token);
  AddCounts(requests.inter_token_latency, inter_token_latency);
  AddCounts(requests.request_duration, request_duration);
}

bool MetricsHistory::DueLocked(absl::Time now) const {
  return entries_.empty() || now - entries_.back().time >= kInterval - kSlack;
}

bool MetricsHistory::Due(absl::Time now) const {
  std::lock_guard lock(mutex_);
  return DueLocked(now);
}

void MetricsHistory::Add(absl::Time now, MetricsReading reading) {
  std::lock_guard lock(mutex_);
  if (!DueLocked(now)) return;
  entries_.push_back({now, std::move(reading)});
  while (now - entries_.front().time > kSpan) entries_.pop_front();
}

nlohmann::ordered_json MetricsHistory::ToJson(absl::Time now) const {
  using OrderedJson = nlohmann::ordered_json;
  // All models have the same bounds.
  static const RequestMetrics* const kBounds = new RequestMetrics();
  OrderedJson out;
  out["interval_seconds"] = absl::ToDoubleSeconds(kInterval);
  out["bounds"] = {{"time_to_first_token_seconds", kBounds->time_to_first_token.bounds()},
                   {"inter_token_latency_seconds", kBounds->inter_token_latency.bounds()},
                   {"request_duration_seconds", kBounds->request_duration.bounds()}};
  OrderedJson readings = OrderedJson::array();
  std::lock_guard lock(mutex_);
  for (const auto& [time, reading] : entries_) {
    const double total = static_cast<double>(reading.kv_blocks_total);
    const double used = static_cast<double>(reading.kv_blocks_used);
    OrderedJson one;
    one["age_seconds"] = std::max(0.0, absl::ToDoubleSeconds(now - time));
    one["requests_running"] = reading.requests_running;
    one["requests_waiting"] = reading.requests_waiting;
    one["kv_cache_usage_ratio"] = total > 0 ? used / total : 0.0;
    one["requests_finished_total"] = reading.requests_finished;
    one["generation_tokens_total"] = reading.generation_tokens;
    one["prompt_tokens_total"] = reading.prompt_tokens;
    one["time_to_first_token_seconds"] = reading.time_to_first_token;
    one["inter_token_latency_seconds"] = reading.inter_token_latency;
    one["request_duration_seconds"] = reading.request_duration;
    readings.push_back(std::move(one));
  }
  out["readings"] = std::move(readings);
  return out;
}

}  // namespace moeserve::server
