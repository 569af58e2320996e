// Watches how the experts of a running model load its ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "base/steady_clock.h"
#include "engine/weights/place_experts.h"

namespace moeserve {

// Any thread may call any function.
class LoadWatch {
 public:
  // The rows of old steps count half after this time.
  static constexpr absl::Duration kHalfLife = absl::Minutes(5);
  // About how many steps the mean of the imbalance covers.
  static constexpr int kSteps = 100;

  // `now` is the clock.
  explicit LoadWatch(std::function<absl::Time()> now = SteadyNow);

  // Counts a step of a routed block: rows[e] rows chose place e, and Imbalance() returned
  // `imbalance`.
  void Add(std::pair<Stack, int> block, std::span<const int32_t> rows, double imbalance);

  // Forgets what was counted, such as trials before requests run.
  void Clear();

  // Returns the mean over the blocks of the mean imbalance of their last steps; 0 if there were
  // none.
  double imbalance() const;
  // Returns the decayed numbers of rows, all times a common factor.
  ExpertLoads loads() const;

 private:
  struct Block {
    std::vector<double> rows;  // each weighted by 2^(its time / kHalfLife)
    double imbalances = 0.0;   // decayed sum over steps
    double steps = 0.0;        // decayed number of steps
  };

  // Returns the weight of a row that is counted now.
  double WeightNow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::function<absl::Time()> now_;
  mutable Mutex mutex_;
  absl::Time base_ ABSL_GUARDED_BY(mutex_);  // when the weight is 1
  std::map<std::pair<Stack, int>, Block> blocks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moeserve
