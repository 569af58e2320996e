#include "server/commands/ranks/rank_timeout.h"

#include <algorithm>

#include "base/error_text.h"

namespace moeserve::server {
namespace {

constexpr absl::Duration kDefault = absl::Seconds(10);
// Steps of long contexts take longer than those at the start, and machines are not always idle.
constexpr int kStepsPerTimeout = 20;

}  // namespace

RankTimeout ChooseRankTimeout(double seconds, absl::Duration longest_step) {
  const absl::Duration least = kStepsPerTimeout * longest_step;
  if (seconds == 0.0) return {.timeout = std::max(kDefault, least)};
  RankTimeout out{.timeout = absl::Seconds(seconds)};
  if (out.timeout < least) {
    out.warning = Concat("--rank-timeout: expected at least ",
                         absl::FormatDuration(absl::Ceil(least, absl::Milliseconds(100))), ", ",
                         kStepsPerTimeout, " times the longest step as predicted, found ",
                         absl::FormatDuration(out.timeout),
                         ": processes that only take long may count as lost");
  }
  return out;
}

}  // namespace moeserve::server
