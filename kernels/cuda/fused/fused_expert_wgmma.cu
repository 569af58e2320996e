// Fused narrow experts by wgmma, for devices of compute capability 9.0 and many rows per expert.
//
// A block has one producer warp and two consumer warpgroups of 64 rows each. Blocks are persistent:
// block b computes the tiles b, b + n, ... of 128 rows of an expert. The producer copies the input
// rows of a tile and then the packed weights into a ring of stages. A consumer keeps its input rows
// in registers as the left operand of the first product (in shared memory if they are 256 inputs
// wide). It computes 64 hidden units at a time: the accumulators of the first product, activated
// and rounded to bf16, are in the layout of the left operand of the second product, so hidden units
// never leave the registers. The consumers take turns: one multiplies while the other activates.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/fused/fused_expert_kernels.h"
#include "kernels/cuda/fused/fused_expert_wgmma.cuh"
#include "kernels/cuda/linear/linear_fragment.cuh"

namespace moeserve::cuda {
namespace {

// Copies one stage of input rows: 64 rows of the tile from `first` on, kStageBlocks planes of 64
// columns from block `block` on. In each plane, the 16-byte piece c of row r is at piece index c ^
// (r % 8), as in blocks of weights. Rows beyond the tile's last one repeat it; their results are
// dropped. `rows` has the offsets of rows `lane` and `lane + 32` in units of 16 bytes.
template <typename S>
__device__ void LoadRowStage(const LinearParams& p, int in_features, const uint32_t (&rows)[2],
                             int block, char* stage, uint64_t* full) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int piece = lane % 8;
#pragma unroll 2
  for (int i = 0; i < 16; ++i) {
    const int r = i * 4 + lane / 8;
    const uint32_t at = __shfl_sync(kFullMask, i < 8 ? rows[0] : rows[1], r % 32);
    char* const to = stage + r * kRowBytes + (piece ^ (r & 7)) * 16;
    const char* const from = p.input + static_cast<uint64_t>(at) * 16;
#pragma unroll
    for (int b = 0; b < S::kStageBlocks; ++b) {
      const int offset = (block + b) * kRowBytes + piece * 16;
      const int valid = min(16, max(0, in_features * 2 - offset));
      CopyAsync16(to + b * kBlockBytes, valid > 0 ? from + offset : p.input, valid);
    }
  }
  CopyAsyncArrive(full);
}

// Fills stages of the ring in order. To be called by the whole producer warp.
template <typename S>
class StageWriter {
 public:
  __device__ explicit StageWriter(const FusedMemory<S>& memory) : memory_(memory) {}

  // Returns the next stage when no consumer reads it any more.
  __device__ char* Next(uint64_t** full) {
    MbarrierWait(memory_.empty + at_.stage, at_.parity ^ 1);
    char* const stage = memory_.stages + at_.stage * S::kStageBytes;
    *full = memory_.full + at_.stage;
    at_.Advance();
    return stage;
  }

  // Copies the rest of a row of blocks or of a column of blocks, kStageBlocks blocks per stage;
  // `stride` is the distance from one block to the next in bytes.
  __device__ void Weights(const char* from, int64_t stride) {
#pragma unroll 1
    for (int part = 0; part < S::kParts; ++part) {
      uint64_t* full;
      char* const stage = Next(&full);
      if (threadIdx.x % 32 == 0) {
        MbarrierExpect(full, S::kStageBytes);
#pragma unroll
        for (int b = 0; b < S::kStageBlocks; ++b) {
          CopyBulkAsync(stage + b * kBlockBytes, from + b * stride, kBlockBytes, full);
        }
      }
      MbarrierArrive(full);
      from += S::kStageBlocks * stride;
    }
  }

