// Keeps the routes of the tokens in each page, from which a request's expert counts and its
// routing record are built.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/routes/route_layout.h"
#include "engine/routes/routing_record.h"
#include "kernels/route_counters.h"

namespace moeserve {

// Stores how much work the experts did for the tokens of each page and, with `keep_routes`,
// also the routes of these tokens. A token's routes are kept with the page that holds its
// key and value. So the routes of a request are equal whether its tokens were computed for it,
// found in the prefix cache, shared with another sample or recomputed after a preemption. Engine
// thread only.
class RouteLog {
 public:
  // `layout` outlives the log.
  RouteLog(const RouteLayout& layout, int64_t pages, bool keep_routes)
      : layout_(layout),
        totals_(static_cast<size_t>(pages)),
        routes_(static_cast<size_t>(keep_routes ? pages : 0)) {}

  bool keeps_routes() const { return !routes_.empty(); }

  // Deletes what is stored for a page; must be called before the page is filled again.
  void Clear(int32_t page);
  void Copy(int32_t from, int32_t to);

  // Adds a route: row `row` (of rows_per_token) of the token at offset `slot` in `page` chose
  // `expert`. The experts of a row must be added in ascending order. Requires keeps_routes().
  void Add(int32_t page, int slot, int row, int expert, float weight) {
    routes_[page].push_back({static_cast<uint32_t>(slot * layout_.rows_per_token + row),
                             static_cast<uint16_t>(expert), weight});
  }

  // Adds the experts' work for one token of the page.
  void AddTotals(int32_t page, const TokenRoutes& token) {
    totals_[page].routes += token.routes;
    totals_[page].parameters += token.parameters;
  }
  // Returns the experts' work for all tokens in `pages`; negative ids are left out.
  TokenRoutes Total(std::span<const int32_t> pages) const;
  // Adds to `counts` [layout.num_experts] how often the tokens in `pages` chose each expert.
  // Requires keeps_routes().
  void Count(std::span<const int32_t> pages, std::span<uint64_t> counts) const;

  // Returns the routes of the tokens [begin, end) of a sequence; `pages` are the sequence's cache
  // pages. Requires keeps_routes().
  RoutingRecord Record(std::span<const int32_t> pages, int begin, int end) const;

 private:
  struct Route {
    uint32_t row;  // slot * rows_per_token + index of the row within the token
    uint16_t expert;
    float weight;
  };
  const RouteLayout& layout_;
  // Both are indexed by page: the counts of its tokens' routes, and the routes themselves,
  // which are empty if routes are not kept.
  std::vector<TokenRoutes> totals_;
  std::vector<std::vector<Route>> routes_;
};

}  // namespace moeserve
