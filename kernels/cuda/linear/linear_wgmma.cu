// bf16 products by wgmma, for devices of compute capability 9.0 and many rows per expert.
//
// A block has one producer warpgroup and two consumer warpgroups of 64 rows each. The producer
// copies packed weights unchanged by bulk copies and gathers rows by cp.async; the consumers
// multiply. Blocks are persistent: a block computes every gridDim-th tile of the list. The producer
// starts to load the next tile while the consumers store the previous one.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/linear/linear_fragment.cuh"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kBlockBytes = kImageBlock * kImageBlock * 2;
constexpr int kRowBytes = kImageBlock * 2;  // bytes of 64 inputs
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kThreads = kWarpgroup * (1 + kConsumers);
constexpr int kTileRows = 64 * kConsumers;
// The producer signals that a stage is full only after it has started the copies of two further
// stages, so that copies of three stages are in flight.
constexpr int kLag = 2;
constexpr int kPanelColumns = 64;  // number of outputs staged at a time
constexpr int kPitch = kPanelColumns + 4;

template <int kBlocksArg, int kStagesArg>
struct WgmmaShape {
  static constexpr int kBlocks = kBlocksArg;  // number of blocks of 64 outputs
  static constexpr int kTileImageRows = kBlocks * kImageBlock;
  static constexpr int kStages = kStagesArg;
  static constexpr int kRowsBytes = kTileRows * kRowBytes;
  static constexpr int kStageBytes = kRowsBytes + kBlocks * kBlockBytes;
  static constexpr int kStagedBytes = 64 * kPitch * static_cast<int>(sizeof(float));
  static constexpr int kBarriers = kStages * kStageBytes + kConsumers * kStagedBytes;
  static constexpr int kSharedBytes = kBarriers + 2 * kStages * static_cast<int>(sizeof(uint64_t));
  static_assert(kStages > kLag + 1);
  static_assert(kSharedBytes <= 227 << 10);
};

// A position in the ring of stages, with the parity of the stage's barrier phase.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <typename S>
__device__ void Produce(const LinearParams& p, char* shared, uint64_t* full, uint64_t* empty) {
  constexpr int kPieces = kTileRows * 8 / kWarpgroup;
  const int thread = static_cast<int>(threadIdx.x);
  const int piece = thread % 8;
  RingPosition<S::kStages> filling, announcing;
  int unannounced = 0;
  const auto announce = [&] {
    // The rows that this thread copied must be visible to the tensor cores, which read through the
    // async proxy.
    FenceAsyncShared();
    MbarrierArrive(full + announcing.stage);
    announcing.Advance();
    --unannounced;
  };
  for (int index = static_cast<int>(blockIdx.x);; index += static_cast<int>(gridDim.x)) {
    const LinearTileRange tile = FindLinearTile<kTileRows, S::kTileImageRows>(p, index);
    if (tile.expert < 0) break;
    const LinearBankEntry m = p.entries[tile.expert];
    const int first_block = tile.image_row / kImageBlock;
    const int blocks = min(S::kBlocks, m.row_blocks - first_block);
    const int64_t strip = static_cast<int64_t>(m.k_blocks) * kBlockBytes;
    const char* weights = p.weights + m.weights + first_block * strip;
    const char* rows[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      // Rows beyond the last one repeat the last row; their results are dropped.
      const int r = min(thread / 8 + i * (kWarpgroup / 8), tile.rows - 1);
      rows[i] = LinearInputRow(p, tile, tile.row + r) + piece * 16;
    }
    for (int k = 0; k < m.k_blocks; ++k) {
      MbarrierWait(empty + filling.stage, filling.parity ^ 1);
      char* stage = shared + filling.stage * S::kStageBytes;
      if (thread == 0) {
        MbarrierExpect(full + filling.stage, static_cast<uint32_t>(blocks * kBlockBytes));
        for (int b = 0; b < blocks; ++b) {
          CopyBulkAsync(stage + S::kRowsBytes + b * kBlockBytes,
                        weights + b * strip + static_cast<int64_t>(k) * kBlockBytes, kBlockBytes,
                        full + filling.stage);
        }
      }
      const int valid = min(16, max(0, m.in_features * 2 - k * kRowBytes - piece * 16));
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int r = thread / 8 + i * (kWarpgroup / 8);
        CopyAsync16(stage + r * kRowBytes + (piece ^ (r & 7)) * 16,
                    valid > 0 ? rows[i] + k * kRowBytes : p.input, valid);
      }
      CopyAsyncCommit();
      filling.Advance();
      if (++unannounced > kLag) {
        CopyAsyncWait<kLag>();
        announce();
      }
    }
  }
  CopyAsyncWait<0>();
  while (unannounced > 0) announce();
}

