#include "server/bench/load_test/engine_target.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <utility>

#include "base/error_text.h"
#include "base/mutex.h"
#include "base/steady_clock.h"
#include "server/base/status_conversion.h"

namespace moeserve::server {
namespace {

using Clock = std::chrono::steady_clock;

std::string RequestId(int64_t index) {
  return Concat("load", index < 0 ? "-w" : "-", std::abs(index));
}

// Stores the same error names as for the HTTP target, so that results of both targets are
// comparable.
void SetError(const absl::Status& status, RequestResult& result) {
  const HttpError error = ToHttpError(status);
  result.answered = true;
  result.refused = result.arrivals.empty();
  result.error =
      result.refused ? Concat(error.status, ' ', error.code) : Concat("stream error ", error.code);
  if (error.retry_after_seconds > 0) result.retry_after = error.retry_after_seconds;
}

}  // namespace

// A queue of results, from the engine thread to the thread that calls Wait().
class EngineTarget::Inbox {
 public:
  double Now() const { return std::chrono::duration<double>(Clock::now() - epoch_).count(); }

  void Push(RequestResult result) {
    {
      MutexLock lock(mutex_);
      results_.push_back(std::move(result));
    }
    changed_.notify_one();
  }

  std::vector<RequestResult> Wait(double until) {
    MutexLock lock(mutex_);
    const auto wait = std::chrono::duration<double>(std::clamp(until - Now(), 0.0, 3600.0));
    changed_.wait_for(lock, wait,
                      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !results_.empty(); });
    return std::exchange(results_, {});
  }

  std::atomic<int64_t> strays = 0;
  std::atomic<bool> cut_off = false;

 private:
  const Clock::time_point epoch_ = Clock::now();
  Mutex mutex_;
  std::condition_variable changed_;
  std::vector<RequestResult> results_ ABSL_GUARDED_BY(mutex_);
};

class EngineTarget::Sink final : public TokenSink {
 public:
  Sink(std::shared_ptr<Inbox> inbox, RequestResult result, int output_tokens)
      : inbox_(std::move(inbox)), result_(std::move(result)) {
    result_.arrivals.reserve(static_cast<size_t>(output_tokens));
  }

  void OnDelta(OutputDelta delta) override {
    if (ended_) {
      ++inbox_->strays;
      return;
    }
    const double now = inbox_->Now();
    if (!delta.tokens.empty()) result_.arrivals.push_back(now);
    result_.prompt_tokens = delta.usage.prompt_tokens;
    result_.output_tokens = delta.usage.completion_tokens;
    if (!delta.finished) return;
    result_.answered = true;
    End(now);
  }

  void OnError(const absl::Status& status) override {
    if (ended_) {
      ++inbox_->strays;
      return;
    }
    SetError(status, result_);
    result_.cut_off = absl::IsCancelled(status) && inbox_->cut_off;
    End(inbox_->Now());
  }

 private:
  void End(double now) {
    ended_ = true;
    result_.end = now;
    inbox_->Push(std::move(result_));
  }

  const std::shared_ptr<Inbox> inbox_;
  RequestResult result_;
  bool ended_ = false;
};

EngineTarget::EngineTarget(std::shared_ptr<Engine> engine, double timeout_seconds)
    : engine_(std::move(engine)),
      timeout_(absl::Seconds(timeout_seconds)),
      inbox_(std::make_shared<Inbox>()) {}

EngineTarget::~EngineTarget() { CancelAll(); }

double EngineTarget::Now() { return inbox_->Now(); }

void EngineTarget::Start(const LoadRequest& request, double scheduled) {
  RequestResult result;
  result.index = request.index;
  result.start = scheduled;
  result.prompt_tokens = static_cast<int64_t>(request.prompt.size());
  const auto refuse = [&](const absl::Status& status) {
    SetError(status, result);
    result.end = Now();
    inbox_->Push(std::move(result));
  };
  Request out;
  out.id = RequestId(request.index);
  out.prompt = request.prompt;
  if (out.prompt.empty()) {
    const Tokenizer* tokenizer = engine_->tokenizer();
    if (tokenizer == nullptr) {
      return refuse(absl::InvalidArgumentError("the model has no tokenizer: it takes ids only"));
    }
    auto ids = tokenizer->Encode(request.text, /*add_special_tokens=*/true);
    if (!ids.ok()) return refuse(ids.status());
    out.prompt = *std::move(ids);
  }
  out.sampling.temperature = 0.0;
  out.sampling.max_tokens = request.output_tokens;
  out.sampling.ignore_eos = true;
  out.deadline = SteadyNow() + timeout_;
  auto sink = std::make_shared<Sink>(inbox_, result, request.output_tokens);
  if (absl::Status status = engine_->Submit({std::move(out)}, {sink}); !status.ok()) {
    return refuse(status);
  }
  running_.emplace(request.index, std::move(sink));
}

std::vector<RequestResult> EngineTarget::Wait(double until) {
  std::vector<RequestResult> results = inbox_->Wait(until);
  for (const RequestResult& result : results) running_.erase(result.index);
  return results;
}

void EngineTarget::CancelAll() {
  inbox_->cut_off = true;
  for (const auto& [index, sink] : running_) engine_->Cancel(sink.get());
}

int64_t EngineTarget::StrayAnswers() const { return inbox_->strays; }

Result<ServerCounters> EngineTarget::Counters() {
  const EngineStats stats = engine_->Stats();
  ServerCounters out;
  out.prompt_tokens = static_cast<double>(stats.prompt_tokens);
  out.generation_tokens = static_cast<double>(stats.generation_tokens);
  out.steps = static_cast<double>(stats.steps);
  out.preemptions = static_cast<double>(stats.preemptions);
  out.prefix_queried_tokens = static_cast<double>(stats.prefix_queried_tokens);
  out.prefix_hit_tokens = static_cast<double>(stats.prefix_hit_tokens);
  out.step_seconds = stats.step_seconds;
  out.forward_seconds = stats.forward_seconds;
  out.rejected = static_cast<double>(stats.rejected_queue_full + stats.rejected_queue_timeout);
  return out;
}

}  // namespace moeserve::server
