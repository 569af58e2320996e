// Two expert profiles side by side.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/statistics/expert_profile.h"
#include "engine/statistics/measures/agreement.h"
#include "nlohmann/json.hpp"

namespace moeserve::server {

struct BlockDiff {
  int layer = 0;
  BlockKind block = BlockKind::kFeedForward;
  std::vector<double> share_a, share_b;    // [E] load shares
  std::vector<int> movers;                 // experts by the size of their change, largest first
  double correlation = 0.0;                // of the loads; NaN where one is constant
  double consistency = 0.0;                // IC of these two runs; NaN likewise
  std::optional<Fluctuation> fluctuation;  // where both profiles have routes of the same tokens
};

struct ProfileDiff {
  std::string a, b;
  std::vector<BlockDiff> blocks;
  std::string no_fluctuation;  // why there is none; empty: there is
};

// InvalidArgument: not CheckComparable().
Result<ProfileDiff> Diff(const ExpertProfile& a, const ExpertProfile& b);

nlohmann::ordered_json DiffJson(const ProfileDiff& diff);

// The `top` largest movers of each block.
std::string DiffTable(const ProfileDiff& diff, int top);

}  // namespace moeserve::server
