#include "engine/ranks/page_table_changes.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/error_text.h"

namespace moeserve {
namespace {

// Finds the table of the step before that a table of a step goes on from. Sequences keep their
// order from step to step, but some end and others begin.
class BaseFinder {
 public:
  BaseFinder(const PageTables::Tables& last, size_t tables) : last_(last), tables_(tables) {
    for (size_t i = 0; i < last.size(); ++i) {
      if (last[i].empty()) continue;
      by_first_.emplace(Key(i, last[i].front()), i);
      by_end_.emplace(Key(i, last[i].back()), i);
    }
  }

  // Returns an index, or -1 if no table has ids in common that are worth it.
  int32_t Find(size_t index, std::span<const int32_t> table, size_t expected) const {
    if (table.empty()) return -1;
    if (GoesOn(expected, table)) return static_cast<int32_t>(expected);
    // The last page of a sequence is its own, and a step adds few pages.
    constexpr size_t kNewPages = 4;
    for (size_t back = 0; back < std::min(kNewPages, table.size()); ++back) {
      const auto found = by_end_.find(Key(index, table[table.size() - 1 - back]));
      if (found != by_end_.end() && GoesOn(found->second, table)) {
        return static_cast<int32_t>(found->second);
      }
    }
    // A new sequence may have a cached beginning that another one has, too.
    const auto found = by_first_.find(Key(index, table.front()));
    return found == by_first_.end() ? -1 : static_cast<int32_t>(found->second);
  }

 private:
  uint64_t Key(size_t index, int32_t page) const {
    return (index % tables_) << 32 | static_cast<uint32_t>(page);
  }
  // Whether the last page that both could have is the same one.
  bool GoesOn(size_t base, std::span<const int32_t> table) const {
    if (base >= last_.size() || last_[base].empty()) return false;
    const std::vector<int32_t>& before = last_[base];
    const size_t common = std::min(before.size(), table.size());
    return table[common - 1] == before[common - 1];
  }

  const PageTables::Tables& last_;
  size_t tables_;
  std::unordered_map<uint64_t, size_t> by_first_, by_end_;
};

PageTableChange ChangeFrom(int32_t base, std::span<const int32_t> before,
                           std::span<const int32_t> table) {
  // A run costs as much as two ids, so short gaps between runs are sent, too.
  constexpr int32_t kGap = 2;
  PageTableChange change{.base = base, .length = static_cast<int32_t>(table.size())};
  const size_t common = std::min(before.size(), table.size());
  for (size_t i = 0; i < table.size(); ++i) {
    if (i < common) {
      const auto differs = std::mismatch(table.begin() + static_cast<ptrdiff_t>(i),
                                         table.begin() + static_cast<ptrdiff_t>(common),
                                         before.begin() + static_cast<ptrdiff_t>(i));
      i = static_cast<size_t>(differs.first - table.begin());
      if (i == table.size()) break;
    }
    const auto at = static_cast<int32_t>(i);
    auto* run = change.runs.empty() ? nullptr : &change.runs.back();
    if (run == nullptr || at - ((*run)[0] + (*run)[1]) > kGap) {
      run = &change.runs.emplace_back(std::array<int32_t, 2>{at, 0});
    }
    while ((*run)[0] + (*run)[1] <= at) {
      change.pages.push_back(table[static_cast<size_t>((*run)[0] + (*run)[1]++)]);
    }
  }
  return change;
}

absl::Status WrongTables(std::string_view what, std::string_view expected, int64_t found) {
  return absl::InvalidArgumentError(
      Concat("page tables: ", what, ": expected ", expected, ", found ", found));
}

}  // namespace

std::vector<PageTableChange> PageTables::Follow(std::span<const std::span<const int32_t>> next) {
  const BaseFinder finder(last_, tables_);
  std::vector<PageTableChange> changes;
  changes.reserve(next.size());
  for (size_t i = 0; i < next.size(); ++i) {
    // The table behind that of the sequence before.
    const int32_t before = i < tables_ ? -1 : changes[i - tables_].base;
    const size_t expected = before < 0 ? i : static_cast<size_t>(before) + tables_;
    const int32_t base = finder.Find(i, next[i], expected);
    changes.push_back(ChangeFrom(
        base, base < 0 ? std::span<const int32_t>() : last_[static_cast<size_t>(base)], next[i]));
  }
  Replace(changes);
  return changes;
}

Result<const PageTables::Tables*> PageTables::Apply(std::span<const PageTableChange> changes,
                                                    std::span<const int64_t> num_pages) {
  MOESERVE_RETURN_IF_ERROR(Check(changes, num_pages));
  Replace(changes);
  return &last_;
}

absl::Status PageTables::Check(std::span<const PageTableChange> changes,
                               std::span<const int64_t> num_pages) const {
  if (changes.size() % tables_ != 0 || num_pages.size() != tables_) {
    return WrongTables("number", Concat("a multiple of ", tables_), std::ssize(changes));
  }
  for (size_t i = 0; i < changes.size(); ++i) {
    const PageTableChange& change = changes[i];
    if (change.base < -1 || change.base >= std::ssize(last_) ||
        (change.base >= 0 && static_cast<size_t>(change.base) % tables_ != i % tables_)) {
      return WrongTables("base", Concat("one of ", last_.size(), " tables of the same kind"),
                         change.base);
    }
    if (change.length < 0) return WrongTables("length", "at least 0", change.length);
    const int64_t kept = change.base < 0 ? 0 : std::ssize(last_[static_cast<size_t>(change.base)]);
    int64_t covered = 0, replaced = 0;  // the end of the last run; ids of all runs
    for (const auto& [start, count] : change.runs) {
      if (start < covered || count < 1 || int64_t{start} + count > change.length ||
          start > std::max(kept, covered)) {
        return WrongTables("run", Concat("adjacent ids of ", change.length), start);
      }
      covered = int64_t{start} + count;
      replaced += count;
    }
    if (std::max(kept, covered) < change.length) {
      return WrongTables("ids", Concat(change.length), std::max(kept, covered));
    }
    if (replaced != std::ssize(change.pages)) {
      return WrongTables("ids of runs", Concat(replaced), std::ssize(change.pages));
    }
    for (const int32_t page : change.pages) {
      if (page >= num_pages[i % tables_]) {
        return WrongTables("page", Concat("a number below ", num_pages[i % tables_]), page);
      }
    }
  }
  return absl::OkStatus();
}

void PageTables::Replace(std::span<const PageTableChange> changes) {
  std::vector<int> uses(last_.size());
  for (const PageTableChange& change : changes) {
    if (change.base >= 0) ++uses[static_cast<size_t>(change.base)];
  }
  Tables next(changes.size());
  for (size_t i = 0; i < changes.size(); ++i) {
    const PageTableChange& change = changes[i];
    if (change.base >= 0) {
      const auto base = static_cast<size_t>(change.base);
      if (--uses[base] == 0) {
        next[i] = std::move(last_[base]);  // nothing else needs it
      } else {
        next[i] = last_[base];
      }
    }
    next[i].resize(static_cast<size_t>(change.length));
    auto page = change.pages.begin();
    for (const auto& [start, count] : change.runs) {
      std::copy_n(page, count, next[i].begin() + start);
      page += count;
    }
  }
  last_ = std::move(next);
}

}  // namespace moeserve
