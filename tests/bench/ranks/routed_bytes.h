// The bytes that ranks send for the results of experts.
#pragma once

#include <cstdint>

#include "engine/model/model.h"
#include "tests/bench/ranks/timed_steps.h"

namespace moeserve {

// Bytes that all ranks together send for the results of routed blocks, if these have neither shared
// experts nor projections.
struct RoutedBytes {
  int64_t sent = 0;
  // (k d b / P + 4 d) (P - 1) per token where owners add, as if results were spread evenly.
  int64_t expected = 0;
};

// Runs the work with the model, which is that of one process, and returns what ranks send that have
// a balanced placement.
RoutedBytes BytesOfExperts(Model& model, KvCacheStorage& cache, const Work& work, int ranks,
                           SplitChoice owner_sums);

}  // namespace moeserve
