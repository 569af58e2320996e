#include "engine/engine.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_set>
#include <utility>

#include "engine/expert_recorder.h"
#include "engine/kv_cache.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "engine/sequence.h"
#include "engine/validate_request.h"

namespace moeserve {
namespace {

// How often a waiting engine looks at deadlines and queue times.
constexpr absl::Duration kTick = absl::Milliseconds(20);

std::vector<KvLayerShape> CacheShapes(const ModelSpec& spec) {
  std::vector<KvLayerShape> shapes;
  for (const LayerSpec& l : spec.layers) {
    shapes.push_back({l.attention.num_kv_heads, l.attention.head_dim});
  }
  return shapes;
}

bool AllFinite(std::span<const float> values) {
  for (float v : values) {
    if (!std::isfinite(v)) return false;
  }
  return true;
}

}  // namespace

class Engine::Impl {
 public:
  Impl(const EngineOptions& options, std::unique_ptr<Model> model,
       std::shared_ptr<const Tokenizer> tokenizer, std::vector<TokenId> eos, KvCacheStorage cache)
      : options_(options),
        model_(std::move(model)),
        tokenizer_(std::move(tokenizer)),
        eos_(std::move(eos)),
        cache_(std::move(cache)),
        blocks_(cache_.num_blocks()),
        recorder_(model_->spec()) {
    stats_.kv_blocks_total = blocks_.total();
    stats_.kv_block_tokens = kKvBlockTokens;
    thread_ = std::thread([this] { Loop(); });
  }

  absl::Status Submit(Request request, std::shared_ptr<TokenSink> sink);
  void Cancel(const std::string& id);
  void Drain(absl::Time deadline);
  void Shutdown();
  EngineStats Stats() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  const EngineOptions options_;
  const std::unique_ptr<Model> model_;
  const std::shared_ptr<const Tokenizer> tokenizer_;
  const ExpertRecorder& recorder() const { return recorder_; }

 private:
  using SequencePtr = std::unique_ptr<Sequence>;

  void Loop();
  // Moves new requests in and out of the queue; false when the engine has stopped and nothing is
  // left. Waits while there is nothing to do.
  bool TakeWork();
  void AbortExpired();
  void Admit();
  void Step();
  // What follows from the logits of a sequence's rows. True: the sequence is over.
  bool Advance(const ScheduledRows& rows, const float* logits);
  void CollectPromptLogprobs(const ScheduledRows& rows, const float* logits);
  // Ends a request without an answer: its blocks are free and its sink knows.
  void Fail(SequencePtr sequence, const absl::Status& status);
  void UpdateGauges();

  const std::vector<TokenId> eos_;
  KvCacheStorage cache_;

  // Engine thread only.
  BlockPool blocks_;
  ExpertRecorder recorder_;
  Sampler sampler_;
  std::deque<SequencePtr> waiting_;
  std::vector<SequencePtr> running_;
  std::vector<float> logits_;
  std::unordered_set<std::string> cancelled_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  // Guarded by mutex_.
  std::deque<SequencePtr> submitted_;
  std::vector<std::string> cancel_requests_;
  std::unordered_set<std::string> ids_;  // submitted and not yet over
  int queued_seqs_ = 0;                  // submitted_ and waiting_
  int64_t queued_tokens_ = 0;
  bool draining_ = false;
  bool cancel_all_ = false;
  bool stop_ = false;
  EngineStats stats_;
  std::random_device random_;

