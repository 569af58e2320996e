// Parts of routing plans, by their properties.
#include "kernels/plan_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

namespace moeserve {
namespace {

// A plan with its arrays.
struct PlanWithArrays {
  std::vector<int32_t> expert_offsets{0}, experts, rows, row_offsets{0}, of_row;
  std::vector<float> weights;
  RoutingPlan plan;
};

// Every row selects some of the experts; a row may select none.
PlanWithArrays PlanOfRandomRows(std::mt19937& random, int rows, int experts, int selected) {
  std::vector<std::set<int>> of_row(static_cast<size_t>(rows));
  for (std::set<int>& set : of_row) {
    for (int i = static_cast<int>(random() % static_cast<uint32_t>(selected + 1)); i > 0; --i) {
      set.insert(static_cast<int>(random() % static_cast<uint32_t>(experts)));
    }
  }
  PlanWithArrays p;
  std::map<std::pair<int, int>, int32_t> number;
  for (int e = 0; e < experts; ++e) {
    for (int r = 0; r < rows; ++r) {
      if (!of_row[static_cast<size_t>(r)].contains(e)) continue;
      number[{r, e}] = static_cast<int32_t>(p.rows.size());
      p.experts.push_back(e);
      p.rows.push_back(r);
      p.weights.push_back(static_cast<float>(random() % 1000));
    }
    p.expert_offsets.push_back(static_cast<int32_t>(p.rows.size()));
  }
  for (int r = 0; r < rows; ++r) {
    for (const int e : of_row[static_cast<size_t>(r)]) p.of_row.push_back(number[{r, e}]);
    p.row_offsets.push_back(static_cast<int32_t>(p.of_row.size()));
  }
  const int count = static_cast<int>(p.rows.size());
  p.plan = {.rows = rows,
            .num_experts = experts,
            .num_assignments = count,
            .capacity = rows * experts,
            .expert_offsets = p.expert_offsets.data(),
            .expert_of_assignment = p.experts.data(),
            .row_of_assignment = p.rows.data(),
            .weight_of_assignment = p.weights.data(),
            .row_offsets = p.row_offsets.data(),
            .assignments_of_row = p.of_row.data()};
  return p;
}

// Checks what every plan promises about the assignments of its rows.
void CheckAssignmentsOfRows(const RoutingPlan& plan) {
  int32_t seen = 0;
  for (int r = 0; r < plan.rows; ++r) {
    int last = -1;
    ASSERT_EQ(plan.row_offsets[r], seen);
    for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i, ++seen) {
      const int32_t a = plan.assignments_of_row[i];
      ASSERT_GE(a, 0);
      ASSERT_LT(a, plan.num_assignments);
      EXPECT_EQ(plan.row_of_assignment[a], r);
      EXPECT_GT(plan.expert_of_assignment[a], last) << "ascending by expert";
      last = plan.expert_of_assignment[a];
    }
  }
  EXPECT_EQ(seen, plan.num_assignments);
}

// The assignments as (row, expert, weight), in their order.
std::vector<std::tuple<int, int, float>> Assignments(const RoutingPlan& plan) {
  std::vector<std::tuple<int, int, float>> all;
  for (int a = 0; a < plan.num_assignments; ++a) {
    all.emplace_back(plan.row_of_assignment[a], plan.expert_of_assignment[a],
                     plan.weight_of_assignment[a]);
  }
  return all;
}

struct PartsCase {
  int rows, experts, selected, ranks, without;  // `without`: the last experts have no owner
};

class PlanPartsTest : public ::testing::TestWithParam<PartsCase> {};

TEST_P(PlanPartsTest, CoverThePlanOnce) {
  const auto [rows, experts, selected, ranks, without] = GetParam();
  std::mt19937 random(static_cast<uint32_t>(rows + 100 * experts + 7 * ranks));
  PlanPartsMemory memory;  // used again for the next plan
  for (int round = 0; round < 5; ++round) {
    const PlanWithArrays whole = PlanOfRandomRows(random, rows, experts, selected);
    std::vector<int> owner(static_cast<size_t>(experts), kNoOwner);
    for (int e = 0; e < experts - without; ++e) {
      owner[static_cast<size_t>(e)] = static_cast<int>(random() % static_cast<uint32_t>(ranks));
    }
    // An expert in the middle may have no owner, too.
    if (without > 0) owner.front() = kNoOwner;
    std::vector<std::tuple<int, int, float>> joined;
    std::vector<int64_t> rows_of_rank;
    for (int rank = 0; rank < ranks; ++rank) {
      const PlanParts parts = memory.Divide(
          whole.plan,
          {.of_expert = owner, .ranks = ranks, .rank = rank, .places = experts - without});
      CheckAssignmentsOfRows(parts.local);
      CheckAssignmentsOfRows(parts.joint);
      EXPECT_EQ(parts.local.num_experts, experts - without);
      EXPECT_EQ(parts.joint.num_experts, experts);
      EXPECT_EQ(parts.local.capacity, parts.local.num_assignments);
      EXPECT_EQ(parts.first, static_cast<int64_t>(joined.size()));
      const auto own = Assignments(parts.local);
      EXPECT_EQ(std::ssize(own), parts.rows_of_rank[static_cast<size_t>(rank)]);
      // Sorted by expert, then row, with offsets.
      for (int e = 0; e < parts.local.num_experts; ++e) {
        for (int32_t a = parts.local.expert_offsets[e]; a < parts.local.expert_offsets[e + 1];
             ++a) {
          EXPECT_EQ(parts.local.expert_of_assignment[a], e);
          EXPECT_EQ(owner[static_cast<size_t>(e)], rank);
        }
      }
      EXPECT_EQ(parts.local.expert_offsets[parts.local.num_experts], std::ssize(own));
      EXPECT_TRUE(std::ranges::is_sorted(
          own, {}, [](const auto& t) { return std::pair(std::get<1>(t), std::get<0>(t)); }));
      joined.insert(joined.end(), own.begin(), own.end());
      // All ranks have the same joint plan, which begins with the local plans.
      const auto joint = Assignments(parts.joint);
      EXPECT_EQ(std::ssize(joint), whole.plan.num_assignments);
      EXPECT_TRUE(std::equal(joined.begin(), joined.end(), joint.begin()));
      EXPECT_EQ(parts.joint.expert_offsets[experts], whole.plan.num_assignments);
      if (rank > 0) {
        EXPECT_EQ(parts.rows_of_rank, rows_of_rank);
      }
      rows_of_rank = parts.rows_of_rank;
      for (int e = 0; e < experts; ++e) {
        const int32_t first = parts.joint.expert_offsets[e];
        if (whole.expert_offsets[static_cast<size_t>(e) + 1] >
            whole.expert_offsets[static_cast<size_t>(e)]) {
          EXPECT_EQ(parts.joint.expert_of_assignment[first], e);
        }
      }
      auto sorted = joint;
      auto expected = Assignments(whole.plan);
      std::ranges::sort(sorted);
      std::ranges::sort(expected);
      EXPECT_EQ(sorted, expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, PlanPartsTest,
                         ::testing::Values(PartsCase{0, 4, 2, 2, 0}, PartsCase{1, 4, 2, 2, 0},
                                           PartsCase{50, 8, 3, 1, 0}, PartsCase{50, 8, 3, 2, 0},
                                           PartsCase{50, 8, 3, 4, 2}, PartsCase{7, 3, 3, 8, 0},
                                           PartsCase{300, 64, 8, 4, 0}, PartsCase{40, 6, 6, 3, 3}));

}  // namespace
}  // namespace moeserve
