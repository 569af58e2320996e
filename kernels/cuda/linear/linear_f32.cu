// Products of f32 rows with f32 and f16 weights on the CUDA cores. For every output, and with any
// tile, one chain of fused multiply-adds runs over the inputs in ascending order.

#include <algorithm>

#include "base/check.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/linear_tile.cuh"

namespace moeserve::cuda {
namespace {

constexpr int kTileImageRows = kImageBlock;
constexpr int kPitch = kTileImageRows + 4;
constexpr int kRowBytes = kImageBlock * 4;  // bytes of 64 inputs

// The dimensions of a tile. A warp computes all 64 outputs for its kRowsPerWarp rows; each lane
// computes two outputs, which are 32 apart.
template <DType kWeightsArg, int kRowsPerWarpArg, int kWarpsArg, int kStagesArg>
struct F32Shape {
  static constexpr DType kWeights = kWeightsArg;
  static constexpr int kRowsPerWarp = kRowsPerWarpArg;
  static constexpr int kStages = kStagesArg;
  static constexpr int kThreads = kWarpsArg * 32;
  static constexpr int kTileRows = kRowsPerWarp * kWarpsArg;
  static constexpr int kElement = kWeights == DType::kF32 ? 4 : 2;
  static constexpr int kPerPiece = 16 / kElement;
  static constexpr int kWeightBytes = kImageBlock * kImageBlock * kElement;
  static constexpr int kStageBytes = kWeightBytes + kTileRows * kRowBytes;
  static constexpr int kSharedBytes =
      std::max(kStages * kStageBytes, kTileRows* kPitch* static_cast<int>(sizeof(float)));
  static_assert(kWeightBytes % (kThreads * 16) == 0);
};

// Returns the same value as F32FromF16() without branching on the value.
__device__ inline float WidenF16(uint32_t bits) {
  const float magnitude = F32FromBits((bits & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return F32FromBits(BitsFromF32(magnitude) | special | (bits & 0x8000u) << 16);
}

template <DType kWeights, int kCount>
__device__ inline void UnpackPiece(const char* piece, float (&values)[kCount]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(piece);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kWeights == DType::kF32) {
      values[i] = F32FromBits(words[i]);
    } else {
      values[2 * i] = WidenF16(words[i] & 0xffffu);
      values[2 * i + 1] = WidenF16(words[i] >> 16);
    }
  }
}

template <typename S>
__device__ void LoadF32Stage(const LinearParams& p, const LinearBankEntry& m,
                             const LinearTileRange& tile, int k_block, char* stage) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t block = static_cast<int64_t>(tile.image_row / kImageBlock) * m.k_blocks + k_block;
  const char* weights = p.weights + m.weights + block * S::kWeightBytes;
#pragma unroll
  for (int i = 0; i < S::kWeightBytes / 16 / S::kThreads; ++i) {
    const int at = (thread + i * S::kThreads) * 16;
    CopyAsync16(stage + at, weights + at);
  }
  // A row of a stage has 16 pieces of 4 inputs.
  char* rows = stage + S::kWeightBytes;
  for (int i = thread; i < tile.rows * 16; i += S::kThreads) {
    const int r = i / 16;
    const int byte = i % 16 * 16;
    const char* from = LinearInputRow(p, tile, tile.row + r) + k_block * kRowBytes + byte;
    const int valid = min(16, max(0, m.in_features * 4 - k_block * kRowBytes - byte));
    char* to = rows + r * kRowBytes + byte;
    if (p.wide_input) {
      CopyAsync16(to, valid > 0 ? from : p.input, valid);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        reinterpret_cast<float*>(to)[j] =
            j * 4 < valid ? reinterpret_cast<const float*>(from)[j] : 0.0f;
      }
    }
  }
}

