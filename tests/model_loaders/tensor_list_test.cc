// Compares names, shapes and order of the tensors that a spec requires with lists written by hand.
#include <algorithm>
#include <string>
#include <vector>

#include "base/error_text.h"
#include "engine/spec/weights.h"
#include "gtest/gtest.h"
#include "model_loaders/architectures/leftover.h"
#include "model_loaders/architectures/native/config_json.h"
#include "tests/support/native_model.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;

std::vector<std::string> Lines(const Json& config) {
  const auto parsed = ParseNativeConfig(config.dump());
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  std::vector<std::string> lines;
  if (!parsed.ok()) return lines;
  for (const TensorRequirement& tensor : RequiredTensors(parsed->spec)) {
    lines.push_back(Concat(tensor.name, " ", ShapeText(tensor.shape)));
  }
  return lines;
}

Json Dense() {
  return Json::parse(R"({
    "model_type": "routed_decoder", "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1,
    "max_position_embeddings": 16, "bos_token_id": null, "eos_token_id": 0,
    "attention": {"kind": "dense", "num_heads": 6, "num_kv_heads": 3, "head_dim": 4},
    "feed_forward": {"kind": "dense", "expert": {"form": "plain", "activation": "relu"},
                     "width": 5}})");
}

TEST(RequiredTensors, SmallestDenseModel) {
  EXPECT_EQ(Lines(Dense()), (std::vector<std::string>{
                                "embed.weight [10, 8]",
                                "norm.weight [8]",
                                "head.weight [10, 8]",
                                "blocks.0.attention.norm.weight [8]",
                                "blocks.0.attention.k.weight [12, 8]",
                                "blocks.0.attention.v.weight [12, 8]",
                                "blocks.0.attention.q.weight [24, 8]",
                                "blocks.0.attention.o.weight [8, 24]",
                                "blocks.0.feed_forward.norm.weight [8]",
                                "blocks.0.feed_forward.up.weight [5, 8]",
                                "blocks.0.feed_forward.down.weight [8, 5]",
                            }));
}

TEST(RequiredTensors, DenseModelWithEverything) {
  Json json = Dense();
  json["norm"] = {{"kind", "layer"}};
  json["position"] = {{"kind", "learned"}};
  json["attention"].update({{"bias", true}, {"out_bias", true}, {"qk_norm", "full"}});
  json["feed_forward"]["expert"] = {
      {"form", "gated"}, {"activation", "silu"}, {"bias", true}, {"inner_norm", true}};
  EXPECT_EQ(Lines(json), (std::vector<std::string>{
                             "embed.weight [10, 8]",
                             "embed_position.weight [16, 8]",
                             "norm.weight [8]",
                             "norm.bias [8]",
                             "head.weight [10, 8]",
                             "blocks.0.attention.norm.weight [8]",
                             "blocks.0.attention.norm.bias [8]",
                             "blocks.0.attention.k.weight [12, 8]",
                             "blocks.0.attention.k.bias [12]",
                             "blocks.0.attention.v.weight [12, 8]",
                             "blocks.0.attention.v.bias [12]",
                             "blocks.0.attention.q.weight [24, 8]",
                             "blocks.0.attention.q.bias [24]",
                             "blocks.0.attention.o.weight [8, 24]",
                             "blocks.0.attention.q_norm.weight [24]",
                             "blocks.0.attention.k_norm.weight [12]",
                             "blocks.0.attention.out_bias [8]",
                             "blocks.0.feed_forward.norm.weight [8]",
                             "blocks.0.feed_forward.norm.bias [8]",
                             "blocks.0.feed_forward.gate.weight [5, 8]",
                             "blocks.0.feed_forward.gate.bias [5]",
                             "blocks.0.feed_forward.up.weight [5, 8]",
                             "blocks.0.feed_forward.up.bias [5]",
                             "blocks.0.feed_forward.down.weight [8, 5]",
                             "blocks.0.feed_forward.down.bias [8]",
                             "blocks.0.feed_forward.inner_norm.weight [5]",
                             "blocks.0.feed_forward.inner_norm.bias [5]",
                         }));
}

