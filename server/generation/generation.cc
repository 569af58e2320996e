#include "server/generation/generation.h"

#include <chrono>
#include <new>
#include <utility>

#include "base/check.h"
#include "server/base/api_error.h"
#include "server/metrics/request_metrics.h"

namespace moeserve::server {
namespace {

// Returns the bytes that an event adds to the queue's size. The log-probabilities and routes of a
// prompt do not count, because they arrive in one piece, however fast the client reads.
size_t Weight(const ChoiceEvent& event) {
  size_t bytes = sizeof(ChoiceEvent) + event.delta.text.size();
  bytes += event.delta.tokens.size() * sizeof(TokenId);
  if (event.delta.routing && event.delta.routing->first_position > 0) {
    bytes += event.delta.routing->experts.size() * (sizeof(uint16_t) + sizeof(float)) +
             event.delta.routing->offsets.size() * sizeof(uint32_t);
  }
  for (const TokenLogprob& logprob : event.delta.logprobs) {
    bytes += sizeof(TokenLogprob) + logprob.top.size() * sizeof(logprob.top[0]);
  }
  if (event.delta.encoded) {
    const EncodeResult& encoded = *event.delta.encoded;
    bytes += (encoded.values.size() + encoded.targets.size()) * sizeof(float) +
             encoded.rows.size() * sizeof(TokenLogprob);
  }
  return bytes;
}

// Returns a status of the engine with the code that clients get, if its kind does not say it.
absl::Status WithEngineCode(const absl::Status& status) {
  return absl::IsUnavailable(status) && status != ShutDownStatus()
             ? WithApiCode(status, "engine_dead")
             : status;
}

class ChoiceSink final : public TokenSink {
 public:
  ChoiceSink(std::shared_ptr<EventChannel> channel, int choice, int prompt_tokens,
             std::shared_ptr<RequestMetrics> metrics, std::shared_ptr<Admission> admission,
             std::shared_ptr<RequestRecord> record)
      : channel_(std::move(channel)),
        choice_(choice),
        prompt_tokens_(prompt_tokens),
        metrics_(std::move(metrics)),
        admission_(std::move(admission)),
        record_(std::move(record)),
        start_(std::chrono::steady_clock::now()),
        previous_(start_) {}

  void OnDelta(OutputDelta delta) override {
    const bool finished = delta.finished;
    try {
      Deliver(std::move(delta));
    } catch (const std::bad_alloc&) {
      if (finished) EndAdmission();
      channel_->LoseEvent();
    }
  }

  void OnError(const absl::Status& status) override {
    EndAdmission();
    try {
      ChoiceEvent event;
      event.choice = choice_;
      // Submit() reports a full queue itself. A ResourceExhausted error from the running request
      // means that it has waited in the queue for too long.
      event.error = absl::IsResourceExhausted(status) ? WithApiCode(status, "queue_timeout")
                                                      : WithEngineCode(status);
      channel_->Push(std::move(event));
    } catch (const std::bad_alloc&) {
      channel_->LoseEvent();
    }
  }

 private:
  void Deliver(OutputDelta delta) {
    if (metrics_ != nullptr) Measure(delta);
    const int generated =
        delta.usage.completion_tokens - std::exchange(generated_, delta.usage.completion_tokens);
    if (record_ != nullptr) Record(delta, generated);
    if (admission_ != nullptr) {
      admission_->CountGenerated(generated);
      if (delta.finished) EndAdmission();
    }
    ChoiceEvent event;
    event.choice = choice_;
    event.delta = std::move(delta);
    channel_->Push(std::move(event));
  }

  // Before the event is pushed: a client that has read the end may send its next request.
  void EndAdmission() {
    if (admission_ != nullptr && !std::exchange(ended_, true)) admission_->ChoiceEnded();
  }

  void Record(const OutputDelta& delta, int generated) {
    const auto now = std::chrono::steady_clock::now();
    record_->Update([&](RequestFacts& facts) {
      if (!std::exchange(recorded_, true) && !facts.queue_seconds) {
        facts.queue_seconds = delta.usage.queue_seconds;
        facts.cached_tokens = delta.usage.cached_tokens;
      }
      facts.output_tokens += generated;
      if (generated > 0) {
        if (!facts.first_token) facts.first_token = now;
        facts.last_token = now;
      }
      if (delta.finished) {
        facts.finish_reasons.push_back(delta.finish_reason == FinishReason::kStop ? "stop"
                                                                                  : "length");
      }
    });
  }

