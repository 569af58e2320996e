// Slows down clients whose requests are refused again and again.
#pragma once

#include <algorithm>
#include <chrono>

namespace moeserve::server {

// The pace of one client. A client may be refused kBurst times at once and then once per kInterval;
// beyond that, its next request waits. Without this, a client that repeats its requests as soon as
// they are refused would cost as much as one whose requests are served. Not thread-safe. All times
// are of the steady clock.
class RefusalPace {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;

  static constexpr int kBurst = 50;
  static constexpr std::chrono::milliseconds kInterval{50};
  static constexpr std::chrono::seconds kLongest{2};  // limit on the wait
  // A client whose next request would wait for longer is flooding the server.
  static constexpr std::chrono::seconds kFlood{1};
  // A connection that ends after a TLS handshake and before a request counts as this many refusals,
  // because the handshake costs several times as much as a refused request.
  static constexpr int kUnusedHandshake = 5;

  void CountRefusal(Time now, int times = 1) {
    next_ = std::min(std::max(next_, now - kBurst * kInterval) + times * kInterval, now + kLongest);
  }

  // Returns how long the client's next request has to wait, from `now`.
  Duration WaitFrom(Time now) const { return std::max(next_ - now, Duration::zero()); }

 private:
  Time next_;
};

}  // namespace moeserve::server