  std::thread thread_;
};

absl::Status Engine::Impl::Submit(Request request, std::shared_ptr<TokenSink> sink) {
  MOESERVE_RETURN_IF_ERROR(ValidateRequest(request, {.vocab_size = model_->spec().vocab_size,
                                                     .max_model_len = options_.max_model_len,
                                                     .has_tokenizer = tokenizer_ != nullptr}));
  auto sequence = std::make_unique<Sequence>(std::move(request), std::move(sink), tokenizer_.get());
  if (BlocksFor(sequence->cache_tokens()) > blocks_.total()) {
    return absl::InvalidArgumentError(
        "the request can never fit: its prompt and max_tokens need more KV cache than there is");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (draining_ || stop_) return absl::UnavailableError("the server is shutting down");
  if (queued_seqs_ >= options_.max_queued_seqs ||
      queued_tokens_ + sequence->prompt_length() > options_.max_queued_tokens) {
    ++stats_.rejected_queue_full;
    return absl::ResourceExhaustedError("the queue is full");
  }
  if (!ids_.insert(sequence->request.id).second) {
    return absl::AlreadyExistsError("a request with this id is running");
  }
  const auto& seed = sequence->request.sampling.seed;
  sequence->seed =
      seed.has_value() ? static_cast<uint64_t>(*seed) : (uint64_t{random_()} << 32 | random_());
  ++queued_seqs_;
  queued_tokens_ += sequence->prompt_length();
  stats_.waiting = queued_seqs_;
  submitted_.push_back(std::move(sequence));
  wake_.notify_one();
  return absl::OkStatus();
}

void Engine::Impl::Cancel(const std::string& id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!ids_.contains(id)) return;
  cancel_requests_.push_back(id);
  wake_.notify_one();
}

void Engine::Impl::Drain(absl::Time deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  draining_ = true;
  wake_.notify_one();
  const auto until = absl::ToChronoTime(std::min(deadline, absl::Now() + absl::Hours(24)));
  idle_.wait_until(lock, until, [this] { return ids_.empty(); });
  cancel_all_ = true;
  wake_.notify_one();
  idle_.wait(lock, [this] { return ids_.empty(); });
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
  while (TakeWork()) {
    AbortExpired();
    Admit();
    Step();
    UpdateGauges();
  }
}

bool Engine::Impl::TakeWork() {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto has_news = [this] {
    return stop_ || cancel_all_ || !submitted_.empty() || !cancel_requests_.empty();
  };
  if (running_.empty() && !has_news()) {
    idle_.notify_all();
    if (waiting_.empty()) {
      wake_.wait(lock, has_news);
    } else {
      wake_.wait_for(lock, absl::ToChronoMilliseconds(kTick), has_news);
    }
  }
  for (SequencePtr& s : submitted_) waiting_.push_back(std::move(s));
  submitted_.clear();
  cancelled_.insert(cancel_requests_.begin(), cancel_requests_.end());
  cancel_requests_.clear();
  if (cancel_all_) {
    for (const auto& s : waiting_) cancelled_.insert(s->request.id);
    for (const auto& s : running_) cancelled_.insert(s->request.id);
  }
  const bool over = stop_ && waiting_.empty() && running_.empty();
  if (cancel_all_ && !stop_) cancel_all_ = !waiting_.empty() || !running_.empty();
  if (over) stats_.healthy = false;
  return !over;
}

void Engine::Impl::AbortExpired() {
  const absl::Time now = absl::Now();
  const auto verdict = [&](const Sequence& s, bool queued) {
    if (cancelled_.contains(s.request.id)) return absl::CancelledError("the request was cancelled");
    if (s.request.deadline <= now) {
      return absl::DeadlineExceededError("the request ran into its time limit");
    }
    if (queued && now - s.queued_at > options_.max_queue_wait) {
      return absl::ResourceExhaustedError("the request waited too long in the queue");
    }
    return absl::OkStatus();
  };
  for (size_t i = 0; i < running_.size();) {
    const absl::Status status = verdict(*running_[i], false);
    if (status.ok()) {
      ++i;
      continue;
    }
    SequencePtr s = std::move(running_[i]);
    running_.erase(running_.begin() + static_cast<int64_t>(i));
    Fail(std::move(s), status);
  }
  for (size_t i = 0; i < waiting_.size();) {
    const absl::Status status = verdict(*waiting_[i], true);
    if (status.ok()) {
      ++i;
      continue;
    }
    SequencePtr s = std::move(waiting_[i]);
    waiting_.erase(waiting_.begin() + static_cast<int64_t>(i));
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      --queued_seqs_;
      queued_tokens_ -= s->prompt_length();
      if (absl::IsResourceExhausted(status)) ++stats_.rejected_queue_timeout;
    }
    Fail(std::move(s), status);
  }
  cancelled_.clear();
}

