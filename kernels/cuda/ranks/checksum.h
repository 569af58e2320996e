// A checksum of bits in device memory.
#pragma once

#include <cstdint>

#include "kernels/base/host_device.h"
#include "kernels/cuda/device/runtime.h"

namespace moeserve::cuda {

// What word `i` of the rows adds to their checksum, a sum modulo 2^64, so that it does not matter
// in which order words are added. Different words at the same place never add the same.
MOESERVE_HOST_DEVICE inline uint64_t ChecksumOfWord(uint64_t i, uint32_t word) {
  uint64_t x = i << 32 | word;
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// Writes the checksum of `count` words to *sum.
void LaunchChecksum(const uint32_t* words, int64_t count, unsigned long long* sum,
                    cudaStream_t stream);

}  // namespace moeserve::cuda
