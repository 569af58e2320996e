#include <algorithm>
#include <optional>
#include <vector>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/fused/fused_expert.h"
#include "kernels/cuda/fused/fused_expert_kernels.h"
#include "kernels/cuda/linear/linear_params.h"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kBlockBytes = kImageBlock * kImageBlock * 2;
constexpr int kRowBytes = kImageBlock * 2;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kMaxWidthBlocks = 4;

// The dimensions of a tile of kTileRows rows, whose width is kBlocks * 64 columns. In a step,
// kBlocks blocks of weights are loaded: either one row block of the first matrix (64 hidden units,
// or 32 if gated), or one k block of the second matrix. A chunk of 64 hidden units takes one step
// that computes them (two if gated) and one step that multiplies them by the second matrix.
// With kSliced, the sums of the second matrix may have several slices (SliceBlocks()).
template <int kTileRowsArg, int kBlocksArg, int kStagesArg, bool kSlicedArg = false>
struct FusedShape {
  static constexpr bool kSliced = kSlicedArg;
  static constexpr int kTileRows = kTileRowsArg;
  static constexpr int kBlocks = kBlocksArg;
  static constexpr int kStages = kStagesArg;
  static constexpr int kNTiles = kTileRows / 8;
  static constexpr int kTilePlaneBytes = kTileRows * kRowBytes;  // 64 columns of all rows
  static constexpr int kInputBytes = kBlocks * kTilePlaneBytes;
  static constexpr int kStageBytes = kBlocks * kBlockBytes;
  static constexpr int kPitch = kBlocks * kImageBlock + 4;
  static constexpr int kStagedBytes = kTileRows * kPitch * static_cast<int>(sizeof(float));
  static constexpr int kStreamBytes = kInputBytes + kTilePlaneBytes + kStages * kStageBytes;
  // The sums of the slices so far; the registers have no room for them.
  static constexpr int kTotals = kBlocks * kNTiles * 4;  // of a thread
  static constexpr int kTotalsBytes = kSliced ? kTotals * kThreads * 4 : 0;
  static constexpr int kSharedBytes = std::max(kStreamBytes, kStagedBytes) + kTotalsBytes;
};

// Copies input rows into planes of 64 columns. As in packed weight blocks, the 16-byte piece c of
// row r is stored at piece index c ^ (r % 8).
template <typename S>
__device__ void LoadRows(const LinearParams& p, int in_features, const LinearTileRange& tile,
                         char* planes) {
  constexpr int kPieces = S::kBlocks * 8;
  for (int i = static_cast<int>(threadIdx.x); i < S::kTileRows * kPieces; i += kThreads) {
    const int r = i / kPieces;
    const int piece = i % kPieces;
    char* to = planes + piece / 8 * S::kTilePlaneBytes + r * kRowBytes + (piece % 8 ^ (r & 7)) * 16;
    const int valid = r < tile.rows ? min(16, max(0, in_features * 2 - piece * 16)) : 0;
    const char* from = valid > 0 ? LinearInputRow(p, tile, tile.row + r) + piece * 16 : p.input;
    if (p.wide_input) {
      CopyAsync16(to, from, valid);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        reinterpret_cast<uint16_t*>(to)[j] =
            j * 2 < valid ? reinterpret_cast<const uint16_t*>(from)[j] : uint16_t{0};
      }
    }
  }
}

// Starts the copies of the weights of step `step` into `stage`. If the last chunk of a gated expert
// has only 32 hidden units, its second row block does not exist; then nothing is copied, and
// nothing reads the stage.
template <typename S>
__device__ void LoadStep(const FusedParams& p, const LinearBankEntry& up,
                         const LinearBankEntry& down, int halves, int step, char* stage) {
  const int chunk = step / (halves + 1);
  const int part = step % (halves + 1);
  const int thread = static_cast<int>(threadIdx.x);
  const char* from;
  int64_t stride;
  if (part < halves) {
    const int block = chunk * halves + part;
    if (block >= up.row_blocks) return;
    from = p.up.weights + up.weights + static_cast<int64_t>(block) * S::kStageBytes;
    stride = kBlockBytes;
  } else {
    from = p.down.weights + down.weights + static_cast<int64_t>(chunk) * kBlockBytes;
    stride = static_cast<int64_t>(down.k_blocks) * kBlockBytes;
  }
#pragma unroll
  for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < kBlockBytes / 16 / kThreads; ++i) {
      const int at = (thread + i * kThreads) * 16;
      CopyAsync16(stage + b * kBlockBytes + at, from + b * stride + at);
    }
  }
}