void Engine::Impl::Admit() {
  // In order of arrival: a large request at the front is not overtaken for ever by small ones.
  while (!waiting_.empty() && static_cast<int>(running_.size()) < options_.max_num_seqs) {
    Sequence& next = *waiting_.front();
    const int64_t needed = BlocksFor(next.cache_tokens());
    if (needed > blocks_.available()) break;
    next.blocks = blocks_.Take(needed);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      --queued_seqs_;
      queued_tokens_ -= next.prompt_length();
    }
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

void Engine::Impl::Step() {
  const std::vector<ScheduledRows> scheduled = Schedule(running_, options_.max_step_tokens);
  if (scheduled.empty()) return;
  const Batch batch = MakeBatch(scheduled);
  const size_t vocab = static_cast<size_t>(model_->spec().vocab_size);
  logits_.resize(batch.logit_rows.size() * vocab);
  recorder_.BeginStep(batch);
  model_->Forward(batch, cache_, &recorder_, logits_);
  recorder_.Publish();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++stats_.steps;
    stats_.last_step = absl::Now();
  }

  std::unordered_set<const Sequence*> over;
  std::vector<std::pair<const Sequence*, absl::Status>> failed;
  int token = 0;
  size_t logit_row = 0;
  for (const ScheduledRows& rows : scheduled) {
    const int end = token + rows.count;
    bool ok = true;
    for (int t = token; t < end; ++t) ok = ok && !recorder_.failed_tokens()[t];
    const size_t first = logit_row;
    while (logit_row < batch.logit_rows.size() && batch.logit_rows[logit_row] < end) ++logit_row;
    const std::span<const float> logits(logits_.data() + first * vocab,
                                        (logit_row - first) * vocab);
    if (!ok || !AllFinite(logits)) {
      failed.emplace_back(rows.sequence,
                          absl::InternalError("numeric failure: router scores or logits are not "
                                              "finite"));
    } else {
      rows.sequence->computed += rows.count;
      if (Advance(rows, logits.data())) over.insert(rows.sequence);
    }
    token = end;
  }
  for (size_t i = 0; i < running_.size();) {
    const Sequence* s = running_[i].get();
    const auto failure =
        std::find_if(failed.begin(), failed.end(), [s](const auto& f) { return f.first == s; });
    if (!over.contains(s) && failure == failed.end()) {
      ++i;
      continue;
    }
    SequencePtr taken = std::move(running_[i]);
    running_.erase(running_.begin() + static_cast<int64_t>(i));
    if (failure != failed.end()) Fail(std::move(taken), failure->second);
  }
}

void Engine::Impl::CollectPromptLogprobs(const ScheduledRows& rows, const float* logits) {
  Sequence& s = *rows.sequence;
  const size_t vocab = static_cast<size_t>(model_->spec().vocab_size);
  if (s.prompt_logprobs.empty()) s.prompt_logprobs.emplace_back(std::nullopt);
  for (int i = rows.begin; i < std::min(rows.begin + rows.count, s.prompt_length() - 1); ++i) {
    const std::span<const float> row(logits + static_cast<size_t>(i - rows.begin) * vocab, vocab);
    s.prompt_logprobs.push_back(Logprob(row, s.tokens[i + 1], *s.request.sampling.prompt_logprobs));
  }
}

bool Engine::Impl::Advance(const ScheduledRows& rows, const float* logits) {
  Sequence& s = *rows.sequence;
  const SamplingParams& params = s.request.sampling;
  const bool in_prompt = rows.begin < s.prompt_length();
  if (in_prompt && params.prompt_logprobs.has_value()) CollectPromptLogprobs(rows, logits);
  if (s.computed < static_cast<int>(s.tokens.size())) return false;  // more of the prompt to come

  OutputDelta delta;
  if (!s.prompt_delivered) {
    delta.prompt_logprobs = std::move(s.prompt_logprobs);
    s.prompt_delivered = true;
  }
  if (params.max_tokens == 0) {
    delta.finished = true;
    delta.finish_reason = FinishReason::kLength;
  } else {
    // The row of the last token is the last one with logits.
    const size_t vocab = static_cast<size_t>(model_->spec().vocab_size);
    const bool every_row = in_prompt && params.prompt_logprobs.has_value();
    const std::span<const float> row(
        logits + (every_row ? static_cast<size_t>(rows.count - 1) * vocab : 0), vocab);
    const TokenId token = sampler_.Sample(row, params, s.seed, s.generated());
    s.tokens.push_back(token);
    delta.tokens.push_back(token);
    if (params.logprobs.has_value())
      delta.logprobs.push_back(Logprob(row, token, *params.logprobs));

    const bool eos = !params.ignore_eos && std::find(eos_.begin(), eos_.end(), token) != eos_.end();
    const bool stop_token = std::find(params.stop_token_ids.begin(), params.stop_token_ids.end(),
                                      token) != params.stop_token_ids.end();
    if (!eos && (!stop_token || params.include_stop)) delta.text = s.text.Push(token);
    if (stop_token && !eos) delta.stop_token = token;
    const bool length = s.generated() >= params.max_tokens ||
                        static_cast<int>(s.tokens.size()) >= options_.max_model_len;
    if (eos || stop_token || length || s.text.matched_stop().has_value()) {
      delta.finished = true;
      if (!s.text.matched_stop().has_value()) delta.text += s.text.Finish();
      delta.finish_reason = eos || stop_token || s.text.matched_stop().has_value()
                                ? FinishReason::kStop
                                : FinishReason::kLength;
      delta.stop_string = s.text.matched_stop();
    }
  }
  delta.usage = {s.prompt_length(), s.generated()};
  const bool finished = delta.finished;
  if (finished) {
    // Free before the answer leaves: a client that saw the end finds the memory returned.
    blocks_.Give(std::exchange(s.blocks, {}));
    const std::lock_guard<std::mutex> lock(mutex_);
    stats_.prompt_tokens += static_cast<uint64_t>(s.prompt_length());
    stats_.generation_tokens += static_cast<uint64_t>(s.generated());
    ++(delta.finish_reason == FinishReason::kStop ? stats_.finished_stop : stats_.finished_length);
    stats_.kv_blocks_used = blocks_.total() - blocks_.available();
    --stats_.running;
    ids_.erase(s.request.id);
  }
  s.sink->OnDelta(std::move(delta));
  return finished;
}

