// The epilogue of wgmma products without shared memory: bias, activation, gating and rounding are
// applied to the accumulators, and lanes store the results. StoreLinearTile() (linear_tile.cuh)
// computes the same bits, but with several times the instructions, during which the tensor cores
// are idle.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/activation.cuh"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {

// Transposes a 4 x 4 matrix that four adjacent lanes hold. Before, lane q of the four, which passes
// `quad` = q, has row q in x[0..3]; afterwards, x[i] of lane q is what lane i had in x[q].
__device__ __forceinline__ void TransposeFour(uint32_t (&x)[4], int quad) {
  const bool odd = quad % 2 != 0, high = quad / 2 != 0;
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

// Functions of a sum, or of the two sums of a gated layer, whose result is rounded to bf16.
template <ActivationKind kKind>
struct FragmentActivation {
  __device__ __forceinline__ float operator()(float sum) const {
    return Activated<kKind, true>(sum);
  }
  __device__ __forceinline__ float operator()(float gate, float up) const {
    return Activated<kKind, true>(gate) * up;
  }
};
struct FragmentBoundedSwiglu {
  Activation activation;
  GateBounds bounds;
  __device__ __forceinline__ float operator()(float gate, float up) const {
    return BoundedSwiglu<true>(activation, bounds, gate, up);
  }
};

// One thread's part of the sums of a warpgroup: kN packed rows by 64 rows, in wgmma's accumulator
// layout (wgmma.cuh). Outputs are counted from the first one of the tile.
template <bool kGated, int kN>
struct FragmentPlace {
  static constexpr int kImageRows = kGated ? 16 : 8;  // packed rows per 8 outputs
  static constexpr int kGroups = kN / kImageRows;     // number of groups of 8 outputs
  static constexpr int kBatches = (kGroups + 3) / 4;  // a lane stores one group of each batch

  int quad;
  int real;     // outputs that the matrix has from the tile's first one on
  int written;  // those and the padding
  bool present[2];
  char* row[2];       // the first output of the tile in rows r and r + 8
  const float* bias;  // of this lane's first packed row; null if there is none

  __device__ __forceinline__ FragmentPlace(const LinearParams& p, const LinearBankEntry& m,
                                           const LinearTileRange& tile, int thread) {
    const int lane = thread % 32;
    const int first = kGated ? tile.image_row / 2 : tile.image_row;
    quad = lane % 4;
    real = m.out_features - first;
    written = (p.pad_output ? (m.out_features + 15) / 16 * 16 : m.out_features) - first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = thread / 32 * 16 + lane / 4 + half * 8;
      present[half] = r < tile.rows;
      row[half] = LinearOutputRow(p, tile, tile.row + r) +
                  static_cast<int64_t>(first) * (p.output_bf16 ? 2 : 4);
    }
    bias = p.bias == nullptr ? nullptr : p.bias + m.bias + tile.image_row + quad * 2;
  }

  // Returns whether a batch of 32 outputs exists completely.
  __device__ __forceinline__ bool Inner(int batch) const { return batch * 32 + 32 <= real; }

  // Reads the biases of this lane's two packed rows of each group of a batch, from `offset` on.
  __device__ __forceinline__ void ReadBias(int batch, int offset, float2 (&values)[4]) const {
#pragma unroll
    for (int g = 0; g < 4; ++g) values[g] = make_float2(0.0f, 0.0f);
    if (bias == nullptr) return;
    const bool inner = Inner(batch);
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      const int group = batch * 4 + g;
      if (group < kGroups && (inner || group * 8 < written)) {
        values[g] = *reinterpret_cast<const float2*>(bias + group * kImageRows + offset);
      }
    }
  }
};

// Stores the first `count` of 8 bf16 outputs, or all if `count` is higher.
__device__ __forceinline__ void StoreSome(uint16_t* to, const uint32_t (&pairs)[4], int count) {
  if (count >= 8) {
    *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j < count) to[j] = static_cast<uint16_t>(pairs[j / 2] >> (j % 2 * 16));
  }
}

// Stores the results of `function` as bf16; each group of four lanes exchanges them so that each
// lane stores 16 bytes. The output rows must be 16-byte aligned. All threads of the warpgroup must
// call this; `thread` is the index in the warpgroup.
template <bool kGated, int kN, typename F>
__device__ __forceinline__ void StoreBf16Fragments(const LinearParams& p, const LinearBankEntry& m,
                                                   const LinearTileRange& tile,
                                                   const float (&sums)[kN / 2], int thread,
                                                   const F& function) {
  using Place = FragmentPlace<kGated, kN>;
  const Place place(p, m, tile, thread);
#pragma unroll
  for (int batch = 0; batch < Place::kBatches; ++batch) {
    if (batch * 32 >= place.written) break;
    float2 bias[4], up_bias[4];
    place.ReadBias(batch, 0, bias);
    if constexpr (kGated) place.ReadBias(batch, 8, up_bias);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t pairs[4] = {};
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const int group = batch * 4 + g;
        if (group >= Place::kGroups) break;
        const int at = group * (Place::kImageRows / 2) + half * 2;
        const float low = sums[at] + bias[g].x, high = sums[at + 1] + bias[g].y;
        if constexpr (kGated) {
          pairs[g] = PackBf16(function(low, sums[at + 4] + up_bias[g].x),
                              function(high, sums[at + 5] + up_bias[g].y));
        } else {
          pairs[g] = PackBf16(function(low), function(high));
        }
      }
      if (!place.Inner(batch)) {
        // Padding must be 0, even in a row of NaN.
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          const int column = (batch * 4 + g) * 8 + place.quad * 2;
          if (column + 1 >= place.real) pairs[g] = column < place.real ? pairs[g] & 0xffffu : 0u;
        }
      }
      // Afterwards this lane has all 8 outputs of group `quad` of the batch.
      TransposeFour(pairs, place.quad);
      const int group = batch * 4 + place.quad;
      if (!place.present[half] || group >= Place::kGroups) continue;
      uint16_t* const to = reinterpret_cast<uint16_t*>(place.row[half]) + group * 8;
      if (place.Inner(batch)) {
        *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      } else {
        StoreSome(to, pairs, place.written - group * 8);
      }
    }
  }
}

