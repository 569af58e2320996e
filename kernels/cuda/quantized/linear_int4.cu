// Products of rows rounded to int8 with weights of type int4-k. The sums of integers are exact, and
// their scaling has the CPU's order of operations.

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_mma.cuh"
#include "kernels/cuda/quantized/int4_products.cuh"
#include "kernels/cuda/quantized/linear_int4.h"

namespace moeserve::cuda {
namespace {

struct LinearInt4Params {
  LinearParams linear;         // `input` are the rounded rows, with their sums
  const float* output_scales;  // of the packed rows, each at the offset of its bias
  const float* units;          // as output_scales
  const float* row_scales;     // of the rounded rows
  int64_t scale_segment;       // rounded rows from the segment of an expert to that of the next
};

// Dynamic shared memory: the stages, which the results replace later, then the scales of the tile's
// rows, then those of its outputs, then the units of its outputs.
template <typename S>
inline constexpr int kInt4SharedBytes = S::kSharedBytes + (S::kTileRows + 2 * S::kTileImageRows) *
                                                              static_cast<int>(sizeof(float));

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerMultiprocessor)
    LinearInt4Kernel(const LinearInt4Params params) {
  const LinearParams& p = params.linear;
  if (HasTileList(p)) GridDependencyWait();
  const LinearTileRange tile =
      FindLinearTile<S::kTileRows, S::kTileImageRows>(p, static_cast<int>(blockIdx.x));
  if (tile.expert < 0) return;
  const LinearBankEntry m = p.entries[tile.expert];
  char* shared = DynamicShared<char>();
  float* const row_scales = reinterpret_cast<float*>(shared + S::kSharedBytes);
  float* const output_scales = row_scales + S::kTileRows;
  int32_t* const units = reinterpret_cast<int32_t*>(output_scales + S::kTileImageRows);
  const int thread = static_cast<int>(threadIdx.x);
  typename S::Sums sums = {};
  // The barrier before the first product makes these visible.
  const auto load_scales = [&] {
    const float* const rows = params.row_scales + tile.expert * params.scale_segment;
    for (int i = thread; i < S::kTileImageRows; i += S::kThreads) {
      // A tile of two blocks may lack the second one.
      const int64_t at = m.bias + min(tile.image_row + i, m.row_blocks * kImageBlock - 1);
      output_scales[i] = params.output_scales[at];
      units[i] = __float2int_rn(params.units[at]);
    }
    for (int i = thread; i < S::kTileRows; i += S::kThreads) {
      const int row = tile.row + min(i, tile.rows - 1);
      row_scales[i] = rows[p.source == nullptr ? row : p.source[row]];
    }
  };
  SumInt4Products<S>(p, m, tile, shared, units, sums, load_scales);
  float* staged = reinterpret_cast<float*>(shared);
  StageSums<S>(sums, staged, [&](int row, int column, int32_t sum) {
    const float factor = __fmul_rn(output_scales[column], row_scales[row]);
    return __fmaf_rn(__int2float_rn(sum), factor, 0.0f);
  });
  __syncthreads();
  StoreLinearTile<S::kTileImageRows, S::kPitch, S::kThreads>(p, m, tile, staged, thread);
}

template <typename S>
void LaunchInt4Shape(const CudaLinearBank& bank, const LinearInt4Params& params,
                     cudaStream_t stream) {
  const int64_t tiles =
      internal::MaxLinearTiles(bank, params.linear.rows, S::kTileRows, S::kTileImageRows);
  MOESERVE_CHECK(tiles <= INT32_MAX, "tiles of a linear layer");
  Launch(LinearInt4Kernel<S>,
         LaunchShape{dim3(static_cast<unsigned>(tiles)), dim3(S::kThreads), kInt4SharedBytes<S>,
                     stream, true},
         params);
}

// The template arguments: rows of a tile, warps along the outputs, warps along the rows,
// instructions per warp along the outputs, pipeline stages, blocks per multiprocessor. A stage of
// few rows has half of the bytes of int8, so there are more of them.
using Int4Rows8Slice = Int4Shape<8, 1, 1, 1, 16, 4>;
using Int4Rows8 = Int4Shape<8, 4, 1, 1, 12, 3>;
using Int4Rows16 = Int4Shape<16, 4, 1, 1, 10, 3>;
using Int4Rows32 = Int4Shape<32, 4, 1, 1, 7, 3>;
using Int4Rows64Narrow = Int4Shape<64, 4, 1, 1, 6, 2>;
using Int4Rows64 = Int4Shape<64, 4, 2, 2, 5, 2>;
using Int4Rows128 = Int4Shape<128, 4, 2, 2, 4, 2>;

// Returns the tile that is expected to be the fastest. The thresholds are those of bf16 products by
// mma.sync; they have not been measured for int4-k.
LinearTile ChooseInt4Tile(const CudaLinearBank& bank, const LinearParams& p) {
  const int64_t rows = p.expected, experts = bank.num_experts();
  const int64_t wanted = experts == 1 ? rows : rows * 3 / 2 / experts;
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
        internal::MaxLinearTiles(bank, rows, c.rows, c.outputs) >= c.fewest_tiles) {
      return c.tile;
    }
  }
  return LinearTile::kRows8;
}

