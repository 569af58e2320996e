// The arguments of LinearArgs in the form that the kernels take.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cuda/linear/linear_bank.h"

namespace moeserve::cuda {

struct LinearParams {
  const char* weights;
  const float* bias;  // null if there is none
  const LinearBankEntry* entries;
  const int32_t* order;  // [experts] in descending order of the size of their matrices
  // [experts + 1] first row of each expert; null: every expert computes all rows, and there are
  // several experts only with LinearArgs::segments.
  const int32_t* offsets;
  const int32_t* source;  // input row of each row; null: the row itself
  int32_t* counter;  // of tiles that blocks have taken (linear_schedule.cuh); null: a fixed order
  const char* input;
  char* output;
  int64_t input_stride;   // bytes
  int64_t output_stride;  // bytes
  // Bytes from the segment of an expert to that of the next (LinearArgs::segments); else 0.
  int64_t input_segment;
  int64_t output_segment;
  int experts;
  int rows;      // of all experts together, at most
  int expected;  // about how many of the rows there are; only the choice of a kernel depends on it
  Activation activation;
  bool gated;
  bool output_bf16;
  bool pad_output;
  bool wide_input;   // every input row starts at a multiple of 16 bytes
  bool wide_output;  // every output row starts at a multiple of 16 bytes
};

// The settings of the epilogue for which the wgmma kernel is compiled, so that a block fetches only
// the instructions that it runs. All results have the bits of the general form.
enum class LinearEpilogue : uint8_t {
  kGeneral,  // any settings
  kNone,     // the sums, to bf16
  kF32,      // the sums, to f32 rows of any alignment
  kRelu,     // these activations of a layer that is not gated, to bf16
  kGelu,
  kGeluTanh,
  kSiluGated,  // the plain activation of a gated layer, to bf16
};

// Returns the form that is compiled for the settings. bf16 rows must be 16-byte aligned for any
// form other than the general one.
inline LinearEpilogue EpilogueOf(const LinearParams& p) {
  const ActivationKind kind = p.activation.kind;
  if (p.gated) {
    const bool plain_silu = kind == ActivationKind::kSilu && IsPlain(p.activation);
    return plain_silu && p.output_bf16 && p.wide_output ? LinearEpilogue::kSiluGated
                                                        : LinearEpilogue::kGeneral;
  }
  if (!p.output_bf16) {
    return kind == ActivationKind::kNone ? LinearEpilogue::kF32 : LinearEpilogue::kGeneral;
  }
  if (!p.wide_output) return LinearEpilogue::kGeneral;
  switch (kind) {
    case ActivationKind::kNone:
      return LinearEpilogue::kNone;
    case ActivationKind::kRelu:
      return LinearEpilogue::kRelu;
    case ActivationKind::kGelu:
      return LinearEpilogue::kGelu;
    case ActivationKind::kGeluTanh:
      return LinearEpilogue::kGeluTanh;
    default:
      return LinearEpilogue::kGeneral;
  }
}

namespace internal {

// Checks `args` and converts it. `rows` of the result is an upper bound of the number of rows.
LinearParams LinearParamsOf(const LinearArgs& args);

}  // namespace internal
}  // namespace moeserve::cuda
