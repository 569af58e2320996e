// How the experts of a block share its work. T tokens, h rows of a token, k experts of a row, n_e
// selections of expert e.
#pragma once

#include <vector>

#include "engine/statistics/expert_stats.h"

namespace moeserve {

// [E] n_e / T: the ratio that MH-MoE, fig. 1, holds against a threshold. Reaches h * k. All 0
// without tokens.
std::vector<double> SelectionRatios(const BlockExpertStats& block);

// [E] n_e / (T h k), in [0, 1]; k is the largest number that a row may choose (top-p: its cap).
std::vector<double> SelectionRatiosOfChoices(const BlockExpertStats& block);

// [E] n_e / sum n, in [0, 1] (MoA, fig. 3 as a percentage). All 0 without selections.
std::vector<double> LoadShares(const BlockExpertStats& block);

// Numbers of the experts, the most loaded first; equals by number.
std::vector<int> ExpertsByLoad(const BlockExpertStats& block);

// Experts with SelectionRatios() above `threshold`.
int ActivatedExperts(const BlockExpertStats& block, double threshold);

// How evenly `selections` are spread. All zero selections: 1, 1, all experts unused.
struct LoadShape {
  double balance = 1.0;  // mean / max
  double entropy = 1.0;  // of the shares / ln E
  int unused = 0;
};
LoadShape MeasureLoad(const std::vector<double>& selections);

}  // namespace moeserve
