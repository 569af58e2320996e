// Page tables as changes of those of the step before.
#include "engine/ranks/page_table_changes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace moeserve {
namespace {

using Tables = PageTables::Tables;

std::vector<std::span<const int32_t>> Views(const Tables& tables) {
  return {tables.begin(), tables.end()};
}

size_t Numbers(std::span<const PageTableChange> changes) {
  size_t numbers = 0;
  for (const PageTableChange& c : changes) numbers += 2 + 2 * c.runs.size() + c.pages.size();
  return numbers;
}

// Sequences that begin, grow, are cut, lose their first pages (a window), share their beginning,
// and end; each has `kinds` tables.
class Sequences {
 public:
  Sequences(uint32_t seed, size_t kinds) : random_(seed), kinds_(kinds) {}

  void Step() {
    if (random_() % 3 == 0 && tables_.size() < 20 * kinds_) Begin();
    for (std::vector<int32_t>& table : tables_) Change(table);
    if (random_() % 5 == 0 && !tables_.empty()) {
      const size_t gone = random_() % (tables_.size() / kinds_) * kinds_;
      const auto first = tables_.begin() + static_cast<ptrdiff_t>(gone);
      tables_.erase(first, first + static_cast<ptrdiff_t>(kinds_));
    }
    if (random_() % 20 == 0) std::ranges::reverse(tables_);  // another order of kinds, too
  }
  const Tables& tables() const { return tables_; }
  static constexpr int32_t kPages = 1 << 20;

 private:
  void Begin() {
    const bool shares = !tables_.empty() && random_() % 2 == 0;
    const size_t other = shares ? random_() % (tables_.size() / kinds_) * kinds_ : 0;
    for (size_t k = 0; k < kinds_; ++k) {
      std::vector<int32_t> table;
      if (shares) table = tables_[other + k];
      table.resize(table.size() - std::min<size_t>(table.size(), random_() % 3));
      tables_.push_back(std::move(table));
    }
  }
  void Change(std::vector<int32_t>& table) {
    switch (random_() % 8) {
      case 0:
        table.resize(table.size() - std::min<size_t>(table.size(), random_() % 4));
        break;
      case 1:
        if (!table.empty()) table[random_() % table.size()] = -1;
        break;
      case 2:
        break;
      default:
        for (uint32_t i = random_() % 3; i > 0; --i) {
          table.push_back(static_cast<int32_t>(random_() % kPages));
        }
    }
  }

  std::mt19937 random_;
  size_t kinds_;
  Tables tables_;
};

TEST(PageTableChangesTest, FollowersHaveTheTablesOfTheLeader) {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    const size_t kinds = 1 + seed % 3;
    Sequences sequences(seed, kinds);
    PageTables leader(static_cast<int>(kinds)), follower(static_cast<int>(kinds));
    const std::vector<int64_t> num_pages(kinds, Sequences::kPages);
    for (int step = 0; step < 200; ++step) {
      sequences.Step();
      const auto changes = leader.Follow(Views(sequences.tables()));
      const auto found = follower.Apply(changes, num_pages);
      ASSERT_TRUE(found.ok()) << found.status();
      ASSERT_EQ(**found, sequences.tables()) << "seed " << seed << ", step " << step;
      ASSERT_EQ(leader.last(), sequences.tables());
    }
  }
}

