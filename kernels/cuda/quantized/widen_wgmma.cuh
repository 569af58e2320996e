// What the kernels by wgmma share whose warps widen the weights in registers: the layout of shared
// memory, the warpgroup that copies, and the storing of results.
//
// The weights are the operand in registers: the four warps of a warpgroup widen the four strips of
// a block of 64 packed rows in place, and the rows of the tile are the operand in shared memory. So
// widened weights are never stored. One warpgroup copies, two multiply. Blocks of the grid are
// persistent (linear_schedule.cuh), and the copies continue while results are stored.
#pragma once

#include <algorithm>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/linear/linear_schedule.cuh"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {

// Tiles of 128 rows x 2 kGroupBlocksArg blocks of 64 packed rows, of kBlockBytesArg for 64 inputs.
// A stage has the rows, then the weights.
template <int kBlockBytesArg, int kGroupBlocksArg>
struct WidenLayout {
  static constexpr int kBlockBytes = kBlockBytesArg;
  static constexpr int kStripRows = 16;
  static constexpr int kStripBytes = kBlockBytes / (kImageBlock / kStripRows);
  static constexpr int kGroupThreads = 128;             // of a warpgroup
  static constexpr int kGroupBlocks = kGroupBlocksArg;  // of 64 packed rows, of a consumer
  static constexpr int kConsumers = 2;
  static constexpr int kTileRows = 128;
  static constexpr int kTileBlocks = kGroupBlocks * kConsumers;
  static constexpr int kTileImageRows = kTileBlocks * kImageBlock;
  static constexpr int kThreads = kGroupThreads * (1 + kConsumers);
  static constexpr int kStages = 8;
  static constexpr int kRowBytes = kImageBlock * 2;  // of 64 inputs
  static constexpr int kRowsBytes = kTileRows * kRowBytes;
  static constexpr int kSteps = kImageBlock / 16;
  // The rows of a stage begin at a multiple of the 1,024 bytes of their swizzle.
  static constexpr int kStageBytes = (kRowsBytes + kTileBlocks * kBlockBytes + 1023) / 1024 * 1024;
  // Each warp stages the sums of 32 rows and its 16 packed rows.
  static constexpr int kPanelRows = 32, kPanelPitch = kStripRows + 4;
  static constexpr int kPanelBytes = kPanelRows * kPanelPitch * static_cast<int>(sizeof(float));
  static constexpr int kPanelsAt = kStages * kStageBytes;
  static constexpr int kSlotsAt = kPanelsAt + kConsumers * kGroupThreads / 32 * kPanelBytes;
  static constexpr int kBarriersAt = kSlotsAt + static_cast<int>(sizeof(TileSlots));
  static constexpr int kSharedBytes =
      kBarriersAt + 2 * kStages * static_cast<int>(sizeof(uint64_t));
  static_assert(kSharedBytes <= 227 << 10);
  // The producer signals that a stage is full only after it has started the copies of two further
  // stages. A tile may have a single stage, so the ring of tiles has slots for these.
  static constexpr int kUnannounced = 2;
  static_assert(TileSlots::kSlots >= kUnannounced + 2 && kStages > kUnannounced + 1);
  // The producer searches for the next tile before it loads the present one, which takes few
  // registers.
  static constexpr int kCopyRegisters = 56, kMultiplyRegisters = 224;
  static_assert(kCopyRegisters + kConsumers * kMultiplyRegisters <= 3 * 168);

  using Ring = RingPosition<kStages>;
};

