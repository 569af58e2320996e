// bf16 products by wgmma, for devices of compute capability 9.0 and many rows per expert.
//
// A block has one producer warpgroup and two or three consumer warpgroups of 64 rows each. The
// producer copies packed weights unchanged by bulk copies and gathers rows by cp.async; the
// consumers multiply. Blocks are persistent: warp 0 of the producer determines the next tile
// (linear_schedule.cuh) and passes it to all other warps. The producer starts to load the next tile
// while the consumers store the previous one.
//
// With paired tiles, the two blocks of a cluster compute adjacent rows of an expert by the same
// outputs. Each block copies half of the weights of a stage into the shared memory of both, so that
// the pair reads them once. A stage is free when the consumers of both blocks have released it.

#include <algorithm>
#include <type_traits>

#include "base/check.h"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/wgmma.cuh"
#include "kernels/cuda/linear/linear_fragment.cuh"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_schedule.cuh"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kBlockBytes = kImageBlock * kImageBlock * 2;
constexpr int kHalfBlockBytes = kBlockBytes / 2;
constexpr int kRowBytes = kImageBlock * 2;  // bytes of 64 inputs
constexpr int kWarpgroup = 128;
// The producer signals that a stage is full only after it has started the copies of two further
// stages, so that copies of three stages are in flight.
constexpr int kLag = 2;
// A tile may have a single stage. So when the producer waits for a slot in the ring of tiles, it
// may not have signalled the last two tiles; the consumers must be able to take those.
static_assert(TileSlots::kSlots >= kLag + 2);
constexpr int kPanelColumns = 32;  // number of packed rows staged at a time
constexpr int kPitch = kPanelColumns + 8;

// kSliced: sums may have several slices (SliceBlocks()), which takes a second set of registers.
// kPaired: the tiles of two blocks are paired.
template <int kConsumersArg, int kBlocksArg, int kStagesArg, LinearEpilogue kEpilogueArg,
          bool kSlicedArg, bool kPairedArg>
struct WgmmaShape {
  static constexpr bool kSliced = kSlicedArg;
  static constexpr bool kPaired = kPairedArg;
  static constexpr int kCluster = kPaired ? 2 : 1;
  static constexpr LinearEpilogue kEpilogue = kEpilogueArg;
  static constexpr int kConsumers = kConsumersArg;
  static constexpr int kThreads = kWarpgroup * (1 + kConsumers);
  // The general epilogue needs more registers. Then the producer has too few to search for the next
  // tile while it loads, and searches before. With three consumers there are too few for this
  // epilogue, and for pairs if the producer does not search before.
  static constexpr bool kGeneral = kEpilogue == LinearEpilogue::kGeneral;
  static constexpr bool kSearchesFirst = kGeneral || (kPaired && kConsumers == 3);
  static_assert(!kGeneral || (kConsumers == 2 && !kPaired));
  static constexpr int kProducerRegisters = kConsumers == 3 ? 80 : kGeneral ? 56 : 104;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 144 : kGeneral ? 224 : 200;
  // At first, every thread has the same number of registers, a multiple of 8.
  static constexpr int kRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                (1 + kConsumers) * kRegisters);
  static constexpr int kTileRows = 64 * kConsumers;
  static constexpr int kBlocks = kBlocksArg;  // number of blocks of 64 packed rows
  static constexpr int kTileImageRows = kBlocks * kImageBlock;
  static constexpr int kStages = kStagesArg;
  static constexpr int kRowsBytes = kTileRows * kRowBytes;
  static constexpr int kStageBytes = kRowsBytes + kBlocks * kBlockBytes;
  // The part of a consumer if a tile has rows for one only.
  static constexpr int kShare = kTileImageRows / kConsumers;
  // Only the general epilogue stages results.
  static constexpr int kStagedBytes =
      kEpilogue == LinearEpilogue::kGeneral ? 64 * kPitch * static_cast<int>(sizeof(float)) : 0;
  static constexpr int kTiles = kStages * kStageBytes + kConsumers * kStagedBytes;
  static constexpr int kBarriers = kTiles + static_cast<int>(sizeof(TileSlots));
  static constexpr int kMail = kBarriers + 2 * kStages * static_cast<int>(sizeof(uint64_t));
  static constexpr int kSharedBytes = kMail + (kPaired ? static_cast<int>(sizeof(MailSlots)) : 0);
  using Mail = std::conditional_t<kPaired, PairMail, NoMail>;
  using Schedule = TileSchedule<kCluster * kTileRows, kTileImageRows, Mail>;
  static_assert(kStages > kLag + 1);
  // The first block of a pair has copied the tile before the one whose successor it announces to
  // the second block, whose consumers are at most kStages tiles behind.
  static_assert(!kPaired || MailSlots::kSlots >= kStages + 2);
  static_assert(!kSliced || kBlocks == 2);
  static_assert(kShare % kPanelColumns == 0);
  static_assert(kSharedBytes <= 227 << 10);
};

