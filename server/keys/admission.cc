#include "server/keys/admission.h"

#include <algorithm>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"

namespace moeserve::server {

Admission::Admission(std::shared_ptr<const ApiKey> key, int64_t prompt_tokens,
                     int64_t max_generated, int choices)
    : key_(std::move(key)),
      prompt_tokens_(prompt_tokens),
      max_generated_(max_generated),
      open_choices_(choices) {}

Result<std::shared_ptr<Admission>> Admission::Admit(std::shared_ptr<const ApiKey> key,
                                                    int64_t prompt_tokens, int64_t max_generated,
                                                    int choices, Clock::time_point now) {
  const int64_t tokens = prompt_tokens + max_generated;
  const auto& most_running = key->spec().limits.max_concurrent_requests;
  KeyUsage& usage = *key->usage();
  MutexLock lock(usage.mutex);
  if (most_running && usage.running >= *most_running) {
    lock.unlock();
    key->Count(KeyRefusal::kConcurrency);
    return RateLimitExceeded(
        Concat("this API key may have ", *most_running, " requests running at the same time"),
        absl::Seconds(1));
  }
  if (usage.token_bucket) {
    const int64_t limit = usage.token_bucket->limit();
    const bool possible = tokens <= limit;
    const auto wait = possible ? usage.token_bucket->Take(tokens, now) : std::chrono::nanoseconds();
    if (!possible || wait.count() > 0) {
      lock.unlock();
      key->Count(KeyRefusal::kTokens);
      const std::string message =
          Concat("this API key may use ", limit, " tokens per minute; the prompt has ",
                 prompt_tokens, " and at most ", max_generated, " are to be generated");
      if (!possible) {
        return MakeError(absl::StatusCode::kInvalidArgument, "token_limit_exceeded", message,
                         "max_tokens");
      }
      return RateLimitExceeded(message, absl::FromChrono(wait));
    }
  }
  ++usage.running;
  lock.unlock();
  return std::shared_ptr<Admission>(
      new Admission(std::move(key), prompt_tokens, max_generated, choices));
}

void Admission::GiveBack(int64_t tokens) {
  KeyUsage& usage = *key_->usage();
  MutexLock lock(usage.mutex);
  --usage.running;
  if (usage.token_bucket) usage.token_bucket->GiveBack(tokens, Clock::now());
}

void Admission::Refuse() {
  if (!ended_.exchange(true)) GiveBack(prompt_tokens_ + max_generated_);
}

void Admission::CountGenerated(int64_t tokens) {
  if (tokens <= 0) return;
  generated_ += tokens;
  key_->usage()->generated_tokens += static_cast<uint64_t>(tokens);
}

void Admission::ChoiceEnded() {
  if (--open_choices_ == 0) End();
}

void Admission::End() {
  if (ended_.exchange(true)) return;
  key_->usage()->prompt_tokens += static_cast<uint64_t>(prompt_tokens_);
  GiveBack(std::max<int64_t>(0, max_generated_ - generated_));
}

}  // namespace moeserve::server
