// A dense tensor in host memory, as checkpoint loaders and weight generators produce it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/base/dtype.h"

namespace moeserve {

// Row-major. `owner` keeps `data` alive; copies of the struct share it.
struct HostTensor {
  const void* data = nullptr;  // any alignment
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::shared_ptr<const void> owner;
  // Whether the numbers come from blocks of OCP's MXFP4, in which 32 adjacent elements of the last
  // dimension are 4-bit floats (E2M1) times a common power of two. A bank may store them so again.
  bool mxfp4 = false;

  int64_t size() const {
    int64_t n = 1;
    for (int64_t s : shape) n *= s;
    return n;
  }
};

// Returns element i widened to f32 (exact for every dtype).
inline float ElementAsF32(const HostTensor& t, int64_t i) {
  const char* base = static_cast<const char*>(t.data);
  if (t.dtype == DType::kF32) {
    float f;
    std::memcpy(&f, base + 4 * i, 4);
    return f;
  }
  uint16_t bits;
  std::memcpy(&bits, base + 2 * i, 2);
  return t.dtype == DType::kBF16 ? F32FromBf16(bits) : F32FromF16(bits);
}

// Returns all elements widened to f32.
inline std::vector<float> Widened(const HostTensor& t) {
  std::vector<float> v(static_cast<size_t>(t.size()));
  for (int64_t i = 0; i < t.size(); ++i) v[i] = ElementAsF32(t, i);
  return v;
}

}  // namespace moeserve
