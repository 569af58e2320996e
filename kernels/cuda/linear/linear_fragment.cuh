// The epilogue of wgmma products without shared memory: bias, activation, gating and rounding are
// applied to the accumulators, then each group of four lanes exchanges results so that each lane
// stores 16 bytes. StoreLinearTile() (linear_tile.cuh) computes the same bits, but with several
// times the instructions, during which the tensor cores are idle.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/activation.cuh"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {

// Transposes a 4 x 4 matrix that four adjacent lanes hold. Before, lane q of the four has row q in
// x[0..3]; afterwards, x[i] of lane q is what lane i had in x[q].
__device__ __forceinline__ void TransposeFour(uint32_t (&x)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
  const bool odd = lane % 2 != 0, high = lane / 2 != 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(kFullMask, odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(kFullMask, high ? x[i] : x[i + 2], 2);
    (high ? x[i] : x[i + 2]) = other;
  }
}

// Applies the epilogue to the sums of a warpgroup (kN packed rows by 64 rows, in wgmma's
// accumulator layout, see wgmma.cuh) and stores bf16 outputs, whose rows must be 16-byte aligned.
// `thread` is the index in the warpgroup; all threads of the warpgroup must call this.
template <ActivationKind kKind, bool kGated, int kN>
__device__ __forceinline__ void StoreFragments(const LinearParams& p, const LinearBankEntry& m,
                                               const LinearTileRange& tile,
                                               const float (&sums)[kN / 2], int thread) {
  constexpr int kImageRows = kGated ? 16 : 8;  // packed rows per 8 outputs
  constexpr int kGroups = kN / kImageRows;     // number of groups of 8 outputs
  static_assert(kGroups % 4 == 0);
  const int lane = thread % 32, quad = lane % 4;
  const int first = kGated ? tile.image_row / 2 : tile.image_row;
  const int limit = p.pad_output ? (m.out_features + 15) / 16 * 16 : m.out_features;
  const float* bias = p.bias == nullptr ? nullptr : p.bias + m.bias + tile.image_row + quad * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = thread / 32 * 16 + lane / 4 + half * 8;
    uint16_t* const row = reinterpret_cast<uint16_t*>(LinearOutputRow(p, tile, tile.row + r));
#pragma unroll
    for (int batch = 0; batch < kGroups / 4; ++batch) {
      if (first + batch * 32 >= limit) break;
      uint32_t pairs[4];
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const int group = batch * 4 + g;
        const int column = first + group * 8 + quad * 2;
        const float* const b = column < limit ? bias : nullptr;
        const int at = group * (kImageRows / 2) + half * 2;
        float value[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float sum = sums[at + i] + (b == nullptr ? 0.0f : b[group * kImageRows + i]);
          value[i] = Activated<kKind, true>(sum);
          if constexpr (kGated) {
            value[i] *= sums[at + 4 + i] + (b == nullptr ? 0.0f : b[group * kImageRows + 8 + i]);
          }
          if (column + i >= m.out_features) value[i] = 0.0f;
        }
        pairs[g] = PackBf16(value[0], value[1]);
      }
      // Afterwards this lane has all 8 outputs of group `quad` of the batch.
      TransposeFour(pairs);
      const int column = first + (batch * 4 + quad) * 8;
      if (r >= tile.rows || column >= limit) continue;
      if (column + 8 <= limit) {
        *reinterpret_cast<uint4*>(row + column) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (column + j < limit) {
            row[column + j] = static_cast<uint16_t>(pairs[j / 2] >> (j % 2 * 16));
          }
        }
      }
    }
  }
}

// Calls StoreFragments() if it supports the settings; otherwise returns false.
template <int kN>
__device__ __forceinline__ bool TryStoreFragments(const LinearParams& p, const LinearBankEntry& m,
                                                  const LinearTileRange& tile,
                                                  const float (&sums)[kN / 2], int thread) {
  if (!p.output_bf16 || !p.wide_output) return false;
  if (p.gated && !IsPlain(p.activation)) return false;
  if (p.gated && p.activation.kind == ActivationKind::kSilu) {
    StoreFragments<ActivationKind::kSilu, true, kN>(p, m, tile, sums, thread);
  } else if (!p.gated && p.activation.kind == ActivationKind::kRelu) {
    StoreFragments<ActivationKind::kRelu, false, kN>(p, m, tile, sums, thread);
  } else if (!p.gated && p.activation.kind == ActivationKind::kNone) {
    StoreFragments<ActivationKind::kNone, false, kN>(p, m, tile, sums, thread);
  } else {
    return false;
  }
  return true;
}

}  // namespace moeserve::cuda
