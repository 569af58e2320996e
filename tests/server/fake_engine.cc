#include "tests/server/fake_engine.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/time/clock.h"
#include "base/steady_clock.h"

namespace moeserve::server::testing {

absl::StatusOr<std::vector<TokenId>> ByteTokenizer::Encode(std::string_view text,
                                                           bool add_special_tokens, bool) const {
  std::vector<TokenId> ids;
  if (add_special_tokens && add_bos) ids.push_back(kBos);
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

absl::StatusOr<std::vector<TokenId>> ByteTokenizer::EncodeTrusted(std::string_view text,
                                                                  std::span<const TextSpan> trusted,
                                                                  bool add_special_tokens) const {
  std::vector<TokenId> ids;
  if (add_special_tokens && add_bos) ids.push_back(kBos);
  for (size_t at = 0; at < text.size();) {
    const std::string_view next = text.substr(at, 5);
    const bool special = next == "<eos>" || next == "<bos>";
    if (special && std::any_of(trusted.begin(), trusted.end(), [at](const TextSpan& span) {
          return span.begin <= at && at + 5 <= span.end;
        })) {
      ids.push_back(next == "<eos>" ? kEos : kBos);
      at += 5;
    } else {
      ids.push_back(static_cast<unsigned char>(text[at++]));
    }
  }
  return ids;
}

absl::StatusOr<std::string> ByteTokenizer::Decode(std::span<const TokenId> ids,
                                                  bool skip_special_tokens) const {
  std::string text;
  for (const TokenId id : ids) {
    if (IsSpecial(id) && skip_special_tokens) continue;
    text += TokenBytes(id);
  }
  return text;
}

std::string ByteTokenizer::TokenBytes(TokenId id) const {
  if (id < 256) return std::string(1, static_cast<char>(id));
  if (id == kEos) return "<eos>";
  if (id == kBos) return "<bos>";
  return "<" + std::to_string(id) + ">";
}

std::string_view ByteTokenizer::TokenString(TokenId id) const {
  static const std::vector<std::string> strings = [this] {
    std::vector<std::string> all;
    for (TokenId i = 0; i < kVocabSize; ++i) all.push_back(TokenBytes(i));
    return all;
  }();
  return strings[id];
}

std::optional<TokenId> ByteTokenizer::TokenToId(std::string_view token) const {
  for (TokenId i = 0; i < kVocabSize; ++i) {
    if (TokenString(i) == token) return i;
  }
  return std::nullopt;
}

float FakeLogprob(TokenId token) { return -0.1f - static_cast<float>(token % 7) / 3.0f; }

namespace {

TokenLogprob MakeLogprob(TokenId token, int top) {
  TokenLogprob out;
  out.token = token;
  out.logprob = FakeLogprob(token);
  out.rank = token % 7;
  for (int i = 0; i < top; ++i) {
    out.top.emplace_back(static_cast<TokenId>('A' + i), -0.01f - static_cast<float>(i));
  }
  return out;
}

}  // namespace

FakeEngine::FakeEngine(Script script, int max_model_len)
    : options_{.max_model_len = max_model_len}, script_(std::move(script)) {
  spec_.vocab_size = kVocabSize;
  spec_.hidden_size = 8;
  spec_.eos_token_ids = {kEos};
  spec_.AddLayers(2);
  spec_.feed_forward(1).routing.emplace().widths = {8};
  thread_ = std::thread([this] { Loop(); });
}

FakeEngine::~FakeEngine() { Shutdown(); }

void FakeEngine::Shutdown() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

absl::Status FakeEngine::Submit(std::vector<Request> requests,
                                std::vector<std::shared_ptr<TokenSink>> sinks) {
  MutexLock lock(mutex_);
  if (draining_) return absl::UnavailableError("draining");
  if (!script_.submit_error.ok()) return script_.submit_error;
  for (const Request& request : requests) {
    if (running_.contains(request.id)) return absl::AlreadyExistsError("the id is running");
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    submitted_.push_back(requests[i]);
    auto running = std::make_shared<Running>();
    running->script = script_;
    running->sink = std::move(sinks[i]);
    running->request = std::move(requests[i]);
    running_[running->request.id] = running;
  }
  changed_.notify_all();
  return absl::OkStatus();
}

void FakeEngine::Cancel(const TokenSink* sink) {
  MutexLock lock(mutex_);
  for (const auto& [id, running] : running_) {
    if (running->sink.get() == sink) to_cancel_.push_back(id);
  }
  changed_.notify_all();
}

bool FakeEngine::Drain(absl::Time deadline) {
  MutexLock lock(mutex_);
  draining_ = true;
  changed_.wait_until(lock, ToSteadyTimePoint(deadline),
                      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return running_.empty(); });
  for (const auto& [id, running] : running_) to_cancel_.push_back(id);
  changed_.notify_all();
  return true;
}

EngineStats FakeEngine::Stats() const {
  MutexLock lock(mutex_);
  EngineStats stats;
  stats.running = static_cast<int>(running_.size());
  stats.healthy = healthy_;
  stats.kv_blocks_total = 100;
  stats.kv_blocks_used = stats.running;
  stats.kv_block_tokens = 16;
  stats.generation_tokens = generated_;
  stats.finished_stop = finished_;
  return stats;
}

EngineProgress FakeEngine::Progress() const { return {rounds_.load(), idle_.load()}; }

ExpertStats FakeEngine::ExpertSnapshot() const {
  ++snapshots_;
  ExpertStats stats;
  stats.tokens = 10;
  stats.always_active_parameters = 1000;
  BlockExpertStats block;
  block.layer = 1;
  block.num_experts = 4;
  block.max_selected = 2;
  block.tokens[0] = block.rows[0] = 6;
  block.tokens[1] = block.rows[1] = 4;
  block.selections = {10, 6, 4, 0};
  block.weight_sums = {5.0, 3.0, 2.0, 0.0};
  block.distinct_histogram = {0, 0, 10};
  block.expert_parameters = {100, 100, 100, 100};
  block.decode_selections = {4, 2, 2, 0};
  block.touching_tokens = {10, 6, 4, 0};
  block.visits = {5, 4, 3, 0};
  block.recomputed_selections = {0, 0, 0, 0};
  block.rejected_selections = {0, 0, 0, 0};
  block.expert_widths = {8, 8, 8, 8};
  block.router.rows = 5;
  block.router.entropy_sum = 5.0;
  block.router.squared_logsumexp_sum = 10.0;
  block.router.probability_sums = {2.5, 1.5, 1.0, 0.0};
  block.router.selections = {5, 3, 2, 0};
  stats.blocks.push_back(block);
  stats.diversity_blocks = 1;
  stats.diversity_histogram = {0, 0, 10};
  return stats;
}

void FakeEngine::SetScript(const Script& script) {
  MutexLock lock(mutex_);
  script_ = script;
}

void FakeEngine::SetHealthy(bool healthy) {
  MutexLock lock(mutex_);
  healthy_ = healthy;
}

void FakeEngine::SetStuck(bool stuck) {
  MutexLock lock(mutex_);
  stuck_ = stuck;
  idle_ = !stuck;
  changed_.notify_all();
}

void FakeEngine::Release() {
  MutexLock lock(mutex_);
  released_ = true;
  changed_.notify_all();
}

std::vector<Request> FakeEngine::submitted() const {
  MutexLock lock(mutex_);
  return submitted_;
}

int FakeEngine::active() const {
  MutexLock lock(mutex_);
  return static_cast<int>(running_.size());
}

int FakeEngine::cancelled() const {
  MutexLock lock(mutex_);
  return cancelled_;
}

bool FakeEngine::WaitForActive(int count) const {
  MutexLock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::seconds(5),
                           [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                             return static_cast<int>(running_.size()) == count;
                           });
}

