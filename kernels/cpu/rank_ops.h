// The operations of ranks on the CPU.
#pragma once

#include <map>
#include <vector>

#include "kernels/cpu/workers.h"
#include "kernels/rank_ops.h"

namespace moeserve::cpu {

class CpuRankOps final : public RankOps {
 public:
  // `workers` must outlive the object.
  explicit CpuRankOps(Workers& workers) : workers_(workers) {}

  std::span<const int32_t> ExpertOffsets(const RoutingPlan& plan) override {
    return {plan.expert_offsets, static_cast<size_t>(plan.num_experts) + 1};
  }
  PlanParts Divide(const RoutingPlan& plan, const PlanOwners& owners, int slot) override {
    return parts_[slot].Divide(plan, owners);
  }
  void StartGather(const RowsView& results, std::span<const int64_t> rows_of_rank,
                   Exchange& exchange) override;
  void FinishGather(Exchange& exchange) override { exchange.FinishGather(); }
  void StartScatter(const RowsView& own, const PlanParts& parts, const RowsView& packed,
                    const RowsView& results, Exchange& exchange) override;
  void FinishScatter(Exchange& exchange) override { exchange.FinishAllToAll(); }
  void GatherColumns(const RowsView& own, const RowsView& output, Exchange& exchange) override;
  uint64_t Checksum(const RowsView& rows) override;

 private:
  Workers& workers_;
  std::map<int, PlanPartsMemory> parts_;        // by slot
  std::vector<int64_t> bytes_, receive_bytes_;  // scratch of StartGather() and StartScatter()
  std::vector<float> columns_;                  // scratch of GatherColumns()
};

}  // namespace moeserve::cpu
