// The arithmetic probe: loops of independent products in registers, which measure the peak
// arithmetic rate of one instruction set. Each isa_*.cc compiles this file after its simd header.
// Each loop returns the number of its operations (a multiplication and an addition count as two)
// and adds a value that depends on all results to *sink, so that the compiler cannot remove the
// loop.

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

// Number of 16-lane accumulators. There are enough to hide the latency of an addition, and some
// registers are left for the factors.
#if defined(__AVX512F__)
constexpr int kProbeVectors = 16;  // with more, the compiler would not unroll the loops
#elif defined(__AVX2__)
constexpr int kProbeVectors = 6;
#elif defined(MOESERVE_NEON_DOT)
constexpr int kProbeVectors = 5;  // of four registers each
#else
constexpr int kProbeVectors = 3;
#endif

int64_t ArithmeticF32(int64_t iterations, float* sink) {
  const Vec factor = Broadcast(0.999f);
  const Vec term = Broadcast(0.5f);
  Vec acc[kProbeVectors];
  for (int v = 0; v < kProbeVectors; ++v) acc[v] = Broadcast(static_cast<float>(v));
  for (int64_t i = 0; i < iterations; ++i) {
    for (int v = 0; v < kProbeVectors; ++v) acc[v] = Fma(acc[v], factor, term);
  }
  for (int v = 0; v < kProbeVectors; ++v) {
    float lane[16];
    Store(lane, acc[v]);
    for (float f : lane) *sink += f;
  }
  return iterations * kProbeVectors * 16 * 2;
}

#if MOESERVE_BF16_DOT && defined(MOESERVE_NEON_DOT)
int64_t ArithmeticBf16(int64_t iterations, float* sink) {
  constexpr int kSums = 20;
  uint16x8_t bits = vdupq_n_u16(0x3c00);  // the bf16 value 2^-7 in all lanes
  float32x4_t acc[kSums];
  for (int v = 0; v < kSums; ++v) acc[v] = vdupq_n_f32(static_cast<float>(v));
  for (int64_t i = 0; i < iterations; ++i) {
    __asm__ volatile("" : "+w"(bits));  // hides the value from the compiler in every iteration
    const bfloat16x8_t factor = vreinterpretq_bf16_u16(bits);
    for (int v = 0; v < kSums; ++v) acc[v] = vbfmmlaq_f32(acc[v], factor, factor);
  }
  for (int v = 0; v < kSums; ++v) *sink += vaddvq_f32(acc[v]);
  return iterations * kSums * 16 * 2;
}
#elif defined(MOESERVE_AMX)
// Four sums, as the tiles of linear layers have.
template <bool kInt8>
int64_t ArithmeticTiles(int64_t iterations, float* sink) {
  alignas(64) char bytes[1024];
  __builtin_memset(bytes, 0x3c, sizeof(bytes));  // bf16 values a little above 2^-7
  TileRegisters tiles(16, 16);
  Unrolled<4>([&](auto sums) { tiles.Clear<decltype(sums)::value>(); });
  Unrolled<4>([&](auto factor) { tiles.Load<4 + decltype(factor)::value>(bytes, 64); });
  for (int64_t i = 0; i < iterations; ++i) {
    Unrolled<4>([&](auto sums) {
      constexpr int kSums = decltype(sums)::value;
      AddTile<kInt8, kSums, 4 + kSums / 2, 6 + kSums % 2>(tiles);
    });
  }
  Unrolled<4>([&](auto sums) {
    tiles.Store<decltype(sums)::value>(bytes, 64);
    *sink += static_cast<float>(bytes[0]);
  });
  return iterations * 4 * 16 * 16 * (kInt8 ? 64 : 32) * 2;
}
int64_t ArithmeticBf16(int64_t iterations, float* sink) {
  return ArithmeticTiles<false>(iterations, sink);
}
#elif MOESERVE_BF16_DOT
int64_t ArithmeticBf16(int64_t iterations, float* sink) {
  __m512i bits = _mm512_set1_epi32(0x3c003c00);  // the bf16 value 2^-7 in all lanes
  __m512 acc[kProbeVectors];
  for (int v = 0; v < kProbeVectors; ++v) acc[v] = _mm512_set1_ps(static_cast<float>(v));
  for (int64_t i = 0; i < iterations; ++i) {
    __asm__ volatile("" : "+v"(bits));  // hides the value from the compiler in every iteration
    for (int v = 0; v < kProbeVectors; ++v) {
      acc[v] = _mm512_dpbf16_ps(acc[v], (__m512bh)bits, (__m512bh)bits);
    }
  }
  for (int v = 0; v < kProbeVectors; ++v) *sink += _mm512_reduce_add_ps(acc[v]);
  return iterations * kProbeVectors * 32 * 2;
}
#endif

