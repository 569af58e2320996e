#include "engine/engine.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <random>
#include <thread>
#include <unordered_set>
#include <utility>

#include "base/check.h"
#include "base/steady_clock.h"
#include "engine/engine_options.h"
#include "engine/model/trial.h"
#include "engine/routes/route_log.h"
#include "engine/sample/token_step.h"
#include "engine/schedule/block_manager.h"
#include "engine/schedule/scheduler.h"
#include "engine/schedule/sequence.h"
#include "engine/schedule/step_time.h"
#include "engine/validate_request.h"

namespace moeserve {
namespace {

// How often the engine checks deadlines and queue times while requests wait and none runs.
constexpr absl::Duration kTick = absl::Milliseconds(20);
// How long Drain() waits for the step that runs when it cancels what is left.
constexpr absl::Duration kLastStep = absl::Seconds(10);

double SecondsBetween(std::chrono::steady_clock::time_point begin,
                      std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

bool AllFinite(std::span<const float> values) {
  // No early exit, so that the loop is vectorised; x - x is 0 unless x is infinite or NaN.
  int bad = 0;
  for (float v : values) bad |= v - v != 0.0f;
  return bad == 0;
}

}  // namespace

class Engine::Impl {
 public:
  Impl(const EngineOptions& options, std::unique_ptr<Model> model,
       std::shared_ptr<const Tokenizer> tokenizer, std::vector<TokenId> eos,
       std::unique_ptr<KvCacheStorage> cache, int64_t cache_bytes,
       std::unique_ptr<RouteCounters> counters)
      : options_(options),
        model_(std::move(model)),
        tokenizer_(std::move(tokenizer)),
        eos_(std::move(eos)),
        cache_(std::move(cache)),
        recorder_(model_->spec(), RecorderSettings(options_), &routes_, std::move(counters)),
        always_active_(recorder_.Snapshot().always_active_parameters),
        routes_(recorder_.layout(), cache_->num_blocks(), options_.routing_records),
        scheduler_(*cache_, routes_, options_.prefix_cache, options_.max_num_seqs),
        textless_(tokenizer_.get(), eos_, model_->spec().vocab_size),
        token_step_(eos_, textless_, model_->spec().vocab_size, options_.max_model_len) {
    stats_.kv_blocks_total = cache_->num_blocks();
    stats_.kv_block_tokens = kKvBlockTokens;
    stats_.kv_cache_bytes = cache_bytes;
    stats_.weight_bytes = model_->weight_bytes();
    stats_.prefix_cache = options_.prefix_cache;
    thread_ = std::thread([this] { Loop(); });
  }

  absl::Status Submit(std::vector<Request> requests, std::vector<std::shared_ptr<TokenSink>> sinks);
  void Cancel(const TokenSink* sink);
  bool Drain(absl::Time deadline);
  void Shutdown();
  EngineProgress Progress() const { return {rounds_.load(), idle_now_.load()}; }
  EngineStats Stats() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  const EngineOptions options_;
  const std::unique_ptr<Model> model_;
  const std::shared_ptr<const Tokenizer> tokenizer_;
  const ExpertRecorder& recorder() const { return recorder_; }