// A decode step costs a few numbers for each sequence, also if sequences before it have ended and
// if all begin with the same pages.
TEST(PageTableChangesTest, LongSequencesCostFewNumbers) {
  constexpr size_t kSequences = 64, kLength = 1000;
  Tables tables(kSequences);
  int32_t page = 0;
  for (std::vector<int32_t>& table : tables) {
    for (size_t i = 0; i < kLength; ++i) {
      table.push_back(i < kLength / 2 ? static_cast<int32_t>(i)
                                      : static_cast<int32_t>(kLength) + page++);
    }
  }
  PageTables leader(1);
  const size_t first = Numbers(leader.Follow(Views(tables)));
  EXPECT_GE(first, kSequences * kLength / 2);
  EXPECT_LE(Numbers(leader.Follow(Views(tables))), kSequences * 2);  // nothing has changed
  for (int step = 0; step < 5; ++step) {
    for (std::vector<int32_t>& table : tables) table.push_back(1'000'000 + page++);
    EXPECT_LE(Numbers(leader.Follow(Views(tables))), kSequences * 5);
    tables.erase(tables.begin() + 7 * step);
    tables.erase(tables.begin() + 3);
    EXPECT_LE(Numbers(leader.Follow(Views(tables))), kSequences * 5);
    std::ranges::rotate(tables, tables.begin() + 11);
    EXPECT_LE(Numbers(leader.Follow(Views(tables))), kSequences * 5);
    for (std::vector<int32_t>& table : tables) table.pop_back();  // drafts that were refused
    EXPECT_LE(Numbers(leader.Follow(Views(tables))), kSequences * 5);
  }
}

TEST(PageTableChangesTest, ChangesThatDoNotFitAreRefused) {
  const std::vector<int64_t> num_pages = {100};
  const auto error = [&](const PageTableChange& change) {
    PageTables tables(1);
    const PageTableChange first{.length = 3, .runs = {{0, 3}}, .pages = {7, 8, 9}};
    EXPECT_TRUE(tables.Apply(std::span(&first, 1), num_pages).ok());
    return std::string(tables.Apply(std::span(&change, 1), num_pages).status().message());
  };
  using ::testing::HasSubstr;
  EXPECT_EQ(error({.base = 0, .length = 4, .runs = {{1, 1}, {3, 1}}, .pages = {5, -1}}), "");
  EXPECT_EQ(error({.base = 0, .length = 2}), "");
  EXPECT_THAT(error({.base = 1, .length = 1}), HasSubstr("base: expected one of 1 tables"));
  EXPECT_THAT(error({.base = -2, .length = 1}), HasSubstr("base"));
  EXPECT_THAT(error({.base = 0, .length = -1}), HasSubstr("length"));
  EXPECT_THAT(error({.base = 0, .length = 5, .runs = {{3, 1}}, .pages = {1}}),
              HasSubstr("ids: expected 5, found 4"));
  EXPECT_THAT(error({.base = 0, .length = 5, .runs = {{4, 1}}, .pages = {1}}), HasSubstr("run"));
  EXPECT_THAT(error({.base = 0, .length = 3, .runs = {{1, 2}, {2, 1}}, .pages = {1, 2, 3}}),
              HasSubstr("run"));
  EXPECT_THAT(error({.base = 0, .length = 3, .runs = {{2, 2}}, .pages = {1, 2}}), HasSubstr("run"));
  EXPECT_THAT(error({.base = 0, .length = 3, .runs = {{-1, 1}}, .pages = {1}}), HasSubstr("run"));
  EXPECT_THAT(error({.base = 0, .length = 3, .runs = {{0, 0}}}), HasSubstr("run"));
  EXPECT_THAT(error({.base = 0, .length = 3, .runs = {{0, 2}}, .pages = {1}}),
              HasSubstr("ids of runs: expected 2, found 1"));
  EXPECT_THAT(error({.base = 0, .length = 3, .runs = {{0, 1}}, .pages = {100}}),
              HasSubstr("page: expected a number below 100, found 100"));
  PageTables pairs(2);
  const PageTableChange empty[] = {{}, {}, {}};
  EXPECT_FALSE(pairs.Apply(empty, std::vector<int64_t>{1, 1}).ok());
  const PageTableChange other_kind[] = {{.length = 1, .runs = {{0, 1}}, .pages = {0}}, {}};
  EXPECT_TRUE(pairs.Apply(other_kind, std::vector<int64_t>{1, 1}).ok());
  const PageTableChange crossed[] = {{}, {.base = 0, .length = 1}};
  EXPECT_FALSE(pairs.Apply(crossed, std::vector<int64_t>{1, 1}).ok());
}

}  // namespace
}  // namespace moeserve
