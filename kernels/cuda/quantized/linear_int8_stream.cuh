// The tiles of a block of linear_int8_stream.cu, and the rounding of their rows; that file alone
// includes this one.
#pragma once

#include <cstdint>

#include "kernels/base/int8_rows.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_tile.cuh"
#include "kernels/cuda/quantized/linear_int8_kernels.h"
#include "kernels/cuda/quantized/round_rows.cuh"

namespace moeserve::cuda {
namespace {

// An expert, in the order of LinearParams::order. The work of all tiles is counted in units: one
// for each stage of a tile, and one for its end.
struct Int8Expert {
  LinearBankEntry entry;
  int expert;
  int begin;  // its first row
  int rows;
  int column_tiles;
  int tile_units;  // of each tile
  int first_unit;
};

// Copies what does not depend on earlier kernels.
[[maybe_unused]] __device__ void LoadInt8Experts(const LinearParams& p, Int8Expert* experts,
                                                 int tile_image_rows, int parts) {
  for (int i = static_cast<int>(threadIdx.x); i < p.experts; i += static_cast<int>(blockDim.x)) {
    Int8Expert& e = experts[i];
    e.expert = p.experts == 1 ? 0 : p.order[i];
    e.entry = p.entries[e.expert];
    e.column_tiles = e.entry.row_blocks * (kImageBlock / tile_image_rows);
    e.tile_units = (e.entry.k_blocks + parts - 1) / parts + 1;
  }
}

// Counts the rows and units of the experts; experts[p.experts].first_unit is the number of all
// units. All threads of the block must call this.
[[maybe_unused]] __device__ void CountInt8Units(const LinearParams& p, Int8Expert* experts,
                                                int tile_rows) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < p.experts; i += static_cast<int>(blockDim.x)) {
    Int8Expert& e = experts[i];
    // The kernel may not have waited for others, so the first-level cache may have older values.
    e.begin = p.offsets == nullptr ? 0 : __ldcg(p.offsets + e.expert);
    e.rows = p.offsets == nullptr ? p.rows / p.experts : __ldcg(p.offsets + e.expert + 1) - e.begin;
    e.first_unit = (e.rows + tile_rows - 1) / tile_rows * e.column_tiles * e.tile_units;
  }
  __syncthreads();
  if (thread >= 32) return;
  int before = 0;
  for (int base = 0; base < p.experts; base += 32) {
    const int own = base + thread < p.experts ? experts[base + thread].first_unit : 0;
    int end = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kFullMask, end, step);
      if (thread >= step) end += other;
    }
    if (base + thread < p.experts) experts[base + thread].first_unit = before + end - own;
    before += __shfl_sync(kFullMask, end, 31);
  }
  if (thread == 0) experts[p.experts].first_unit = before;
}

// The tiles of one block: those whose first unit is in its share of all units. Successive tiles
// have the same rows as long as there are further outputs, so that rows are rounded once.
class Int8Walk {
 public:
  // To be called by whole warps.
  __device__ Int8Walk(const Int8Expert* experts, int count, int tile_rows, int tile_image_rows)
      : experts_(experts), tile_rows_(tile_rows), tile_image_rows_(tile_image_rows) {
    const int64_t all = experts[count].first_unit;
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    unit_ = static_cast<int>(all * block / blocks);
    end_ = static_cast<int>(all * (block + 1) / blocks);
    if (unit_ >= end_) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int base = 0; base < count; base += 32) {
      const bool before = base + lane < count && experts[base + lane + 1].first_unit <= unit_;
      const unsigned lanes = __ballot_sync(kFullMask, before);
      at_ += __popc(lanes);
      if (lanes != kFullMask) break;
    }
    const Int8Expert& e = experts[at_];
    index_ = (unit_ - e.first_unit + e.tile_units - 1) / e.tile_units;
    unit_ = e.first_unit + index_ * e.tile_units;
    PassEmptyExperts();
  }

  __device__ bool Done() const { return unit_ >= end_; }

  __device__ void Advance() {
    ++index_;
    unit_ += experts_[at_].tile_units;
    PassEmptyExperts();
  }

  __device__ const LinearBankEntry& entry() const { return experts_[at_].entry; }

  __device__ LinearTileRange Tile() const {
    const Int8Expert& e = experts_[at_];
    const int row = index_ / e.column_tiles * tile_rows_;
    return {e.expert, e.begin + row, min(tile_rows_, e.rows - row),
            index_ % e.column_tiles * tile_image_rows_};
  }

 private:
  __device__ void PassEmptyExperts() {
    while (unit_ < end_ && unit_ >= experts_[at_ + 1].first_unit) {
      ++at_;
      index_ = 0;
    }
  }

  const Int8Expert* const experts_;
  const int tile_rows_, tile_image_rows_;
  int at_ = 0;     // expert
  int index_ = 0;  // of its tile
  int unit_, end_;
};

// Rounds the rows of a tile, at most 8, into `values`, where block k of row r is at (k * capacity +
// r) * 128, with its 16-byte piece c at c ^ r, and stores their scales. kWarps warps call this
// together; barrier 1 is theirs. `largest` has space for a number per warp. Nothing is written to
// `values` and `scales` before all warps have called this function, so that they may still read
// those of another tile before it; they must synchronize before they read the new ones.
template <int kWarps, bool kBf16>
__device__ __forceinline__ void RoundTileRows(const LinearParams& p, const LinearBankEntry& entry,
                                              const LinearTileRange& tile, int capacity,
                                              char* values, float* scales, uint32_t* largest,
                                              int warp) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // All warps share one row, or pairs of them, and so on.
  const int warps = tile.rows > 4 ? 1 : tile.rows > 2 ? 2 : tile.rows > 1 ? 4 : kWarps;
  static_assert(kWarps == 8);
  const int r = warp / warps;
  const bool present = r < tile.rows;
  const char* const row = LinearInputRow(p, tile, tile.row + (present ? r : 0));
  const int step = warps * 32 * kRoundedPiece;
  const int begin = (warp % warps * 32 + lane) * kRoundedPiece;
  uint32_t most = 0;
  for (int first = begin; present && first < entry.in_features; first += step) {
    float piece[kRoundedPiece];
    ReadPiece<kBf16>(row, first, entry.in_features, p.wide_input, piece);
#pragma unroll
    for (int i = 0; i < kRoundedPiece; ++i) most = max(most, MagnitudeBits(piece[i]));
  }
  most = __reduce_max_sync(kFullMask, most);
  if (lane == 0) largest[warp] = most;
  NamedBarrierSync(1, kWarps * 32);
  if (!present) return;
  for (int w = 0; w < warps; ++w) most = max(most, largest[r * warps + w]);
  const Int8Scale scale = Int8ScaleOf(most);
  if (begin == 0) scales[r] = scale.scale;
  const int padded = entry.k_blocks * kInt8BlockInputs;
  for (int first = begin; first < padded; first += step) {
    float piece[kRoundedPiece];
    ReadPiece<kBf16>(row, first, entry.in_features, p.wide_input, piece);
    const int at = (first / kInt8BlockInputs * capacity + r) * kInt8BlockInputs +
                   (first % kInt8BlockInputs / 16 ^ r) * 16 + first % 16;
    *reinterpret_cast<uint2*>(values + at) = RoundPiece(piece, scale);
  }
}

}  // namespace
}  // namespace moeserve::cuda
