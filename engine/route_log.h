// Which experts computed the tokens of each cache block: what a request's own counts are made of.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace moeserve {

// The routes of a token stay with the cache block that holds its key and value. So the counts of a
// request are the same whether its tokens were computed for it, found in the prefix cache, shared
// with another sample or computed again after a preemption. Engine thread only.
class RouteLog {
 public:
  explicit RouteLog(int64_t blocks) : routes_(static_cast<size_t>(blocks)) {}

  // The block is about to be filled anew.
  void Clear(int32_t block) { routes_[block].clear(); }
  void Copy(int32_t from, int32_t to) { routes_[to] = routes_[from]; }
  // `bucket` numbers (routed layer, expert): the index into a request's counts.
  void Add(int32_t block, uint32_t bucket) { routes_[block].push_back(bucket); }
  // Counts the routes of all tokens in the block.
  void Count(int32_t block, std::span<uint64_t> counts) const {
    for (uint32_t bucket : routes_[block]) ++counts[bucket];
  }

 private:
  std::vector<std::vector<uint32_t>> routes_;
};

}  // namespace moeserve