// Stores the sums and their biases as f32; each lane stores pairs, so that four lanes store 32
// contiguous bytes.
template <int kN>
__device__ __forceinline__ void StoreF32Fragments(const LinearParams& p, const LinearBankEntry& m,
                                                  const LinearTileRange& tile,
                                                  const float (&sums)[kN / 2], int thread) {
  using Place = FragmentPlace<false, kN>;
  const Place place(p, m, tile, thread);
  float* const row[2] = {reinterpret_cast<float*>(place.row[0]) + place.quad * 2,
                         reinterpret_cast<float*>(place.row[1]) + place.quad * 2};
  const int written = place.written - place.quad * 2, real = place.real - place.quad * 2;
#pragma unroll
  for (int batch = 0; batch < Place::kBatches; ++batch) {
    if (batch * 32 >= place.written) break;
    float2 bias[4];
    place.ReadBias(batch, 0, bias);
    const bool wide = p.wide_output && place.Inner(batch);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!place.present[half]) continue;
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const int group = batch * 4 + g;
        if (group >= Place::kGroups) break;
        const int at = group * 4 + half * 2;
        const float low = sums[at] + bias[g].x, high = sums[at + 1] + bias[g].y;
        float* const to = row[half] + group * 8;
        if (wide) {
          *reinterpret_cast<float2*>(to) = make_float2(low, high);
        } else {
          if (group * 8 < written) to[0] = group * 8 < real ? low : 0.0f;
          if (group * 8 + 1 < written) to[1] = group * 8 + 1 < real ? high : 0.0f;
        }
      }
    }
  }
}

// Returns whether StoreFragments() with the epilogue of the settings (EpilogueOf()) applies to
// them, so that it returns true.
inline bool FragmentsFit(const LinearParams& p) {
  if (EpilogueOf(p) != LinearEpilogue::kGeneral) return true;
  if (!p.output_bf16 || !p.wide_output || !p.gated) return false;
  if (IsBoundedSwiglu(p.activation)) return true;
  const ActivationKind kind = p.activation.kind;
  return IsPlain(p.activation) &&
         (kind == ActivationKind::kGelu || kind == ActivationKind::kGeluTanh);
}

// Applies the epilogue to the sums of a warpgroup and stores the results. Returns false if
// kEpilogue is kGeneral and the settings need StoreLinearTile().
template <LinearEpilogue kEpilogue, int kN>
__device__ __forceinline__ bool StoreFragments(const LinearParams& p, const LinearBankEntry& m,
                                               const LinearTileRange& tile,
                                               const float (&sums)[kN / 2], int thread) {
  if constexpr (kEpilogue == LinearEpilogue::kF32) {
    StoreF32Fragments<kN>(p, m, tile, sums, thread);
  } else if constexpr (kEpilogue == LinearEpilogue::kSiluGated) {
    StoreBf16Fragments<true, kN>(p, m, tile, sums, thread,
                                 FragmentActivation<ActivationKind::kSilu>());
  } else if constexpr (kEpilogue != LinearEpilogue::kGeneral) {
    constexpr ActivationKind kKind = kEpilogue == LinearEpilogue::kGelu ? ActivationKind::kGelu
                                     : kEpilogue == LinearEpilogue::kGeluTanh
                                         ? ActivationKind::kGeluTanh
                                     : kEpilogue == LinearEpilogue::kRelu ? ActivationKind::kRelu
                                                                          : ActivationKind::kNone;
    StoreBf16Fragments<false, kN>(p, m, tile, sums, thread, FragmentActivation<kKind>());
  } else {
    if (!p.output_bf16 || !p.wide_output || !p.gated) return false;
    if (IsBoundedSwiglu(p.activation)) {
      StoreBf16Fragments<true, kN>(p, m, tile, sums, thread,
                                   FragmentBoundedSwiglu{p.activation, GateBoundsOf(p.activation)});
    } else if (IsPlain(p.activation) && p.activation.kind == ActivationKind::kGelu) {
      StoreBf16Fragments<true, kN>(p, m, tile, sums, thread,
                                   FragmentActivation<ActivationKind::kGelu>());
    } else if (IsPlain(p.activation) && p.activation.kind == ActivationKind::kGeluTanh) {
      StoreBf16Fragments<true, kN>(p, m, tile, sums, thread,
                                   FragmentActivation<ActivationKind::kGeluTanh>());
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace moeserve::cuda
