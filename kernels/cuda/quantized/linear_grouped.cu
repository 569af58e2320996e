// Products of rows rounded to int8 with weights of types int8 and int4, by mma.sync. The products
// of a group are summed exactly; the sum is scaled and added in f32, groups in ascending order, as
// on the CPU.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_image.h"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_mma.cuh"
#include "kernels/cuda/quantized/linear_grouped.h"

namespace moeserve::cuda {
namespace {

// The dimensions of a tile: kTileRows rows x 64 outputs. Each warp computes 16 outputs of its rows.
template <bool kInt4Arg, int kTileRowsArg, int kWarpsDownArg, int kStagesArg,
          int kBlocksPerMultiprocessorArg>
struct GroupedShape {
  static constexpr bool kInt4 = kInt4Arg;
  static constexpr int kTileRows = kTileRowsArg;
  static constexpr int kWarpsAcross = kImageBlock / kInt4TileRows;
  static constexpr int kWarpsDown = kWarpsDownArg;
  static constexpr int kMTiles = 1;
  static constexpr int kNTiles = kTileRows / kWarpsDown / 8;
  using Sums = float[kMTiles][kNTiles][4];
  static constexpr int kStages = kStagesArg;
  static constexpr int kBlocksPerMultiprocessor = kBlocksPerMultiprocessorArg;
  static constexpr int kThreads = kWarpsAcross * kWarpsDown * 32;
  // A stage has the weights of a block, then the rows with their scales.
  static constexpr int kWeightBytes = GroupedBlockBytes(kInt4);
  static constexpr int kStageBytes = kWeightBytes + kTileRows * kGroupedRowBytes;
  static constexpr int kPitch = kImageBlock + 4;  // floats per row of the staged results
  static constexpr int kSharedBytes = std::max(kStages * kStageBytes, kTileRows* kPitch * 4);
  static constexpr int kPiecesOfRow = kGroupedRowBytes / 16;
  static constexpr int kRowPieces = (kTileRows * kPiecesOfRow + kThreads - 1) / kThreads;
};

// One thread's part of the copies into the stages. Rows in a stage are 9 times 16 bytes apart, so
// eight of them are read without bank conflicts.
template <typename S>
class GroupedLoader {
 public:
  __device__ GroupedLoader(const LinearParams& p, const LinearBankEntry& m,
                           const LinearTileRange& tile)
      : input_(p.input) {
    const int thread = static_cast<int>(threadIdx.x);
    weights_ = p.weights + m.weights +
               static_cast<int64_t>(tile.image_row / kImageBlock) * m.k_blocks * S::kWeightBytes +
               thread * 16;
    // The last group of 8 rows (n8) is read completely. The results of rows beyond the last one are
    // dropped, so their content does not matter.
    const int pieces = (tile.rows + 7) / 8 * 8 * S::kPiecesOfRow;
    row_pieces_ = (pieces - thread + S::kThreads - 1) / S::kThreads;
#pragma unroll
    for (int i = 0; i < S::kRowPieces; ++i) {
      const int at = thread + i * S::kThreads;
      const int r = min(at / S::kPiecesOfRow, tile.rows - 1);
      const char* const piece = LinearInputRow(p, tile, tile.row + r) + at % S::kPiecesOfRow * 16;
      rows_[i] = static_cast<uint32_t>((piece - p.input) / 16);
    }
  }

  __device__ void LoadWeights(char* stage) {
    constexpr int kPieces = S::kWeightBytes / 16;
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < (kPieces + S::kThreads - 1) / S::kThreads; ++i) {
      if ((i + 1) * S::kThreads > kPieces && thread + i * S::kThreads >= kPieces) continue;
      CopyAsync16(stage + (thread + i * S::kThreads) * 16, weights_ + i * S::kThreads * 16);
    }
    weights_ += S::kWeightBytes;
  }

  __device__ void LoadRows(char* stage) {
    char* const to = stage + S::kWeightBytes + static_cast<int>(threadIdx.x) * 16;
#pragma unroll
    for (int i = 0; i < S::kRowPieces; ++i) {
      if (i < row_pieces_) CopyAsync16(to + i * S::kThreads * 16, input_ + int64_t{rows_[i]} * 16);
      rows_[i] += S::kPiecesOfRow;
    }
  }

