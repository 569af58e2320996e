// Products with int8 weights of few rows per expert, for devices of compute capability 9.0. Such
// products take as long as their weights take to arrive, so a block always has copies of several
// stages in flight, also across the tiles that it computes.
//
// A block has one producer warp and eight consumer warps. A stage holds several blocks of 128
// inputs (parts) of the tile's packed rows; each consumer multiplies one strip of 16 packed rows of
// one part. The sums of integers are exact, so the parts are added in any order.
//
// With at most 8 rows, the consumers round a tile's rows themselves, while its weights arrive. A
// launch of its own would take longer. With more rows, the producer copies rounded rows into the
// stages.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_stream.cuh"
#include "kernels/cuda/linear/linear_tile.cuh"
#include "kernels/cuda/quantized/linear_int8_kernels.h"
#include "kernels/cuda/quantized/linear_int8_stream.cuh"

namespace moeserve::cuda {
namespace {

// A strip of 16 packed rows x 128 inputs.
constexpr int kInt8StripBytes = kStripRows * kInt8BlockInputs;

// What the host determines for a launch.
struct Int8StreamLayout {
  int blocks;  // per multiprocessor
  int stages;
  int tile_rows;  // at most 8 * kNTiles
  int row_parts;  // blocks of inputs of the rounded rows of a tile; 0 unless the kernel rounds them
  bool bf16_rows;
};

// kRounds: the kernel rounds its rows, which are kept in shared memory for all inputs.
template <int kStripsArg, int kNTilesArg, bool kRoundsArg, Epilogue kEpilogueArg>
struct Int8StreamShape {
  static constexpr int kWarps = 8;  // consumers
  static constexpr int kThreads = 32 * (1 + kWarps);
  static constexpr int kStrips = kStripsArg;
  static constexpr int kParts = kWarps / kStrips;
  static constexpr int kNTiles = kNTilesArg;  // instructions per strip along the rows
  static constexpr bool kRounds = kRoundsArg;
  static constexpr Epilogue kEpilogue = kEpilogueArg;
  static constexpr int kMostRows = kNTiles * 8;
  static constexpr int kTileImageRows = kStrips * kStripRows;
  static constexpr int kWeightBytes = kStrips * kInt8StripBytes;  // of a part
  static constexpr int kPartRowBytes = kRounds ? 0 : kMostRows * kInt8BlockInputs;
  static constexpr int kStageBytes = kParts * (kWeightBytes + kPartRowBytes);
  // The sums of all parts but the first, twice.
  static constexpr int kStripSums = kNTiles * 4 * 32;
  static constexpr int kTileSums = (kParts - 1) * kStrips * kStripSums;
  static_assert(!kRounds || kNTiles == 1);
};

// The shared memory of a block.
template <typename S>
struct Int8StreamMemory {
  char* stages;
  char* rows;  // rounded: [row_parts][tile_rows] of 128 integers
  int32_t* sums;
  float* row_scales;  // of the rounded rows
  uint32_t* largest;  // of each consumer warp
  uint64_t* full;
  uint64_t* empty;
  Int8Expert* experts;  // [E + 1]; only first_unit of the last one is used

