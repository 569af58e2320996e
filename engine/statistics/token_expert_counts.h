// How often each token id was routed to each expert. Pointwise mutual information, expert
// similarity and expert synergy are computed from these counts.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/statistics/token_rows.h"

namespace moeserve {

// A part of the table. Row i counts the token tokens[i], or all tokens that have no row of their
// own if tokens[i] is -1. If `tokens` is empty, row v counts the token v of the vocabulary.
struct TokenColumns {
  std::vector<int32_t> tokens;
  std::vector<uint32_t> counts;  // [rows, columns]
};

// Reads a table [rows, experts of all routed blocks] of 32-bit counters, which saturate at their
// maximum. It is complete if it has a row for every token of the vocabulary; otherwise the tokens
// that occur most often have rows (TokenRows), and the last row is of all other tokens. Cheap to
// copy; may be used by any thread. A read while tokens are computed may include a part of the
// running step.
class TokenExpertCounts {
 public:
  // Returns the owners of all rows but the last one.
  using Owners = std::function<std::vector<TokenRows::Owner>()>;
  // Copies elements [first, first + part.size()) of the table.
  using Reader = std::function<Status(int64_t first, std::span<uint32_t> part)>;

  // Returns the size of the table in bytes.
  static int64_t BytesFor(int64_t vocabulary, int64_t experts) {
    return vocabulary * experts * static_cast<int64_t>(sizeof(uint32_t));
  }

  // `owners` is null if the table is complete.
  TokenExpertCounts(int64_t rows, int64_t experts, Reader reader, Owners owners = nullptr)
      : rows_(rows), experts_(experts), reader_(std::move(reader)), owners_(std::move(owners)) {}

  bool complete() const { return owners_ == nullptr; }
  int64_t experts() const { return experts_; }

  // Returns the columns [first, first + count) of the table as [rows, count], rows outermost. Stops
  // the process if the device fails.
  std::vector<uint32_t> Columns(int64_t first, int64_t count) const;
  // Returns Columns() with the tokens of the rows. Rows that no token owns, and those whose owner
  // changes in the meantime, are added to the last row.
  TokenColumns ReadColumns(int64_t first, int64_t count) const;
  // Returns adjacent groups of columns, from column 0 on, in one pass over the table. Group i has
  // counts[i] columns, in the layout of Columns().
  std::vector<std::vector<uint32_t>> ColumnGroups(std::span<const int64_t> counts) const;

 private:
  // Calls f(index of the row, row) for every row of the table.
  template <typename F>
  void ForEachRow(const F& f) const;

  int64_t rows_;
  int64_t experts_;
  Reader reader_;
  Owners owners_;
};

}  // namespace moeserve
