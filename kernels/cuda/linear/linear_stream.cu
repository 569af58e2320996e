// Products of few bf16 rows per expert with bf16, MXFP4 or FP8 weights, for devices of compute
// capability 9.0. Such products take as long as their weights take to arrive, so a block always has
// copies of several stages in flight, also across the tiles that it computes.
//
// A block has one producer warp and some consumer warps, each of which computes 16 packed rows of a
// tile for all of its rows. In banks whose sums have several slices (SliceBlocks()), one consumer
// computes one slice of its 16 packed rows, and the slices are added in shared memory.

#include <algorithm>
#include <type_traits>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_stream.cuh"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {
namespace {

// An expert with the number of its first tile in the list of tiles. The experts are in the order of
// LinearParams::order.
struct StreamExpert {
  LinearBankEntry entry;
  int expert;
  int begin;  // its first row
  int rows;
  int first_tile;
};

template <typename S>
struct StreamMemory {
  char* stages;
  char* sums;  // [slices][strips] sums of a tile, kSumsBytes each
  uint64_t* full;
  uint64_t* empty;
  StreamExpert* experts;  // [E + 1]; only first_tile of the last one is used

  __device__ StreamMemory(char* shared, const StreamLayout& layout) {
    stages = shared;
    sums = stages + layout.stages * layout.parts * S::kPartBytes;
    full = reinterpret_cast<uint64_t*>(
        sums + (S::kSliced ? layout.slices * S::kStrips * S::kSumsBytes : 0));
    empty = full + layout.stages;
    experts = reinterpret_cast<StreamExpert*>(empty + layout.stages);
  }
};

template <typename S>
int SharedBytes(const StreamLayout& layout, int experts) {
  const int sums = S::kSliced ? layout.slices * S::kStrips * S::kSumsBytes : 0;
  return layout.stages * (layout.parts * S::kPartBytes + 16) + sums +
         (experts + 1) * static_cast<int>(sizeof(StreamExpert));
}

// Copies what does not depend on earlier kernels.
[[maybe_unused]] __device__ void LoadExperts(const LinearParams& p, StreamExpert* experts) {
  for (int i = static_cast<int>(threadIdx.x); i < p.experts; i += static_cast<int>(blockDim.x)) {
    const int expert = p.experts == 1 ? 0 : p.order[i];
    experts[i].entry = p.entries[expert];
    experts[i].expert = expert;
  }
}

// Counts the rows and tiles of the experts. All threads of the block must call this.
template <typename S>
__device__ void CountTiles(const LinearParams& p, StreamExpert* experts) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < p.experts; i += static_cast<int>(blockDim.x)) {
    StreamExpert& e = experts[i];
    e.begin = p.offsets == nullptr ? 0 : p.offsets[e.expert];
    e.rows = p.offsets == nullptr ? p.rows / p.experts : p.offsets[e.expert + 1] - e.begin;
    e.first_tile = (e.rows + S::kTileRows - 1) / S::kTileRows *
                   (e.entry.row_blocks * (kImageBlock / S::kTileImageRows));
  }
  __syncthreads();
  if (thread >= 32) return;
  int before = 0;
  for (int base = 0; base < p.experts; base += 32) {
    const int own = base + thread < p.experts ? experts[base + thread].first_tile : 0;
    int end = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kFullMask, end, step);
      if (thread >= step) end += other;
    }
    if (base + thread < p.experts) experts[base + thread].first_tile = before + end - own;
    before += __shfl_sync(kFullMask, end, 31);
  }
  if (thread == 0) experts[p.experts].first_tile = before;
}

// A tile and how its sums are divided: slice s has the k blocks [s * slice_blocks, (s + 1) *
// slice_blocks).
struct StreamTile {
  LinearTileRange range;
  int k_blocks;
  int slice_blocks;
};

