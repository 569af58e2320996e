// The element types of stored keys and values. They are separate from kv_cache_storage.h because
// the inner CPU kernels include this file, and those kernels must not instantiate templates of the
// standard library: the linker could keep an instance whose instructions the processor lacks.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/base/dtype.h"

namespace moeserve {

// Tokens (positions) per page; also the number of SIMD lanes that the CPU attention uses.
inline constexpr int kPageTokens = 16;
// A row of attention reads no position in front of the last multiple of this number that is not
// behind the first position it sees.
inline constexpr int kAttentionAlignment = 256;

enum class KvCacheType : uint8_t {
  kF32,
  kBF16,
  // Symmetric int8; every (position, kv head) has one f32 scale for the key and one for the value.
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

// Returns the cache type that adds no rounding to products of this compute type: f32 or bf16.
constexpr KvCacheType KvCacheTypeOf(DType compute) {
  return compute == DType::kBF16 ? KvCacheType::kBF16 : KvCacheType::kF32;
}

}  // namespace moeserve
