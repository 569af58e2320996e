#include "server/commands/ranks/rank_timeout.h"

#include <gtest/gtest.h>

namespace moeserve::server {
namespace {

TEST(RankTimeoutTest, ByDefaultItHasRoomForTwentySteps) {
  EXPECT_EQ(ChooseRankTimeout(0.0, absl::ZeroDuration()).timeout, absl::Seconds(10));
  EXPECT_EQ(ChooseRankTimeout(0.0, absl::Milliseconds(500)).timeout, absl::Seconds(10));
  EXPECT_EQ(ChooseRankTimeout(0.0, absl::Milliseconds(501)).timeout, absl::Milliseconds(10020));
  EXPECT_EQ(ChooseRankTimeout(0.0, absl::Seconds(6)).timeout, absl::Minutes(2));
  EXPECT_EQ(ChooseRankTimeout(0.0, absl::Seconds(6)).warning, "");
}

TEST(RankTimeoutTest, LessIsObeyedWithAWarning) {
  const RankTimeout enough = ChooseRankTimeout(4.0, absl::Milliseconds(200));
  EXPECT_EQ(enough.timeout, absl::Seconds(4));
  EXPECT_EQ(enough.warning, "");
  const RankTimeout little = ChooseRankTimeout(4.5, absl::Milliseconds(312));
  EXPECT_EQ(little.timeout, absl::Milliseconds(4500));
  EXPECT_EQ(little.warning,
            "--rank-timeout: expected at least 6.3s, 20 times the longest step as predicted, found "
            "4.5s: processes that only take long may count as lost");
}

}  // namespace
}  // namespace moeserve::server
