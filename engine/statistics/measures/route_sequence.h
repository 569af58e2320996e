// The routes of a text, row after row: what routing fluctuation compares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace moeserve {

// Rows of one routed block as compressed rows.
struct BlockRoutes {
  static constexpr uint16_t kNone = 0xffff;  // a row that chose nothing

  std::vector<uint16_t> top1;           // [rows] expert of the largest weight, equals: the lowest
  std::vector<uint64_t> offsets = {0};  // [rows + 1]
  std::vector<uint16_t> experts;        // [A] ascending within a row

  size_t rows() const { return top1.size(); }
  std::span<const uint16_t> ExpertsOf(size_t row) const {
    return std::span(experts).subspan(offsets[row], offsets[row + 1] - offsets[row]);
  }
  bool operator==(const BlockRoutes&) const = default;
};

struct RouteSequence {
  std::vector<int32_t> tokens;      // [T] as the model saw them
  std::vector<BlockRoutes> blocks;  // by routed block, sub-tokens of a token adjacent

  bool operator==(const RouteSequence&) const = default;
};

}  // namespace moeserve
