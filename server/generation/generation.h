// The engine requests of one API request, and the queue of their output.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "base/status.h"
#include "engine/engine.h"
#include "engine/request.h"
#include "engine/statistics/measures/macs.h"
#include "server/base/memory_budget.h"
#include "server/generation/live_generations.h"
#include "server/keys/admission.h"
#include "server/tracing/request_record.h"

namespace moeserve::server {

struct RequestMetrics;

// One event of one choice: a piece of output, or an error that ends the choice.
struct ChoiceEvent {
  int choice = 0;
  OutputDelta delta;
  absl::Status error;
};

// Returns the number of an event's values: tokens, log-probabilities and routes. The time that
// writing the event takes is proportional to it.
size_t CountValues(const ChoiceEvent& event);

// A queue of events from the engine thread to one consumer. Thread-safe.
class EventChannel {
 public:
  // When an empty queue gets an event or a queue overflows, the pushing thread calls `wake`,
  // without holding locks; `wake` must return quickly and must not throw. The queue overflows if an
  // event would raise its size above `max_bytes`, unless the queue is empty: this event and all
  // later ones are dropped, and overflowed() becomes true. The same happens if `memory`, which may
  // be null, has no room for the event.
  EventChannel(size_t max_bytes, std::shared_ptr<MemoryBudget> memory, std::function<void()> wake);

  // May throw std::bad_alloc; the queue then lacks the event, so that LoseEvent() must be called.
  void Push(ChoiceEvent event);
  std::vector<ChoiceEvent> Take();
  // Returns the sum of CountValues() of the events that wait.
  size_t waiting_values() const;
  // Ends the queue with `error`, as if it had overflowed; no effect on a queue that has ended.
  void End(const absl::Status& error);
  // Ends the queue because there was no memory for an event. Never throws.
  void LoseEvent();
  bool overflowed() const;
  // Returns the error that ends an overflowed generation.
  absl::Status overflow() const;

 private:
  const size_t max_bytes_;
  const std::function<void()> wake_;
  mutable Mutex mutex_;
  std::vector<ChoiceEvent> events_ ABSL_GUARDED_BY(mutex_);
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t values_ ABSL_GUARDED_BY(mutex_) = 0;
  MemoryCharge charge_ ABSL_GUARDED_BY(mutex_);  // of the events
  absl::Status overflow_ ABSL_GUARDED_BY(mutex_);
  bool event_lost_ ABSL_GUARDED_BY(mutex_) = false;
};

struct GenerationOptions {
  int samples = 1;  // requests per prompt; those of one prompt must be adjacent
  // Whether a choice without tokens, in an answer that has some, ends like the others when the time
  // is up, and not with an error.
  bool keeps_partial = true;
  // Limit on the output that waits for Take(), in bytes.
  size_t max_unread_bytes = size_t{1} << 20;
  // What the request holds from its admission to its end, and the budget for the output that waits.
  MemoryCharge charge;
  std::shared_ptr<MemoryBudget> memory;  // null: no limit
  // Ends the generation if the engine cannot; null: nobody does.
  std::shared_ptr<LiveGenerations> live;
  // Called on the engine thread, or by LiveGenerations::Close(), when Take() has something to
  // return after it had nothing, or when too much output waits. Must return quickly and must not
  // throw.
  std::function<void()> wake = [] {};
  // May be null. Shared, because the engine can outlive the object that owns the Generation.
  std::shared_ptr<RequestMetrics> metrics;
  std::shared_ptr<Admission> admission;     // by the request's key; null without keys
  std::shared_ptr<RequestRecord> record;    // learns what the request does; may be null
  std::shared_ptr<const RequestMacs> macs;  // fills Usage::macs; may be null
};

// Runs all choices of one response to their ends. Must be used by one thread at a time.
class Generation {
 public:
  // Submits all of `requests` or none; requests[i] generates choice i. Returns the first refusal by
  // the engine as the error.
  static Result<std::unique_ptr<Generation>> Start(std::shared_ptr<Engine> engine,
                                                   std::vector<Request> requests,
                                                   GenerationOptions options);
  ~Generation();  // calls Cancel()

  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  // Returns the events that have arrived. If the queue has overflowed or was ended before the last
  // event, cancels the generation and returns an event with the queue's error for choice 0.
  std::vector<ChoiceEvent> Take();

  // Cancels every choice that has not ended. Idempotent.
  void Cancel();

  // Returns the sum of CountValues() of the events that the next Take() returns.
  size_t waiting_values() const { return channel_->waiting_values(); }

  bool finished() const { return unfinished_ == 0; }
  // Returns whether more output was waiting than allowed. The next Take() reports that as an error.
  bool overflowed() const { return channel_->overflowed(); }

 private:
  Generation(std::shared_ptr<Engine> engine, GenerationOptions options);

  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<EventChannel> channel_;
  const std::shared_ptr<LiveGenerations> live_;
  const std::shared_ptr<const RequestMacs> macs_;  // may be null
  const MemoryCharge charge_;
  const std::shared_ptr<Admission> admission_;     // may be null
  std::vector<std::shared_ptr<TokenSink>> sinks_;  // per choice
  std::vector<bool> ended_;                        // per choice
  size_t unfinished_ = 0;
  bool cancelled_ = false;  // whether Cancel() ended a choice
  const bool keeps_partial_;
  bool has_tokens_ = false;  // whether any choice has got tokens
  bool overflow_reported_ = false;
};

}  // namespace moeserve::server
