// Products of bf16 rows with MXFP4 weights by mma.sync (linear_mma.cuh). A warp widens the weights
// of its outputs in registers; the rows and the chains of products are those of bf16 weights.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_mma.cuh"
#include "kernels/cuda/linear/mxfp4_widen.cuh"
#include "kernels/cuda/quantized/linear_mxfp4.h"
#include "kernels/cuda/quantized/linear_mxfp4_kernels.h"

namespace moeserve::cuda {
namespace {

// A tile as MmaShape, whose stages have strips of MXFP4 and then the rows.
template <int kTileRowsArg, int kWarpsAcrossArg, int kWarpsDownArg, int kMTilesArg, int kStagesArg,
          int kBlocksPerMultiprocessorArg>
struct Mxfp4Shape : MmaShape<Bf16Operands, kTileRowsArg, kWarpsAcrossArg, kWarpsDownArg, kMTilesArg,
                             kStagesArg, kBlocksPerMultiprocessorArg> {
  using Base = MmaShape<Bf16Operands, kTileRowsArg, kWarpsAcrossArg, kWarpsDownArg, kMTilesArg,
                        kStagesArg, kBlocksPerMultiprocessorArg>;
  static constexpr int kStrips = Base::kTileImageRows / kMxfp4StripRows;
  static constexpr int kWeightBytes = kStrips * kMxfp4StripBytes;
  static constexpr int kStageBytes = kWeightBytes + kTileRowsArg * kMmaRowBytes;
  static constexpr int kSharedBytes = std::max(kStagesArg * kStageBytes, Base::kStagedBytes);
};

// What StageLoader needs to load the rows of a tile, and no weights before them.
template <typename S>
struct Mxfp4Rows {
  using Operands = Bf16Operands;
  static constexpr int kTileImageRows = 0;
  static constexpr int kThreads = S::kThreads;
  static constexpr int kRowPieces = S::kRowPieces;
};

// One thread's part of the copies of weights into the stages.
template <typename S>
class Mxfp4Loader {
 public:
  __device__ Mxfp4Loader(const LinearParams& p, const LinearBankEntry& m,
                         const LinearTileRange& tile) {
    const int first = tile.image_row / kImageBlock;
    const char* const strips =
        p.weights + m.weights + tile.image_row % kImageBlock / kMxfp4StripRows * kMxfp4StripBytes;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = (static_cast<int>(threadIdx.x) + i * S::kThreads) * 16;
      const int block = first + at / kMxfp4BlockBytes;
      // If a tile of two blocks has no second block, it loads the first one again and drops the
      // results.
      const int present = block < m.row_blocks ? block : block - 1;
      from_[i] = strips + static_cast<int64_t>(present) * m.k_blocks * kMxfp4BlockBytes +
                 at % kMxfp4BlockBytes;
    }
  }

  // Copies the weights of the next block of inputs into `stage`.
  __device__ void Load(char* stage) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = (static_cast<int>(threadIdx.x) + i * S::kThreads) * 16;
      if (at < S::kWeightBytes) CopyAsync16(stage + at, from_[i]);
      from_[i] += kMxfp4BlockBytes;
    }
  }

 private:
  static constexpr int kPieces = (S::kWeightBytes / 16 + S::kThreads - 1) / S::kThreads;
  const char* from_[kPieces];
};

template <typename S>
__device__ __forceinline__ void MultiplyMxfp4Stage(const char* stage, int valid_n_tiles,
                                                   typename S::Sums& sums) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int across = thread / 32 % S::kWarpsAcross;
  const int down = thread / 32 / S::kWarpsAcross;
  const char* const strips = stage + across * S::kMTiles * kMxfp4StripBytes;
  const char* const rows = stage + S::kWeightBytes + down * S::kNTiles * 8 * kMmaRowBytes;
  constexpr int kSteps = kImageBlock / 16;
  Mxfp4Lane weights[S::kMTiles];