// Loads the B operands (n8 fragments) for inputs [16 * k16, 16 * k16 + 16) of all rows of a plane.
template <int kNTiles>
__device__ void LoadRowFragments(const char* plane, int k16, uint32_t (&b)[kNTiles][2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (kNTiles == 1) {
    const int piece = (k16 * 2 + lane / 8 % 2) ^ (lane & 7);
    LoadMatrix2(b[0], plane + lane % 8 * kRowBytes + piece * 16);
  } else {
#pragma unroll
    for (int pair = 0; pair < kNTiles / 2; ++pair) {
      const int row = pair * 16 + lane % 8 + lane / 16 * 8;
      const int piece = (k16 * 2 + lane / 8 % 2) ^ (row & 7);
      uint32_t both[4];
      LoadMatrix4(both, plane + row * kRowBytes + piece * 16);
      b[pair * 2][0] = both[0];
      b[pair * 2][1] = both[1];
      b[pair * 2 + 1][0] = both[2];
      b[pair * 2 + 1][1] = both[3];
    }
  }
}

__device__ inline void LoadWeightFragment(const char* block, int k16, uint32_t (&a)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane % 16;
  const int piece = (k16 * 2 + lane / 16) ^ (row & 7);
  LoadMatrix4(a, block + row * kRowBytes + piece * 16);
}

template <typename S>
__device__ void MultiplyUp(const char* planes, const char* stage, float (&hidden)[S::kNTiles][4]) {
#pragma unroll
  for (int n = 0; n < S::kNTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) hidden[n][j] = 0.0f;
  }
#pragma unroll
  for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) {
      uint32_t weight[4], row[S::kNTiles][2];
      LoadWeightFragment(stage + b * kBlockBytes, k16, weight);
      LoadRowFragments<S::kNTiles>(planes + b * S::kTilePlaneBytes, k16, row);
#pragma unroll
      for (int n = 0; n < S::kNTiles; ++n) MmaBf16(hidden[n], weight, row[n]);
    }
  }
}

__device__ inline void StoreHidden(char* plane, int row, int unit, float value) {
  char* at = plane + row * kRowBytes + (unit / 8 ^ (row & 7)) * 16 + unit % 8 * 2;
  *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(PackBf16(value, 0.0f));
}

// Adds the bias to the sums of one row block, applies the activation, rounds the results and stores
// them in the plane of hidden units. Hidden units beyond the expert's width are set to 0, because
// the second product reads them.
template <typename S>
__device__ void ActivateHidden(const LinearParams& p, const LinearBankEntry& up, int row_block,
                               int part, const float (&sums)[S::kNTiles][4], char* plane) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int image_row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
  float low = 0.0f, high = 0.0f;
  if (p.bias != nullptr && row_block < up.row_blocks) {
    const float* bias = p.bias + up.bias + row_block * kImageBlock + image_row;
    low = bias[0];
    high = bias[8];
  }
  const int unit = p.gated ? part * 32 + image_row / 16 * 8 + image_row % 8 : image_row;
  const int first = p.gated ? row_block * 32 - part * 32 : row_block * kImageBlock;
#pragma unroll
  for (int n = 0; n < S::kNTiles; ++n) {
    const int row = n * 8 + lane % 4 * 2;
    if (p.gated) {
      float gate[2] = {sums[n][0] + low, sums[n][1] + low};
      float unit_up[2] = {sums[n][2] + high, sums[n][3] + high};
      ActivateGated(p.activation, true, gate, unit_up);
      const bool real = first + unit < up.out_features;
      StoreHidden(plane, row, unit, real ? gate[0] : 0.0f);
      StoreHidden(plane, row + 1, unit, real ? gate[1] : 0.0f);
    } else {
      float value[4] = {sums[n][0] + low, sums[n][1] + low, sums[n][2] + high, sums[n][3] + high};
      Activate(p.activation.kind, true, value);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = unit + j / 2 * 8;
        StoreHidden(plane, row + j % 2, at, first + at < up.out_features ? value[j] : 0.0f);
      }
    }
  }
}

