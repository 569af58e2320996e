// bf16 products of short rows (at most 512 inputs) by wgmma with weights that stay in shared
// memory, for devices of compute capability 9.0 and many rows per expert.
//
// A block takes a contiguous range of the tiles of 64 rows (linear_chunks.cuh). Weights are loaded
// only when the range passes to other outputs or another expert; rows stream through a ring. The
// two consumer warpgroups take alternate row tiles: the products of one follow those of the other,
// and while one multiplies, the other stores.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/linear/linear_chunks.cuh"
#include "kernels/cuda/linear/linear_fragment.cuh"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_schedule.cuh"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {
namespace {

// kBlocks: blocks of 64 packed rows per tile. kSlots: blocks of 64 inputs whose weights shared
// memory holds, the most that a row may have.
template <int kBlocksArg, int kSlotsArg, LinearEpilogue kEpilogueArg>
struct StationaryShape {
  static constexpr LinearEpilogue kEpilogue = kEpilogueArg;
  static constexpr int kBlocks = kBlocksArg;
  static constexpr int kSlots = kSlotsArg;
  static constexpr int kConsumers = 2;
  static constexpr int kWarpgroup = 128;
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  static constexpr int kProducerRegisters = 104, kConsumerRegisters = 200;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                (1 + kConsumers) * (65536 / kThreads / 8 * 8));
  static_assert(kEpilogue != LinearEpilogue::kGeneral);
  static constexpr int kTileRows = 64;
  static constexpr int kTileImageRows = kBlocks * kImageBlock;
  static constexpr int kRowBytes = kImageBlock * 2;  // bytes of 64 inputs
  static constexpr int kBlockBytes = kImageBlock * kRowBytes;
  static constexpr int kSlotBytes = kBlocks * kBlockBytes;
  static constexpr int kStages = 12;
  static constexpr int kStageBytes = kTileRows * kRowBytes;
  // The producer signals that a stage is full only after it has started the copies of kLag further
  // stages. Narrow tiles take rows twice as fast.
  static constexpr int kLag = kBlocks <= 2 ? 5 : 2;
  static constexpr int kRows = kSlots * kSlotBytes;
  static constexpr int kTiles = kRows + kStages * kStageBytes;
  static constexpr int kBarriers = kTiles + static_cast<int>(sizeof(TileSlots));
  static constexpr int kSharedBytes =
      kBarriers + (2 * kStages + 2 * kSlots + kConsumers) * static_cast<int>(sizeof(uint64_t));
  using Chunks = TileChunks<kTileRows, kTileImageRows>;

  // A consumer passes over the stages of the other one's tile without waiting. It must not fall two
  // phases of a barrier behind.
  static_assert(kStages > kSlots);
  // While the producer waits for a slot of weights, the last kLag stages are not signalled. The
  // slot's previous weights are free when the products of the stage after their last one have
  // begun; at least kSlots - 2 further stages follow that one.
  static_assert(kSlots >= kLag + 2);
  // The same for the ring of chunks, each of which has at least one stage.
  static_assert(TileSlots::kSlots >= kLag + 2);
  static_assert(kSharedBytes <= 227 << 10);
};

struct StationaryBarriers {
  uint64_t* full;    // [stages] rows have been copied
  uint64_t* empty;   // [stages] rows have been multiplied
  uint64_t* loaded;  // [slots] weights have been copied
  uint64_t* unused;  // [slots] weights will not be multiplied again
  uint64_t* turn;    // [consumers] the other consumer has started its products
};