// Returns the tile with this number; row tiles of the same outputs are adjacent. All lanes of a
// warp must call this together.
template <typename S>
__device__ StreamTile FindTile(const StreamExpert* experts, int count, int index,
                               LinearBankEntry& entry) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int at = 0;
  for (int base = 0; base < count; base += 32) {
    const bool before = base + lane < count && experts[base + lane + 1].first_tile <= index;
    const unsigned lanes = __ballot_sync(kFullMask, before);
    at += __popc(lanes);
    if (lanes != kFullMask) break;
  }
  const StreamExpert& e = experts[at];
  entry = e.entry;
  const int within = index - e.first_tile;
  const int row_tiles = (e.rows + S::kTileRows - 1) / S::kTileRows;
  const int row = within % row_tiles * S::kTileRows;
  return {.range = {e.expert, e.begin + row, min(S::kTileRows, e.rows - row),
                    within / row_tiles * S::kTileImageRows},
          .k_blocks = entry.k_blocks,
          .slice_blocks = entry.slice_blocks};
}

// Returns the k block of part `part` in step `step` of a tile; k_blocks or more if there is none.
template <typename S>
__device__ __forceinline__ int BlockOfPart(const StreamTile& tile, int parts, int step, int part) {
  if constexpr (!S::kSliced) return step * parts + part;
  const int round = step / tile.slice_blocks;
  const int in_slice = step - round * tile.slice_blocks;
  return (round * parts + part) * tile.slice_blocks + in_slice;
}

// Returns the number of stages that a tile takes.
template <typename S>
__device__ __forceinline__ int StepsOfTile(const StreamTile& tile, int parts) {
  if constexpr (!S::kSliced) return (tile.k_blocks + parts - 1) / parts;
  const int round_blocks = parts * tile.slice_blocks;
  const int rounds = (tile.k_blocks - 1) / round_blocks;
  return rounds * tile.slice_blocks + min(tile.slice_blocks, tile.k_blocks - rounds * round_blocks);
}

struct StreamPosition {
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
class Producer {
 public:
  __device__ Producer(const LinearParams& p, const StreamLayout& layout, const StreamMemory<S>& m)
      : p_(p), layout_(layout), memory_(m), lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void Run() {
    const int tiles = memory_.experts[p_.experts].first_tile;
    const int first = static_cast<int>(blockIdx.x);
    int early = 0;
    // If the tile does not depend on earlier kernels, its first weights do not wait for them.
    if (p_.offsets == nullptr && first < tiles) {
      LinearBankEntry entry;
      const StreamTile tile = FindTile<S>(memory_.experts, p_.experts, first, entry);
      const int steps = StepsOfTile<S>(tile, layout_.parts);
      for (; early < min(steps, layout_.stages); ++early) {
        if (lane_ == 0) CopyWeights(tile, entry, early, early);
      }
    }
    GridDependencyPass();
    StreamPosition filling;
    for (int index = first; index < tiles; index += static_cast<int>(gridDim.x)) {
      LinearBankEntry entry;
      const StreamTile tile = FindTile<S>(memory_.experts, p_.experts, index, entry);
      FindRows(tile);
      const int steps = StepsOfTile<S>(tile, layout_.parts);
      for (int step = 0; step < steps; ++step) {
        MbarrierWait(memory_.empty + filling.stage, filling.parity ^ 1);
        if (early > 0) {
          --early;
        } else if (lane_ == 0) {
          CopyWeights(tile, entry, step, filling.stage);
        }
        CopyRows(tile, entry, step, filling.stage);
        CopyAsyncArrive(memory_.full + filling.stage);
        filling.Advance(layout_.stages);
      }
    }
  }

 private:
  static constexpr int kRowsApart = 4;  // rows whose 8 pieces of 16 bytes a warp copies at once

  __device__ char* Part(int stage, int part) const {
    return memory_.stages + (stage * layout_.parts + part) * S::kPartBytes;
  }