#pragma unroll
  for (int mt = 0; mt < S::kMTiles; ++mt) weights[mt].Load(strips + mt * kMxfp4StripBytes);
  if constexpr (S::kNTiles == 1) {
    // With a single chain of products, all operands come first, so that the chain waits for shared
    // memory only once.
    static_assert(S::kMTiles == 1);
    uint32_t a[kSteps][4], b[kSteps / 2][4];
#pragma unroll
    for (int k32 = 0; k32 < kSteps / 2; ++k32) {
      const int piece = (k32 * 4 + lane / 8) ^ (lane & 7);
      LoadMatrix4(b[k32], rows + lane % 8 * kMmaRowBytes + piece * 16);
    }
#pragma unroll
    for (int k16 = 0; k16 < kSteps; ++k16) weights[0].Widen(k16, a[k16]);
#pragma unroll
    for (int k16 = 0; k16 < kSteps; ++k16) {
      const uint32_t(&both)[4] = b[k16 / 2];
      const uint32_t own[2] = {both[k16 % 2 * 2], both[k16 % 2 * 2 + 1]};
      MmaBf16(sums[0][0], a[k16], own);
    }
  } else {
#pragma unroll
    for (int k16 = 0; k16 < kSteps; ++k16) {
      uint32_t a[S::kMTiles][4];
#pragma unroll
      for (int mt = 0; mt < S::kMTiles; ++mt) weights[mt].Widen(k16, a[mt]);
#pragma unroll
      for (int pair = 0; pair < S::kNTiles / 2; ++pair) {
        if (pair * 2 >= valid_n_tiles) break;
        const int row = pair * 16 + lane % 8 + lane / 16 * 8;
        const int piece = (k16 * 2 + lane / 8 % 2) ^ (row & 7);
        uint32_t both[4];
        LoadMatrix4(both, rows + row * kMmaRowBytes + piece * 16);
        const uint32_t first[2] = {both[0], both[1]};
        const uint32_t second[2] = {both[2], both[3]};
#pragma unroll
        for (int mt = 0; mt < S::kMTiles; ++mt) {
          MmaBf16(sums[mt][pair * 2], a[mt], first);
          MmaBf16(sums[mt][pair * 2 + 1], a[mt], second);
        }
      }
    }
  }
}

// Adds the sums of a slice to those of the slices before it, and clears them.
template <typename S>
__device__ __forceinline__ void EndMxfp4Slice(typename S::Sums& totals, typename S::Sums& sums) {
#pragma unroll
  for (int mt = 0; mt < S::kMTiles; ++mt) {
#pragma unroll
    for (int nt = 0; nt < S::kNTiles; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        totals[mt][nt][i] += sums[mt][nt][i];
        sums[mt][nt][i] = 0.0f;
      }
    }
  }
}

// As SumProducts() of linear_mma.cuh. The sums of slices are added to `totals` if kSliced.
template <typename S, bool kWide, bool kSliced>
__device__ __forceinline__ void SumMxfp4Products(const LinearParams& p, const LinearBankEntry& m,
                                                 const LinearTileRange& tile, char* shared,
                                                 typename S::Sums& sums, typename S::Sums& totals) {
  Mxfp4Loader<S> weights(p, m, tile);
  StageLoader<Mxfp4Rows<S>> rows(p, m, tile);
  const auto load_rows = [&](char* stage) {
    rows.template LoadRows<kWide>(stage + S::kWeightBytes);
  };
#pragma unroll 1
  for (int s = 0; s < min(S::kStages - 1, m.k_blocks); ++s) {
    weights.Load(shared + s * S::kStageBytes);
  }
  // The copies of weights were started before this wait, because weights do not depend on earlier
  // kernels.
  GridDependencyPass();
#pragma unroll 1
  for (int s = 0; s < S::kStages - 1; ++s) {
    if (s < m.k_blocks) load_rows(shared + s * S::kStageBytes);
    CopyAsyncCommit();
  }
  const int down = static_cast<int>(threadIdx.x) / 32 / S::kWarpsAcross;
  const int valid_n_tiles = (tile.rows - down * S::kNTiles * 8 + 7) / 8;
  int stage = 0, in_slice = 0;
#pragma unroll 1
  for (int k = 0; k < m.k_blocks; ++k) {
    CopyAsyncWait<S::kStages - 2>();
    __syncthreads();  // afterwards all copies for stage k are visible, and no thread reads stage k
                      // - 1
    if (k + S::kStages - 1 < m.k_blocks) {
      char* const free = shared + (stage == 0 ? S::kStages - 1 : stage - 1) * S::kStageBytes;
      weights.Load(free);
      load_rows(free);
    }
    CopyAsyncCommit();
    MultiplyMxfp4Stage<S>(shared + stage * S::kStageBytes, valid_n_tiles, sums);
    if (kSliced && (++in_slice == m.slice_blocks || k + 1 == m.k_blocks)) {
      EndMxfp4Slice<S>(totals, sums);
      in_slice = 0;
    }
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
  }
  CopyAsyncWait<0>();
  __syncthreads();
}

