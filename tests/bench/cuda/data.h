// Generates random data that is bit-identical on host and device, and has kernels for measuring the
// device's rates.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/host_device.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::bench {

// Returns element i of the random stream `seed`: a sum of four uniform numbers with mean 0 and
// standard deviation `scale`. Bit-identical on every device.
MOESERVE_HOST_DEVICE static inline float RandomElement(uint64_t seed, int64_t i, float scale) {
  uint64_t z = seed + static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  z ^= z >> 31;
  const int sum = static_cast<int>(z & 0xffff) + static_cast<int>(z >> 16 & 0xffff) +
                  static_cast<int>(z >> 32 & 0xffff) + static_cast<int>(z >> 48);
  // The factor is sqrt(3) / 65536, because the sum of four uniform numbers in [0, 1) has the
  // variance 1 / 3.
  return static_cast<float>(sum - 131070) * (2.6428996e-5f * scale);
}

// Returns RandomElement() after rounding to `dtype`.
static inline float RandomRounded(uint64_t seed, int64_t i, float scale, DType dtype) {
  const float v = RandomElement(seed, i, scale);
  return dtype == DType::kBF16 ? F32FromBf16(Bf16FromF32(v)) : v;
}

// The scale of all elements of a random int8 cache; with it, their standard deviation is about 1.
inline constexpr float kInt8CacheScale = 1.0f / 73.5f;

// Returns byte i of the random stream `seed`, from -127 to 127.
MOESERVE_HOST_DEVICE static inline int8_t RandomByte(uint64_t seed, int64_t i) {
  uint64_t z = seed + static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z ^= z >> 31;
  return static_cast<int8_t>(static_cast<int>((z & 0xffffffff) % 255) - 127);
}

// Sets data[i] = RandomElement(seed, i, scale), in f32 or bf16.
void LaunchFill(void* data, DType dtype, int64_t count, uint64_t seed, float scale,
                cudaStream_t stream);
// Fills an int8 cache: of every `stride` bytes, the first `scale_bytes` become f32 scales, all
// kInt8CacheScale, and byte i of the others becomes RandomByte(seed, i), counted from `data`.
void LaunchFillInt8Cache(void* data, int64_t bytes, int64_t stride, int scale_bytes, uint64_t seed,
                         cudaStream_t stream);
// Copies `bytes` bytes, a multiple of 16.
void LaunchCopy(const void* from, void* to, int64_t bytes, cudaStream_t stream);
// Launches an empty kernel.
void LaunchEmpty(cudaStream_t stream);

}  // namespace moeserve::bench
