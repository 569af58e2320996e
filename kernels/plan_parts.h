// Divides a routing plan among the ranks that own its experts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"

namespace moeserve {

// The owner of an expert that no rank owns, because it has no matrices.
inline constexpr int kNoOwner = -1;

// What the parts of a plan depend on.
struct PlanOwners {
  std::span<const int> of_expert;  // [plan.num_experts] a rank, or kNoOwner
  int ranks = 1;
  int rank = 0;    // the rank that divides the plan
  int places = 0;  // the experts of `local`: [0, places); no other expert has an owner
  // The plan's expert_offsets in host memory, which a device needs (RankOps::ExpertOffsets()).
  std::span<const int32_t> expert_offsets = {};
};

// The parts of a plan. All ranks compute the same, apart from `local` and `first`.
struct PlanParts {
  // The assignments of the experts that this rank owns, with all arrays.
  RoutingPlan local;
  // All assignments, numbered by owner, then expert, then row; those of experts without an owner
  // come last. So the results of a rank are adjacent, and those of all ranks, one rank after the
  // other, are the results of this plan. A row's assignments are ascending by expert, as in every
  // plan. expert_offsets[e] is the first assignment of expert e, and expert_offsets[num_experts] is
  // the number of all; the assignments of e do not end at expert_offsets[e + 1].
  RoutingPlan joint;
  std::vector<int64_t> rows_of_rank;  // [ranks] numbers of assignments
  int64_t first = 0;                  // the first assignment in `joint` of this rank
};

// The arrays of the parts of one plan in host memory.
class PlanPartsMemory {
 public:
  // Divides `plan`, whose arrays are in host memory. The arrays of the result are valid until the
  // next call; row_nonfinite is that of `plan`.
  PlanParts Divide(const RoutingPlan& plan, const PlanOwners& owners);

 private:
  struct Arrays {
    std::vector<int32_t> expert_offsets, expert_of_assignment, row_of_assignment;
    std::vector<float> weight_of_assignment;
    std::vector<int32_t> row_offsets, assignments_of_row;

    // Writes the pointers to the arrays to a plan with `count` assignments.
    void PointFrom(RoutingPlan& plan, int64_t count) const;
  };

  Arrays local_, joint_;
  std::vector<int32_t> number_;  // [A] the number in `joint` of an assignment of the plan
};

}  // namespace moeserve
