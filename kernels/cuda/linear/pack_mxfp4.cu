// Packs bf16 weights that are 4-bit floats with common scales into blocks of MXFP4.

#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_bank.h"
#include "kernels/cuda/linear/linear_image.h"

namespace moeserve::cuda {
namespace {

constexpr int kMxfp4PackThreads = 128;

__device__ uint32_t WeightAsBf16(const internal::PackMxfp4Args& a, int64_t i) {
  if (a.source_dtype == DType::kF32) return Bf16FromF32(static_cast<const float*>(a.source)[i]);
  const uint16_t bits = static_cast<const uint16_t*>(a.source)[i];
  return a.source_dtype == DType::kBF16 ? bits : Bf16FromF32(F32FromF16(bits));
}

// Returns the number of three bits that `scale` widens to `magnitude`; 8 if there is none.
__device__ uint32_t FindMagnitude(uint32_t magnitude, uint32_t scale) {
  uint32_t found = 8;
#pragma unroll
  for (uint32_t m = 0; m < 8; ++m) {
    if ((MultiplyBf16Pairs(m << 6, scale << 7) & 0xffffu) == magnitude) found = m;
  }
  return found;
}

// Each block packs one row; each warp packs 32 inputs at a time. The scale is the one with which
// the largest magnitude is 4 or 6: then all other numbers of an MXFP4 block can be stored, too,
// whatever scale the file has.
__global__ void PackMxfp4Kernel(internal::PackMxfp4Args a) {
  constexpr uint32_t kLargestScale = 254;  // of a finite bf16
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int r = static_cast<int>(blockIdx.x);
  const int row = ImageRow(a.gated, a.gate_half, a.first_row + r);
  for (int first = thread - lane; first < a.in_features; first += kMxfp4PackThreads) {
    const int k = first + lane;
    const bool present = k < a.in_features;
    const uint32_t number =
        present ? WeightAsBf16(a, static_cast<int64_t>(r) * a.in_features + k) : 0;
    const uint32_t magnitude = number & 0x7fffu;
    uint32_t largest = magnitude;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      largest = max(largest, __shfl_xor_sync(kFullMask, largest, step));
    }
    // 4 is 2^2, and a scale stands for 2^(scale - 253).
    const uint32_t scale = min(max(largest >> 7, 1u) + 124, kLargestScale);
    const uint32_t found = FindMagnitude(magnitude, scale);
    if (found == 8) *a.misfit = 1;
    uint32_t word = present ? Mxfp4WordBits(row, k, (number >> 12 & 8) | (found & 7)) : 0;
    word |= __shfl_xor_sync(kFullMask, word, 1);
    word |= __shfl_xor_sync(kFullMask, word, 8);
    // The other half of the word belongs to another row.
    if ((lane & 9) == 0 && present) {
      atomicOr(reinterpret_cast<unsigned*>(a.image + Mxfp4WordOffset(a.k_blocks, row, k)), word);
    }
    if (lane == 0) a.image[Mxfp4ScaleOffset(a.k_blocks, row, k)] = static_cast<char>(scale);
  }
}

}  // namespace

namespace internal {

void LaunchPackMxfp4(const PackMxfp4Args& args, cudaStream_t stream) {
  Launch(PackMxfp4Kernel,
         {dim3(static_cast<unsigned>(args.rows)), dim3(kMxfp4PackThreads), 0, stream}, args);
}

}  // namespace internal
}  // namespace moeserve::cuda