 private:
  const FusedMemory<S>& memory_;
  RingPosition<S::kStages> at_;
};

template <typename S>
__device__ void Produce(const FusedParams& p, const FusedMemory<S>& memory) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  StageWriter<S> writer(memory);
  RingPosition<FusedSlots::kSlots> slot;
  int index = static_cast<int>(blockIdx.x);
  for (;;) {
    const LinearTileRange tile = FindFusedTile<S>(p.down, memory.first_tile, index);
    index += static_cast<int>(gridDim.x);
    MbarrierWait(memory.slots->empty + slot.stage, slot.parity ^ 1);
    FusedItem& item = memory.slots->items[slot.stage];
    if (lane == 0) {
      item.range = tile;
      if (tile.expert >= 0) {
        item.up = p.up.entries[tile.expert];
        item.down = p.down.entries[tile.expert];
      }
      MbarrierArrive(memory.slots->full + slot.stage);
    }
    slot.Advance();
    if (tile.expert < 0) break;
    __syncwarp();
    const int in_features = item.up.in_features;
    for (int first = 0; first < tile.rows; first += 64) {
      uint32_t rows[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = min(first + lane + i * 32, tile.rows - 1);
        rows[i] =
            static_cast<uint32_t>((LinearInputRow(p.up, tile, tile.row + r) - p.up.input) / 16);
      }
#pragma unroll 1
      for (int part = 0; part < S::kParts; ++part) {
        uint64_t* full;
        char* const stage = writer.Next(&full);
        LoadRowStage<S>(p.up, in_features, rows, part * S::kStageBlocks, stage, full);
      }
    }
    const char* up = p.up.weights + item.up.weights;
    const char* down = p.down.weights + item.down.weights;
    const int row_blocks = item.up.row_blocks;
    const int chunks = item.down.k_blocks;
    int row_block = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll
      for (int half = 0; half < S::kHalves; ++half) {
        if (row_block++ == row_blocks) break;
        writer.Weights(up, kBlockBytes);
        up += S::kBlocks * kBlockBytes;
      }
      writer.Weights(down, int64_t{chunks} * kBlockBytes);
      down += kBlockBytes;
    }
  }
  CopyAsyncWait<0>();
}

// The input rows of a consumer: registers of the left operand, or a descriptor of 64 rows in shared
// memory, whose planes of 64 inputs are kBlockBytes apart.
template <typename S>
struct FusedRows {
  uint32_t registers[S::kRowRegisters][4];
  uint64_t descriptor;
};

// Takes the tile's input rows from the ring. To be called by all warps of a consumer.
template <typename S>
__device__ __forceinline__ void TakeRows(StageReader<S>& reader, int groups, int consumer,
                                         char* planes, int zero, FusedRows<S>& rows) {
  const int thread = LateThread(zero);
  const int lane = thread % 32;
  // All products that read the planes of the previous tile are complete.
  if constexpr (!S::kRowsInRegisters) NamedBarrierSync(kPlanesBarrier + consumer, kWarpgroup);
  for (int group = 0; group < groups; ++group) {
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      const char* const stage = reader.Next();
      if (group == consumer) {
        if constexpr (S::kRowsInRegisters) {
          const int row = thread / 32 * 16 + lane % 16;
#pragma unroll
          for (int i = 0; i < S::kStageBlocks * 4; ++i) {
            const int piece = (i % 4 * 2 + lane / 16) ^ (row & 7);
            LoadMatrix4(rows.registers[part * S::kStageBlocks * 4 + i],
                        stage + i / 4 * kBlockBytes + row * kRowBytes + piece * 16);
          }
        } else {
          uint4* const to = reinterpret_cast<uint4*>(planes + part * S::kStageBytes) + thread;
          const uint4* const from = reinterpret_cast<const uint4*>(stage) + thread;
#pragma unroll 4
          for (int i = 0; i < S::kStageBytes / 16 / kWarpgroup; ++i) {
            to[i * kWarpgroup] = from[i * kWarpgroup];
          }
        }
        // The copy engine overwrites the stage, and wgmma reads the planes.
        FenceAsyncShared();
      }
      __syncwarp();  // all lanes have passed the wait for the stage
      reader.Release(1);
    }
  }
  if constexpr (!S::kRowsInRegisters) {
    NamedBarrierSync(kPlanesBarrier + consumer, kWarpgroup);
    rows.descriptor = MatrixDescriptor(planes, Swizzle::k128Bytes, 8 * kRowBytes);
  }
}

