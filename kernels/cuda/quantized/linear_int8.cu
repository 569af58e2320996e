// Products of rows rounded to int8 with int8 weights, by mma.sync (linear_mma.cuh). The sums of
// integers are exact, and their scaling has the CPU's order of operations.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_mma.cuh"
#include "kernels/cuda/quantized/linear_int8.h"
#include "kernels/cuda/quantized/linear_int8_kernels.h"

namespace moeserve::cuda {
namespace {

// Dynamic shared memory: the stages, which the results replace later, then the scales of the tile's
// rows, then those of its outputs.
template <typename S>
inline constexpr int kInt8SharedBytes = S::kSharedBytes + (S::kTileRows + S::kTileImageRows) *
                                                              static_cast<int>(sizeof(float));

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerMultiprocessor)
    LinearInt8Kernel(const LinearInt8Params params) {
  const LinearParams& p = params.linear;
  if (HasTileList(p)) GridDependencyWait();
  const LinearTileRange tile =
      FindLinearTile<S::kTileRows, S::kTileImageRows>(p, static_cast<int>(blockIdx.x));
  if (tile.expert < 0) return;
  const LinearBankEntry m = p.entries[tile.expert];
  char* shared = DynamicShared<char>();
  float* const row_scales = reinterpret_cast<float*>(shared + S::kSharedBytes);
  float* const output_scales = row_scales + S::kTileRows;
  const int thread = static_cast<int>(threadIdx.x);
  typename S::Sums sums = {};
  // The barrier before the first product makes the scales visible.
  const auto load_scales = [&] {
    const float* const outputs = params.output_scales + m.bias;
    const float* const rows = params.row_scales + tile.expert * params.scale_segment;
    for (int i = thread; i < S::kTileImageRows; i += S::kThreads) {
      // A tile of two blocks may lack the second one.
      output_scales[i] = outputs[min(tile.image_row + i, m.row_blocks * kImageBlock - 1)];
    }
    for (int i = thread; i < S::kTileRows; i += S::kThreads) {
      const int row = tile.row + min(i, tile.rows - 1);
      row_scales[i] = rows[p.source == nullptr ? row : p.source[row]];
    }
  };
  SumProducts<S, true>(p, m, tile, shared, sums, load_scales, [](int) {});
  float* staged = reinterpret_cast<float*>(shared);
  StageSums<S>(sums, staged, [&](int row, int column, int32_t sum) {
    return ScaledSum(sum, output_scales[column], row_scales[row]);
  });
  __syncthreads();
  StoreLinearTile<S::kTileImageRows, S::kPitch, S::kThreads>(p, m, tile, staged, thread);
}

template <typename S>
void LaunchShaped(const CudaLinearBank& bank, const LinearInt8Params& params, cudaStream_t stream) {
  const int64_t tiles =
      internal::MaxLinearTiles(bank, params.linear.rows, S::kTileRows, S::kTileImageRows);
  MOESERVE_CHECK(tiles <= INT32_MAX, "tiles of a linear layer");
  Launch(LinearInt8Kernel<S>,
         LaunchShape{dim3(static_cast<unsigned>(tiles)), dim3(S::kThreads), kInt8SharedBytes<S>,
                     stream, true},
         params);
}

using Shapes = MmaShapes<Int8Operands>;

constexpr int64_t kMultiprocessors = 132;  // of a large device

bool IsStream(LinearTile tile) {
  return tile >= LinearTile::kStream8x16 && tile <= LinearTile::kStream32x64;
}
// Returns whether the kernel rounds the rows.
bool RoundsRows(LinearTile tile) {
  return tile == LinearTile::kStream8x16 || tile == LinearTile::kStream8x64;
}

internal::Int8StreamRows StreamRowsOf(const LinearArgs& args) {
  const int64_t rows = args.plan != nullptr ? args.plan->rows : args.input.rows;
  return {.most = static_cast<int>(rows), .bf16 = args.input.dtype == DType::kBF16};
}

bool TileFits(const LinearArgs& args, const LinearParams& p, LinearTile tile) {
  if (tile == LinearTile::kAuto) return false;
  if (tile <= LinearTile::kRows128) return true;
  if (IsStream(tile)) {
    const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
    return internal::Int8StreamFits(bank, p, tile, StreamRowsOf(args));
  }
  const bool known = tile >= LinearTile::kWarpgroup128 && tile <= LinearTile::kWarpgroup192x192;
  return known && internal::Int8WgmmaFits(p);
}

// Returns a tile that always fits, instead of one that does not.
LinearTile Fallback(LinearTile tile) {
  if (RoundsRows(tile)) return LinearTile::kRows8;
  return IsStream(tile) ? LinearTile::kRows32 : LinearTile::kRows128;
}

// Returns the tile of wgmma with the number of outputs that suits the layer, as for bf16 weights.
LinearTile WarpgroupTileOf(const CudaLinearBank& bank, int64_t rows) {
  constexpr int64_t kFewTiles = 64;
  const int blocks = bank.max_row_blocks();
  const auto tiles = [&](int outputs) {
    return internal::MaxLinearTiles(bank, rows, 128, outputs);
  };
  const int by_three = (blocks + 2) / 3 * 3, by_four = (blocks + 3) / 4 * 4;
  if (blocks > 2 && by_three * 8 <= by_four * 7 && tiles(192) >= kFewTiles) {
    return LinearTile::kWarpgroup192;
  }
  return blocks > 2 && tiles(256) >= kFewTiles ? LinearTile::kWarpgroup256
                                               : LinearTile::kWarpgroup128;
}

// Returns the tile of mma.sync that is expected to be the fastest. The thresholds are those of bf16
// products; they have not been measured for int8.
LinearTile ChooseMmaTile(const CudaLinearBank& bank, int64_t rows, int64_t wanted) {
  constexpr int64_t kFewTilesOf64Rows = 264, kFewTiles = 200;
  struct Candidate {
    LinearTile tile;
    int rows, outputs;
    int64_t fewest_tiles;
  };
  constexpr Candidate kCandidates[] = {{LinearTile::kRows128, 128, 2 * kImageBlock, kFewTiles},
                                       {LinearTile::kRows64, 64, kImageBlock, kFewTilesOf64Rows},
                                       {LinearTile::kRows32, 32, kImageBlock, kFewTiles},
                                       {LinearTile::kRows16, 16, kImageBlock, kFewTiles}};
  for (const Candidate& c : kCandidates) {
    // A tile is at least half full, and there are enough of them.
    if (wanted > c.rows / 2 &&
        internal::MaxLinearTiles(bank, rows, c.rows, c.outputs) >= c.fewest_tiles) {
      return c.tile;
    }
  }
  return LinearTile::kRows8;
}

// Returns the tile that is expected to be the fastest. None of this has been measured: streams of
// weights for few rows, as for bf16 weights, and wgmma as soon as it has enough tiles.
LinearTile ChooseInt8Tile(const LinearArgs& args, const LinearParams& p) {
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  const int64_t rows = p.expected;
  const int64_t experts = bank.num_experts();
  // Somewhat more than the mean number of rows per expert: a partly filled tile costs little, but a
  // second tile reads the weights again.
  const int64_t wanted = experts == 1 ? rows : rows * 3 / 2 / experts;
  const auto fits = [&](LinearTile tile) { return TileFits(args, p, tile); };
  const auto tiles = [&](int tile_rows, int outputs) {
    return internal::MaxLinearTiles(bank, rows, tile_rows, outputs);
  };
  if (wanted <= 8) {
    // Narrow tiles share the work better, but their stages are full only if sums are long.
    constexpr int64_t kFewTiles = 2 * kMultiprocessors, kManyTiles = 16 * kMultiprocessors;
    constexpr int kFullStage = 8;  // blocks of inputs
    const bool narrow =
        tiles(8, kImageBlock) < (bank.max_k_blocks() >= kFullStage ? kManyTiles : kFewTiles);
    const LinearTile tile = narrow ? LinearTile::kStream8x16 : LinearTile::kStream8x64;
    if (fits(tile)) return tile;
  } else if (wanted <= 32) {
    if (tiles(32, kImageBlock) >= kMultiprocessors && fits(LinearTile::kStream32x64)) {
      return LinearTile::kStream32x64;
    }
  } else if (wanted > 64) {
    // A block of the warpgroup kernel occupies a whole multiprocessor, so it needs many tiles.
    const int64_t few_tiles = experts == 1 ? 64 : 128;
    const LinearTile tile = WarpgroupTileOf(bank, rows);
    if (tiles(128, 2 * kImageBlock) >= few_tiles && fits(tile)) return tile;
  }
  return ChooseMmaTile(bank, rows, wanted);
}

void LaunchTile(const CudaLinearBank& bank, const LinearInt8Params& params, LinearTile tile,
                cudaStream_t stream) {
  // With few tiles, narrower ones use more multiprocessors.
  constexpr int64_t kFewTiles = 96;
  const int64_t rows = params.linear.rows;
  switch (tile) {
    case LinearTile::kRows8:
      if (internal::MaxLinearTiles(bank, rows, 8, kImageBlock) < kFewTiles) {
        return LaunchShaped<Shapes::Rows8Slice>(bank, params, stream);
      }
      return LaunchShaped<Shapes::Rows8>(bank, params, stream);
    case LinearTile::kRows16:
      return LaunchShaped<Shapes::Rows16>(bank, params, stream);
    case LinearTile::kRows32:
      return LaunchShaped<Shapes::Rows32>(bank, params, stream);
    case LinearTile::kRows64:
      if (internal::MaxLinearTiles(bank, rows, 64, 2 * kImageBlock) < 2 * kFewTiles) {
        return LaunchShaped<Shapes::Rows64Narrow>(bank, params, stream);
      }
      return LaunchShaped<Shapes::Rows64>(bank, params, stream);
    default:
      return LaunchShaped<Shapes::Rows128>(bank, params, stream);
  }
}

}  // namespace