template <typename S>
__device__ void MultiplyDown(const char* plane, const char* stage,
                             float (&sums)[S::kBlocks][S::kNTiles][4]) {
#pragma unroll
  for (int k16 = 0; k16 < 4; ++k16) {
    uint32_t row[S::kNTiles][2];
    LoadRowFragments<S::kNTiles>(plane, k16, row);
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      uint32_t weight[4];
      LoadWeightFragment(stage + b * kBlockBytes, k16, weight);
#pragma unroll
      for (int n = 0; n < S::kNTiles; ++n) MmaBf16(sums[b][n], weight, row[n]);
    }
  }
}

// Adds the sums of a slice to those of the slices before it, if there are any.
template <typename S>
__device__ __forceinline__ void AddTotals(const float* totals, bool any,
                                          float (&sums)[S::kBlocks][S::kNTiles][4]) {
  if (!any) return;
#pragma unroll
  for (int i = 0; i < S::kTotals; ++i) {
    float& sum = sums[i / 4 / S::kNTiles][i / 4 % S::kNTiles][i % 4];
    sum = totals[i * kThreads] + sum;
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads, S::kSliced ? 1 : 2)
    FusedExpertKernel(const FusedParams p) {
  GridDependencyPass();
  const LinearTileRange tile =
      FindLinearTile<S::kTileRows, S::kBlocks * kImageBlock>(p.down, static_cast<int>(blockIdx.x));
  if (tile.expert < 0) return;
  const LinearBankEntry up = p.up.entries[tile.expert];
  const LinearBankEntry down = p.down.entries[tile.expert];
  char* planes = DynamicShared<char>();
  char* hidden_plane = planes + S::kInputBytes;
  char* stages = hidden_plane + S::kTilePlaneBytes;
  const int halves = p.up.gated ? 2 : 1;
  const int steps = down.k_blocks * (halves + 1);
  float results[S::kBlocks][S::kNTiles][4] = {};
  float* const totals =
      reinterpret_cast<float*>(planes + S::kSharedBytes - S::kTotalsBytes) + threadIdx.x;

  LoadRows<S>(p.up, up.in_features, tile, planes);
#pragma unroll 1
  for (int s = 0; s < S::kStages - 1; ++s) {
    if (s < steps) LoadStep<S>(p, up, down, halves, s, stages + s * S::kStageBytes);
    CopyAsyncCommit();
  }
  int stage = 0;
  int step = 0;
  // Waits for the current step's weights and starts the copies for a later step.
  const auto advance = [&]() -> const char* {
    CopyAsyncWait<S::kStages - 2>();
    __syncthreads();
    const int next = step + S::kStages - 1;
    if (next < steps) {
      const int slot = stage == 0 ? S::kStages - 1 : stage - 1;
      LoadStep<S>(p, up, down, halves, next, stages + slot * S::kStageBytes);
    }
    CopyAsyncCommit();
    const char* current = stages + stage * S::kStageBytes;
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
    ++step;
    return current;
  };
  for (int chunk = 0; chunk < down.k_blocks; ++chunk) {
    for (int part = 0; part < halves; ++part) {
      const char* weights = advance();
      float hidden[S::kNTiles][4] = {};
      const int row_block = chunk * halves + part;
      if (row_block < up.row_blocks) MultiplyUp<S>(planes, weights, hidden);
      // Two barriers in advance() order the accesses to the plane: the one of the next step is
      // between these writes and the reads by MultiplyDown(); the one of this step is between the
      // reads of the previous chunk and these writes.
      ActivateHidden<S>(p.up, up, row_block, part, hidden, hidden_plane);
    }
    MultiplyDown<S>(hidden_plane, advance(), results);
    if constexpr (S::kSliced) {
      if ((chunk + 1) % down.slice_blocks != 0 || chunk + 1 == down.k_blocks) continue;
      AddTotals<S>(totals, chunk + 1 > down.slice_blocks, results);
#pragma unroll
      for (int i = 0; i < S::kTotals; ++i) {
        float& sum = results[i / 4 / S::kNTiles][i / 4 % S::kNTiles][i % 4];
        totals[i * kThreads] = sum;
        sum = 0.0f;
      }
    }
  }
  if constexpr (S::kSliced) AddTotals<S>(totals, down.k_blocks > down.slice_blocks, results);
  CopyAsyncWait<0>();
  __syncthreads();
  float* staged = reinterpret_cast<float*>(planes);
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int b = 0; b < S::kBlocks; ++b) {
    const int column = b * kImageBlock + static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < S::kNTiles; ++n) {
      const int row = n * 8 + lane % 4 * 2;
      staged[row * S::kPitch + column] = results[b][n][0];
      staged[(row + 1) * S::kPitch + column] = results[b][n][1];
      staged[row * S::kPitch + column + 8] = results[b][n][2];
      staged[(row + 1) * S::kPitch + column + 8] = results[b][n][3];
    }
  }
  __syncthreads();
  StoreLinearTile<S::kBlocks * kImageBlock, S::kPitch, kThreads>(p.down, down, tile, staged,
                                                                 static_cast<int>(threadIdx.x));
}

