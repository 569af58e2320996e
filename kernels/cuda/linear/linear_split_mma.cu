// Products of f32 rows with bf16 weights on the tensor cores, as exact as on the CUDA cores and as
// fast as the weights can be read. Used for the LM head of a bf16 model, whose input is f32.
//
// Each f32 row is split into three bf16 rows whose sum is the row (3 x 8 bits of significand). For
// each block of 64 inputs, all three are multiplied into one sum, which is then added to the result
// in f32. Long sums on the tensor cores would drift, because the tensor cores truncate the low bits
// of what they accumulate.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kBlockBytes = kImageBlock * kImageBlock * 2;
constexpr int kRowBytes = kImageBlock * 2;
constexpr int kThreads = 128;  // one warp per 16 of the 64 outputs
constexpr int kPlanes = 3;
constexpr int kPitch = kImageBlock + 4;

template <int kTileRowsArg, int kStagesArg, int kBlocksPerMultiprocessorArg>
struct SplitShape {
  static constexpr int kTileRows = kTileRowsArg;
  static constexpr int kStages = kStagesArg;
  static constexpr int kBlocksPerMultiprocessor = kBlocksPerMultiprocessorArg;
  static constexpr int kNTiles = kTileRows / 8;
  static constexpr int kPlaneBytes = kTileRows * kRowBytes;
  static constexpr int kWeightBytes = kStages * kBlockBytes;
  static constexpr int kStagedBytes = kTileRows * kPitch * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes =
      std::max(kWeightBytes + 2 * kPlanes * kPlaneBytes, kStagedBytes);
  // Pieces of 8 inputs that a thread splits; a row has 8 pieces.
  static constexpr int kPieces = (kTileRows * 8 + kThreads - 1) / kThreads;
};

// Splits each of 8 inputs into its three bf16 parts.
__device__ inline void Split(const float (&x)[8], uint4 (&parts)[kPlanes]) {
  uint32_t words[kPlanes][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low = x[2 * i], high = x[2 * i + 1];
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint32_t pair = PackBf16(low, high);
      words[plane][i] = pair;
      low -= LowBf16(pair);
      high -= HighBf16(pair);
      // Inf and NaN, and what rounds to Inf, leave no remainder.
      if ((pair & 0x7f80u) == 0x7f80u) low = 0.0f;
      if ((pair & 0x7f800000u) == 0x7f800000u) high = 0.0f;
    }
  }
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) {
    parts[plane] = make_uint4(words[plane][0], words[plane][1], words[plane][2], words[plane][3]);
  }
}

// One thread's pieces of the rows: each piece is read one block ahead into registers, then split
// into the three planes.
template <typename S>
class RowPieces {
 public:
  __device__ RowPieces(const LinearParams& p, const LinearBankEntry& m, const LinearTileRange& tile)
      : inputs_(m.in_features), wide_(p.wide_input) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < S::kPieces; ++i) {
      const int r = thread / 8 + i * (kThreads / 8);
      // Rows beyond the last one in its group of 8 (n8) repeat the last row; their results are
      // dropped.
      rows_[i] = r < (tile.rows + 7) / 8 * 8 ? reinterpret_cast<const float*>(LinearInputRow(
                                                   p, tile, tile.row + min(r, tile.rows - 1)))
                                             : nullptr;
    }
  }

  __device__ void Read(int k_block) {
    const int first = k_block * kImageBlock + static_cast<int>(threadIdx.x) % 8 * 8;
#pragma unroll
    for (int i = 0; i < S::kPieces; ++i) {
      if (rows_[i] == nullptr) continue;
      if (wide_ && first + 8 <= inputs_) {
        const float4 low = *reinterpret_cast<const float4*>(rows_[i] + first);
        const float4 high = *reinterpret_cast<const float4*>(rows_[i] + first + 4);
        const float all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) values_[i][j] = all[j];
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          values_[i][j] = first + j < inputs_ ? rows_[i][first + j] : 0.0f;
        }
      }
    }
  }

  __device__ void Store(char* planes) const {
    const int piece = static_cast<int>(threadIdx.x) % 8;
#pragma unroll
    for (int i = 0; i < S::kPieces; ++i) {
      if (rows_[i] == nullptr) continue;
      const int r = static_cast<int>(threadIdx.x) / 8 + i * (kThreads / 8);
      uint4 parts[kPlanes];
      Split(values_[i], parts);
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        char* to = planes + plane * S::kPlaneBytes + r * kRowBytes + (piece ^ (r & 7)) * 16;
        *reinterpret_cast<uint4*>(to) = parts[plane];
      }
    }
  }

 private:
  const float* rows_[S::kPieces];
  float values_[S::kPieces][8];
  int inputs_;
  bool wide_;
};

__device__ inline void LoadBlock(const char* block, char* stage) {
#pragma unroll
  for (int i = 0; i < kBlockBytes / 16 / kThreads; ++i) {
    const int at = (static_cast<int>(threadIdx.x) + i * kThreads) * 16;
    CopyAsync16(stage + at, block + at);
  }
}

