#include "kernels/route_counters.h"

namespace moeserve {

CountsSnapshot ZeroCounts(const CountSettings& settings) {
  CountsSnapshot counts;
  size_t most_diverse = 0;
  for (const CountedBlock& block : settings.blocks) {
    BlockCounts& to = counts.blocks.emplace_back();
    to.experts.resize(static_cast<size_t>(block.num_experts));
    to.distinct_histogram.resize(static_cast<size_t>(block.most_distinct) + 1);
    if (block.in_diversity) most_diverse += static_cast<size_t>(block.most_distinct);
  }
  counts.diversity_histogram.resize(most_diverse + 1);
  return counts;
}

}  // namespace moeserve