 private:
  void Loop();
  // Takes submitted requests and cancellations; waits while there is no work. Returns false when
  // the engine was stopped and no request is left.
  bool TakeWork();
  void AbortExpired();
  void Admit();
  void Step();
  // Updates a sequence after its rows were computed: collects log-probabilities and marks the rows
  // as computed. If no known token is left to compute, draws the next token.
  void Advance(const ScheduledRows& rows, const RowLogits& logits);
  // Calls Advance(), and ends the sequence if there is no memory for that.
  void AdvanceOrFail(const ScheduledRows& rows, const RowLogits& logits);
  // Starts the other samples of this sequence's prompt after the prompt was computed; each sample
  // draws its own first token.
  void ForkSamples(Sequence& sequence, const RowLogits& logits);
  void NextToken(Sequence& sequence, const RowLogits& logits);
  void DeliverRoutes(Sequence& sequence, OutputDelta& delta);
  // Finish() ends a request with its last piece, Fail() with an error. The request's cache blocks
  // and its id are free before the sink is called.
  void Finish(Sequence* sequence, OutputDelta delta);
  void Fail(Sequence* sequence, const absl::Status& status);
  // Also ends the samples that wait for the sequence's prompt to be computed.
  void FailWithSamples(Sequence* sequence, const absl::Status& status);
  void FailForMemory(Sequence* sequence);
  // If no request is left, reads the expert counters from the device, so that an idle engine's
  // statistics are complete.
  void RefreshIfIdle() {
    if (scheduler_.running().empty() && scheduler_.waiting().empty()) recorder_.Refresh();
  }
  void LeaveQueue(int sequences, int64_t tokens);
  // Forgets an ended request; requires mutex_ to be held.
  void Forget(const Sequence& ended);
  void UpdateGauges();
  void CopySchedulerStats();  // requires mutex_ to be held

  const std::vector<TokenId> eos_;
  const std::unique_ptr<KvCacheStorage> cache_;

  // The following members are used by the engine thread only.
  ExpertRecorder recorder_;
  const int64_t always_active_;  // parameters that every token uses, whatever its routes
  RouteLog routes_;
  Scheduler scheduler_;
  const TextlessIds textless_;
  TokenStep token_step_;
  StepTime step_time_;
  std::vector<float> logits_;
  std::vector<SampleResult> samples_;  // tokens that the device drew in the last step
  std::unordered_set<const TokenSink*> cancelled_;
  bool shutting_down_ = false;  // cancelled_ has all requests, because the engine stops
  EngineHistograms histograms_;
  // Not OK once a file that the model reads in place has been damaged: no request can be computed
  // any more.
  absl::Status broken_;

  // Written by the engine thread; read without a lock, because a thread that is stuck could hold
  // it.
  std::atomic<uint64_t> rounds_{0};
  std::atomic<bool> idle_now_{false};

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  // The following members are guarded by mutex_.
  std::deque<SequencePtr> submitted_;
  std::vector<const TokenSink*> cancel_requests_;  // only of requests that have not ended
  // Of the requests that have not ended.
  std::unordered_set<std::string> ids_;
  std::unordered_set<const TokenSink*> sinks_;
  int queued_seqs_ = 0;        // sequences that were submitted and never admitted
  int64_t queued_tokens_ = 0;  // prompt tokens of these sequences; samples of one prompt count once
  uint64_t submissions_ = 0;
  bool draining_ = false;
  bool cancel_all_ = false;
  bool stop_ = false;
  EngineStats stats_;
  std::random_device random_;

