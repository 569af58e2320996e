// Counts what the experts do, on the CPU, from the routing plans of every step.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/route_counters.h"

namespace moeserve::cpu {

// The backend's thread counts; any thread reads. A step becomes visible as a whole.
class CpuRouteCounters : public RouteCounters {
 public:
  explicit CpuRouteCounters(CountSettings settings);

  Status Refresh() override { return absl::OkStatus(); }
  CountsSnapshot Read() const override;
  Status ReadTokenExperts(int64_t first, std::span<uint32_t> part) const override;

  // Adds a step. `kind` and `token_ids` [T]; `plans`: of every block of the settings, in their
  // order, of T * sub_tokens rows each, null where the block was not routed. Writes `routes` [T].
  void Count(std::span<const uint8_t> kind, std::span<const int32_t> token_ids,
             std::span<const RoutingPlan* const> plans, std::span<TokenRoutes> routes);
  const CountSettings& settings() const { return settings_; }

 private:
  struct Step {
    std::span<const uint8_t> kind;
    std::span<const int32_t> token_ids;
    // The kind of all tokens of the step; kMixed: they differ.
    uint8_t uniform_kind;
    std::span<TokenRoutes> routes;
    int step_kind() const { return uniform_kind == kTokenDecode ? 1 : 0; }  // see ModelCounts
  };
  static constexpr uint8_t kMixed = 254;

  // Under mutex_.
  void CountBlock(const Step& step, size_t index, const RoutingPlan& plan);
  // Adds the assignments [begin, end) of one expert.
  template <bool mixed>
  void CountExpert(const Step& step, size_t index, const RoutingPlan& plan, int32_t begin,
                   int32_t end);
  // Adds 1 for each of table_indices_ and clears it.
  void CountPairs();

  const CountSettings settings_;
  std::vector<int64_t> first_expert_;  // by block: among the experts of all blocks
  int64_t experts_ = 0;                // of all blocks
  std::vector<uint32_t> distinct_;     // [T] distinct experts of each token in the block
  std::vector<uint32_t> diversity_;    // [T] distinct experts in the diverse blocks so far
  std::vector<size_t> table_indices_;  // of the pairs of the step

  mutable std::mutex mutex_;
  CountsSnapshot counts_;  // guarded by mutex_
  // [vocabulary, experts_], or null. Written without a lock: readers may see a part of a step.
  std::unique_ptr<std::atomic<uint32_t>[]> table_;
};

}  // namespace moeserve::cpu