TEST(RequiredTensors, TheFinalNormIsASetting) {
  const auto has = [](const Json& json) {
    for (const std::string& line : Lines(json)) {
      if (line.starts_with("norm.weight ")) return true;
    }
    return false;
  };
  for (const char* placement : {"pre", "post", "output", "both"}) {
    Json json = Dense();
    json["norm"] = {{"kind", "rms"}, {"placement", placement}};
    EXPECT_EQ(has(json), std::string(placement) != "post") << placement;
    for (const bool has_final : {false, true}) {
      json["norm"]["final"] = has_final;
      EXPECT_EQ(has(json), has_final) << placement;
    }
  }
}

TEST(RequiredTensors, PostNormTiedModelHasNeitherFinalNormNorHead) {
  Json json = Dense();
  json["norm"] = {{"kind", "rms"}, {"placement", "post"}};
  json["tie_word_embeddings"] = true;
  json["attention"]["qk_norm"] = "head";
  const std::vector<std::string> lines = Lines(json);
  ASSERT_EQ(lines.size(), 11u);
  EXPECT_EQ(lines[1], "blocks.0.attention.norm.weight [8]");
  EXPECT_EQ(lines[6], "blocks.0.attention.q_norm.weight [4]");
  EXPECT_EQ(lines[7], "blocks.0.attention.k_norm.weight [4]");
}

TEST(RequiredTensors, RoutedBlocks) {
  Json json = Dense();
  json["tie_word_embeddings"] = true;
  json["attention"] = Json::parse(R"({"kind": "routed", "num_kv_heads": 2, "head_dim": 4,
    "bias": true, "out_bias": true,
    "routing": {"num_experts": 2, "score": {"kind": "dot", "bias": true},
                "select": {"kind": "top_k", "k": 1}}})");
  json["feed_forward"] = Json::parse(R"({"kind": "routed", "shared_width": 7, "shared_gate": true,
    "expert": {"form": "gated", "activation": "silu", "inner_norm": true},
    "routing": {"num_experts": 2, "widths": [3, 6], "split": {"heads": 2},
                "score": {"kind": "cosine", "dim": 5, "bias": true, "temperature": "log_scale"},
                "select": {"kind": "top_k", "k": 1}}})");
  EXPECT_EQ(Lines(json), (std::vector<std::string>{
                             "embed.weight [10, 8]",
                             "norm.weight [8]",
                             "blocks.0.attention.norm.weight [8]",
                             "blocks.0.attention.k.weight [8, 8]",
                             "blocks.0.attention.k.bias [8]",
                             "blocks.0.attention.v.weight [8, 8]",
                             "blocks.0.attention.v.bias [8]",
                             "blocks.0.attention.router.weight [2, 8]",
                             "blocks.0.attention.router.bias [2]",
                             "blocks.0.attention.experts.0.q.weight [8, 8]",
                             "blocks.0.attention.experts.0.o.weight [8, 8]",
                             "blocks.0.attention.experts.1.q.weight [8, 8]",
                             "blocks.0.attention.experts.1.o.weight [8, 8]",
                             "blocks.0.attention.out_bias [8]",
                             "blocks.0.feed_forward.norm.weight [8]",
                             "blocks.0.feed_forward.split.weight [8, 8]",
                             "blocks.0.feed_forward.split.bias [8]",
                             "blocks.0.feed_forward.merge.weight [8, 8]",
                             "blocks.0.feed_forward.merge.bias [8]",
                             "blocks.0.feed_forward.router.projection.weight [5, 4]",
                             "blocks.0.feed_forward.router.projection.bias [5]",
                             "blocks.0.feed_forward.router.experts.weight [2, 5]",
                             "blocks.0.feed_forward.router.temperature [1]",
                             "blocks.0.feed_forward.experts.0.gate.weight [3, 4]",
                             "blocks.0.feed_forward.experts.0.up.weight [3, 4]",
                             "blocks.0.feed_forward.experts.0.down.weight [4, 3]",
                             "blocks.0.feed_forward.experts.0.inner_norm.weight [3]",
                             "blocks.0.feed_forward.experts.1.gate.weight [6, 4]",
                             "blocks.0.feed_forward.experts.1.up.weight [6, 4]",
                             "blocks.0.feed_forward.experts.1.down.weight [4, 6]",
                             "blocks.0.feed_forward.experts.1.inner_norm.weight [6]",
                             "blocks.0.feed_forward.shared.gate.weight [7, 8]",
                             "blocks.0.feed_forward.shared.up.weight [7, 8]",
                             "blocks.0.feed_forward.shared.down.weight [8, 7]",
                             "blocks.0.feed_forward.shared.inner_norm.weight [7]",
                             "blocks.0.feed_forward.shared_gate.weight [1, 8]",
                         }));
}