  std::thread thread_;
};

absl::Status Engine::Impl::Submit(std::vector<Request> requests,
                                  std::vector<std::shared_ptr<TokenSink>> sinks) {
  MOESERVE_CHECK(!requests.empty() && requests.size() == sinks.size(), "a sink for each request");
  std::vector<SequencePtr> sequences;
  for (size_t i = 0; i < requests.size(); ++i) {
    MOESERVE_RETURN_IF_ERROR(
        ValidateRequest(requests[i], {.vocab_size = model_->spec().vocab_size,
                                      .max_model_len = options_.max_model_len,
                                      .has_tokenizer = tokenizer_ != nullptr,
                                      .routing_records = options_.routing_records,
                                      .routing_control = options_.routing_control.enabled}));
    sequences.push_back(std::make_unique<Sequence>(std::move(requests[i]), std::move(sinks[i]),
                                                   tokenizer_.get(), eos_,
                                                   LongSequencesFrom(model_->spec())));
    if (BlocksFor(sequences.back()->cache_tokens()) > cache_->num_blocks()) {
      return absl::InvalidArgumentError(
          "the request can never fit: its prompt and max_tokens need more KV cache than there is");
    }
  }
  const int count = static_cast<int>(sequences.size());
  const int prompt = sequences.front()->prompt_length();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (draining_ || stop_) return absl::UnavailableError("the server is shutting down");
  if (!stats_.healthy) return absl::UnavailableError("the engine has stopped");
  if (queued_seqs_ + count > options_.max_queued_seqs ||
      queued_tokens_ + prompt > options_.max_queued_tokens) {
    ++stats_.rejected_queue_full;
    return absl::ResourceExhaustedError("the queue is full");
  }
  for (int i = 0; i < count; ++i) {
    if (ids_.insert(sequences[i]->request.id).second) continue;
    while (i-- > 0) ids_.erase(sequences[i]->request.id);
    return absl::AlreadyExistsError("a request with this id is running");
  }
  for (const SequencePtr& s : sequences) sinks_.insert(s->sink.get());
  const absl::Time now = SteadyNow();
  const auto submitted_at = std::chrono::steady_clock::now();
  for (SequencePtr& s : sequences) {
    const auto& seed = s->request.sampling.seed;
    s->seed =
        seed.has_value() ? static_cast<uint64_t>(*seed) : (uint64_t{random_()} << 32 | random_());
    s->queued_at = now;
    s->submitted_at = submitted_at;
    s->rank = now + s->request.priority * kPriorityUnit;
    s->order = ++submissions_;
    if (s != sequences.front()) sequences.front()->samples.push_back(std::move(s));
  }
  queued_seqs_ += count;
  queued_tokens_ += prompt;
  stats_.waiting = queued_seqs_;
  submitted_.push_back(std::move(sequences.front()));
  wake_.notify_one();
  return absl::OkStatus();
}

void Engine::Impl::Cancel(const TokenSink* sink) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!sinks_.contains(sink)) return;
  cancel_requests_.push_back(sink);
  wake_.notify_one();
}

bool Engine::Impl::Drain(absl::Time deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto all_ended = [this] { return ids_.empty(); };
  draining_ = true;
  wake_.notify_one();
  // Even a wait that is over at once unlocks the mutex; requests could then still run to their end.
  if (SteadyNow() < deadline) idle_.wait_until(lock, ToSteadyTimePoint(deadline), all_ended);
  cancel_all_ = true;
  wake_.notify_one();
  return idle_.wait_for(lock, absl::ToChronoMilliseconds(kLastStep), all_ended);
}

void Engine::Impl::Shutdown() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    draining_ = cancel_all_ = stop_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void Engine::Impl::Loop() {
  pthread_setname_np(pthread_self(), "engine");  // for ps, top and debuggers
  while (TakeWork()) {
    try {
      AbortExpired();
      Admit();
      Step();
      UpdateGauges();
    } catch (const std::bad_alloc&) {
      // Step() ends the requests whose computation lacks memory. The rest is tried again.
      std::this_thread::sleep_for(absl::ToChronoMilliseconds(kTick));
    }
  }
}

bool Engine::Impl::TakeWork() {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto has_news = [this] {
    return stop_ || cancel_all_ || !submitted_.empty() || !cancel_requests_.empty();
  };
  const auto nothing_left = [this] {
    return scheduler_.waiting().empty() && scheduler_.running().empty();
  };
  if (scheduler_.running().empty() && !has_news()) {
    idle_.notify_all();
    idle_now_ = true;
    if (scheduler_.waiting().empty()) {
      wake_.wait(lock, has_news);
    } else {
      wake_.wait_for(lock, absl::ToChronoMilliseconds(kTick), has_news);
    }
    idle_now_ = false;
  }
  ++rounds_;
  for (SequencePtr& s : submitted_) scheduler_.Enqueue(std::move(s));
  submitted_.clear();
  cancelled_.insert(cancel_requests_.begin(), cancel_requests_.end());
  cancel_requests_.clear();
  shutting_down_ = cancel_all_;
  if (cancel_all_) cancelled_.insert(sinks_.begin(), sinks_.end());
  const bool over = stop_ && nothing_left();
  if (cancel_all_ && !stop_) cancel_all_ = !nothing_left();
  if (over) stats_.healthy = false;
  return !over;
}

