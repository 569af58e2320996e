// Products of many bf16 rows with MXFP4 weights by wgmma, for devices of compute capability 9.0.
//
// The weights are the operand in registers: the four warps of a warpgroup widen the four strips of
// a block of 64 packed rows in place, and the rows of the tile are the operand in shared memory. So
// widened weights are never stored, and a stage of 64 inputs has 128 rows and 256 packed rows in 25
// KiB. One warpgroup copies, two multiply, each with two blocks: while the tensor cores multiply by
// one of them, the warps widen the other one. Blocks of the grid are persistent
// (linear_schedule.cuh), and the copies continue while results are stored.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_schedule.cuh"
#include "kernels/cuda/linear/linear_tile.cuh"
#include "kernels/cuda/linear/mxfp4_widen.cuh"
#include "kernels/cuda/quantized/linear_mxfp4_kernels.h"

namespace moeserve::cuda {
namespace {

constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kGroupBlocks = 2;     // of 64 packed rows, of a consumer
constexpr int kMxfp4Consumers = 2;
constexpr int kWgmmaTileRows = 128;
constexpr int kWgmmaTileBlocks = kGroupBlocks * kMxfp4Consumers;
constexpr int kWgmmaTileImageRows = kWgmmaTileBlocks * kImageBlock;
constexpr int kWgmmaThreads = kGroupThreads * (1 + kMxfp4Consumers);
constexpr int kWgmmaStages = 8;
constexpr int kWgmmaRowBytes = kImageBlock * 2;  // of 64 inputs
constexpr int kWgmmaRowsBytes = kWgmmaTileRows * kWgmmaRowBytes;
constexpr int kWgmmaSteps = kImageBlock / 16;
// The rows of a stage begin at a multiple of the 1,024 bytes of their swizzle.
constexpr int kWgmmaStageBytes =
    (kWgmmaRowsBytes + kWgmmaTileBlocks * kMxfp4BlockBytes + 1023) / 1024 * 1024;
// Each warp stages the sums of 32 rows and its 16 packed rows.
constexpr int kPanelRows = 32, kPanelPitch = kMxfp4StripRows + 4;
constexpr int kPanelBytes = kPanelRows * kPanelPitch * static_cast<int>(sizeof(float));
constexpr int kWgmmaPanelsAt = kWgmmaStages * kWgmmaStageBytes;
constexpr int kWgmmaSlotsAt = kWgmmaPanelsAt + kMxfp4Consumers * kGroupThreads / 32 * kPanelBytes;
constexpr int kWgmmaBarriersAt = kWgmmaSlotsAt + static_cast<int>(sizeof(TileSlots));
constexpr int kWgmmaSharedBytes =
    kWgmmaBarriersAt + 2 * kWgmmaStages * static_cast<int>(sizeof(uint64_t));
static_assert(kWgmmaSharedBytes <= 227 << 10);
// The producer signals that a stage is full only after it has started the copies of two further
// stages. A tile may have a single stage, so the ring of tiles has slots for these.
constexpr int kUnannounced = 2;
static_assert(TileSlots::kSlots >= kUnannounced + 2 && kWgmmaStages > kUnannounced + 1);
// The producer searches for the next tile before it loads the present one, which takes few
// registers.
constexpr int kCopyRegisters = 56, kMultiplyRegisters = 224;
static_assert(kCopyRegisters + kMxfp4Consumers * kMultiplyRegisters <= 3 * 168);

using WgmmaRing = RingPosition<kWgmmaStages>;

[[maybe_unused]] __device__ void CopyMxfp4Tiles(const LinearParams& p, char* shared,
                                                TileSlots* slots, uint64_t* full, uint64_t* empty) {
  constexpr int kRowsAtOnce = kGroupThreads / 8;
  constexpr int kPieces = kWgmmaTileRows / kRowsAtOnce;
  const int thread = static_cast<int>(threadIdx.x);
  const int piece = thread % 8;
  const bool leader = __shfl_sync(kFullMask, thread / 32, 0) == 0;
  WgmmaRing filling, announcing;
  int unannounced = 0;
  const auto announce = [&] {
    // The tensor cores read the rows through the async proxy.
    FenceAsyncShared();
    MbarrierArrive(full + announcing.stage);
    announcing.Advance();
    --unannounced;
  };
  TileSchedule<kWgmmaTileRows, kWgmmaTileImageRows> schedule(p, static_cast<int>(blockIdx.x),
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
    const int blocks = min(kWgmmaTileBlocks, m.row_blocks - first_block);
    const int64_t strip = static_cast<int64_t>(m.k_blocks) * kMxfp4BlockBytes;
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
      char* const stage = shared + filling.stage * kWgmmaStageBytes;
      if (thread == 0) {
        MbarrierExpect(full + filling.stage, static_cast<uint32_t>(blocks * kMxfp4BlockBytes));
        for (int b = 0; b < blocks; ++b) {
          CopyBulkAsync(stage + kWgmmaRowsBytes + b * kMxfp4BlockBytes,
                        weights + b * strip + static_cast<int64_t>(k) * kMxfp4BlockBytes,
                        kMxfp4BlockBytes, full + filling.stage);
        }
      }
      const int valid = min(16, max(0, m.in_features * 2 - k * kWgmmaRowBytes - piece * 16));
      const char* const column = p.input + k * kWgmmaRowBytes + piece * 16;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (i * kRowsAtOnce >= loaded) break;
        const int r = thread / 8 + i * kRowsAtOnce;
        CopyAsync16(stage + r * kWgmmaRowBytes + (piece ^ (r & 7)) * 16,
                    valid > 0 ? column + static_cast<uint64_t>(rows[i]) * 16 : p.input, valid);
      }
      CopyAsyncCommit();
      filling.Advance();
      if (++unannounced > kUnannounced) {
        CopyAsyncWait<kUnannounced>();
        announce();
      }
    }
  }
  CopyAsyncWait<0>();
  while (unannounced > 0) announce();
}

