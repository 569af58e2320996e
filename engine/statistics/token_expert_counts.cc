#include "engine/statistics/token_expert_counts.h"

#include <algorithm>

#include "base/check.h"

namespace moeserve {

template <typename F>
void TokenExpertCounts::ForEachRow(const F& f) const {
  constexpr int64_t kPart = int64_t{1} << 18;  // number of elements that are copied at a time
  const int64_t tokens = std::max<int64_t>(1, kPart / std::max<int64_t>(1, experts_));
  std::vector<uint32_t> part;
  for (int64_t begin = 0; begin < vocabulary_; begin += tokens) {
    const int64_t end = std::min(vocabulary_, begin + tokens);
    part.resize(static_cast<size_t>((end - begin) * experts_));
    MOESERVE_CHECK(reader_(begin * experts_, part).ok(), "token x expert counters can be read");
    for (int64_t t = begin; t < end; ++t) f(t, part.data() + (t - begin) * experts_);
  }
}

std::vector<uint32_t> TokenExpertCounts::Columns(int64_t first, int64_t count) const {
  std::vector<uint32_t> out(static_cast<size_t>(vocabulary_ * count));
  ForEachRow([&](int64_t token, const uint32_t* row) {
    std::copy_n(row + first, count, out.data() + token * count);
  });
  return out;
}

std::vector<std::vector<uint32_t>> TokenExpertCounts::ColumnGroups(
    std::span<const int64_t> counts) const {
  std::vector<std::vector<uint32_t>> out;
  for (const int64_t count : counts) out.emplace_back(static_cast<size_t>(vocabulary_ * count));
  ForEachRow([&](int64_t token, const uint32_t* row) {
    for (size_t i = 0; i < counts.size(); ++i) {
      std::copy_n(row, counts[i], out[i].data() + token * counts[i]);
      row += counts[i];
    }
  });
  return out;
}

}  // namespace moeserve