void Engine::Impl::AbortExpired() {
  const absl::Time now = SteadyNow();
  std::vector<std::pair<Sequence*, absl::Status>> ended;
  const auto judge = [&](Sequence* s, bool queued) {
    if (!broken_.ok()) {
      ended.emplace_back(s, broken_);
    } else if (cancelled_.contains(s->sink.get())) {
      ended.emplace_back(s, shutting_down_ ? absl::UnavailableError("the server is shutting down")
                                           : absl::CancelledError("the request was cancelled"));
    } else if (s->request.deadline <= now) {
      ended.emplace_back(s, absl::DeadlineExceededError("the request ran into its time limit"));
    } else if (queued && now - s->queued_at > options_.max_queue_wait) {
      ended.emplace_back(s,
                         absl::ResourceExhaustedError("the request waited too long in the queue"));
    }
  };
  for (const auto* list : {&scheduler_.running(), &scheduler_.waiting()}) {
    for (const SequencePtr& s : *list) {
      judge(s.get(), !s->admitted);
      for (const SequencePtr& sample : s->samples) judge(sample.get(), !s->admitted);
    }
  }
  for (const auto& [s, status] : ended) {
    if (absl::IsResourceExhausted(status)) {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++stats_.rejected_queue_timeout;
    }
    Fail(s, status);
  }
  cancelled_.clear();
}

void Engine::Impl::LeaveQueue(int sequences, int64_t tokens) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queued_seqs_ -= sequences;
  queued_tokens_ -= tokens;
}

void Engine::Impl::Forget(const Sequence& ended) {
  ids_.erase(ended.request.id);
  sinks_.erase(ended.sink.get());
  // Another request's sink may soon be at this address.
  std::erase(cancel_requests_, ended.sink.get());
}

void Engine::Impl::Admit() {
  for (Sequence* s : scheduler_.Admit()) {
    const auto now = std::chrono::steady_clock::now();
    const auto measure = [&](Sequence& admitted) {
      admitted.admitted_at = now;
      histograms_.queue_seconds.Observe(SecondsBetween(admitted.submitted_at, now));
    };
    measure(*s);
    for (const SequencePtr& sample : s->samples) measure(*sample);
    LeaveQueue(1 + static_cast<int>(s->samples.size()), s->prompt_length());
  }
}

void Engine::Impl::Step() {
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds_since = [](std::chrono::steady_clock::time_point start) {
    return SecondsBetween(start, std::chrono::steady_clock::now());
  };
  const PromptBudget budget =
      options_.max_prompt_rows > 0
          ? PromptBudget::Rows(options_.max_prompt_rows)
          : step_time_.Budget(DecodingWork(scheduler_.running()),
                              static_cast<int>(scheduler_.running().size()));
  const std::vector<ScheduledRows> scheduled = scheduler_.Plan(options_.max_step_tokens, budget);
  if (scheduled.empty()) return;
  const size_t vocab = static_cast<size_t>(model_->spec().vocab_size);
  Batch batch;
  StepReport report;
  double forward_seconds = 0.0;
  try {
    batch = MakeBatch(scheduled, model_->backend().samples_on_device(), textless_);
    // logits_ never shrinks: if it did, resize() would fill the elements that it adds again with
    // zeros in later steps.
    logits_.resize(std::max(logits_.size(), batch.logit_rows.size() * vocab));
    const StepOptions step = options_.expert_stats ? recorder_.BeginStep() : StepOptions{};
    samples_.resize(batch.samples.size());
    const auto forward_begin = std::chrono::steady_clock::now();
    report = model_->Forward(batch, *cache_, step, logits_, samples_);
    forward_seconds = seconds_since(forward_begin);
    if (options_.expert_stats) recorder_.EndStep(batch, report);
  } catch (const std::bad_alloc&) {
    for (const ScheduledRows& rows : scheduled) FailForMemory(rows.sequence);
    return;
  }
  step_time_.Observe(WorkOf(scheduled), forward_seconds);
  if (broken_ = model_->CheckFiles(); !broken_.ok()) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stats_.healthy = false;
    }
    AbortExpired();  // ends all requests
    return;
  }

  int token = 0;
  size_t logit_row = 0;
  std::vector<int32_t> positions;
  for (const ScheduledRows& rows : scheduled) {
    const int end = token + rows.count;
    bool finite = true;
    for (int t = token; t < end; ++t) finite = finite && report.failed[t] == 0;
    const size_t first = logit_row;
    positions.clear();
    while (logit_row < batch.logit_rows.size() && batch.logit_rows[logit_row] < end) {
      positions.push_back(batch.positions[batch.logit_rows[logit_row++]]);
    }
    RowLogits logits{positions, {logits_.data() + first * vocab, (logit_row - first) * vocab}};
    if (first < logit_row && !samples_.empty() && batch.samples[first].row >= 0) {
      logits.drawn = &samples_[first];
    }
    if (finite &&
        (logits.drawn != nullptr ? logits.drawn->finite != 0 : AllFinite(logits.values))) {
      AdvanceOrFail(rows, logits);
    } else {
      FailWithSamples(rows.sequence, absl::InternalError("numeric failure: router scores or logits "
                                                         "are not finite"));
    }
    token = end;
  }
  const bool decode_only = std::all_of(batch.phase.begin(), batch.phase.end(),
                                       [](Phase phase) { return phase == Phase::kDecode; });
  const double step_seconds = seconds_since(begin);
  histograms_.step_tokens.Observe(batch.num_tokens());
  histograms_.step_sequences.Observe(static_cast<double>(scheduled.size()));
  (decode_only ? histograms_.decode_step_seconds : histograms_.prefill_step_seconds)
      .Observe(step_seconds);
  const std::lock_guard<std::mutex> lock(mutex_);
  ++stats_.steps;
  stats_.last_step = absl::Now();
  stats_.forward_seconds += forward_seconds;
  stats_.step_seconds += step_seconds;
  stats_.histograms = histograms_;
}