  // One lane copies the weights of all parts of a stage.
  __device__ void CopyWeights(const StreamTile& tile, const LinearBankEntry& entry, int step,
                              int stage) {
    int present = 0;
    for (int part = 0; part < layout_.parts; ++part) {
      present += BlockOfPart<S>(tile, layout_.parts, step, part) < tile.k_blocks;
    }
    uint64_t* const barrier = memory_.full + stage;
    MbarrierArriveExpect(barrier, static_cast<uint32_t>(present * S::kWeightBytes));
    const char* const strip =
        p_.weights + entry.weights +
        int64_t{tile.range.image_row / kImageBlock} * entry.k_blocks * S::Strips::kBlockBytes +
        tile.range.image_row % kImageBlock / kStripRows * S::Strips::kStripBytes;
    for (int part = 0; part < layout_.parts; ++part) {
      const int k = BlockOfPart<S>(tile, layout_.parts, step, part);
      if (k >= tile.k_blocks) continue;
      CopyBulkAsync(Part(stage, part), strip + int64_t{k} * S::Strips::kBlockBytes, S::kWeightBytes,
                    barrier);
    }
  }

  __device__ void FindRows(const StreamTile& tile) {
#pragma unroll
    for (int i = 0; i < S::kTileRows / kRowsApart; ++i) {
      const int r = min(lane_ / 8 + i * kRowsApart, tile.range.rows - 1);
      rows_[i] = LinearInputRow(p_, tile.range, tile.range.row + r) + lane_ % 8 * 16;
    }
  }

  __device__ void CopyRows(const StreamTile& tile, const LinearBankEntry& entry, int step,
                           int stage) {
    const int piece = lane_ % 8;
    for (int part = 0; part < layout_.parts; ++part) {
      const int k = BlockOfPart<S>(tile, layout_.parts, step, part);
      if (k >= tile.k_blocks) continue;
      char* const to = Part(stage, part) + S::kWeightBytes;
      const int valid = min(16, max(0, entry.in_features * 2 - k * kRowBytes - piece * 16));
#pragma unroll
      for (int i = 0; i < S::kTileRows / kRowsApart; ++i) {
        const int r = lane_ / 8 + i * kRowsApart;
        if (r >= tile.range.rows) continue;
        CopyAsync16(to + r * kRowBytes + (piece ^ (r & 7)) * 16,
                    valid > 0 ? rows_[i] + k * kRowBytes : p_.input, valid);
      }
    }
  }

  const LinearParams& p_;
  const StreamLayout& layout_;
  const StreamMemory<S>& memory_;
  const int lane_;
  const char* rows_[S::kTileRows / kRowsApart];
};

// A consumer warp: computes one strip, or one part of its slices.
template <typename S, Epilogue kEpilogue>
class Consumer {
 public:
  __device__ Consumer(const LinearParams& p, const StreamLayout& layout, const StreamMemory<S>& m)
      : p_(p),
        layout_(layout),
        memory_(m),
        lane_(static_cast<int>(threadIdx.x) % 32),
        strip_((static_cast<int>(threadIdx.x) / 32 - 1) % S::kStrips),
        part_((static_cast<int>(threadIdx.x) / 32 - 1) / S::kStrips) {}

  __device__ void Run() {
    GridDependencyPass();
    const int tiles = memory_.experts[p_.experts].first_tile;
    for (int index = static_cast<int>(blockIdx.x); index < tiles;
         index += static_cast<int>(gridDim.x)) {
      LinearBankEntry entry;
      const StreamTile tile = FindTile<S>(memory_.experts, p_.experts, index, entry);
      if constexpr (S::Strips::kScaled) {
        SumScaled(tile);
      } else {
        Sum(tile);
      }
      LinearTileRange range = tile.range;
      range.image_row += strip_ * kStripRows;
      if constexpr (S::kSliced) {
        const int consumers = static_cast<int>(blockDim.x) - 32;
        NamedBarrierSync(1, consumers);  // all slices are stored
        if (part_ == 0) {
          AddSlices(tile);
          StoreStrip<kEpilogue>(p_, entry, range, sums_);
        }
        NamedBarrierSync(2, consumers);  // the memory of the sums can be used again
      } else {
        StoreStrip<kEpilogue>(p_, entry, range, sums_);
      }
    }
  }