  __device__ Int8StreamMemory(char* shared, const Int8StreamLayout& layout) {
    stages = shared;
    rows = stages + layout.stages * S::kStageBytes;
    sums =
        reinterpret_cast<int32_t*>(rows + layout.row_parts * layout.tile_rows * kInt8BlockInputs);
    row_scales = reinterpret_cast<float*>(sums + 2 * S::kTileSums);
    largest = reinterpret_cast<uint32_t*>(row_scales + 8);
    full = reinterpret_cast<uint64_t*>(largest + S::kWarps);
    empty = full + layout.stages;
    experts = reinterpret_cast<Int8Expert*>(empty + layout.stages);
  }
  // Returns the size without stages and their barriers.
  static int64_t OtherBytes(const Int8StreamLayout& layout, int experts) {
    return int64_t{layout.row_parts} * layout.tile_rows * kInt8BlockInputs + 2 * S::kTileSums * 4 +
           64 + (experts + 1) * static_cast<int64_t>(sizeof(Int8Expert));
  }
};

struct Int8StreamPosition {
  int stage = 0;
  uint32_t parity = 0;
  template <typename Int>  // unused if the code is not compiled for 9.0a
  __device__ __forceinline__ void Advance(Int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The producer warp.
template <typename S>
class Int8Producer {
 public:
  __device__ Int8Producer(const LinearInt8Params& params, const Int8StreamLayout& layout,
                          const Int8StreamMemory<S>& memory)
      : p_(params.linear),
        layout_(layout),
        memory_(memory),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void Run() {
    Int8Walk walk(memory_.experts, p_.experts, layout_.tile_rows, S::kTileImageRows);
    int early = 0;
    // If the tile does not depend on the kernel before this one, its first weights do not wait for
    // that one.
    if ((!S::kRounds || p_.offsets == nullptr) && !walk.Done()) {
      for (; early < min(Steps(walk.entry()), layout_.stages); ++early) {
        if (lane_ == 0) CopyWeights(walk.Tile(), walk.entry(), early, early);
      }
    }
    GridDependencyPass();
    Int8StreamPosition filling;
    for (; !walk.Done(); walk.Advance()) {
      const LinearBankEntry entry = walk.entry();
      const LinearTileRange tile = walk.Tile();
      if constexpr (!S::kRounds) FindRows(tile);
      const int steps = Steps(entry);
      for (int step = 0; step < steps; ++step) {
        MbarrierWait(memory_.empty + filling.stage, filling.parity ^ 1);
        // Lane 0 alone fills the stage, so it could fill it twice before another lane sees that it
        // was empty once.
        if constexpr (S::kRounds) __syncwarp();
        if (early > 0) {
          --early;
        } else if (lane_ == 0) {
          CopyWeights(tile, entry, step, filling.stage);
        }
        if constexpr (!S::kRounds) {
          CopyRows(tile, entry, step, filling.stage);
          CopyAsyncArrive(memory_.full + filling.stage);
        }
        filling.Advance(layout_.stages);
      }
    }
  }

 private:
  static constexpr int kRowsApart = 4;  // rows whose 8 pieces of 16 bytes a warp copies at once

  __device__ static int Steps(const LinearBankEntry& entry) {
    return (entry.k_blocks + S::kParts - 1) / S::kParts;
  }

  // One lane copies the weights of all parts of a stage.
  __device__ void CopyWeights(const LinearTileRange& tile, const LinearBankEntry& entry, int step,
                              int stage) {
    const int first = step * S::kParts, parts = min(S::kParts, entry.k_blocks - first);
    uint64_t* const barrier = memory_.full + stage;
    MbarrierArriveExpect(barrier, static_cast<uint32_t>(parts * S::kWeightBytes));
    constexpr int kBytes = kImageBlock * kInt8BlockInputs;  // of a block
    const char* const from =
        p_.weights + entry.weights +
        (int64_t{tile.image_row / kImageBlock} * entry.k_blocks + first) * kBytes +
        tile.image_row % kImageBlock * kInt8BlockInputs;
    char* const to = memory_.stages + stage * S::kStageBytes;
    if constexpr (S::kWeightBytes == kBytes) {
      CopyBulkAsync(to, from, static_cast<uint32_t>(parts * kBytes), barrier);
    } else {
      for (int part = 0; part < parts; ++part) {
        CopyBulkAsync(to + part * S::kWeightBytes, from + part * kBytes, S::kWeightBytes, barrier);
      }
    }
  }

  __device__ void FindRows(const LinearTileRange& tile) {
#pragma unroll
    for (int i = 0; i < S::kMostRows / kRowsApart; ++i) {
      const int r = min(lane_ / 8 + i * kRowsApart, tile.rows - 1);
      rows_[i] = LinearInputRow(p_, tile, tile.row + r) + lane_ % 8 * 16;
    }
  }

  __device__ void CopyRows(const LinearTileRange& tile, const LinearBankEntry& entry, int step,
                           int stage) {
    const int piece = lane_ % 8;
    for (int part = 0; part < S::kParts; ++part) {
      const int k = step * S::kParts + part;
      if (k >= entry.k_blocks) break;
      char* const to = memory_.stages + stage * S::kStageBytes + S::kParts * S::kWeightBytes +
                       part * S::kPartRowBytes;
#pragma unroll
      for (int i = 0; i < S::kMostRows / kRowsApart; ++i) {
        const int r = lane_ / 8 + i * kRowsApart;
        if (r >= tile.rows) continue;
        CopyAsync16(to + r * kInt8BlockInputs + (piece ^ (r & 7)) * 16,
                    rows_[i] + k * kInt8BlockInputs);
      }
    }
  }

  const LinearParams& p_;
  const Int8StreamLayout& layout_;
  const Int8StreamMemory<S>& memory_;
  const int lane_;
  const char* rows_[S::kMostRows / kRowsApart];
};

// A consumer warp: computes one part of one strip.
template <typename S>
class Int8Consumer {
 public:
  __device__ Int8Consumer(const LinearInt8Params& params, const Int8StreamLayout& layout,
                          const Int8StreamMemory<S>& memory, int warp)
      : params_(params),
        p_(params.linear),
        layout_(layout),
        memory_(memory),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(warp),
        strip_(warp % S::kStrips),
        part_(warp / S::kStrips) {}

  __device__ void Run() {
    GridDependencyPass();
    int expert = -1, row = -1, turn = 0;
    for (Int8Walk walk(memory_.experts, p_.experts, layout_.tile_rows, S::kTileImageRows);
         !walk.Done(); walk.Advance()) {
      const LinearBankEntry entry = walk.entry();
      LinearTileRange tile = walk.Tile();
      if constexpr (S::kRounds) {
        if (tile.expert != expert || tile.row != row) Round(entry, tile);
        expert = tile.expert;
        row = tile.row;
      }
      tile.image_row += strip_ * kStripRows;
      ReadScales(entry, tile);
      Sum(entry, tile);
      int32_t* const sums = memory_.sums + turn * S::kTileSums + strip_ * S::kStripSums + lane_;
      turn ^= 1;
      if (part_ > 0) StorePart(sums);
      // Afterwards the sums of all parts are stored. They are overwritten two tiles later, when all
      // warps have passed the barrier of the next tile.
      NamedBarrierSync(1, S::kWarps * 32);
      if (part_ == 0) {
        AddParts(sums);
        Store(entry, tile);
      }
    }
  }

 private:
  __device__ __forceinline__ void Round(const LinearBankEntry& entry, const LinearTileRange& tile) {
    if (layout_.bf16_rows) {
      RoundTileRows<S::kWarps, true>(p_, entry, tile, layout_.tile_rows, memory_.rows,
                                     memory_.row_scales, memory_.largest, warp_);
    } else {
      RoundTileRows<S::kWarps, false>(p_, entry, tile, layout_.tile_rows, memory_.rows,
                                      memory_.row_scales, memory_.largest, warp_);
    }
    NamedBarrierSync(1, S::kWarps * 32);
  }

  // Reads the scales that Store() needs, except for those of rows that the kernel rounds.
  __device__ __forceinline__ void ReadScales(const LinearBankEntry& entry,
                                             const LinearTileRange& tile) {
    if (part_ > 0) return;
    const float* const outputs = params_.output_scales + entry.bias + tile.image_row + lane_ / 4;
    output_scales_[0] = outputs[0];
    output_scales_[1] = outputs[8];
    if constexpr (S::kRounds) return;
    const float* const rows = params_.row_scales + tile.expert * params_.scale_segment;
#pragma unroll
    for (int nt = 0; nt < S::kNTiles; ++nt) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = tile.row + min(nt * 8 + lane_ % 4 * 2 + i, tile.rows - 1);
        row_scales_[nt][i] = rows[p_.source == nullptr ? row : p_.source[row]];
      }
    }
  }