template <typename S>
__device__ void ProduceStationary(const LinearParams& p, char* shared, TileSlots* slots,
                                  const StationaryBarriers& barriers) {
  constexpr int kStep = S::kWarpgroup / 8;  // number of rows that all threads copy at once
  constexpr int kPieces = S::kTileRows / kStep;
  const int thread = static_cast<int>(threadIdx.x);
  const int piece = thread % 8;
  // The place in a stage of this thread's piece of row thread / 8; kStep is a multiple of 8.
  const int place = thread / 8 * S::kRowBytes + (piece ^ (thread / 8 & 7)) * 16;
  const bool leader = __shfl_sync(kFullMask, thread / 32, 0) == 0;
  RingPosition<S::kStages> filling, announcing;
  RingPosition<S::kSlots> loading;
  int unannounced = 0;
  const auto announce = [&] {
    // The rows that this thread copied must be visible to the tensor cores, which read through the
    // async proxy.
    FenceAsyncShared();
    MbarrierArrive(barriers.full + announcing.stage);
    announcing.Advance();
    --unannounced;
  };
  typename S::Chunks chunks(p);
  TileWriter writer(slots);
  TileReader reader(slots);
  if (leader) {
    chunks.Start(static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    writer.Put(p, chunks.Next());
  }
  for (;;) {
    const TileItem item = reader.Take();
    const LinearTileRange& chunk = item.range;
    if (chunk.expert < 0) break;
    const LinearBankEntry& m = item.matrix;
    const int first_block = chunk.image_row / kImageBlock;
    const int blocks = min(S::kBlocks, m.row_blocks - first_block);
    const int64_t strip = static_cast<int64_t>(m.k_blocks) * S::kBlockBytes;
    const char* weights = p.weights + m.weights + first_block * strip;
    const char* next[kPieces];  // this thread's pieces of the first inputs of rows
    // Rows beyond the last one repeat the last row; their results are dropped.
    const auto locate = [&](int begin) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int r = min(begin + thread / 8 + i * kStep, chunk.rows - 1);
        next[i] = LinearInputRow(p, chunk, chunk.row + r) + piece * 16;
      }
    };
    locate(0);
    for (int begin = 0; begin < chunk.rows; begin += S::kTileRows) {
      const char* rows[kPieces];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) rows[i] = next[i];
      const bool last = begin + S::kTileRows >= chunk.rows;
      // The indices of gathered rows arrive while this tile is copied.
      if (!last) locate(begin + S::kTileRows);
      for (int k = 0; k < m.k_blocks; ++k) {
        // Now most stages are full, so that the consumers do not wait meanwhile.
        if (leader && last && k + 1 == m.k_blocks) writer.Put(p, chunks.Next());
        if (begin == 0) {
          if (leader) {
            MbarrierWait(barriers.unused + loading.stage, loading.parity ^ 1);
            if (thread == 0) {
              uint64_t* const loaded = barriers.loaded + loading.stage;
              MbarrierArriveExpect(loaded, static_cast<uint32_t>(blocks * S::kBlockBytes));
              for (int b = 0; b < blocks; ++b) {
                CopyBulkAsync(shared + loading.stage * S::kSlotBytes + b * S::kBlockBytes,
                              weights + b * strip + static_cast<int64_t>(k) * S::kBlockBytes,
                              S::kBlockBytes, loaded);
              }
            }
          }
          loading.Advance();
        }
        MbarrierWait(barriers.empty + filling.stage, filling.parity ^ 1);
        char* const to = shared + S::kRows + filling.stage * S::kStageBytes + place;
        const int left = m.in_features * 2 - k * S::kRowBytes;  // bytes
        if (left >= S::kRowBytes) {
#pragma unroll
          for (int i = 0; i < kPieces; ++i) {
            CopyAsync16(to + i * kStep * S::kRowBytes, rows[i] + k * S::kRowBytes);
          }
        } else {
          const int valid = min(16, max(0, left - piece * 16));
#pragma unroll
          for (int i = 0; i < kPieces; ++i) {
            CopyAsync16(to + i * kStep * S::kRowBytes,
                        valid > 0 ? rows[i] + k * S::kRowBytes : p.input, valid);
          }
        }
        CopyAsyncCommit();
        filling.Advance();
        if (++unannounced > S::kLag) {
          CopyAsyncWait<S::kLag>();
          announce();
        }
      }
    }
  }
  CopyAsyncWait<0>();
  while (unannounced > 0) announce();
}

