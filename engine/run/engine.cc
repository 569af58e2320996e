#include "engine/engine.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <new>
#include <numeric>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "base/check.h"
#include "base/error_text.h"
#include "base/steady_clock.h"
#include "engine/model/trial.h"
#include "engine/run/engine_impl.h"
#include "engine/validate_request.h"

namespace moeserve {
namespace {

// How often the engine checks deadlines and queue times while requests wait and none runs.
constexpr absl::Duration kTick = absl::Milliseconds(20);
// After so many ticks without memory, about 10 s, the engine gives up.
constexpr int kMostFailures = 500;
// How long Drain() waits for the step that runs when it cancels what is left.
constexpr absl::Duration kLastStep = absl::Seconds(10);

}  // namespace

absl::Status EngineImpl::Submit(std::vector<Request> requests,
                                std::vector<std::shared_ptr<TokenSink>> sinks) {
  MOESERVE_CHECK(!requests.empty() && requests.size() == sinks.size(), "a sink for each request");
  std::vector<SequencePtr> sequences;
  for (size_t i = 0; i < requests.size(); ++i) {
    MOESERVE_RETURN_IF_ERROR(ValidateRequest(requests[i],
                                             {.max_model_len = options_.max_model_len,
                                              .context_reason = options_.context_reason,
                                              .has_tokenizer = tokenizer_ != nullptr,
                                              .routing_records = options_.routing_records,
                                              .routing_control = options_.routing_control.enabled},
                                             model_->spec()));
    if (requests[i].encode.has_value()) {
      requests[i].sampling = SamplingParams();
      requests[i].sampling.max_tokens = 0;
    }
    sequences.push_back(std::make_unique<Sequence>(std::move(requests[i]), std::move(sinks[i]),
                                                   tokenizer_.get(), eos_,
                                                   LongSequencesFrom(model_->spec())));
    if (options_.draft.max_tokens > 0) sequences.back()->sampling.KeepSteps();
    sequences.back()->whole = ComputesWhole(sequences.back()->request, model_->spec());
    if (const SamplingParams& p = sequences.back()->request.sampling; i == 0 && p.beam) {
      sequences.back()->beams =
          std::make_unique<BeamGroup>(*p.beam, token_step_.EndIds(p), p.max_tokens);
    }
  }
  MOESERVE_RETURN_IF_ERROR(CheckBeams(sequences));
  for (const SequencePtr& s : sequences) {
    for (int table = 0; table < cache_->num_tables(); ++table) {
      if (MostPages(*s, page_use_[table]) > cache_->num_pages(table)) {
        return absl::InvalidArgumentError(
            "the request can never fit: its prompt and max_tokens need more KV cache than there "
            "is");
      }
    }
  }
  const int count = static_cast<int>(sequences.size());
  const int prompt = sequences.front()->prompt_length();
  const MutexLock lock(mutex_);
  if (draining_ || stop_) return ShutDownStatus();
  if (!stats_.healthy) return absl::UnavailableError("the engine has stopped");
  if (queued_seqs_ + count > options_.max_queued_seqs ||
      queued_tokens_ + prompt > options_.max_queued_tokens) {
    ++stats_.rejected_queue_full;
    return absl::ResourceExhaustedError("the queue is full");
  }
  submitted_.reserve(submitted_.size() + 1);
  sequences.front()->samples.reserve(sequences.size());
  MOESERVE_RETURN_IF_ERROR(Register(sequences));
  // From here on nothing throws.
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
    s->owes_end = true;
    if (s != sequences.front()) sequences.front()->samples.push_back(std::move(s));
  }
  queued_seqs_ += count;
  queued_tokens_ += prompt;
  stats_.waiting += count;
  submitted_.push_back(std::move(sequences.front()));
  wake_.notify_one();
  return absl::OkStatus();
}

absl::Status EngineImpl::Register(const std::vector<SequencePtr>& sequences) {
  const size_t sinks = sinks_.size() + sequences.size();
  if (cancel_requests_.capacity() < sinks) cancel_requests_.reserve(2 * sinks);
  size_t known = 0;
  absl::Cleanup undo = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (size_t i = 0; i < known; ++i) Forget(*sequences[i]);
  };
  for (const SequencePtr& s : sequences) {
    if (!ids_.insert(s->request.id).second) {
      return absl::AlreadyExistsError("a request with this id is running");
    }
    ++known;
    sinks_.insert(s->sink.get());
  }
  std::move(undo).Cancel();
  return absl::OkStatus();
}

