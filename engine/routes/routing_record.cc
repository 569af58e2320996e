#include "engine/routes/routing_record.h"

#include <algorithm>
#include <cstddef>

#include "base/check.h"

namespace moeserve {

void Append(RoutingRecord& to, const RoutingRecord& next) {
  if (to.offsets.empty()) {
    to = next;
    return;
  }
  MOESERVE_CHECK(next.first_position == to.first_position + to.tokens, "adjacent routes");
  to.tokens += next.tokens;
  for (const auto& [begin, end] : next.reused) {
    if (!to.reused.empty() && to.reused.back().second == begin) {
      to.reused.back().second = end;
    } else {
      to.reused.emplace_back(begin, end);
    }
  }
  const uint32_t shift = to.offsets.back();
  for (size_t r = 1; r < next.offsets.size(); ++r) to.offsets.push_back(shift + next.offsets[r]);
  to.experts.insert(to.experts.end(), next.experts.begin(), next.experts.end());
  to.weights.insert(to.weights.end(), next.weights.begin(), next.weights.end());
}

RoutingRecord Slice(const RoutingRecord& record, int begin, int end, int rows_per_token) {
  RoutingRecord out;
  out.first_position = record.first_position + begin;
  out.tokens = end - begin;
  for (const auto& [first, last] : record.reused) {
    const int from = std::max(first, out.first_position);
    const int to = std::min(last, out.first_position + out.tokens);
    if (from < to) out.reused.emplace_back(from, to);
  }
  const auto rows = record.offsets.begin() + static_cast<std::ptrdiff_t>(begin) * rows_per_token;
  const uint32_t first = *rows;
  const uint32_t last = rows[static_cast<std::ptrdiff_t>(out.tokens) * rows_per_token];
  for (std::ptrdiff_t r = 0; r <= static_cast<std::ptrdiff_t>(out.tokens) * rows_per_token; ++r) {
    out.offsets.push_back(rows[r] - first);
  }
  out.experts.assign(record.experts.begin() + first, record.experts.begin() + last);
  out.weights.assign(record.weights.begin() + first, record.weights.begin() + last);
  return out;
}

}  // namespace moeserve
