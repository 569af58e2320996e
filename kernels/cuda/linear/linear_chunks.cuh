// The division of all tiles of a product into one contiguous range per block.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {

// Divides the list of tiles (in the order of FindLinearTile()) into one range per worker, so that
// all ranges cost about the same and a worker needs few different weights. A tile costs its number
// of blocks of 64 inputs, but at least kLeastTileCost. Returns the range of one worker in chunks:
// successive row tiles of the same expert and the same outputs.
//
// All functions must be called by the same whole warp.
template <int kTileRows, int kTileImageRows>
class TileChunks {
 public:
  // With few inputs, a tile takes the time in which its results are stored.
  static constexpr int kLeastTileCost = 3;

  __device__ explicit TileChunks(const LinearParams& p) : params_(p) {}

  // Determines the range. Must be called first, and not before the plan is known. The cost of all
  // tiles must be less than 2^31.
  __device__ void Start(int worker, int workers) {
    int64_t total = 0;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int at = lane; at < params_.experts; at += 32) total += PartOf(at).cost();
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(kFullMask, total, step);
    from_ = static_cast<int>(total * worker / workers);
    to_ = static_cast<int>(total * (worker + 1) / workers);
  }

  // Returns the next chunk. It has any number of rows > 0 and begins at a border of row tiles. Its
  // expert is negative if there is none.
  __device__ LinearTileRange Next() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int before = 0;
    for (int base = 0; base < params_.experts; base += 32) {
      const Part part = PartOf(base + lane);
      int end = part.cost();
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kFullMask, end, step);
        if (lane >= step) end += other;
      }
      const int total = __shfl_sync(kFullMask, end, 31);
      // A tile belongs to the worker in whose range its cost begins.
      const int start = before + end - part.cost();
      const int first = from_ > start ? (from_ - start + part.tile_cost - 1) / part.tile_cost : 0;
      const bool found = first < part.tiles && start + first * part.tile_cost < to_;
      const unsigned lanes = __ballot_sync(kFullMask, found);
      before += total;
      if (lanes == 0) continue;
      const int column_tile = first / max(part.row_tiles, 1);
      const int row_tile = first - column_tile * part.row_tiles;
      const int left = (to_ - start - first * part.tile_cost + part.tile_cost - 1) / part.tile_cost;
      const int count = min(part.row_tiles - row_tile, left);
      const int row = row_tile * kTileRows;
      const int winner = __ffs(static_cast<int>(lanes)) - 1;
      from_ = __shfl_sync(kFullMask, start + (first + count) * part.tile_cost, winner);
      return {__shfl_sync(kFullMask, part.expert, winner),
              __shfl_sync(kFullMask, part.begin + row, winner),
              __shfl_sync(kFullMask, min(count * kTileRows, part.rows - row), winner),
              __shfl_sync(kFullMask, column_tile * kTileImageRows, winner)};
    }
    return {-1, 0, 0, 0};
  }

 private:
  // The tiles of one expert.
  struct Part {
    int expert, begin, rows, row_tiles, tiles, tile_cost;
    __device__ int cost() const { return tiles * tile_cost; }
  };

  __device__ Part PartOf(int at) const {
    const LinearParams& p = params_;
    if (at >= p.experts) return {0, 0, 0, 0, 0, 1};
    const int expert = p.order[at];
    const int begin = p.offsets == nullptr ? 0 : p.offsets[expert];
    const int rows = p.offsets == nullptr ? p.rows / p.experts : p.offsets[expert + 1] - begin;
    const LinearBankEntry& m = p.entries[expert];
    const int row_tiles = (rows + kTileRows - 1) / kTileRows;
    const int column_tiles = (m.row_blocks * kImageBlock + kTileImageRows - 1) / kTileImageRows;
    return {
        expert, begin, rows, row_tiles, row_tiles * column_tiles, max(m.k_blocks, kLeastTileCost)};
  }

  const LinearParams& params_;
  int from_ = 0, to_ = 0;  // of the costs of all tiles, one after another
};

}  // namespace moeserve::cuda
