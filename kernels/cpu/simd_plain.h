// 16 float lanes in an array: any processor. Included by isa_plain.cc alone.
#pragma once

namespace moeserve::cpu::MOESERVE_ISA {

struct Vec {
  float lane[16];
};
inline constexpr int kRowTile = 4;
inline constexpr int kPanelTile = 1;
inline constexpr int kAttentionRows = 4;
inline constexpr int kAttentionAccumulators = 4;

inline Vec Broadcast(float v) {
  Vec r;
  for (float& f : r.lane) f = v;
  return r;
}
inline Vec Zero() { return Broadcast(0.0f); }
inline Vec Load(const float* p) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.lane[i] = p[i];
  return r;
}
inline void Store(float* p, Vec v) {
  for (int i = 0; i < 16; ++i) p[i] = v.lane[i];
}
// Two roundings: a fused operation would be a library call here, and products need not have the
// same bits on every instruction set (routing does, and calls the fused one).
inline Vec Fma(Vec a, Vec b, Vec c) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.lane[i] = a.lane[i] * b.lane[i] + c.lane[i];
  return r;
}
inline Vec LoadF16(const void* p) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.lane[i] = F32FromF16(static_cast<const F16*>(p)[i]);
  return r;
}
inline Vec LoadBf16(const void* p) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.lane[i] = F32FromBf16(static_cast<const Bf16*>(p)[i]);
  return r;
}
inline Vec LoadInt8(const void* p) {
  Vec r;
  for (int i = 0; i < 16; ++i) r.lane[i] = static_cast<const int8_t*>(p)[i];
  return r;
}
struct PairLine {
  const uint32_t* bits;
  Vec Even() const {
    Vec r;
    for (int i = 0; i < 16; ++i) r.lane[i] = F32FromBits(bits[i] << 16);
    return r;
  }
  Vec Odd() const {
    Vec r;
    for (int i = 0; i < 16; ++i) r.lane[i] = F32FromBits(bits[i] & 0xffff0000u);
    return r;
  }
};
inline PairLine LoadPairs(const void* p) { return {static_cast<const uint32_t*>(p)}; }

inline uint64_t ReadStream(const char* data, int64_t bytes) {
  const uint64_t* p = reinterpret_cast<const uint64_t*>(data);
  uint64_t a = 0, b = 0, c = 0, d = 0;
  for (int64_t i = 0; i + 4 <= bytes / 8; i += 4) {
    a += p[i];
    b += p[i + 1];
    c += p[i + 2];
    d += p[i + 3];
  }
  return a + b + c + d;
}

}  // namespace moeserve::cpu::MOESERVE_ISA
