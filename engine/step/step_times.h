// Where the time of a step goes, for benchmarks.
#pragma once

#include <chrono>

namespace moeserve {

// Sums over steps. The times say something only on devices whose operations have ended when the
// call returns (the CPU).
struct StepTimes {
  // Seconds in the products of experts; in what ranks can divide by rows (RowDivision) in attention
  // and dense feed-forwards; in the products of the output head. Everything else is in none of
  // them: routers, norms, sums, embeddings, exchanges.
  double experts = 0.0;
  double rows = 0.0;
  double head = 0.0;
  // With ranks: Imbalance() (weights/expert_placement.h) of the blocks, and their number.
  double imbalance = 0.0;
  int blocks = 0;
};

// Adds the time of its life to a member of `times`, which may be null.
class PartTimer {
 public:
  PartTimer(StepTimes* times, double StepTimes::*part) : times_(times), part_(part) {
    if (times_ != nullptr) begin_ = Clock::now();
  }
  ~PartTimer() {
    if (times_ == nullptr) return;
    times_->*part_ += std::chrono::duration<double>(Clock::now() - begin_).count();
  }
  PartTimer(const PartTimer&) = delete;
  PartTimer& operator=(const PartTimer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  StepTimes* const times_;
  double StepTimes::*const part_;
  Clock::time_point begin_;
};

}  // namespace moeserve
