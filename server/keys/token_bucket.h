// A limit on an amount per minute.
#pragma once

#include <chrono>
#include <cstdint>

namespace moeserve::server {

// Holds up to one minute's amount and is refilled steadily. Not thread-safe. A `now` before that of
// the last call counts as the same time.
class TokenBucket {
 public:
  using Clock = std::chrono::steady_clock;

  // The bucket is full at first. `per_minute` must be positive.
  TokenBucket(int64_t per_minute, Clock::time_point now);

  // Takes `amount` and returns zero, or takes nothing and returns after what time the bucket will
  // hold so much. `amount` must be at most limit().
  std::chrono::nanoseconds Take(int64_t amount, Clock::time_point now);
  void GiveBack(int64_t amount, Clock::time_point now);
  // Keeps what the bucket holds, up to the new limit.
  void SetLimit(int64_t per_minute, Clock::time_point now);

  int64_t limit() const { return limit_; }
  int64_t Remaining(Clock::time_point now) const;
  // Returns after what time the bucket will be full.
  std::chrono::nanoseconds UntilFull(Clock::time_point now) const;

 private:
  double LevelAt(Clock::time_point now) const;
  std::chrono::nanoseconds TimeFor(double amount) const;
  void Refill(Clock::time_point now);

  int64_t limit_;
  double level_;
  Clock::time_point last_;
};

}  // namespace moeserve::server
