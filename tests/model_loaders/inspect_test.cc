#include "model_loaders/inspect.h"

#include <string>

#include "engine/spec/weights.h"
#include "gtest/gtest.h"
#include "model_loaders/architectures/native/config_json.h"
#include "tests/support/native_model.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;

ModelSpec Spec(const Json& config) {
  const auto parsed = ParseNativeConfig(config.dump());
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed->spec;
}

// A model with 2 layers, d = 8, MoA with 4 experts (top-2) and HMoE experts of widths 1, 2, 3, 6
// (top-2).
Json Small() {
  return Json::parse(R"({
    "model_type": "routed_decoder", "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 2,
    "max_position_embeddings": 16, "bos_token_id": null, "eos_token_id": 0,
    "attention": {"kind": "routed", "head_dim": 4, "routing": {"num_experts": 4,
      "select": {"kind": "top_k", "k": 2}}},
    "feed_forward": {"kind": "routed", "expert": {"form": "gated", "activation": "silu"},
      "routing": {"num_experts": 4, "widths": [1, 2, 3, 6],
                  "select": {"kind": "top_k", "k": 2}}}})");
}

TEST(Summarize, CountsByHand) {
  const ModelSummary summary = Summarize(Spec(Small()));
  const int64_t embedding = 2 * 10 * 8;
  const int64_t attention_experts = 4 * (2 * 4 * 8);
  const int64_t feed_forward_experts = (1 + 2 + 3 + 6) * 3 * 8;
  const int64_t rest = 8 + 2 * (8 + 2 * 4 * 8 + 4 * 8 + 8 + 4 * 8);
  EXPECT_EQ(summary.embedding_parameters, embedding);
  EXPECT_EQ(summary.expert_parameters, 2 * (attention_experts + feed_forward_experts));
  EXPECT_EQ(summary.always_active, rest);
  EXPECT_EQ(summary.parameters, embedding + summary.expert_parameters + rest);

  const int64_t base = embedding + rest;
  const int64_t moa = 2 * (2 * 4 * 8);
  EXPECT_EQ(summary.activated.min, base + 2 * (moa + (1 + 2) * 24));
  EXPECT_EQ(summary.activated.max, base + 2 * (moa + (3 + 6) * 24));
  EXPECT_EQ(summary.activated.nominal, base + 2 * (moa + 2 * 3 * 24));

  ASSERT_EQ(summary.routed_blocks.size(), 4u);
  EXPECT_EQ(summary.routed_blocks[0].block, BlockKind::kAttention);
  EXPECT_EQ(summary.routed_blocks[3].layer, 1);
  EXPECT_EQ(summary.routed_blocks[3].expert_parameters, (std::vector<int64_t>{24, 48, 72, 144}));
  EXPECT_EQ(summary.WeightBytes(DType::kBF16), 2 * summary.parameters);
  EXPECT_EQ(summary.KvBytesPerToken(DType::kF32), 2 * 2 * 4 * 4);
  EXPECT_EQ(summary.KvBytesPerToken(DType::kBF16), 2 * 2 * 4 * 2);
}

TEST(Summarize, TopPHasARangeOnly) {
  Json json = Small();
  json["feed_forward"]["routing"]["select"] = {{"kind", "top_p"}, {"p", 0.6}, {"max", 3}};
  const ModelSummary summary = Summarize(Spec(json));
  EXPECT_FALSE(summary.activated.nominal.has_value());
  EXPECT_EQ(summary.routed_blocks[1].min_experts, 1);
  EXPECT_EQ(summary.routed_blocks[1].max_experts, 3);
}

TEST(Summarize, SubTokensMayShareExperts) {
  Json json = Small();
  json["feed_forward"]["routing"]["split"] = {{"heads", 4}};
  const ModelSummary summary = Summarize(Spec(json));
  EXPECT_EQ(summary.routed_blocks[1].min_experts, 2);
  EXPECT_EQ(summary.routed_blocks[1].max_experts, 4);
  EXPECT_EQ(summary.routed_blocks[1].expert_parameters, (std::vector<int64_t>{6, 12, 18, 36}));
}

TEST(Summarize, BiasesAndInnerNormsBelongToTheirExpert) {
  Json json = Small();
  json["norm"] = {{"kind", "layer"}};
  json["feed_forward"]["expert"].update({{"bias", true}, {"inner_norm", true}});
  Json deep = json;
  deep["feed_forward"]["expert"].update({{"sublayer", "residual"}, {"depth", 3}});
  deep["feed_forward"]["routing"]["null_experts"] = {
      {"zero", 1}, {"copy", 1}, {"constant", 2}, {"replaced", {0, 3}}};
  deep["feed_forward"]["routing"]["latent_width"] = 5;
  for (const Json& config : {json, deep}) {
    const ModelSpec spec = Spec(config);
    const ModelSummary summary = Summarize(spec);
    const auto experts = static_cast<size_t>(spec.feed_forward(0).routing->num_experts);
    std::vector<int64_t> expected(experts);
    for (const TensorRequirement& tensor : RequiredTensors(spec)) {
      const std::string prefix = "blocks.0.feed_forward.experts.";
      if (!tensor.name.starts_with(prefix)) continue;
      int64_t elements = 1;
      for (const int64_t dim : tensor.shape) elements *= dim;
      expected[std::stoul(tensor.name.substr(prefix.size()))] += elements;
    }
    EXPECT_EQ(summary.routed_blocks[1].expert_parameters, expected);
  }
}