// Returns the part of a pair's tile that the block of this rank computes. Its rows are divided in
// units of 64, so that the last tile of an expert occupies both blocks; the second one may have no
// rows.
__device__ __forceinline__ LinearTileRange PartOfPair(LinearTileRange tile, uint32_t rank) {
  const int first = (tile.rows + 127) / 128 * 64;
  if (rank == 0) {
    tile.rows = min(tile.rows, first);
  } else if (tile.rows > first) {
    tile.row += first;
    tile.rows -= first;
  } else {
    tile.rows = 0;
  }
  return tile;
}

// Tells the producers of the block, or of both blocks of a pair, that a warp has read a stage.
template <bool kPaired>
class StageRelease {
 public:
  __device__ explicit StageRelease(uint64_t* empty) : empty_(empty) {}
  // To be called by whole warps.
  __device__ __forceinline__ void operator()(int stage, int lane) const {
    if constexpr (kPaired) {
      const auto rank = static_cast<uint32_t>(lane);
      if (lane < 2) MbarrierReleaseCluster(ClusterAddress(empty_ + stage, rank));
    } else {
      if (lane == 0) MbarrierArrive(empty_ + stage);
    }
  }

 private:
  uint64_t* const empty_;
};

// Starts to copy `blocks` blocks of weights, `strip` bytes apart, into a stage. Each block of a
// pair copies half of them into both, and expects all of them. To be called by one thread.
template <typename S>
__device__ __forceinline__ void CopyWeights(char* to, const char* from, int64_t strip, int blocks,
                                            uint64_t* full) {
  MbarrierExpect(full, static_cast<uint32_t>(blocks * kBlockBytes));
  const uint32_t half = S::kPaired ? ClusterRank() * kHalfBlockBytes : 0;
  for (int b = 0; b < blocks; ++b) {
    if constexpr (S::kPaired) {
      CopyBulkMulticast(to + b * kBlockBytes + half, from + b * strip + half, kHalfBlockBytes, full,
                        3);
    } else {
      CopyBulkAsync(to + b * kBlockBytes, from + b * strip, kBlockBytes, full);
    }
  }
}

