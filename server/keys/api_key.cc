#include "server/keys/api_key.h"

#include <algorithm>
#include <chrono>

#include "base/error_text.h"
#include "base/sha256.h"
#include "server/base/api_error.h"

namespace moeserve::server {
namespace {

void Apply(const std::optional<int64_t>& limit, std::optional<TokenBucket>& bucket,
           TokenBucket::Clock::time_point now) {
  if (!limit) {
    bucket.reset();
  } else if (bucket) {
    bucket->SetLimit(*limit, now);
  } else {
    bucket.emplace(*limit, now);
  }
}

// Writes a duration as "1m26.4s" or "88ms".
std::string DurationText(std::chrono::nanoseconds duration) {
  return absl::FormatDuration(absl::Ceil(absl::FromChrono(duration), absl::Milliseconds(1)));
}

void AppendBucket(const std::optional<TokenBucket>& bucket, std::string_view what,
                  TokenBucket::Clock::time_point now, ApiKey::Headers& headers) {
  if (!bucket) return;
  headers.emplace_back(Concat("x-ratelimit-limit-", what), Concat(bucket->limit()));
  headers.emplace_back(Concat("x-ratelimit-remaining-", what), Concat(bucket->Remaining(now)));
  headers.emplace_back(Concat("x-ratelimit-reset-", what), DurationText(bucket->UntilFull(now)));
}

}  // namespace

std::string KeyDigest(std::string_view key) { return Sha256(key); }

ApiKey::ApiKey(KeySpec spec, std::shared_ptr<KeyUsage> usage, Clock::time_point now)
    : spec_(std::move(spec)), usage_(std::move(usage)) {
  MutexLock lock(usage_->mutex);
  Apply(spec_.limits.requests_per_minute, usage_->request_bucket, now);
  Apply(spec_.limits.tokens_per_minute, usage_->token_bucket, now);
}

absl::Status ApiKey::RequireAnyOf(ScopeSet scopes) const {
  if (spec_.scopes.HasAnyOf(scopes)) return absl::OkStatus();
  Count(KeyRefusal::kScope);
  return MakeError(
      absl::StatusCode::kPermissionDenied, "permission_denied",
      Concat("this API key lacks the scope ", scopes.Text(" or "), ", which this request needs"));
}

absl::Status ApiKey::TakeRequest(Clock::time_point now) const {
  std::chrono::nanoseconds wait{};
  int64_t limit = 0;
  {
    MutexLock lock(usage_->mutex);
    if (usage_->request_bucket) {
      limit = usage_->request_bucket->limit();
      wait = usage_->request_bucket->Take(1, now);
    }
  }
  if (wait.count() == 0) {
    ++usage_->requests;
    return absl::OkStatus();
  }
  Count(KeyRefusal::kRequests);
  return RateLimitExceeded(Concat("this API key may send ", limit, " requests per minute"),
                           absl::FromChrono(wait));
}

void ApiKey::CountRefusedRequest(Clock::time_point now) const {
  MutexLock lock(usage_->mutex);
  usage_->refusal_pace.CountRefusal(now);
}

RefusalPace::Duration ApiKey::Wait(Clock::time_point now) const {
  MutexLock lock(usage_->mutex);
  return usage_->refusal_pace.WaitFrom(now);
}

bool ApiKey::MayUseModel(std::string_view served_name) const {
  const auto& models = spec_.limits.models;
  return !models || std::find(models->begin(), models->end(), served_name) != models->end();
}

std::string ApiKey::CacheSalt(std::string_view request_salt) const {
  // Names contain no NUL, so different arguments give different results.
  const std::string owner = spec_.cache_group.empty() ? Concat("key ", usage_->serial)
                                                      : Concat("group ", spec_.cache_group);
  return Concat(owner, '\0', request_salt);
}

ApiKey::Headers ApiKey::RateHeaders(Clock::time_point now) const {
  Headers headers;
  MutexLock lock(usage_->mutex);
  AppendBucket(usage_->request_bucket, "requests", now, headers);
  AppendBucket(usage_->token_bucket, "tokens", now, headers);
  return headers;
}

}  // namespace moeserve::server
