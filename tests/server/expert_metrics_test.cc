// Metrics about experts: the number of series in each mode, and the values of the decaying window.
#include "server/metrics/expert_metrics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "tests/server/exposition.h"

namespace moeserve::server {
namespace {

using testing::Exposition;
using testing::ReadExposition;

// Expert 3 has 60 of 100 selections, expert 5 the remaining 40.
ExpertStats WideLayout(int blocks, int experts) {
  ExpertStats stats;
  stats.tokens = 100;
  for (int b = 0; b < blocks; ++b) {
    BlockExpertStats block;
    block.layer = b;
    block.num_experts = experts;
    block.selections.resize(static_cast<size_t>(experts));
    block.weight_sums.resize(static_cast<size_t>(experts));
    block.expert_parameters.resize(static_cast<size_t>(experts), 10);
    block.selections[3] = 60;
    block.selections[5] = 40;
    block.weight_sums[3] = 0.75;
    stats.blocks.push_back(block);
  }
  return stats;
}

Exposition Export(const MoeMetricsOptions& options, const ExpertStats& stats,
                  const ModelSpec& spec = {}) {
  const auto resolved = ResolveMoeMetrics(options, {stats});
  EXPECT_TRUE(resolved.ok()) << resolved.status();
  ExpertMetrics metrics(*resolved, spec);
  metrics.Observe(stats, absl::UnixEpoch());
  PrometheusText text;
  metrics.Write(text, stats, "m");
  return ReadExposition(text.Take());
}

MoeMetricsMode Resolved(MoeMetricsMode mode, const ExpertStats& stats) {
  const auto resolved = ResolveMoeMetrics({.mode = mode}, {stats});
  EXPECT_TRUE(resolved.ok()) << resolved.status();
  return resolved.ok() ? resolved->mode : MoeMetricsMode::kAuto;
}

TEST(ResolveMoeMetrics, AutoIsFullUpTo4096Experts) {
  EXPECT_EQ(Resolved(MoeMetricsMode::kAuto, {}), MoeMetricsMode::kFull);
  EXPECT_EQ(Resolved(MoeMetricsMode::kAuto, WideLayout(64, 64)), MoeMetricsMode::kFull);
  ExpertStats more = WideLayout(64, 64);
  more.blocks[7].selections.push_back(0);
  EXPECT_EQ(Resolved(MoeMetricsMode::kAuto, more), MoeMetricsMode::kTop);
  for (const MoeMetricsMode mode : {MoeMetricsMode::kOff, MoeMetricsMode::kLayer,
                                    MoeMetricsMode::kTop, MoeMetricsMode::kFull}) {
    EXPECT_EQ(Resolved(mode, more), mode);
  }
}

TEST(ResolveMoeMetrics, FullHasItsBound) {
  EXPECT_EQ(Resolved(MoeMetricsMode::kFull, WideLayout(64, 256)), MoeMetricsMode::kFull);
  const ExpertStats more = WideLayout(65, 256);
  const auto refused = ResolveMoeMetrics({.mode = MoeMetricsMode::kFull}, {more});
  ASSERT_TRUE(absl::IsInvalidArgument(refused.status()));
  for (const char* part : {"--moe-metrics=full", "16640", "16384"}) {
    EXPECT_NE(refused.status().message().find(part), std::string::npos) << refused.status();
  }
  EXPECT_EQ(Resolved(MoeMetricsMode::kTop, more), MoeMetricsMode::kTop);
  // Sums of gate weights are series, too.
  EXPECT_TRUE(
      ResolveMoeMetrics({.mode = MoeMetricsMode::kFull, .weights = true}, {WideLayout(32, 256)})
          .ok());
  EXPECT_FALSE(
      ResolveMoeMetrics({.mode = MoeMetricsMode::kFull, .weights = true}, {WideLayout(33, 256)})
          .ok());
}

TEST(ResolveMoeMetrics, WeightsNeedASeriesForEachExpert) {
  EXPECT_TRUE(ResolveMoeMetrics({.weights = true}, {WideLayout(2, 8)}).ok());
  EXPECT_FALSE(ResolveMoeMetrics({.weights = true}, {WideLayout(58, 256)}).ok());
  EXPECT_FALSE(
      ResolveMoeMetrics({.mode = MoeMetricsMode::kLayer, .weights = true}, {WideLayout(2, 8)})
          .ok());
}

TEST(ParseMoeMetricsMode, TakesItsOwnNames) {
  for (const char* word : {"off", "layer", "top", "full", "auto"}) {
    const auto mode = ParseMoeMetricsMode(word);
    ASSERT_TRUE(mode.ok()) << word;
    EXPECT_STREQ(Name(*mode), word);
  }
  for (const char* word : {"", "Full", "all", "auto "}) {
    EXPECT_FALSE(ParseMoeMetricsMode(word).ok()) << word;
  }
}

// Families that only some modes have.
constexpr const char* kExpertTokens = "moeserve_moe_expert_tokens_total";
constexpr const char* kExpertWeight = "moeserve_moe_expert_weight_total";
constexpr const char* kHotShare = "moeserve_moe_hot_expert_share_ratio";
constexpr const char* kHotId = "moeserve_moe_hot_expert_id";

TEST(ExpertMetrics, EveryModeHasItsFamilies) {
  struct Case {
    MoeMetricsOptions options;
    bool expert_tokens;
    bool expert_weight;
    bool hot;
  };
  const Case cases[] = {
      {{.mode = MoeMetricsMode::kLayer}, false, false, false},
      {{.mode = MoeMetricsMode::kTop}, false, false, true},
      {{.mode = MoeMetricsMode::kFull}, true, false, false},
      {{.mode = MoeMetricsMode::kAuto}, true, false, false},
      {{.mode = MoeMetricsMode::kFull, .weights = true}, true, true, false},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(Name(c.options.mode));
    const Exposition read = Export(c.options, WideLayout(3, 8));
    EXPECT_EQ(read.types.contains(kExpertTokens), c.expert_tokens);
    EXPECT_EQ(read.types.contains(kExpertWeight), c.expert_weight);
    EXPECT_EQ(read.types.contains(kHotShare), c.hot);
    EXPECT_EQ(read.types.contains(kHotId), c.hot);
    for (const char* family :
         {"moe_info", "moe_layer_tokens_total", "moe_layer_rows_total",
          "moe_layer_load_balance_ratio", "moe_layer_load_entropy_ratio",
          "moe_layer_unused_experts", "moe_router_nonfinite_total", "moe_recomputed_tokens_total",
          "moe_expert_tokens_per_step", "moe_active_experts_per_step", "moe_window_tokens"}) {
      EXPECT_TRUE(read.HasSamples(std::string("moeserve_") + family)) << family;
    }
    const char* mode = c.options.mode == MoeMetricsMode::kAuto ? "full" : Name(c.options.mode);
    EXPECT_TRUE(std::any_of(read.samples.begin(), read.samples.end(), [&](const auto& sample) {
      return sample.first.starts_with("moeserve_moe_info{") &&
             sample.first.ends_with(std::string(",mode=\"") + mode + "\"}");
    }));
  }
  EXPECT_TRUE(Export({.mode = MoeMetricsMode::kOff}, WideLayout(3, 8)).types.empty());
}

TEST(ExpertMetrics, SeriesStayWithinTheBudget) {
  EXPECT_LT(Export({}, WideLayout(64, 64)).samples.size(), 10'000u);
  EXPECT_LT(Export({}, WideLayout(58, 256)).samples.size(), 2000u);
  const size_t layer = Export({.mode = MoeMetricsMode::kLayer}, WideLayout(58, 256)).samples.size();
  EXPECT_EQ(layer, Export({.mode = MoeMetricsMode::kLayer}, WideLayout(58, 8)).samples.size());
  EXPECT_EQ(Export({.mode = MoeMetricsMode::kTop}, WideLayout(58, 256)).samples.size(),
            layer + 2 * 58 * 4);
  EXPECT_EQ(Export({.mode = MoeMetricsMode::kFull}, WideLayout(58, 256)).samples.size(),
            layer + 58 * 256);
}

TEST(ExpertMetrics, TheLargestTextIsSmallEnoughToScrape) {
  const ExpertStats stats = WideLayout(64, 256);
  ExpertMetrics metrics({.mode = MoeMetricsMode::kFull}, {});
  metrics.Observe(stats, absl::UnixEpoch());
  PrometheusText text;
  metrics.Write(text, stats, "a-name-of-some-length");
  EXPECT_LT(text.Take().size(), size_t{2} << 20);
}

TEST(ExpertMetrics, NamesTheMostUsedExperts) {
  const Exposition read = Export({.mode = MoeMetricsMode::kTop}, WideLayout(2, 8));
  const auto rank = [&](const char* name, int r) {
    return read.samples.at(std::string(name) +
                           R"({model="m",layer="1",block="feed_forward",rank=")" +
                           std::to_string(r) + "\"}");
  };
  EXPECT_EQ(rank(kHotId, 1), 3);
  EXPECT_EQ(rank(kHotId, 2), 5);
  EXPECT_EQ(rank(kHotShare, 1), 0.6);
  EXPECT_EQ(rank(kHotShare, 2), 0.4);
  EXPECT_EQ(rank(kHotShare, 4), 0.0);
}

TEST(ExpertMetrics, CountsAndWeightsAreTheStats) {
  const Exposition read =
      Export({.mode = MoeMetricsMode::kFull, .weights = true}, WideLayout(2, 8));
  const char* labels = R"({model="m",layer="1",block="feed_forward",expert="3"})";
  EXPECT_EQ(read.samples.at(std::string(kExpertTokens) + labels), 60);
  EXPECT_EQ(read.samples.at(std::string(kExpertWeight) + labels), 0.75);
}

TEST(ExpertMetrics, StepsAreHistogramsByPowersOfTwo) {
  ExpertStats stats = WideLayout(1, 8);
  stats.blocks[0].recomputed_tokens = 9;
  for (const uint64_t rows : {1, 2, 3, 8192, 8193}) stats.expert_rows[0].Observe(rows);
  stats.active_experts[1].Observe(512, 3);
  stats.active_experts[1].Observe(513);
  const Exposition read = Export({.mode = MoeMetricsMode::kLayer}, stats);
  const auto at = [&](const std::string& name, const std::string& labels) {
    return read.samples.at("moeserve_moe_" + name + "{model=\"m\"" + labels + "}");
  };
  const std::string prefill = R"(,phase="prefill")";
  const std::string decode = R"(,phase="decode")";
  const auto le = [](const char* bound) { return std::string(",le=\"") + bound + '"'; };
  EXPECT_EQ(at("expert_tokens_per_step_bucket", prefill + le("1.0")), 1);
  EXPECT_EQ(at("expert_tokens_per_step_bucket", prefill + le("2.0")), 2);
  EXPECT_EQ(at("expert_tokens_per_step_bucket", prefill + le("4.0")), 3);
  EXPECT_EQ(at("expert_tokens_per_step_bucket", prefill + le("8192.0")), 4);
  EXPECT_EQ(at("expert_tokens_per_step_bucket", prefill + le("+Inf")), 5);
  EXPECT_EQ(at("expert_tokens_per_step_sum", prefill), 1 + 2 + 3 + 8192 + 8193);
  EXPECT_EQ(at("expert_tokens_per_step_count", decode), 0);
  EXPECT_EQ(at("active_experts_per_step_bucket", decode + le("256.0")), 0);
  EXPECT_EQ(at("active_experts_per_step_bucket", decode + le("512.0")), 3);
  EXPECT_EQ(at("active_experts_per_step_count", decode), 4);
  EXPECT_EQ(at("recomputed_tokens_total", R"(,layer="0",block="feed_forward")"), 9);
}

TEST(ExpertMetrics, InfoSaysWhetherAnExpertIsShared) {
  ModelSpec spec;
  spec.AddLayers(2);
  spec.feed_forward(1).shared_width = 64;
  const Exposition read = Export({}, WideLayout(3, 8), spec);
  for (const auto& [layer, shared] : {std::pair("0", "0"), {"1", "1"}, {"2", "0"}}) {
    EXPECT_EQ(
        read.samples.count(
            std::string(R"(moeserve_moe_info{model="m",layer=")") + layer +
            R"(",block="feed_forward",experts="8",select="top_k",top_k="1",split_heads="1",)" +
            R"(shared_experts=")" + shared + R"(",mode="full"})"),
        1u)
        << layer;
  }
}

TEST(ExpertMetrics, TheWindowHalvesInAMinute) {
  ExpertStats stats = WideLayout(1, 8);
  ExpertMetrics metrics({.mode = MoeMetricsMode::kLayer}, {});
  const auto window = [&] {
    PrometheusText text;
    metrics.Write(text, stats, "m");
    return ReadExposition(text.Take()).samples.at(R"(moeserve_moe_window_tokens{model="m"})");
  };
  absl::Time now = absl::UnixEpoch();
  metrics.Observe(stats, now);
  EXPECT_EQ(window(), 100);
  for (int second = 0; second < 60; ++second) metrics.Observe(stats, now += absl::Seconds(1));
  EXPECT_NEAR(window(), 50, 1e-9);
  EXPECT_NEAR(window(), 50, 1e-9) << "reading moves nothing";
  stats.tokens += 30;
  metrics.Observe(stats, now);
  EXPECT_NEAR(window(), 80, 1e-9);
  // A snapshot that is older than the last one adds nothing, and neither does one with an earlier
  // time.
  ExpertStats old = stats;
  old.tokens -= 10;
  metrics.Observe(old, now - absl::Seconds(5));
  EXPECT_NEAR(window(), 80, 1e-9);
}

}  // namespace
}  // namespace moeserve::server