 private:
  using Operands = Fragments<S::kNTiles>;

  __device__ float* SumsOf(int slice) const {
    return reinterpret_cast<float*>(memory_.sums + (slice * S::kStrips + strip_) * S::kSumsBytes) +
           lane_;
  }

  // Lets the producer fill the stage again.
  __device__ __forceinline__ void Release() {
    __syncwarp();
    if (lane_ == 0) MbarrierArrive(memory_.empty + reading_.stage);
    reading_.Advance(layout_.stages);
  }

  // Loads the operands of the next k block of this warp. `last`: it is the last one.
  __device__ __forceinline__ void Fetch(Operands& f, bool last) {
    if (next_part_ == 0) MbarrierWait(memory_.full + reading_.stage, reading_.parity);
    const int part = S::kSliced ? part_ : next_part_;
    LoadFragments<S>(f, memory_.stages + (reading_.stage * layout_.parts + part) * S::kPartBytes,
                     strip_, n_tiles_);
    if (S::kSliced || last || ++next_part_ == layout_.parts) {
      next_part_ = 0;
      Release();
    }
  }

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int nt = 0; nt < S::kNTiles; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_[nt][i] = 0.0f;
    }
  }

  // At the end of a slice, stores its sums in shared memory and begins the next slice.
  __device__ __forceinline__ void EndBlock(const StreamTile& tile, bool last) {
    if constexpr (S::kSliced) {
      if (++in_slice_ < tile.slice_blocks && !last) return;
      float* const to = SumsOf(slice_);
#pragma unroll
      for (int nt = 0; nt < S::kNTiles; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[(nt * 4 + i) * 32] = sums_[nt][i];
      }
      Clear();
      in_slice_ = 0;
      slice_ += layout_.parts;
    }
  }

  // Computes the sums of this warp. The operands of a k block are loaded while the products of the
  // block before are computed, because the products of a sum wait for each other.
  __device__ void Sum(const StreamTile& tile) {
    Clear();
    n_tiles_ = (tile.range.rows + 7) / 8;
    slice_ = part_;
    in_slice_ = 0;
    int blocks = tile.k_blocks, steps = 0;
    if constexpr (S::kSliced) {
      // All slices have the same length, except the last one of the sum.
      steps = StepsOfTile<S>(tile, layout_.parts);
      blocks = 0;
      for (int s = part_; s * tile.slice_blocks < tile.k_blocks; s += layout_.parts) {
        blocks += min(tile.slice_blocks, tile.k_blocks - s * tile.slice_blocks);
      }
    }
    Operands even, odd;
    if (blocks > 0) Fetch(even, blocks == 1);
    for (int k = 0; k < blocks; k += 2) {
      if (k + 1 < blocks) Fetch(odd, k + 2 == blocks);
      Multiply<S::kNTiles>(sums_, even, n_tiles_);
      EndBlock(tile, k + 1 == blocks);
      if (k + 1 == blocks) break;
      if (k + 2 < blocks) Fetch(even, k + 3 == blocks);
      Multiply<S::kNTiles>(sums_, odd, n_tiles_);
      EndBlock(tile, k + 2 == blocks);
    }
    // Stages that have only parts of other warps.
    for (int step = blocks; S::kSliced && step < steps; ++step) {
      MbarrierWait(memory_.full + reading_.stage, reading_.parity);
      Release();
    }
  }

  // As Sum(). Two blocks share scales: the sum of their products is scaled when it is added.
  __device__ void SumScaled(const StreamTile& tile) {
    Clear();
    n_tiles_ = (tile.range.rows + 7) / 8;
    Operands even, odd;
    const int blocks = tile.k_blocks;  // an even number
    if (blocks > 0) Fetch(even, false);
    for (int k = 0; k < blocks; k += 2) {
      Fetch(odd, k + 2 == blocks);
      float pair[S::kNTiles][4] = {};
      Multiply<S::kNTiles>(pair, even, n_tiles_);
      const float scales[2] = {even.scale, odd.scale};
      if (k + 2 < blocks) Fetch(even, false);
      Multiply<S::kNTiles>(pair, odd, n_tiles_);
#pragma unroll
      for (int nt = 0; nt < S::kNTiles; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums_[nt][i] = __fmaf_rn(pair[nt][i], scales[i / 2], sums_[nt][i]);
        }
      }
    }
  }

  __device__ __forceinline__ void AddSlices(const StreamTile& tile) {
    const int slices = (tile.k_blocks + tile.slice_blocks - 1) / tile.slice_blocks;
#pragma unroll
    for (int nt = 0; nt < S::kNTiles; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float sum = SumsOf(0)[(nt * 4 + i) * 32];
        for (int s = 1; s < slices; ++s) sum += SumsOf(s)[(nt * 4 + i) * 32];
        sums_[nt][i] = sum;
      }
    }
  }

  const LinearParams& p_;
  const StreamLayout& layout_;
  const StreamMemory<S>& memory_;
  const int lane_, strip_;
  const int part_;  // always 0 without slices
  StreamPosition reading_;
  int next_part_ = 0;  // without slices: of the stage that is read
  int n_tiles_ = 0;
  int slice_ = 0, in_slice_ = 0;
  float sums_[S::kNTiles][4];
};

