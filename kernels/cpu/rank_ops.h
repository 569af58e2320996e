// The operations of ranks on the CPU.
#pragma once

#include <map>
#include <vector>

#include "kernels/rank_ops.h"

namespace moeserve::cpu {

class CpuRankOps final : public RankOps {
 public:
  PlanParts Divide(const RoutingPlan& plan, const PlanOwners& owners, int slot) override {
    return parts_[slot].Divide(plan, owners);
  }
  void StartGather(const RowsView& results, std::span<const int64_t> rows_of_rank,
                   Exchange& exchange) override;
  void FinishGather(Exchange& exchange) override { exchange.FinishGather(); }
  uint64_t Checksum(const RowsView& rows) override;

 private:
  std::map<int, PlanPartsMemory> parts_;  // by slot
  std::vector<int64_t> bytes_;            // scratch of StartGather()
};

}  // namespace moeserve::cpu