// Starts the products of the input rows and one stage of 64 packed rows of the first matrix.
template <typename S>
__device__ __forceinline__ void StartUp(const char* stage, int part, FusedRows<S>& rows,
                                        float (&hidden)[32]) {
  const uint64_t b = MatrixDescriptor(stage, Swizzle::k128Bytes, 8 * kRowBytes);
  if constexpr (S::kRowsInRegisters) WgmmaKeepInPlace(rows.registers);
  WgmmaKeepInPlace(hidden);
  WgmmaFence();
#pragma unroll
  for (int i = 0; i < S::kStageBlocks * 4; ++i) {
    const uint32_t at = i / 4 * kBlockBytes + i % 4 * 32;
    const bool accumulate = part > 0 || i > 0;
    if constexpr (S::kRowsInRegisters) {
      Wgmma<64>::Registers(hidden, rows.registers[part * S::kStageBlocks * 4 + i],
                           AdvanceDescriptor(b, at), accumulate);
    } else {
      Wgmma<64>::Shared(hidden, AdvanceDescriptor(rows.descriptor, part * S::kStageBytes + at),
                        AdvanceDescriptor(b, at), accumulate);
    }
  }
  WgmmaCommit();
  if constexpr (S::kRowsInRegisters) WgmmaKeepInPlace(rows.registers);
  WgmmaKeepInPlace(hidden);
}

// Starts the products of 64 hidden units and one stage of the second matrix.
template <int kN>
__device__ __forceinline__ void StartDown(const char* stage, uint32_t (&units)[4][4],
                                          float (&sums)[kN / 2]) {
  const uint64_t b = MatrixDescriptor(stage, Swizzle::k128Bytes, 8 * kRowBytes);
  WgmmaKeepInPlace(units);
  WgmmaKeepInPlace(sums);
  WgmmaFence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Wgmma<kN>::Registers(sums, units[i], AdvanceDescriptor(b, i * 32), true);
  }
  WgmmaCommit();
  WgmmaKeepInPlace(units);
  WgmmaKeepInPlace(sums);
}

// The state of a consumer in a tile.
template <typename S>
struct FusedState {
  FusedRows<S> rows;
  uint32_t units[4][4];  // 64 hidden units, as the left operand of the second product
  float hidden[32];      // sums of 64 packed rows of the first matrix
  float sums[S::kParts][S::kStageBlocks * 32];
};

// Computes one turn of a consumer: with kDown, the products of `units` and the second matrix; with
// kUp, those of the input rows and the next 64 packed rows of the first one. Reads the biases of
// the latter while the products run.
template <typename S, bool kDown, bool kUp>
__device__ __forceinline__ void Multiply(StageReader<S>& reader, const Turns& turns,
                                         const float* bias, FusedState<S>& state,
                                         float2 (&biases)[8]) {
  constexpr int kDownSteps = kDown ? S::kParts : 0;
  constexpr int kSteps = kDownSteps + (kUp ? S::kParts : 0);
  turns.Wait();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const char* const stage = reader.Next();
    if (i < kDownSteps) {
      StartDown<S::kStageBlocks * 64>(stage, state.units, state.sums[i < S::kParts ? i : 0]);
    } else {
      StartUp<S>(stage, i - kDownSteps, state.rows, state.hidden);
    }
    if (i > 0 && i + 1 < kSteps) {
      WgmmaWait<1>();
      reader.Release(2);
    }
  }
  if constexpr (kUp) {
    turns.Pass();
  } else {
    turns.PassLast();
  }
  if constexpr (kSteps > 1) {
    WgmmaWait<1>();
    reader.Release(2);
  }
  if constexpr (kUp) {
    // The products of the units are complete, so the biases may take their registers.
    if constexpr (kDown) WgmmaKeepInPlace(state.units);
    const int quad = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      biases[j] = bias == nullptr ? make_float2(0.0f, 0.0f)
                                  : *reinterpret_cast<const float2*>(bias + j * 8 + quad * 2);
    }
  }
  WgmmaWait<0>();
  reader.Release(1);
  if constexpr (!kUp) WgmmaKeepInPlace(state.units);
  WgmmaKeepInPlace(state.hidden);
#pragma unroll
  for (int i = 0; i < S::kParts; ++i) WgmmaKeepInPlace(state.sums[i]);
}

