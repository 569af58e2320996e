// The page tables of a step as changes of those of the step before.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace moeserve {

// How a page table follows from one of the step before: that table is cut to `length`, or made
// longer, and then ids are replaced.
struct PageTableChange {
  int32_t base = -1;  // index of the table of the step before; -1: an empty table
  int32_t length = 0;
  // First index and number of the ids that are replaced, ascending and disjoint. They cover all
  // indices from the length of the base on.
  std::vector<std::array<int32_t, 2>> runs = {};
  std::vector<int32_t> pages = {};  // the new ids, one run after the other

  bool operator==(const PageTableChange&) const = default;
};

// The page tables of the last step with one cache. The leader and its followers have equal ones, so
// the leader sends only what a step changes: a few ids for each sequence, however long it is.
class PageTables {
 public:
  // [S * tables] by sequence.
  using Tables = std::vector<std::vector<int32_t>>;

  // `tables`: the number of page tables of a sequence; KvCacheStorage::num_tables().
  explicit PageTables(int tables) : tables_(static_cast<size_t>(tables)) {}

  // Returns the changes from the last step's tables to `next`, which is [S * tables]; these are the
  // last step's from then on.
  std::vector<PageTableChange> Follow(std::span<const std::span<const int32_t>> next);

  // Applies changes from outside, and returns the tables. `num_pages` [tables]: ids are below it;
  // negative ids stand for pages that are not needed. InvalidArgument, with what was expected and
  // found, if a change does not fit the last step's tables; these are then undefined.
  Result<const Tables*> Apply(std::span<const PageTableChange> changes,
                              std::span<const int64_t> num_pages);

  const Tables& last() const { return last_; }

 private:
  absl::Status Check(std::span<const PageTableChange> changes,
                     std::span<const int64_t> num_pages) const;
  void Replace(std::span<const PageTableChange> changes);

  size_t tables_;
  Tables last_;
};

}  // namespace moeserve