bool FakeEngine::WaitForCancelled(int count) const {
  MutexLock lock(mutex_);
  return changed_.wait_for(
      lock, std::chrono::seconds(5),
      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return cancelled_ >= count; });
}

bool FakeEngine::Step(Running& running) {
  const Script& script = running.script;
  const SamplingParams& sampling = running.request.sampling;
  OutputDelta delta;
  delta.usage.prompt_tokens = static_cast<int>(running.request.prompt.size());
  if (running.request.deadline <= SteadyNow()) {
    running.sink->OnError(absl::DeadlineExceededError("the deadline has passed"));
    return true;
  }
  if (!running.started && sampling.prompt_logprobs) {
    for (size_t i = 0; i < running.request.prompt.size(); ++i) {
      delta.prompt_logprobs.push_back(
          i == 0
              ? std::nullopt
              : std::optional(MakeLogprob(running.request.prompt[i], *sampling.prompt_logprobs)));
    }
  }
  running.started = true;
  if (running.produced == script.fail_after) {
    running.sink->OnError(script.run_error);
    return true;
  }
  if (sampling.max_tokens > 0) {
    const size_t length = script.reply.size();
    const size_t at = static_cast<size_t>(running.produced);
    const bool eos = !script.endless && at >= length;
    const TokenId token = eos ? kEos : static_cast<unsigned char>(script.reply[at % length]);
    ++running.produced;
    ++generated_;
    delta.tokens.push_back(token);
    if (sampling.logprobs) delta.logprobs.push_back(MakeLogprob(token, *sampling.logprobs));
    if (!eos) {
      delta.text = std::string(1, static_cast<char>(token));
      if (script.bytes_per_token > 1) delta.text.resize(script.bytes_per_token, '.');
    }
    delta.finished = eos && !sampling.ignore_eos;
  }
  if (!delta.finished && running.produced >= sampling.max_tokens) {
    delta.finished = true;
    delta.finish_reason = FinishReason::kLength;
  }
  delta.usage.completion_tokens = running.produced;
  const bool finished = delta.finished;
  finished_ += finished;
  running.sink->OnDelta(std::move(delta));
  return finished;
}

