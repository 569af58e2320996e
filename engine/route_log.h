// Which experts computed the tokens of each cache block: what a request's own counts and its
// routing record are made of.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/route_layout.h"
#include "engine/routing_record.h"

namespace moeserve {

// The routes of a token stay with the cache block that holds its key and value. So the routes of a
// request are the same whether its tokens were computed for it, found in the prefix cache, shared
// with another sample or computed again after a preemption. Engine thread only.
class RouteLog {
 public:
  // `layout` outlives the log.
  RouteLog(const RouteLayout& layout, int64_t blocks)
      : layout_(layout), blocks_(static_cast<size_t>(blocks)) {}

  // The block is about to be filled anew.
  void Clear(int32_t block);
  void Copy(int32_t from, int32_t to) { blocks_[to] = blocks_[from]; }

  // The token in `slot` of `block` was routed: its row `row` (of rows_per_token) chose `expert`,
  // which has so many `parameters`. Experts of a row come in ascending order.
  void Add(int32_t block, int slot, int row, int expert, float weight, int64_t parameters) {
    Block& b = blocks_[block];
    b.routes.push_back({static_cast<uint32_t>(slot * layout_.rows_per_token + row),
                        static_cast<uint16_t>(expert), weight});
    b.parameters += static_cast<uint64_t>(parameters);
  }

  // Of all tokens in `blocks`.
  struct Totals {
    uint64_t routes = 0;      // (row, expert) pairs
    uint64_t parameters = 0;  // of their experts
  };
  Totals Total(std::span<const int32_t> blocks) const;
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
  struct Block {
    std::vector<Route> routes;
    uint64_t parameters = 0;
  };

  const RouteLayout& layout_;
  std::vector<Block> blocks_;
};

}  // namespace moeserve
