// The routes of a text, one row after the other; routing fluctuation compares two of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace moeserve {

// The routes of one routed block as compressed rows.
struct BlockRoutes {
  static constexpr uint16_t kNone = 0xffff;  // value in top1 for a row that chose no expert

  std::vector<uint16_t> top1;           // [rows] expert with the largest weight; ties: the lowest
  std::vector<uint64_t> offsets = {0};  // [rows + 1]
  std::vector<uint16_t> experts;        // [A] ascending within a row

  size_t rows() const { return top1.size(); }
  std::span<const uint16_t> ExpertsOf(size_t row) const {
    return std::span(experts).subspan(offsets[row], offsets[row + 1] - offsets[row]);
  }
  bool operator==(const BlockRoutes&) const = default;
};

struct RouteSequence {
  std::vector<int32_t> tokens;      // [T] tokens in the order in which the model computed them
  std::vector<BlockRoutes> blocks;  // by routed block; the sub-tokens of a token are adjacent

  bool operator==(const RouteSequence&) const = default;
};

}  // namespace moeserve