  // Multiplies one block of inputs.
  __device__ __forceinline__ void Multiply(const char* stage, int k, int rows) {
    constexpr int kSteps = kInt8BlockInputs / 32;
    const char* const weights =
        stage + part_ * S::kWeightBytes + strip_ * kInt8StripBytes + lane_ % 16 * kInt8BlockInputs;
    uint32_t a[kSteps][4];
#pragma unroll
    for (int k32 = 0; k32 < kSteps; ++k32) {
      LoadMatrix4(a[k32], weights + ((k32 * 2 + lane_ / 16) ^ (lane_ & 7)) * 16);
    }
    if constexpr (S::kRounds) {
      // Rows that the tile does not have repeat its last one.
      const int r = min(lane_ % 8, rows - 1);
      const char* const row = memory_.rows + (k * layout_.tile_rows + r) * kInt8BlockInputs;
      uint32_t b[kSteps / 2][4];
#pragma unroll
      for (int k64 = 0; k64 < kSteps / 2; ++k64) {
        LoadMatrix4(b[k64], row + ((k64 * 4 + lane_ / 8) ^ r) * 16);
      }
      Release();
#pragma unroll
      for (int k32 = 0; k32 < kSteps; ++k32) {
        const uint32_t half[2] = {b[k32 / 2][k32 % 2 * 2], b[k32 / 2][k32 % 2 * 2 + 1]};
        MmaInt8(sums_[0], a[k32], half);
      }
    } else {
      const char* const row = stage + S::kParts * S::kWeightBytes + part_ * S::kPartRowBytes +
                              (lane_ % 8 + lane_ / 16 * 8) * kInt8BlockInputs;
#pragma unroll
      for (int pair = 0; pair < S::kNTiles / 2; ++pair) {
        if (pair * 16 >= rows) break;
#pragma unroll
        for (int k32 = 0; k32 < kSteps; ++k32) {
          uint32_t both[4];
          LoadMatrix4(both, row + pair * 16 * kInt8BlockInputs +
                                ((k32 * 2 + lane_ / 8 % 2) ^ (lane_ & 7)) * 16);
          const uint32_t first[2] = {both[0], both[1]}, second[2] = {both[2], both[3]};
          MmaInt8(sums_[pair * 2], a[k32], first);
          MmaInt8(sums_[pair * 2 + 1], a[k32], second);
        }
      }
      Release();
    }
  }

