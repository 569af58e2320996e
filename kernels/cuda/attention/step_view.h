// The tokens of a step in the form that the kernels in this folder read.
#pragma once

#include <cstdint>

namespace moeserve::cuda {

// The row of `page_tables` with index sequence[t] lists the pages of token t's sequence.
struct StepView {
  int tokens = 0;
  const int32_t* position = nullptr;     // [tokens]
  const int32_t* sequence = nullptr;     // [tokens] row of page_tables; -1 for padding rows
  const int32_t* page_tables = nullptr;  // [sequences, table_stride]
  int table_stride = 0;
  int max_context = 0;  // at least position + 1 for every token in [0, AttentionLaunch::tiled_from)
  const uint8_t* long_sequence = nullptr;  // [tokens] StepInputs::long_sequence; 0 without it
};

}  // namespace moeserve::cuda
