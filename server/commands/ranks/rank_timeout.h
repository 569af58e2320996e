// For how long ranks wait for each other in a step.
#pragma once

#include <string>

#include "absl/time/time.h"

namespace moeserve::server {

struct RankTimeout {
  absl::Duration timeout;
  std::string warning = {};  // empty: there is none
};

// Returns the time after which a rank that others wait for is lost. `seconds`: of --rank-timeout,
// which is obeyed, with a warning if it is less than 20 of the longest steps; 0: it was not given.
// `longest_step`: as predicted at the start.
RankTimeout ChooseRankTimeout(double seconds, absl::Duration longest_step);

}  // namespace moeserve::server
