// Widens FP8 weights (linear_image.h) to operands of mma.sync.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_bank.h"

namespace moeserve::cuda {

// Widens a word to two registers of pairs of bf16. The seven lower bits of an E4M3 number at the
// bits 10 to 4 of a bf16 are the number times 2^-120, subnormal or not, so one multiplication,
// which is exact, yields the number.
__device__ __forceinline__ void WidenFp8(uint32_t word, uint32_t& first, uint32_t& second) {
  constexpr uint32_t kFactor = 0x7b807b80u;  // 2^120 twice
  first = MultiplyBf16Pairs(word & 0x87f087f0u, kFactor);
  second = MultiplyBf16Pairs((word << 4 & 0x80f080f0u) | (word >> 4 & 0x07000700u), kFactor);
}

// The weights of one lane for 16 packed rows and 32 inputs, without their scales.
struct Fp8Lane {
  uint4 words;

  // `half`: the first or the second 32 inputs of the strip.
  __device__ __forceinline__ void Load(const char* strip, int half) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    words = *reinterpret_cast<const uint4*>(strip + half * 512 + lane * 16);
  }
  // Widens the first or the second 16 inputs; `i` is a constant after unrolling.
  __device__ __forceinline__ void Widen(int i, uint32_t (&a)[4]) const {
    WidenFp8(i == 0 ? words.x : words.z, a[0], a[1]);
    WidenFp8(i == 0 ? words.y : words.w, a[2], a[3]);
  }
  // Returns the lane's scale in a strip: that of packed row r in the first block of a pair, that of
  // packed row r + 8 in the second one.
  __device__ __forceinline__ static float Scale(const char* strip) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return *reinterpret_cast<const float*>(strip + 1024 + lane / 4 * 4);
  }
};

}  // namespace moeserve::cuda
