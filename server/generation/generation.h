// The engine requests that answer one API request, and the queue their output waits in.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/status.h"
#include "engine/request.h"
#include "server/generation/engine_api.h"

namespace moeserve::server {

class Metrics;

// One event of one choice: a piece of output, or (error not OK) the end of it.
struct ChoiceEvent {
  int choice = 0;
  OutputDelta delta;
  absl::Status error;
};

// Between the engine thread, which pushes, and one consumer, which takes. Thread-safe.
class EventChannel {
 public:
  // `wake` is called without locks, from the pushing thread, when events arrive after a Take; it
  // must be quick. Output beyond `max_bytes` that nobody took sets overflowed() and is dropped.
  EventChannel(size_t max_bytes, std::function<void()> wake);

  void Push(ChoiceEvent event);
  std::vector<ChoiceEvent> Take();
  bool overflowed() const;

 private:
  const size_t max_bytes_;
  const std::function<void()> wake_;
  mutable std::mutex mutex_;
  std::vector<ChoiceEvent> events_;
  size_t bytes_ = 0;
  bool overflowed_ = false;
};

struct GenerationOptions {
  int samples = 1;  // so many consecutive requests are samples of one prompt
  size_t max_unread_bytes = size_t{1} << 20;
  std::function<void()> wake = [] {};
  std::shared_ptr<Metrics>
      metrics;  // may be null; the engine can still report after the rest is gone
};

// Runs choices to their end. One thread at a time uses it.
class Generation {
 public:
  // Submits all of `requests` or none; choice i is requests[i]. The first refusal is the error.
  static Result<std::unique_ptr<Generation>> Start(std::shared_ptr<EngineApi> engine,
                                                   std::vector<Request> requests,
                                                   GenerationOptions options);
  ~Generation();  // Cancel()

  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  // Everything that has arrived. An overflow appears as an error event of ResourceExhausted for
  // choice 0, after which the generation is cancelled.
  std::vector<ChoiceEvent> Take();

  // Asks the engine to stop every choice that has not ended; idempotent.
  void Cancel();

  bool finished() const { return unfinished_ == 0; }
  // More output waits than allowed; the next Take reports it.
  bool overflowed() const { return channel_->overflowed(); }

 private:
  Generation(std::shared_ptr<EngineApi> engine, GenerationOptions options);

  const std::shared_ptr<EngineApi> engine_;
  const std::shared_ptr<EventChannel> channel_;
  std::vector<std::string> ids_;  // by choice
  std::vector<bool> ended_;       // by choice
  size_t unfinished_ = 0;
  bool overflow_reported_ = false;
};

}  // namespace moeserve::server