// Computes a row tile. `slot` is the first of its weights, which nobody needs afterwards if
// `releases`. Passes the turn to the other consumer.
template <typename S>
__device__ void ComputeStationaryTile(const LinearParams& p, const LinearBankEntry& m,
                                      const LinearTileRange& tile, const char* shared,
                                      const StationaryBarriers& barriers, int other,
                                      RingPosition<S::kSlots> slot, bool releases,
                                      RingPosition<S::kStages>& reading) {
  constexpr int kN = S::kTileImageRows;
  const int thread = static_cast<int>(threadIdx.x) % S::kWarpgroup;
  const bool first_lane = thread % 32 == 0;
  float sums[kN / 2] = {};
  int previous = reading.stage, previous_slot = slot.stage;
  const auto release = [&] {
    if (!first_lane) return;
    MbarrierArrive(barriers.empty + previous);
    if (releases) MbarrierArrive(barriers.unused + previous_slot);
  };
  for (int k = 0; k < m.k_blocks; ++k) {
    MbarrierWait(barriers.loaded + slot.stage, slot.parity);
    MbarrierWait(barriers.full + reading.stage, reading.parity);
    const uint64_t a = MatrixDescriptor(shared + S::kRows + reading.stage * S::kStageBytes,
                                        Swizzle::k128Bytes, 8 * S::kRowBytes);
    const uint64_t b =
        MatrixDescriptor(shared + slot.stage * S::kSlotBytes, Swizzle::k128Bytes, 8 * S::kRowBytes);
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
    if (k > 0) release();
    previous = reading.stage;
    previous_slot = slot.stage;
    reading.Advance();
    slot.Advance();
  }
  // The products of the other consumer follow those that are not complete yet.
  if (first_lane) MbarrierArrive(barriers.turn + other);
  WgmmaWait<0>();
  WgmmaKeepInPlace(sums);
  release();
  StoreFragments<S::kEpilogue, kN>(p, m, tile, sums, thread);
}

template <typename S>
__device__ void ConsumeStationary(const LinearParams& p, const char* shared, TileSlots* slots,
                                  const StationaryBarriers& barriers, int consumer) {
  RingPosition<S::kStages> reading;
  RingPosition<S::kSlots> slot;  // of the first weights of the chunk
  TileReader reader(slots);
  int next = 0;                           // the consumer that takes the next row tile
  uint32_t turn = consumer == 0 ? 1 : 0;  // the first turn is that of consumer 0
  for (;;) {
    const TileItem item = reader.Take();
    const LinearTileRange& chunk = item.range;
    if (chunk.expert < 0) break;
    const LinearBankEntry& m = item.matrix;
    const int tiles = (chunk.rows + S::kTileRows - 1) / S::kTileRows;
    const int first = next == consumer ? 0 : 1;
    if (first == 1) reading.Skip(m.k_blocks);
    for (int i = first; i < tiles; i += 2) {
      const int begin = i * S::kTileRows;
      const LinearTileRange tile = {chunk.expert, chunk.row + begin,
                                    min(S::kTileRows, chunk.rows - begin), chunk.image_row};
      MbarrierWait(barriers.turn + consumer, turn);
      turn ^= 1;
      ComputeStationaryTile<S>(p, m, tile, shared, barriers, 1 - consumer, slot, i + 2 >= tiles,
                               reading);
      if (i + 1 < tiles) reading.Skip(m.k_blocks);
    }
    if (first >= tiles) {
      // This consumer needs none of the weights.
      RingPosition<S::kSlots> passed = slot;
      for (int k = 0; k < m.k_blocks; ++k, passed.Advance()) {
        MbarrierWait(barriers.loaded + passed.stage, passed.parity);
        __syncwarp();  // no lane may miss the phase
        if (threadIdx.x % 32 == 0) MbarrierArrive(barriers.unused + passed.stage);
      }
    }
    slot.Skip(m.k_blocks);
    next = (next + tiles) % 2;
  }
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1) LinearStationaryKernel(const LinearParams p) {
#if MOESERVE_HAS_SM90A
  char* shared = DynamicShared<char>();
  TileSlots* slots = reinterpret_cast<TileSlots*>(shared + S::kTiles);
  StationaryBarriers barriers;
  barriers.full = reinterpret_cast<uint64_t*>(shared + S::kBarriers);
  barriers.empty = barriers.full + S::kStages;
  barriers.loaded = barriers.empty + S::kStages;
  barriers.unused = barriers.loaded + S::kSlots;
  barriers.turn = barriers.unused + S::kSlots;
  constexpr int kWarps = S::kWarpgroup / 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      MbarrierInit(barriers.full + s, S::kWarpgroup);
      MbarrierInit(barriers.empty + s, kWarps);
    }
    for (int s = 0; s < S::kSlots; ++s) {
      MbarrierInit(barriers.loaded + s, 1);
      MbarrierInit(barriers.unused + s, S::kConsumers * kWarps);
    }
    for (int c = 0; c < S::kConsumers; ++c) MbarrierInit(barriers.turn + c, kWarps);
    slots->Init(S::kThreads / 32);
    MbarrierInitFence();
  }
  GridDependencyPass();
  __syncthreads();
  // The shuffle makes the value uniform within a warp in a way that the compiler can prove.
  const int warpgroup = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / S::kWarpgroup, 0);
  if (warpgroup == 0) {
    DecreaseRegisters<S::kProducerRegisters>();
    ProduceStationary<S>(p, shared, slots, barriers);
  } else {
    IncreaseRegisters<S::kConsumerRegisters>();
    ConsumeStationary<S>(p, shared, slots, barriers, warpgroup - 1);
  }