template <typename S>
__device__ void MultiplyF32Stage(const char* stage, int rows, float (&sums)[2][S::kRowsPerWarp]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = static_cast<int>(threadIdx.x) / 32 * S::kRowsPerWarp;
  if (first >= rows) return;
  const float* x = reinterpret_cast<const float*>(stage + S::kWeightBytes + first * kRowBytes);
  const char* weights = stage + lane * kImageBlock * S::kElement;
#pragma unroll 2
  for (int piece = 0; piece < kImageBlock / S::kPerPiece; ++piece) {
    float w[2][S::kPerPiece];
    const int at = (piece ^ (lane & 7)) * 16;
    UnpackPiece<S::kWeights>(weights + at, w[0]);
    UnpackPiece<S::kWeights>(weights + 32 * kImageBlock * S::kElement + at, w[1]);
#pragma unroll
    for (int r = 0; r < S::kRowsPerWarp; ++r) {
#pragma unroll
      for (int quad = 0; quad < S::kPerPiece / 4; ++quad) {
        const float4 v =
            *reinterpret_cast<const float4*>(x + r * kImageBlock + piece * S::kPerPiece + quad * 4);
        const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sums[0][r] = fmaf(values[j], w[0][quad * 4 + j], sums[0][r]);
          sums[1][r] = fmaf(values[j], w[1][quad * 4 + j], sums[1][r]);
        }
      }
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 2) LinearF32Kernel(const LinearParams p) {
  GridDependencyPass();
  const LinearTileRange tile =
      FindLinearTile<S::kTileRows, kTileImageRows>(p, static_cast<int>(blockIdx.x));
  if (tile.expert < 0) return;
  const LinearBankEntry m = p.entries[tile.expert];
  char* shared = DynamicShared<char>();
  float sums[2][S::kRowsPerWarp] = {};
#pragma unroll
  for (int s = 0; s < S::kStages - 1; ++s) {
    if (s < m.k_blocks) LoadF32Stage<S>(p, m, tile, s, shared + s * S::kStageBytes);
    CopyAsyncCommit();
  }
  int stage = 0;
  for (int k = 0; k < m.k_blocks; ++k) {
    CopyAsyncWait<S::kStages - 2>();
    __syncthreads();
    const int next = k + S::kStages - 1;
    if (next < m.k_blocks) {
      const int slot = stage == 0 ? S::kStages - 1 : stage - 1;
      LoadF32Stage<S>(p, m, tile, next, shared + slot * S::kStageBytes);
    }
    CopyAsyncCommit();
    MultiplyF32Stage<S>(shared + stage * S::kStageBytes, tile.rows, sums);
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
  }
  CopyAsyncWait<0>();
  __syncthreads();
  float* staged = reinterpret_cast<float*>(shared);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = static_cast<int>(threadIdx.x) / 32 * S::kRowsPerWarp;
#pragma unroll
  for (int r = 0; r < S::kRowsPerWarp; ++r) {
    staged[(first + r) * kPitch + lane] = sums[0][r];
    staged[(first + r) * kPitch + lane + 32] = sums[1][r];
  }
  __syncthreads();
  StoreLinearTile<kTileImageRows, kPitch, S::kThreads>(p, m, tile, staged,
                                                       static_cast<int>(threadIdx.x));
}

template <typename S>
void LaunchShaped(const CudaLinearBank& bank, const LinearParams& p, cudaStream_t stream) {
  const int64_t tiles = internal::MaxLinearTiles(bank, p.rows, S::kTileRows, kTileImageRows);
  MOESERVE_CHECK(tiles <= INT32_MAX, "tiles of a linear layer");
  Launch(LinearF32Kernel<S>,
         LaunchShape{dim3(static_cast<unsigned>(tiles)), dim3(S::kThreads), S::kSharedBytes, stream,
                     true},
         p);
}

// With few rows per expert, many small blocks stream the weights. With many rows, large tiles reuse
// the weights.
template <DType kWeights>
void LaunchTyped(const CudaLinearBank& bank, const LinearParams& p, cudaStream_t stream) {
  constexpr int64_t kFewRowsPerExpert = 16;
  constexpr int kFewStages = kWeights == DType::kF32 ? 3 : 5;
  if (p.rows <= kFewRowsPerExpert * bank.num_experts()) {
    return LaunchShaped<F32Shape<kWeights, 4, 2, kFewStages>>(bank, p, stream);
  }
  LaunchShaped<F32Shape<kWeights, 8, 8, 3>>(bank, p, stream);
}

}  // namespace

namespace internal {

void LaunchLinearF32(const CudaLinearBank& bank, const LinearParams& p, cudaStream_t stream) {
  switch (bank.shape().weight_dtype) {
    case DType::kF32:
      return LaunchTyped<DType::kF32>(bank, p, stream);
    case DType::kF16:
      return LaunchTyped<DType::kF16>(bank, p, stream);
    case DType::kBF16:
      return LaunchLinearSplitMma(bank, p, stream);
  }
}

}  // namespace internal
}  // namespace moeserve::cuda
