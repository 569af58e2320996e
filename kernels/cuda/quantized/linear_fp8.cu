// Products of bf16 rows with FP8 weights by mma.sync (linear_mma.cuh). A warp widens the weights of
// its outputs in registers, without their scales, and scales the sum of the products of 128 inputs.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/linear/fp8_widen.cuh"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_mma.cuh"
#include "kernels/cuda/quantized/linear_fp8.h"
#include "kernels/cuda/quantized/linear_fp8_kernels.h"

namespace moeserve::cuda {
namespace {

constexpr int kFp8PairBytes = 2 * kFp8BlockBytes;  // of 64 packed rows x 128 inputs

// A tile as MmaShape, whose stages have 128 inputs: the pairs of blocks of the tile's outputs, then
// the first 64 inputs of the rows, then the others.
template <int kTileRowsArg, int kWarpsAcrossArg, int kWarpsDownArg, int kMTilesArg, int kStagesArg,
          int kBlocksPerMultiprocessorArg>
struct Fp8Shape : MmaShape<Bf16Operands, kTileRowsArg, kWarpsAcrossArg, kWarpsDownArg, kMTilesArg,
                           kStagesArg, kBlocksPerMultiprocessorArg> {
  using Base = MmaShape<Bf16Operands, kTileRowsArg, kWarpsAcrossArg, kWarpsDownArg, kMTilesArg,
                        kStagesArg, kBlocksPerMultiprocessorArg>;
  static constexpr int kTileBlocks = Base::kTileImageRows / kImageBlock;
  static constexpr int kWeightBytes = kTileBlocks * kFp8PairBytes;
  static constexpr int kHalfRowsBytes = kTileRowsArg * kMmaRowBytes;
  static constexpr int kStageBytes = kWeightBytes + 2 * kHalfRowsBytes;
  static constexpr int kSharedBytes = std::max(kStagesArg * kStageBytes, Base::kStagedBytes);
  static_assert(kTileBlocks == 1 || kTileBlocks == 2);
};

// What StageLoader needs to load the rows of a tile, and no weights before them.
template <typename S>
struct Fp8Rows {
  using Operands = Bf16Operands;
  static constexpr int kTileImageRows = 0;
  static constexpr int kThreads = S::kThreads;
  static constexpr int kRowPieces = S::kRowPieces;
};

// One thread's part of the copies of weights into the stages.
template <typename S>
class Fp8Loader {
 public:
  __device__ Fp8Loader(const LinearParams& p, const LinearBankEntry& m,
                       const LinearTileRange& tile) {
    const int first = tile.image_row / kImageBlock;
    const int strip = m.k_blocks * kFp8BlockBytes;
    from_ = p.weights + m.weights + int64_t{first} * strip + static_cast<int>(threadIdx.x) * 16;
    // If a tile of two blocks has no second block, it loads the first one again and drops the
    // results.
    to_second_ = (first + 1 < m.row_blocks ? strip : 0) - kFp8PairBytes;
  }

  // Copies the weights of the next 128 inputs into `stage`.
  __device__ void Load(char* stage) {
#pragma unroll
    for (int i = 0; i < (S::kWeightBytes / 16 + S::kThreads - 1) / S::kThreads; ++i) {
      const int at = (static_cast<int>(threadIdx.x) + i * S::kThreads) * 16;
      const int second = S::kTileBlocks > 1 && at >= kFp8PairBytes ? to_second_ : 0;
      if (at < S::kWeightBytes) CopyAsync16(stage + at, from_ + i * S::kThreads * 16 + second);
    }
    from_ += kFp8PairBytes;
  }