TEST(RequiredTensors, ProjectionsAreIndependentOfTheNumberOfHeads) {
  Json json = Dense();
  json["feed_forward"] = Json::parse(R"({"kind": "routed",
    "expert": {"form": "plain", "activation": "relu"},
    "routing": {"num_experts": 1, "widths": 3, "split": {"heads": 2, "projection": false},
                "select": {"kind": "top_k", "k": 1}}})");
  std::vector<std::string> lines = Lines(json);
  EXPECT_EQ(lines[9], "blocks.0.feed_forward.router.weight [1, 4]");
  json["feed_forward"]["routing"]["split"] = {{"heads", 1}, {"residual", true}};
  lines = Lines(json);
  EXPECT_EQ(lines[9], "blocks.0.feed_forward.router.weight [1, 8]");
  json["feed_forward"]["routing"]["split"] = {{"heads", 1}, {"projection", true}, {"bias", false}};
  lines = Lines(json);
  EXPECT_EQ(std::vector<std::string>(lines.begin() + 9, lines.begin() + 12),
            (std::vector<std::string>{"blocks.0.feed_forward.split.weight [8, 8]",
                                      "blocks.0.feed_forward.merge.weight [8, 8]",
                                      "blocks.0.feed_forward.router.weight [1, 8]"}));
  json["feed_forward"]["routing"]["split"]["projection"] = false;
  json["feed_forward"]["routing"]["split"]["merge_projection"] = true;
  lines = Lines(json);
  EXPECT_EQ(lines[9], "blocks.0.feed_forward.merge.weight [8, 8]");
  EXPECT_EQ(lines[10], "blocks.0.feed_forward.router.weight [1, 8]");
}

TEST(RequiredTensors, LayerInputsAndKeysOfOtherLayers) {
  Json json = Dense();
  json["num_hidden_layers"] = 2;
  json["layer_input"] = {{"width", 3}, {"activation", "silu"}};
  Json own = {{"kind", "dense"}, {"num_heads", 2}, {"head_dim", 4}, {"qk_norm", "head"}};
  Json shared = own;
  shared["kv_layer"] = 0;
  json["attention"] = {own, shared};
  const std::vector<std::string> lines = Lines(json);
  for (const char* line :
       {"embed_layers.weight [10, 6]", "layer_input.weight [6, 8]", "layer_input.norm.weight [3]",
        "blocks.1.input.gate.weight [3, 8]", "blocks.1.input.down.weight [8, 3]",
        "blocks.1.input.norm.weight [8]", "blocks.0.attention.k.weight [8, 8]",
        "blocks.0.attention.k_norm.weight [4]", "blocks.1.attention.q.weight [8, 8]",
        "blocks.1.attention.q_norm.weight [4]"}) {
    EXPECT_TRUE(std::ranges::find(lines, line) != lines.end()) << line;
  }
  for (const std::string& line : lines) {
    for (const char* name : {"blocks.1.attention.k", "blocks.1.attention.v"}) {
      EXPECT_FALSE(line.starts_with(name)) << line;
    }
  }
  const ModelSpec spec = ParseNativeConfig(json.dump())->spec;
  for (const char* name : {"k.weight", "k.bias", "k_norm.weight", "v.weight"}) {
    EXPECT_EQ(WhyLeftOver(std::string("blocks.1.attention.") + name, spec),
              "attention[1].kv_layer is set");
  }
  const ModelSpec plain = ParseNativeConfig(Dense().dump())->spec;
  for (const char* name : {"embed_layers.weight", "layer_input.weight", "layer_input.norm.weight",
                           "blocks.0.input.gate.weight"}) {
    EXPECT_EQ(WhyLeftOver(name, plain), "layer_input is none") << name;
  }
}