// Computes one consumer's part of a tile: 64 rows by kBlocks blocks of outputs. `tile` describes
// that part. `rows_at` and `weights_at` are the byte offsets of its rows and weights in every
// stage. With kSliced, sums may have several slices (SliceBlocks()).
template <typename S, int kBlocks, bool kSliced>
__device__ void ConsumeTile(const LinearParams& p, const LinearBankEntry& m, LinearTileRange tile,
                            const char* shared, int rows_at, int weights_at, uint64_t* full,
                            uint64_t* empty, float* staged, int barrier,
                            RingPosition<S::kStages>& reading) {
  constexpr int kN = kBlocks * kImageBlock;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int lane = thread % 32;
  float sums[kN / 2] = {};
  float totals[kSliced ? kN / 2 : 1] = {};
  int in_slice = 0;
  int previous = reading.stage;
  for (int k = 0; k < m.k_blocks; ++k) {
    MbarrierWait(full + reading.stage, reading.parity);
    const char* stage = shared + reading.stage * S::kStageBytes;
    const uint64_t a = MatrixDescriptor(stage + rows_at, Swizzle::k128Bytes, 8 * kRowBytes);
    const uint64_t b = MatrixDescriptor(stage + weights_at, Swizzle::k128Bytes, 8 * kRowBytes);
    WgmmaKeepInPlace(sums);
    WgmmaFence();
#pragma unroll
    for (int k16 = 0; k16 < kImageBlock / 16; ++k16) {
      Wgmma<kN>::Shared(sums, AdvanceDescriptor(a, k16 * 32), AdvanceDescriptor(b, k16 * 32), true);
    }
    WgmmaCommit();
    WgmmaKeepInPlace(sums);
    WgmmaWait<1>();
    // The products that read the previous stage are complete.
    if (k > 0 && lane == 0) MbarrierArrive(empty + previous);
    previous = reading.stage;
    reading.Advance();
    if constexpr (kSliced) {
      if (++in_slice < m.slice_blocks && k + 1 < m.k_blocks) continue;
      WgmmaWait<0>();
      WgmmaKeepInPlace(sums);
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        totals[i] += sums[i];
        sums[i] = 0.0f;
      }
      in_slice = 0;
    }
  }
  WgmmaWait<0>();
  WgmmaKeepInPlace(sums);
  if constexpr (kSliced) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) sums[i] = totals[i];
  }
  if (lane == 0) MbarrierArrive(empty + previous);
  if (TryStoreFragments<kN>(p, m, tile, sums, thread)) return;

  const int row = thread / 32 * 16 + lane / 4;
#pragma unroll 1
  for (int panel = 0; panel < kBlocks; ++panel) {
    if (tile.image_row / kImageBlock >= m.row_blocks) break;
    NamedBarrierSync(barrier, kWarpgroup);  // the previous panel has been read
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      // Registers can only be indexed by constants, so this loop runs over all of them.
      if (j / (kPanelColumns / 8) != panel) continue;
      float* to = staged + row * kPitch + j % (kPanelColumns / 8) * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = make_float2(sums[j * 4], sums[j * 4 + 1]);
      *reinterpret_cast<float2*>(to + 8 * kPitch) = make_float2(sums[j * 4 + 2], sums[j * 4 + 3]);
    }
    NamedBarrierSync(barrier, kWarpgroup);
    StoreLinearTile<kPanelColumns, kPitch, kWarpgroup>(p, m, tile, staged, thread);
    tile.image_row += kPanelColumns;
  }
}