// kSliced: sums may have several slices (SliceBlocks()).
template <typename S, bool kWide, bool kSliced>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerMultiprocessor)
    LinearMxfp4Kernel(const LinearParams p) {
  if (HasTileList(p)) GridDependencyWait();
  const LinearTileRange tile =
      FindLinearTile<S::kTileRows, S::kTileImageRows>(p, static_cast<int>(blockIdx.x));
  if (tile.expert < 0) return;
  const LinearBankEntry m = p.entries[tile.expert];
  char* shared = DynamicShared<char>();
  typename S::Sums sums = {}, totals = {};
  SumMxfp4Products<S, kWide, kSliced>(p, m, tile, shared, sums, totals);
  float* staged = reinterpret_cast<float*>(shared);
  StageSums<S>(kSliced ? totals : sums, staged, [](int, int, float sum) { return sum; });
  __syncthreads();
  StoreLinearTile<S::kTileImageRows, S::kPitch, S::kThreads>(p, m, tile, staged,
                                                             static_cast<int>(threadIdx.x));
}

template <typename S, bool kWide = true>
void LaunchMxfp4Shaped(const CudaLinearBank& bank, const LinearParams& p, cudaStream_t stream) {
  const int64_t tiles = internal::MaxLinearTiles(bank, p.rows, S::kTileRows, S::kTileImageRows);
  MOESERVE_CHECK(tiles <= INT32_MAX, "tiles of a linear layer");
  const LaunchShape shape{dim3(static_cast<unsigned>(tiles)), dim3(S::kThreads), S::kSharedBytes,
                          stream, true};
  if constexpr (S::kTileRows < 128) {
    if (bank.max_slices() > 1) return Launch(LinearMxfp4Kernel<S, kWide, true>, shape, p);
  }
  Launch(LinearMxfp4Kernel<S, kWide, false>, shape, p);
}

// As MmaShapes, with more stages and blocks, because a stage is smaller.
using Mxfp4Rows8Slice = Mxfp4Shape<8, 1, 1, 1, 8, 12>;
using Mxfp4Rows8 = Mxfp4Shape<8, 4, 1, 1, 10, 5>;
using Mxfp4Rows16 = Mxfp4Shape<16, 4, 1, 1, 8, 5>;
using Mxfp4Rows32 = Mxfp4Shape<32, 4, 1, 1, 7, 4>;
using Mxfp4Rows64Narrow = Mxfp4Shape<64, 4, 1, 1, 5, 3>;
using Mxfp4Rows64 = Mxfp4Shape<64, 4, 2, 2, 5, 2>;
using Mxfp4Rows128 = Mxfp4Shape<128, 4, 2, 2, 4, 2>;

// With fewer tiles of one block of outputs than this, narrower tiles use more multiprocessors.
constexpr int64_t kFewMxfp4Tiles = 96;

// With fewer tiles of one block of outputs than this, narrower ones use more multiprocessors.
constexpr int64_t kFewestWideStreams = 264;

// Returns the tile that is expected to be the fastest. The thresholds are those of bf16 products;
// they have not been measured for MXFP4.
LinearTile ChooseMxfp4Tile(const CudaLinearBank& bank, const LinearParams& p) {
  const int64_t experts = bank.num_experts();
  const int64_t wanted = experts == 1 ? p.expected : int64_t{p.expected} * 3 / 2 / experts;
  if (wanted <= 32 && internal::LinearStreamFits(bank, p)) {
    const bool few_rows = wanted <= 8;
    const bool wide = internal::MaxLinearTiles(bank, p.expected, few_rows ? 8 : 32, kImageBlock) >=
                      kFewestWideStreams;
    if (few_rows) return wide ? LinearTile::kStream8x64 : LinearTile::kStream8x16;
    return wide ? LinearTile::kStream32x64 : LinearTile::kStream32x16;
  }
  struct Candidate {
    LinearTile tile;
    int rows, outputs;
    int64_t fewest_tiles;
  };
  constexpr Candidate kCandidates[] = {{LinearTile::kRows128, 128, 2 * kImageBlock, 200},
                                       {LinearTile::kRows64, 64, kImageBlock, 264},
                                       {LinearTile::kRows32, 32, kImageBlock, 200},
                                       {LinearTile::kRows16, 16, kImageBlock, 200}};
  for (const Candidate& c : kCandidates) {
    // A tile is at least half full, and there are enough of them.
    if (wanted > c.rows / 2 &&
        internal::MaxLinearTiles(bank, p.expected, c.rows, c.outputs) >= c.fewest_tiles) {
      return c.tile;
    }
  }
  return LinearTile::kRows8;
}