TEST(RequiredTensors, SettingsOfExperts) {
  Json json = Dense();
  json["feed_forward"] = Json::parse(R"({"kind": "routed", "shared_width": 7,
    "expert": {"form": "plain", "activation": "relu", "sublayer": "residual", "depth": 2},
    "routing": {"num_experts": 1, "widths": 5, "latent_width": 3,
                "null_experts": {"zero": 1, "copy": 1, "constant": 2, "replaced": [0]},
                "split": {"heads": 2, "bias": false, "depth": 2, "merge_projection": false},
                "select": {"kind": "top_k", "k": 6}}})");
  const std::vector<std::string> lines = Lines(json);
  ASSERT_GT(lines.size(), 9u);
  EXPECT_EQ(std::vector<std::string>(lines.begin() + 9, lines.end()),
            (std::vector<std::string>{
                "blocks.0.feed_forward.split.0.weight [8, 8]",
                "blocks.0.feed_forward.split.1.weight [8, 8]",
                "blocks.0.feed_forward.router.weight [6, 4]",
                "blocks.0.feed_forward.latent_down.weight [3, 4]",
                "blocks.0.feed_forward.latent_up.weight [4, 3]",
                "blocks.0.feed_forward.experts.0.constant [3]",
                "blocks.0.feed_forward.experts.1.layers.0.norm.weight [3]",
                "blocks.0.feed_forward.experts.1.layers.0.up.weight [5, 3]",
                "blocks.0.feed_forward.experts.1.layers.0.down.weight [3, 5]",
                "blocks.0.feed_forward.experts.1.layers.1.norm.weight [3]",
                "blocks.0.feed_forward.experts.1.layers.1.up.weight [5, 3]",
                "blocks.0.feed_forward.experts.1.layers.1.down.weight [3, 5]",
                "blocks.0.feed_forward.experts.4.constant [3]",
                "blocks.0.feed_forward.experts.5.constant [3]",
                "blocks.0.feed_forward.shared.layers.0.norm.weight [8]",
                "blocks.0.feed_forward.shared.layers.0.up.weight [7, 8]",
                "blocks.0.feed_forward.shared.layers.0.down.weight [8, 7]",
                "blocks.0.feed_forward.shared.layers.1.norm.weight [8]",
                "blocks.0.feed_forward.shared.layers.1.up.weight [7, 8]",
                "blocks.0.feed_forward.shared.layers.1.down.weight [8, 7]",
            }));
  const ModelSpec spec = ParseNativeConfig(json.dump())->spec;
  const std::string key = "feed_forward[0].";
  const std::vector<std::pair<const char*, std::string>> cases = {
      {"split.weight", key + "routing.split.depth is 2"},
      {"split.2.weight", key + "routing.split.depth is 2"},
      {"split.1.bias", key + "routing.split.bias is false"},
      {"merge.0.weight", key + "routing.split.merge_projection is false"},
      {"experts.2.layers.0.up.weight", key + "routing.num_experts is 1"},
      {"experts.0.layers.0.up.weight", key + "routing.null_experts.replaced has 0"},
      {"experts.1.constant", key + "routing.null_experts.replaced does not have 1"},
      {"experts.3.constant", key + "routing.null_experts.constant is 2"},
      {"experts.1.up.weight", key + "expert.sublayer is \"residual\""},
      {"experts.1.layers.2.up.weight", key + "expert.depth is 2"},
      {"experts.1.layers.0.norm.bias", "norm.kind is \"rms\", which has no bias"},
      {"shared.layers.0.gate.weight", key + "expert.form is \"plain\""},
      {"latent_down.bias", "no key"},
  };
  for (const auto& [name, reason] : cases) {
    const std::string why = WhyLeftOver(std::string("blocks.0.feed_forward.") + name, spec);
    EXPECT_EQ(why.find(reason), 0u) << name << ": " << why;
  }
}

