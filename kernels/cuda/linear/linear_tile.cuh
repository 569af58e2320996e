// Functions that the linear kernels share: finding a tile in the list of tiles, which is computed
// on the device, and the epilogue.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/base/dtype.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/runtime.h"
#include "kernels/cuda/linear/activation.cuh"
#include "kernels/cuda/linear/linear_bank.h"
#include "kernels/cuda/linear/linear_params.h"

namespace moeserve::cuda {

// One tile: rows [row, row + rows) of `expert` by the packed rows from `image_row` on, as many as
// the tile shape has.
struct LinearTileRange {
  int expert;  // negative if there is no such tile; then `row` is the number of tiles
  int row;
  int rows;
  int image_row;
};

// Returns whether the tiles are those of several experts, or of one whose rows only the device
// knows. Then a launch may have more thread blocks than there are tiles.
__device__ inline bool HasTileList(const LinearParams& p) {
  return p.offsets != nullptr || p.experts > 1;
}

// Returns tile `index` of the list. Experts are in descending order of size; within an expert, all
// row tiles of the same outputs come one after another, so that neighbouring tiles share their
// weights. Must be called by whole warps; all lanes return the same tile.
template <int kTileRows, int kTileImageRows>
__device__ inline LinearTileRange FindLinearTile(const LinearParams& p, int index) {
  if (!HasTileList(p)) {
    // With one expert there is nothing to search.
    const int row_tiles = (p.rows + kTileRows - 1) / kTileRows;
    const int image_row = index / row_tiles * kTileImageRows;
    const int image_rows = p.entries[0].row_blocks * kImageBlock;
    if (image_row >= image_rows) {
      return {-1, (image_rows + kTileImageRows - 1) / kTileImageRows * row_tiles, 0, 0};
    }
    const int row = index % row_tiles * kTileRows;
    return {0, row, min(kTileRows, p.rows - row), image_row};
  }
  constexpr int kPerLane = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int before = 0;
  for (int base = 0; base < p.experts; base += 32 * kPerLane) {
    int expert[kPerLane], begin[kPerLane], rows[kPerLane], tiles[kPerLane];
    int own = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int at = base + lane * kPerLane + i;
      expert[i] = begin[i] = rows[i] = tiles[i] = 0;
      if (at < p.experts) {
        expert[i] = p.order[at];
        begin[i] = p.offsets == nullptr ? 0 : p.offsets[expert[i]];
        rows[i] = p.offsets == nullptr ? p.rows / p.experts : p.offsets[expert[i] + 1] - begin[i];
        const int columns = p.entries[expert[i]].row_blocks * kImageBlock;
        tiles[i] = (rows[i] + kTileRows - 1) / kTileRows *
                   ((columns + kTileImageRows - 1) / kTileImageRows);
      }
      own += tiles[i];
    }
    int end = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kFullMask, end, step);
      if (lane >= step) end += other;
    }
    const int total = __shfl_sync(kFullMask, end, 31);
    if (index >= before + total) {
      before += total;
      continue;
    }
    int first = before + end - own;
    int found = -1, found_begin = 0, found_rows = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (found >= 0) continue;
      if (index >= first && index < first + tiles[i]) {
        found = expert[i];
        found_begin = begin[i];
        found_rows = rows[i];
      } else {
        first += tiles[i];
      }
    }
    const unsigned lanes = __ballot_sync(kFullMask, found >= 0);
    const int winner = __ffs(static_cast<int>(lanes)) - 1;
    found = __shfl_sync(kFullMask, found, winner);
    found_begin = __shfl_sync(kFullMask, found_begin, winner);
    found_rows = __shfl_sync(kFullMask, found_rows, winner);
    const int within = index - __shfl_sync(kFullMask, first, winner);
    const int row_tiles = (found_rows + kTileRows - 1) / kTileRows;
    const int row = within % row_tiles * kTileRows;
    return {found, found_begin + row, min(kTileRows, found_rows - row),
            within / row_tiles * kTileImageRows};
  }
  return {-1, before, 0, 0};
}