void LaunchInt4Tile(const CudaLinearBank& bank, const LinearInt4Params& params, LinearTile tile,
                    cudaStream_t stream) {
  // With few tiles, narrower ones use more multiprocessors.
  constexpr int64_t kFewTiles = 96;
  const int64_t rows = params.linear.rows;
  switch (tile) {
    case LinearTile::kRows8:
      if (internal::MaxLinearTiles(bank, rows, 8, kImageBlock) < kFewTiles) {
        return LaunchInt4Shape<Int4Rows8Slice>(bank, params, stream);
      }
      return LaunchInt4Shape<Int4Rows8>(bank, params, stream);
    case LinearTile::kRows16:
      return LaunchInt4Shape<Int4Rows16>(bank, params, stream);
    case LinearTile::kRows32:
      return LaunchInt4Shape<Int4Rows32>(bank, params, stream);
    case LinearTile::kRows64:
      if (internal::MaxLinearTiles(bank, rows, 64, 2 * kImageBlock) < 2 * kFewTiles) {
        return LaunchInt4Shape<Int4Rows64Narrow>(bank, params, stream);
      }
      return LaunchInt4Shape<Int4Rows64>(bank, params, stream);
    default:
      return LaunchInt4Shape<Int4Rows128>(bank, params, stream);
  }
}

}  // namespace

std::vector<LinearTile> Int4TilesThatFit() {
  return {LinearTile::kRows8, LinearTile::kRows16, LinearTile::kRows32, LinearTile::kRows64,
          LinearTile::kRows128};
}

LinearTile DefaultInt4Tile(const LinearArgs& args) {
  return ChooseInt4Tile(static_cast<const CudaLinearBank&>(*args.bank),
                        internal::LinearParamsOf(args));
}

void LaunchLinearInt4(const LinearArgs& args, LinearTile tile, const Int8Rows& rows,
                      cudaStream_t stream) {
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  MOESERVE_CHECK(bank.is_int4(), "a bank of type int4-k");
  LinearInt4Params params{.linear = internal::LinearParamsOf(args),
                          .output_scales = bank.scales(),
                          .units = bank.units(),
                          .row_scales = rows.scales(),
                          .scale_segment = args.segments ? args.input.rows : 0};
  LinearParams& p = params.linear;
  if (p.rows == 0) return;
  LaunchRoundRows(args, rows, stream);
  p.input = reinterpret_cast<const char*>(rows.values());
  p.input_stride = Int8RowBytes(args);
  p.input_segment = params.scale_segment * p.input_stride;
  if (tile == LinearTile::kAuto) tile = ChooseInt4Tile(bank, p);
  MOESERVE_CHECK(tile >= LinearTile::kRows8 && tile <= LinearTile::kRows128, "a tile of mma.sync");
  LaunchInt4Tile(bank, params, tile, stream);
}

}  // namespace moeserve::cuda