void Engine::Impl::Fail(SequencePtr sequence, const absl::Status& status) {
  blocks_.Give(std::exchange(sequence->blocks, {}));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stats_.prompt_tokens +=
        static_cast<uint64_t>(std::min(sequence->computed, sequence->prompt_length()));
    stats_.generation_tokens += static_cast<uint64_t>(sequence->generated());
    const bool abort = absl::IsCancelled(status) || absl::IsDeadlineExceeded(status);
    ++(abort ? stats_.finished_abort : stats_.finished_error);
    stats_.kv_blocks_used = blocks_.total() - blocks_.available();
    ids_.erase(sequence->request.id);
  }
  sequence->sink->OnError(status);
}

void Engine::Impl::UpdateGauges() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.running = static_cast<int>(running_.size());
  stats_.waiting = queued_seqs_;
  stats_.kv_blocks_used = blocks_.total() - blocks_.available();
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() { Shutdown(); }

Result<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options,
                                               std::unique_ptr<Model> model,
                                               std::shared_ptr<const Tokenizer> tokenizer,
                                               std::vector<TokenId> eos_token_ids) {
  EngineOptions o = options;
  const ModelSpec& spec = model->spec();
  if (o.max_model_len == 0) o.max_model_len = spec.max_position_embeddings;
  if (o.max_model_len < 1 || o.max_model_len > spec.max_position_embeddings) {
    return absl::InvalidArgumentError(
        "max-model-len: expected 1 to " + std::to_string(spec.max_position_embeddings) +
        " (max_position_embeddings), found " + std::to_string(options.max_model_len));
  }
  if (o.max_num_seqs < 1 || o.max_num_seqs > 65536) {
    return absl::InvalidArgumentError("max-num-seqs: expected 1 to 65536, found " +
                                      std::to_string(o.max_num_seqs));
  }
  if (o.max_step_tokens < o.max_num_seqs) o.max_step_tokens = o.max_num_seqs;
  const std::vector<KvLayerShape> shapes = CacheShapes(spec);
  const DType dtype = model->options().compute;
  const int64_t block_bytes = KvCacheStorage::BytesPerBlock(shapes, dtype);
  int64_t blocks = o.kv_cache_bytes / block_bytes;
  if (o.kv_cache_bytes == 0) {
    blocks = std::max(o.max_num_seqs * BlocksFor(std::min(o.max_model_len, 2048)),
                      BlocksFor(o.max_model_len));
  }
  if (blocks < BlocksFor(o.max_model_len)) {
    return absl::ResourceExhaustedError("kv-cache-memory: one sequence of max-model-len " +
                                        std::to_string(o.max_model_len) + " tokens needs " +
                                        std::to_string(BlocksFor(o.max_model_len) * block_bytes) +
                                        " bytes, found " + std::to_string(o.kv_cache_bytes));
  }
  MOESERVE_ASSIGN_OR_RETURN(KvCacheStorage cache, KvCacheStorage::Allocate(shapes, dtype, blocks));
  auto impl = std::make_unique<Impl>(o, std::move(model), std::move(tokenizer),
                                     std::move(eos_token_ids), std::move(cache));
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

absl::Status Engine::Submit(Request request, std::shared_ptr<TokenSink> sink) {
  return impl_->Submit(std::move(request), std::move(sink));
}
void Engine::Cancel(const std::string& id) { impl_->Cancel(id); }
void Engine::Drain(absl::Time deadline) { impl_->Drain(deadline); }
void Engine::Shutdown() { impl_->Shutdown(); }
EngineStats Engine::Stats() const { return impl_->Stats(); }
ExpertStats Engine::ExpertSnapshot() const { return impl_->recorder().Snapshot(); }
int Engine::max_model_len() const { return impl_->options_.max_model_len; }
const ModelSpec& Engine::spec() const { return impl_->model_->spec(); }
const Tokenizer& Engine::tokenizer() const { return *impl_->tokenizer_; }
bool Engine::has_tokenizer() const { return impl_->tokenizer_ != nullptr; }

}  // namespace moeserve
