// How evenly rows spread over the experts of a block.
#pragma once

#include <vector>

namespace moeserve::server {

struct ExpertBalance {
  double balance = 1.0;  // mean / max of the selections
  double entropy = 1.0;  // of the shares, divided by ln E
  int unused = 0;        // experts without a selection
};

// `selections` has one number per expert. All zero: 1, 1, all experts unused.
ExpertBalance MeasureBalance(const std::vector<double>& selections);

}  // namespace moeserve::server
