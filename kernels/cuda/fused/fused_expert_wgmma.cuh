// The shared memory, the tiles, the ring of stages and the turns of fused_expert_wgmma.cu, which
// alone includes this file.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_schedule.cuh"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kBlockBytes = kImageBlock * kImageBlock * 2;
constexpr int kRowBytes = kImageBlock * 2;  // bytes of 64 columns
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kThreads = kWarpgroup * (1 + kConsumers);
constexpr int kTileRows = 64 * kConsumers;
// At first, every thread has 168 registers.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
// Named barriers; one of each for each consumer.
constexpr int kTurnBarrier = 1;
constexpr int kPlanesBarrier = 3;

// The dimensions of a kernel for rows of kBlocks * 64 columns. A stage of the ring has input rows,
// or blocks of the first matrix that have the same outputs, or blocks of the second matrix that
// have the same inputs: all kBlocks of these, or a part if shared memory is scarce. With kSliced,
// the sums of the second matrix may have several slices (SliceBlocks()).
template <int kBlocksArg, bool kGated, bool kSlicedArg>
struct FusedWgmmaShape {
  static constexpr int kBlocks = kBlocksArg;
  static constexpr bool kSliced = kSlicedArg;
  static constexpr int kHalves = kGated ? 2 : 1;  // number of row blocks per 64 hidden units
  // The registers have no room for wider rows.
  static constexpr bool kRowsInRegisters = kBlocks <= 3;
  static constexpr int kRowRegisters = kRowsInRegisters ? kBlocks * 4 : 1;
  static constexpr int kStageBlocks = kSliced && !kRowsInRegisters ? 1 : kBlocks;
  static constexpr int kParts = kBlocks / kStageBlocks;
  static constexpr int kStageBytes = kStageBlocks * kBlockBytes;
  // Of one consumer: the input rows; the sums of the slices before the current one.
  static constexpr int kPlanesBytes = kRowsInRegisters ? 0 : kBlocks * kBlockBytes;
  static constexpr int kTotalsBytes = kSliced ? kBlocks * 64 * 64 * 4 : 0;
  static constexpr int kKept = kConsumers * (kPlanesBytes + kTotalsBytes);
  static constexpr int kMostShared = 224 << 10;  // without slots, barriers and first_tile
  static constexpr int kStages = std::min(12, (kMostShared - kKept) / kStageBytes);
  // Within a turn, one stage of the products before must be read while the next one is awaited.
  static_assert(kStages >= 2);
  // The ring must hold the stages of a turn, because only one consumer reads meanwhile. Otherwise,
  // the consumers take no turns.
  static constexpr bool kTurns = kStages >= 2 * kParts;

  static size_t SharedBytes(int experts);
};

// A tile and the matrices of its expert.
struct alignas(16) FusedItem {
  LinearTileRange range;
  LinearBankEntry up, down;
};
struct FusedSlots {
  static constexpr int kSlots = 2;
  FusedItem items[kSlots];
  uint64_t full[kSlots];
  uint64_t empty[kSlots];
};

template <typename S>
struct FusedMemory {
  char* stages;
  char* planes;
  char* totals;
  FusedSlots* slots;
  uint64_t* full;
  uint64_t* empty;
  // [experts + 1] number of the first tile of each expert, in the order of LinearParams::order.
  int32_t* first_tile;

  __device__ explicit FusedMemory(char* shared)
      : stages(shared),
        planes(stages + S::kStages * S::kStageBytes),
        totals(planes + kConsumers * S::kPlanesBytes),
        slots(reinterpret_cast<FusedSlots*>(totals + kConsumers * S::kTotalsBytes)),
        full(reinterpret_cast<uint64_t*>(slots + 1)),
        empty(full + S::kStages),
        first_tile(reinterpret_cast<int32_t*>(empty + S::kStages)) {}
};

template <int kBlocks, bool kGated, bool kSliced>
size_t FusedWgmmaShape<kBlocks, kGated, kSliced>::SharedBytes(int experts) {
  return static_cast<size_t>(kStages) * (kStageBytes + 2 * sizeof(uint64_t)) + kKept +
         sizeof(FusedSlots) + (static_cast<size_t>(experts) + 1) * sizeof(int32_t);
}

