// One API key: its rights and limits, and what it has used.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "server/base/refusal_pace.h"
#include "server/keys/scopes.h"
#include "server/keys/token_bucket.h"

namespace moeserve::server {

struct KeyLimits {
  std::optional<int64_t> requests_per_minute;
  std::optional<int64_t> tokens_per_minute;
  std::optional<int64_t> max_concurrent_requests;  // that run the model
  std::optional<int> min_priority;                 // absent: the server's --min-priority
  std::optional<std::vector<std::string>> models;  // served names; absent: all
};

// A key as the key file describes it.
struct KeySpec {
  std::string name;    // unique; empty for the keys of a text file, which KeyStore names
  std::string digest;  // SHA-256 of the key, 32 bytes; unique
  ScopeSet scopes = ScopeSet::All();
  KeyLimits limits;
  std::optional<absl::Time> expires;
  std::string cache_group;  // empty: the key shares its cached prefixes with no other
};

// Returns the digest that KeySpec::digest holds for a key.
std::string KeyDigest(std::string_view key);

// Why a request with a known key was refused.
enum class KeyRefusal { kScope, kExpired, kRequests, kTokens, kConcurrency };
inline constexpr std::array<std::string_view, 5> kKeyRefusalNames = {"scope", "expired", "requests",
                                                                     "tokens", "concurrency"};

// What a key has used. Outlives reloads of the key file. Thread-safe.
struct KeyUsage {
  explicit KeyUsage(uint64_t number) : serial(number) {}

  const uint64_t serial;  // no other key of this process has it
  std::atomic<uint64_t> requests{0};
  std::atomic<uint64_t> prompt_tokens{0};
  std::atomic<uint64_t> generated_tokens{0};
  std::array<std::atomic<uint64_t>, kKeyRefusalNames.size()> refusals{};

  mutable Mutex mutex;
  std::optional<TokenBucket> request_bucket ABSL_GUARDED_BY(mutex);
  std::optional<TokenBucket> token_bucket ABSL_GUARDED_BY(mutex);
  RefusalPace refusal_pace ABSL_GUARDED_BY(mutex);
  int64_t running ABSL_GUARDED_BY(mutex) = 0;
};

// Thread-safe.
class ApiKey {
 public:
  using Clock = TokenBucket::Clock;
  using Headers = std::vector<std::pair<std::string, std::string>>;

  // Applies the limits of `spec` to `usage`.
  ApiKey(KeySpec spec, std::shared_ptr<KeyUsage> usage, Clock::time_point now = Clock::now());

  const KeySpec& spec() const { return spec_; }
  const std::string& name() const { return spec_.name; }
  const std::shared_ptr<KeyUsage>& usage() const { return usage_; }

  // Returns PermissionDenied, and counts it, unless the key has one of these scopes.
  absl::Status RequireAnyOf(ScopeSet scopes) const;
  // Counts a request. ResourceExhausted, with API code "rate_limit_exceeded", beyond the limit on
  // requests per minute.
  absl::Status TakeRequest(Clock::time_point now = Clock::now()) const;

  bool MayUseModel(std::string_view served_name) const;
  // Returns the salt under which the engine caches the prefixes of a request that has the salt
  // `request_salt`. Only keys of the same cache group can get equal results.
  std::string CacheSalt(std::string_view request_salt) const;

  // Returns the headers x-ratelimit-* for the limits that the key has.
  Headers RateHeaders(Clock::time_point now = Clock::now()) const;

  // Counts a request that was refused for any reason, which can slow down the key's next ones.
  void CountRefusedRequest(Clock::time_point now = Clock::now()) const;
  // Returns how long the key's next request has to wait.
  RefusalPace::Duration Wait(Clock::time_point now = Clock::now()) const;

  void Count(KeyRefusal refusal) const { ++usage_->refusals[static_cast<size_t>(refusal)]; }

 private:
  const KeySpec spec_;
  const std::shared_ptr<KeyUsage> usage_;
};

// Returns the key's name; empty if `key` is null, as it is on a server without keys.
inline std::string_view KeyName(const ApiKey* key) {
  return key == nullptr ? std::string_view() : std::string_view(key->name());
}

}  // namespace moeserve::server
