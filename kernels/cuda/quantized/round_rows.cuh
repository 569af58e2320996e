// Reading and rounding 8 adjacent inputs of a row, for the kernels that round rows to int8.
#pragma once

#include <cstdint>

#include "kernels/base/int8_rows.h"
#include "kernels/cuda/device/ptx.cuh"

namespace moeserve::cuda {

inline constexpr int kRoundedPiece = 8;  // adjacent inputs that a thread reads at once

// Reads the values of the piece at `first`, with zeros after the row's end.
template <bool kBf16>
__device__ inline void ReadPiece(const char* row, int first, int inputs, bool wide,
                                 float (&values)[kRoundedPiece]) {
  if (wide && first + kRoundedPiece <= inputs) {
    if constexpr (kBf16) {
      const uint4 pairs = *reinterpret_cast<const uint4*>(row + first * 2);
      const uint32_t all[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[2 * i] = LowBf16(all[i]);
        values[2 * i + 1] = HighBf16(all[i]);
      }
    } else {
      const float4 low = *reinterpret_cast<const float4*>(row + first * 4);
      const float4 high = *reinterpret_cast<const float4*>(row + first * 4 + 16);
      const float all[kRoundedPiece] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < kRoundedPiece; ++i) values[i] = all[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kRoundedPiece; ++i) {
    values[i] = 0.0f;
    if (first + i >= inputs) continue;
    if constexpr (kBf16) {
      values[i] = F32FromBf16(reinterpret_cast<const uint16_t*>(row)[first + i]);
    } else {
      values[i] = reinterpret_cast<const float*>(row)[first + i];
    }
  }
}

// Returns the integers of a piece.
__device__ inline uint2 RoundPiece(const float (&values)[kRoundedPiece], const Int8Scale& scale) {
  uint32_t integers[2] = {};
#pragma unroll
  for (int i = 0; i < kRoundedPiece; ++i) {
    const auto byte = static_cast<uint8_t>(RoundToInt8(values[i], scale));
    integers[i / 4] |= static_cast<uint32_t>(byte) << (i % 4 * 8);
  }
  return make_uint2(integers[0], integers[1]);
}

}  // namespace moeserve::cuda