TEST(RequiredTensors, ResidualForms) {
  Json json = testing::TinyConfig();
  json["attention"][0]["norm_placement"] = "both";
  json["attention"][1].update({{"norm_placement", "output"}, {"out_bias", false}});
  json["feed_forward"][1]["shared_norms"] = true;
  std::vector<std::string> norms;
  for (const std::string& line : Lines(json)) {
    if (line.find("norm.weight [16]") != std::string::npos) norms.push_back(line);
  }
  EXPECT_EQ(
      norms,
      (std::vector<std::string>{
          "norm.weight [16]", "blocks.0.attention.norm.weight [16]",
          "blocks.0.attention.output_norm.weight [16]", "blocks.0.feed_forward.norm.weight [16]",
          "blocks.1.attention.output_norm.weight [16]", "blocks.1.feed_forward.norm.weight [16]",
          "blocks.1.feed_forward.shared_norm.weight [16]",
          "blocks.1.feed_forward.shared_output_norm.weight [16]",
          "blocks.1.feed_forward.experts_norm.weight [16]"}));
  const ModelSpec spec = ParseNativeConfig(json.dump())->spec;
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"blocks.1.attention.norm.weight", "attention[1].norm_placement is \"output\""},
      {"blocks.0.feed_forward.output_norm.weight", "norm.placement is \"pre\""},
      {"blocks.0.feed_forward.shared_norm.weight", "feed_forward[0].shared_width is 0"},
      {"blocks.1.feed_forward.experts_norm.bias", "norm.kind is \"rms\", which has no bias"},
  };
  for (const auto& [name, reason] : cases) {
    const std::string why = WhyLeftOver(name, spec);
    EXPECT_EQ(why.find(reason), 0u) << name << ": " << why;
  }
  json["feed_forward"][1]["shared_norms"] = false;
  const ModelSpec plain = ParseNativeConfig(json.dump())->spec;
  EXPECT_EQ(WhyLeftOver("blocks.1.feed_forward.experts_norm.weight", plain)
                .find("feed_forward[1].shared_norms is false"),
            0u);
}

TEST(RequiredTensors, SaysWhereAShapeComesFrom) {
  const auto config = ParseNativeConfig(testing::TinyConfig().dump());
  ASSERT_TRUE(config.ok());
  const auto from = [&](std::string_view name) -> std::string {
    for (const TensorRequirement& tensor : RequiredTensors(config->spec)) {
      if (tensor.name == name) return tensor.follows_from;
    }
    return "no such tensor";
  };
  EXPECT_EQ(from("blocks.0.attention.k.weight"),
            "[attention[0].num_kv_heads * attention[0].head_dim, hidden_size]");
  EXPECT_EQ(from("blocks.0.attention.k.bias"),
            "[attention[0].num_kv_heads * attention[0].head_dim]; attention[0].bias is true");
  EXPECT_EQ(from("blocks.0.feed_forward.experts.2.down.weight"),
            "[hidden_size / feed_forward[0].routing.split.heads, "
            "feed_forward[0].routing.widths[2]]");
  EXPECT_EQ(from("blocks.0.feed_forward.router.temperature"),
            "[1]; feed_forward[0].routing.score.temperature is not \"none\"");
  EXPECT_EQ(from("blocks.1.feed_forward.shared_gate.weight"),
            "[1, hidden_size]; feed_forward[1].shared_gate is true");
}

