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
  // [ranks + 1] rank r adds the results of the rows [row_begin[r], row_begin[r + 1]) of the plan,
  // each row's by one rank (owner sums). Empty: every rank adds all results.
  std::span<const int64_t> row_begin = {};
  // The plan's expert_offsets in host memory, which a device needs (RankOps::ExpertOffsets()).
  std::span<const int32_t> expert_offsets = {};
};

// The parts of a plan. All ranks compute the same, apart from `local` and `first`, and without
// PlanOwners::row_begin.
struct PlanParts {
  // The assignments of the experts that this rank owns, with all arrays.
  RoutingPlan local;
  // All assignments, numbered by owner, then expert, then row; those of experts without an owner
  // come last. So the results of a rank are adjacent, and those of all ranks, one rank after the
  // other, are the results of this plan. A row's assignments are ascending by expert, as in every
  // plan. expert_offsets[e] is the first assignment of expert e, and expert_offsets[num_experts] is
  // the number of all; the assignments of e do not end at expert_offsets[e + 1].
  // With row_begin, only the assignments of the rows that this rank adds, and these rows are
  // numbered from 0.
  RoutingPlan joint;
  std::vector<int64_t> rows_of_rank;  // [ranks] numbers of assignments in `joint`
  int64_t first = 0;                  // the first assignment in `joint` of this rank
  // Only with row_begin: [ranks] how many assignments of `local` each rank adds, and their numbers,
  // those for rank 0 first, ascending for each rank; the numbers are in device memory.
  std::vector<int64_t> rows_for_rank = {};
  const int32_t* by_adder = nullptr;
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

  // Fills the arrays of the assignments, in the order of their numbers, and numbers them.
  void Number(const RoutingPlan& plan, const PlanOwners& owners, PlanParts& parts);
  // Sorts the assignments of `local` by the ranks that add them.
  void SortByAdder(const PlanOwners& owners, PlanParts& parts);

  Arrays local_, joint_;
  // [A] the numbers in the parts of an assignment of the plan; -1: it is not in the part.
  std::vector<int32_t> number_of_local_, number_of_joint_;
  std::vector<int32_t> by_adder_;
};

}  // namespace moeserve