template <typename S, Epilogue kEpilogue>
__global__ void __launch_bounds__(S::kMostThreads)
    LinearStreamKernel(const LinearParams p, const StreamLayout layout) {
#if MOESERVE_HAS_SM90A
  const StreamMemory<S> memory(DynamicShared<char>(), layout);
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < layout.stages; ++s) {
      MbarrierInit(memory.full + s, 32 + 1);  // the copies of rows of every lane, and the weights
      MbarrierInit(memory.empty + s, blockDim.x / 32 - 1);
    }
    MbarrierInitFence();
  }
  LoadExperts(p, memory.experts);
  if (p.offsets != nullptr) GridDependencyWait();
  __syncthreads();
  CountTiles<S>(p, memory.experts);
  __syncthreads();
  if (warp == 0) {
    Producer<S>(p, layout, memory).Run();
  } else {
    Consumer<S, kEpilogue>(p, layout, memory).Run();
  }
#else
  __trap();
#endif
}

// Bytes of stages per block, so that two or four blocks fit on a multiprocessor.
constexpr int kWideStages = 96 << 10, kNarrowStages = 48 << 10;
constexpr int kMostStages = 8;

template <typename S, Epilogue kEpilogue>
void LaunchShaped(const CudaLinearBank& bank, const LinearParams& p, cudaStream_t stream) {
  static const int multiprocessors = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  StreamLayout layout{.parts = S::kMostParts, .stages = 0, .slices = bank.max_slices()};
  if (S::kSliced) layout.parts = std::min(layout.parts, layout.slices);
  const int stage_bytes = layout.parts * S::kPartBytes;
  layout.stages =
      std::clamp((S::kStrips == 1 ? kNarrowStages : kWideStages) / stage_bytes, 2, kMostStages);
  const int threads = 32 * (1 + S::kStrips * (S::kSliced ? layout.parts : 1));
  const int shared = SharedBytes<S>(layout, p.experts);
  const int64_t limit = static_cast<int64_t>(SharedMemoryLimit());
  MOESERVE_CHECK(shared <= limit, "LinearStreamFits() was true");
  const int64_t tiles = internal::MaxLinearTiles(bank, p.rows, S::kTileRows, S::kTileImageRows);
  const int64_t resident = multiprocessors * std::max<int64_t>(1, limit / shared);
  Launch(LinearStreamKernel<S, kEpilogue>,
         {.grid = dim3(static_cast<unsigned>(std::min(tiles, resident))),
          .block = dim3(static_cast<unsigned>(threads)),
          .shared_bytes = static_cast<size_t>(shared),
          .stream = stream,
          .overlaps_predecessor = true},
         p, layout);
}

