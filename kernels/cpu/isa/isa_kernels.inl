// The kernels of one instruction set except for the linear tiles. Each isa_*.cc compiles this file;
// before that it defines MOESERVE_ISA (a namespace), MOESERVE_BF16_DOT and for AMX MOESERVE_AMX, and
// includes its simd headers. If it defines MOESERVE_F32_TABLE or MOESERVE_INTEGER_TABLE as the name
// of another table, products and attention without products of bf16 pairs, or products with integer
// weights, are those of that table: the code would be the same, and compiling it takes a while.
//
// This file must not use templates or inline functions of the standard library: for the whole
// program, the linker could keep the copy compiled here, with instructions that other processors
// lack.

#include <type_traits>

#include "kernels/base/exp.h"
#include "kernels/base/recurrence.h"
#include "kernels/base/soft_cap.h"
#include "kernels/cpu/isa/append_keys.inl"
#include "kernels/cpu/isa/attention_tile.inl"
#if MOESERVE_BF16_DOT && !defined(MOESERVE_AMX)
#include "kernels/cpu/isa/attention_pairs.inl"
#endif
//
#include "kernels/cpu/isa/epilogue.inl"
#include "kernels/cpu/isa/linear_tile.inl"
#include "kernels/cpu/isa/quant_sums.inl"
#ifdef MOESERVE_WIDE_INPUTS
#include "kernels/cpu/isa/quant_wide_tile.inl"
#endif
//
#include "kernels/cpu/isa/quant_tile.inl"
#ifdef MOESERVE_AMX
#include "kernels/cpu/isa/attention_steps.inl"
#include "kernels/cpu/isa/matrix_tile.inl"
//
#include "kernels/cpu/isa/attention_matrix.inl"
#endif
#include "kernels/cpu/isa/arithmetic_probe.inl"
#include "kernels/cpu/isa/quantize_row.inl"
#include "kernels/cpu/isa/route_row.inl"

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

void ConvertRow(const float* in, Bf16* out, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) StoreBf16(out + i, Load(in + i));
  for (; i < n; ++i) out[i] = Bf16FromF32(in[i]);
}

void WidenBf16Row(const Bf16* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = F32FromBf16(in[i]);
}

// Returns the sum over n values: 32 interleaved partial sums, which are added as a tree. The order
// depends on n alone.
template <typename F>
inline float LaneSum(int64_t n, F value) {
  float lane[32] = {};
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (int l = 0; l < 32; ++l) lane[l] += value(i + l);
  }
  for (int l = 0; i + l < n; ++l) lane[l] += value(i + l);
  // Short rows spend most of their time here, so each width is known to the compiler.
  Unrolled<5>([&](auto step) {
    constexpr int kWidth = 16 >> step;
    for (int l = 0; l < kWidth; ++l) lane[l] += lane[l + kWidth];
  });
  return lane[0];
}

// Normalises the elements [begin, begin + n) of a row.
inline void NormPart(const NormRowArgs& a, int64_t begin, int64_t n) {
  const float* x = a.x + begin;
  const float* scale = a.scale + begin;
  const float count = static_cast<float>(n);
  float mean = 0.0f;
  if (a.layer) mean = LaneSum(n, [=](int64_t i) { return x[i]; }) / count;
  const float square = LaneSum(n, [=](int64_t i) { return (x[i] - mean) * (x[i] - mean); });
  const float inverse = 1.0f / __builtin_sqrtf(square / count + a.eps);
  float* out = static_cast<float*>(a.out) + begin;
  Bf16* out16 = static_cast<Bf16*>(a.out) + begin;
  for (int64_t i = 0; i < n; ++i) {
    float v = (x[i] - mean) * inverse * scale[i];
    if (a.shift != nullptr) v += a.shift[begin + i];
    if (a.out_bf16) {
      out16[i] = Bf16FromF32(v);
    } else {
      out[i] = v;
    }
  }
}

void NormRow(const NormRowArgs& a) {
  if (a.parts == 1) return NormPart(a, 0, a.n);
  const int64_t n = a.n / a.parts;
  for (int64_t begin = 0; begin < a.n; begin += n) NormPart(a, begin, n);
}

void Axpy(float a, const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

void AxpyBf16(float a, const Bf16* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += a * F32FromBf16(x[i]);
}

}  // namespace
}  // namespace moeserve::cpu::MOESERVE_ISA

#include "kernels/cpu/isa/recurrence.inl"

namespace moeserve::cpu::MOESERVE_ISA {
namespace {

constexpr KernelTable MakeTable(const char* name) {
  return {
    .name = name, .bf16_dot = MOESERVE_BF16_DOT != 0, .row_tile = kRowTile,
    .quant_row_tile = kQuantRowTile, .panels_of_tile = &PanelsOfTile, .lines_ahead = kLinesAhead,
#ifdef MOESERVE_AMX
    .attention_rows = kMatrixRows, .matrix_rows = kMatrixRows, .pack_rows = &PackRows,
#else
    .attention_rows = kAttentionRows, .matrix_rows = 0, .pack_rows = nullptr,
#endif
    .linear_f32 = &LinearF32,
#if MOESERVE_BF16_DOT
    .linear_bf16 = &LinearBf16,
#else
    .linear_bf16 = nullptr,
#endif
    .linear_quantized = &LinearQuantized,
#ifdef MOESERVE_WIDE_INPUTS
    .wide_inputs = true,
#else
    .wide_inputs = false,
#endif
#ifdef MOESERVE_PAIR_SUMS
    .widen_block = nullptr,  // the tiles multiply sums by the factors
#else
    .widen_block = &WidenBlock,
#endif
    .quantize_row = &QuantizeInputRow, .epilogue = &Epilogue,
    .norm_row = &NormRow, .attention_tile = &AttentionTile, .merge_attention = &MergeAttention,
    .inverse_with_sink = &InverseWithSink, .soft_cap = &SoftCapValues, .multiply_by_gate = &MultiplyByGate,
    .recurrent_inputs = &RecurrentInputs, .recurrent_row = &RecurrentRow,
    .contract_dot = &ContractDot, .contract_dots = &ContractDots,
    .route_row = &RouteRow, .widen_bf16 = &WidenBf16Row, .convert_row = &ConvertRow,
    .interleave_bf16 = &InterleaveBf16, .axpy = &Axpy,
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