  void Measure(const OutputDelta& delta) {
    const auto now = std::chrono::steady_clock::now();
    const auto seconds = [](auto duration) {
      return std::chrono::duration<double>(duration).count();
    };
    // Beam search shows no token before its end.
    if (!delta.tokens.empty() && !delta.beam) {
      if (first_) {
        metrics_->time_to_first_token.Observe(seconds(now - start_));
        first_token_ = now;
      } else {
        // A piece has several tokens if their text was held back. The time since the last piece is
        // then divided evenly among these tokens.
        const size_t count = delta.tokens.size();
        const double gap = seconds(now - previous_) / static_cast<double>(count);
        for (size_t i = 0; i < count; ++i) metrics_->inter_token_latency.Observe(gap);
      }
      first_ = false;
      previous_ = now;
    }
    if (!delta.finished) return;
    metrics_->request_duration.Observe(seconds(now - start_));
    metrics_->request_prompt_tokens.Observe(prompt_tokens_);
    metrics_->request_generation_tokens.Observe(delta.usage.completion_tokens);
    if (delta.usage.completion_tokens > 1 && !delta.beam) {
      metrics_->request_time_per_output_token.Observe(seconds(now - first_token_) /
                                                      (delta.usage.completion_tokens - 1));
    }
  }

  const std::shared_ptr<EventChannel> channel_;
  const int choice_;
  const int prompt_tokens_;
  const std::shared_ptr<RequestMetrics> metrics_;
  const std::shared_ptr<Admission> admission_;
  const std::shared_ptr<RequestRecord> record_;
  int generated_ = 0;      // tokens up to the last piece
  bool recorded_ = false;  // whether record_ has seen a piece
  bool ended_ = false;
  const std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point previous_;
  std::chrono::steady_clock::time_point first_token_;
  bool first_ = true;
};

}  // namespace

size_t CountValues(const ChoiceEvent& event) {
  size_t values = event.delta.tokens.size() + event.delta.prompt_logprobs.size();
  for (const TokenLogprob& logprob : event.delta.logprobs) values += logprob.top.size();
  for (const std::optional<TokenLogprob>& logprob : event.delta.prompt_logprobs) {
    if (logprob) values += logprob->top.size();
  }
  for (const auto* record : {&event.delta.routing, &event.delta.source_routing}) {
    if (*record) values += (*record)->experts.size();
  }
  return values;
}

EventChannel::EventChannel(size_t max_bytes, std::shared_ptr<MemoryBudget> memory,
                           std::function<void()> wake)
    : max_bytes_(max_bytes), wake_(std::move(wake)), charge_(std::move(memory)) {}

void EventChannel::Push(ChoiceEvent event) {
  bool was_empty;
  {
    MutexLock lock(mutex_);
    if (event_lost_ || !overflow_.ok()) return;
    was_empty = events_.empty();
    const size_t weight = Weight(event);
    if (!was_empty && bytes_ + weight > max_bytes_) {
      overflow_ = MakeError(absl::StatusCode::kResourceExhausted, "slow_reader",
                            "the client reads its answer too slowly");
    } else {
      overflow_ = charge_.Add(weight, ChargeFor::kRunningRequest);
    }
    if (!overflow_.ok()) {
      was_empty = true;  // so that the consumer is woken, although the queue is not empty
    } else {
      bytes_ += weight;
      values_ += CountValues(event);
      events_.push_back(std::move(event));
    }
  }
  if (was_empty) wake_();
}

void EventChannel::End(const absl::Status& error) {
  {
    MutexLock lock(mutex_);
    if (!overflow_.ok()) return;
    overflow_ = error;
  }
  wake_();
}

void EventChannel::LoseEvent() {
  {
    MutexLock lock(mutex_);
    event_lost_ = true;
  }
  wake_();
}

std::vector<ChoiceEvent> EventChannel::Take() {
  MutexLock lock(mutex_);
  bytes_ = 0;
  values_ = 0;
  charge_.Release();
  return std::exchange(events_, {});
}

size_t EventChannel::waiting_values() const {
  MutexLock lock(mutex_);
  return values_;
}

bool EventChannel::overflowed() const {
  MutexLock lock(mutex_);
  return event_lost_ || !overflow_.ok();
}

absl::Status EventChannel::overflow() const {
  MutexLock lock(mutex_);
  if (overflow_.ok() && event_lost_) {
    return MakeError(absl::StatusCode::kResourceExhausted, "out_of_memory",
                     "the server had not enough memory to deliver the answer");
  }
  return overflow_;
}

Generation::Generation(std::shared_ptr<Engine> engine, GenerationOptions options)
    : engine_(std::move(engine)),
      channel_(std::make_shared<EventChannel>(options.max_unread_bytes, std::move(options.memory),
                                              std::move(options.wake))),
      live_(std::move(options.live)),
      macs_(std::move(options.macs)),
      charge_(std::move(options.charge)),
      admission_(std::move(options.admission)),
      keeps_partial_(options.keeps_partial) {
  if (live_ != nullptr) live_->Add(channel_);
}

Result<std::unique_ptr<Generation>> Generation::Start(std::shared_ptr<Engine> engine,
                                                      std::vector<Request> requests,
                                                      GenerationOptions options) {
  const std::shared_ptr<RequestMetrics> metrics = options.metrics;
  const std::shared_ptr<RequestRecord> record = options.record;
  const auto samples = static_cast<size_t>(options.samples);
  MOESERVE_CHECK(requests.size() % samples == 0, "every prompt has all its samples");
  std::unique_ptr<Generation> generation(new Generation(std::move(engine), std::move(options)));
  // So that the engine has no request that the destructor does not know.
  generation->sinks_.reserve(requests.size());
  generation->ended_.reserve(requests.size());
  for (size_t begin = 0; begin < requests.size(); begin += samples) {
    std::vector<Request> group;
    std::vector<std::shared_ptr<TokenSink>> sinks;
    const int max_tokens = requests[begin].sampling.max_tokens;
    for (size_t i = begin; i < begin + samples; ++i) {
      sinks.push_back(std::make_shared<ChoiceSink>(generation->channel_, static_cast<int>(i),
                                                   static_cast<int>(requests[i].prompt.size()),
                                                   metrics, generation->admission_, record));
      group.push_back(std::move(requests[i]));
    }
    // If Submit() refuses this group, the destructor cancels the groups that it accepted before.
    if (absl::Status status = generation->engine_->Submit(std::move(group), sinks); !status.ok()) {
      if (generation->admission_ != nullptr) generation->admission_->Refuse();
      return WithEngineCode(status);
    }
    for (std::shared_ptr<TokenSink>& sink : sinks) {
      generation->sinks_.push_back(std::move(sink));
      generation->ended_.push_back(false);
      ++generation->unfinished_;
    }
    if (metrics != nullptr) {
      metrics->request_max_tokens.Observe(max_tokens);
      metrics->request_n.Observe(static_cast<double>(samples));
    }
  }
  return generation;
}

Generation::~Generation() {
  if (live_ != nullptr) live_->Remove(channel_.get());
  Cancel();
}

std::vector<ChoiceEvent> Generation::Take() {
  std::vector<ChoiceEvent> events = channel_->Take();
  for (ChoiceEvent& event : events) {
    has_tokens_ |= !event.delta.tokens.empty();
    if (keeps_partial_ && has_tokens_ && absl::IsDeadlineExceeded(event.error)) {
      event.error = absl::OkStatus();
      event.delta.finished = event.delta.timed_out = true;
      event.delta.finish_reason = FinishReason::kLength;
    }
    if (event.delta.finished && macs_ != nullptr) {
      event.delta.usage.macs = macs_->Of(event.delta.usage);
    }
    if ((event.delta.finished || !event.error.ok()) && !ended_[event.choice]) {
      ended_[event.choice] = true;
      --unfinished_;
    }
  }
  const bool complete = unfinished_ == 0 && !cancelled_;
  if (!overflow_reported_ && !complete && channel_->overflowed()) {
    overflow_reported_ = true;
    Cancel();
    ChoiceEvent event;
    event.error = channel_->overflow();
    events.push_back(std::move(event));
  }
  return events;
}

void Generation::Cancel() {
  for (size_t i = 0; i < sinks_.size(); ++i) {
    if (ended_[i]) continue;
    ended_[i] = true;
    cancelled_ = true;
    --unfinished_;
    engine_->Cancel(sinks_[i].get());
  }
  if (admission_ != nullptr) admission_->End();
}

}  // namespace moeserve::server
