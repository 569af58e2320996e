// How often each token id was routed to each expert. Pointwise mutual information, expert
// similarity and expert synergy are computed from these counts.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"

namespace moeserve {

// Reads a table [vocabulary, experts of all routed blocks] of 32-bit counters, which saturate at
// their maximum. Cheap to copy; may be used by any thread. A read while tokens are computed may
// include a part of the running step.
class TokenExpertCounts {
 public:
  // Copies elements [first, first + part.size()) of the table.
  using Reader = std::function<Status(int64_t first, std::span<uint32_t> part)>;

  // Returns the size of the table in bytes.
  static int64_t BytesFor(int64_t vocabulary, int64_t experts) {
    return vocabulary * experts * static_cast<int64_t>(sizeof(uint32_t));
  }

  TokenExpertCounts(int64_t vocabulary, int64_t experts, Reader reader)
      : vocabulary_(vocabulary), experts_(experts), reader_(std::move(reader)) {}

  int64_t vocabulary() const { return vocabulary_; }
  int64_t experts() const { return experts_; }

  // Returns the columns [first, first + count) of the table as [vocabulary, count], tokens
  // outermost. Stops the process if the device fails.
  std::vector<uint32_t> Columns(int64_t first, int64_t count) const;
  // Returns adjacent groups of columns, from column 0 on, in one pass over the table. Group i has
  // counts[i] columns, in the layout of Columns().
  std::vector<std::vector<uint32_t>> ColumnGroups(std::span<const int64_t> counts) const;

 private:
  // Calls f(token id, the token's row of the table) for every token id.
  template <typename F>
  void ForEachRow(const F& f) const;

  int64_t vocabulary_;
  int64_t experts_;
  Reader reader_;
};

}  // namespace moeserve
