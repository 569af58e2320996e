// A token x expert table with rows for the most frequent tokens must count them exactly.
#include "engine/statistics/token_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "engine/statistics/measures/token_affinity.h"
#include "engine/statistics/token_expert_counts.h"
#include "kernels/cpu/route_counters.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

constexpr int kVocabulary = 500, kRows = 40, kTableExperts = 6;

// Counts steps of one block whose tokens each select the experts `Selected(token)`.
class TableOfFrequentTokens {
 public:
  void Step(const std::vector<int32_t>& tokens) {
    const auto changes = rows_.Assign(tokens);
    std::set<int32_t> seen_rows, seen_tokens;
    for (const TokenRowChange& change : changes) {
      EXPECT_TRUE(seen_rows.insert(change.row).second) << "row " << change.row << " twice";
      EXPECT_TRUE(seen_tokens.insert(change.token).second);
      EXPECT_TRUE(change.replaced < 0 || seen_tokens.insert(change.replaced).second);
      counted_[change.token] = 0;
      if (change.replaced >= 0) counted_.erase(change.replaced);
    }
    if (!changes.empty()) counters_.AssignTokenRows(changes);
    std::vector<int32_t> expert_of, row_of, expert_offsets(kTableExperts + 1);
    for (int e = 0; e < kTableExperts; ++e) {
      for (size_t t = 0; t < tokens.size(); ++t) {
        if (!Selected(tokens[t], e)) continue;
        expert_of.push_back(e);
        row_of.push_back(static_cast<int32_t>(t));
        ++sums_[static_cast<size_t>(e)];
      }
      expert_offsets[static_cast<size_t>(e) + 1] = static_cast<int32_t>(expert_of.size());
    }
    const std::vector<float> weights(expert_of.size(), 1.0f);
    const std::vector<uint8_t> finite(tokens.size());
    const RoutingPlan plan{.rows = static_cast<int32_t>(tokens.size()),
                           .num_experts = kTableExperts,
                           .num_assignments = static_cast<int32_t>(expert_of.size()),
                           .expert_offsets = expert_offsets.data(),
                           .expert_of_assignment = expert_of.data(),
                           .row_of_assignment = row_of.data(),
                           .weight_of_assignment = weights.data(),
                           .row_nonfinite = finite.data()};
    const RoutingPlan* const plans[] = {&plan};
    std::vector<TokenRoutes> routes(tokens.size());
    counters_.Count(std::vector<uint8_t>(tokens.size(), kTokenPrefill), tokens, plans, routes);
    for (const int32_t token : tokens) {
      ++occurrences_[token];
      if (const auto owner = counted_.find(token); owner != counted_.end()) ++owner->second;
    }
  }
  void Publish() { rows_.Publish(); }

  static bool Selected(int32_t token, int expert) { return (token + expert) % 3 == 0; }

  TokenColumns Read() const {
    return TokenExpertCounts(
               kRows + 1, kTableExperts,
               [this](int64_t first, std::span<uint32_t> part) {
                 return counters_.ReadTokenExperts(first, part);
               },
               [this] { return rows_.Owners(); })
        .ReadColumns(0, kTableExperts);
  }

  // Expects exact counts of every listed token, and that all rows together are all selections.
  void ExpectExact(const TokenColumns& table) const {
    std::vector<uint64_t> sums(kTableExperts);
    for (size_t r = 0; r < table.tokens.size(); ++r) {
      for (int e = 0; e < kTableExperts; ++e) {
        const uint32_t count = table.counts[r * kTableExperts + static_cast<size_t>(e)];
        sums[static_cast<size_t>(e)] += count;
        const int32_t token = table.tokens[r];
        if (token < 0) continue;
        EXPECT_EQ(count, Selected(token, e) ? counted_.at(token) : 0u) << "token " << token;
      }
    }
    EXPECT_EQ(sums, sums_);
    EXPECT_EQ(table.tokens.back(), -1);
  }