template <typename S>
__device__ void Produce(const LinearParams& p, char* shared, TileSlots* slots, uint64_t* full,
                        uint64_t* empty) {
  constexpr int kStep = kWarpgroup / 8;  // number of rows that all threads copy at once
  constexpr int kPieces = S::kTileRows / kStep;
  const int thread = static_cast<int>(threadIdx.x);
  const int piece = thread % 8;
  const bool leader = __shfl_sync(kFullMask, thread / 32, 0) == 0;
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
  TileWriter writer(slots);
  TileReader reader(slots);
  typename S::Schedule schedule(p, static_cast<int>(blockIdx.x) / S::kCluster,
                                static_cast<int>(gridDim.x) / S::kCluster,
                                typename S::Mail(writer, shared + S::kMail));
  bool more = false;  // whether the leader has put a tile that no Fetch() has followed
  const auto put = [&](const LinearTileRange& range) {
    writer.Put(p, S::kPaired ? PartOfPair(range, ClusterRank()) : range);
    more = range.expert >= 0;
  };
  if (leader) put(schedule.First());
  for (;;) {
    if (more) {
      schedule.Fetch();
      if constexpr (S::kSearchesFirst) put(schedule.Next());
    }
    const TileItem item = reader.Take();
    const LinearTileRange& tile = item.range;
    if (tile.expert < 0) break;
    const LinearBankEntry& m = item.matrix;
    const int first_block = tile.image_row / kImageBlock;
    const int blocks = min(S::kBlocks, m.row_blocks - first_block);
    const int64_t strip = static_cast<int64_t>(m.k_blocks) * kBlockBytes;
    const char* weights = p.weights + m.weights + first_block * strip;
    // Rows are loaded for all consumers that multiply. Rows beyond the last one repeat the last
    // row; their results are dropped.
    const int loaded = (tile.rows + 63) / 64 * 64;
    uint32_t rows[kPieces];  // offsets in units of 16 bytes, which take fewer registers
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      int r = min(thread / 8 + i * kStep, tile.rows - 1);
      if constexpr (S::kPaired) r = max(r, 0);  // there may be no rows
      rows[i] = static_cast<uint32_t>((LinearInputRow(p, tile, tile.row + r) - p.input) / 16);
    }
    for (int k = 0; k < m.k_blocks; ++k) {
      if constexpr (!S::kSearchesFirst) {
        // Now most stages are full, so that the consumers do not wait meanwhile.
        if (leader && k + 1 == m.k_blocks) put(schedule.Next());
      }
      MbarrierWait(empty + filling.stage, filling.parity ^ 1);
      char* stage = shared + filling.stage * S::kStageBytes;
      if (thread == 0) {
        CopyWeights<S>(stage + S::kRowsBytes, weights + static_cast<int64_t>(k) * kBlockBytes,
                       strip, blocks, full + filling.stage);
      }
      const int valid = min(16, max(0, m.in_features * 2 - k * kRowBytes - piece * 16));
      const char* column = p.input + k * kRowBytes + piece * 16;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (i * kStep >= loaded) break;
        const int r = thread / 8 + i * kStep;
        CopyAsync16(stage + r * kRowBytes + (piece ^ (r & 7)) * 16,
                    valid > 0 ? column + static_cast<uint64_t>(rows[i]) * 16 : p.input, valid);
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

// Stages the sums of one consumer in shared memory, a panel of packed rows at a time, and stores
// the results.
template <int kN>
__device__ void StoreStaged(const LinearParams& p, const LinearBankEntry& m, LinearTileRange tile,
                            const float (&sums)[kN / 2], float* staged, int barrier) {
  static_assert(kN % kPanelColumns == 0);
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;
#pragma unroll 1
  for (int panel = 0; panel < kN / kPanelColumns; ++panel) {
    if (tile.image_row >= m.row_blocks * kImageBlock) break;
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

// Computes one consumer's part of a tile: 64 rows by kN packed rows. `tile` describes that part.
// `rows_at` and `weights_at` are the byte offsets of its rows and weights in every stage.
template <typename S, int kN>
__device__ void ConsumeTile(const LinearParams& p, const LinearBankEntry& m, LinearTileRange tile,
                            const char* shared, int rows_at, int weights_at, uint64_t* full,
                            const StageRelease<S::kPaired>& release, float* staged, int barrier,
                            RingPosition<S::kStages>& reading) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int lane = thread % 32;
  float sums[kN / 2] = {};
  float totals[S::kSliced ? kN / 2 : 1] = {};
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
    if (k > 0) release(previous, lane);
    previous = reading.stage;
    reading.Advance();
    if constexpr (S::kSliced) {
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
  if constexpr (S::kSliced) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) sums[i] = totals[i];
  }
  release(previous, lane);
  const bool stored = StoreFragments<S::kEpilogue, kN>(p, m, tile, sums, thread);
  if constexpr (S::kEpilogue == LinearEpilogue::kGeneral) {
    if (!stored) StoreStaged<kN>(p, m, tile, sums, staged, barrier);
  }
}

// Releases the stages of a tile of which this consumer computes nothing.
template <typename S>
__device__ void SkipTile(int k_blocks, uint64_t* full, const StageRelease<S::kPaired>& release,
                         RingPosition<S::kStages>& reading) {
  for (int k = 0; k < k_blocks; ++k) {
    MbarrierWait(full + reading.stage, reading.parity);
    // Otherwise the stage could be filled again before the other lanes have seen this phase.
    __syncwarp();
    release(reading.stage, static_cast<int>(threadIdx.x) % 32);
    reading.Advance();
  }
}

template <typename S>
__device__ void Consume(const LinearParams& p, char* shared, TileSlots* slots, uint64_t* full,
                        uint64_t* empty, int consumer) {
  float* staged =
      reinterpret_cast<float*>(shared + S::kStages * S::kStageBytes + consumer * S::kStagedBytes);
  const StageRelease<S::kPaired> release(empty);
  RingPosition<S::kStages> reading;
  TileReader reader(slots);
  for (;;) {
    const TileItem item = reader.Take();
    LinearTileRange tile = item.range;
    if (tile.expert < 0) break;
    const LinearBankEntry& m = item.matrix;
    if (S::kPaired && tile.rows == 0) {
      // The other block computes the tile.
    } else if (tile.rows <= 64) {
      // The tile, the last one of an expert, has at most 64 rows. Each consumer computes a share of
      // the outputs for all of these rows.
      tile.image_row += consumer * S::kShare;
      if (tile.image_row < m.row_blocks * kImageBlock) {
        ConsumeTile<S, S::kShare>(p, m, tile, shared, 0,
                                  S::kRowsBytes + consumer * S::kShare * kRowBytes, full, release,
                                  staged, 1 + consumer, reading);
        continue;
      }
    } else if (consumer * 64 < tile.rows) {
      tile.row += consumer * 64;
      tile.rows = min(64, tile.rows - consumer * 64);
      ConsumeTile<S, S::kTileImageRows>(p, m, tile, shared, consumer * 64 * kRowBytes,
                                        S::kRowsBytes, full, release, staged, 1 + consumer,
                                        reading);
      continue;
    }
    SkipTile<S>(m.k_blocks, full, release, reading);
  }
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1) LinearWgmmaKernel(const LinearParams p) {
#if MOESERVE_HAS_SM90A
  char* shared = DynamicShared<char>();
  TileSlots* slots = reinterpret_cast<TileSlots*>(shared + S::kTiles);
  uint64_t* full = reinterpret_cast<uint64_t*>(shared + S::kBarriers);
  uint64_t* empty = full + S::kStages;
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      MbarrierInit(full + s, kWarpgroup);
      MbarrierInit(empty + s, S::kCluster * S::kConsumers * kWarpgroup / 32);
    }
    slots->Init(S::kThreads / 32);
    if constexpr (S::kPaired) reinterpret_cast<MailSlots*>(shared + S::kMail)->Init();
    MbarrierInitFence();
  }
  GridDependencyPass();
  if constexpr (S::kPaired) {
    __syncwarp();
    ClusterSync();
  } else {
    __syncthreads();
  }
  // The shuffle makes the value uniform within a warp in a way that the compiler can prove.
  const int warpgroup = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    DecreaseRegisters<S::kProducerRegisters>();
    Produce<S>(p, shared, slots, full, empty);
  } else {
    IncreaseRegisters<S::kConsumerRegisters>();
    Consume<S>(p, shared, slots, full, empty, warpgroup - 1);
  }
  if constexpr (S::kPaired) {
    // The other block may still copy to this one and arrive at its barriers.
    __syncwarp();
    ClusterSync();
  }