 private:
  const char* from_;
  int to_second_;
};

// Sums the products of 64 inputs. `strips` are those of the warp's outputs, `rows` its rows.
template <typename S>
__device__ __forceinline__ void MultiplyFp8Half(const char* strips, const char* rows,
                                                int valid_n_tiles, typename S::Sums& sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kSteps = kImageBlock / 16;
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
    for (int half = 0; half < 2; ++half) {
      Fp8Lane weights;
      weights.Load(strips, half);
      weights.Widen(0, a[half * 2]);
      weights.Widen(1, a[half * 2 + 1]);
    }
#pragma unroll
    for (int k16 = 0; k16 < kSteps; ++k16) {
      const uint32_t(&both)[4] = b[k16 / 2];
      const uint32_t own[2] = {both[k16 % 2 * 2], both[k16 % 2 * 2 + 1]};
      MmaBf16(sums[0][0], a[k16], own);
    }
  } else {
    Fp8Lane weights[S::kMTiles];
#pragma unroll
    for (int k16 = 0; k16 < kSteps; ++k16) {
      uint32_t a[S::kMTiles][4];
#pragma unroll
      for (int mt = 0; mt < S::kMTiles; ++mt) {
        if (k16 % 2 == 0) weights[mt].Load(strips + mt * kFp8StripBytes, k16 / 2);
        weights[mt].Widen(k16 % 2, a[mt]);
      }
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

// Adds the scaled sums of the 128 inputs of a stage to `totals`.
template <typename S>
__device__ __forceinline__ void MultiplyFp8Stage(const char* stage, int valid_n_tiles,
                                                 typename S::Sums& totals) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int strip = warp % S::kWarpsAcross * S::kMTiles;  // of the tile's strips, the warp's first
  constexpr int kStripsOfBlock = kImageBlock / kFp8StripRows;
  static_assert(kStripsOfBlock % S::kMTiles == 0);
  const char* const strips =
      stage + strip / kStripsOfBlock * kFp8PairBytes + strip % kStripsOfBlock * kFp8StripBytes;
  const char* const rows =
      stage + S::kWeightBytes + warp / S::kWarpsAcross * S::kNTiles * 8 * kMmaRowBytes;
  typename S::Sums sums = {};
  MultiplyFp8Half<S>(strips, rows, valid_n_tiles, sums);
  MultiplyFp8Half<S>(strips + kFp8BlockBytes, rows + S::kHalfRowsBytes, valid_n_tiles, sums);
#pragma unroll
  for (int mt = 0; mt < S::kMTiles; ++mt) {
    const char* const own = strips + mt * kFp8StripBytes;
    const float scales[2] = {Fp8Lane::Scale(own), Fp8Lane::Scale(own + kFp8BlockBytes)};
#pragma unroll
    for (int nt = 0; nt < S::kNTiles; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        totals[mt][nt][i] = __fmaf_rn(sums[mt][nt][i], scales[i / 2], totals[mt][nt][i]);
      }
    }
  }
}

// As SumProducts() of linear_mma.cuh.
template <typename S, bool kWide>
__device__ __forceinline__ void SumFp8Products(const LinearParams& p, const LinearBankEntry& m,
                                               const LinearTileRange& tile, char* shared,
                                               typename S::Sums& totals) {
  Fp8Loader<S> weights(p, m, tile);
  StageLoader<Fp8Rows<S>> rows(p, m, tile);
  const auto load_rows = [&](char* stage) {
    rows.template LoadRows<kWide>(stage + S::kWeightBytes);
    rows.template LoadRows<kWide>(stage + S::kWeightBytes + S::kHalfRowsBytes);
  };
  const int pairs = m.k_blocks / 2;
#pragma unroll 1
  for (int s = 0; s < min(S::kStages - 1, pairs); ++s) weights.Load(shared + s * S::kStageBytes);
  // The copies of weights were started before this wait, because weights do not depend on earlier
  // kernels.
  GridDependencyPass();
#pragma unroll 1
  for (int s = 0; s < S::kStages - 1; ++s) {
    if (s < pairs) load_rows(shared + s * S::kStageBytes);
    CopyAsyncCommit();
  }
  const int down = static_cast<int>(threadIdx.x) / 32 / S::kWarpsAcross;
  const int valid_n_tiles = (tile.rows - down * S::kNTiles * 8 + 7) / 8;
  int stage = 0;
#pragma unroll 1
  for (int k = 0; k < pairs; ++k) {
    CopyAsyncWait<S::kStages - 2>();
    __syncthreads();  // afterwards all copies for stage k are visible, and no thread reads stage k
                      // - 1
    if (k + S::kStages - 1 < pairs) {
      char* const free = shared + (stage == 0 ? S::kStages - 1 : stage - 1) * S::kStageBytes;
      weights.Load(free);
      load_rows(free);
    }
    CopyAsyncCommit();
    MultiplyFp8Stage<S>(shared + stage * S::kStageBytes, valid_n_tiles, totals);
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
  }
  CopyAsyncWait<0>();
  __syncthreads();
}

template <typename S, bool kWide>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerMultiprocessor)
    LinearFp8Kernel(const LinearParams p) {
  if (HasTileList(p)) GridDependencyWait();
  const LinearTileRange tile =
      FindLinearTile<S::kTileRows, S::kTileImageRows>(p, static_cast<int>(blockIdx.x));
  if (tile.expert < 0) return;
  char* shared = DynamicShared<char>();
  typename S::Sums totals = {};
  SumFp8Products<S, kWide>(p, p.entries[tile.expert], tile, shared, totals);
  // Read again, so that it takes no registers during the products.
  const LinearBankEntry m = p.entries[tile.expert];
  float* staged = reinterpret_cast<float*>(shared);
  StageSums<S>(totals, staged, [](int, int, float sum) { return sum; });
  __syncthreads();
  StoreLinearTile<S::kTileImageRows, S::kPitch, S::kThreads>(p, m, tile, staged,
                                                             static_cast<int>(threadIdx.x));
}

template <typename S, bool kWide = true>
void LaunchFp8Shaped(const CudaLinearBank& bank, const LinearParams& p, cudaStream_t stream) {
  const int64_t tiles = internal::MaxLinearTiles(bank, p.rows, S::kTileRows, S::kTileImageRows);
  MOESERVE_CHECK(tiles <= INT32_MAX, "tiles of a linear layer");
  Launch(LinearFp8Kernel<S, kWide>,
         LaunchShape{dim3(static_cast<unsigned>(tiles)), dim3(S::kThreads), S::kSharedBytes, stream,
                     true},
         p);
}

// The template arguments are those of MmaShapes. The stages of a block fit into 99 KiB, which
// devices of compute capability 8.6 have.
using Fp8Rows8 = Fp8Shape<8, 4, 1, 1, 6, 3>;
using Fp8Rows16 = Fp8Shape<16, 4, 1, 1, 5, 3>;
using Fp8Rows32 = Fp8Shape<32, 4, 1, 1, 4, 3>;
using Fp8Rows64Narrow = Fp8Shape<64, 4, 1, 1, 4, 2>;
using Fp8Rows64 = Fp8Shape<64, 4, 2, 2, 3, 2>;
// Two sets of sums take more registers than half of a multiprocessor has.
using Fp8Rows128 = Fp8Shape<128, 4, 2, 2, 2, 1>;

// With fewer tiles of one block of outputs than this, narrower ones use more multiprocessors.
constexpr int64_t kFewFp8Tiles = 192, kFewWideFp8Streams = 264;

// Returns the tile that is expected to be the fastest. The thresholds are those of bf16 products;
// they have not been measured for FP8.
LinearTile ChooseFp8Tile(const CudaLinearBank& bank, const LinearParams& p) {
  const int64_t experts = bank.num_experts();
  const int64_t wanted = experts == 1 ? p.expected : int64_t{p.expected} * 3 / 2 / experts;
  if (wanted <= 32 && internal::LinearStreamFits(bank, p)) {
    const bool few_rows = wanted <= 8;
    const bool wide = internal::MaxLinearTiles(bank, p.expected, few_rows ? 8 : 32, kImageBlock) >=
                      kFewWideFp8Streams;
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

void LaunchFp8Tile(const CudaLinearBank& bank, const LinearParams& p, LinearTile tile,
                   cudaStream_t stream) {
  // Rows that are not 16-byte aligned use a single tile shape, which loads element by element.
  if (!p.wide_input) return LaunchFp8Shaped<Fp8Rows32, false>(bank, p, stream);
  switch (tile) {
    case LinearTile::kRows8:
      return LaunchFp8Shaped<Fp8Rows8>(bank, p, stream);
    case LinearTile::kRows16:
      return LaunchFp8Shaped<Fp8Rows16>(bank, p, stream);
    case LinearTile::kRows32:
      return LaunchFp8Shaped<Fp8Rows32>(bank, p, stream);
    case LinearTile::kRows64:
      if (internal::MaxLinearTiles(bank, p.rows, 64, 2 * kImageBlock) < kFewFp8Tiles) {
        return LaunchFp8Shaped<Fp8Rows64Narrow>(bank, p, stream);
      }
      return LaunchFp8Shaped<Fp8Rows64>(bank, p, stream);
    default:
      return LaunchFp8Shaped<Fp8Rows128>(bank, p, stream);
  }
}

}  // namespace

void LaunchLinearFp8(const LinearArgs& args, LinearTile tile, cudaStream_t stream) {
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  MOESERVE_CHECK(bank.is_fp8() && bank.holds_weights(), "a bank of FP8 with its weights");
  MOESERVE_CHECK(args.input.dtype == DType::kBF16, "FP8 weights take bf16 rows");
  const LinearParams params = internal::LinearParamsOf(args);
  if (params.rows == 0) return;
  if (tile == LinearTile::kAuto) tile = ChooseFp8Tile(bank, params);
  MOESERVE_CHECK(tile >= LinearTile::kRows8 && tile <= LinearTile::kWarpgroup, "a tile of FP8");
  if (tile == LinearTile::kWarpgroup) {
    if (internal::LinearFp8WgmmaFits(params)) {
      return internal::LaunchLinearFp8Wgmma(bank, params, stream);
    }
    tile = LinearTile::kRows128;
  }
  if (tile > LinearTile::kRows128) {
    if (internal::LinearStreamFits(bank, params)) {
      return internal::LaunchLinearStream(bank, params, tile, stream);
    }
    tile = tile <= LinearTile::kStream8x64 ? LinearTile::kRows8 : LinearTile::kRows32;
  }
  LaunchFp8Tile(bank, params, tile, stream);
}

std::vector<LinearTile> Fp8TilesThatFit(const LinearArgs& args) {
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  if (!bank.is_fp8() || args.input.dtype != DType::kBF16) return {};
  const LinearParams params = internal::LinearParamsOf(args);
  if (!params.wide_input) return {};
  const LinearTile last =
      internal::LinearStreamFits(bank, params) ? LinearTile::kStream32x64 : LinearTile::kRows128;
  std::vector<LinearTile> tiles;
  for (auto i = static_cast<int>(LinearTile::kRows8); i <= static_cast<int>(last); ++i) {
    tiles.push_back(static_cast<LinearTile>(i));
  }
  if (internal::LinearFp8WgmmaFits(params)) tiles.push_back(LinearTile::kWarpgroup);
  return tiles;
}

LinearTile DefaultFp8Tile(const LinearArgs& args) {
  return ChooseFp8Tile(static_cast<const CudaLinearBank&>(*args.bank),
                       internal::LinearParamsOf(args));
}

}  // namespace moeserve::cuda