void Engine::Impl::FailWithSamples(Sequence* sequence, const absl::Status& status) {
  // Other samples that wait for this prompt to be computed would fail in the same way.
  while (!sequence->samples.empty()) Fail(sequence->samples.back().get(), status);
  Fail(sequence, status);
}

void Engine::Impl::FailForMemory(Sequence* sequence) {
  FailWithSamples(sequence, absl::ResourceExhaustedError(
                                "the server has not enough memory to compute this request"));
}

void Engine::Impl::AdvanceOrFail(const ScheduledRows& rows, const RowLogits& logits) {
  const auto& running = scheduler_.running();
  Sequence* const sequence = rows.sequence;
  try {
    Advance(rows, logits);
  } catch (const std::bad_alloc&) {
    // The sequence may have ended before the allocation failed.
    const bool runs = std::any_of(running.begin(), running.end(),
                                  [&](const SequencePtr& s) { return s.get() == sequence; });
    if (runs) FailForMemory(sequence);
  }
}

void Engine::Impl::Advance(const ScheduledRows& rows, const RowLogits& logits) {
  Sequence& s = *rows.sequence;
  token_step_.CollectPromptLogprobs(s, logits);
  scheduler_.Complete(rows);
  if (s.remaining() > 0) return;  // part of the prompt is still to be computed
  ForkSamples(s, logits);
  NextToken(s, logits);
}

void Engine::Impl::ForkSamples(Sequence& s, const RowLogits& logits) {
  for (SequencePtr& sample : std::exchange(s.samples, {})) {
    Sequence& forked = *sample;
    scheduler_.Fork(s, std::move(sample));
    if (forked.remaining() == 0) NextToken(forked, logits);
  }
}

void Engine::Impl::NextToken(Sequence& s, const RowLogits& logits) {
  Result<OutputDelta> delta = token_step_.Next(s, logits);
  if (delta.ok() && !s.first_token_at.has_value()) {
    s.first_token_at = std::chrono::steady_clock::now();
    histograms_.prefill_seconds.Observe(SecondsBetween(s.admitted_at, *s.first_token_at));
  }
  if (delta.ok() && s.request.routing_record) DeliverRoutes(s, *delta);
  if (!delta.ok()) {
    Fail(&s, delta.status());
  } else if (delta->finished) {
    Finish(&s, *std::move(delta));
  } else {
    s.sink->OnDelta(*std::move(delta));
  }
}

