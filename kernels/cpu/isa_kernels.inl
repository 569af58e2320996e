// The kernels of one instruction set apart from the linear tiles. Compiled once per isa_*.cc, which
// defines MOESERVE_ISA (namespace), MOESERVE_BF16_DOT and MOESERVE_PANEL_TILE and includes its simd
// header first. No templates or inline functions of the standard library: the linker could pick
// this file's copy, compiled for a processor that another machine is not.

#include "kernels/base/exp.h"
#include "kernels/cpu/arithmetic_probe.inl"
#include "kernels/cpu/attention_tile.inl"
#include "kernels/cpu/linear_tile.inl"
#include "kernels/cpu/quant_tile.inl"
#include "kernels/cpu/route_row.inl"

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

// e^x within 3 ulp between the bounds below, the value there beyond them (activations are the same
// to an ulp from there on), NaN for NaN: half the operations of ContractExp().
inline float ActivationExp(float x) {
  constexpr float kSmallest = -87.0f;
  constexpr float kLargest = 88.0f;
  constexpr float kRound = 0x1.8p+23f;  // adding it rounds to the nearest integer
  float v = kSmallest > x ? kSmallest : x;
  v = kLargest < v ? kLargest : v;
  const float shifted = __builtin_fmaf(v, 0x1.715476p+0f, kRound);
  const float n = shifted - kRound;
  float r = __builtin_fmaf(-n, 0x1.62e400p-1f, v);
  r = __builtin_fmaf(-n, 0x1.7f7d1cp-20f, r);
  float p = 0x1.6c16c2p-10f;  // 1/6!
  p = __builtin_fmaf(p, r, 0x1.111112p-7f);
  p = __builtin_fmaf(p, r, 0x1.555556p-5f);
  p = __builtin_fmaf(p, r, 0x1.555556p-3f);
  p = __builtin_fmaf(p, r, 0.5f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  // The lowest bits of `shifted` are those of n.
  return F32FromBits(BitsFromF32(p) + (BitsFromF32(shifted) << 23));
}

inline float Sigmoid(float x) { return 1.0f / (1.0f + ActivationExp(-x)); }

inline float GeluTanh(float x) {
  constexpr float kSqrt2OverPi = 0.7978845608028654f;
  const float u = kSqrt2OverPi * (x + 0.044715f * x * x * x);
  return 0.5f * x * (2.0f - 2.0f / (1.0f + ActivationExp(2.0f * u)));
}

// x * Phi(x), the error function by Abramowitz and Stegun 7.1.26 (within 1.5e-7).
inline float Gelu(float x) {
  const float z = __builtin_fabsf(x) * 0.7071067811865476f;
  const float t = 1.0f / (1.0f + 0.3275911f * z);
  float p = 1.061405429f;
  p = __builtin_fmaf(p, t, -1.453152027f);
  p = __builtin_fmaf(p, t, 1.421413741f);
  p = __builtin_fmaf(p, t, -0.284496736f);
  p = __builtin_fmaf(p, t, 0.254829592f);
  const float tail = 0.5f * p * t * ActivationExp(-z * z);  // Phi(-|x|)
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

template <EpilogueActivation kActivation>
inline float Activated(float v) {
  switch (kActivation) {
    case EpilogueActivation::kNone:
      return v;
    case EpilogueActivation::kSilu:
      return v * Sigmoid(v);
    case EpilogueActivation::kGelu:
      return Gelu(v);
    case EpilogueActivation::kGeluTanh:
      return GeluTanh(v);
    case EpilogueActivation::kRelu:
      // NaN stays NaN: a numeric failure must reach its request.
      return v < 0.0f ? 0.0f : v;
  }
}

void ConvertRow(const float* in, Bf16* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = Bf16FromF32(in[i]);
}

void WidenBf16Row(const Bf16* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = F32FromBf16(in[i]);
}

// The results of a row over its sums, whole panels of 16 columns: every loop is one vector (left
// alone, the compiler unrolls them first and then fails to see it).
template <EpilogueActivation kActivation>
inline void ActivateRow(float* tile, int results, bool gated) {
  for (int p = 0; p < results; ++p) {
    const float* in = tile + (gated ? 2 * p : p) * kPanel;
    float* out = tile + p * kPanel;
    float value[kPanel];
#pragma GCC unroll 1
    for (int i = 0; i < kPanel; ++i) value[i] = Activated<kActivation>(in[i]);
    if (gated) {
#pragma GCC unroll 1
      for (int i = 0; i < kPanel; ++i) value[i] *= in[kPanel + i];
    }
    __builtin_memcpy(out, value, sizeof(value));
  }
}

template <typename T>
inline void StoreColumns(const T (&value)[kPanel], int columns, T* out) {
  if (columns >= kPanel) {
    __builtin_memcpy(out, value, sizeof(value));
  } else if (columns > 0) {
    __builtin_memcpy(out, value, static_cast<size_t>(columns) * sizeof(T));
  }
}

inline void StoreRow(const float* tile, const EpilogueArgs& a, char* row) {
  for (int begin = 0; begin < a.cols; begin += kPanel) {
    float value[kPanel];
    __builtin_memcpy(value, tile + begin, sizeof(value));
    if (a.out_bf16) {
      Bf16 rounded[kPanel];
#pragma GCC unroll 1
      for (int i = 0; i < kPanel; ++i) rounded[i] = Bf16FromF32(value[i]);
      StoreColumns(rounded, a.cols - begin, reinterpret_cast<Bf16*>(row) + begin);
    } else {
      StoreColumns(value, a.cols - begin, reinterpret_cast<float*>(row) + begin);
    }
  }
}

template <EpilogueActivation kActivation>
void EpilogueOf(const EpilogueArgs& a) {
  for (int r = 0; r < a.rows; ++r) {
    float* tile = a.tile + r * kBlock;
    if (a.bias != nullptr) {
      for (int i = 0; i < a.panels * kPanel; ++i) tile[i] += a.bias[i];
    }
    if (a.gated || kActivation != EpilogueActivation::kNone) {
      ActivateRow<kActivation>(tile, a.gated ? a.panels / 2 : a.panels, a.gated);
    }
  }
  for (int r = 0; r < a.rows; ++r) StoreRow(a.tile + r * kBlock, a, a.out[r]);
}

void Epilogue(const EpilogueArgs& a) {
  switch (a.activation) {
    case EpilogueActivation::kNone:
      return EpilogueOf<EpilogueActivation::kNone>(a);
    case EpilogueActivation::kSilu:
      return EpilogueOf<EpilogueActivation::kSilu>(a);
    case EpilogueActivation::kGelu:
      return EpilogueOf<EpilogueActivation::kGelu>(a);
    case EpilogueActivation::kGeluTanh:
      return EpilogueOf<EpilogueActivation::kGeluTanh>(a);
    case EpilogueActivation::kRelu:
      return EpilogueOf<EpilogueActivation::kRelu>(a);
  }
}

// Sum over n values in 32 interleaved partial sums, then a tree: the order depends on n alone.
template <typename F>
inline float LaneSum(int64_t n, F value) {
  float lane[32] = {};
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (int l = 0; l < 32; ++l) lane[l] += value(i + l);
  }
  for (int l = 0; i + l < n; ++l) lane[l] += value(i + l);
  for (int width = 16; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lane[l] += lane[l + width];
  }
  return lane[0];
}

void NormRow(const NormRowArgs& a) {
  const float* x = a.x;
  const float count = static_cast<float>(a.n);
  float mean = 0.0f;
  if (a.layer) mean = LaneSum(a.n, [=](int64_t i) { return x[i]; }) / count;
  const float square = LaneSum(a.n, [=](int64_t i) { return (x[i] - mean) * (x[i] - mean); });
  const float inverse = 1.0f / __builtin_sqrtf(square / count + a.eps);
  float* out = static_cast<float*>(a.out);
  Bf16* out16 = static_cast<Bf16*>(a.out);
  for (int64_t i = 0; i < a.n; ++i) {
    float v = (x[i] - mean) * inverse * a.scale[i];
    if (a.shift != nullptr) v += a.shift[i];
    if (a.out_bf16) {
      out16[i] = Bf16FromF32(v);
    } else {
      out[i] = v;
    }
  }
}

void Axpy(float a, const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

void AxpyBf16(float a, const Bf16* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * F32FromBf16(x[i]);
}

constexpr KernelTable MakeTable(const char* name) {
  return {
    .name = name, .bf16_dot = MOESERVE_BF16_DOT != 0, .row_tile = kRowTile,
    .attention_rows = kAttentionRows, .linear_f32 = &LinearF32,
#if MOESERVE_BF16_DOT
    .linear_bf16 = &LinearBf16,
#else
    .linear_bf16 = nullptr,
#endif
    .linear_quantized = &LinearQuantized, .quantize_row = &QuantizeInputRow, .epilogue = &Epilogue,
    .norm_row = &NormRow, .attention_tile = &AttentionTile, .merge_attention = &MergeAttention,
    .contract_dot = &ContractDot, .contract_dots = &ContractDots, .router_scores = &RouterScores,
    .route_row = &RouteRow, .widen_bf16 = &WidenBf16Row, .convert_row = &ConvertRow, .axpy = &Axpy,
    .axpy_bf16 = &AxpyBf16, .read_stream = &ReadStream, .arithmetic_f32 = &ArithmeticF32,
#if MOESERVE_BF16_DOT
    .arithmetic_bf16 = &ArithmeticBf16,
#else
    .arithmetic_bf16 = nullptr,
#endif
    .arithmetic_int8 = &ArithmeticInt8,
  };
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA
