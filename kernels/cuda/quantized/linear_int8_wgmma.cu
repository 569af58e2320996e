// Products of rows rounded to int8 with int8 weights by wgmma, for devices of compute capability
// 9.0 and many rows per expert.
//
// The blocks and their tiles are those of linear_wgmma.cu: a producer warpgroup copies weights and
// gathers rounded rows, and two or three consumer warpgroups multiply 64 rows each. A block of
// inputs has twice as many integers as bf16 numbers, in the same bytes. The sums of integers are
// exact, so all tiles give the same bits; consumers multiply them by the scales before the
// epilogue.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/linear/linear_fragment.cuh"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_schedule.cuh"
#include "kernels/cuda/linear/linear_tile.cuh"
#include "kernels/cuda/quantized/linear_int8_kernels.h"

namespace moeserve::cuda {
namespace {

// kBlocks: blocks of 64 packed rows per tile.
template <int kConsumersArg, int kBlocksArg, int kStagesArg, LinearEpilogue kEpilogueArg>
struct Int8WgmmaShape {
  static constexpr LinearEpilogue kEpilogue = kEpilogueArg;
  static constexpr int kBlocks = kBlocksArg;
  static constexpr int kStages = kStagesArg;
  static constexpr int kConsumers = kConsumersArg;
  static constexpr int kWarpgroup = 128;
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  static constexpr int kProducerRegisters = kConsumers == 3 ? 80 : 104;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 144 : 200;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                (1 + kConsumers) * (65536 / kThreads / 8 * 8));
  static constexpr int kTileRows = 64 * kConsumers;
  static constexpr int kTileImageRows = kBlocks * kImageBlock;
  static constexpr int kRowBytes = kInt8BlockInputs;
  static constexpr int kBlockBytes = kImageBlock * kRowBytes;
  static constexpr int kRowsBytes = kTileRows * kRowBytes;
  static constexpr int kStageBytes = kRowsBytes + kBlocks * kBlockBytes;
  // The part of a consumer if a tile has rows for one only.
  static constexpr int kShare = kTileImageRows / kConsumers;
  // The producer signals that a stage is full only after it has started the copies of kLag further
  // stages.
  static constexpr int kLag = 2;
  static_assert(kStages > kLag + 1);
  // As in linear_wgmma.cu: the consumers must be able to take tiles that are not signalled yet.
  static_assert(TileSlots::kSlots >= kLag + 2);
  // After the stages: for each consumer the scales of the tile's packed rows.
  static constexpr int kScales = kStages * kStageBytes;
  static constexpr int kTiles =
      kScales + kConsumers * kTileImageRows * static_cast<int>(sizeof(float));
  static constexpr int kBarriers = kTiles + static_cast<int>(sizeof(TileSlots));
  static constexpr int kSharedBytes = kBarriers + 2 * kStages * static_cast<int>(sizeof(uint64_t));
  using Schedule = TileSchedule<kTileRows, kTileImageRows>;
  static_assert(kSharedBytes <= 227 << 10);
};

// The ring of stages in shared memory.
struct Int8Ring {
  char* stages;
  uint64_t* full;
  uint64_t* empty;
};

template <typename S>
__device__ void ProduceInt8(const LinearParams& p, const Int8Ring& ring, TileSlots* slots) {
  constexpr int kStep = S::kWarpgroup / 8;  // number of rows that all threads copy at once
  constexpr int kPieces = S::kTileRows / kStep;
  const int thread = static_cast<int>(threadIdx.x);
  // The place in a stage of this thread's piece of row thread / 8; kStep is a multiple of 8.
  const int place = thread / 8 * S::kRowBytes + (thread % 8 ^ (thread / 8 & 7)) * 16;
  const bool leader = __shfl_sync(kFullMask, thread / 32, 0) == 0;
  RingPosition<S::kStages> filling, announcing;
  int unannounced = 0;
  const auto announce = [&] {
    // The rows that this thread copied must be visible to the tensor cores, which read through the
    // async proxy.
    FenceAsyncShared();
    MbarrierArrive(ring.full + announcing.stage);
    announcing.Advance();
    --unannounced;
  };
  typename S::Schedule schedule(p, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  TileWriter writer(slots);
  TileReader reader(slots);
  if (leader) writer.Put(p, schedule.First());
  for (;;) {
    const TileItem item = reader.Take();
    const LinearTileRange& tile = item.range;
    if (tile.expert < 0) break;
    if (leader) schedule.Fetch();
    const LinearBankEntry& m = item.matrix;
    const int first_block = tile.image_row / kImageBlock;
    const int blocks = min(S::kBlocks, m.row_blocks - first_block);
    const int64_t strip = static_cast<int64_t>(m.k_blocks) * S::kBlockBytes;
    const char* weights = p.weights + m.weights + first_block * strip;
    // Rows are loaded for all consumers that multiply. Rows beyond the last one repeat the last
    // row; their results are dropped.
    const int loaded = (tile.rows + 63) / 64 * 64;
    uint32_t rows[kPieces];  // offsets in units of 16 bytes, which take fewer registers
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int r = min(thread / 8 + i * kStep, tile.rows - 1);
      rows[i] = static_cast<uint32_t>((LinearInputRow(p, tile, tile.row + r) - p.input) / 16);
    }
    const char* column = p.input + thread % 8 * 16;
    for (int k = 0; k < m.k_blocks; ++k) {
      // Now most stages are full, so that the consumers do not wait meanwhile.
      if (leader && k + 1 == m.k_blocks) writer.Put(p, schedule.Next());
      MbarrierWait(ring.empty + filling.stage, filling.parity ^ 1);
      char* const stage = ring.stages + filling.stage * S::kStageBytes;
      if (thread == 0) {
        MbarrierExpect(ring.full + filling.stage, static_cast<uint32_t>(blocks * S::kBlockBytes));
        for (int b = 0; b < blocks; ++b) {
          CopyBulkAsync(stage + S::kRowsBytes + b * S::kBlockBytes, weights + b * strip,
                        S::kBlockBytes, ring.full + filling.stage);
        }
      }
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (i * kStep >= loaded) break;
        CopyAsync16(stage + place + i * kStep * S::kRowBytes,
                    column + static_cast<uint64_t>(rows[i]) * 16);
      }
      CopyAsyncCommit();
      column += S::kRowBytes;
      weights += S::kBlockBytes;
      filling.Advance();
      if (++unannounced > S::kLag) {
        CopyAsyncWait<S::kLag>();
        announce();
      }
    }
  }
  CopyAsyncWait<0>();
  while (unannounced > 0) announce();
}

// The scales of one consumer's part of a tile: 64 rows by kN packed rows. They are read before the
// products, and used after them.
template <int kN>
class TileScales {
 public:
  // `memory` has space for kN scales that this consumer alone uses.
  __device__ TileScales(const LinearInt8Params& params, const LinearBankEntry& m,
                        const LinearTileRange& tile, float* memory)
      : memory_(memory), thread_(static_cast<int>(threadIdx.x) % 128) {
    const float* const outputs = params.output_scales + m.bias;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      // The last tile may lack some blocks.
      const int row = tile.image_row + thread_ + i * 128;
      own_[i] = outputs[min(row, m.row_blocks * kImageBlock - 1)];
    }
    const float* const rows = params.row_scales + tile.expert * params.scale_segment;
    const int32_t* const source = params.linear.source;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row =
          tile.row + min(thread_ / 32 * 16 + thread_ % 32 / 4 + half * 8, tile.rows - 1);
      row_[half] = rows[source == nullptr ? row : source[row]];
    }
  }

  // Returns the scaled sums. All threads of the consumer must call this; `barrier` is its own.
  __device__ __forceinline__ void Apply(const int32_t (&sums)[kN / 2], float (&scaled)[kN / 2],
                                        int barrier) const {
    NamedBarrierSync(barrier, 128);  // the scales of the previous tile have been read
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (thread_ + i * 128 < kN) memory_[thread_ + i * 128] = own_[i];
    }
    NamedBarrierSync(barrier, 128);
    const float* const columns = memory_ + thread_ % 4 * 2;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const float2 column = *reinterpret_cast<const float2*>(columns + j * 8);
      scaled[j * 4] = ScaledSum(sums[j * 4], column.x, row_[0]);
      scaled[j * 4 + 1] = ScaledSum(sums[j * 4 + 1], column.y, row_[0]);
      scaled[j * 4 + 2] = ScaledSum(sums[j * 4 + 2], column.x, row_[1]);
      scaled[j * 4 + 3] = ScaledSum(sums[j * 4 + 3], column.y, row_[1]);
    }
  }

 private:
  static constexpr int kOwn = (kN + 127) / 128;
  float* const memory_;
  const int thread_;
  float own_[kOwn];
  float row_[2];
};

// Computes one consumer's part of a tile: 64 rows by kN packed rows. `tile` describes that part.
// `rows_at` and `weights_at` are the byte offsets of its rows and weights in every stage.
template <typename S, int kN>
__device__ void ConsumeInt8Tile(const LinearInt8Params& params, const LinearBankEntry& m,
                                const LinearTileRange& tile, const Int8Ring& ring, int rows_at,
                                int weights_at, float* scale_memory, int barrier,
                                RingPosition<S::kStages>& reading) {
  const int thread = static_cast<int>(threadIdx.x) % S::kWarpgroup;
  const int lane = thread % 32;
  const TileScales<kN> scales(params, m, tile, scale_memory);
  int32_t sums[kN / 2] = {};
  int previous = reading.stage;
  for (int k = 0; k < m.k_blocks; ++k) {
    MbarrierWait(ring.full + reading.stage, reading.parity);
    const char* stage = ring.stages + reading.stage * S::kStageBytes;
    const uint64_t a = MatrixDescriptor(stage + rows_at, Swizzle::k128Bytes, 8 * S::kRowBytes);
    const uint64_t b = MatrixDescriptor(stage + weights_at, Swizzle::k128Bytes, 8 * S::kRowBytes);
    WgmmaKeepInPlace(sums);
    WgmmaFence();
#pragma unroll
    for (int k32 = 0; k32 < kInt8BlockInputs / 32; ++k32) {
      WgmmaInt8<kN>::Shared(sums, AdvanceDescriptor(a, k32 * 32), AdvanceDescriptor(b, k32 * 32),
                            true);
    }
    WgmmaCommit();
    WgmmaKeepInPlace(sums);
    WgmmaWait<1>();
    // The products that read the previous stage are complete.
    if (k > 0 && lane == 0) MbarrierArrive(ring.empty + previous);
    previous = reading.stage;
    reading.Advance();
  }
  WgmmaWait<0>();
  WgmmaKeepInPlace(sums);
  if (lane == 0) MbarrierArrive(ring.empty + previous);
  float scaled[kN / 2];
  scales.Apply(sums, scaled, barrier);
  StoreFragments<S::kEpilogue, kN>(params.linear, m, tile, scaled, thread);
}

// Releases the stages of a tile of which this consumer computes nothing.
template <typename S>
__device__ void SkipInt8Tile(int k_blocks, const Int8Ring& ring,
                             RingPosition<S::kStages>& reading) {
  for (int k = 0; k < k_blocks; ++k) {
    MbarrierWait(ring.full + reading.stage, reading.parity);
    // Otherwise the stage could be filled again before the other lanes have seen this phase.
    __syncwarp();
    if (threadIdx.x % 32 == 0) MbarrierArrive(ring.empty + reading.stage);
    reading.Advance();
  }
}

template <typename S>
__device__ void ConsumeInt8(const LinearInt8Params& params, const Int8Ring& ring, TileSlots* slots,
                            float* scale_memory, int consumer) {
  RingPosition<S::kStages> reading;
  TileReader reader(slots);
  for (;;) {
    const TileItem item = reader.Take();
    LinearTileRange tile = item.range;
    if (tile.expert < 0) break;
    const LinearBankEntry& m = item.matrix;
    if (tile.rows <= 64) {
      // The tile, the last one of an expert, has at most 64 rows. Each consumer computes a share of
      // the outputs for all of these rows.
      tile.image_row += consumer * S::kShare;
      if (tile.image_row < m.row_blocks * kImageBlock) {
        ConsumeInt8Tile<S, S::kShare>(params, m, tile, ring, 0,
                                      S::kRowsBytes + consumer * S::kShare * S::kRowBytes,
                                      scale_memory, 1 + consumer, reading);
        continue;
      }
    } else if (consumer * 64 < tile.rows) {
      tile.row += consumer * 64;
      tile.rows = min(64, tile.rows - consumer * 64);
      ConsumeInt8Tile<S, S::kTileImageRows>(params, m, tile, ring, consumer * 64 * S::kRowBytes,
                                            S::kRowsBytes, scale_memory, 1 + consumer, reading);
      continue;
    }
    SkipInt8Tile<S>(m.k_blocks, ring, reading);
  }
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    LinearInt8WgmmaKernel(const LinearInt8Params params) {
#if MOESERVE_HAS_SM90A
  char* shared = DynamicShared<char>();
  TileSlots* slots = reinterpret_cast<TileSlots*>(shared + S::kTiles);
  const Int8Ring ring{shared, reinterpret_cast<uint64_t*>(shared + S::kBarriers),
                      reinterpret_cast<uint64_t*>(shared + S::kBarriers) + S::kStages};
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      MbarrierInit(ring.full + s, S::kWarpgroup);
      MbarrierInit(ring.empty + s, S::kConsumers * S::kWarpgroup / 32);
    }
    slots->Init(S::kThreads / 32);
    MbarrierInitFence();
  }
  GridDependencyPass();
  __syncthreads();
  // The shuffle makes the value uniform within a warp in a way that the compiler can prove.
  const int warpgroup = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / S::kWarpgroup, 0);
  if (warpgroup == 0) {
    DecreaseRegisters<S::kProducerRegisters>();
    ProduceInt8<S>(params.linear, ring, slots);
  } else {
    IncreaseRegisters<S::kConsumerRegisters>();
    float* const scales = reinterpret_cast<float*>(shared + S::kScales);
    ConsumeInt8<S>(params, ring, slots, scales + (warpgroup - 1) * S::kTileImageRows,
                   warpgroup - 1);
  }
#else
  __trap();
#endif
}

template <int kConsumers, int kBlocks, int kStages, LinearEpilogue kEpilogue>
void LaunchInt8Shaped(const CudaLinearBank& bank, LinearInt8Params params, TileOrder order,
                      cudaStream_t stream) {
  using S = Int8WgmmaShape<kConsumers, kBlocks, kStages, kEpilogue>;
  static const int multiprocessors = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  LinearParams& p = params.linear;
  const int64_t tiles = internal::MaxLinearTiles(bank, p.rows, S::kTileRows, S::kTileImageRows);
  MOESERVE_CHECK(tiles <= INT32_MAX - multiprocessors, "tiles of a linear layer");
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors));
  if (order != TileOrder::kFixed && tiles > multiprocessors) {
    p.counter = bank.tile_counters().Of(stream);
  }
  Launch(LinearInt8WgmmaKernel<S>,
         LaunchShape{dim3(grid), dim3(S::kThreads), S::kSharedBytes, stream, true}, params);
}

// Selects the epilogue.
template <int kConsumers, int kBlocks, int kStages>
void LaunchInt8Tile(const CudaLinearBank& bank, const LinearInt8Params& params, TileOrder order,
                    cudaStream_t stream) {
  const auto launch = [&]<LinearEpilogue kEpilogue> {
    return LaunchInt8Shaped<kConsumers, kBlocks, kStages, kEpilogue>(bank, params, order, stream);
  };
  using enum LinearEpilogue;
  switch (EpilogueOf(params.linear)) {
    case kGeneral:  // rare
      return LaunchInt8Shaped<2, 2, 6, kGeneral>(bank, params, order, stream);
    case kNone:
      return launch.template operator()<kNone>();
    case kF32:
      return launch.template operator()<kF32>();
    case kRelu:
      return launch.template operator()<kRelu>();
    case kGelu:
      return launch.template operator()<kGelu>();
    case kGeluTanh:
      return launch.template operator()<kGeluTanh>();
    case kSiluGated:
      return launch.template operator()<kSiluGated>();
  }
}

}  // namespace

namespace internal {

bool Int8WgmmaFits(const LinearParams& p) {
  static const int major = DeviceAttribute(cudaDevAttrComputeCapabilityMajor);
  return major == 9 && FragmentsFit(p);
}

void LaunchInt8Wgmma(const CudaLinearBank& bank, const LinearInt8Params& params, LinearTile tile,
                     TileOrder order, cudaStream_t stream) {
  switch (tile) {
    case LinearTile::kWarpgroup256:
      return LaunchInt8Tile<2, 4, 4>(bank, params, order, stream);
    case LinearTile::kWarpgroup192:
      return LaunchInt8Tile<2, 3, 5>(bank, params, order, stream);
    case LinearTile::kWarpgroup192x192:
      return LaunchInt8Tile<3, 3, 4>(bank, params, order, stream);
    default:
      return LaunchInt8Tile<2, 2, 6>(bank, params, order, stream);
  }
}

}  // namespace internal
}  // namespace moeserve::cuda
