// The tokens of a step as the kernels of this folder read them.
#pragma once

#include <cstdint>

namespace moeserve::cuda {

// A token's row of `block_tables` names the blocks of its sequence.
struct StepView {
  int tokens = 0;
  const int32_t* position = nullptr;      // [tokens]
  const int32_t* sequence = nullptr;      // [tokens] row of block_tables; -1: padding row
  const int32_t* block_tables = nullptr;  // [sequences, table_stride]
  int table_stride = 0;
  int max_context = 0;  // at least position + 1 of every token of [0, AttentionLaunch::tiled_from)
};

}  // namespace moeserve::cuda
