// Keeps the routes of the tokens in each cache block, from which a request's expert counts and its
// routing record are built.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/routes/route_layout.h"
#include "engine/routes/routing_record.h"
#include "kernels/route_counters.h"

namespace moeserve {

// Stores how much work the experts did for the tokens of each cache block and, with `keep_routes`,
// also the routes of these tokens. A token's routes are kept with the cache block that holds its
// key and value. So the routes of a request are equal whether its tokens were computed for it,
// found in the prefix cache, shared with another sample or recomputed after a preemption. Engine
// thread only.
class RouteLog {
 public:
  // `layout` outlives the log.
  RouteLog(const RouteLayout& layout, int64_t blocks, bool keep_routes)
      : layout_(layout),
        totals_(static_cast<size_t>(blocks)),
        routes_(static_cast<size_t>(keep_routes ? blocks : 0)) {}

  bool keeps_routes() const { return !routes_.empty(); }

  // Deletes what is stored for a block; must be called before the block is filled again.
  void Clear(int32_t block);
  void Copy(int32_t from, int32_t to);

  // Adds a route: row `row` (of rows_per_token) of the token at offset `slot` in `block` chose
  // `expert`. The experts of a row must be added in ascending order. Requires keeps_routes().
  void Add(int32_t block, int slot, int row, int expert, float weight) {
    routes_[block].push_back({static_cast<uint32_t>(slot * layout_.rows_per_token + row),
                              static_cast<uint16_t>(expert), weight});
  }

  // Adds the experts' work for one token of the block.
  void AddTotals(int32_t block, const TokenRoutes& token) {
    totals_[block].routes += token.routes;
    totals_[block].parameters += token.parameters;
  }
  // Returns the experts' work for all tokens in `blocks`; negative ids are left out.
  TokenRoutes Total(std::span<const int32_t> blocks) const;
  // Adds to `counts` [layout.num_experts] how often the tokens in `blocks` chose each expert.
  // Requires keeps_routes().
  void Count(std::span<const int32_t> blocks, std::span<uint64_t> counts) const;

  // Returns the routes of the tokens [begin, end) of a sequence; `blocks` are the sequence's cache
  // blocks. Requires keeps_routes().
  RoutingRecord Record(std::span<const int32_t> blocks, int begin, int end) const;

 private:
  struct Route {
    uint32_t row;  // slot * rows_per_token + index of the row within the token
    uint16_t expert;
    float weight;
  };
  const RouteLayout& layout_;
  // Both are indexed by cache block: the counts of its tokens' routes, and the routes themselves,
  // which are empty if routes are not kept.
  std::vector<TokenRoutes> totals_;
  std::vector<std::vector<Route>> routes_;
};

}  // namespace moeserve
