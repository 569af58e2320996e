// Which cache block belongs to which sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/kv_cache_storage.h"

namespace moeserve {

// A free list of cache blocks. Engine thread only.
class BlockPool {
 public:
  explicit BlockPool(int64_t blocks) {
    for (int64_t b = blocks - 1; b >= 0; --b) free_.push_back(static_cast<int32_t>(b));
    total_ = blocks;
  }

  int64_t total() const { return total_; }
  int64_t available() const { return static_cast<int64_t>(free_.size()); }

  // `count` <= available().
  std::vector<int32_t> Take(int64_t count) {
    MOESERVE_CHECK(count <= available(), "blocks of the KV cache");
    std::vector<int32_t> blocks(free_.end() - count, free_.end());
    free_.resize(free_.size() - static_cast<size_t>(count));
    return blocks;
  }
  void Give(const std::vector<int32_t>& blocks) {
    free_.insert(free_.end(), blocks.begin(), blocks.end());
    MOESERVE_CHECK(available() <= total_, "a cache block was freed twice");
  }

 private:
  int64_t total_ = 0;
  std::vector<int32_t> free_;
};

constexpr int64_t BlocksFor(int64_t tokens) {
  return (tokens + kKvBlockTokens - 1) / kKvBlockTokens;
}

}  // namespace moeserve