std::vector<LinearTile> Int8TilesThatFit(const LinearArgs& args) {
  const LinearParams p = internal::LinearParamsOf(args);
  std::vector<LinearTile> tiles;
  for (int i = 0; i < static_cast<int>(std::size(kLinearTileNames)); ++i) {
    const auto tile = static_cast<LinearTile>(i);
    if (TileFits(args, p, tile)) tiles.push_back(tile);
  }
  return tiles;
}

LinearTile DefaultInt8Tile(const LinearArgs& args) {
  return ChooseInt8Tile(args, internal::LinearParamsOf(args));
}

void LaunchLinearInt8(const LinearArgs& args, LinearTile tile, const Int8Rows& rows,
                      cudaStream_t stream, TileOrder order) {
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  MOESERVE_CHECK(bank.is_int8(), "a bank of type int8-channel");
  LinearInt8Params params{.linear = internal::LinearParamsOf(args),
                          .output_scales = bank.scales(),
                          .row_scales = rows.scales(),
                          .scale_segment = args.segments ? args.input.rows : 0};
  LinearParams& p = params.linear;
  if (p.rows == 0) return;
  if (tile == LinearTile::kAuto) tile = ChooseInt8Tile(args, p);
  if (!TileFits(args, p, tile)) tile = Fallback(tile);
  if (RoundsRows(tile)) {
    return internal::LaunchInt8Stream(bank, params, tile, StreamRowsOf(args), stream);
  }
  LaunchRoundRows(args, rows, stream);
  p.input = reinterpret_cast<const char*>(rows.values());
  p.input_stride = Int8RowBytes(args);
  p.input_segment = params.scale_segment * p.input_stride;
  p.wide_input = true;
  if (IsStream(tile)) {
    internal::LaunchInt8Stream(bank, params, tile, StreamRowsOf(args), stream);
  } else if (tile > LinearTile::kRows128) {
    internal::LaunchInt8Wgmma(bank, params, tile, order, stream);
  } else {
    LaunchTile(bank, params, tile, stream);
  }
}

}  // namespace moeserve::cuda