void LaunchMxfp4Tile(const CudaLinearBank& bank, const LinearParams& p, LinearTile tile,
                     cudaStream_t stream) {
  // Rows that are not 16-byte aligned use a single tile shape, which loads element by element.
  if (!p.wide_input) return LaunchMxfp4Shaped<Mxfp4Rows32, false>(bank, p, stream);
  switch (tile) {
    case LinearTile::kRows8:
      if (internal::MaxLinearTiles(bank, p.rows, 8, kImageBlock) < kFewMxfp4Tiles) {
        return LaunchMxfp4Shaped<Mxfp4Rows8Slice>(bank, p, stream);
      }
      return LaunchMxfp4Shaped<Mxfp4Rows8>(bank, p, stream);
    case LinearTile::kRows16:
      return LaunchMxfp4Shaped<Mxfp4Rows16>(bank, p, stream);
    case LinearTile::kRows32:
      return LaunchMxfp4Shaped<Mxfp4Rows32>(bank, p, stream);
    case LinearTile::kRows64:
      if (internal::MaxLinearTiles(bank, p.rows, 64, 2 * kImageBlock) < 2 * kFewMxfp4Tiles) {
        return LaunchMxfp4Shaped<Mxfp4Rows64Narrow>(bank, p, stream);
      }
      return LaunchMxfp4Shaped<Mxfp4Rows64>(bank, p, stream);
    default:
      // A second set of sums for slices does not fit into the registers of the largest tiles.
      if (bank.max_slices() > 1) return LaunchMxfp4Shaped<Mxfp4Rows64>(bank, p, stream);
      return LaunchMxfp4Shaped<Mxfp4Rows128>(bank, p, stream);
  }
}

}  // namespace

void LaunchLinearMxfp4(const LinearArgs& args, LinearTile tile, cudaStream_t stream) {
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  MOESERVE_CHECK(bank.is_mxfp4() && bank.holds_weights(), "a bank of MXFP4 with its weights");
  MOESERVE_CHECK(args.input.dtype == DType::kBF16, "MXFP4 takes bf16 rows");
  const LinearParams params = internal::LinearParamsOf(args);
  if (params.rows == 0) return;
  if (tile == LinearTile::kAuto) tile = ChooseMxfp4Tile(bank, params);
  MOESERVE_CHECK(tile >= LinearTile::kRows8 && tile <= LinearTile::kWarpgroup, "a tile of MXFP4");
  if (tile == LinearTile::kWarpgroup) {
    if (internal::LinearMxfp4WgmmaFits(bank, params)) {
      return internal::LaunchLinearMxfp4Wgmma(bank, params, stream);
    }
    tile = LinearTile::kRows128;
  }
  if (tile > LinearTile::kRows128) {
    if (internal::LinearStreamFits(bank, params)) {
      return internal::LaunchLinearStream(bank, params, tile, stream);
    }
    tile = tile <= LinearTile::kStream8x64 ? LinearTile::kRows8 : LinearTile::kRows32;
  }
  LaunchMxfp4Tile(bank, params, tile, stream);
}

std::vector<LinearTile> Mxfp4TilesThatFit(const LinearArgs& args) {
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  if (!bank.is_mxfp4() || args.input.dtype != DType::kBF16) return {};
  const LinearParams params = internal::LinearParamsOf(args);
  if (!params.wide_input) return {};
  const LinearTile last =
      internal::LinearStreamFits(bank, params) ? LinearTile::kStream32x64 : LinearTile::kRows128;
  std::vector<LinearTile> tiles;
  for (auto i = static_cast<int>(LinearTile::kRows8); i <= static_cast<int>(last); ++i) {
    tiles.push_back(static_cast<LinearTile>(i));
  }
  if (internal::LinearMxfp4WgmmaFits(bank, params)) tiles.push_back(LinearTile::kWarpgroup);
  return tiles;
}

LinearTile DefaultMxfp4Tile(const LinearArgs& args) {
  return ChooseMxfp4Tile(static_cast<const CudaLinearBank&>(*args.bank),
                         internal::LinearParamsOf(args));
}

}  // namespace moeserve::cuda
