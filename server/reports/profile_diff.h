// Compares two expert profiles.
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
  std::vector<double> share_a, share_b;    // [E] shares of the block's selections
  std::vector<int> movers;                 // experts by the size of their change, largest first
  double correlation = 0.0;                // of the shares; NaN if one is constant
  double consistency = 0.0;                // IC of these two runs; NaN likewise
  std::optional<Fluctuation> fluctuation;  // if both profiles have routes of the same tokens
};

struct ProfileDiff {
  std::string a, b;
  std::vector<BlockDiff> blocks;
  std::string no_fluctuation;  // why there is no fluctuation; empty if there is
};

// InvalidArgument if CheckComparable() refuses the profiles.
Result<ProfileDiff> Diff(const ExpertProfile& a, const ExpertProfile& b);

nlohmann::ordered_json DiffJson(const ProfileDiff& diff);

// Shows the `top` largest movers per block.
std::string DiffTable(const ProfileDiff& diff, int top);

}  // namespace moeserve::server