// Numbers the tiles of all experts. All threads of the block must call this; the result is visible
// after a block-wide barrier.
template <typename S>
__device__ void CountFusedTiles(const LinearParams& p, int32_t* first_tile) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < p.experts; i += kThreads) {
    const int expert = p.order[i];
    const int rows = p.offsets == nullptr ? p.rows : p.offsets[expert + 1] - p.offsets[expert];
    first_tile[i] = (rows + kTileRows - 1) / kTileRows;
  }
  __syncthreads();
  if (thread >= 32) return;
  int before = 0;
  for (int base = 0; base < p.experts; base += 32) {
    const int own = base + thread < p.experts ? first_tile[base + thread] : 0;
    int end = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kFullMask, end, step);
      if (thread >= step) end += other;
    }
    if (base + thread < p.experts) first_tile[base + thread] = before + end - own;
    before += __shfl_sync(kFullMask, end, 31);
  }
  if (thread == 0) first_tile[p.experts] = before;
}

// Returns the tile with this number; its expert is negative if there is none. All lanes of a warp
// must call this together.
template <typename S>
__device__ LinearTileRange FindFusedTile(const LinearParams& p, const int32_t* first_tile,
                                         int index) {
  if (index >= first_tile[p.experts]) return {-1, 0, 0, 0};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int at = 0;
  for (int base = 0; base < p.experts; base += 32) {
    const bool before = base + lane < p.experts && first_tile[base + lane + 1] <= index;
    const unsigned lanes = __ballot_sync(kFullMask, before);
    at += __popc(lanes);
    if (lanes != kFullMask) break;
  }
  const int expert = p.order[at];
  const int begin = p.offsets == nullptr ? 0 : p.offsets[expert];
  const int rows = p.offsets == nullptr ? p.rows : p.offsets[expert + 1] - begin;
  const int row = (index - first_tile[at]) * kTileRows;
  return {expert, begin + row, min(kTileRows, rows - row), 0};
}

// Returns the thread's index in its warpgroup. `zero`, read from shared memory, is always 0, which
// the compiler does not know, so it computes what depends on the result after `zero` was read.
// Otherwise, it would keep many addresses in registers during the products.
__device__ __forceinline__ int LateThread(int zero) {
  return (static_cast<int>(threadIdx.x) + zero) % kWarpgroup;
}

// The turns of the two consumers, of which both take equally many; without `paired` there are none.
class Turns {
 public:
  __device__ Turns(int consumer, bool paired) : consumer_(consumer), paired_(paired) {
    if (paired_ && consumer_ == 1) Pass();
  }
  __device__ __forceinline__ void Wait() const {
    if (paired_) NamedBarrierSync(kTurnBarrier + consumer_, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void Pass() const {
    if (paired_) NamedBarrierArrive(kTurnBarrier + 1 - consumer_, 2 * kWarpgroup);
  }
  // The last turn of a tile is not passed back to the first consumer.
  __device__ __forceinline__ void PassLast() const {
    if (consumer_ == 0) Pass();
  }

 private:
  const int consumer_;
  const bool paired_;
};

// Takes stages from the ring in order. To be called by whole consumer warps.
template <typename S>
class StageReader {
 public:
  __device__ explicit StageReader(const FusedMemory<S>& memory) : memory_(memory) {}

  // Waits for the next stage.
  __device__ __forceinline__ const char* Next() {
    MbarrierWait(memory_.full + at_.stage, at_.parity);
    const char* const stage = memory_.stages + at_.stage * S::kStageBytes;
    at_.Advance();
    return stage;
  }
  // Allows the producer to overwrite the earliest of the last `unreleased` stages. All lanes must
  // have passed the wait for it.
  __device__ __forceinline__ void Release(int unreleased) {
    const int stage = at_.stage - unreleased;
    if (threadIdx.x % 32 == 0) {
      MbarrierArrive(memory_.empty + (stage < 0 ? stage + S::kStages : stage));
    }
  }

 private:
  const FusedMemory<S>& memory_;
  RingPosition<S::kStages> at_;
};

}  // namespace
}  // namespace moeserve::cuda
