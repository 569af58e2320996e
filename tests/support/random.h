// Generates random test data from seeds.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/base/host_tensor.h"

namespace moeserve::testing {

// A random number generator that, unlike the distributions of the C++ standard library, returns the
// same numbers on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ULL + 0x1234567) {}
  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  // Returns an integer in [0, n).
  int Below(int n) { return static_cast<int>(Next() % static_cast<uint64_t>(n)); }
  double Normal() {
    const double u = 1.0 - Uniform();
    return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * Uniform());
  }
  std::vector<float> Normals(int64_t n, double scale = 1.0) {
    std::vector<float> v(static_cast<size_t>(n));
    for (float& f : v) f = static_cast<float>(Normal() * scale);
    return v;
  }

 private:
  uint64_t state_;
};

// Returns a tensor that owns its data, rounded to `dtype`.
inline HostTensor MakeTensor(const std::vector<float>& values, std::vector<int64_t> shape,
                             DType dtype = DType::kF32) {
  auto bytes = std::make_shared<std::vector<char>>(values.size() * SizeOf(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(bytes->data() + 4 * i, &values[i], 4);
    } else if (dtype == DType::kBF16) {
      const Bf16 b = Bf16FromF32(values[i]);
      std::memcpy(bytes->data() + 2 * i, &b, 2);
    } else {
      // For test data, truncating to 11 significant bits is accurate enough.
      const float clipped = F32FromBits(BitsFromF32(values[i]) & 0xffffe000u);
      const uint32_t u = BitsFromF32(clipped);
      const int exponent = static_cast<int>((u >> 23) & 0xff) - 112;
      const uint16_t h = exponent <= 0
                             ? static_cast<uint16_t>((u >> 16) & 0x8000u)
                             : static_cast<uint16_t>(((u >> 16) & 0x8000u) | (exponent << 10) |
                                                     ((u >> 13) & 0x3ffu));
      std::memcpy(bytes->data() + 2 * i, &h, 2);
    }
  }
  HostTensor t{bytes->data(), dtype, std::move(shape), bytes};
  return t;
}

}  // namespace moeserve::testing