// Returns row `row` of the tile's expert.
__device__ inline const char* LinearInputRow(const LinearParams& p, const LinearTileRange& tile,
                                             int row) {
  const int64_t source = p.source == nullptr ? row : p.source[row];
  return p.input + source * p.input_stride + tile.expert * p.input_segment;
}
__device__ inline char* LinearOutputRow(const LinearParams& p, const LinearTileRange& tile,
                                        int row) {
  return p.output + static_cast<int64_t>(row) * p.output_stride + tile.expert * p.output_segment;
}

// Reads 8 sums from shared memory (16-byte aligned) and adds the bias if there is one.
__device__ inline void ReadSums(const float* sums, const float* bias, float (&value)[8]) {
  const float4 low = reinterpret_cast<const float4*>(sums)[0];
  const float4 high = reinterpret_cast<const float4*>(sums)[1];
  const float all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int j = 0; j < 8; ++j) value[j] = all[j] + (bias == nullptr ? 0.0f : bias[j]);
}

// Adds the bias to a tile of sums, applies the activation and writes the results to the output.
// `staged` in shared memory is [rows][kColumns packed rows], with rows kPitch floats apart. In each
// iteration a thread writes 8 columns.
template <int kColumns, int kPitch, int kThreads>
__device__ inline void StoreLinearTile(const LinearParams& p, const LinearBankEntry& m,
                                       const LinearTileRange& tile, const float* staged,
                                       int thread) {
  constexpr int kGroups = kColumns / 8;
  static_assert(kPitch % 4 == 0);  // because sums are read four at a time
  const int groups = p.gated ? kGroups / 2 : kGroups;
  const int first = p.gated ? tile.image_row / 2 : tile.image_row;
  const int limit = p.pad_output ? (m.out_features + 15) / 16 * 16 : m.out_features;
  const float* bias = p.bias == nullptr ? nullptr : p.bias + m.bias + tile.image_row;
#pragma unroll 1
  for (int i = thread; i < tile.rows * groups; i += kThreads) {
    const int r = p.gated ? i / (kGroups / 2) : i / kGroups;  // the divisors are compile-time
                                                              // constants
    const int group = i - r * groups;
    const int column = first + group * 8;
    if (column >= limit) continue;
    const int at = p.gated ? group * 16 : group * 8;
    const float* sums = staged + r * kPitch + at;
    float value[8];
    ReadSums(sums, bias == nullptr ? nullptr : bias + at, value);
    if (p.gated) {
      float up[8];
      ReadSums(sums + 8, bias == nullptr ? nullptr : bias + at + 8, up);
      ActivateGated(p.activation, p.output_bf16, value, up);
    } else {
      Activate(p.activation.kind, p.output_bf16, value);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (column + j >= m.out_features) value[j] = 0.0f;
    }
    char* row = LinearOutputRow(p, tile, tile.row + r);
    const bool wide = p.wide_output && column + 8 <= limit;
    if (p.output_bf16) {
      uint16_t* to = reinterpret_cast<uint16_t*>(row) + column;
      uint32_t pair[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        pair[j] = PackBf16(value[2 * j], value[2 * j + 1]);
      }
      if (wide) {
        *reinterpret_cast<uint4*>(to) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (column + j < limit) to[j] = static_cast<uint16_t>(pair[j / 2] >> (j % 2 * 16));
        }
      }
    } else {
      float* to = reinterpret_cast<float*>(row) + column;
      if (wide) {
        reinterpret_cast<float4*>(to)[0] = make_float4(value[0], value[1], value[2], value[3]);
        reinterpret_cast<float4*>(to)[1] = make_float4(value[4], value[5], value[6], value[7]);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (column + j < limit) to[j] = value[j];
        }
      }
    }
  }
}

}  // namespace moeserve::cuda