// Adds the products of a block of 64 packed rows and 128 rows. `rows` describes the rows of a
// stage.
__device__ __forceinline__ void MultiplyMxfp4Block(float (&sums)[64], uint32_t (&a)[kWgmmaSteps][4],
                                                   const Mxfp4Lane& weights, uint64_t rows) {
#pragma unroll
  for (int k16 = 0; k16 < kWgmmaSteps; ++k16) weights.Widen(k16, a[k16]);
  WgmmaKeepInPlace(sums);
  WgmmaKeepInPlace(a);
  WgmmaFence();
#pragma unroll
  for (int k16 = 0; k16 < kWgmmaSteps; ++k16) {
    Wgmma<kWgmmaTileRows>::Registers(sums, a[k16], AdvanceDescriptor(rows, k16 * 32), true);
  }
  WgmmaCommit();
  WgmmaKeepInPlace(sums);
}

// Stores the results of a warp for its 16 packed rows of a block. `tile` begins at these packed
// rows; `panel` is the warp's shared memory.
__device__ __forceinline__ void StoreMxfp4Strip(const LinearParams& p, const LinearBankEntry& m,
                                                LinearTileRange tile, const float (&sums)[64],
                                                float* panel) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rows = tile.rows, first = tile.row;
#pragma unroll 1
  for (int row = 0; row < rows; row += kPanelRows) {
    __syncwarp();  // the previous panel has been read
#pragma unroll
    for (int j = 0; j < kWgmmaTileRows / 8; ++j) {
      // Registers can only be indexed by constants, so this loop runs over all of them.
      if (j / (kPanelRows / 8) * kPanelRows != row) continue;
      float* const to = panel + (j % (kPanelRows / 8) * 8 + lane % 4 * 2) * kPanelPitch + lane / 4;
#pragma unroll
      for (int n = 0; n < 4; ++n) to[n % 2 * kPanelPitch + n / 2 * 8] = sums[j * 4 + n];
    }
    __syncwarp();
    tile.row = first + row;
    tile.rows = min(kPanelRows, rows - row);
    StoreLinearTile<kMxfp4StripRows, kPanelPitch, 32>(p, m, tile, panel, lane);
  }
}

// Computes one consumer's part of a tile; `tile` describes that part. `first_at` is the offset of
// its first block in a stage, and `second_at` the offset of the second block from the first one, or
// 0 if there is none: then the first one is multiplied twice.
__device__ void ConsumeMxfp4Tile(const LinearParams& p, const LinearBankEntry& m,
                                 LinearTileRange tile, const char* shared, int first_at,
                                 int second_at, uint64_t* full, uint64_t* empty, float* panel,
                                 WgmmaRing& reading) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  const int strip = thread / 32 * kMxfp4StripBytes;
  const bool signals = thread % 32 == 0;
  float first[64] = {}, second[64] = {};
  uint32_t a[kWgmmaSteps][4], b[kWgmmaSteps][4];
  int previous = reading.stage;
  for (int k = 0; k < m.k_blocks; ++k) {
    MbarrierWait(full + reading.stage, reading.parity);
    const char* const stage = shared + reading.stage * kWgmmaStageBytes;
    Mxfp4Lane low, high;
    low.Load(stage + first_at + strip);
    high.Load(stage + first_at + second_at + strip);
    const uint64_t rows = MatrixDescriptor(stage, Swizzle::k128Bytes, 8 * kWgmmaRowBytes);
    if (k > 0) {
      WgmmaWait<1>();
      WgmmaKeepInPlace(a);  // they may be written from here on
    }
    MultiplyMxfp4Block(first, a, low, rows);
    if (k > 0) {
      WgmmaWait<1>();
      WgmmaKeepInPlace(b);
      // The products that read the previous stage are complete.
      if (signals) MbarrierArrive(empty + previous);
    }
    MultiplyMxfp4Block(second, b, high, rows);
    previous = reading.stage;
    reading.Advance();
  }
  WgmmaWait<0>();
  WgmmaKeepInPlace(first);
  WgmmaKeepInPlace(second);
  if (signals) MbarrierArrive(empty + previous);
  tile.image_row += thread / 32 * kMxfp4StripRows;
  StoreMxfp4Strip(p, m, tile, first, panel);
  if (second_at == 0) return;
  tile.image_row += kImageBlock;
  StoreMxfp4Strip(p, m, tile, second, panel);
}

