// How routing changes over the checkpoints of training runs (X-MoE, fig. 2c and 3).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/statistics/expert_profile.h"
#include "engine/statistics/measures/agreement.h"
#include "server/base/json.h"

namespace moeserve::server {

// The profiles of one run over the same texts, one for each checkpoint, the earliest first.
struct ProfileRun {
  std::vector<std::string> names;
  std::vector<ExpertProfile> profiles;
};

// The curves of one run in one routed block.
struct BlockCurves {
  double consistency = 0.0;  // inter-run consistency of the run's checkpoints with each other
  // [checkpoints - 1] routing fluctuation from each checkpoint to the next one (X-MoE, fig. 3a);
  // empty if the profiles do not hold the routes of the same rows
  std::vector<Fluctuation> fluctuation;
  std::vector<double> collapse;  // [checkpoints] representation collapse (X-MoE, fig. 2c); or NaN
};

struct ProfileCurves {
  struct Block {
    int layer = 0;
    BlockKind kind = BlockKind::kFeedForward;
    std::vector<BlockCurves> runs;
    // [checkpoints] of all runs at one checkpoint (X-MoE, fig. 3b); empty if there is one run
    std::vector<double> consistency;
  };
  std::vector<std::vector<std::string>> names;  // [run][checkpoint]
  std::vector<Block> blocks;
  std::string no_fluctuation;  // why a run has none; empty if all have
};

// InvalidArgument if there is no profile, if the runs differ in their number of checkpoints, or if
// profiles have different routed blocks.
Result<ProfileCurves> CurvesOf(const std::vector<ProfileRun>& runs);

// Undefined values are null. Means over blocks leave them out.
OrderedJson CurvesJson(const ProfileCurves& curves);
std::string CurvesTable(const ProfileCurves& curves);

}  // namespace moeserve::server