  std::map<int32_t, uint32_t> occurrences_;
  std::map<int32_t, uint32_t> counted_;  // by owner: occurrences since it received its row
  std::vector<uint64_t> sums_ = std::vector<uint64_t>(kTableExperts);

 private:
  static CountSettings Settings() {
    return {.blocks = {{.num_experts = kTableExperts,
                        .most_distinct = kTableExperts,
                        .expert_parameters = std::vector<int64_t>(kTableExperts, 1)}},
            .vocabulary = kVocabulary,
            .own_rows = kRows};
  }
  TokenRows rows_{kVocabulary, kRows};
  cpu::CpuRouteCounters counters_{Settings()};
};

// Returns tokens of which token first + n occurs about 1 / (n + 1) times as often as token first.
std::vector<int32_t> RowTokens(int count, int32_t first, Random& random) {
  std::vector<int32_t> out;
  for (int i = 0; i < count; ++i) {
    out.push_back((first + random.Below(1 + random.Below(1 + random.Below(kVocabulary)))) %
                  kVocabulary);
  }
  return out;
}

TEST(TokenRows, CountsOfFrequentTokensAreExact) {
  TableOfFrequentTokens table;
  Random random(5);
  for (int step = 0; step < 300; ++step) {
    // The texts change in the middle, and with them the frequent tokens.
    table.Step(RowTokens(1 + random.Below(30), step < 150 ? 0 : 250, random));
    if (step % 7 != 0) continue;
    table.ExpectExact(table.Read());  // some rows are not published yet
    table.Publish();
    const TokenColumns read = table.Read();
    table.ExpectExact(read);
    EXPECT_EQ(read.tokens.size(), std::min<size_t>(kRows, table.occurrences_.size()) + 1);
  }
  // No token without a row occurred much more than twice as often as one with a row.
  uint32_t fewest = UINT32_MAX, most = 0;
  for (const auto& [token, n] : table.occurrences_) {
    if (table.counted_.contains(token)) {
      fewest = std::min(fewest, n);
    } else {
      most = std::max(most, n);
    }
  }
  EXPECT_LE(most, 2 * fewest + 2);
  EXPECT_TRUE(table.counted_.contains(0) && table.counted_.contains(250));
}

TEST(TokenRows, ARowWhoseOwnerChangesWhileItIsReadJoinsTheOthers) {
  std::vector<TokenRows::Owner> owners = {{7, 1}, {8, 1}, {-1, 0}};
  int reads = 0;
  const TokenExpertCounts counts(
      4, 1,
      [](int64_t first, std::span<uint32_t> part) {
        for (size_t i = 0; i < part.size(); ++i)
          part[i] = static_cast<uint32_t>(first + 1) << i * 4;
        return absl::OkStatus();
      },
      [&] {
        if (reads++ == 1) owners[0] = {7, 3};  // it lost the row and received it again
        return owners;
      });
  const TokenColumns read = counts.ReadColumns(0, 1);
  EXPECT_EQ(read.tokens, (std::vector<int32_t>{8, -1}));
  EXPECT_EQ(read.counts, (std::vector<uint32_t>{0x10, 0x1101}));
}

TEST(TokenRows, TokensWithoutARowCountOnlyInTheSums) {
  const std::vector<int32_t> tokens = {40, 9, -1};
  const std::vector<uint32_t> counts = {6, 0, 2, 4, 100, 300};
  const auto best = TopTokens({.rows = 3, .experts = 2, .counts = counts, .tokens = tokens}, 1, 5);
  ASSERT_EQ(best.size(), 2u);
  ASSERT_EQ(best[0].size(), 2u);
  EXPECT_EQ(best[0][0].token, 40);
  EXPECT_DOUBLE_EQ(best[0][0].pmi, 6.0 * 412 / (6 * 108));
  EXPECT_DOUBLE_EQ(best[0][0].share, 1.0);
  ASSERT_EQ(best[1].size(), 1u);
  EXPECT_EQ(best[1][0].token, 9);
}

}  // namespace
}  // namespace moeserve::testing