// The warpgroup that copies.
template <typename L>
__device__ void CopyWidenTiles(const LinearParams& p, char* shared, TileSlots* slots,
                               uint64_t* full, uint64_t* empty) {
  constexpr int kRowsAtOnce = L::kGroupThreads / 8;
  constexpr int kPieces = L::kTileRows / kRowsAtOnce;
  const int thread = static_cast<int>(threadIdx.x);
  const int piece = thread % 8;
  const bool leader = __shfl_sync(kFullMask, thread / 32, 0) == 0;
  typename L::Ring filling, announcing;
  int unannounced = 0;
  const auto announce = [&] {
    // The tensor cores read the rows through the async proxy.
    FenceAsyncShared();
    MbarrierArrive(full + announcing.stage);
    announcing.Advance();
    --unannounced;
  };
  TileSchedule<L::kTileRows, L::kTileImageRows> schedule(p, static_cast<int>(blockIdx.x),
                                                         static_cast<int>(gridDim.x));
  TileWriter writer(slots);
  TileReader reader(slots);
  bool more = false;  // whether the leader has put a tile that no Fetch() has followed
  const auto put = [&](const LinearTileRange& range) {
    writer.Put(p, range);
    more = range.expert >= 0;
  };
  if (leader) put(schedule.First());
  for (;;) {
    if (more) {
      schedule.Fetch();
      put(schedule.Next());
    }
    const TileItem item = reader.Take();
    const LinearTileRange& tile = item.range;
    if (tile.expert < 0) break;
    const LinearBankEntry& m = item.matrix;
    const int first_block = tile.image_row / kImageBlock;
    const int blocks = min(L::kTileBlocks, m.row_blocks - first_block);
    const int64_t strip = static_cast<int64_t>(m.k_blocks) * L::kBlockBytes;
    const char* const weights = p.weights + m.weights + first_block * strip;
    // Rows beyond the last one repeat it; their results are dropped.
    const int loaded = (tile.rows + 63) / 64 * 64;
    uint32_t rows[kPieces];  // offsets in units of 16 bytes, which take fewer registers
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int r = min(thread / 8 + i * kRowsAtOnce, tile.rows - 1);
      rows[i] = static_cast<uint32_t>((LinearInputRow(p, tile, tile.row + r) - p.input) / 16);
    }
    for (int k = 0; k < m.k_blocks; ++k) {
      MbarrierWait(empty + filling.stage, filling.parity ^ 1);
      char* const stage = shared + filling.stage * L::kStageBytes;
      if (thread == 0) {
        MbarrierExpect(full + filling.stage, static_cast<uint32_t>(blocks * L::kBlockBytes));
        for (int b = 0; b < blocks; ++b) {
          CopyBulkAsync(stage + L::kRowsBytes + b * L::kBlockBytes,
                        weights + b * strip + static_cast<int64_t>(k) * L::kBlockBytes,
                        L::kBlockBytes, full + filling.stage);
        }
      }
      const int valid = min(16, max(0, m.in_features * 2 - k * L::kRowBytes - piece * 16));
      const char* const column = p.input + k * L::kRowBytes + piece * 16;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (i * kRowsAtOnce >= loaded) break;
        const int r = thread / 8 + i * kRowsAtOnce;
        CopyAsync16(stage + r * L::kRowBytes + (piece ^ (r & 7)) * 16,
                    valid > 0 ? column + static_cast<uint64_t>(rows[i]) * 16 : p.input, valid);
      }
      CopyAsyncCommit();
      filling.Advance();
      if (++unannounced > L::kUnannounced) {
        CopyAsyncWait<L::kUnannounced>();
        announce();
      }
    }
  }
  CopyAsyncWait<0>();
  while (unannounced > 0) announce();
}

// Stores the results of a warp for its 16 packed rows of a block. `tile` begins at these packed
// rows; `panel` is the warp's shared memory.
template <typename L>
__device__ __forceinline__ void StoreWidenStrip(const LinearParams& p, const LinearBankEntry& m,
                                                LinearTileRange tile, const float (&sums)[64],
                                                float* panel) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rows = tile.rows, first = tile.row;
#pragma unroll 1
  for (int row = 0; row < rows; row += L::kPanelRows) {
    __syncwarp();  // the previous panel has been read
#pragma unroll
    for (int j = 0; j < L::kTileRows / 8; ++j) {
      // Registers can only be indexed by constants, so this loop runs over all of them.
      if (j / (L::kPanelRows / 8) * L::kPanelRows != row) continue;
      float* const to =
          panel + (j % (L::kPanelRows / 8) * 8 + lane % 4 * 2) * L::kPanelPitch + lane / 4;
#pragma unroll
      for (int n = 0; n < 4; ++n) to[n % 2 * L::kPanelPitch + n / 2 * 8] = sums[j * 4 + n];
    }
    __syncwarp();
    tile.row = first + row;
    tile.rows = min(L::kPanelRows, rows - row);
    StoreLinearTile<L::kStripRows, L::kPanelPitch, 32>(p, m, tile, panel, lane);
  }
}

// Initialises the ring of tiles and the barriers of the stages. To be called by one thread.
template <typename L>
__device__ void InitWidenBarriers(TileSlots* slots, uint64_t* full, uint64_t* empty) {
  for (int s = 0; s < L::kStages; ++s) {
    MbarrierInit(full + s, L::kGroupThreads);
    MbarrierInit(empty + s, L::kConsumers * L::kGroupThreads / 32);
  }
  slots->Init(L::kThreads / 32);
  MbarrierInitFence();
}

// Releases the stages of a tile of which a consumer computes nothing.
template <typename L>
__device__ void SkipWidenTile(const LinearBankEntry& m, uint64_t* full, uint64_t* empty,
                              typename L::Ring& reading) {
  for (int k = 0; k < m.k_blocks; ++k) {
    MbarrierWait(full + reading.stage, reading.parity);
    // Otherwise the stage could be filled again before the other lanes have seen this phase.
    __syncwarp();
    if (threadIdx.x % 32 == 0) MbarrierArrive(empty + reading.stage);
    reading.Advance();
  }
}

}  // namespace moeserve::cuda