 private:
  const char* weights_;
  const char* input_;
  uint32_t rows_[S::kRowPieces];  // offsets in 16 bytes
  int row_pieces_;
};

// Returns the operand of 32 inputs. Integers of 4 bits are multiplied by 16: they are the high bits
// of bytes in two's complement.
template <bool kInt4>
__device__ __forceinline__ void LoadGroupedWeights(const char* tile, int k32, uint32_t (&a)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (kInt4) {
    constexpr uint32_t kHigh = 0xf0f0f0f0u;
    const uint2 packed =
        *reinterpret_cast<const uint2*>(tile + k32 / 2 * 512 + lane * 16 + k32 % 2 * 8);
    a[0] = packed.x << 4 & kHigh;
    a[1] = packed.y << 4 & kHigh;
    a[2] = packed.x & kHigh;
    a[3] = packed.y & kHigh;
  } else {
    const uint4 all = *reinterpret_cast<const uint4*>(tile + k32 * 512 + lane * 16);
    a[0] = all.x;
    a[1] = all.y;
    a[2] = all.z;
    a[3] = all.w;
  }
}

// Returns an f16 as f32, by one instruction.
__device__ __forceinline__ float WidenF16(uint16_t bits) {
#if defined(MOESERVE_CUDA_EMULATION)
  return F32FromF16(bits);
#else
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#endif
}

// The sum of a group is at most 2^20 in magnitude. Added to the bits of 1.5 * 2^23, it is in the
// lowest bits of that number's mantissa, so one exact f32 operation converts it; the conversion
// instruction has a quarter of the throughput.
constexpr int32_t kFirstSum = 0x4b400000;
template <bool kInt4>
__device__ __forceinline__ float GroupSum(int32_t part) {
  constexpr float kFirst = 0x1.8p+23f;
  if constexpr (kInt4) return __fmaf_rn(__int_as_float(part), 0.0625f, -0.0625f * kFirst);
  return __fsub_rn(__int_as_float(part), kFirst);
}

// Adds the products of a block: for each group the exact sum, times the product of both scales.
template <typename S>
__device__ __forceinline__ void MultiplyGroups(const char* stage, int valid_n_tiles,
                                               typename S::Sums& sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const char* const tile = stage + warp % S::kWarpsAcross * GroupedTileBytes(S::kInt4);
  const char* const rows =
      stage + S::kWeightBytes + warp / S::kWarpsAcross * S::kNTiles * 8 * kGroupedRowBytes;
  constexpr int kGroups = GroupsOfBlock(S::kInt4), kSteps = kInt8BlockInputs / 32 / kGroups;
  const auto* const scales =
      reinterpret_cast<const uint32_t*>(tile + GroupedIntegerBytes(S::kInt4)) + lane / 4 * kGroups;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    uint32_t a[kSteps][4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      LoadGroupedWeights<S::kInt4>(tile, group * kSteps + i, a[i]);
    }
    const uint32_t both = scales[group];
    const float of_output[2] = {WidenF16(static_cast<uint16_t>(both & 0xffffu)),
                                WidenF16(static_cast<uint16_t>(both >> 16))};
#pragma unroll
    for (int nt = 0; nt < S::kNTiles; ++nt) {
      if (nt >= valid_n_tiles) break;
      const char* const eight = rows + nt * 8 * kGroupedRowBytes;
      int32_t part[4] = {kFirstSum, kFirstSum, kFirstSum, kFirstSum};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint32_t b[2];
        LoadMatrix2(b, eight + lane % 8 * kGroupedRowBytes +
                           ((group * kSteps + i) * 2 + lane / 8 % 2) * 16);
        MmaInt8(part, a[i], b);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const char* const row = eight + (lane % 4 * 2 + i % 2) * kGroupedRowBytes;
        const float of_row = reinterpret_cast<const float*>(row + kInt8BlockInputs)[group];
        const float sum = GroupSum<S::kInt4>(part[i]);
        sums[0][nt][i] = __fmaf_rn(sum, __fmul_rn(of_output[i / 2], of_row), sums[0][nt][i]);
      }
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerMultiprocessor)
    LinearGroupedKernel(const LinearParams p) {
  if (HasTileList(p)) GridDependencyWait();
  const LinearTileRange tile =
      FindLinearTile<S::kTileRows, kImageBlock>(p, static_cast<int>(blockIdx.x));
  if (tile.expert < 0) return;
  const LinearBankEntry m = p.entries[tile.expert];
  char* shared = DynamicShared<char>();
  typename S::Sums sums = {};
  GroupedLoader<S> loader(p, m, tile);
#pragma unroll 1
  for (int s = 0; s < min(S::kStages - 1, m.k_blocks); ++s) {
    loader.LoadWeights(shared + s * S::kStageBytes);
  }
  // Weights do not depend on earlier kernels.
  GridDependencyPass();
#pragma unroll 1
  for (int s = 0; s < S::kStages - 1; ++s) {
    if (s < m.k_blocks) loader.LoadRows(shared + s * S::kStageBytes);
    CopyAsyncCommit();
  }
  const int down = static_cast<int>(threadIdx.x) / 32 / S::kWarpsAcross;
  const int valid_n_tiles = (tile.rows - down * S::kNTiles * 8 + 7) / 8;
  constexpr int kLastStage = (S::kStages - 1) * S::kStageBytes;
  int stage = 0;  // offset in bytes
#pragma unroll 1
  for (int block = 0; block < m.k_blocks; ++block) {
    CopyAsyncWait<S::kStages - 2>();
    __syncthreads();  // afterwards all copies for this stage are visible, and no thread reads the
                      // stage before it
    if (block + S::kStages - 1 < m.k_blocks) {
      char* const slot = shared + (stage == 0 ? kLastStage : stage - S::kStageBytes);
      loader.LoadWeights(slot);
      loader.LoadRows(slot);
    }
    CopyAsyncCommit();
    MultiplyGroups<S>(shared + stage, valid_n_tiles, sums);
    stage = stage == kLastStage ? 0 : stage + S::kStageBytes;
  }
  CopyAsyncWait<0>();
  __syncthreads();
  float* staged = reinterpret_cast<float*>(shared);
  StageSums<S>(sums, staged, [](int, int, float sum) { return sum; });
  __syncthreads();
  StoreLinearTile<kImageBlock, S::kPitch, S::kThreads>(p, m, tile, staged,
                                                       static_cast<int>(threadIdx.x));
}

template <typename S>
void LaunchGroupedShape(const CudaLinearBank& bank, const LinearParams& p, cudaStream_t stream) {
  const int64_t tiles = internal::MaxLinearTiles(bank, p.rows, S::kTileRows, kImageBlock);
  MOESERVE_CHECK(tiles <= INT32_MAX, "tiles of a linear layer");
  Launch(LinearGroupedKernel<S>,
         LaunchShape{dim3(static_cast<unsigned>(tiles)), dim3(S::kThreads), S::kSharedBytes, stream,
                     true},
         p);
}

// Returns the tile that is expected to be the fastest. This has not been measured.
LinearTile ChooseGroupedTile(const CudaLinearBank& bank, const LinearParams& p) {
  const int64_t rows = p.expected, experts = bank.num_experts();
  const int64_t wanted = experts == 1 ? rows : rows * 3 / 2 / experts;
  constexpr int64_t kFewTiles = 200;
  struct Candidate {
    LinearTile tile;
    int rows;
  };
  for (const Candidate& c :
       {Candidate{LinearTile::kRows128, 128}, Candidate{LinearTile::kRows64, 64},
        Candidate{LinearTile::kRows32, 32}, Candidate{LinearTile::kRows16, 16}}) {
    // A tile is at least half full, and there are enough of them.
    if (wanted > c.rows / 2 &&
        internal::MaxLinearTiles(bank, rows, c.rows, kImageBlock) >= kFewTiles) {
      return c.tile;
    }
  }
  return LinearTile::kRows8;
}

// The template arguments after the type: rows of a tile, warps along the rows, pipeline stages,
// blocks per multiprocessor.
template <bool kInt4>
void LaunchGroupedTile(const CudaLinearBank& bank, const LinearParams& p, LinearTile tile,
                       cudaStream_t stream) {
  switch (tile) {
    case LinearTile::kRows8:
      return LaunchGroupedShape<GroupedShape<kInt4, 8, 1, kInt4 ? 12 : 7, 3>>(bank, p, stream);
    case LinearTile::kRows16:
      return LaunchGroupedShape<GroupedShape<kInt4, 16, 1, kInt4 ? 10 : 6, 3>>(bank, p, stream);
    case LinearTile::kRows32:
      return LaunchGroupedShape<GroupedShape<kInt4, 32, 1, kInt4 ? 7 : 5, 3>>(bank, p, stream);
    case LinearTile::kRows64:
      return LaunchGroupedShape<GroupedShape<kInt4, 64, 2, 4, 2>>(bank, p, stream);
    default:
      return LaunchGroupedShape<GroupedShape<kInt4, 128, 2, 3, 2>>(bank, p, stream);
  }
}

}  // namespace

