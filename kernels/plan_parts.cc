#include "kernels/plan_parts.h"

#include <algorithm>

#include "base/check.h"

namespace moeserve {

void PlanPartsMemory::Arrays::PointFrom(RoutingPlan& plan, int64_t count) const {
  plan.num_assignments = plan.capacity = static_cast<int>(count);
  plan.expected = 0;
  plan.expert_offsets = expert_offsets.data();
  plan.expert_of_assignment = expert_of_assignment.data();
  plan.row_of_assignment = row_of_assignment.data();
  plan.weight_of_assignment = weight_of_assignment.data();
  plan.row_offsets = row_offsets.data();
  plan.assignments_of_row = assignments_of_row.data();
}

PlanParts PlanPartsMemory::Divide(const RoutingPlan& plan, const PlanOwners& owners) {
  MOESERVE_CHECK(std::ssize(owners.of_expert) == plan.num_experts, "an owner for every expert");
  PlanParts parts;
  parts.rows_of_rank.resize(static_cast<size_t>(owners.ranks));
  number_.resize(static_cast<size_t>(plan.num_assignments));
  for (Arrays* arrays : {&local_, &joint_}) {
    arrays->expert_of_assignment.clear();
    arrays->row_of_assignment.clear();
    arrays->weight_of_assignment.clear();
  }
  joint_.expert_offsets.assign(static_cast<size_t>(plan.num_experts) + 1, 0);
  local_.expert_offsets.assign(static_cast<size_t>(owners.places) + 1, 0);

  // Ranks in ascending order, then experts without an owner.
  for (int turn = 0; turn <= owners.ranks; ++turn) {
    const int owner = turn < owners.ranks ? turn : kNoOwner;
    const int64_t begin = std::ssize(joint_.row_of_assignment);
    if (owner == owners.rank) parts.first = begin;
    for (int e = 0; e < plan.num_experts; ++e) {
      if (owner == owners.rank && e < owners.places) {
        local_.expert_offsets[static_cast<size_t>(e)] =
            static_cast<int32_t>(local_.row_of_assignment.size());
      }
      if (owners.of_expert[static_cast<size_t>(e)] != owner) continue;
      MOESERVE_CHECK(owner == kNoOwner || e < owners.places, "owners of experts with a place");
      joint_.expert_offsets[static_cast<size_t>(e)] =
          static_cast<int32_t>(joint_.row_of_assignment.size());
      for (int32_t a = plan.expert_offsets[e]; a < plan.expert_offsets[e + 1]; ++a) {
        number_[static_cast<size_t>(a)] = static_cast<int32_t>(joint_.row_of_assignment.size());
        for (Arrays* arrays : {&joint_, &local_}) {
          if (arrays == &local_ && owner != owners.rank) continue;
          arrays->expert_of_assignment.push_back(e);
          arrays->row_of_assignment.push_back(plan.row_of_assignment[a]);
          arrays->weight_of_assignment.push_back(plan.weight_of_assignment[a]);
        }
      }
    }
    if (owner != kNoOwner) {
      parts.rows_of_rank[static_cast<size_t>(owner)] = std::ssize(joint_.row_of_assignment) - begin;
    }
  }
  const int64_t own = parts.rows_of_rank[static_cast<size_t>(owners.rank)];
  joint_.expert_offsets.back() = plan.num_assignments;
  local_.expert_offsets.back() = static_cast<int32_t>(own);

  // The assignments of each row, in the order of the plan.
  joint_.row_offsets.assign(plan.row_offsets, plan.row_offsets + plan.rows + 1);
  joint_.assignments_of_row.clear();
  local_.row_offsets.assign(1, 0);
  local_.assignments_of_row.clear();
  int most_of_row = 0;
  for (int r = 0; r < plan.rows; ++r) {
    most_of_row = std::max(most_of_row, plan.row_offsets[r + 1] - plan.row_offsets[r]);
    for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
      const int64_t number = number_[static_cast<size_t>(plan.assignments_of_row[i])];
      joint_.assignments_of_row.push_back(static_cast<int32_t>(number));
      if (number >= parts.first && number < parts.first + own) {
        local_.assignments_of_row.push_back(static_cast<int32_t>(number - parts.first));
      }
    }
    local_.row_offsets.push_back(static_cast<int32_t>(local_.assignments_of_row.size()));
  }

  parts.joint = parts.local = plan;
  joint_.PointFrom(parts.joint, plan.num_assignments);
  local_.PointFrom(parts.local, own);
  parts.local.num_experts = owners.places;
  parts.local.most_of_row = parts.joint.most_of_row = most_of_row;
  return parts;
}

}  // namespace moeserve