template <typename S>
void LaunchShaped(const FusedParams& p, int64_t rows, cudaStream_t stream) {
  const int64_t tiles = std::min<int64_t>(p.down.experts, rows) + rows / S::kTileRows;
  MOESERVE_CHECK(tiles <= INT32_MAX, "tiles of fused experts");
  Launch(FusedExpertKernel<S>,
         LaunchShape{dim3(static_cast<unsigned>(tiles)), dim3(kThreads), S::kSharedBytes, stream,
                     true},
         p);
}

template <int kTileRows, bool kSliced>
void LaunchRows(const FusedParams& p, int blocks, int64_t rows, cudaStream_t stream) {
  switch (blocks) {
    case 1:
      return LaunchShaped<FusedShape<kTileRows, 1, 6, kSliced>>(p, rows, stream);
    case 2:
      return LaunchShaped<FusedShape<kTileRows, 2, 4, kSliced>>(p, rows, stream);
    case 3:
      return LaunchShaped<FusedShape<kTileRows, 3, 3, kSliced>>(p, rows, stream);
    default:
      return LaunchShaped<FusedShape<kTileRows, 4, 2, kSliced>>(p, rows, stream);
  }
}

// Returns the shared memory of the larger of the two row tiles, for rows that are `blocks` blocks
// wide.
template <bool kSliced>
size_t SharedBytes(int blocks) {
  switch (blocks) {
    case 1:
      return FusedShape<64, 1, 6, kSliced>::kSharedBytes;
    case 2:
      return FusedShape<64, 2, 4, kSliced>::kSharedBytes;
    case 3:
      return FusedShape<64, 3, 3, kSliced>::kSharedBytes;
    default:
      return FusedShape<64, 4, 2, kSliced>::kSharedBytes;
  }
}

void LaunchMma(const CudaLinearBank& down, const FusedParams& params, cudaStream_t stream) {
  const int64_t rows = params.down.rows;
  const int blocks = down.max_row_blocks();
  const bool sliced = down.max_slices() > 1;
  if (rows <= 16 * int64_t{down.num_experts()}) {
    sliced ? LaunchRows<16, true>(params, blocks, rows, stream)
           : LaunchRows<16, false>(params, blocks, rows, stream);
  } else {
    sliced ? LaunchRows<64, true>(params, blocks, rows, stream)
           : LaunchRows<64, false>(params, blocks, rows, stream);
  }
}

const CudaLinearBank& AsCuda(const LinearBank& bank) {
  return static_cast<const CudaLinearBank&>(bank);
}

FusedParams ParamsOf(const FusedExpertArgs& args) {
  const LinearArgs up{.bank = args.up,
                      .plan = args.plan,
                      .gather = args.gather,
                      .input = args.input,
                      .output = args.output,
                      .activation = args.activation};
  const LinearArgs down{
      .bank = args.down, .plan = args.plan, .input = args.input, .output = args.output};
  return {internal::LinearParamsOf(up), internal::LinearParamsOf(down)};
}

// Returns whether tiles of 128 rows by wgmma are expected to be faster than tiles of 64 rows by
// mma.sync. Not measured: predicted from the instructions of both.
bool HasManyRows(const FusedParams& params) {
  constexpr int64_t kFewestRows = 64;  // for each expert
  return params.down.expected >= kFewestRows * params.down.experts;
}