  // Lets the producer fill the stage again.
  __device__ __forceinline__ void Release() {
    __syncwarp();
    if (lane_ == 0) MbarrierArrive(memory_.empty + reading_.stage);
    reading_.Advance(layout_.stages);
  }

  __device__ __forceinline__ void Sum(const LinearBankEntry& entry, const LinearTileRange& tile) {
#pragma unroll
    for (int nt = 0; nt < S::kNTiles; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_[nt][i] = 0;
    }
    for (int first = 0; first < entry.k_blocks; first += S::kParts) {
      MbarrierWait(memory_.full + reading_.stage, reading_.parity);
      if (first + part_ < entry.k_blocks) {
        Multiply(memory_.stages + reading_.stage * S::kStageBytes, first + part_, tile.rows);
      } else {
        Release();
      }
    }
  }

  __device__ __forceinline__ void StorePart(int32_t* sums) const {
    int32_t* const to = sums + (part_ - 1) * S::kStrips * S::kStripSums;
#pragma unroll
    for (int nt = 0; nt < S::kNTiles; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[(nt * 4 + i) * 32] = sums_[nt][i];
    }
  }

  __device__ __forceinline__ void AddParts(const int32_t* sums) {
#pragma unroll
    for (int part = 1; part < S::kParts; ++part) {
      const int32_t* const from = sums + (part - 1) * S::kStrips * S::kStripSums;
#pragma unroll
      for (int nt = 0; nt < S::kNTiles; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_[nt][i] += from[(nt * 4 + i) * 32];
      }
    }
  }

