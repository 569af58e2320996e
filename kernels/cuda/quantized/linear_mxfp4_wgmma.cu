// Products of many bf16 rows with MXFP4 weights by wgmma, for devices of compute capability 9.0.
//
// The weights are widened in registers (widen_wgmma.cuh). A stage of 64 inputs has 128 rows and 256
// packed rows in 25 KiB. A consumer has two blocks: while the tensor cores multiply by one of them,
// the warps widen the other one.

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
#include "kernels/cuda/quantized/widen_wgmma.cuh"

namespace moeserve::cuda {
namespace {

using Mxfp4Layout = WidenLayout<kMxfp4BlockBytes, 2>;

// Adds the products of a block of 64 packed rows and 128 rows. `rows` describes the rows of a
// stage.
__device__ __forceinline__ void MultiplyMxfp4Block(float (&sums)[64],
                                                   uint32_t (&a)[Mxfp4Layout::kSteps][4],
                                                   const Mxfp4Lane& weights, uint64_t rows) {
#pragma unroll
  for (int k16 = 0; k16 < Mxfp4Layout::kSteps; ++k16) weights.Widen(k16, a[k16]);
  WgmmaKeepInPlace(sums);
  WgmmaKeepInPlace(a);
  WgmmaFence();
#pragma unroll
  for (int k16 = 0; k16 < Mxfp4Layout::kSteps; ++k16) {
    Wgmma<Mxfp4Layout::kTileRows>::Registers(sums, a[k16], AdvanceDescriptor(rows, k16 * 32), true);
  }
  WgmmaCommit();
  WgmmaKeepInPlace(sums);
}

// Computes one consumer's part of a tile; `tile` describes that part. `first_at` is the offset of
// its first block in a stage, and `second_at` the offset of the second block from the first one, or
// 0 if there is none: then the first one is multiplied twice.
__device__ void ConsumeMxfp4Tile(const LinearParams& p, const LinearBankEntry& m,
                                 LinearTileRange tile, const char* shared, int first_at,
                                 int second_at, uint64_t* full, uint64_t* empty, float* panel,
                                 Mxfp4Layout::Ring& reading) {
  const int thread = static_cast<int>(threadIdx.x) % Mxfp4Layout::kGroupThreads;
  const int strip = thread / 32 * kMxfp4StripBytes;
  const bool signals = thread % 32 == 0;
  float first[64] = {}, second[64] = {};
  uint32_t a[Mxfp4Layout::kSteps][4], b[Mxfp4Layout::kSteps][4];
  int previous = reading.stage;
  for (int k = 0; k < m.k_blocks; ++k) {
    MbarrierWait(full + reading.stage, reading.parity);
    const char* const stage = shared + reading.stage * Mxfp4Layout::kStageBytes;
    Mxfp4Lane low, high;
    low.Load(stage + first_at + strip);
    high.Load(stage + first_at + second_at + strip);
    const uint64_t rows = MatrixDescriptor(stage, Swizzle::k128Bytes, 8 * Mxfp4Layout::kRowBytes);
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
  StoreWidenStrip<Mxfp4Layout>(p, m, tile, first, panel);
  if (second_at == 0) return;
  tile.image_row += kImageBlock;
  StoreWidenStrip<Mxfp4Layout>(p, m, tile, second, panel);
}

[[maybe_unused]] __device__ void ConsumeMxfp4Tiles(const LinearParams& p, char* shared,
                                                   TileSlots* slots, uint64_t* full,
                                                   uint64_t* empty, int consumer) {
  Mxfp4Layout::Ring reading;
  TileReader reader(slots);
  const int warp = static_cast<int>(threadIdx.x) / 32 - Mxfp4Layout::kGroupThreads / 32;
  float* const panel =
      reinterpret_cast<float*>(shared + Mxfp4Layout::kPanelsAt + warp * Mxfp4Layout::kPanelBytes);
  for (;;) {
    const TileItem item = reader.Take();
    LinearTileRange tile = item.range;
    if (tile.expert < 0) break;
    const LinearBankEntry& m = item.matrix;
    const int blocks =
        m.row_blocks - tile.image_row / kImageBlock - consumer * Mxfp4Layout::kGroupBlocks;
    if (blocks <= 0) {
      SkipWidenTile<Mxfp4Layout>(m, full, empty, reading);
      continue;
    }
    tile.image_row += consumer * Mxfp4Layout::kGroupBlocks * kImageBlock;
    const int at =
        Mxfp4Layout::kRowsBytes + consumer * Mxfp4Layout::kGroupBlocks * kMxfp4BlockBytes;
    const int second = blocks > 1 ? kMxfp4BlockBytes : 0;
    ConsumeMxfp4Tile(p, m, tile, shared, at, second, full, empty, panel, reading);
  }
}

__global__ void __launch_bounds__(Mxfp4Layout::kThreads, 1)
    LinearMxfp4WgmmaKernel(const LinearParams p) {
#if MOESERVE_HAS_SM90A
  char* const shared = DynamicShared<char>();
  TileSlots* const slots = reinterpret_cast<TileSlots*>(shared + Mxfp4Layout::kSlotsAt);
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared + Mxfp4Layout::kBarriersAt);
  uint64_t* const empty = full + Mxfp4Layout::kStages;
  if (threadIdx.x == 0) InitWidenBarriers<Mxfp4Layout>(slots, full, empty);
  GridDependencyPass();
  __syncthreads();
  // The shuffle makes the value uniform within a warp in a way that the compiler can prove.
  const int group =
      __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / Mxfp4Layout::kGroupThreads, 0);
  if (group == 0) {
    DecreaseRegisters<Mxfp4Layout::kCopyRegisters>();
    CopyWidenTiles<Mxfp4Layout>(p, shared, slots, full, empty);
  } else {
    IncreaseRegisters<Mxfp4Layout::kMultiplyRegisters>();
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
  const int64_t tiles =
      MaxLinearTiles(bank, p.rows, Mxfp4Layout::kTileRows, Mxfp4Layout::kTileImageRows);
  MOESERVE_CHECK(tiles <= INT32_MAX - multiprocessors, "tiles of a linear layer");
  if (tiles > multiprocessors) p.counter = bank.tile_counters().Of(stream);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors));
  Launch(
      LinearMxfp4WgmmaKernel,
      LaunchShape{dim3(grid), dim3(Mxfp4Layout::kThreads), Mxfp4Layout::kSharedBytes, stream, true},
      p);
}

}  // namespace internal
}  // namespace moeserve::cuda