// Computes hidden units from the sums of 64 packed rows: all 64 units of a chunk, or the half
// `kHalf` of them if gated.
template <typename S, ActivationKind kKind, int kHalf>
__device__ __forceinline__ void ActivateAs(const float (&hidden)[32], const float2 (&biases)[8],
                                           uint32_t (&units)[4][4]) {
  const FragmentActivation<kKind> function;
#pragma unroll
  for (int u = 0; u < 8 / S::kHalves; ++u) {
    const int group = kHalf * 4 + u;  // of 8 hidden units
    const int j = u * S::kHalves;     // of 8 packed rows
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float low = hidden[j * 4 + half * 2] + biases[j].x;
      const float high = hidden[j * 4 + half * 2 + 1] + biases[j].y;
      uint32_t& pair = units[group / 2][group % 2 * 2 + half];
      if constexpr (S::kHalves == 2) {
        pair = PackBf16(function(low, hidden[j * 4 + half * 2 + 4] + biases[j + 1].x),
                        function(high, hidden[j * 4 + half * 2 + 5] + biases[j + 1].y));
      } else {
        pair = PackBf16(function(low), function(high));
      }
    }
  }
}

// As above. Units from `real` on do not exist and must be 0, because the second product reads them.
template <typename S, int kHalf>
__device__ __forceinline__ void ActivateUnits(ActivationKind kind, int real,
                                              const float (&hidden)[32], const float2 (&biases)[8],
                                              uint32_t (&units)[4][4]) {
  switch (kind) {
    case ActivationKind::kGelu:
      ActivateAs<S, ActivationKind::kGelu, kHalf>(hidden, biases, units);
      break;
    case ActivationKind::kGeluTanh:
      ActivateAs<S, ActivationKind::kGeluTanh, kHalf>(hidden, biases, units);
      break;
    case ActivationKind::kRelu:
      ActivateAs<S, ActivationKind::kRelu, kHalf>(hidden, biases, units);
      break;
    default:
      ActivateAs<S, ActivationKind::kSilu, kHalf>(hidden, biases, units);
      break;
  }
  if (real >= 64) return;
#pragma unroll
  for (int i = 0; i < 16 / S::kHalves; ++i) {
    const int group = kHalf * 4 + i / 2;
    const int column = group * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
    uint32_t& pair = units[group / 2][group % 2 * 2 + i % 2];
    if (column + 1 >= real) pair = column < real ? pair & 0xffffu : 0u;
  }
}

// Adds the sums of the slices before the current one, which are in shared memory, if kLater. Then
// stores the sums and begins the next slice, unless kLast.
template <typename S, bool kLater, bool kLast>
__device__ __forceinline__ void EndSlice(float4* totals, FusedState<S>& state) {
#pragma unroll
  for (int i = 0; i < S::kBlocks * 8; ++i) {
    float* const sums = state.sums[i / (S::kStageBlocks * 8)] + i % (S::kStageBlocks * 8) * 4;
    if constexpr (kLater) {
      const float4 total = totals[i * kWarpgroup];
      sums[0] = total.x + sums[0];
      sums[1] = total.y + sums[1];
      sums[2] = total.z + sums[2];
      sums[3] = total.w + sums[3];
    }
    if constexpr (!kLast) {
      totals[i * kWarpgroup] = make_float4(sums[0], sums[1], sums[2], sums[3]);
      sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
    }
  }
}