std::vector<LinearTile> GroupedTilesThatFit() {
  return {LinearTile::kRows8, LinearTile::kRows16, LinearTile::kRows32, LinearTile::kRows64,
          LinearTile::kRows128};
}

LinearTile DefaultGroupedTile(const LinearArgs& args) {
  return ChooseGroupedTile(static_cast<const CudaLinearBank&>(*args.bank),
                           internal::LinearParamsOf(args));
}

void LaunchLinearGrouped(const LinearArgs& args, LinearTile tile, const Int8Rows& rows,
                         cudaStream_t stream) {
  const auto& bank = static_cast<const CudaLinearBank&>(*args.bank);
  MOESERVE_CHECK(bank.is_grouped(), "a bank of type int8 or int4");
  LinearParams p = internal::LinearParamsOf(args);
  if (p.rows == 0) return;
  LaunchRoundRows(args, rows, stream);
  p.input = reinterpret_cast<const char*>(rows.values());
  p.input_stride = Int8RowBytes(args);
  p.input_segment = args.segments ? args.input.rows * p.input_stride : 0;
  if (tile == LinearTile::kAuto) tile = ChooseGroupedTile(bank, p);
  MOESERVE_CHECK(tile >= LinearTile::kRows8 && tile <= LinearTile::kRows128, "a tile of mma.sync");
  bank.shape().quantization == Quantization::kInt4
      ? LaunchGroupedTile<true>(bank, p, tile, stream)
      : LaunchGroupedTile<false>(bank, p, tile, stream);
}

}  // namespace moeserve::cuda