#else
  // If this was compiled for 9.0 without the instructions of 9.0a, the kernel stops instead of
  // leaving the output unwritten.
  __trap();
#endif
}

template <int kBlocks, int kSlots, LinearEpilogue kEpilogue>
void LaunchStationaryShape(const CudaLinearBank& bank, const LinearParams& p, cudaStream_t stream) {
  using S = StationaryShape<kBlocks, kSlots, kEpilogue>;
  const int multiprocessors = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  const int64_t tiles = internal::MaxLinearTiles(bank, p.rows, S::kTileRows, S::kTileImageRows);
  MOESERVE_CHECK(tiles <= INT32_MAX / std::max(kSlots, S::Chunks::kLeastTileCost),
                 "tiles of a linear layer");
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors));
  Launch(LinearStationaryKernel<S>,
         LaunchShape{dim3(grid), dim3(S::kThreads), S::kSharedBytes, stream, true}, p);
}

// Selects the epilogue.
template <int kBlocks, int kSlots>
void LaunchStationaryEpilogue(const CudaLinearBank& bank, const LinearParams& p,
                              cudaStream_t stream) {
  using E = LinearEpilogue;
  switch (EpilogueOf(p)) {
    case E::kGeneral:
      break;
    case E::kNone:
      return LaunchStationaryShape<kBlocks, kSlots, E::kNone>(bank, p, stream);
    case E::kF32:
      return LaunchStationaryShape<kBlocks, kSlots, E::kF32>(bank, p, stream);
    case E::kRelu:
      return LaunchStationaryShape<kBlocks, kSlots, E::kRelu>(bank, p, stream);
    case E::kGelu:
      return LaunchStationaryShape<kBlocks, kSlots, E::kGelu>(bank, p, stream);
    case E::kGeluTanh:
      return LaunchStationaryShape<kBlocks, kSlots, E::kGeluTanh>(bank, p, stream);
    case E::kSiluGated:
      return LaunchStationaryShape<kBlocks, kSlots, E::kSiluGated>(bank, p, stream);
  }
  MOESERVE_CHECK(false, "stationary weights have no general epilogue");
}

// Blocks of 64 inputs for which tiles of 256 and of 128 packed rows fit into shared memory.
constexpr int kWideStationaryBlocks = 4, kStationaryBlocks = 8;

int StationaryInputBlocks(const CudaLinearBank& bank) {
  int most = 0;
  for (int e = 0; e < bank.num_experts(); ++e) most = std::max(most, bank.entry(e).k_blocks);
  return most;
}

}  // namespace

namespace internal {

bool LinearStationaryFits(const CudaLinearBank& bank, const LinearParams& p) {
  return LinearWgmmaFits(p) && bank.max_slices() == 1 &&
         EpilogueOf(p) != LinearEpilogue::kGeneral &&
         StationaryInputBlocks(bank) <= kStationaryBlocks;
}

void LaunchLinearStationary(const CudaLinearBank& bank, const LinearParams& p,
                            cudaStream_t stream) {
  if (bank.max_row_blocks() > 2 && StationaryInputBlocks(bank) <= kWideStationaryBlocks) {
    LaunchStationaryEpilogue<4, kWideStationaryBlocks>(bank, p, stream);
  } else {
    LaunchStationaryEpilogue<2, kStationaryBlocks>(bank, p, stream);
  }
}

}  // namespace internal
}  // namespace moeserve::cuda
