#include "engine/statistics/token_expert_counts.h"

#include <algorithm>

#include "base/check.h"

namespace moeserve {

template <typename F>
void TokenExpertCounts::ForEachRow(const F& f) const {
  constexpr int64_t kPart = int64_t{1} << 18;  // number of elements that are copied at a time
  const int64_t rows = std::max<int64_t>(1, kPart / std::max<int64_t>(1, experts_));
  std::vector<uint32_t> part;
  for (int64_t begin = 0; begin < rows_; begin += rows) {
    const int64_t end = std::min(rows_, begin + rows);
    part.resize(static_cast<size_t>((end - begin) * experts_));
    MOESERVE_CHECK(reader_(begin * experts_, part).ok(), "token x expert counters can be read");
    for (int64_t r = begin; r < end; ++r) f(r, part.data() + (r - begin) * experts_);
  }
}

std::vector<uint32_t> TokenExpertCounts::Columns(int64_t first, int64_t count) const {
  std::vector<uint32_t> out(static_cast<size_t>(rows_ * count));
  ForEachRow([&](int64_t r, const uint32_t* row) {
    std::copy_n(row + first, count, out.data() + r * count);
  });
  return out;
}

TokenColumns TokenExpertCounts::ReadColumns(int64_t first, int64_t count) const {
  if (complete()) return {.tokens = {}, .counts = Columns(first, count)};
  const std::vector<TokenRows::Owner> before = owners_();
  std::vector<uint32_t> all = Columns(first, count);
  const std::vector<TokenRows::Owner> after = owners_();
  const auto width = static_cast<size_t>(count);
  TokenColumns out;
  // The last row, to which the rows without a known owner are added.
  std::vector<uint32_t> others(all.end() - count, all.end());
  for (size_t r = 0; r < before.size(); ++r) {
    const uint32_t* row = all.data() + r * width;
    if (before[r].token >= 0 && before[r] == after[r]) {
      out.tokens.push_back(before[r].token);
      out.counts.insert(out.counts.end(), row, row + count);
      continue;
    }
    for (size_t c = 0; c < width; ++c) others[c] += std::min(row[c], UINT32_MAX - others[c]);
  }
  out.tokens.push_back(-1);
  out.counts.insert(out.counts.end(), others.begin(), others.end());
  return out;
}

std::vector<std::vector<uint32_t>> TokenExpertCounts::ColumnGroups(
    std::span<const int64_t> counts) const {
  std::vector<std::vector<uint32_t>> out;
  for (const int64_t count : counts) out.emplace_back(static_cast<size_t>(rows_ * count));
  ForEachRow([&](int64_t r, const uint32_t* row) {
    for (size_t i = 0; i < counts.size(); ++i) {
      std::copy_n(row, counts[i], out[i].data() + r * counts[i]);
      row += counts[i];
    }
  });
  return out;
}

}  // namespace moeserve