#if defined(MOESERVE_AMX)
int64_t ArithmeticInt8(int64_t iterations, float* sink) {
  return ArithmeticTiles<true>(iterations, sink);
}
#elif defined(__AVX512VNNI__)
// One instruction adds four products of bytes.
int64_t ArithmeticInt8(int64_t iterations, float* sink) {
  __m512i bytes = _mm512_set1_epi8(3);
  __m512i acc[kProbeVectors];
  for (int v = 0; v < kProbeVectors; ++v) acc[v] = _mm512_set1_epi32(v);
  for (int64_t i = 0; i < iterations; ++i) {
    __asm__ volatile("" : "+v"(bytes));
    for (int v = 0; v < kProbeVectors; ++v) acc[v] = _mm512_dpbusd_epi32(acc[v], bytes, bytes);
  }
  for (int v = 0; v < kProbeVectors; ++v) {
    *sink += static_cast<float>(_mm512_reduce_add_epi32(acc[v]));
  }
  return iterations * kProbeVectors * 64 * 2;
}
#elif defined(__AVX512F__)
// Weights are widened to 16 bits, and one instruction adds two products.
int64_t ArithmeticInt8(int64_t iterations, float* sink) {
  __m256i bytes = _mm256_set1_epi8(3);
  const __m512i factor = _mm512_set1_epi16(5);
  __m512i acc[kProbeVectors];
  for (int v = 0; v < kProbeVectors; ++v) acc[v] = _mm512_set1_epi32(v);
  for (int64_t i = 0; i < iterations; ++i) {
    for (int v = 0; v < kProbeVectors; ++v) {
      __asm__ volatile("" : "+v"(bytes));
      acc[v] = _mm512_add_epi32(acc[v], _mm512_madd_epi16(_mm512_cvtepi8_epi16(bytes), factor));
    }
  }
  for (int v = 0; v < kProbeVectors; ++v) {
    *sink += static_cast<float>(_mm512_reduce_add_epi32(acc[v]));
  }
  return iterations * kProbeVectors * 32 * 2;
}
#elif defined(__AVX2__)
// The fastest instruction adds two products of bytes in 16 bits. Weights of 4 bits can use it; for
// int8, the sums need more bits, which halves the rate (simd/avx2.h).
int64_t ArithmeticInt8(int64_t iterations, float* sink) {
  constexpr int kRegisters = 10;
  const __m256i bytes = _mm256_set1_epi8(1);
  __m256i acc[kRegisters];
  for (int v = 0; v < kRegisters; ++v) acc[v] = _mm256_set1_epi16(v);
  for (int64_t i = 0; i < iterations; ++i) {
    for (int v = 0; v < kRegisters; ++v) {
      // As assembly, so that every product is computed just before it is added. The compiler would
      // compute all of them first and store the sums for lack of registers.
      __m256i product;
      __asm__ volatile("vpmaddubsw %1, %1, %0" : "=x"(product) : "x"(bytes));
      acc[v] = _mm256_add_epi16(acc[v], product);
    }
  }
  for (int v = 0; v < kRegisters; ++v) {
    alignas(32) int16_t lane[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lane), acc[v]);
    for (int16_t l : lane) *sink += static_cast<float>(l);
  }
  return iterations * kRegisters * 32 * 2;
}
#elif defined(MOESERVE_NEON_DOT) && MOESERVE_NEON_DOT == 2
int64_t ArithmeticInt8(int64_t iterations, float* sink) {
  constexpr int kSums = 20;
  uint8x16_t bytes = vdupq_n_u8(3);
  int32x4_t acc[kSums];
  for (int v = 0; v < kSums; ++v) acc[v] = vdupq_n_s32(v);
  for (int64_t i = 0; i < iterations; ++i) {
    __asm__ volatile("" : "+w"(bytes));
    for (int v = 0; v < kSums; ++v) {
      acc[v] = vusmmlaq_s32(acc[v], bytes, vreinterpretq_s8_u8(bytes));
    }
  }
  for (int v = 0; v < kSums; ++v) *sink += static_cast<float>(vaddvq_s32(acc[v]));
  return iterations * kSums * 32 * 2;
}
#elif defined(MOESERVE_NEON_DOT)
int64_t ArithmeticInt8(int64_t iterations, float* sink) {
  alignas(16) char weights[64], input[4] = {3, 3, 3, 3};
  __builtin_memset(weights, 5, sizeof weights);
  QuadLine line = LoadQuads(weights);
  const QuadInput quad = BroadcastQuad(input);
  IntVec acc[kProbeVectors];
  for (int v = 0; v < kProbeVectors; ++v) acc[v] = BroadcastInt(v);
  for (int64_t i = 0; i < iterations; ++i) {
    for (uint8x16_t& q : line.q) __asm__ volatile("" : "+w"(q));
    for (int v = 0; v < kProbeVectors; ++v) acc[v] = DotQuads(acc[v], line, quad);
  }
  for (int v = 0; v < kProbeVectors; ++v) *sink += static_cast<float>(SumInt(acc[v]));
  return iterations * kProbeVectors * 64 * 2;
}
#else
int64_t ArithmeticInt8(int64_t iterations, float* sink) {
  constexpr int kSums = 16;
  uint32_t factor = 3;
  uint32_t acc[kSums] = {};
  for (int64_t i = 0; i < iterations; ++i) {
    __asm__ volatile("" : "+r"(factor));
    for (int v = 0; v < kSums; ++v) {
      acc[v] +=
          static_cast<uint32_t>(static_cast<int8_t>(factor + v) * static_cast<int8_t>(factor));
    }
  }
  for (uint32_t a : acc) *sink += static_cast<float>(a);
  return iterations * kSums * 2;
}
#endif

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