template <typename S>
__device__ void MultiplyBlock(const char* weights, const char* planes, int valid_n_tiles,
                              float (&sums)[S::kNTiles][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float partial[S::kNTiles][4] = {};
#pragma unroll
  for (int k16 = 0; k16 < kImageBlock / 16; ++k16) {
    uint32_t a[4];
    const int row = warp * 16 + lane % 16;
    LoadMatrix4(a, weights + row * kRowBytes + ((k16 * 2 + lane / 16) ^ (row & 7)) * 16);
    const int piece = (k16 * 2 + lane / 8 % 2) ^ (lane & 7);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const char* rows = planes + plane * S::kPlaneBytes + piece * 16;
      if constexpr (S::kNTiles == 1) {
        uint32_t b[2];
        LoadMatrix2(b, rows + lane % 8 * kRowBytes);
        MmaBf16(partial[0], a, b);
      } else {
#pragma unroll
        for (int pair = 0; pair < S::kNTiles / 2; ++pair) {
          if (pair * 2 >= valid_n_tiles) break;
          uint32_t both[4];
          LoadMatrix4(both, rows + (pair * 16 + lane % 8 + lane / 16 * 8) * kRowBytes);
          const uint32_t first[2] = {both[0], both[1]};
          const uint32_t second[2] = {both[2], both[3]};
          MmaBf16(partial[pair * 2], a, first);
          MmaBf16(partial[pair * 2 + 1], a, second);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < S::kNTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[n][j] += partial[n][j];
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads, S::kBlocksPerMultiprocessor)
    LinearSplitMmaKernel(const LinearParams p) {
  if (HasTileList(p)) GridDependencyWait();
  const LinearTileRange tile =
      FindLinearTile<S::kTileRows, kImageBlock>(p, static_cast<int>(blockIdx.x));
  if (tile.expert < 0) return;
  const LinearBankEntry m = p.entries[tile.expert];
  const char* weights =
      p.weights + m.weights +
      static_cast<int64_t>(tile.image_row / kImageBlock) * m.k_blocks * kBlockBytes;
  char* stages = DynamicShared<char>();
  char* planes = stages + S::kWeightBytes;
#pragma unroll 1
  for (int s = 0; s < S::kStages - 1; ++s) {
    if (s < m.k_blocks) {
      LoadBlock(weights + static_cast<int64_t>(s) * kBlockBytes, stages + s * kBlockBytes);
    }
    CopyAsyncCommit();
  }
  // The copies of weights were started before this wait, because weights do not depend on earlier
  // kernels.
  GridDependencyPass();
  RowPieces<S> rows(p, m, tile);
  rows.Read(0);
  float sums[S::kNTiles][4] = {};
  const int valid_n_tiles = (tile.rows + 7) / 8;
  int stage = 0;
  for (int k = 0; k < m.k_blocks; ++k) {
    // All reads of these planes, two blocks ago, ended before the last barrier.
    char* current = planes + k % 2 * (kPlanes * S::kPlaneBytes);
    rows.Store(current);
    if (k + 1 < m.k_blocks) rows.Read(k + 1);
    CopyAsyncWait<S::kStages - 2>();
    __syncthreads();
    const int next = k + S::kStages - 1;
    if (next < m.k_blocks) {
      const int slot = stage == 0 ? S::kStages - 1 : stage - 1;
      LoadBlock(weights + static_cast<int64_t>(next) * kBlockBytes, stages + slot * kBlockBytes);
    }
    CopyAsyncCommit();
    MultiplyBlock<S>(stages + stage * kBlockBytes, current, valid_n_tiles, sums);
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
  }
  CopyAsyncWait<0>();
  __syncthreads();
  float* staged = reinterpret_cast<float*>(stages);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int column = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < S::kNTiles; ++n) {
    const int row = n * 8 + lane % 4 * 2;
    staged[row * kPitch + column] = sums[n][0];
    staged[(row + 1) * kPitch + column] = sums[n][1];
    staged[row * kPitch + column + 8] = sums[n][2];
    staged[(row + 1) * kPitch + column + 8] = sums[n][3];
  }
  __syncthreads();
  StoreLinearTile<kImageBlock, kPitch, kThreads>(p, m, tile, staged, static_cast<int>(threadIdx.x));
}

template <typename S>
void LaunchShaped(const CudaLinearBank& bank, const LinearParams& p, cudaStream_t stream) {
  const int64_t tiles = internal::MaxLinearTiles(bank, p.rows, S::kTileRows, kImageBlock);
  MOESERVE_CHECK(tiles <= INT32_MAX, "tiles of a linear layer");
  Launch(LinearSplitMmaKernel<S>,
         LaunchShape{dim3(static_cast<unsigned>(tiles)), dim3(kThreads), S::kSharedBytes, stream,
                     true},
         p);
}

}  // namespace

namespace internal {

void LaunchLinearSplitMma(const CudaLinearBank& bank, const LinearParams& p, cudaStream_t stream) {
  const int64_t per_expert = p.rows / bank.num_experts();
  if (per_expert <= 8) return LaunchShaped<SplitShape<8, 8, 3>>(bank, p, stream);
  if (per_expert <= 32) return LaunchShaped<SplitShape<32, 6, 3>>(bank, p, stream);
  LaunchShaped<SplitShape<64, 5, 2>>(bank, p, stream);
}

}  // namespace internal
}  // namespace moeserve::cuda