[[maybe_unused]] __device__ void ConsumeMxfp4Tiles(const LinearParams& p, char* shared,
                                                   TileSlots* slots, uint64_t* full,
                                                   uint64_t* empty, int consumer) {
  WgmmaRing reading;
  TileReader reader(slots);
  const int warp = static_cast<int>(threadIdx.x) / 32 - kGroupThreads / 32;
  float* const panel = reinterpret_cast<float*>(shared + kWgmmaPanelsAt + warp * kPanelBytes);
  for (;;) {
    const TileItem item = reader.Take();
    LinearTileRange tile = item.range;
    if (tile.expert < 0) break;
    const LinearBankEntry& m = item.matrix;
    const int blocks = m.row_blocks - tile.image_row / kImageBlock - consumer * kGroupBlocks;
    if (blocks <= 0) {
      for (int k = 0; k < m.k_blocks; ++k) {
        MbarrierWait(full + reading.stage, reading.parity);
        // Otherwise the stage could be filled again before the other lanes have seen this phase.
        __syncwarp();
        if (threadIdx.x % 32 == 0) MbarrierArrive(empty + reading.stage);
        reading.Advance();
      }
      continue;
    }
    tile.image_row += consumer * kGroupBlocks * kImageBlock;
    const int at = kWgmmaRowsBytes + consumer * kGroupBlocks * kMxfp4BlockBytes;
    const int second = blocks > 1 ? kMxfp4BlockBytes : 0;
    ConsumeMxfp4Tile(p, m, tile, shared, at, second, full, empty, panel, reading);
  }
}

__global__ void __launch_bounds__(kWgmmaThreads, 1) LinearMxfp4WgmmaKernel(const LinearParams p) {
#if MOESERVE_HAS_SM90A
  char* const shared = DynamicShared<char>();
  TileSlots* const slots = reinterpret_cast<TileSlots*>(shared + kWgmmaSlotsAt);
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared + kWgmmaBarriersAt);
  uint64_t* const empty = full + kWgmmaStages;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kWgmmaStages; ++s) {
      MbarrierInit(full + s, kGroupThreads);
      MbarrierInit(empty + s, kMxfp4Consumers * kGroupThreads / 32);
    }
    slots->Init(kWgmmaThreads / 32);
    MbarrierInitFence();
  }
  GridDependencyPass();
  __syncthreads();
  // The shuffle makes the value uniform within a warp in a way that the compiler can prove.
  const int group = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  if (group == 0) {
    DecreaseRegisters<kCopyRegisters>();
    CopyMxfp4Tiles(p, shared, slots, full, empty);
  } else {
    IncreaseRegisters<kMultiplyRegisters>();
    ConsumeMxfp4Tiles(p, shared, slots, full, empty, group - 1);
  }
#else
  __trap();
#endif
}

}  // namespace

namespace internal {

bool LinearMxfp4WgmmaFits(const CudaLinearBank& bank, const LinearParams& p) {
  return LinearWgmmaFits(p) && bank.max_slices() == 1;
}

void LaunchLinearMxfp4Wgmma(const CudaLinearBank& bank, LinearParams p, cudaStream_t stream) {
  static const int multiprocessors = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  const int64_t tiles = MaxLinearTiles(bank, p.rows, kWgmmaTileRows, kWgmmaTileImageRows);
  MOESERVE_CHECK(tiles <= INT32_MAX - multiprocessors, "tiles of a linear layer");
  if (tiles > multiprocessors) p.counter = bank.tile_counters().Of(stream);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors));
  Launch(LinearMxfp4WgmmaKernel,
         LaunchShape{dim3(grid), dim3(kWgmmaThreads), kWgmmaSharedBytes, stream, true}, p);
}

}  // namespace internal
}  // namespace moeserve::cuda
