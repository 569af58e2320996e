// The engine requests of one API request, and the queue of their output.
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

// One event of one choice: a piece of output, or an error that ends the choice.
struct ChoiceEvent {
  int choice = 0;
  OutputDelta delta;
  absl::Status error;
};

// Queue from the engine thread to one consumer. Thread-safe.
class EventChannel {
 public:
  // The pushing thread calls `wake`, without holding locks, when the queue stops being empty; it
  // must be quick. If more than `max_bytes` wait, further output is dropped and overflowed() set.
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
  int samples = 1;  // requests per prompt, consecutive
  size_t max_unread_bytes = size_t{1} << 20;
  std::function<void()> wake = [] {};
  std::shared_ptr<Metrics>
      metrics;  // may be null; shared because the engine can outlive the generation's owner
};

// Runs the choices of an answer to their ends. Used by one thread at a time.
class Generation {
 public:
  // Submits all of `requests` or none; choice i is requests[i]. The first refusal is the error.
  static Result<std::unique_ptr<Generation>> Start(std::shared_ptr<EngineApi> engine,
                                                   std::vector<Request> requests,
                                                   GenerationOptions options);
  ~Generation();  // Cancel()

  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  // Returns the events that have arrived. An overflow is a ResourceExhausted event of choice 0;
  // the generation is then cancelled.
  std::vector<ChoiceEvent> Take();

  // Cancels every choice that has not ended; idempotent.
  void Cancel();

  bool finished() const { return unfinished_ == 0; }
  // Whether more output waits than allowed; the next Take reports it.
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
