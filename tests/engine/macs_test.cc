// MACs of models whose experts have biases, windows and routed attention, and capacities; NumPy
// checks those of the bundled models (tests/statistics).
#include "engine/statistics/measures/macs.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/routes/row_limit.h"
#include "engine/statistics/expert_recorder.h"

namespace moeserve {
namespace {

constexpr int kWidth = 8, kWindow = 3, kTokens = 5;

// Returns a model with one layer: attention with a window, and two experts of unequal widths.
ModelSpec MacsModel(bool expert_bias) {
  ModelSpec spec;
  spec.vocab_size = 11;
  spec.hidden_size = kWidth;
  spec.AddLayers(1);
  AttentionSpec& attention = spec.attention(0);
  attention.num_heads = 2;
  attention.num_kv_heads = 1;
  attention.head_dim = 4;
  attention.window = kWindow;
  FeedForwardSpec& feed_forward = spec.feed_forward(0);
  feed_forward.expert.bias = expert_bias;
  RoutedLayerSpec& routing = feed_forward.routing.emplace();
  routing.num_experts = 2;
  routing.widths = {4, 6};
  return spec;
}

// Returns the usage of tokens of which the first `first` selected expert 0 and the others expert 1.
Usage UsageOf(const ModelSpec& spec, int first) {
  const ExpertStats sizes = EmptyExpertStats(spec);
  const std::vector<int64_t>& parameters = sizes.blocks[0].expert_parameters;
  Usage usage;
  usage.routed_tokens = kTokens;
  usage.expert_routes = kTokens;
  usage.activated_parameters =
      static_cast<uint64_t>(kTokens * sizes.always_active_parameters + first * parameters[0] +
                            (kTokens - first) * parameters[1]);
  return usage;
}

TEST(Macs, OfARequestFollowFromItsSums) {
  for (const bool bias : {false, true}) {
    const ModelSpec spec = MacsModel(bias);
    const RequestMacs macs(spec);
    // q, k, v and o, and the router; norms and biases do not count.
    const int64_t fixed = kWidth * (8 + 4 + 4 + 8) + 2 * kWidth;
    EXPECT_EQ(FixedMacs(spec), fixed);
    // Tokens see 1, 2, 3, 3 and 3 keys, each with two products of two heads.
    const int64_t keys = 2 * 2 * 4 * (1 + 2 + 3 + 3 + 3);
    for (int first = 0; first <= kTokens; ++first) {
      const int64_t experts = 3 * kWidth * (first * 4 + (kTokens - first) * 6);
      EXPECT_EQ(macs.Of(UsageOf(spec, first)),
                static_cast<double>(kTokens * fixed + keys + experts))
          << bias << first;
    }
  }
}

TEST(Macs, OfARequestAreAbsentWhereItsSumsSayTooLittle) {
  // Experts of two layers have the same numbers of parameters, but not of biases.
  ModelSpec spec = MacsModel(true);
  spec.AddLayer(spec.attention(0), spec.feed_forward(0));
  FeedForwardSpec& second = spec.feed_forward(1);
  second.expert.bias = false;
  EXPECT_FALSE(RequestMacs(spec).Of(UsageOf(MacsModel(true), 1)).has_value());
  EXPECT_FALSE(RequestMacs(MacsModel(true)).Of(Usage()).has_value());
}

TEST(Macs, OfRoutedValuesAndChunksFollowFromTheSumsOfARequest) {
  ModelSpec spec;
  spec.vocab_size = 11;
  spec.hidden_size = kWidth;
  spec.AddLayers(1);
  AttentionSpec& attention = spec.attention(0);
  attention.num_heads = 2;
  attention.num_kv_heads = 1;
  attention.head_dim = 4;
  attention.value_dim = 6;
  attention.window = kWindow;
  attention.window_kind = WindowKind::kChunk;
  RoutedLayerSpec& routing = attention.value_routing.emplace();
  routing.num_experts = 5;
  routing.select.k = 2;
  spec.feed_forward(0).width = 3;
  const ExpertStats sizes = EmptyExpertStats(spec);
  ASSERT_EQ(sizes.blocks.size(), 1u);
  EXPECT_EQ(sizes.blocks[0].block, BlockKind::kAttention);
  EXPECT_EQ(sizes.blocks[0].expert_widths, std::vector<int>(5, 6));
  EXPECT_EQ(sizes.blocks[0].expert_parameters, std::vector<int64_t>(5, 6 * kWidth));
  Usage usage;
  usage.routed_tokens = kTokens;
  usage.expert_routes = 2 * kTokens;
  usage.activated_parameters = static_cast<uint64_t>(
      kTokens * (sizes.always_active_parameters + 2 * sizes.blocks[0].expert_parameters[0]));
  // q, k and o, the router, two values, and the dense feed-forward.
  const int64_t token = kWidth * (8 + 4 + 12 + 5 + 2 * 6 + 3 * 3);
  // Tokens see 1, 2, 3, 1 and 2 keys, each with two products of two heads.
  const int64_t keys = 2 * (4 + 6) * (1 + 2 + 3 + 1 + 2);
  EXPECT_EQ(RequestMacs(spec).Of(usage), static_cast<double>(kTokens * token + keys));
  ExpertStats stats = sizes;
  stats.tokens = kTokens;
  stats.blocks[0].selections = {4, 2, 1, 2, 1};
  const std::vector<int> lengths = {kTokens};
  const MeasuredMacs measured = MacsOf(spec, stats, lengths, {});
  EXPECT_DOUBLE_EQ(measured.matrices, static_cast<double>(token));
  EXPECT_DOUBLE_EQ(measured.attention.value(), keys / 5.0);
}

TEST(Macs, OfRoutedAttentionNeedTheModelsNumberOfExperts) {
  ModelSpec spec;
  spec.vocab_size = 11;
  spec.hidden_size = kWidth;
  spec.AddLayers(1);
  AttentionSpec& attention = spec.attention(0);
  attention.num_kv_heads = 1;
  attention.head_dim = 4;
  RoutedLayerSpec& routing = attention.routing.emplace();
  routing.num_experts = 5;
  routing.select.k = 2;
  spec.feed_forward(0).width = 3;
  const RequestMacs macs(spec);
  const ExpertStats sizes = EmptyExpertStats(spec);
  Usage usage;
  usage.routed_tokens = kTokens;
  usage.expert_routes = 2 * kTokens;
  usage.activated_parameters = static_cast<uint64_t>(
      kTokens * (sizes.always_active_parameters + 2 * sizes.blocks[0].expert_parameters[0]));
  // MoA, eq. 18, with the router and the dense feed-forward.
  const int64_t token = 2 * (2 + 1) * 4 * kWidth + 5 * kWidth + 3 * 3 * kWidth;
  const int64_t keys = 2 * 2 * 4 * (kTokens * (kTokens + 1) / 2);
  EXPECT_EQ(macs.Of(usage), static_cast<double>(kTokens * token + keys));
  usage.expert_routes += 1;  // the request has overridden the selection
  EXPECT_FALSE(macs.Of(usage).has_value());
}

TEST(Macs, OfAttentionWithAVaryingNumberOfExpertsNeedTheRoutes) {
  ModelSpec spec;
  spec.vocab_size = 11;
  spec.hidden_size = kWidth;
  spec.AddLayers(1);
  AttentionSpec& attention = spec.attention(0);
  attention.num_kv_heads = 1;
  attention.head_dim = 4;
  attention.window = 2;
  RoutedLayerSpec& routing = attention.routing.emplace();
  routing.num_experts = 3;
  routing.select = {.kind = SelectKind::kTopP, .p = 0.5, .max_experts = 3};
  spec.feed_forward(0).width = 3;
  ExpertStats stats = EmptyExpertStats(spec);
  stats.tokens = 5;
  stats.blocks[0].selections = {4, 2, 1};
  // Two sequences, of 3 and 2 tokens, which select 1, 3, 1 and 1, 1 experts.
  const std::vector<int> lengths = {3, 2};
  const std::vector<BlockRoutes> routes = {
      {.top1 = {0, 0, 0, 0, 1}, .offsets = {0, 1, 4, 5, 6, 7}, .experts = {0, 0, 1, 2, 0, 0, 1}}};
  EXPECT_FALSE(MacsOf(spec, stats, lengths).attention.has_value());
  const MeasuredMacs macs = MacsOf(spec, stats, lengths, routes);
  // k and v, the router and the feed-forward; an expert has q and o.
  const double fixed = kWidth * (4 + 4) + 3 * kWidth + 3 * 3 * kWidth;
  EXPECT_DOUBLE_EQ(macs.matrices, fixed + 7 * 2 * 4 * kWidth / 5.0);
  // Tokens see 1, 2, 2 and 1, 2 keys.
  EXPECT_DOUBLE_EQ(macs.attention.value(), 2 * 4 * (1 * 1 + 3 * 2 + 1 * 2 + 1 * 1 + 1 * 2) / 5.0);
  // Without a direction, tokens of an encoder see 2, 3, 2 and 2, 2 keys, those one to the right,
  // too.
  ModelSpec encoder = spec;
  encoder.attention(0).causal = false;
  EXPECT_DOUBLE_EQ(MacsOf(encoder, stats, lengths, routes).attention.value(),
                   2 * 4 * (1 * 2 + 3 * 3 + 1 * 2 + 1 * 2 + 1 * 2) / 5.0);
  const MacsRange range = MacsOf(spec);
  EXPECT_EQ(range.min_per_key, 2 * 4);
  EXPECT_EQ(range.max_per_key, 3 * 2 * 4);
  EXPECT_FALSE(range.nominal.has_value());
}

TEST(Capacity, ParsesRules) {
  for (const char* text :
       {"switch:64", "fraction:0.5", "fraction:1", "gshard", "fraction:0.5:renormalize"}) {
    const Result<CapacityRule> rule = CapacityRule::Parse(text);
    ASSERT_TRUE(rule.ok()) << rule.status();
    EXPECT_EQ(rule->Text(), text);
  }
  for (const char* text : {"", "switch", "switch:", "switch:0", "switch:1.5", "switch:64x",
                           "fraction:0", "fraction:1.1", "fraction:nan", "gshard:2", "none"}) {
    const Result<CapacityRule> rule = CapacityRule::Parse(text);
    ASSERT_FALSE(rule.ok()) << text;
    EXPECT_NE(rule.status().message().find("expected switch:ROWS"), std::string::npos);
  }
}

TEST(Capacity, LimitsFollowFromTheRows) {
  EXPECT_FALSE(CapacityRule::Parse("gshard")->renormalize);
  EXPECT_TRUE(CapacityRule::Parse("gshard:renormalize")->renormalize);
  EXPECT_EQ(CapacityRule::Parse("switch:64")->Limit(10, 8, 2), 64);
  EXPECT_EQ(CapacityRule::Parse("fraction:0.25")->Limit(10, 8, 2), 3);
  EXPECT_EQ(CapacityRule::Parse("gshard")->Limit(17, 8, 2), 6);
}

}  // namespace
}  // namespace moeserve