#else
  // If this was compiled for 9.0 without the instructions of 9.0a, the kernel stops instead of
  // leaving the output unwritten.
  __trap();
#endif
}

template <int kConsumers, int kBlocks, int kStages, LinearEpilogue kEpilogue, bool kPaired = false,
          bool kSliced = false>
void LaunchShaped(const CudaLinearBank& bank, LinearParams p, TileOrder order,
                  cudaStream_t stream) {
  using S = WgmmaShape<kConsumers, kBlocks, kStages, kEpilogue, kSliced, kPaired>;
  const int workers = std::max(1, DeviceAttribute(cudaDevAttrMultiProcessorCount) / S::kCluster);
  const int64_t tiles =
      internal::MaxLinearTiles(bank, p.rows, S::kCluster * S::kTileRows, S::kTileImageRows);
  MOESERVE_CHECK(tiles <= INT32_MAX - workers, "tiles of a linear layer");
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, workers) * S::kCluster);
  if (order != TileOrder::kFixed && tiles > workers) p.counter = bank.tile_counters().Of(stream);
  Launch(
      LinearWgmmaKernel<S>,
      LaunchShape{dim3(grid), dim3(S::kThreads), S::kSharedBytes, stream, true, dim3(S::kCluster)},
      p);
}

// Selects the epilogue.
template <int kConsumers, int kBlocks, int kStages, bool kPaired = false>
void LaunchTile(const CudaLinearBank& bank, const LinearParams& p, TileOrder order,
                cudaStream_t stream) {
  const auto launch = [&]<LinearEpilogue kEpilogue>() {
    LaunchShaped<kConsumers, kBlocks, kStages, kEpilogue, kPaired>(bank, p, order, stream);
  };
  switch (EpilogueOf(p)) {
    case LinearEpilogue::kGeneral:
      if constexpr (kConsumers == 3) {
        return LaunchTile<2, 3, 5>(bank, p, order, stream);
      } else if constexpr (kPaired) {
        return LaunchTile<kConsumers, kBlocks, kStages>(bank, p, order, stream);
      } else {
        return launch.template operator()<LinearEpilogue::kGeneral>();
      }
    case LinearEpilogue::kNone:
      return launch.template operator()<LinearEpilogue::kNone>();
    case LinearEpilogue::kF32:
      return launch.template operator()<LinearEpilogue::kF32>();
    case LinearEpilogue::kRelu:
      return launch.template operator()<LinearEpilogue::kRelu>();
    case LinearEpilogue::kGelu:
      return launch.template operator()<LinearEpilogue::kGelu>();
    case LinearEpilogue::kGeluTanh:
      return launch.template operator()<LinearEpilogue::kGeluTanh>();
    case LinearEpilogue::kSiluGated:
      return launch.template operator()<LinearEpilogue::kSiluGated>();
  }
}