  __device__ __forceinline__ void Store(const LinearBankEntry& entry, const LinearTileRange& tile) {
    float scaled[S::kNTiles][4];
#pragma unroll
    for (int nt = 0; nt < S::kNTiles; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float row_scale =
            S::kRounds ? memory_.row_scales[lane_ % 4 * 2 + i % 2] : row_scales_[nt][i % 2];
        scaled[nt][i] = ScaledSum(sums_[nt][i], output_scales_[i / 2], row_scale);
      }
    }
    StoreStrip<S::kEpilogue>(p_, entry, tile, scaled);
  }

  const LinearInt8Params& params_;
  const LinearParams& p_;
  const Int8StreamLayout& layout_;
  const Int8StreamMemory<S>& memory_;
  const int lane_, warp_, strip_, part_;
  Int8StreamPosition reading_;
  int32_t sums_[S::kNTiles][4];
  float output_scales_[2];
  float row_scales_[S::kNTiles][2];
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 2)
    LinearInt8StreamKernel(const LinearInt8Params params, const Int8StreamLayout layout) {
#if MOESERVE_HAS_SM90A
  const LinearParams& p = params.linear;
  const Int8StreamMemory<S> memory(DynamicShared<char>(), layout);
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < layout.stages; ++s) {
      // The weights and, unless rows are rounded here, the copies of rows of every lane.
      MbarrierInit(memory.full + s, S::kRounds ? 1 : 32 + 1);
      MbarrierInit(memory.empty + s, S::kWarps);
    }
    MbarrierInitFence();
  }
  LoadInt8Experts(p, memory.experts, S::kTileImageRows, S::kParts);
  // Rounded rows are results of the kernel before this one, and a plan of an earlier one, which has
  // ended (GridDependencyPass()).
  if (S::kRounds && p.offsets != nullptr) GridDependencyWait();
  __syncthreads();
  CountInt8Units(p, memory.experts, layout.tile_rows);
  __syncthreads();
  if (warp == 0) {
    Int8Producer<S>(params, layout, memory).Run();
  } else {
    Int8Consumer<S>(params, layout, memory, warp - 1).Run();
  }
#else
  __trap();
#endif
}

// Returns the rows of a tile of a product that rounds its rows, of which no expert has more than
// `most_rows`.
int RoundedTileRows(int most_rows) { return std::clamp(most_rows, 1, 8); }

// Returns how the shared memory is used: so that `blocks` of them fit on a multiprocessor, or fewer
// if their copies in flight would be too few. No stages if the memory is too small.
template <typename S>
Int8StreamLayout LayoutOf(const CudaLinearBank& bank, int most_rows, int blocks) {
  constexpr int kFewestStages = 3, kMostStages = 8;
  Int8StreamLayout layout{.blocks = blocks,
                          .stages = 0,
                          .tile_rows = S::kRounds ? RoundedTileRows(most_rows) : S::kMostRows,
                          .row_parts = S::kRounds ? bank.max_k_blocks() : 0,
                          .bf16_rows = false};
  constexpr int64_t kReserved = 1 << 10;  // of each block, by the device
  const int64_t limit = static_cast<int64_t>(SharedMemoryLimit());
  const int64_t other = Int8StreamMemory<S>::OtherBytes(layout, bank.num_experts());
  for (; layout.blocks > 0; --layout.blocks) {
    const int64_t bytes = (limit + kReserved) / layout.blocks - kReserved;
    const int64_t stages = (bytes - other) / (S::kStageBytes + 16);
    if (bytes < other || stages < kFewestStages) continue;
    layout.stages = static_cast<int>(std::min<int64_t>(stages, kMostStages));
    break;
  }
  return layout;
}

