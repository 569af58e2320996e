#include "engine/statistics/token_rows.h"

#include <algorithm>

namespace moeserve {

TokenRows::TokenRows(int64_t vocabulary, int64_t rows)
    : occurrences_(static_cast<size_t>(vocabulary)),
      row_of_token_(static_cast<size_t>(vocabulary), -1),
      rows_(rows),
      published_(static_cast<size_t>(rows)) {}

std::span<const TokenRowChange> TokenRows::Assign(std::span<const int32_t> tokens) {
  changes_.clear();
  // No row changes hands twice in one call.
  const bool full = static_cast<int64_t>(token_of_row_.size()) == rows_;
  int replaced = 0;
  int64_t left = rows_;
  for (const int32_t token : tokens) {
    uint32_t& count = occurrences_[static_cast<size_t>(token)];
    count += count != UINT32_MAX;
    if (row_of_token_[static_cast<size_t>(token)] >= 0) continue;
    TokenRowChange change{.token = token};
    if (static_cast<int64_t>(token_of_row_.size()) < rows_) {
      change.row = static_cast<int32_t>(token_of_row_.size());
      token_of_row_.push_back(token);
    } else {
      if (!full || count / 2 < fewest_ || replaced == kMostReplaced) continue;
      // A token that has lost its row in this call waits for the next one.
      const bool lost = std::any_of(changes_.begin(), changes_.end(),
                                    [&](const TokenRowChange& c) { return c.replaced == token; });
      if (lost) continue;
      change.row = RowFor(token, left);
      if (change.row < 0) continue;
      ++replaced;
      int32_t& owner = token_of_row_[static_cast<size_t>(change.row)];
      change.replaced = owner;
      row_of_token_[static_cast<size_t>(owner)] = -1;
      owner = token;
    }
    row_of_token_[static_cast<size_t>(token)] = change.row;
    changes_.push_back(change);
  }
  if (changes_.empty()) return changes_;
  const MutexLock lock(mutex_);
  for (const TokenRowChange& change : changes_) {
    Owner& owner = published_[static_cast<size_t>(change.row)];
    owner.token = -1;
    ++owner.changes;
    unpublished_.push_back(change.row);
  }
  return changes_;
}

int32_t TokenRows::RowFor(int32_t token, int64_t& left) {
  const uint32_t most = occurrences_[static_cast<size_t>(token)] / 2;
  uint32_t fewest = UINT32_MAX;
  const bool whole = left == rows_;
  for (; left > 0; --left) {
    const size_t row = next_;
    next_ = (next_ + 1) % static_cast<size_t>(rows_);
    const uint32_t count = occurrences_[static_cast<size_t>(token_of_row_[row])];
    if (count <= most) {
      --left;
      return static_cast<int32_t>(row);
    }
    fewest = std::min(fewest, count);
  }
  if (whole) fewest_ = fewest;
  return -1;
}

void TokenRows::Publish() {
  if (unpublished_.empty()) return;
  const MutexLock lock(mutex_);
  for (const int32_t row : unpublished_) {
    published_[static_cast<size_t>(row)].token = token_of_row_[static_cast<size_t>(row)];
  }
  unpublished_.clear();
}

std::vector<TokenRows::Owner> TokenRows::Owners() const {
  const MutexLock lock(mutex_);
  return published_;
}

}  // namespace moeserve
