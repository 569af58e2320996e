// How much a step is delayed while experts move between ranks.
#pragma once

#include "tests/bench/ranks/rank_engine.h"
#include "tests/bench/ranks/timed_steps.h"

namespace moeserve {

// The most that a move of experts may delay a step.
inline constexpr double kMostDelaySeconds = 0.020;

// Runs the steps of `work` over and over. In each round, ranks 0 and 1 exchange experts of so many
// MiB, which both load together, in all blocks; the next round moves others. Prints, of the steps
// from the announcement to a second after the new placement was used, how much longer the longest
// one is than the median of those before, the same of as many steps after that, without a move, and
// of the steps around the change of placement. Returns false if the bits of logits change.
bool MeasureRebalancing(RankEngine& ranks, const ModelSpec& spec, const Work& work, int rounds,
                        int mib);

}  // namespace moeserve