void Engine::Impl::DeliverRoutes(Sequence& s, OutputDelta& delta) {
  const int begin = std::exchange(s.routes_delivered, s.computed);
  delta.routing = routes_.Record(s.blocks, begin, s.computed);
  for (const auto& [first, last] : s.reused) {
    if (last > begin) delta.routing->reused.emplace_back(std::max(first, begin), last);
  }
}

void Engine::Impl::Finish(Sequence* sequence, OutputDelta delta) {
  if (sequence->request.expert_counts) {
    delta.expert_counts.resize(recorder_.layout().num_experts);
    routes_.Count(sequence->blocks, delta.expert_counts);
  }
  if (options_.expert_stats) {
    const TokenRoutes totals = routes_.Total(sequence->blocks);
    delta.usage.routed_tokens = sequence->computed;
    delta.usage.expert_routes = totals.routes;
    delta.usage.activated_parameters =
        totals.parameters +
        static_cast<uint64_t>(sequence->computed) * static_cast<uint64_t>(always_active_);
  }
  const SequencePtr s = scheduler_.Remove(sequence);
  RefreshIfIdle();
  const auto now = std::chrono::steady_clock::now();
  histograms_.inference_seconds.Observe(SecondsBetween(s->admitted_at, now));
  if (s->generated() > 0) {
    histograms_.decode_seconds.Observe(SecondsBetween(*s->first_token_at, now));
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stats_.prompt_tokens += static_cast<uint64_t>(s->prompt_length());
    stats_.generation_tokens += static_cast<uint64_t>(s->generated());
    ++(delta.finish_reason == FinishReason::kStop ? stats_.finished_stop : stats_.finished_length);
    CopySchedulerStats();
    Forget(*s);
  }
  s->sink->OnDelta(std::move(delta));
}

void Engine::Impl::Fail(Sequence* sequence, const absl::Status& status) {
  SequencePtr s;
  bool queued = !sequence->admitted;
  bool prompt_leaves = queued && sequence->samples.empty();
  for (const auto* list : {&scheduler_.running(), &scheduler_.waiting()}) {
    for (const SequencePtr& leader : *list) {
      auto& samples = leader->samples;
      const auto it = std::find_if(samples.begin(), samples.end(),
                                   [&](const SequencePtr& x) { return x.get() == sequence; });
      if (it == samples.end()) continue;
      s = std::move(*it);
      samples.erase(it);
      queued = !leader->admitted;
      prompt_leaves = false;
      break;
    }
    if (s != nullptr) break;
  }
  const int computed = std::min(sequence->computed, sequence->prompt_length());
  if (s == nullptr) s = scheduler_.Remove(sequence);
  RefreshIfIdle();
  if (queued) {
    histograms_.queue_seconds.Observe(
        SecondsBetween(s->submitted_at, std::chrono::steady_clock::now()));
    LeaveQueue(1, prompt_leaves ? s->prompt_length() : 0);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stats_.prompt_tokens += static_cast<uint64_t>(computed);
    stats_.generation_tokens += static_cast<uint64_t>(s->generated());
    const bool abort = absl::IsCancelled(status) || absl::IsDeadlineExceeded(status) ||
                       absl::IsUnavailable(status);
    ++(abort ? stats_.finished_abort : stats_.finished_error);
    CopySchedulerStats();
    Forget(*s);
  }
  s->sink->OnError(status);
}

void Engine::Impl::UpdateGauges() {
  const std::lock_guard<std::mutex> lock(mutex_);
  CopySchedulerStats();
}

