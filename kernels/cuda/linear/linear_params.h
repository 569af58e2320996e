// LinearArgs as the kernels take them.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cuda/linear/linear_bank.h"

namespace moeserve::cuda {

struct LinearParams {
  const char* weights;
  const float* bias;  // null: none
  const LinearBankEntry* entries;
  const int32_t* order;    // [experts]
  const int32_t* offsets;  // [experts + 1] first row of each expert; null: one expert, `rows` rows
  const int32_t* source;   // input row of a row; null: the row itself
  const char* input;
  char* output;
  int64_t input_stride;   // bytes
  int64_t output_stride;  // bytes
  int experts;
  int rows;
  ActivationKind activation;
  bool gated;
  bool output_bf16;
  bool pad_output;
  bool wide_input;   // every input row starts at a multiple of 16 bytes
  bool wide_output;  // every output row does
};

namespace internal {

// Checks `args`; `rows` of the result bounds the number of rows.
LinearParams LinearParamsOf(const LinearArgs& args);

}  // namespace internal
}  // namespace moeserve::cuda
