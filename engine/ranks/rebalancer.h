// Moves experts between ranks when their loads have become unequal.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <set>
#include <stop_token>
#include <thread>
#include <utility>

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
  // Returns the sum over the rounds that have taken effect.
  int64_t moved_bytes();

 private:
  void Run(const std::stop_token& stop);
  // Looks what has become of the round that was announced. If ranks have refused it, its blocks
  // stay as they are from now on, because weights do not change.
  void Settle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Leader& leader_;
  const LoadWatch& watch_;
  const RebalanceOptions options_;
  mutable Mutex mutex_;
  std::condition_variable_any stopped_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t moved_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Of the round that was announced last; null once it has taken effect or was refused.
  std::shared_ptr<const ExpertPlacement> announced_ ABSL_GUARDED_BY(mutex_);
  int64_t announced_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<std::pair<Stack, int>> refused_ ABSL_GUARDED_BY(mutex_);  // blocks
  std::jthread thread_;
};

}  // namespace moeserve