// Computes the sums of one consumer's rows. `totals` is this thread's part of the shared memory for
// sums of slices.
template <typename S>
__device__ __forceinline__ void ComputeSums(const FusedParams& p, const FusedItem& item,
                                            StageReader<S>& reader, const Turns& turns,
                                            float4* totals, FusedState<S>& state) {
  const ActivationKind kind = p.up.activation.kind;
  const float* bias = p.up.bias == nullptr ? nullptr : p.up.bias + item.up.bias;
  int real = item.up.out_features;  // number of hidden units from the current 64 on
  float2 biases[8];
  const auto activate = [&] {
    ActivateUnits<S, 0>(kind, real, state.hidden, biases, state.units);
    if constexpr (S::kHalves == 2) {
      if (real > 32) {
        const float* const second = bias == nullptr ? nullptr : bias + kImageBlock;
        Multiply<S, false, true>(reader, turns, second, state, biases);
        ActivateUnits<S, 1>(kind, real, state.hidden, biases, state.units);
      } else {
        // There is no second block of packed rows.
#pragma unroll
        for (int i = 0; i < 8; ++i) state.units[2 + i / 4][i % 4] = 0;
      }
    }
  };
  if (real == 0) return;
  Multiply<S, false, true>(reader, turns, bias, state, biases);
  activate();
  int left = item.down.slice_blocks;  // in the current slice
  bool later = false;                 // whether it is not the first slice
#pragma unroll 1
  for (real -= 64; real > 0; real -= 64) {
    if (bias != nullptr) bias += S::kHalves * kImageBlock;
    Multiply<S, true, true>(reader, turns, bias, state, biases);
    if constexpr (S::kSliced) {
      if (--left == 0) {
        if (later) {
          EndSlice<S, true, false>(totals, state);
        } else {
          EndSlice<S, false, false>(totals, state);
        }
        later = true;
        left = item.down.slice_blocks;
      }
    }
    activate();
  }
  Multiply<S, true, false>(reader, turns, nullptr, state, biases);
  if constexpr (S::kSliced) {
    if (later) EndSlice<S, true, true>(totals, state);
  }
}

template <typename S>
__device__ __forceinline__ void StoreSums(const LinearParams& p, const LinearBankEntry& m,
                                          LinearTileRange tile, const FusedState<S>& state) {
  constexpr int kN = S::kStageBlocks * 64;
  const int thread = LateThread(tile.image_row);
#pragma unroll
  for (int part = 0; part < S::kParts; ++part) {
    if (p.output_bf16) {
      StoreFragments<LinearEpilogue::kNone, kN>(p, m, tile, state.sums[part], thread);
    } else {
      StoreFragments<LinearEpilogue::kF32, kN>(p, m, tile, state.sums[part], thread);
    }
    tile.image_row += kN;
  }
}

template <typename S>
__device__ void Consume(const FusedParams& p, const FusedMemory<S>& memory, int consumer) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  char* const planes = memory.planes + consumer * S::kPlanesBytes;
  float4* const totals =
      reinterpret_cast<float4*>(memory.totals + consumer * S::kTotalsBytes) + thread;
  StageReader<S> reader(memory);
  for (uint32_t turn = 0;; ++turn) {
    const uint32_t slot = turn % FusedSlots::kSlots;
    MbarrierWait(memory.slots->full + slot, turn / FusedSlots::kSlots % 2);
    const FusedItem& item = memory.slots->items[slot];
    if (item.range.expert < 0) break;
    const int groups = item.range.rows > 64 ? 2 : 1;
    if (consumer < groups) {
      const Turns turns(consumer, S::kTurns && groups == 2 && item.up.out_features > 0);
      FusedState<S> state;
#pragma unroll
      for (int i = 0; i < S::kBlocks * 32; ++i) {
        state.sums[i / (S::kStageBlocks * 32)][i % (S::kStageBlocks * 32)] = 0.0f;
      }
      TakeRows<S>(reader, groups, consumer, planes, item.range.image_row, state.rows);
      ComputeSums<S>(p, item, reader, turns, totals, state);
      // Not read before, because the registers are few.
      LinearTileRange tile = item.range;
      tile.row += consumer * 64;
      tile.rows = min(64, tile.rows - consumer * 64);
      StoreSums<S>(p.down, item.down, tile, state);
    } else {
      const int steps = groups + item.up.row_blocks + item.down.k_blocks;
      for (int i = 0; i < steps * S::kParts; ++i) {
        reader.Next();
        __syncwarp();
        reader.Release(1);
      }
    }
    __syncwarp();
    if (thread % 32 == 0) MbarrierArrive(memory.slots->empty + slot);
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1) FusedWgmmaKernel(const FusedParams p) {
#if MOESERVE_HAS_SM90A
  const FusedMemory<S> memory(DynamicShared<char>());
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      MbarrierInit(memory.full + s, 32);
      MbarrierInit(memory.empty + s, kConsumers * kWarpgroup / 32);
    }
    for (int s = 0; s < FusedSlots::kSlots; ++s) {
      MbarrierInit(memory.slots->full + s, 1);
      MbarrierInit(memory.slots->empty + s, kConsumers * kWarpgroup / 32);
    }
    MbarrierInitFence();
  }
  GridDependencyPass();
  CountFusedTiles<S>(p.down, memory.first_tile);
  __syncthreads();
  // The shuffle makes the value uniform within a warp in a way that the compiler can prove.
  const int warpgroup = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    DecreaseRegisters<kProducerRegisters>();
    if (threadIdx.x < 32) Produce<S>(p, memory);
  } else {
    IncreaseRegisters<kConsumerRegisters>();
    Consume<S>(p, memory, warpgroup - 1);
  }
