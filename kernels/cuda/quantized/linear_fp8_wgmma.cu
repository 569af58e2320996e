// Products of many bf16 rows with FP8 weights by wgmma, for devices of compute capability 9.0.
//
// The weights are widened in registers (widen_wgmma.cuh), without their scales. A tile has 128 rows
// and 128 packed rows, because a consumer has two sets of sums: one of the products of 128 inputs,
// and one of all that were scaled before. While one consumer scales and widens, the tensor cores
// multiply for the other one.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/linear/fp8_widen.cuh"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/quantized/linear_fp8_kernels.h"
#include "kernels/cuda/quantized/widen_wgmma.cuh"

namespace moeserve::cuda {
namespace {

using Fp8Layout = WidenLayout<kFp8BlockBytes, 1>;

// Widens the weights of 64 inputs; returns the lane's scale.
__device__ __forceinline__ float LoadFp8Half(const char* strip,
                                             uint32_t (&a)[Fp8Layout::kSteps][4]) {
#pragma unroll
  for (int half = 0; half < Fp8Layout::kSteps / 2; ++half) {
    Fp8Lane lane;
    lane.Load(strip, half);
    lane.Widen(0, a[half * 2]);
    lane.Widen(1, a[half * 2 + 1]);
  }
  return Fp8Lane::Scale(strip);
}

// Starts the products of 64 packed rows, 64 inputs and the rows of a stage. `first`: they are the
// first ones of a sum.
template <bool kFirst>
__device__ __forceinline__ void StartFp8Half(float (&sums)[64], uint32_t (&a)[Fp8Layout::kSteps][4],
                                             const char* stage) {
  const uint64_t rows = MatrixDescriptor(stage, Swizzle::k128Bytes, 8 * Fp8Layout::kRowBytes);
  WgmmaKeepInPlace(sums);
  WgmmaKeepInPlace(a);
  WgmmaFence();
#pragma unroll
  for (int k16 = 0; k16 < Fp8Layout::kSteps; ++k16) {
    Wgmma<Fp8Layout::kTileRows>::Registers(sums, a[k16], AdvanceDescriptor(rows, k16 * 32),
                                           !kFirst || k16 > 0);
  }
  WgmmaCommit();
  WgmmaKeepInPlace(sums);
}

// Computes one consumer's part of a tile; `tile` describes that part. `at` is the offset of its
// block in a stage.
__device__ void ConsumeFp8Tile(const LinearParams& p, const LinearBankEntry& m,
                               LinearTileRange tile, const char* shared, int at, uint64_t* full,
                               uint64_t* empty, float* panel, Fp8Layout::Ring& reading) {
  const int warp = static_cast<int>(threadIdx.x) % Fp8Layout::kGroupThreads / 32;
  const char* const strips = shared + at + warp * Fp8Layout::kStripBytes;
  const auto stage_at = [&] { return reading.stage * Fp8Layout::kStageBytes; };
  const auto release = [&](int stage) {
    if (threadIdx.x % 32 == 0) MbarrierArrive(empty + stage);
  };
  float totals[64] = {}, sums[64];
  uint32_t a[Fp8Layout::kSteps][4], b[Fp8Layout::kSteps][4];
  float scales[2] = {};
  if (m.k_blocks > 0) {
    MbarrierWait(full + reading.stage, reading.parity);
    scales[0] = LoadFp8Half(strips + stage_at(), a);
  }
  for (int k = 0; k < m.k_blocks; k += 2) {
    StartFp8Half<true>(sums, a, shared + stage_at());
    const int first = reading.stage;
    reading.Advance();
    MbarrierWait(full + reading.stage, reading.parity);
    scales[1] = LoadFp8Half(strips + stage_at(), b);
    StartFp8Half<false>(sums, b, shared + stage_at());
    const int second = reading.stage;
    reading.Advance();
    WgmmaWait<1>();
    WgmmaKeepInPlace(a);  // they may be written from here on
    release(first);
    float next = 0.0f;
    if (k + 2 < m.k_blocks) {
      MbarrierWait(full + reading.stage, reading.parity);
      next = LoadFp8Half(strips + stage_at(), a);
    }
    WgmmaWait<0>();
    WgmmaKeepInPlace(sums);
    WgmmaKeepInPlace(b);
    release(second);
#pragma unroll
    for (int i = 0; i < 64; ++i) totals[i] = __fmaf_rn(sums[i], scales[i % 4 / 2], totals[i]);
    scales[0] = next;
  }
  tile.image_row += warp * Fp8Layout::kStripRows;
  StoreWidenStrip<Fp8Layout>(p, m, tile, totals, panel);
}

[[maybe_unused]] __device__ void ConsumeFp8Tiles(const LinearParams& p, char* shared,
                                                 TileSlots* slots, uint64_t* full, uint64_t* empty,
                                                 int consumer) {
  Fp8Layout::Ring reading;
  TileReader reader(slots);
  const int warp = (static_cast<int>(threadIdx.x) - Fp8Layout::kGroupThreads) / 32;
  float* const panel =
      reinterpret_cast<float*>(shared + Fp8Layout::kPanelsAt + warp * Fp8Layout::kPanelBytes);
  for (;;) {
    const TileItem item = reader.Take();
    LinearTileRange tile = item.range;
    if (tile.expert < 0) break;
    const LinearBankEntry& m = item.matrix;
    tile.image_row += consumer * kImageBlock;
    if (tile.image_row / kImageBlock >= m.row_blocks) {
      SkipWidenTile<Fp8Layout>(m, full, empty, reading);
      continue;
    }
    const int at = Fp8Layout::kRowsBytes + consumer * kFp8BlockBytes;
    ConsumeFp8Tile(p, m, tile, shared, at, full, empty, panel, reading);
  }
}

__global__ void __launch_bounds__(Fp8Layout::kThreads, 1)
    LinearFp8WgmmaKernel(const LinearParams p) {
#if MOESERVE_HAS_SM90A
  char* const shared = DynamicShared<char>();
  TileSlots* const slots = reinterpret_cast<TileSlots*>(shared + Fp8Layout::kSlotsAt);
  uint64_t* const full = reinterpret_cast<uint64_t*>(shared + Fp8Layout::kBarriersAt);
  uint64_t* const empty = full + Fp8Layout::kStages;
  if (threadIdx.x == 0) InitWidenBarriers<Fp8Layout>(slots, full, empty);
  GridDependencyPass();
  __syncthreads();
  // The shuffle makes the value uniform within a warp in a way that the compiler can prove.
  const int group =
      __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / Fp8Layout::kGroupThreads, 0);
  if (group == 0) {
    DecreaseRegisters<Fp8Layout::kCopyRegisters>();
    CopyWidenTiles<Fp8Layout>(p, shared, slots, full, empty);
  } else {
    IncreaseRegisters<Fp8Layout::kMultiplyRegisters>();
    ConsumeFp8Tiles(p, shared, slots, full, empty, group - 1);
  }
#else
  __trap();
#endif
}

}  // namespace

namespace internal {

bool LinearFp8WgmmaFits(const LinearParams& p) { return LinearWgmmaFits(p); }

void LaunchLinearFp8Wgmma(const CudaLinearBank& bank, LinearParams p, cudaStream_t stream) {
  static const int multiprocessors = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  const int64_t tiles =
      MaxLinearTiles(bank, p.rows, Fp8Layout::kTileRows, Fp8Layout::kTileImageRows);
  MOESERVE_CHECK(tiles <= INT32_MAX - multiprocessors, "tiles of a linear layer");
  if (tiles > multiprocessors) p.counter = bank.tile_counters().Of(stream);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors));
  Launch(LinearFp8WgmmaKernel,
         LaunchShape{dim3(grid), dim3(Fp8Layout::kThreads), Fp8Layout::kSharedBytes, stream, true},
         p);
}

}  // namespace internal
}  // namespace moeserve::cuda
