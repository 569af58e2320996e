// Routes of the tokens in each cache block: the source of a request's own counts and of its routing
// record.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/routes/route_layout.h"
#include "engine/routes/routing_record.h"
#include "kernels/route_counters.h"

namespace moeserve {

// Stores how much work the experts did for the tokens of each cache block and, with `keep_routes`,
// the routes themselves. They belong to the cache block that holds the token's key and value, so
// the routes of a request are the same whether its tokens were computed for it, found in the prefix
// cache, shared with another sample or recomputed after a preemption. Engine thread only.
class RouteLog {
 public:
  // `layout` outlives the log.
  RouteLog(const RouteLayout& layout, int64_t blocks, bool keep_routes)
      : layout_(layout),
        totals_(static_cast<size_t>(blocks)),
        routes_(static_cast<size_t>(keep_routes ? blocks : 0)) {}

  bool keeps_routes() const { return !routes_.empty(); }

  // Call before a block is filled anew.
  void Clear(int32_t block);
  void Copy(int32_t from, int32_t to);

  // Adds a route: row `row` (of rows_per_token) of the token in `slot` of `block` chose `expert`.
  // Experts of a row come in ascending order. Requires keeps_routes().
  void Add(int32_t block, int slot, int row, int expert, float weight) {
    routes_[block].push_back({static_cast<uint32_t>(slot * layout_.rows_per_token + row),
                              static_cast<uint16_t>(expert), weight});
  }

  // Adds the work for one token of the block.
  void AddTotals(int32_t block, const TokenRoutes& token) {
    totals_[block].routes += token.routes;
    totals_[block].parameters += token.parameters;
  }
  // Sum over all tokens in `blocks`.
  TokenRoutes Total(std::span<const int32_t> blocks) const;
  // Adds how often each expert was chosen to `counts` [layout.num_experts]. Requires
  // keeps_routes().
  void Count(std::span<const int32_t> blocks, std::span<uint64_t> counts) const;

  // Returns the routes of the tokens [begin, end) of a sequence with these cache blocks. Requires
  // keeps_routes().
  RoutingRecord Record(std::span<const int32_t> blocks, int begin, int end) const;

 private:
  struct Route {
    uint32_t row;  // slot * rows_per_token + row of the token
    uint16_t expert;
    float weight;
  };
  const RouteLayout& layout_;
  std::vector<TokenRoutes> totals_;         // by cache block
  std::vector<std::vector<Route>> routes_;  // by cache block; empty: not kept
};

}  // namespace moeserve
