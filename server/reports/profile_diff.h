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
#include "server/base/json.h"

namespace moeserve::server {

struct BlockDiff {
  int layer = 0;
  BlockKind block = BlockKind::kFeedForward;
  std::vector<double> share_a, share_b;  // [E]: each expert's share of the block's selections
  std::vector<int> movers;               // expert ids, by decreasing change of their share
  double correlation = 0.0;              // of share_a and share_b; NaN if one of them is constant
  double consistency = 0.0;              // inter-run consistency (IC) of a and b; may be NaN
  // Routing fluctuation, if both profiles have routes for the same tokens.
  std::optional<Fluctuation> fluctuation;
};

struct ProfileDiff {
  std::string a, b;
  std::vector<BlockDiff> blocks;
  std::string no_fluctuation;  // why there is no fluctuation; empty if there is
};

// Returns why the routing fluctuation between two profiles that CheckComparable() accepts is not
// defined; empty if it is.
std::string ReasonAgainstFluctuation(const ExpertProfile& a, const ExpertProfile& b);

// Compares two profiles. InvalidArgument if CheckComparable() refuses them.
Result<ProfileDiff> Diff(const ExpertProfile& a, const ExpertProfile& b);

OrderedJson DiffJson(const ProfileDiff& diff);

// Returns the comparison as text, with the `top` experts per block whose share changed most.
std::string DiffTable(const ProfileDiff& diff, int top);

}  // namespace moeserve::server
