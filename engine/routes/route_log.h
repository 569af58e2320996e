// Which experts computed the tokens of each cache block: what a request's own counts and its
// routing record are made of.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/routes/route_layout.h"
#include "engine/routes/routing_record.h"
#include "kernels/route_counters.h"

namespace moeserve {

// How much the experts did for the tokens of each cache block and, where `keep_routes`, which ones
// they were.
//
// The routes of a token stay with the cache block that holds its key and value. So the routes of a
// request are the same whether its tokens were computed for it, found in the prefix cache, shared
// with another sample or computed again after a preemption. Engine thread only.
class RouteLog {
 public:
  // `layout` outlives the log.
  RouteLog(const RouteLayout& layout, int64_t blocks, bool keep_routes)
      : layout_(layout),
        totals_(static_cast<size_t>(blocks)),
        routes_(static_cast<size_t>(keep_routes ? blocks : 0)) {}

  bool keeps_routes() const { return !routes_.empty(); }

  // The block is about to be filled anew.
  void Clear(int32_t block);
  void Copy(int32_t from, int32_t to);

  // Only with keeps_routes(): the token in `slot` of `block` was routed, its row `row` (of
  // rows_per_token) chose `expert`. Experts of a row come in ascending order.
  void Add(int32_t block, int slot, int row, int expert, float weight) {
    routes_[block].push_back({static_cast<uint32_t>(slot * layout_.rows_per_token + row),
                              static_cast<uint16_t>(expert), weight});
  }

  // A token of the block was run.
  void AddTotals(int32_t block, const TokenRoutes& token) {
    totals_[block].routes += token.routes;
    totals_[block].parameters += token.parameters;
  }
  // Sum over all tokens in `blocks`.
  TokenRoutes Total(std::span<const int32_t> blocks) const;
  // The rest needs keeps_routes().

  // Adds how often each expert was chosen; `counts` [layout.num_experts].
  void Count(std::span<const int32_t> blocks, std::span<uint64_t> counts) const;

  // The routes of the tokens [begin, end) of a sequence with these cache blocks.
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
