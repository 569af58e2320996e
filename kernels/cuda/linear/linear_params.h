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

namespace internal {

// Checks `args` and converts it. `rows` of the result is an upper bound of the number of rows.
LinearParams LinearParamsOf(const LinearArgs& args);

}  // namespace internal
}  // namespace moeserve::cuda
