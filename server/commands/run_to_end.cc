#include "server/commands/run_to_end.h"

#include <chrono>
#include <condition_variable>
#include <limits>
#include <utility>

#include "base/mutex.h"
#include "server/generation/generation.h"

namespace moeserve::server {
namespace {

// How often `cancelled` is asked while there is no output.
constexpr std::chrono::milliseconds kSignalCheckInterval{50};

struct Signal {
  Mutex mutex;
  std::condition_variable changed;
  bool set ABSL_GUARDED_BY(mutex) = false;
};

}  // namespace

absl::Status RunToEnd(std::shared_ptr<Engine> engine, std::vector<Request> requests,
                      const std::function<void(size_t, const OutputDelta&)>& on_delta,
                      const std::function<bool()>& cancelled) {
  const auto signal = std::make_shared<Signal>();
  GenerationOptions options;
  options.max_unread_bytes = std::numeric_limits<size_t>::max();
  options.wake = [signal] {
    {
      MutexLock lock(signal->mutex);
      signal->set = true;
    }
    signal->changed.notify_one();
  };
  MOESERVE_ASSIGN_OR_RETURN(
      const auto generation,
      Generation::Start(std::move(engine), std::move(requests), std::move(options)));
  while (true) {
    for (const ChoiceEvent& event : generation->Take()) {
      if (!event.error.ok()) return event.error;
      on_delta(static_cast<size_t>(event.choice), event.delta);
    }
    if (generation->finished()) return absl::OkStatus();
    if (cancelled && cancelled()) {
      generation->Cancel();
      return absl::CancelledError("interrupted");
    }
    MutexLock lock(signal->mutex);
    const auto is_set = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(signal->mutex) { return signal->set; };
    if (cancelled) {
      signal->changed.wait_for(lock, kSignalCheckInterval, is_set);
    } else {
      signal->changed.wait(lock, is_set);
    }
    signal->set = false;
  }
}

}  // namespace moeserve::server
