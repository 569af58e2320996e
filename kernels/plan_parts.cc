#include "kernels/plan_parts.h"

#include <algorithm>
#include <numeric>

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

void PlanPartsMemory::Number(const RoutingPlan& plan, const PlanOwners& owners, PlanParts& parts) {
  const bool all = owners.row_begin.empty();
  const auto rank = static_cast<size_t>(owners.rank);
  const int64_t begin_row = all ? 0 : owners.row_begin[rank];
  const int64_t end_row = all ? plan.rows : owners.row_begin[rank + 1];
  const auto append = [&plan](Arrays& arrays, int expert, int32_t assignment, int64_t row,
                              std::vector<int32_t>& number) {
    number[static_cast<size_t>(assignment)] = static_cast<int32_t>(arrays.row_of_assignment.size());
    arrays.expert_of_assignment.push_back(expert);
    arrays.row_of_assignment.push_back(static_cast<int32_t>(row));
    arrays.weight_of_assignment.push_back(plan.weight_of_assignment[assignment]);
  };
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
        const int64_t row = plan.row_of_assignment[a];
        if (row >= begin_row && row < end_row) {
          append(joint_, e, a, row - begin_row, number_of_joint_);
        }
        if (owner == owners.rank) append(local_, e, a, row, number_of_local_);
      }
    }
    if (owner != kNoOwner) {
      parts.rows_of_rank[static_cast<size_t>(owner)] = std::ssize(joint_.row_of_assignment) - begin;
    }
  }
  joint_.expert_offsets.back() = static_cast<int32_t>(joint_.row_of_assignment.size());
  local_.expert_offsets.back() = static_cast<int32_t>(local_.row_of_assignment.size());
}

void PlanPartsMemory::SortByAdder(const PlanOwners& owners, PlanParts& parts) {
  const auto adder_of = [&](int32_t row) {
    return static_cast<size_t>(std::ranges::upper_bound(owners.row_begin, row) -
                               owners.row_begin.begin() - 1);
  };
  parts.rows_for_rank.assign(static_cast<size_t>(owners.ranks), 0);
  for (const int32_t row : local_.row_of_assignment) ++parts.rows_for_rank[adder_of(row)];
  std::vector<int64_t> next(parts.rows_for_rank.size());
  std::exclusive_scan(parts.rows_for_rank.begin(), parts.rows_for_rank.end(), next.begin(),
                      int64_t{0});
  by_adder_.resize(local_.row_of_assignment.size());
  for (size_t a = 0; a < by_adder_.size(); ++a) {
    by_adder_[static_cast<size_t>(next[adder_of(local_.row_of_assignment[a])]++)] =
        static_cast<int32_t>(a);
  }
  parts.by_adder = by_adder_.data();
}

PlanParts PlanPartsMemory::Divide(const RoutingPlan& plan, const PlanOwners& owners) {
  MOESERVE_CHECK(std::ssize(owners.of_expert) == plan.num_experts, "an owner for every expert");
  PlanParts parts;
  parts.rows_of_rank.resize(static_cast<size_t>(owners.ranks));
  for (std::vector<int32_t>* numbers : {&number_of_local_, &number_of_joint_}) {
    numbers->assign(static_cast<size_t>(plan.num_assignments), -1);
  }
  for (Arrays* arrays : {&local_, &joint_}) {
    arrays->expert_of_assignment.clear();
    arrays->row_of_assignment.clear();
    arrays->weight_of_assignment.clear();
    arrays->row_offsets.clear();
    arrays->assignments_of_row.clear();
  }
  joint_.expert_offsets.assign(static_cast<size_t>(plan.num_experts) + 1, 0);
  local_.expert_offsets.assign(static_cast<size_t>(owners.places) + 1, 0);
  Number(plan, owners, parts);

  // The assignments of each row, in the order of the plan.
  const auto add_rows = [&plan](Arrays& arrays, int64_t begin, int64_t end,
                                std::span<const int32_t> numbers) {
    arrays.row_offsets.push_back(0);
    for (int64_t r = begin; r < end; ++r) {
      for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
        const int32_t number = numbers[static_cast<size_t>(plan.assignments_of_row[i])];
        if (number >= 0) arrays.assignments_of_row.push_back(number);
      }
      arrays.row_offsets.push_back(static_cast<int32_t>(arrays.assignments_of_row.size()));
    }
  };
  int64_t begin = 0, end = plan.rows;
  if (!owners.row_begin.empty()) {
    MOESERVE_CHECK(std::ssize(owners.row_begin) == owners.ranks + 1 && owners.row_begin[0] == 0 &&
                       owners.row_begin.back() == plan.rows,
                   "each row is added by one rank");
    begin = owners.row_begin[static_cast<size_t>(owners.rank)];
    end = owners.row_begin[static_cast<size_t>(owners.rank) + 1];
    SortByAdder(owners, parts);
  }
  add_rows(local_, 0, plan.rows, number_of_local_);
  add_rows(joint_, begin, end, number_of_joint_);

  parts.joint = parts.local = plan;
  joint_.PointFrom(parts.joint, std::ssize(joint_.row_of_assignment));
  local_.PointFrom(parts.local, std::ssize(local_.row_of_assignment));
  parts.joint.rows = static_cast<int>(end - begin);
  if (plan.row_nonfinite != nullptr) parts.joint.row_nonfinite = plan.row_nonfinite + begin;
  parts.local.num_experts = owners.places;
  int most_of_row = 0;
  for (int r = 0; r < plan.rows; ++r) {
    most_of_row = std::max(most_of_row, plan.row_offsets[r + 1] - plan.row_offsets[r]);
  }
  parts.local.most_of_row = parts.joint.most_of_row = most_of_row;
  return parts;
}

}  // namespace moeserve