FusedTile ChooseTile(const CudaLinearBank& down, const FusedParams& params) {
  return HasManyRows(params) && internal::FusedWgmmaFits(down, params) ? FusedTile::kWarpgroup
                                                                       : FusedTile::kMma;
}

}  // namespace

bool FusedExpertFits(const LinearBank& up, const LinearBank& down) {
  const LinearBankShape& u = AsCuda(up).layer_shape();
  const LinearBankShape& d = AsCuda(down).layer_shape();
  const auto is_bf16 = [](const LinearBankShape& s) {
    return s.weight_dtype == DType::kBF16 && s.quantization == Quantization::kNone && !s.mxfp4 &&
           !s.fp8;
  };
  if (!is_bf16(u) || !is_bf16(d) || d.gated) return false;
  if (up.num_experts() != down.num_experts()) return false;
  const int width = u.in_features_of(0);
  if (width > kMaxWidthBlocks * kImageBlock) return false;
  const int blocks = (width + kImageBlock - 1) / kImageBlock;
  const bool sliced = AsCuda(down).max_slices() > 1;
  if ((sliced ? SharedBytes<true>(blocks) : SharedBytes<false>(blocks)) > SharedMemoryLimit()) {
    return false;
  }
  for (int e = 0; e < up.num_experts(); ++e) {
    if (u.in_features_of(e) != width || d.out_features[e] != width) return false;
    if (d.in_features_of(e) != u.out_features[e]) return false;
  }
  return true;
}

std::optional<FusedTile> FusedTileThatPays(const FusedExpertArgs& args) {
  if (!FusedExpertFits(*args.up, *args.down)) return std::nullopt;
  const FusedParams params = ParamsOf(args);
  const CudaLinearBank& down = AsCuda(*args.down);
  const int64_t experts = params.down.experts, rows = params.down.expected;
  // Not measured: predicted from the instructions of both. A block computes 128 rows for all hidden
  // units, so half of a large device's multiprocessors need a tile; with fewer, the two products
  // use more of them. Otherwise, a kernel that does not write and read the hidden units is faster.
  constexpr int64_t kFewestTiles = 64;
  const int64_t tiles = rows / 128 + experts / 2;
  if (HasManyRows(params) && tiles >= kFewestTiles && internal::FusedWgmmaFits(down, params)) {
    return FusedTile::kWarpgroup;
  }
  // Measured on an H100 and, after the tiles of products were tuned, on an H200. A block computes a
  // whole expert, so many experts are needed to use all multiprocessors. With few rows for each
  // expert, the weights are read once at the device's bandwidth; with more, two products are about
  // as fast. Gated experts never pay.
  constexpr int64_t kExperts = 128;
  constexpr int64_t kFewestRows = 4, kMostRows = 32;  // for each expert
  const bool pays = !params.up.gated && experts >= kExperts && rows >= kFewestRows * experts &&
                    rows <= kMostRows * experts;
  return pays ? std::optional(FusedTile::kMma) : std::nullopt;
}

std::vector<FusedTile> FusedTilesThatFit(const FusedExpertArgs& args) {
  std::vector<FusedTile> tiles = {FusedTile::kMma};
  if (internal::FusedWgmmaFits(AsCuda(*args.down), ParamsOf(args))) {
    tiles.push_back(FusedTile::kWarpgroup);
  }
  return tiles;
}

void LaunchFusedExpert(const FusedExpertArgs& args, cudaStream_t stream) {
  LaunchFusedExpert(args, FusedTile::kAuto, stream);
}

void LaunchFusedExpert(const FusedExpertArgs& args, FusedTile tile, cudaStream_t stream) {
  MOESERVE_CHECK(FusedExpertFits(*args.up, *args.down), "banks of a fused expert");
  MOESERVE_CHECK(args.input.dtype == DType::kBF16, "bf16 rows");
  const FusedParams params = ParamsOf(args);
  if (params.down.rows == 0) return;
  const CudaLinearBank& down = AsCuda(*args.down);
  if (tile == FusedTile::kAuto) tile = ChooseTile(down, params);
  if (tile == FusedTile::kWarpgroup && internal::FusedWgmmaFits(down, params)) {
    internal::LaunchFusedWgmma(down, params, stream);
  } else {
    LaunchMma(down, params, stream);
  }
}

}  // namespace moeserve::cuda
