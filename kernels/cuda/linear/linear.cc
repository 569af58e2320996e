#include "kernels/cuda/linear/linear.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "kernels/cuda/linear/linear_kernels.h"

namespace moeserve::cuda {
namespace {

bool StartsWide(const RowsView& rows) {
  const auto bits = reinterpret_cast<uintptr_t>(rows.data) |
                    static_cast<uintptr_t>(rows.stride) * SizeOf(rows.dtype);
  return bits % 16 == 0;
}

// Number of multiprocessors of a large device.
constexpr int64_t kMultiprocessors = 132;

bool IsStream(LinearTile tile) {
  return tile >= LinearTile::kStream8x16 && tile <= LinearTile::kStream32x64;
}

// Returns the tile with half of the rows.
LinearTile Smaller(LinearTile tile) {
  return static_cast<LinearTile>(static_cast<uint8_t>(tile) - 1);
}

// Returns the number of rows of a tile of mma.sync.
int RowsOf(LinearTile tile) {
  return 8 << (static_cast<int>(tile) - static_cast<int>(LinearTile::kRows8));
}

// Returns the tile that is expected to be the fastest. The thresholds were measured on an H100 with
// tests/bench/cuda_linear_bench.cc. The numbers of tiles are upper bounds: with several experts,
// about half as many have rows.
LinearTile ChooseTile(const CudaLinearBank& bank, const LinearParams& params) {
  const int64_t rows = params.expected;
  const int64_t experts = bank.num_experts();
  // Somewhat more than the mean number of rows per expert: a partly filled tile costs little, but a
  // second tile reads the weights again.
  const int64_t wanted = experts == 1 ? rows : rows * 3 / 2 / experts;
  const auto tiles = [&](int tile_rows, int outputs) {
    return internal::MaxLinearTiles(bank, rows, tile_rows, outputs);
  };
  if (wanted > 64) {
    // A block of the warpgroup kernel occupies a whole multiprocessor, so it needs many tiles. With
    // few inputs, most of its time is the epilogue, which smaller blocks overlap with products.
    const int64_t few_tiles = experts == 1 ? 64 : 128;
    constexpr int kFewInputs = 256;
    constexpr int64_t kManyRows = 2048;
    if (tiles(128, 128) >= few_tiles) {
      const std::vector<int>& inputs = bank.layer_shape().in_features;
      const bool short_sums = !bank.shape().gated && wanted <= kManyRows &&
                              *std::max_element(inputs.begin(), inputs.end()) <= kFewInputs;
      return short_sums ? LinearTile::kRows128 : LinearTile::kWarpgroup;
    }
  }
  // Not measured yet: narrow tiles occupy more multiprocessors, wide ones share the rows of a tile.
  if (wanted <= 32 && internal::LinearStreamFits(bank, params)) {
    const bool few_rows = wanted <= 8;
    const bool wide = tiles(few_rows ? 8 : 32, kImageBlock) >= 2 * kMultiprocessors;
    if (few_rows) return wide ? LinearTile::kStream8x64 : LinearTile::kStream8x16;
    return wide ? LinearTile::kStream32x64 : LinearTile::kStream32x16;
  }
  LinearTile tile = wanted <= 8    ? LinearTile::kRows8
                    : wanted <= 16 ? LinearTile::kRows16
                    : wanted <= 32 ? LinearTile::kRows32
                                   : LinearTile::kRows64;
  // The time of one block is the latency of its chain of products, so idle multiprocessors are
  // better used by more blocks of fewer rows, although these read the weights again (from the
  // second-level cache).
  constexpr int64_t kFewTilesOf64Rows = 264, kFewTiles = 200;
  while (tile > LinearTile::kRows8 &&
         tiles(RowsOf(tile), kImageBlock) <
             (tile == LinearTile::kRows64 ? kFewTilesOf64Rows : kFewTiles)) {
    tile = Smaller(tile);
  }
  return tile;
}

}  // namespace

int64_t ExpectedRows(const LinearArgs& args) {
  if (args.plan != nullptr) {
    return args.plan->expected > 0 ? args.plan->expected : args.plan->capacity;
  }
  return args.input.rows * (args.segments ? args.bank->num_experts() : 1);
}

namespace internal {

LinearParams LinearParamsOf(const LinearArgs& args) {
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  const bool routed = args.plan != nullptr;
  MOESERVE_CHECK(routed ? args.plan->num_experts == bank.num_experts()
                        : args.segments || bank.num_experts() == 1,
                 "experts of plan and bank");
  MOESERVE_CHECK(!bank.row_major(), "a bank of DenseLayers has no image");
  const int64_t experts = args.segments ? bank.num_experts() : 1;
  const int64_t rows = routed ? args.plan->capacity : args.input.rows * experts;
  const auto segment = [&](const RowsView& view) {
    const auto bytes = view.cols / experts * static_cast<int64_t>(SizeOf(view.dtype));
    return args.segments ? bytes : 0;
  };
  return {.weights = bank.weights(),
          .bias = bank.bias(),
          .entries = bank.entries(),
          .order = bank.order(),
          .offsets = routed ? args.plan->expert_offsets : nullptr,
          .source = routed && args.gather ? args.plan->row_of_assignment : nullptr,
          .counter = nullptr,
          .input = static_cast<const char*>(args.input.data),
          .output = static_cast<char*>(args.output.data),
          .input_stride = args.input.stride * static_cast<int64_t>(SizeOf(args.input.dtype)),
          .output_stride = args.output.stride * static_cast<int64_t>(SizeOf(args.output.dtype)),
          .input_segment = segment(args.input),
          .output_segment = segment(args.output),
          .experts = bank.num_experts(),
          .rows = static_cast<int>(rows),
          .expected = static_cast<int>(ExpectedRows(args)),
          .activation = args.activation,
          .gated = bank.shape().gated,
          .output_bf16 = args.output.dtype == DType::kBF16,
          .pad_output = args.pad_output,
          .wide_input = StartsWide(args.input) && segment(args.input) % 16 == 0,
          .wide_output = StartsWide(args.output) && segment(args.output) % 16 == 0};
}

}  // namespace internal

void LaunchLinear(const LinearArgs& args, cudaStream_t stream) {
  LaunchLinear(args, LinearTile::kAuto, stream);
}

std::vector<LinearTile> LinearTilesThatFit(const LinearArgs& args) {
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  if (args.input.dtype != DType::kBF16 || bank.shape().weight_dtype != DType::kBF16 ||
      bank.row_major() || bank.has_integers() || bank.is_mxfp4() || bank.is_fp8()) {
    return {};
  }
  const LinearParams params = internal::LinearParamsOf(args);
  if (!params.wide_input) return {};
  std::vector<LinearTile> tiles;
  for (int i = 0; i < static_cast<int>(std::size(kLinearTileNames)); ++i) {
    const auto tile = static_cast<LinearTile>(i);
    if (tile == LinearTile::kAuto || tile == LinearTile::kWarpgroup) continue;
    if (IsStream(tile) && !internal::LinearStreamFits(bank, params)) continue;
    if (tile == LinearTile::kStationary && !internal::LinearStationaryFits(bank, params)) continue;
    if (tile > LinearTile::kWarpgroup && !internal::LinearWgmmaFits(params)) continue;
    if (tile >= LinearTile::kWarpgroup256Pair && !internal::LinearPairsFit(bank, params)) continue;
    tiles.push_back(tile);
  }
  return tiles;
}

LinearTile DefaultLinearTile(const LinearArgs& args) {
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  return ChooseTile(bank, internal::LinearParamsOf(args));
}

void LaunchLinear(const LinearArgs& args, LinearTile tile, cudaStream_t stream, TileOrder order) {
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  MOESERVE_CHECK(!bank.has_integers() && !bank.is_mxfp4() && !bank.is_fp8(),
                 "other functions multiply by integers, by MXFP4 and by FP8");
  const LinearParams params = internal::LinearParamsOf(args);
  if (params.rows == 0) return;
  if (args.input.dtype == DType::kF32) {
    internal::LaunchLinearF32(bank, params, stream);
    return;
  }
  MOESERVE_CHECK(bank.shape().weight_dtype == DType::kBF16, "bf16 activations take bf16 weights");
  if (tile == LinearTile::kAuto) tile = ChooseTile(bank, params);
  if (IsStream(tile)) {
    if (internal::LinearStreamFits(bank, params)) {
      internal::LaunchLinearStream(bank, params, tile, stream);
      return;
    }
    tile = tile <= LinearTile::kStream8x64 ? LinearTile::kRows8 : LinearTile::kRows32;
  }
  if (tile == LinearTile::kStationary) {
    if (internal::LinearStationaryFits(bank, params)) {
      internal::LaunchLinearStationary(bank, params, stream);
      return;
    }
    tile = LinearTile::kWarpgroup;
  }
  if (tile >= LinearTile::kWarpgroup && internal::LinearWgmmaFits(params)) {
    internal::LaunchLinearWgmma(bank, params, tile, order, stream);
  } else {
    internal::LaunchLinearMma(bank, params, tile, stream);
  }
}

}  // namespace moeserve::cuda
