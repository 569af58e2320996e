// How evenly the experts of a block share the work. T: number of tokens; h: rows per token; k:
// experts per row; n_e: selections of expert e.
#pragma once

#include <vector>

#include "engine/statistics/expert_stats.h"

namespace moeserve {

// Returns n_e / T for each expert, the ratio that MH-MoE, fig. 1, compares with a threshold. The
// values are in [0, h], because a row selects an expert at most once. All are 0 without tokens.
std::vector<double> SelectionRatios(const BlockExpertStats& block);

// Returns n_e / (T h k) for each expert, in [0, 1 / k]. k is the largest number of experts that a
// row may choose (top-p: its maximum).
std::vector<double> SelectionRatiosOfChoices(const BlockExpertStats& block);

// Returns n_e / sum n for each expert, in [0, 1] (MoA, fig. 3, shows it as a percentage). All
// values are 0 without selections.
std::vector<double> LoadShares(const BlockExpertStats& block);

// Returns the indices of the experts by descending load; ties: the lower index first.
std::vector<int> ExpertsByLoad(const BlockExpertStats& block);

// Returns the number of experts with SelectionRatios() above `threshold`.
int ActivatedExperts(const BlockExpertStats& block, double threshold);

// How evenly `selections` are spread over the experts. If all selections are 0: balance 1, entropy
// 1 and all experts unused.
struct LoadShape {
  double balance = 1.0;  // mean selections / largest selections
  double entropy = 1.0;  // entropy of the load shares / ln E
  // Number of experts without selections.
  int unused = 0;
};
LoadShape MeasureLoad(const std::vector<double>& selections);

}  // namespace moeserve
