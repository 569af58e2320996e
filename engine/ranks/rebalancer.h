// Moves experts between ranks when their loads have become unequal.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <stop_token>
#include <thread>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "engine/balance/load_watch.h"
#include "engine/balance/rebalance_plan.h"
#include "engine/ranks/leader.h"

namespace moeserve {

struct RebalanceOptions {
  absl::Duration interval = absl::Seconds(60);  // zero: only RunRound() plans
  RebalanceLimits limits;
  ExpertSizes parameters, bytes;  // of the model
};

// Plans a round every now and then, on a thread of the leader's process, and lets the leader
// announce it. While a round is under way, no other one is planned. All functions may be called by
// any thread.
class Rebalancer {
 public:
  // `leader`, whose model has been loaded, and `watch`, which counts what that model does, outlive
  // the object.
  Rebalancer(Leader& leader, const LoadWatch& watch, RebalanceOptions options);
  // Stops.
  ~Rebalancer();

  // Plans no further round, from when the server drains on. A round that was announced may still
  // take effect.
  void Stop();

  // Plans a round now. Returns how many bytes ranks load for it; 0: there is nothing to gain,
  // another round is under way, or Stop() was called.
  int64_t RunRound();
  // Returns the sum over all rounds.
  int64_t moved_bytes() const;

 private:
  void Run(const std::stop_token& stop);

  Leader& leader_;
  const LoadWatch& watch_;
  const RebalanceOptions options_;
  mutable Mutex mutex_;
  std::condition_variable_any stopped_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t moved_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::jthread thread_;
};

}  // namespace moeserve
