#include "server/models/expert_watch.h"

#include <utility>

#include "base/steady_clock.h"

namespace moeserve::server {
namespace {

// While no request ends, readers of the metrics read the expert statistics from the engine at most
// once in this time, because that copies them.
constexpr absl::Duration kReadInterval = absl::Milliseconds(50);

}  // namespace

void ExpertWatch::Tick() {
  const absl::Time now = SteadyNow();
  ExpertStats stats = experts_.Snapshot();
  metrics_.Observe(stats, now);
  history_.Add(now, std::move(stats));
}

void ExpertWatch::Write(PrometheusText& text, const std::string& model, uint64_t finished,
                        bool stuck) {
  if (history_.Latest() == nullptr && !stuck) Tick();
  if (const auto stats = Recent(finished, stuck); stats != nullptr) {
    metrics_.Write(text, *stats, model);
  }
}

std::shared_ptr<const ExpertStats> ExpertWatch::Recent(uint64_t finished, bool stuck) {
  const absl::Time now = SteadyNow();
  MutexLock lock(recent_mutex_);
  // A stuck engine could hold its locks.
  if (stuck) return recent_ != nullptr ? recent_ : history_.Latest();
  if (recent_ == nullptr || finished != recent_finished_ || now - recent_time_ >= kReadInterval) {
    recent_ = std::make_shared<const ExpertStats>(experts_.Snapshot());
    recent_time_ = now;
    recent_finished_ = finished;
  }
  return recent_;
}

}  // namespace moeserve::server