TEST(WhyLeftOver, NamesTheSettingThatRulesATensorOut) {
  Json json = testing::TinyConfig();
  json["tie_word_embeddings"] = true;
  json["attention"][0]["bias"] = false;
  json["attention"][0].erase("qk_norm");
  const ModelSpec spec = ParseNativeConfig(json.dump())->spec;
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"head.weight", "tie_word_embeddings is true"},
      {"embed_position.weight", "position.kind is not \"learned\""},
      {"relative_bias.weight", "there is no relative_bias"},
      {"norm.bias", "norm.kind is \"rms\", which has no bias"},
      {"blocks.2.attention.norm.weight", "num_hidden_layers is 2"},
      {"blocks.0.attention.norm.bias", "norm.kind is \"rms\", which has no bias"},
      {"blocks.0.attention.q.bias", "attention[0].bias is false"},
      {"blocks.0.attention.v.bias", "attention[0].bias is false"},
      {"blocks.0.attention.q_norm.weight", "attention[0].qk_norm is \"none\""},
      {"blocks.0.attention.out_bias", "attention[0].out_bias is false"},
      {"blocks.0.attention.router.weight", "attention[0].kind is \"dense\""},
      {"blocks.0.attention.experts.0.q.weight", "attention[0].kind is \"dense\""},
      {"blocks.1.attention.q.weight", "attention[1].kind is \"routed\""},
      {"blocks.1.attention.k_norm.weight", "attention[1].kind is \"routed\""},
      {"blocks.1.attention.experts.4.q.weight", "attention[1].routing.num_experts is 4"},
      {"blocks.1.attention.router.bias", "attention[1].routing.score.bias is false"},
      {"blocks.1.attention.router.norm.weight", "attention[1].routing.score.norm is \"none\""},
      {"blocks.1.attention.router.expert_scale", "attention[1].routing.expert_scale is false"},
      {"blocks.1.attention.router.table", "attention[1].routing.select.kind is \"top_k\""},
      {"blocks.1.attention.router.temperature", "attention[1].routing.score.kind is \"dot\""},
      {"blocks.0.feed_forward.router.weight", "feed_forward[0].routing.score.kind is \"cosine\""},
      {"blocks.0.feed_forward.router.projection.bias",
       "feed_forward[0].routing.score.bias is false"},
      {"blocks.0.feed_forward.up.weight", "feed_forward[0].kind is \"routed\""},
      {"blocks.0.feed_forward.experts.8.up.weight", "feed_forward[0].routing.num_experts is 8"},
      {"blocks.0.feed_forward.experts.0.up.bias", "feed_forward[0].expert.bias is false"},
      {"blocks.0.feed_forward.experts.0.inner_norm.weight",
       "feed_forward[0].expert.inner_norm is false"},
      {"blocks.0.feed_forward.shared.up.weight", "feed_forward[0].shared_width is 0"},
      {"blocks.1.feed_forward.experts.0.gate.weight", "feed_forward[1].expert.form is \"plain\""},
      {"blocks.1.feed_forward.shared.gate.weight", "feed_forward[1].expert.form is \"plain\""},
      {"blocks.1.feed_forward.split.weight", "feed_forward[1].routing.split.projection is false"},
      {"blocks.0.feed_forward.split.0.weight", "feed_forward[0].routing.split.depth is 1"},
      {"blocks.0.feed_forward.latent_up.weight", "feed_forward[0].routing.latent_width is 0"},
      {"blocks.0.feed_forward.experts.0.layers.0.up.weight",
       "feed_forward[0].expert.sublayer is \"plain\""},
      {"blocks.0.feed_forward.experts.8.constant",
       "feed_forward[0].routing.null_experts.constant is 0"},
      {"blocks.0.feed_forward.experts.0.constant",
       "feed_forward[0].routing.null_experts.replaced does not have 0"},
      {"model.embed_tokens.weight", "no key"},
      {"blocks.00.attention.norm.weight", "no key"},
      {"blocks.99999999999.x", "no key"},
      {"blocks.-1.attention.norm.weight", "no key"},
      {"blocks.0", "no key"},
      {"blocks.0.feed_forward.experts.x.up.weight", "no key"},
      {"blocks.0.feed_forward.foo", "no key"},
      {"", "no key"},
  };
  for (const auto& [name, reason] : cases) {
    EXPECT_EQ(WhyLeftOver(name, spec).find(reason), 0u) << name << ": " << WhyLeftOver(name, spec);
  }
}

}  // namespace
}  // namespace moeserve
