#include <algorithm>

#include "kernels/cuda/device/launch.h"
#include "tests/bench/cuda/data.h"

namespace moeserve::bench {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 4;  // independent 16-byte loads per thread

unsigned Blocks(int64_t items, int64_t items_per_block) {
  return static_cast<unsigned>(
      std::clamp<int64_t>((items + items_per_block - 1) / items_per_block, 1, 1 << 30));
}

__global__ void FillKernel(void* data, bool bf16, int64_t count, uint64_t seed, float scale) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const float v = RandomElement(seed, i, scale);
  if (bf16) {
    static_cast<Bf16*>(data)[i] = Bf16FromF32(v);
  } else {
    static_cast<float*>(data)[i] = v;
  }
}

__global__ void FillInt8CacheKernel(int8_t* data, int64_t bytes, int64_t stride, int scale_bytes,
                                    uint64_t seed) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= bytes) return;
  const int64_t within = i % stride;
  if (within >= scale_bytes) {
    data[i] = RandomByte(seed, i);
  } else if (within % 4 == 0) {
    *reinterpret_cast<float*>(data + i) = kInt8CacheScale;
  }
}

__global__ void CopyKernel(const uint4* from, uint4* to, int64_t count) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kVectors + threadIdx.x;
  uint4 v[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (first + j * kThreads < count) v[j] = from[first + j * kThreads];
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (first + j * kThreads < count) to[first + j * kThreads] = v[j];
  }
}

__global__ void EmptyKernel() {}

}  // namespace

void LaunchFill(void* data, DType dtype, int64_t count, uint64_t seed, float scale,
                cudaStream_t stream) {
  if (count == 0) return;
  cuda::Launch(FillKernel,
               cuda::LaunchShape{dim3(Blocks(count, kThreads)), dim3(kThreads), 0, stream}, data,
               dtype == DType::kBF16, count, seed, scale);
}

void LaunchFillInt8Cache(void* data, int64_t bytes, int64_t stride, int scale_bytes, uint64_t seed,
                         cudaStream_t stream) {
  if (bytes == 0) return;
  cuda::Launch(FillInt8CacheKernel,
               cuda::LaunchShape{dim3(Blocks(bytes, kThreads)), dim3(kThreads), 0, stream},
               static_cast<int8_t*>(data), bytes, stride, scale_bytes, seed);
}

void LaunchCopy(const void* from, void* to, int64_t bytes, cudaStream_t stream) {
  const int64_t count = bytes / 16;
  cuda::Launch(CopyKernel,
               cuda::LaunchShape{dim3(Blocks(count, int64_t{kThreads} * kVectors)), dim3(kThreads),
                                 0, stream},
               static_cast<const uint4*>(from), static_cast<uint4*>(to), count);
}

void LaunchEmpty(cudaStream_t stream) {
  cuda::Launch(EmptyKernel, cuda::LaunchShape{dim3(1), dim3(32), 0, stream});
}

}  // namespace moeserve::bench