#else
  __trap();
#endif
}

template <int kBlocks, bool kGated, bool kSliced>
void LaunchShaped(const FusedParams& p, cudaStream_t stream) {
  using S = FusedWgmmaShape<kBlocks, kGated, kSliced>;
  static const int multiprocessors = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  const int64_t rows = p.down.rows;
  const int64_t tiles = std::min<int64_t>(p.down.experts, rows) + rows / kTileRows;
  MOESERVE_CHECK(tiles <= INT32_MAX - multiprocessors, "tiles of fused experts");
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors));
  Launch(FusedWgmmaKernel<S>,
         LaunchShape{dim3(grid), dim3(kThreads), S::SharedBytes(p.down.experts), stream, true}, p);
}

template <int kBlocks>
void LaunchBlocks(const FusedParams& p, bool sliced, cudaStream_t stream) {
  if (p.up.gated) {
    sliced ? LaunchShaped<kBlocks, true, true>(p, stream)
           : LaunchShaped<kBlocks, true, false>(p, stream);
  } else {
    sliced ? LaunchShaped<kBlocks, false, true>(p, stream)
           : LaunchShaped<kBlocks, false, false>(p, stream);
  }
}

size_t SharedBytesOf(int blocks, bool sliced, int experts) {
  switch (blocks) {
    case 1:
      return sliced ? FusedWgmmaShape<1, false, true>::SharedBytes(experts)
                    : FusedWgmmaShape<1, false, false>::SharedBytes(experts);
    case 2:
      return sliced ? FusedWgmmaShape<2, false, true>::SharedBytes(experts)
                    : FusedWgmmaShape<2, false, false>::SharedBytes(experts);
    case 3:
      return sliced ? FusedWgmmaShape<3, false, true>::SharedBytes(experts)
                    : FusedWgmmaShape<3, false, false>::SharedBytes(experts);
    default:
      return sliced ? FusedWgmmaShape<4, false, true>::SharedBytes(experts)
                    : FusedWgmmaShape<4, false, false>::SharedBytes(experts);
  }
}

}  // namespace

namespace internal {

bool FusedWgmmaFits(const CudaLinearBank& down, const FusedParams& p) {
  static const int major = DeviceAttribute(cudaDevAttrComputeCapabilityMajor);
  if (major != 9 || !p.up.wide_input || EpilogueOf(p.down) == LinearEpilogue::kGeneral) {
    return false;
  }
  const Activation& a = p.up.activation;
  const bool common = a.kind == ActivationKind::kGelu || a.kind == ActivationKind::kGeluTanh ||
                      a.kind == ActivationKind::kRelu || a.kind == ActivationKind::kSilu;
  if (!common || (p.up.gated && !IsPlain(a))) return false;
  return SharedBytesOf(down.max_row_blocks(), down.max_slices() > 1, down.num_experts()) <=
         SharedMemoryLimit();
}

void LaunchFusedWgmma(const CudaLinearBank& down, const FusedParams& p, cudaStream_t stream) {
  const bool sliced = down.max_slices() > 1;
  switch (down.max_row_blocks()) {
    case 1:
      return LaunchBlocks<1>(p, sliced, stream);
    case 2:
      return LaunchBlocks<2>(p, sliced, stream);
    case 3:
      return LaunchBlocks<3>(p, sliced, stream);
    default:
      return LaunchBlocks<4>(p, sliced, stream);
  }
}

}  // namespace internal
}  // namespace moeserve::cuda
