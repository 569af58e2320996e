// How keys and values are stored. Apart from the storage itself because the inner kernels, which
// must not see the standard library's templates, include it.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/base/dtype.h"

namespace moeserve {

// Tokens of one cache block; also the lane width that the CPU attention works with.
inline constexpr int kKvBlockTokens = 16;

enum class KvCacheType : uint8_t {
  kF32,
  kBF16,
  // Symmetric, with one f32 scale for the key and one for the value of a (position, kv head).
  kInt8
};

constexpr std::string_view Name(KvCacheType t) {
  switch (t) {
    case KvCacheType::kF32:
      return "f32";
    case KvCacheType::kBF16:
      return "bf16";
    case KvCacheType::kInt8:
      return "int8";
  }
  return "?";
}

constexpr int64_t ElementBytes(KvCacheType t) {
  return t == KvCacheType::kF32 ? 4 : t == KvCacheType::kBF16 ? 2 : 1;
}

// The cache that adds no rounding to products of this type: f32 or bf16.
constexpr KvCacheType KvCacheTypeOf(DType compute) {
  return compute == DType::kBF16 ? KvCacheType::kBF16 : KvCacheType::kF32;
}

}  // namespace moeserve
