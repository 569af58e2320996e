// Widens MXFP4 weights (linear_image.h) to operands of mma.sync.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/linear/linear_bank.h"

namespace moeserve::cuda {

// Returns scale i (0 to 3) of `scales` as a pair of equal bf16, 2^(scale - 127).
__device__ __forceinline__ uint32_t Mxfp4Scale(uint32_t scales, uint32_t i) {
  return __byte_perm(scales, 0, i << 12 | i << 4 | 0x0404) >> 1;
}

// Widens the word of a lane to the registers of its m16n8k16 operand. `low` and `high` are the
// scales of the lane's packed rows r and r + 8. A number of three bits at the bits 8 to 6 of a bf16
// is the 4-bit float times 2^-126, subnormal or not, so one multiplication, which is exact, yields
// the weight.
__device__ __forceinline__ void WidenMxfp4(uint32_t word, uint32_t low, uint32_t high,
                                           uint32_t (&a)[4]) {
  constexpr uint32_t kNumber = 0x81c081c0u;
  const uint32_t around = word >> 6 | word << 26;
  const uint32_t last = (word << 6 & 0x80c080c0u) | (word >> 2 & 0x01000100u);
  a[0] = MultiplyBf16Pairs(word & kNumber, low);
  a[1] = MultiplyBf16Pairs(word << 4 & kNumber, high);
  a[2] = MultiplyBf16Pairs(around & kNumber, low);
  a[3] = MultiplyBf16Pairs(last, high);
}

// The weights of one lane for 16 packed rows and 64 inputs.
struct Mxfp4Lane {
  uint4 words;
  uint32_t scales;

  __device__ __forceinline__ void Load(const char* strip) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    words = *reinterpret_cast<const uint4*>(strip + lane * 16);
    scales = *reinterpret_cast<const uint32_t*>(strip + 512 + lane / 4 * 4);
  }
  // `k16` is a constant after unrolling.
  __device__ __forceinline__ void Widen(int k16, uint32_t (&a)[4]) const {
    const uint32_t word = k16 == 0 ? words.x : k16 == 1 ? words.y : k16 == 2 ? words.z : words.w;
    const auto i = static_cast<uint32_t>(k16 / 2 * 2);
    WidenMxfp4(word, Mxfp4Scale(scales, i), Mxfp4Scale(scales, i + 1), a);
  }
};

}  // namespace moeserve::cuda