template <typename S, bool kSliced>
__device__ void Consume(const LinearParams& p, char* shared, uint64_t* full, uint64_t* empty,
                        int consumer) {
  float* staged =
      reinterpret_cast<float*>(shared + S::kStages * S::kStageBytes + consumer * S::kStagedBytes);
  RingPosition<S::kStages> reading;
  for (int index = static_cast<int>(blockIdx.x);; index += static_cast<int>(gridDim.x)) {
    LinearTileRange tile = FindLinearTile<kTileRows, S::kTileImageRows>(p, index);
    if (tile.expert < 0) break;
    const LinearBankEntry m = p.entries[tile.expert];
    if (tile.rows <= 64) {
      // The tile, the last one of an expert, has at most 64 rows. Each consumer computes half of
      // the outputs for all of these rows.
      constexpr int kHalf = S::kBlocks / 2;
      tile.image_row += consumer * kHalf * kImageBlock;
      ConsumeTile<S, kHalf, kSliced>(p, m, tile, shared, 0,
                                     S::kRowsBytes + consumer * kHalf * kBlockBytes, full, empty,
                                     staged, 1 + consumer, reading);
    } else {
      tile.row += consumer * 64;
      tile.rows = min(64, tile.rows - consumer * 64);
      ConsumeTile<S, S::kBlocks, kSliced>(p, m, tile, shared, consumer * 64 * kRowBytes,
                                          S::kRowsBytes, full, empty, staged, 1 + consumer,
                                          reading);
    }
  }
}

template <typename S, bool kSliced>
__global__ void __launch_bounds__(kThreads, 1) LinearWgmmaKernel(const LinearParams p) {
#if MOESERVE_HAS_SM90A
  char* shared = DynamicShared<char>();
  uint64_t* full = reinterpret_cast<uint64_t*>(shared + S::kBarriers);
  uint64_t* empty = full + S::kStages;
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      MbarrierInit(full + s, kWarpgroup);
      MbarrierInit(empty + s, kConsumers * kWarpgroup / 32);
    }
    MbarrierInitFence();
  }
  GridDependencyPass();
  __syncthreads();
  // The shuffle makes the value uniform within a warp in a way that the compiler can prove.
  const int warpgroup = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    DecreaseRegisters<56>();
    Produce<S>(p, shared, full, empty);
  } else {
    IncreaseRegisters<224>();
    Consume<S, kSliced>(p, shared, full, empty, warpgroup - 1);
  }
#else
  // If this was compiled for 9.0 without the instructions of 9.0a, the kernel stops instead of
  // leaving the output unwritten.
  __trap();
#endif
}

template <typename S, bool kSliced = false>
void LaunchShaped(const CudaLinearBank& bank, const LinearParams& p, int multiprocessors,
                  cudaStream_t stream) {
  const int64_t tiles = internal::MaxLinearTiles(bank, p.rows, kTileRows, S::kTileImageRows);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors));
  Launch(LinearWgmmaKernel<S, kSliced>,
         LaunchShape{dim3(grid), dim3(kThreads), S::kSharedBytes, stream, true}, p);
}

}  // namespace

namespace internal {

bool LinearWgmmaFits(const LinearParams& p) {
  static const int major = DeviceAttribute(cudaDevAttrComputeCapabilityMajor);
  return major == 9 && p.wide_input;
}

void LaunchLinearWgmma(const CudaLinearBank& bank, const LinearParams& p, LinearTile tile,
                       cudaStream_t stream) {
  static const int multiprocessors = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  if (tile == LinearTile::kWarpgroup) {
    // Wide tiles read less memory per product, and are faster even if they leave multiprocessors
    // idle. Narrow tiles are for narrow layers and for very few tiles.
    constexpr int64_t kFewTiles = 64;
    const bool wide =
        bank.max_row_blocks() > 2 && MaxLinearTiles(bank, p.rows, kTileRows, 256) >= kFewTiles;
    tile = wide ? LinearTile::kWarpgroup256 : LinearTile::kWarpgroup128;
  }
  if (bank.max_slices() > 1) {
    // Wider tiles have no registers for a second set of sums.
    LaunchShaped<WgmmaShape<2, 5>, true>(bank, p, multiprocessors, stream);
  } else if (tile == LinearTile::kWarpgroup256) {
    LaunchShaped<WgmmaShape<4, 4>>(bank, p, multiprocessors, stream);
  } else {
    LaunchShaped<WgmmaShape<2, 5>>(bank, p, multiprocessors, stream);
  }
}

}  // namespace internal
}  // namespace moeserve::cuda