// The same for sums with slices, whose products rarely have an activation. The general epilogue
// would have too few registers.
void LaunchSliced(const CudaLinearBank& bank, const LinearParams& p, TileOrder order,
                  cudaStream_t stream) {
  switch (EpilogueOf(p)) {
    case LinearEpilogue::kNone:
      return LaunchShaped<2, 2, 6, LinearEpilogue::kNone, false, true>(bank, p, order, stream);
    case LinearEpilogue::kF32:
      return LaunchShaped<2, 2, 6, LinearEpilogue::kF32, false, true>(bank, p, order, stream);
    default:
      return internal::LaunchLinearMma(bank, p, LinearTile::kRows64, stream);
  }
}

// Returns the tile for `row_blocks` blocks of outputs. Wide tiles read less memory per product, and
// are faster even if they leave multiprocessors idle. Narrow tiles are for narrow layers and for
// very few tiles. Tiles of 192 are for layers that fill tiles of 256 badly.
LinearTile ChooseWarpgroupTile(const CudaLinearBank& bank, int64_t rows) {
  constexpr int64_t kFewTiles = 64;
  const int blocks = bank.max_row_blocks();
  const auto tiles = [&](int image_rows) {
    return internal::MaxLinearTiles(bank, rows, 128, image_rows);
  };
  const int by_three = (blocks + 2) / 3 * 3, by_four = (blocks + 3) / 4 * 4;
  if (blocks > 2 && by_three * 8 <= by_four * 7 && tiles(192) >= kFewTiles) {
    return LinearTile::kWarpgroup192;
  }
  return blocks > 2 && tiles(256) >= kFewTiles ? LinearTile::kWarpgroup256
                                               : LinearTile::kWarpgroup128;
}

}  // namespace

namespace internal {

bool LinearWgmmaFits(const LinearParams& p) {
  static const int major = DeviceAttribute(cudaDevAttrComputeCapabilityMajor);
  return major == 9 && p.wide_input;
}

bool LinearPairsFit(const CudaLinearBank& bank, const LinearParams& p) {
  return LinearWgmmaFits(p) && HasClusters() && bank.max_slices() == 1 &&
         EpilogueOf(p) != LinearEpilogue::kGeneral;
}

void LaunchLinearWgmma(const CudaLinearBank& bank, const LinearParams& p, LinearTile tile,
                       TileOrder order, cudaStream_t stream) {
  if (bank.max_slices() > 1) return LaunchSliced(bank, p, order, stream);
  if (tile == LinearTile::kWarpgroup) tile = ChooseWarpgroupTile(bank, p.rows);
  switch (tile) {
    case LinearTile::kWarpgroup256:
      return LaunchTile<2, 4, 4>(bank, p, order, stream);
    case LinearTile::kWarpgroup192:
      return LaunchTile<2, 3, 5>(bank, p, order, stream);
    case LinearTile::kWarpgroup192x192:
      return LaunchTile<3, 3, 4>(bank, p, order, stream);
    case LinearTile::kWarpgroup256Pair:
      return LaunchTile<2, 4, 4, true>(bank, p, order, stream);
    case LinearTile::kWarpgroup192x192Pair:
      return LaunchTile<3, 3, 4, true>(bank, p, order, stream);
    default:
      return LaunchTile<2, 2, 6>(bank, p, order, stream);
  }
}

}  // namespace internal
}  // namespace moeserve::cuda
