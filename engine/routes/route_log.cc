#include "engine/routes/route_log.h"

#include "kernels/kv_cache_storage.h"

namespace moeserve {

void RouteLog::Clear(int32_t page) {
  totals_[page] = {};
  if (keeps_routes()) routes_[page].clear();
}

void RouteLog::Copy(int32_t from, int32_t to) {
  totals_[to] = totals_[from];
  if (keeps_routes()) routes_[to] = routes_[from];
}

TokenRoutes RouteLog::Total(std::span<const int32_t> pages) const {
  TokenRoutes totals;
  for (int32_t page : pages) {
    if (page < 0) continue;
    totals.routes += totals_[page].routes;
    totals.parameters += totals_[page].parameters;
  }
  return totals;
}

void RouteLog::Count(std::span<const int32_t> pages, std::span<uint64_t> counts) const {
  for (int32_t page : pages) {
    for (const Route& route : routes_[page]) {
      const int row = static_cast<int>(route.row) % layout_.rows_per_token;
      ++counts[layout_.blocks[layout_.block_of_row[row]].first_expert + route.expert];
    }
  }
}

RoutingRecord RouteLog::Record(std::span<const int32_t> pages, int begin, int end) const {
  RoutingRecord record;
  record.first_position = begin;
  record.tokens = end - begin;
  const int64_t per_token = layout_.rows_per_token;
  record.offsets.assign(static_cast<size_t>(record.tokens * per_token + 1), 0);
  // Calls f(row, route) for every route of these tokens. Two calls of `each` do a counting sort by
  // row, which keeps the order of a row's experts.
  const auto each = [&](const auto& f) {
    for (int i = begin / kPageTokens; i * kPageTokens < end; ++i) {
      const int64_t shift = (int64_t{i} * kPageTokens - begin) * per_token;
      for (const Route& route : routes_[pages[i]]) {
        const int64_t row = shift + route.row;
        if (row >= 0 && row < record.tokens * per_token) f(static_cast<size_t>(row), route);
      }
    }
  };
  each([&](size_t row, const Route&) { ++record.offsets[row + 1]; });
  for (size_t r = 1; r < record.offsets.size(); ++r) record.offsets[r] += record.offsets[r - 1];
  record.experts.resize(record.offsets.back());
  record.weights.resize(record.offsets.back());
  std::vector<uint32_t> next(record.offsets.begin(), record.offsets.end() - 1);
  each([&](size_t row, const Route& route) {
    const uint32_t at = next[row]++;
    record.experts[at] = route.expert;
    record.weights[at] = route.weight;
  });
  return record;
}

}  // namespace moeserve