template <typename Strips, int kStrips, int kNTiles>
void LaunchStrips(const CudaLinearBank& bank, const LinearParams& p, cudaStream_t stream) {
  const Epilogue epilogue = StreamEpilogueOf(p);
  // Banks with scales have one slice per sum.
  if constexpr (!Strips::kScaled) {
    if (bank.max_slices() > 1) {
      // Slices need more warps, so wide tiles have half of the outputs.
      using Sliced = StreamShape<Strips, (kStrips + 1) / 2, kNTiles, true>;
      // Products with slices are second matrices of experts, which have no activation.
      if (epilogue == Epilogue::kNone) {
        return LaunchShaped<Sliced, Epilogue::kNone>(bank, p, stream);
      }
      return LaunchShaped<Sliced, Epilogue::kAny>(bank, p, stream);
    }
  }
  using Shape = StreamShape<Strips, kStrips, kNTiles, false>;
  if (epilogue == Epilogue::kNone) return LaunchShaped<Shape, Epilogue::kNone>(bank, p, stream);
  // Published models with MXFP4 have no activation with a kernel of its own, those with FP8 have
  // gated experts.
  if constexpr (!std::is_same_v<Strips, Mxfp4Strips>) {
    if (epilogue == Epilogue::kGatedSilu) {
      return LaunchShaped<Shape, Epilogue::kGatedSilu>(bank, p, stream);
    }
  }
  if constexpr (std::is_same_v<Strips, Bf16Strips>) {
    if (epilogue == Epilogue::kGelu) return LaunchShaped<Shape, Epilogue::kGelu>(bank, p, stream);
  }
  LaunchShaped<Shape, Epilogue::kAny>(bank, p, stream);
}

template <typename Strips>
void LaunchStreamTile(const CudaLinearBank& bank, const LinearParams& p, LinearTile tile,
                      cudaStream_t stream) {
  switch (tile) {
    case LinearTile::kStream8x16:
      return LaunchStrips<Strips, 1, 1>(bank, p, stream);
    case LinearTile::kStream8x64:
      return LaunchStrips<Strips, 4, 1>(bank, p, stream);
    case LinearTile::kStream32x16:
      return LaunchStrips<Strips, 1, 4>(bank, p, stream);
    default:
      return LaunchStrips<Strips, 4, 4>(bank, p, stream);
  }
}

}  // namespace

namespace internal {

bool LinearStreamFits(const CudaLinearBank& bank, const LinearParams& p) {
  static const int major = DeviceAttribute(cudaDevAttrComputeCapabilityMajor);
  // Their number bounds the shared memory that the experts and the slices take.
  constexpr int kMostExperts = 512, kMostSlices = 8;
  return major == 9 && p.wide_input && p.experts <= kMostExperts &&
         bank.max_slices() <= kMostSlices;
}

void LaunchLinearStream(const CudaLinearBank& bank, const LinearParams& p, LinearTile tile,
                        cudaStream_t stream) {
  if (bank.is_fp8()) return LaunchStreamTile<Fp8Strips>(bank, p, tile, stream);
  bank.is_mxfp4() ? LaunchStreamTile<Mxfp4Strips>(bank, p, tile, stream)
                  : LaunchStreamTile<Bf16Strips>(bank, p, tile, stream);
}

}  // namespace internal
}  // namespace moeserve::cuda
