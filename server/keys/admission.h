// What one request that runs the model takes from the limits of its key.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "server/keys/api_key.h"

namespace moeserve::server {

// Holds a place among the key's concurrent requests, and the tokens that the request may use at
// most, until End(). Thread-safe.
class Admission {
 public:
  using Clock = TokenBucket::Clock;

  // Takes `prompt_tokens` and `max_generated` from the key's tokens per minute. ResourceExhausted,
  // with API code "rate_limit_exceeded", if the key's limits do not allow the request now;
  // InvalidArgument if it needs more tokens than the key gets in a minute. `choices` is the number
  // of calls to ChoiceEnded() that end the request.
  static Result<std::shared_ptr<Admission>> Admit(std::shared_ptr<const ApiKey> key,
                                                  int64_t prompt_tokens, int64_t max_generated,
                                                  int choices,
                                                  Clock::time_point now = Clock::now());
  ~Admission() { End(); }

  Admission(const Admission&) = delete;
  Admission& operator=(const Admission&) = delete;

  // The engine has not accepted the request: gives the place and all tokens back.
  void Refuse();
  void CountGenerated(int64_t tokens);
  void ChoiceEnded();
  // Counts the prompt's tokens as used, and gives back the place and the tokens that were not
  // generated. Has no effect after the first call of End() or Refuse(). Must be called before the
  // client can see the end of its response, so that its next request finds the place free.
  void End();

 private:
  Admission(std::shared_ptr<const ApiKey> key, int64_t prompt_tokens, int64_t max_generated,
            int choices);
  void GiveBack(int64_t tokens);

  const std::shared_ptr<const ApiKey> key_;
  const int64_t prompt_tokens_;
  const int64_t max_generated_;
  std::atomic<int> open_choices_;
  std::atomic<int64_t> generated_{0};
  std::atomic<bool> ended_{false};
};

}  // namespace moeserve::server