TEST(Summarize, TextNamesEveryKindOfLayerOnce) {
  const std::string text = SummaryText(Summarize(Spec(Small())));
  EXPECT_NE(text.find("layers 0-1: attention routed: 4 experts of 1 heads x 4"), std::string::npos)
      << text;
  EXPECT_NE(text.find("layers 0-1: feed-forward routed: 4 experts, widths 1,2,3,6, gated silu; dot "
                      "score, softmax, top-2"),
            std::string::npos)
      << text;
  EXPECT_EQ(text.find("layer 1:"), std::string::npos) << text;

  Json json = Small();
  json["feed_forward"]["expert"].update({{"sublayer", "residual"}, {"depth", 3}});
  json["feed_forward"]["routing"].update(Json::parse(R"({"latent_width": 5,
      "null_experts": {"zero": 2, "constant": 1, "replaced": [3]},
      "split": {"heads": 2, "merge_projection": false, "depth": 2}})"));
  const std::string deep = SummaryText(Summarize(Spec(json)));
  EXPECT_NE(
      deep.find("routed: 4 experts, widths 1,2,3,6, gated silu, 3 residual sub-layers, 2 zero "
                "and 1 constant and 1 replaced experts; split into 2 sub-tokens with one "
                "projection before "
                "the split of 2 layers, experts on rows of 5, dot score"),
      std::string::npos)
      << deep;

  json = Small();
  json["layer_input"] = {{"width", 3}, {"activation", "gelu_tanh"}};
  const ModelSummary inputs = Summarize(Spec(json));
  EXPECT_NE(inputs.general.find(", inputs of each layer of width 3 with gelu_tanh"),
            std::string::npos)
      << inputs.general;
  const auto rows = Spec(json).vocab_size;
  EXPECT_EQ(inputs.embedding_parameters,
            Summarize(Spec(Small())).embedding_parameters + int64_t{rows} * 2 * 3);

  const auto split_text = [](const char* split) {
    Json changed = Small();
    changed["feed_forward"]["routing"]["split"] = Json::parse(split);
    const std::string text = SummaryText(Summarize(Spec(changed)));
    const size_t begin = text.find("gated silu; ") + 12;
    return text.substr(begin, text.find(", dot score", begin) - begin);
  };
  EXPECT_EQ(split_text(R"({"heads": 2})"), "split into 2 sub-tokens");
  EXPECT_EQ(split_text(R"({"heads": 2, "depth": 3})"),
            "split into 2 sub-tokens with projections of 3 layers");
  EXPECT_EQ(split_text(R"({"heads": 2, "projection": false})"),
            "split into 2 sub-tokens without projections");
  EXPECT_EQ(split_text(R"({"heads": 1, "projection": true})"),
            "not split with projections before and after the experts");
  EXPECT_EQ(split_text(R"({"heads": 1, "merge_projection": true, "depth": 2})"),
            "not split with one projection after the experts of 2 layers");

  const std::string tiny = SummaryText(Summarize(Spec(testing::TinyConfig())));
  EXPECT_NE(tiny.find("layer 0: feed-forward routed: 8 experts, widths 9,11,13,15,17,19,21,23"),
            std::string::npos)
      << tiny;
  EXPECT_NE(tiny.find("split into 2 sub-tokens, cosine score of dim 4"), std::string::npos) << tiny;
  EXPECT_NE(tiny.find("top-p >= 0.6, at most 4; shared expert of width 6, gated"),
            std::string::npos)
      << tiny;
}

TEST(Summarize, TextNamesGroupsOfNormsAndRoutedValues) {
  Json config = Small();
  config["norm"] = {{"kind", "rms"}, {"groups", 2}};
  config["attention"] = Json::parse(R"({"kind": "dense", "num_heads": 2, "head_dim": 4,
      "window": 3, "window_kind": "chunk",
      "value_routing": {"num_experts": 3, "select": {"kind": "top_k", "k": 1}}})");
  const ModelSummary summary = Summarize(Spec(config));
  const std::string text = SummaryText(summary);
  EXPECT_NE(text.find("pre-rms norm of 2 groups"), std::string::npos) << text;
  EXPECT_NE(text.find("routed values: 3 experts"), std::string::npos) << text;
  const Json json = SummaryJson(summary);
  EXPECT_EQ(json["routed_blocks"][0]["block"], "attention");
  EXPECT_EQ(json["routed_blocks"][0]["experts_per_token"], (std::vector<int>{1, 1}));
}

TEST(Summarize, JsonHasTheSameFacts) {
  const ModelSummary summary = Summarize(Spec(Small()));
  const Json json = SummaryJson(summary);
  EXPECT_EQ(json["parameters"], summary.parameters);
  EXPECT_EQ(json["activated_parameters"]["nominal"], *summary.activated.nominal);
  EXPECT_EQ(json["kv_bytes_per_token"]["bf16"], 32);
  EXPECT_EQ(json["weight_bytes"]["f32"], 4 * summary.parameters);
  EXPECT_EQ(json["routed_blocks"].size(), 4u);
  EXPECT_EQ(json["routed_blocks"][1]["block"], "feed_forward");
  EXPECT_EQ(json["layers"][0]["layers"], (std::vector<int>{0, 1}));
}

}  // namespace
}  // namespace moeserve
