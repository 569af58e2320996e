#include "server/keys/token_bucket.h"

#include <algorithm>
#include <cmath>

namespace moeserve::server {
namespace {

constexpr double kNanosecondsPerMinute = 60e9;

}  // namespace

TokenBucket::TokenBucket(int64_t per_minute, Clock::time_point now)
    : limit_(per_minute), level_(static_cast<double>(per_minute)), last_(now) {}

double TokenBucket::LevelAt(Clock::time_point now) const {
  const double passed =
      std::max(0.0, std::chrono::duration<double, std::nano>(now - last_).count());
  const double limit = static_cast<double>(limit_);
  return std::min(limit, level_ + passed / kNanosecondsPerMinute * limit);
}

std::chrono::nanoseconds TokenBucket::TimeFor(double amount) const {
  const double time = amount / static_cast<double>(limit_) * kNanosecondsPerMinute;
  return std::chrono::nanoseconds(static_cast<int64_t>(std::ceil(std::max(0.0, time))));
}

void TokenBucket::Refill(Clock::time_point now) {
  level_ = LevelAt(now);
  last_ = std::max(last_, now);
}

std::chrono::nanoseconds TokenBucket::Take(int64_t amount, Clock::time_point now) {
  Refill(now);
  // Sums of parts of a minute can miss a whole number by a rounding error.
  constexpr double kRounding = 1e-6;
  const double missing = static_cast<double>(amount) - level_;
  if (missing > kRounding) return TimeFor(missing);
  level_ = std::max(0.0, level_ - static_cast<double>(amount));
  return {};
}

void TokenBucket::GiveBack(int64_t amount, Clock::time_point now) {
  Refill(now);
  level_ = std::min(static_cast<double>(limit_), level_ + static_cast<double>(amount));
}

void TokenBucket::SetLimit(int64_t per_minute, Clock::time_point now) {
  Refill(now);
  limit_ = per_minute;
  level_ = std::min(level_, static_cast<double>(limit_));
}

int64_t TokenBucket::Remaining(Clock::time_point now) const {
  return static_cast<int64_t>(LevelAt(now));
}

std::chrono::nanoseconds TokenBucket::UntilFull(Clock::time_point now) const {
  return TimeFor(static_cast<double>(limit_) - LevelAt(now));
}

}  // namespace moeserve::server
