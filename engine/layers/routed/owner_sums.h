// Whether the results of experts are added by the ranks that own the rows.
#pragma once

#include <cstdint>

#include "engine/weights/expert_placement.h"

namespace moeserve {

// What the choice of a step and a routed layer depends on, which is equal on all ranks.
struct SumCosts {
  int ranks = 1;
  int64_t results = 0;       // assignments whose experts have owners
  int64_t result_bytes = 0;  // of a result
  int64_t tokens = 0;
  int64_t sum_bytes = 0;  // of a token's output, f32
  // Whether the outputs of the layer are gathered even if every rank adds all results: they are
  // computed by rows behind the sums.
  bool outputs_gathered = false;
};

// Returns whether rank r should get the results of its rows only, add them, and gather the outputs
// (owner sums), or every rank all results. Of these, a rank sends
//   results x result_bytes x (P - 1) / P
// in one exchange; with owner sums, the P-th part of that, and in a second exchange
//   tokens x sum_bytes x (P - 1) / P,
// which takes place anyway if `outputs_gathered`. With kAuto, owner sums must save bytes, and more
// of them than a network moves in the time that another exchange takes: 7 KB at 1 Gb/s and 60 us,
// 35 KB at 10 Gb/s and 30 us, 92 KB at 100 Gb/s and 8 us. These are assumptions, not measured.
bool OwnersAdd(SplitChoice choice, const SumCosts& costs);

}  // namespace moeserve
