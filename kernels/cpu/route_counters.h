// Counts, on the CPU, how the experts are used, from the routing plans of every step.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "kernels/backend.h"
#include "kernels/route_counters.h"

namespace moeserve::cpu {

// The backend's thread adds steps; any thread may read. Readers see either all or nothing of a
// step, except in the token x expert table.
class CpuRouteCounters : public RouteCounters {
 public:
  explicit CpuRouteCounters(CountSettings settings);

  Status Refresh() override { return absl::OkStatus(); }
  CountsSnapshot Read() const override;
  void AssignTokenRows(std::span<const TokenRowChange> changes) override;
  Status ReadTokenExperts(int64_t first, std::span<uint32_t> part) const override;

  // Adds a step. `kind` and `token_ids` are [T]. `plans` holds one plan for every block of the
  // settings, in the same order, with T * sub_tokens rows each; null if the block was not routed.
  // Writes `routes` [T].
  void Count(std::span<const uint8_t> kind, std::span<const int32_t> token_ids,
             std::span<const RoutingPlan* const> plans, std::span<TokenRoutes> routes);
  const CountSettings& settings() const { return settings_; }

 private:
  struct Step {
    std::span<const uint8_t> kind;
    std::span<const int32_t> token_ids;
    // The kind of all tokens of the step, or kMixed if their kinds differ.
    uint8_t uniform_kind;
    int step_kind;  // the index into the arrays of ModelCounts
    std::span<TokenRoutes> routes;
  };
  static constexpr uint8_t kMixed = 254;

  // Adds the plan of one block.
  void CountBlock(const Step& step, size_t index, const RoutingPlan& plan)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Adds the assignments [begin, end) of one expert.
  template <bool mixed>
  void CountExpert(const Step& step, size_t index, const RoutingPlan& plan, int32_t begin,
                   int32_t end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Adds 1 to each table element listed in table_indices_, then clears the list.
  void CountPairs();

  const CountSettings settings_;
  std::vector<int64_t> first_expert_;  // [blocks] its first expert among those of all blocks
  int64_t experts_ = 0;                // number of experts of all blocks
  std::vector<uint32_t> distinct_;     // [T] distinct experts of each token in the current block
  // [T] distinct_, summed over those blocks of the step that contribute to the diversity histogram
  std::vector<uint32_t> diversity_;
  std::vector<size_t> table_indices_;  // table elements of the step's (token, expert) pairs

  mutable Mutex mutex_;
  CountsSnapshot counts_ ABSL_GUARDED_BY(mutex_);
  std::vector<int32_t> row_of_token_;  // [vocabulary]; empty if every token has a row
  // [table_rows(), experts_], or null. Written without a lock: readers may see a part of a step.
  std::unique_ptr<std::atomic<uint32_t>[]> table_;
};

}  // namespace moeserve::cpu
