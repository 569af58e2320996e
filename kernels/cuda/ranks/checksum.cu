#include <algorithm>

#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/ranks/checksum.h"

namespace moeserve::cuda {
namespace {

constexpr int kChecksumThreads = 256;
constexpr int64_t kChecksumBlocks = 264;

__global__ void ClearChecksumKernel(unsigned long long* sum) {
  GridDependencyPass();
  *sum = 0;
}

__global__ void __launch_bounds__(kChecksumThreads)
    ChecksumKernel(const uint32_t* words, int64_t count, unsigned long long* sum) {
  GridDependencyPass();
  unsigned long long own = 0;
  const int64_t stride = int64_t{gridDim.x} * kChecksumThreads;
  for (int64_t i = int64_t{blockIdx.x} * kChecksumThreads + threadIdx.x; i < count; i += stride) {
    own += ChecksumOfWord(static_cast<uint64_t>(i), words[i]);
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    const auto low = __shfl_xor_sync(kFullMask, static_cast<uint32_t>(own), distance);
    const auto high = __shfl_xor_sync(kFullMask, static_cast<uint32_t>(own >> 32), distance);
    own += static_cast<unsigned long long>(high) << 32 | low;
  }
  if (threadIdx.x % 32 == 0) atomicAdd(sum, own);
}

}  // namespace

void LaunchChecksum(const uint32_t* words, int64_t count, unsigned long long* sum,
                    cudaStream_t stream) {
  Launch(ClearChecksumKernel, {.grid = 1, .block = 1, .stream = stream}, sum);
  const int64_t blocks = (count + kChecksumThreads - 1) / kChecksumThreads;
  Launch(ChecksumKernel,
         {.grid = dim3(static_cast<unsigned>(std::min(blocks, kChecksumBlocks))),
          .block = dim3(kChecksumThreads),
          .stream = stream,
          .overlaps_predecessor = true},
         words, count, sum);
}

}  // namespace moeserve::cuda
