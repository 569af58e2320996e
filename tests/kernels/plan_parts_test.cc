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

// Each rank adds the results of some rows: what the ranks send is what they expect, in the order in
// which they number it.
TEST_P(PlanPartsTest, EachRowIsAddedByOneRank) {
  const auto [rows, experts, selected, ranks, without] = GetParam();
  std::mt19937 random(static_cast<uint32_t>(rows + 50 * experts + 3 * ranks));
  std::vector<PlanPartsMemory> memories(static_cast<size_t>(ranks));
  for (int round = 0; round < 5; ++round) {
    const PlanWithArrays whole = PlanOfRandomRows(random, rows, experts, selected);
    std::vector<int> owner(static_cast<size_t>(experts), kNoOwner);
    for (int e = without > 0 ? 1 : 0; e < experts - without; ++e) {
      owner[static_cast<size_t>(e)] = static_cast<int>(random() % static_cast<uint32_t>(ranks));
    }
    // Some ranks may have no row.
    std::vector<int64_t> row_begin{0, rows};
    for (int r = 1; r < ranks; ++r) row_begin.push_back(random() % static_cast<uint32_t>(rows + 1));
    std::ranges::sort(row_begin);
    std::vector<PlanParts> parts;
    std::vector<std::vector<std::tuple<int, int, float>>> arriving(static_cast<size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      const PlanOwners owners{
          .of_expert = owner, .ranks = ranks, .rank = rank, .places = experts - without};
      PlanOwners with_rows = owners;
      with_rows.row_begin = row_begin;
      PlanPartsMemory& memory = memories[static_cast<size_t>(rank)];
      const auto local = Assignments(memory.Divide(whole.plan, owners).local);
      parts.push_back(memory.Divide(whole.plan, with_rows));
      const PlanParts& p = parts.back();
      EXPECT_EQ(Assignments(p.local), local) << "what a rank computes";
      CheckAssignmentsOfRows(p.local);
      CheckAssignmentsOfRows(p.joint);
      const int32_t* next = p.by_adder;
      for (size_t to = 0; to < arriving.size(); ++to) {
        for (int64_t i = 0; i < p.rows_for_rank[to]; ++i) {
          arriving[to].push_back(local[static_cast<size_t>(*next++)]);
        }
      }
      EXPECT_EQ(next - p.by_adder, std::ssize(local));
    }
    for (size_t r = 0; r < parts.size(); ++r) {
      const PlanParts& p = parts[r];
      EXPECT_EQ(p.joint.rows, row_begin[r + 1] - row_begin[r]);
      EXPECT_EQ(p.joint.expert_offsets[experts], p.joint.num_assignments);
      int64_t first = 0;
      for (size_t from = 0; from < parts.size(); ++from) {
        EXPECT_EQ(p.rows_of_rank[from], parts[from].rows_for_rank[r]);
        if (from < r) first += p.rows_of_rank[from];
      }
      EXPECT_EQ(p.first, first);
      auto joint = Assignments(p.joint);
      for (auto& assignment : joint) std::get<0>(assignment) += static_cast<int>(row_begin[r]);
      ASSERT_GE(joint.size(), arriving[r].size());
      EXPECT_TRUE(std::equal(arriving[r].begin(), arriving[r].end(), joint.begin()));
      // Experts without an owner follow; together, the rows have all their assignments.
      for (size_t i = arriving[r].size(); i < joint.size(); ++i) {
        EXPECT_EQ(owner[static_cast<size_t>(std::get<1>(joint[i]))], kNoOwner);
      }
      const int32_t all = whole.row_offsets[static_cast<size_t>(row_begin[r + 1])] -
                          whole.row_offsets[static_cast<size_t>(row_begin[r])];
      EXPECT_EQ(p.joint.num_assignments, all);
      for (int e = 0; e < experts; ++e) {
        const int32_t at = p.joint.expert_offsets[e];
        const auto of_expert = [e](const auto& a) { return std::get<1>(a) == e; };
        const auto found = std::ranges::find_if(joint, of_expert);
        if (found != joint.end()) {
          EXPECT_EQ(at, found - joint.begin());
        }
      }
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