void FakeEngine::Loop() {
  MutexLock lock(mutex_);
  while (true) {
    changed_.wait(lock,
                  [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !stuck_ || stopping_; });
    ++rounds_;
    for (const std::string& id : std::exchange(to_cancel_, {})) {
      const auto it = running_.find(id);
      if (it == running_.end()) continue;
      const auto running = it->second;
      running_.erase(it);
      ++cancelled_;
      lock.unlock();
      running->sink->OnError(absl::CancelledError("cancelled"));
      lock.lock();
    }
    changed_.notify_all();
    if (stopping_) break;
    std::vector<std::shared_ptr<Running>> step;
    absl::Duration delay = absl::InfiniteDuration();
    for (const auto& [id, running] : running_) {
      if (running->script.held && !released_ &&
          running->request.deadline == absl::InfiniteFuture()) {
        continue;
      }
      if (running->script.held && !released_ && running->request.deadline > SteadyNow()) {
        delay = std::min(delay, absl::Milliseconds(5));
        continue;
      }
      delay = std::min(delay, running->script.delay);
      step.push_back(running);
    }
    if (step.empty()) {
      const auto quiet = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return stopping_ || !to_cancel_.empty();
      };
      if (delay == absl::InfiniteDuration()) {
        const size_t before = submitted_.size();
        changed_.wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
          return quiet() || submitted_.size() != before || released_;
        });
        if (released_ && running_.empty() && !quiet() && submitted_.size() == before) {
          changed_.wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
            return quiet() || submitted_.size() != before;
          });
        }
      } else {
        changed_.wait_for(lock, absl::ToChronoNanoseconds(delay), quiet);
      }
      continue;
    }
    lock.unlock();
    absl::SleepFor(delay);
    std::vector<std::string> ended;
    for (const auto& running : step) {
      if (Step(*running)) ended.push_back(running->request.id);
    }
    step.clear();
    lock.lock();
    for (const std::string& id : ended) running_.erase(id);
  }
  for (const auto& [id, running] : std::exchange(running_, {})) {
    lock.unlock();
    running->sink->OnError(absl::CancelledError("shut down"));
    lock.lock();
  }
}

}  // namespace moeserve::server::testing
