// The arithmetic of drawing tokens: its results have the same bits on the host and on devices.
//
// Weights of tokens are integers, so their sums are exact in any order. The floating-point code
// uses only multiplications and additions, which compilers must not fuse.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/base/dtype.h"
#include "kernels/base/host_device.h"

namespace moeserve {

// The weight of the most probable token is 2^40. A sum of 2^23 such weights fits into 64 bits.
inline constexpr int kSamplingWeightBits = 40;

// Returns the factor by which a temperature scales logits. It is 0 for temperature 0, which selects
// the most probable token.
MOESERVE_HOST_DEVICE static inline float SamplingScale(double temperature) {
  constexpr double kLargest = 0x1.fffffep+127;
  if (temperature == 0.0) return 0.0f;
  const double scale = 1.0 / temperature;
  return static_cast<float>(scale < kLargest ? scale : kLargest);
}

// Returns exp(x) for x <= 0 with a relative error of about 1e-7, in operations that compilers
// vectorise. The result is exactly 1 for x = 0, and 0 for x <= -87 and for NaN.
MOESERVE_HOST_DEVICE static inline float SamplingExp(float x) {
  constexpr float kRound = 0x1.8p+23f;  // adding it rounds to an integer, which is then in the
                                        // lowest mantissa bits
  const bool positive = x > -87.0f;
  const float clamped = positive ? x : -87.0f;
  const float shifted = clamped * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float power = F32FromBits((BitsFromF32(shifted) << 23) + 0x3f800000u);
  return positive ? p * power : 0.0f;
}

// Returns the weight of a token. `share` in [0, 1] is its probability divided by that of the most
// probable token. The weight is share * 2^40, rounded to an integer, ties to even.
MOESERVE_HOST_DEVICE static inline uint64_t SamplingWeight(float share) {
#if defined(__CUDA_ARCH__)
  return __float2ull_rn(share * 0x1p+40f);
#else
  // The lowest mantissa bits of a double in [2^52, 2^53) are its integer value; unlike a
  // conversion, reading these bits vectorises.
  const double shifted = static_cast<double>(share) * 0x1p+40 + 0x1p+52;
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  return bits - 0x4330000000000000u;
#endif
}

// Returns the sum of weights that the most probable tokens must reach for top_p < 1, if all weights
// add up to `total` > 0.
MOESERVE_HOST_DEVICE static inline uint64_t NucleusWeight(double top_p, uint64_t total) {
  const double exact = top_p * static_cast<double>(total);
  auto weight = static_cast<uint64_t>(exact);
  if (static_cast<double>(weight) < exact) ++weight;
  if (weight < 1) weight = 1;
  return weight < total ? weight : total;
}

// Returns a target below `mass` > 0: the draw takes the first token at which the running sum of
// weights exceeds the target. `uniform` is a multiple of 2^-53 in [0, 1).
MOESERVE_HOST_DEVICE static inline uint64_t DrawTarget(double uniform, uint64_t mass) {
  const auto numerator = static_cast<uint64_t>(uniform * 0x1p+53);
  const auto product = static_cast<unsigned __int128>(numerator) * mass;
  return static_cast<uint64_t>(product >> 53);
}

// The tokens that top_k or top_p keeps: those with a logit above `logit`, and of the tokens with
// exactly this logit those with the lowest ids.
struct SamplingCutoff {
  float logit;
  int32_t last_tie;  // the highest id kept among the tokens with exactly this logit

  MOESERVE_HOST_DEVICE bool Keeps(float value, int32_t token) const {
    return (value > logit) | ((value == logit) & (token <= last_tie));
  }
};

// To find a cutoff, tokens are first sorted into bins by their shifted logit x = (logit - highest
// logit) * scale, from 0 down to a floor. SamplingFloor() returns a floor such that no token with x
// below it has a weight above `negligible`.
inline constexpr int kSamplingBins = 1024;

MOESERVE_HOST_DEVICE static inline float SamplingFloor(uint64_t negligible) {
  constexpr float kNothing = -29.0f;  // e^-29 * 2^40 < 0.5, which rounds to weight 0
  if (negligible == 0) return kNothing;
  // Rounds `negligible` down to a power of two and takes its logarithm, less a margin for the
  // rounding errors of SamplingExp() and of this computation.
  const uint32_t bits = BitsFromF32(static_cast<float>(negligible));
  const int exponent = static_cast<int>(bits >> 23) - 127 - kSamplingWeightBits;
  const float floor = static_cast<float>(exponent) * 0.6931472f - 1e-3f;
  return floor > kNothing ? floor : kNothing;
}
// Returns `floor`, raised so that it also excludes tokens whose shifted logit x is below `cutoff`.
MOESERVE_HOST_DEVICE static inline float RaisedFloor(float floor, float cutoff) {
  const float below_zero = cutoff < -1e-3f ? cutoff : -1e-3f;
  return below_zero > floor ? below_zero : floor;
}

// Returns the bin of x for floor <= x <= 0. It is monotonic: a smaller x never has a lower bin.
MOESERVE_HOST_DEVICE static inline int SamplingBin(float x, float bins_per_unit) {
  const auto bin = static_cast<int>(x * bins_per_unit);
  return bin < kSamplingBins - 1 ? bin : kSamplingBins - 1;
}
// Returns the factor that maps the floor to the end of the last bin.
MOESERVE_HOST_DEVICE static inline float SamplingBinsPerUnit(float floor) {
  return static_cast<float>(kSamplingBins) / floor;
}

}  // namespace moeserve
