// What the linear kernels share: the list of tiles, which only the device knows, and the epilogue.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/base/dtype.h"
#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/linear_bank.h"
#include "kernels/cuda/linear_params.h"
#include "kernels/cuda/runtime.h"

namespace moeserve::cuda {

// Rows [row, row + rows) of `expert` by image rows [image_row, + the tile's).
struct LinearTileRange {
  int expert;  // negative: there is no such tile
  int row;
  int rows;
  int image_row;
};

// Tile `index` of the list: experts by falling size; within an expert row tiles first, so that
// neighbours share their weights. Called by whole warps; every lane gets the answer.
template <int kTileRows, int kTileImageRows>
__device__ inline LinearTileRange FindLinearTile(const LinearParams& p, int index) {
  constexpr int kPerLane = 4;
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int before = 0;
  for (int base = 0; base < p.experts; base += 32 * kPerLane) {
    int tiles[kPerLane];
    int own = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int at = base + lane * kPerLane + i;
      tiles[i] = 0;
      if (at < p.experts) {
        const int e = p.order[at];
        const int rows = p.offsets == nullptr ? p.rows : p.offsets[e + 1] - p.offsets[e];
        const int columns = p.entries[e].row_blocks * kImageBlock;
        tiles[i] =
            (rows + kTileRows - 1) / kTileRows * ((columns + kTileImageRows - 1) / kTileImageRows);
      }
      own += tiles[i];
    }
    int end = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAll, end, step);
      if (lane >= step) end += other;
    }
    const int total = __shfl_sync(kAll, end, 31);
    if (index >= before + total) {
      before += total;
      continue;
    }
    int at = -1;
    int first = before + end - own;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (at < 0) {
        if (index >= first && index < first + tiles[i]) {
          at = base + lane * kPerLane + i;
        } else {
          first += tiles[i];
        }
      }
    }
    const unsigned found = __ballot_sync(kAll, at >= 0);
    const int winner = __ffs(static_cast<int>(found)) - 1;
    at = __shfl_sync(kAll, at, winner);
    first = __shfl_sync(kAll, first, winner);
    LinearTileRange tile;
    tile.expert = p.order[at];
    const int begin = p.offsets == nullptr ? 0 : p.offsets[tile.expert];
    const int rows = (p.offsets == nullptr ? p.rows : p.offsets[tile.expert + 1]) - begin;
    const int row_tiles = (rows + kTileRows - 1) / kTileRows;
    const int within = index - first;
    tile.row = begin + within % row_tiles * kTileRows;
    tile.rows = min(kTileRows, begin + rows - tile.row);
    tile.image_row = within / row_tiles * kTileImageRows;
    return tile;
  }
  return {-1, 0, 0, 0};
}

__device__ inline const char* LinearInputRow(const LinearParams& p, int row) {
  const int64_t source = p.source == nullptr ? row : p.source[row];
  return p.input + source * p.input_stride;
}

// Adds the bias, applies the activation and writes a tile of sums `staged` [rows, kColumns image
// rows, `kPitch` floats apart] in shared memory to the output, 8 columns per thread and turn.
template <int kColumns, int kPitch, int kThreads>
__device__ inline void StoreLinearTile(const LinearParams& p, const LinearBankEntry& m,
                                       const LinearTileRange& tile, const float* staged,
                                       int thread) {
  const int groups = p.gated ? kColumns / 16 : kColumns / 8;
  const int first = p.gated ? tile.image_row / 2 : tile.image_row;
  const int limit = p.pad_output ? (m.out_features + 15) / 16 * 16 : m.out_features;
  const float* bias = p.bias == nullptr ? nullptr : p.bias + m.bias + tile.image_row;
  for (int i = thread; i < tile.rows * groups; i += kThreads) {
    const int r = i / groups;
    const int group = i % groups;
    const int column = first + group * 8;
    if (column >= limit) continue;
    const int at = p.gated ? group * 16 : group * 8;
    const float* sums = staged + r * kPitch + at;
    float value[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float v = sums[j];
      if (bias != nullptr) v += bias[at + j];
      v = Activate(p.activation, v);
      if (p.gated) {
        float up = sums[8 + j];
        if (bias != nullptr) up += bias[at + 8 + j];
        v *= up;
      }
      value[j] = column + j < m.out_features ? v : 0.0f;
    }
    char* row = p.output + static_cast<int64_t>(tile.row + r) * p.output_stride;
    const bool wide = p.wide_output && column + 8 <= limit;
    if (p.output_bf16) {
      uint16_t* to = reinterpret_cast<uint16_t*>(row) + column;
      uint32_t pair[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        pair[j] = Bf16FromF32(value[2 * j]) | static_cast<uint32_t>(Bf16FromF32(value[2 * j + 1]))
                                                  << 16;
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
