// Chooses which tokens have a row of their own in a token x expert table that is smaller than the
// vocabulary: those that occur most often.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "kernels/route_counters.h"

namespace moeserve {

// A token gets a free row when it first occurs. Once no row is free, a token that has occurred at
// least twice as often as the owner of a row takes that row over. So the counts of a row are exact,
// and begin with the token's first occurrence or with the moment at which it received the row.

// One thread assigns and publishes; any thread may call Owners().
class TokenRows {
 public:
  // Every token id is in [0, vocabulary). `rows` excludes the shared row.
  TokenRows(int64_t vocabulary, int64_t rows);

  // Adds the occurrences of `tokens` and returns the rows that change hands for them, for
  // RouteCounters::AssignTokenRows(). The result is valid until the next call.
  std::span<const TokenRowChange> Assign(std::span<const int32_t> tokens);
  // Makes the owners visible. Must be called when the device has carried out all changes.
  void Publish();

  struct Owner {
    int32_t token = -1;    // -1: none, or not published
    uint32_t changes = 0;  // how often the row has changed hands
    bool operator==(const Owner&) const = default;
  };
  // Returns the owner of every row. If it is the same before and after a row of the table is read,
  // then the row holds counts of this token alone.
  std::vector<Owner> Owners() const;

 private:
  // Most rows that change hands in one call while no row is free: it bounds the time of a step.
  static constexpr int kMostReplaced = 16;

  // Returns a row whose owner occurred at most half as often as `token`, or -1. Looks at `left`
  // rows at most, and lowers it by the number of rows that it looked at.
  int32_t RowFor(int32_t token, int64_t& left);

  std::vector<uint32_t> occurrences_;  // by token; saturates
  std::vector<int32_t> row_of_token_;  // -1: the shared row
  std::vector<int32_t> token_of_row_;  // grows up to rows_
  const int64_t rows_;
  size_t next_ = 0;      // the row at which the search for a replacement continues
  uint32_t fewest_ = 0;  // no owner occurred less often
  std::vector<TokenRowChange> changes_;
  std::vector<int32_t> unpublished_;  // rows that changed hands since Publish()

  mutable Mutex mutex_;
  std::vector<Owner> published_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moeserve