void Engine::Impl::CopySchedulerStats() {
  stats_.running = static_cast<int>(scheduler_.running().size());
  // Admitted sequences that wait, after a preemption or as forked samples, count as waiting.
  stats_.waiting = queued_seqs_ + static_cast<int>(std::count_if(
                                      scheduler_.waiting().begin(), scheduler_.waiting().end(),
                                      [](const SequencePtr& s) { return s->admitted; }));
  stats_.kv_blocks_used = scheduler_.blocks().used();
  stats_.kv_blocks_evictable = scheduler_.blocks().evictable();
  stats_.preemptions = scheduler_.preemptions();
  stats_.prefix_queried_tokens = scheduler_.queried_tokens();
  stats_.prefix_hit_tokens = scheduler_.hit_tokens();
  stats_.histograms = histograms_;
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() { Shutdown(); }

Result<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options,
                                               std::unique_ptr<Model> model,
                                               std::shared_ptr<const Tokenizer> tokenizer,
                                               std::vector<TokenId> eos_token_ids) {
  const ReportContents contents =
      options.expert_stats ? RecorderReportContents(RecorderSettings(options)) : ReportContents{};
  MOESERVE_ASSIGN_OR_RETURN(const EngineOptions o,
                            Resolved(options, model->spec(), model->backend().preferred_step_rows(),
                                     model->ReportFloatsPerToken(contents)));
  const std::vector<KvLayerShape> shapes = CacheShapes(model->spec());
  const KvCacheType type = o.kv_cache_type.value_or(KvCacheTypeOf(model->options().compute));
  const int64_t block_bytes = model->backend().KvBlockBytes(shapes, type);
  MOESERVE_ASSIGN_OR_RETURN(const int64_t blocks, CacheBlocks(o, block_bytes));
  // A request with prompt_logprobs needs the logits of every row, so logits are reserved for all
  // rows.
  const std::optional<RoutingControl> widest =
      RoutingControl::Widest(model->spec(), o.routing_control);
  MOESERVE_RETURN_IF_ERROR(model->Reserve(o.max_step_tokens, o.max_step_tokens, type,
                                          widest.has_value() ? &*widest : nullptr, contents));
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<KvCacheStorage> cache,
                            model->backend().NewKvCache(shapes, type, blocks));
  if (o.try_model) MOESERVE_RETURN_IF_ERROR(TryModel(*model, *cache));
  std::unique_ptr<RouteCounters> counters;
  if (o.expert_stats) {
    const CountSettings counts = RecorderCounts(model->spec(), RecorderSettings(o));
    MOESERVE_ASSIGN_OR_RETURN(counters, model->backend().NewRouteCounters(counts));
  }
  auto impl =
      std::make_unique<Impl>(o, std::move(model), std::move(tokenizer), std::move(eos_token_ids),
                             std::move(cache), blocks * block_bytes, std::move(counters));
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

absl::Status Engine::Submit(Request request, std::shared_ptr<TokenSink> sink) {
  std::vector<Request> requests;
  requests.push_back(std::move(request));
  return impl_->Submit(std::move(requests), {std::move(sink)});
}
absl::Status Engine::Submit(std::vector<Request> requests,
                            std::vector<std::shared_ptr<TokenSink>> sinks) {
  return impl_->Submit(std::move(requests), std::move(sinks));
}
void Engine::Cancel(const TokenSink* sink) { impl_->Cancel(sink); }
bool Engine::Drain(absl::Time deadline) { return impl_->Drain(deadline); }
void Engine::Shutdown() { impl_->Shutdown(); }
EngineProgress Engine::Progress() const { return impl_->Progress(); }
EngineStats Engine::Stats() const { return impl_->Stats(); }
ExpertStats Engine::ExpertSnapshot() const { return impl_->recorder().Snapshot(); }
const RouteLayout& Engine::route_layout() const { return impl_->recorder().layout(); }
std::optional<TokenExpertCounts> Engine::token_expert_counts() const {
  return impl_->recorder().token_counts();
}
std::vector<HiddenSample> Engine::HiddenSamples() const {
  return impl_->recorder().HiddenSamples();
}
const EngineOptions& Engine::options() const { return impl_->options_; }
int Engine::max_model_len() const { return impl_->options_.max_model_len; }
const ModelSpec& Engine::spec() const { return impl_->model_->spec(); }
const Tokenizer& Engine::tokenizer() const { return *impl_->tokenizer_; }
bool Engine::has_tokenizer() const { return impl_->tokenizer_ != nullptr; }

}  // namespace moeserve