void EngineImpl::Cancel(const TokenSink* sink) {
  const MutexLock lock(mutex_);
  if (!sinks_.contains(sink)) return;
  // Register() has made room, because who cancels may not be able to handle an exception.
  cancel_requests_.push_back(sink);
  wake_.notify_one();
}

bool EngineImpl::Drain(absl::Time deadline) {
  MutexLock lock(mutex_);
  const auto all_ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ids_.empty(); };
  draining_ = true;
  wake_.notify_one();
  // Even a wait that is over at once unlocks the mutex; requests could then still run to their end.
  if (SteadyNow() < deadline) idle_.wait_until(lock, ToSteadyTimePoint(deadline), all_ended);
  cancel_all_ = true;
  wake_.notify_one();
  return idle_.wait_for(lock, absl::ToChronoMilliseconds(kLastStep), all_ended);
}

void EngineImpl::Shutdown() {
  {
    const MutexLock lock(mutex_);
    draining_ = cancel_all_ = stop_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void EngineImpl::Break(absl::Status reason) {
  const MutexLock lock(mutex_);
  if (!break_reason_.ok()) return;
  break_reason_ = std::move(reason);
  stats_.healthy = false;
  wake_.notify_one();
}

void EngineImpl::Loop() {
  pthread_setname_np(pthread_self(), "engine");  // for ps, top and debuggers
  int failures = 0;
  while (true) {
    try {
      if (!TakeWork()) return;
      AbortExpired();
      Admit();
      Step();
      UpdateGauges();
      failures = 0;
    } catch (const std::bad_alloc&) {
      // Step() ends the requests whose computation lacks memory. The rest is tried again, unless
      // nothing ever succeeds: then the process must end, so that its clients and those who
      // supervise it notice.
      MOESERVE_CHECK(++failures < kMostFailures, "no memory for the engine's work");
      ForgetLost();
      UpdateGauges();  // the engine may have nothing to do now
      std::this_thread::sleep_for(absl::ToChronoMilliseconds(kTick));
    }
  }
}

bool EngineImpl::TakeWork() {
  MutexLock lock(mutex_);
  const auto has_news = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stop_ || cancel_all_ || !submitted_.empty() || !cancel_requests_.empty() ||
           (broken_.ok() && !break_reason_.ok());
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
  // If an allocation fails, the rest is taken next time. The scheduler sorts the sequences.
  while (!submitted_.empty()) {
    scheduler_.Enqueue(std::move(submitted_.back()));
    submitted_.pop_back();
  }
  cancelled_.insert(cancel_requests_.begin(), cancel_requests_.end());
  cancel_requests_.clear();
  shutting_down_ = cancel_all_;
  if (broken_.ok()) broken_ = break_reason_;
  if (cancel_all_) cancelled_.insert(sinks_.begin(), sinks_.end());
  const bool over = stop_ && nothing_left();
  if (cancel_all_ && !stop_) cancel_all_ = !nothing_left();
  if (over) stats_.healthy = false;
  return !over;
}

void EngineImpl::AbortExpired() {
  const absl::Time now = SteadyNow();
  std::vector<std::pair<Sequence*, absl::Status>> ended;
  std::vector<Sequence*> cut;
  const auto judge = [&](Sequence* s, bool queued) {
    if (!broken_.ok()) {
      ended.emplace_back(s, broken_);
    } else if (Cancelled(*s)) {
      ended.emplace_back(
          s, shutting_down_ ? ShutDownStatus() : absl::CancelledError("the request was cancelled"));
    } else if (s->request.deadline <= now &&
               (s->beams == nullptr ? s->generated() : s->beams->search.length()) > 0) {
      cut.push_back(s);
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
      if (s->beams != nullptr) continue;  // they end together
      for (const SequencePtr& sample : s->samples) judge(sample.get(), !s->admitted);
    }
  }
  for (Sequence* s : cut) {
    if (s->beams != nullptr) {
      FinishBeams(s, true);
      continue;
    }
    OutputDelta delta = TokenStep::CutOff(*s);
    const int end = std::min(s->computed(), s->length() - 1);
    if (s->request.routing_record && end > s->routes_delivered) DeliverRoutes(*s, end, delta);
    Finish(s, std::move(delta));
  }
  for (const auto& [s, status] : ended) {
    if (absl::IsResourceExhausted(status)) {
      const MutexLock lock(mutex_);
      stats_.rejected_queue_timeout += 1 + (s->beams == nullptr ? 0 : s->samples.size());
    }
    Fail(s, status);
  }
  cancelled_.clear();
}

bool EngineImpl::Cancelled(const Sequence& s) const {
  const auto cancelled = [&](const Sequence& one) { return cancelled_.contains(one.sink.get()); };
  return cancelled(s) || (s.beams != nullptr &&
                          std::any_of(s.samples.begin(), s.samples.end(),
                                      [&](const SequencePtr& other) { return cancelled(*other); }));
}

void EngineImpl::LeaveQueue(int sequences, int64_t tokens) {
  const MutexLock lock(mutex_);
  queued_seqs_ -= sequences;
  queued_tokens_ -= tokens;
}

void EngineImpl::Forget(const Sequence& ended) {
  ids_.erase(ended.request.id);
  sinks_.erase(ended.sink.get());
  // Another request's sink may soon be at this address.
  std::erase(cancel_requests_, ended.sink.get());
}

void EngineImpl::ForgetLost() {
  const MutexLock lock(mutex_);
  using List = std::vector<SequencePtr>;
  const List* const lists[] = {&submitted_, &scheduler_.waiting(), &scheduler_.running()};
  const auto none = [&](const auto& matches) {
    for (const List* list : lists) {
      for (const SequencePtr& s : *list) {
        if (matches(*s)) return false;
        if (std::ranges::any_of(s->samples, [&](const auto& other) { return matches(*other); })) {
          return false;
        }
      }
    }
    return true;
  };
  const size_t lost = std::erase_if(ids_, [&](const std::string& id) {
    return none([&](const Sequence& s) { return s.request.id == id; });
  });
  const auto is_lost = [&](const TokenSink* sink) {
    return none([&](const Sequence& s) { return s.sink.get() == sink; });
  };
  std::erase_if(sinks_, is_lost);
  std::erase_if(cancel_requests_, is_lost);
  stats_.finished_error += lost;
  // Sequences may also have left the queue without being counted.
  queued_seqs_ = 0;
  queued_tokens_ = 0;
  for (const List* list : lists) {
    for (const SequencePtr& s : *list) {
      if (s->admitted) continue;
      queued_seqs_ += 1 + static_cast<int>(s->samples.size());
      queued_tokens_ += s->prompt_length();
    }
  }
}

void EngineImpl::Admit() {
  const auto admitted = scheduler_.Admit();
  for (Sequence* s : admitted) {
    const auto now = std::chrono::steady_clock::now();
    const auto measure = [&](Sequence& sequence) {
      sequence.admitted_at = now;
      histograms_.queue_seconds.Observe(SecondsBetween(sequence.submitted_at, now));
    };
    measure(*s);
    for (const SequencePtr& sample : s->samples) measure(*sample);
    LeaveQueue(1 + static_cast<int>(s->samples.size()), s->prompt_length());
  }
  // The step that follows may take long; meanwhile these sequences run and do not wait.
  if (!admitted.empty()) UpdateGauges();
}

ExpertWork EngineImpl::SourceWork(std::span<const int32_t> pages, int tokens) const {
  if (source_routes_ == nullptr) return {};
  const TokenRoutes work = source_routes_->Total(pages);
  return {.tokens = tokens,
          .routes = work.routes,
          .parameters = work.parameters +
                        static_cast<uint64_t>(tokens) * static_cast<uint64_t>(source_active_)};
}

void EngineImpl::AddSourceWork(const ExpertWork& work, Usage& usage) {
  usage.source = work;
  usage.routed_tokens += work.tokens;
  usage.expert_routes += work.routes;
  usage.activated_parameters += work.parameters;
}

void EngineImpl::Finish(Sequence* sequence, OutputDelta delta) {
  if (sequence->request.expert_counts) {
    delta.expert_counts.resize(recorder_.layout().num_experts);
    routes_.Count(sequence->memory.pages(), delta.expert_counts);
  }
  if (options_.expert_stats) {
    TokenRoutes totals = routes_.Total(sequence->memory.pages());
    totals.routes += sequence->memory.released.routes;
    totals.parameters += sequence->memory.released.parameters;
    delta.usage.routed_tokens = sequence->computed();
    delta.usage.expert_routes = totals.routes;
    delta.usage.activated_parameters =
        totals.parameters +
        static_cast<uint64_t>(sequence->computed()) * static_cast<uint64_t>(always_active_);
    AddSourceWork(SourceWork(sequence->memory.source, sequence->source_length()), delta.usage);
  }
  const SequencePtr s = scheduler_.Remove(sequence);
  RefreshIfIdle();
  const auto now = std::chrono::steady_clock::now();
  histograms_.inference_seconds.Observe(SecondsBetween(s->admitted_at, now));
  if (s->generated() > 0) {
    histograms_.decode_seconds.Observe(SecondsBetween(*s->first_token_at, now));
  }
  {
    const MutexLock lock(mutex_);
    stats_.prompt_tokens += static_cast<uint64_t>(s->prompt_length());
    stats_.generation_tokens += static_cast<uint64_t>(s->generated());
    ++(delta.finish_reason == FinishReason::kStop ? stats_.finished_stop : stats_.finished_length);
    CopySchedulerStats();
    Forget(*s);
  }
  s->owes_end = false;
  s->sink->OnDelta(std::move(delta));
}

void EngineImpl::Fail(Sequence* sequence, const absl::Status& status) {
  if (sequence->beams != nullptr) {
    FailBeams(sequence, status);
    return;
  }
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
  const int computed = std::min(sequence->computed(), sequence->prompt_length());
  if (s == nullptr) s = scheduler_.Remove(sequence);
  RefreshIfIdle();
  if (queued) {
    histograms_.queue_seconds.Observe(
        SecondsBetween(s->submitted_at, std::chrono::steady_clock::now()));
    LeaveQueue(1, prompt_leaves ? s->prompt_length() : 0);
  }
  {
    const MutexLock lock(mutex_);
    stats_.prompt_tokens += static_cast<uint64_t>(computed);
    stats_.generation_tokens += static_cast<uint64_t>(s->generated());
    const bool abort = absl::IsCancelled(status) || absl::IsDeadlineExceeded(status) ||
                       absl::IsUnavailable(status);
    ++(abort ? stats_.finished_abort : stats_.finished_error);
    CopySchedulerStats();
    Forget(*s);
  }
  s->owes_end = false;
  s->sink->OnError(status);
}

void EngineImpl::UpdateGauges() {
  const MutexLock lock(mutex_);
  CopySchedulerStats();
}

void EngineImpl::CopySchedulerStats() {
  stats_.running = static_cast<int>(scheduler_.running().size());
  // Admitted sequences that wait, after a preemption or as forked samples, count as waiting.
  stats_.waiting = queued_seqs_ + static_cast<int>(std::count_if(
                                      scheduler_.waiting().begin(), scheduler_.waiting().end(),
                                      [](const SequencePtr& s) { return s->admitted; }));
  stats_.kv_blocks_used = memory_.pages().used();
  stats_.kv_blocks_evictable = memory_.pages().evictable();
  stats_.preemptions = scheduler_.preemptions();
  stats_.prefix_queried_tokens = scheduler_.queried_tokens();
  stats_.prefix_hit_tokens = scheduler_.hit_tokens();
  stats_.drafted_tokens = drafted_tokens_;
  stats_.accepted_tokens = accepted_tokens_;
  stats_.beam_rows = beam_rows_;
  stats_.histograms = histograms_;
}

namespace {

// Routing plans number the routes of a step with 32 bits.
absl::Status CheckRoutes(const ModelSpec& spec, int max_step_tokens) {
  int64_t most = 1;  // of a token in one block
  for (const BlockSpec& block : spec.blocks) {
    const RoutedLayerSpec* routing = block.routing();
    if (routing == nullptr) continue;
    most = std::max(most, int64_t{routing->split.heads} * routing->num_experts);
  }
  const int64_t tokens = std::numeric_limits<int32_t>::max() / most;
  if (max_step_tokens <= tokens) return absl::OkStatus();
  return absl::InvalidArgumentError(Concat("max-step-tokens: expected at most ", tokens,
                                           " with this model, found ", max_step_tokens));
}

}  // namespace

namespace {

// On a device that draws tokens itself, steps with more rows pay only where drafts are often right.
int DeviceDraftTokens(const Model& model) {
  if (!model.backend().samples_on_device()) return 8;
  return model.spec().prediction != nullptr ? 4 : 0;
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options,
                                               std::unique_ptr<Model> model,
                                               std::shared_ptr<const Tokenizer> tokenizer,
                                               std::vector<TokenId> eos_token_ids,
                                               std::unique_ptr<Model> draft_model) {
  const ReportContents contents =
      options.expert_stats ? RecorderReportContents(RecorderSettings(options)) : ReportContents{};
  MOESERVE_ASSIGN_OR_RETURN(
      const EngineOptions o,
      Resolved(options, model->spec(), model->backend().preferred_step_rows(),
               DeviceDraftTokens(*model), model->ReportFloatsPerToken(contents)));
  const std::vector<KvLayerShape> shapes = CacheLayers(o, model->spec());
  const KvCacheType type = o.kv_cache_type.value_or(KvCacheTypeOf(model->options().compute));
  // A step of a text that is computed whole may have more rows than others.
  Request text;
  text.encode.emplace();
  const bool whole =
      ComputesWhole(text, model->spec()) || model->spec().kind == ModelKind::kEncoderDecoder;
  const int most_rows = std::max(o.max_step_tokens, whole ? o.max_model_len : 0);
  const bool predicts = model->spec().prediction != nullptr && o.draft.max_tokens > 0;
  const std::vector<PageUse> use = PageUseOf(o, model->spec(), draft_model != nullptr || predicts);
  std::vector<int64_t> page_bytes = PageBytesOf(model->backend(), shapes, type, use.size());
  std::vector<KvLayerShape> draft_shapes;
  KvCacheType draft_type = type;
  if (draft_model != nullptr) {
    MOESERVE_RETURN_IF_ERROR(DraftModel::Check(*draft_model, model->spec(), o.max_model_len));
    draft_shapes = CacheShapes(draft_model->spec());
    draft_type = KvCacheTypeOf(draft_model->options().compute);
    page_bytes[0] += draft_model->backend().PageBytes(draft_shapes, draft_type);
  } else if (predicts) {
    draft_shapes = CacheShapes(*model->spec().prediction);
    page_bytes[0] += model->backend().PageBytes(draft_shapes, draft_type);
  }
  MOESERVE_RETURN_IF_ERROR(CheckRoutes(model->spec(), most_rows));
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<int64_t> pages, CachePages(o, use, page_bytes));
  // A request with prompt_logprobs needs the logits of every row, so logits are reserved for all
  // rows.
  const std::optional<RoutingControl> widest =
      RoutingControl::Widest(model->spec(), o.routing_control);
  MOESERVE_RETURN_IF_ERROR(model->Reserve(most_rows, most_rows, type,
                                          widest.has_value() ? &*widest : nullptr, contents));
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<KvCacheStorage> cache,
                            model->backend().NewKvCache(shapes, type, pages));
  std::unique_ptr<StateStorage> states;
  int64_t state_bytes = 0;
  if (std::vector<StateShape> state_shapes = StateShapes(model->spec()); !state_shapes.empty()) {
    const int slots = o.max_num_seqs + o.snapshots;
    state_bytes = StateStorage::SlotBytes(state_shapes, o.draft.max_tokens) * slots;
    MOESERVE_ASSIGN_OR_RETURN(
        states, model->backend().NewStates(std::move(state_shapes), slots, o.draft.max_tokens));
  }
  if (o.try_model) MOESERVE_RETURN_IF_ERROR(TryModel(*model, *cache, states.get()));
  if (StepListener* const listener = model->options().listener; o.try_model && listener) {
    const int rows = std::min(most_rows, o.max_model_len);
    listener->Timed(PredictLongStep(*model, *cache, states.get(), rows));
  }
  std::unique_ptr<RouteCounters> counters, source_counters;
  if (o.expert_stats) {
    const CountSettings counts = RecorderCounts(model->spec(), RecorderSettings(o));
    MOESERVE_ASSIGN_OR_RETURN(counters, model->backend().NewRouteCounters(counts));
  }
  if (o.expert_stats && model->spec().encoder != nullptr) {
    const CountSettings counts = RecorderCounts(*model->spec().encoder, RecorderSettings(o));
    MOESERVE_ASSIGN_OR_RETURN(source_counters, model->backend().NewRouteCounters(counts));
  }
  std::unique_ptr<KvCacheStorage> draft_cache;
  if (draft_model != nullptr || predicts) {
    Backend& drafts = draft_model != nullptr ? draft_model->backend() : model->backend();
    MOESERVE_ASSIGN_OR_RETURN(draft_cache, drafts.NewKvCache(draft_shapes, draft_type, {pages[0]}));
  }
  return std::make_unique<EngineImpl>(
      o, std::move(model), std::move(tokenizer), std::move(eos_token_ids), std::move(cache),
      std::inner_product(pages.begin(), pages.end(), page_bytes.begin(), state_bytes),
      std::move(states), std::move(counters), std::move(source_counters), std::move(draft_model),
      std::move(draft_cache));
}

absl::Status Engine::Submit(Request request, std::shared_ptr<TokenSink> sink) {
  std::vector<Request> requests;
  requests.push_back(std::move(request));
  return Submit(std::move(requests), {std::move(sink)});
}

}  // namespace moeserve