template <typename S>
void LaunchInt8StreamShaped(const CudaLinearBank& bank, const LinearInt8Params& params,
                            const internal::Int8StreamRows& rows, cudaStream_t stream) {
  static const int multiprocessors = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  const LinearParams& p = params.linear;
  const int tile_rows = S::kRounds ? RoundedTileRows(rows.most) : S::kMostRows;
  const int64_t tiles = internal::MaxLinearTiles(bank, p.rows, tile_rows, S::kTileImageRows);
  // If two blocks per multiprocessor have one tile or two, but three have one at most, the work is
  // shared better by three.
  const bool three = S::kRounds && tiles > 2 * multiprocessors && tiles <= 3 * multiprocessors;
  Int8StreamLayout layout = LayoutOf<S>(bank, rows.most, three ? 3 : 2);
  MOESERVE_CHECK(layout.stages > 0, "Int8StreamFits() was true");
  layout.bf16_rows = rows.bf16;
  const int64_t shared =
      Int8StreamMemory<S>::OtherBytes(layout, p.experts) + layout.stages * (S::kStageBytes + 16);
  const int64_t resident = int64_t{multiprocessors} * layout.blocks;
  Launch(LinearInt8StreamKernel<S>,
         {.grid = dim3(static_cast<unsigned>(std::min(tiles, resident))),
          .block = dim3(S::kThreads),
          .shared_bytes = static_cast<size_t>(shared),
          .stream = stream,
          .overlaps_predecessor = true},
         params, layout);
}

// Returns whether the memory suffices, and 32 bits for the numbers of units.
template <int kStrips, int kNTiles, bool kRounds>
bool StripsFit(const CudaLinearBank& bank, const LinearParams& p,
               const internal::Int8StreamRows& rows) {
  using S = Int8StreamShape<kStrips, kNTiles, kRounds, Epilogue::kAny>;
  const Int8StreamLayout layout = LayoutOf<S>(bank, rows.most, 2);
  const int64_t tiles = internal::MaxLinearTiles(bank, p.rows, layout.tile_rows, S::kTileImageRows);
  return layout.stages > 0 && tiles * (bank.max_k_blocks() + 1) <= INT32_MAX;
}

// Selects the epilogue.
template <int kStrips, int kNTiles, bool kRounds>
void LaunchInt8Strips(const CudaLinearBank& bank, const LinearInt8Params& params,
                      const internal::Int8StreamRows& rows, cudaStream_t stream) {
  const auto launch = [&]<Epilogue kEpilogue> {
    LaunchInt8StreamShaped<Int8StreamShape<kStrips, kNTiles, kRounds, kEpilogue>>(bank, params,
                                                                                  rows, stream);
  };
  switch (StreamEpilogueOf(params.linear)) {
    case Epilogue::kNone:
      return launch.template operator()<Epilogue::kNone>();
    case Epilogue::kGatedSilu:
      return launch.template operator()<Epilogue::kGatedSilu>();
    case Epilogue::kGelu:
      return launch.template operator()<Epilogue::kGelu>();
    case Epilogue::kAny:
      return launch.template operator()<Epilogue::kAny>();
  }
}

}  // namespace

namespace internal {

bool Int8StreamFits(const CudaLinearBank& bank, const LinearParams& p, LinearTile tile,
                    const Int8StreamRows& rows) {
  static const int major = DeviceAttribute(cudaDevAttrComputeCapabilityMajor);
  constexpr int kMostExperts = 512;  // bounds the shared memory that they take
  if (major != 9 || p.experts > kMostExperts) return false;
  switch (tile) {
    case LinearTile::kStream8x16:
      return StripsFit<1, 1, true>(bank, p, rows);
    case LinearTile::kStream8x64:
      return StripsFit<4, 1, true>(bank, p, rows);
    default:
      return tile == LinearTile::kStream32x64 && StripsFit<4, 4, false>(bank, p, rows);
  }
}

void LaunchInt8Stream(const CudaLinearBank& bank, const LinearInt8Params& params, LinearTile tile,
                      const Int8StreamRows& rows, cudaStream_t stream) {
  switch (tile) {
    case LinearTile::kStream8x16:
      return LaunchInt8Strips<1, 1, true>(bank, params, rows, stream);
    case LinearTile::kStream8x64:
      return LaunchInt8Strips<4, 1, true>(bank, params, rows, stream);
    default:
      return LaunchInt8Strips<4, 4, false>(bank, params, rows, stream);
  }
}

}  // namespace internal
}  // namespace moeserve::cuda
