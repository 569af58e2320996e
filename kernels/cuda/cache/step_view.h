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
  // At least position + 1 and, if attention is not causal, the length for every token in [0,
  // AttentionLaunch::tiled_from).
  int max_context = 0;
  const uint8_t* long_sequence = nullptr;  // [tokens] StepInputs::long_sequence; 0 without it
  // The number of positions in the table at page_tables[i * table_stride] is
  // lengths[i * table_stride]. Only attention that is not causal reads it.
  const int32_t* lengths = nullptr;
};

}  // namespace moeserve::cuda
