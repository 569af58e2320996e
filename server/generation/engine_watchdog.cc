#include "server/generation/engine_watchdog.h"

#include <algorithm>
#include <utility>

#include "base/steady_clock.h"
#include "server/base/stop_wait.h"

namespace moeserve::server {

EngineWatchdog::EngineWatchdog(std::shared_ptr<const Engine> engine, absl::Duration limit,
                               std::function<void(bool stuck)> changed)
    : engine_(std::move(engine)),
      limit_(limit),
      changed_(std::move(changed)),
      thread_([this](const std::stop_token& stop) { Watch(stop); }) {}

void EngineWatchdog::Watch(const std::stop_token& stop) {
  const absl::Duration period = std::min(limit_ / 10, absl::Seconds(1));
  EngineProgress seen;
  absl::Duration busy;  // how long the round that was seen last has been observed to run
  bool stuck = false;
  absl::Time last = SteadyNow();
  while (WaitUnlessStopped(stop, absl::ToChronoNanoseconds(period))) {
    const absl::Time now = SteadyNow();
    const EngineProgress progress = engine_->Progress();
    if (progress.idle || progress.rounds != seen.rounds) {
      busy = absl::ZeroDuration();
    } else {
      // If this thread did not run for longer, neither did the engine.
      busy += std::min(now - last, 3 * period);
    }
    seen = progress;
    last = now;
    if ((busy > limit_) != stuck) {
      stuck = !stuck;
      changed_(stuck);
    }
  }
}

}  // namespace moeserve::server
