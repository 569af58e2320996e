#include "model_loaders/architectures/native/config_json.h"

#include <cmath>
#include <string>

#include "gtest/gtest.h"
#include "tests/model_loaders/support.h"
#include "tests/support/native_model.h"

namespace moeserve {
namespace {

using testing::Mentions;
using testing::Message;
using testing::ReadFile;
using testing::TinyConfig;
using Json = nlohmann::json;

Json Minimal() {
  return Json::parse(R"({
    "model_type": "routed_decoder", "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 3,
    "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": [2, 3],
    "attention": {"kind": "dense", "num_heads": 2, "head_dim": 4},
    "feed_forward": {"kind": "routed", "expert": {"form": "gated", "activation": "silu"},
      "routing": {"num_experts": 4, "widths": 12, "select": {"kind": "top_p", "p": 0.5}}}
  })");
}

TEST(NativeConfig, FillsInTheDefaults) {
  const auto config = ParseNativeConfig(Minimal().dump());
  ASSERT_TRUE(config.ok()) << config.status();
  const ModelSpec& spec = config->spec;
  EXPECT_EQ(spec.bos_token_id, 1);
  EXPECT_EQ(spec.eos_token_ids, (std::vector<int32_t>{2, 3}));
  EXPECT_EQ(spec.norm.kind, NormKind::kRms);
  EXPECT_EQ(spec.norm.eps, 1e-5f);
  EXPECT_EQ(spec.norm.placement, NormPlacement::kPre);
  EXPECT_EQ(spec.position.kind, PositionKind::kRope);
  EXPECT_EQ(spec.position.theta, 10000.0);
  EXPECT_EQ(spec.position.pairing, RopePairing::kHalf);
  EXPECT_EQ(spec.position.fraction, 1.0);
  EXPECT_EQ(spec.embedding_scale, 1.0);
  EXPECT_EQ(spec.residual_scale, 1.0);
  EXPECT_EQ(spec.logit_scale, 1.0);
  EXPECT_FALSE(spec.tie_word_embeddings);
  ASSERT_EQ(spec.num_layers(), 3);
  for (int layer = 0; layer < 3; ++layer) {
    const AttentionSpec& attention = spec.attention(layer);
    const FeedForwardSpec& feed_forward = spec.feed_forward(layer);
    EXPECT_FALSE(attention.routed());
    EXPECT_EQ(attention.num_kv_heads, 2);
    EXPECT_EQ(attention.scale, 0.5);
    EXPECT_FALSE(attention.bias);
    EXPECT_FALSE(attention.out_bias);
    EXPECT_FALSE(attention.window.has_value());
    EXPECT_EQ(attention.qk_norm, QkNorm::kNone);
    EXPECT_EQ(attention.group_order, GroupOrder::kInterleave);
    ASSERT_TRUE(feed_forward.routed());
    const RoutedLayerSpec& routing = *feed_forward.routing;
    EXPECT_EQ(routing.widths, (std::vector<int>{12, 12, 12, 12}));
    EXPECT_EQ(routing.split.heads, 1);
    EXPECT_FALSE(routing.split.projection);
    EXPECT_FALSE(routing.split.merge_projection);
    EXPECT_EQ(routing.score.kind, ScoreKind::kDot);
    EXPECT_FALSE(routing.score.bias);
    EXPECT_EQ(routing.gate, GateKind::kSoftmax);
    EXPECT_EQ(routing.select.compare, TopPCompare::kGe);
    EXPECT_EQ(routing.select.max_experts, 4);
    EXPECT_FALSE(routing.renormalize);
    EXPECT_EQ(routing.scale, 1.0);
    EXPECT_EQ(feed_forward.shared_width, 0);
    EXPECT_FALSE(feed_forward.expert.bias);
    EXPECT_FALSE(feed_forward.expert.inner_norm);
  }
}

TEST(NativeConfig, CosineDefaultsAndMoaDefaults) {
  Json json = Minimal();
  json["attention"] = Json::parse(R"({"kind": "routed", "head_dim": 4, "routing": {
      "num_experts": 4, "score": {"kind": "cosine"}, "select": {"kind": "top_k", "k": 4}}})");
  const auto config = ParseNativeConfig(json.dump());
  ASSERT_TRUE(config.ok()) << config.status();
  const AttentionSpec& attention = config->spec.attention(2);
  ASSERT_TRUE(attention.routed());
  EXPECT_EQ(attention.num_kv_heads, 1);
  EXPECT_TRUE(attention.routing->widths.empty());
  const ScoreSpec& score = attention.routing->score;
  EXPECT_EQ(score.kind, ScoreKind::kCosine);
  EXPECT_EQ(score.dim, 16);
  EXPECT_TRUE(score.normalize_row);
  EXPECT_TRUE(score.normalize_expert);
  EXPECT_EQ(score.eps, 1e-12);
  EXPECT_EQ(score.temperature, TemperatureKind::kNone);
}

TEST(NativeConfig, ReadsEveryKey) {
  const auto config = ParseNativeConfig(R"({
    "model_type": "routed_decoder", "format_version": 1, "vocab_size": 10, "hidden_size": 8,
    "num_hidden_layers": 2, "max_position_embeddings": 16, "bos_token_id": null,
    "eos_token_id": [], "norm": {"kind": "layer", "eps": 1e-3, "placement": "post"},
    "position": {"kind": "rope", "theta": 500, "pairing": "interleaved", "fraction": 0.5},
    "embedding_scale": 2, "residual_scale": 0.5, "logit_scale": 0.25,
    "logit_soft_cap": 30, "tie_word_embeddings": true,
    "attention": [
      {"kind": "dense", "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "bias": true,
       "out_bias": true, "scale": 0.125, "window": 5, "qk_norm": "full", "group_order": "tile",
       "soft_cap": 50, "sinks": true},
      {"kind": "routed", "num_kv_heads": 2, "head_dim": 8, "bias": true, "out_bias": true,
       "scale": 1, "window": null, "norm_placement": "pre", "residual_scale": 0.25,
       "routing": {"num_experts": 3, "score": {"kind": "dot", "stream": true, "bias": true},
                   "gate": "sigmoid",
                   "select": {"kind": "top_p", "p": 1.5, "compare": "gt", "max": 2},
                   "renormalize": true, "scale": 3}}],
    "feed_forward": [
      {"kind": "dense", "width": 7,
       "expert": {"form": "plain", "activation": "gelu_tanh", "bias": true, "inner_norm": true}},
      {"kind": "routed", "shared_width": 5, "shared_gate": true, "shared_norms": true,
       "expert": {"form": "gated", "activation": "silu", "activation_limit": 7,
                  "activation_slope": 1.5, "up_offset": 1},
       "routing": {"num_experts": 2, "widths": [3, 4], "gate": "softmax_selected",
         "split": {"heads": 4, "projection": false, "bias": false, "residual": true},
         "score": {"kind": "cosine", "dim": 3, "bias": true, "normalize_row": false,
                   "normalize_expert": false, "eps": 1e-4, "temperature": "log_scale"},
         "select": {"kind": "top_k", "k": 1}}}]
  })");
  ASSERT_TRUE(config.ok()) << config.status();
  const ModelSpec& spec = config->spec;
  EXPECT_FALSE(spec.bos_token_id.has_value());
  EXPECT_TRUE(spec.eos_token_ids.empty());
  EXPECT_EQ(spec.norm.kind, NormKind::kLayer);
  EXPECT_EQ(spec.norm.eps, 1e-3f);
  EXPECT_EQ(spec.norm.placement, NormPlacement::kPost);
  EXPECT_EQ(spec.position.theta, 500.0);
  EXPECT_EQ(spec.position.pairing, RopePairing::kInterleaved);
  EXPECT_EQ(RopeDimensions(spec.position, 8), 4);
  EXPECT_EQ(spec.embedding_scale, 2.0);
  EXPECT_EQ(spec.residual_scale, 0.5);
  EXPECT_EQ(spec.logit_scale, 0.25);
  EXPECT_EQ(spec.logit_soft_cap, 30.0);
  EXPECT_TRUE(spec.tie_word_embeddings);
  const AttentionSpec& dense = spec.attention(0);
  EXPECT_EQ(dense.scale, 0.125);
  EXPECT_EQ(dense.window, 5);
  EXPECT_EQ(dense.qk_norm, QkNorm::kFull);
  EXPECT_EQ(dense.group_order, GroupOrder::kTile);
  EXPECT_TRUE(dense.bias && dense.out_bias && dense.sinks);
  EXPECT_EQ(dense.soft_cap, 50.0);
  EXPECT_EQ(NormPlacementOf(spec, spec.blocks[2]), NormPlacement::kPre);
  EXPECT_EQ(ResidualScaleOf(spec, spec.blocks[2]), 0.25);
  EXPECT_EQ(NormPlacementOf(spec, spec.blocks[3]), NormPlacement::kPost);
  EXPECT_EQ(ResidualScaleOf(spec, spec.blocks[3]), 0.5);
  const RoutedLayerSpec& moa = *spec.attention(1).routing;
  EXPECT_TRUE(moa.score.bias && moa.score.stream);
  EXPECT_EQ(moa.gate, GateKind::kSigmoid);
  EXPECT_EQ(moa.select.p, 1.5);
  EXPECT_EQ(moa.select.compare, TopPCompare::kGt);
  EXPECT_EQ(moa.select.MaxSelected(), 2);
  EXPECT_TRUE(moa.renormalize);
  EXPECT_EQ(moa.scale, 3.0);
  const FeedForwardSpec& plain = spec.feed_forward(0);
  EXPECT_EQ(plain.width, 7);
  EXPECT_EQ(plain.expert.form, ExpertForm::kPlain);
  EXPECT_EQ(plain.expert.activation, ActivationKind::kGeluTanh);
  EXPECT_TRUE(plain.expert.bias && plain.expert.inner_norm);
  const FeedForwardSpec& routed = spec.feed_forward(1);
  EXPECT_EQ(routed.expert.activation_limit, 7.0f);
  EXPECT_EQ(routed.expert.activation_slope, 1.5f);
  EXPECT_EQ(routed.expert.up_offset, 1.0f);
  EXPECT_EQ(routed.shared_width, 5);
  EXPECT_TRUE(routed.shared_gate && routed.shared_norms);
  EXPECT_EQ(routed.routing->widths, (std::vector<int>{3, 4}));
  EXPECT_EQ(routed.routing->gate, GateKind::kSoftmaxSelected);
  EXPECT_EQ(routed.routing->split.heads, 4);
  EXPECT_FALSE(routed.routing->split.projection || routed.routing->split.bias);
  EXPECT_TRUE(routed.routing->split.residual);
  EXPECT_EQ(routed.routing->score.dim, 3);
  EXPECT_FALSE(routed.routing->score.normalize_row || routed.routing->score.normalize_expert);
  EXPECT_EQ(routed.routing->score.eps, 1e-4);
  EXPECT_EQ(routed.routing->score.temperature, TemperatureKind::kLogScale);
}

// The settings of the four papers' models, as the documentation of the format lists them.
TEST(NativeConfig, ReadsRareKeys) {
  Json json = Minimal();
  json.update(Json::parse(R"({"embedding_norm": true, "head_bias": true, "position": {
    "kind": "rope", "scaling": {"kind": "long", "original_positions": 12, "factors": [1, 2],
                                "long_factors": [3, 4], "magnitude": 5, "long_magnitude": 6}}})"));
  json["attention"]["inner_norm"] = true;
  json["feed_forward"]["routing"]["gate"] = "sparse_mixer";
  json["feed_forward"]["routing"]["mixer_limit"] = 0.25;
  auto config = ParseNativeConfig(json.dump());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(config->spec.embedding_norm);
  EXPECT_TRUE(config->spec.head_bias);
  const RopeScaling& scaling = config->spec.position.scaling;
  EXPECT_EQ(scaling.kind, RopeScalingKind::kLong);
  EXPECT_EQ(scaling.factors, (std::vector<double>{1, 2}));
  EXPECT_EQ(scaling.long_factors, (std::vector<double>{3, 4}));
  EXPECT_EQ(scaling.magnitude, 5.0);
  EXPECT_EQ(scaling.long_magnitude, 6.0);
  EXPECT_EQ(LongSequencesFrom(config->spec), 12.0);
  EXPECT_TRUE(config->spec.attention(0).inner_norm);
  EXPECT_EQ(config->spec.feed_forward(0).routing->gate, GateKind::kSparseMixer);
  EXPECT_EQ(config->spec.feed_forward(0).routing->mixer_limit, 0.25);

  json["position"] = {{"kind", "sinusoidal"}, {"first", 2}};
  config = ParseNativeConfig(json.dump());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->spec.position.first, 2);
  EXPECT_EQ(LongSequencesFrom(config->spec), std::nullopt);

  EXPECT_FALSE(HasXpos(config->spec));
  json["position"] = {{"kind", "rope"}, {"xpos_base", 512}};
  config = ParseNativeConfig(json.dump());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->spec.position.xpos_base, 512.0);
  EXPECT_TRUE(HasXpos(config->spec));

  EXPECT_FALSE(config->spec.relative_bias.has_value());
  json["relative_bias"] = {{"buckets", 32}, {"max_distance", 128}};
  config = ParseNativeConfig(json.dump());
  ASSERT_TRUE(config.ok()) << config.status();
  ASSERT_TRUE(config->spec.relative_bias.has_value());
  EXPECT_EQ(config->spec.relative_bias->used_buckets(), 32);
  json["relative_bias"]["bidirectional"] = true;
  config = ParseNativeConfig(json.dump());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->spec.relative_bias->used_buckets(), 16);
  EXPECT_EQ(config->spec.relative_bias->max_distance, 128);

  for (const char* placement : {"pre", "post"}) {
    json["norm"] = {{"kind", "rms"}, {"placement", placement}};
    config = ParseNativeConfig(json.dump());
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->spec.norm.HasFinal(), std::string(placement) == "pre");
    for (const bool has_final : {false, true}) {
      json["norm"]["final"] = has_final;
      config = ParseNativeConfig(json.dump());
      ASSERT_TRUE(config.ok()) << config.status();
      EXPECT_EQ(config->spec.norm.HasFinal(), has_final);
    }
  }
}

TEST(NativeConfig, TakesThePapersAsSettings) {
  Json json = Minimal();
  for (const char* routing :
       {R"({"num_experts": 8, "widths": 4, "score": {"kind": "cosine", "dim": 4,
            "temperature": "divide"}, "select": {"kind": "top_k", "k": 1}})",
        R"({"num_experts": 8, "widths": 4, "score": {"kind": "cosine", "dim": 4,
            "temperature": "divide"}, "gate": "sigmoid", "select": {"kind": "top_k", "k": 2},
            "renormalize": true})",
        R"({"num_experts": 8, "widths": 4, "split": {"heads": 4, "residual": true},
            "select": {"kind": "top_k", "k": 2}})",
        R"({"num_experts": 8, "widths": [9, 11, 13, 15, 17, 19, 21, 23], "renormalize": true,
            "select": {"kind": "top_p", "p": 0.6}})"}) {
    json["feed_forward"]["routing"] = Json::parse(routing);
    const auto config = ParseNativeConfig(json.dump());
    EXPECT_TRUE(config.ok()) << config.status();
  }
  json["attention"] = Json::parse(R"({"kind": "routed", "num_kv_heads": 1, "head_dim": 64,
      "routing": {"num_experts": 32, "select": {"kind": "top_k", "k": 16}, "renormalize": true}})");
  EXPECT_TRUE(ParseNativeConfig(json.dump()).ok());
}

// The cases are in hostile/config.json: {name, patch (RFC 6902, applied to TinyConfig()), expect
// (parts of the error message)}.
TEST(NativeConfig, RefusesHostileConfigurations) {
  ASSERT_TRUE(ParseNativeConfig(TinyConfig().dump()).ok());
  const Json cases = Json::parse(ReadFile(std::string(MOESERVE_HOSTILE_DIR) + "/config.json"));
  ASSERT_GT(cases.size(), 90u);
  for (const Json& c : cases) {
    SCOPED_TRACE(c["name"].get<std::string>());
    const auto config = ParseNativeConfig(TinyConfig().patch(c["patch"]).dump());
    EXPECT_TRUE(Mentions(config.status(), c["expect"].get<std::vector<std::string>>()));
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(NativeConfig, RefusesWhatIsNotOneJsonObject) {
  for (const char* text : {"", "[]", "null", "{", "{} {}", "{\"a\": NaN}", "\xff"}) {
    EXPECT_TRUE(Mentions(ParseNativeConfig(text).status(), {"config.json: "})) << text;
  }
  EXPECT_TRUE(Mentions(ParseNativeConfig(R"({"vocab_size": 1, "vocab_size": 2})").status(),
                       {"config.json: ", "\"vocab_size\" appears twice"}));
}

TEST(NativeConfig, ManyFaultsAreCountedNotPrinted) {
  Json json = TinyConfig();
  for (int i = 0; i < 1000; ++i) json["key" + std::to_string(i)] = i;
  const auto config = ParseNativeConfig(json.dump());
  EXPECT_TRUE(Mentions(config.status(), {"1000 problems", "and 995 more"}));
  EXPECT_LT(Message(config.status()).size(), 5000u);
}

TEST(NativeConfig, KeysAreSpelledAsInTheFile) {
  NativeConfig config;
  config.attention_is_list = true;
  EXPECT_EQ(config.AsInFile("[attention[12].head_dim, feed_forward[3].routing.widths[2]]; a[1]"),
            "[attention[12].head_dim, feed_forward.routing.widths[2]]; a[1]");
  config.attention_is_list = false;
  EXPECT_EQ(config.AsInFile("attention[12].head_dim"), "attention.head_dim");
  EXPECT_EQ(config.AsInFile("attention[]attention["), "attention[]attention[");
}

// Layers that read the keys of the layer before, which read others' in turn, take no more time than
// others.
TEST(Validate, ChainsOfSharedKeys) {
  constexpr int kLayers = 200;
  Json json = TinyConfig();
  const Json own = {{"kind", "dense"}, {"num_heads", 2}, {"head_dim", 4}};
  Json reads = own;
  Json attention = Json::array();
  for (int layer = 0; layer < kLayers; ++layer) {
    reads["kv_layer"] = layer - 1;
    attention.push_back(layer % 2 == 0 ? own : reads);
  }
  json["num_hidden_layers"] = kLayers;
  json["attention"] = attention;
  json["feed_forward"] = {
      {"kind", "dense"}, {"expert", {{"form", "plain"}, {"activation", "relu"}}}, {"width", 4}};
  const auto config = ParseNativeConfig(json.dump());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(CacheShapes(config->spec).size(), kLayers / 2);
  for (int block = 0; block < config->spec.num_blocks(); ++block) {
    const BlockSpec& of = config->spec.blocks[static_cast<size_t>(block)];
    if (of.attention() == nullptr) continue;
    EXPECT_EQ(CacheLayer(config->spec, block), of.layer / 2);
  }
}

// Messages about prediction layers name their object, and the model's own faults come first.
TEST(Validate, FaultsOfPredictionLayersNameTheirObject) {
  Json json = TinyConfig();
  json["prediction"] = {
      {"num_hidden_layers", 1},
      {"attention", {{"kind", "dense"}, {"num_heads", 2}, {"head_dim", "x"}}},
      {"feed_forward",
       {{"kind", "dense"}, {"expert", {{"form", "plain"}, {"activation", "relu"}}}, {"width", 4}}}};
  EXPECT_TRUE(Mentions(ParseNativeConfig(json.dump()).status(),
                       {"prediction.attention.head_dim: expected an integer"}));
  json["prediction"]["attention"]["head_dim"] = 4;
  EXPECT_TRUE(ParseNativeConfig(json.dump()).ok()) << ParseNativeConfig(json.dump()).status();
  json["prediction"]["attention"]["num_kv_heads"] = 3;
  EXPECT_TRUE(Mentions(ParseNativeConfig(json.dump()).status(), {"prediction.attention[0]"}));
  json["bos_token_id"] = 1 << 20;
  const auto both = ParseNativeConfig(json.dump()).status();
  EXPECT_TRUE(Mentions(both, {"bos_token_id"}));
  EXPECT_EQ(std::string(both.message()).find("prediction"), std::string::npos);
}

TEST(Validate, ResidualForms) {
  const auto with = [](const char* key, const Json& keys) {
    Json json = TinyConfig();
    json["norm"] = {{"kind", "rms"}, {"placement", "output"}};
    json["attention"][1]["out_bias"] = false;
    json[key][1].update(keys);
    return ParseNativeConfig(json.dump()).status();
  };
  const Json parallel = {{"parallel", true}};
  EXPECT_TRUE(with("attention", parallel).ok());
  EXPECT_TRUE(with("feed_forward", parallel).ok());
  Json json = TinyConfig();
  json["attention"][0]["parallel"] = true;
  EXPECT_TRUE(Mentions(ParseNativeConfig(json.dump()).status(),
                       {"attention[0].parallel", "false", "it is the first block"}));
  json = TinyConfig();
  json["attention"][1]["parallel"] = json["feed_forward"][1]["parallel"] = true;
  EXPECT_TRUE(Mentions(ParseNativeConfig(json.dump()).status(),
                       {"feed_forward[1].parallel", "the block before it is parallel"}));
  EXPECT_TRUE(Mentions(with("feed_forward", {{"parallel", true}, {"shared_norms", true}}),
                       {"shared_norms"}));
  EXPECT_TRUE(Mentions(with("feed_forward", {{"parallel", true}, {"norm_placement", "post"}}),
                       {"feed_forward[1].parallel", "post"}));
  json = TinyConfig();
  json["attention"][0]["norm_placement"] = "post";
  json["feed_forward"][0]["parallel"] = true;
  EXPECT_TRUE(Mentions(ParseNativeConfig(json.dump()).status(), {"parallel", "post"}));
  // The settings of routers that read the stream.
  json = TinyConfig();
  json["feed_forward"][0]["routing"]["score"]["stream"] = true;
  EXPECT_TRUE(Mentions(ParseNativeConfig(json.dump()).status(),
                       {"feed_forward[0].routing.score.stream", "split.heads is 2"}));
  json = TinyConfig();
  json["feed_forward"][1]["routing"]["score"]["stream"] = true;
  EXPECT_TRUE(ParseNativeConfig(json.dump()).ok());
  json["feed_forward"][1]["parallel"] = true;
  EXPECT_TRUE(Mentions(ParseNativeConfig(json.dump()).status(), {"parallel", "score.stream"}));
  // The placement of a block decides about its bias.
  json = TinyConfig();
  json["attention"][1]["norm_placement"] = "both";
  EXPECT_TRUE(Mentions(ParseNativeConfig(json.dump()).status(), {"attention[1].out_bias"}));
  EXPECT_TRUE(Mentions(with("attention", {{"residual_scale", 1e39}}), {"residual_scale", "f32"}));
  EXPECT_TRUE(Mentions(with("attention", {{"norm_placement", "before"}}),
                       {"attention[1].norm_placement", "\"both\""}));
}

TEST(Validate, GuardsSpecificationsOfOtherLoaders) {
  ModelSpec spec = ParseNativeConfig(TinyConfig().dump())->spec;
  ASSERT_TRUE(Validate(spec).ok());
  const auto broken = [&](auto change) {
    ModelSpec copy = spec;
    change(copy);
    return Validate(copy);
  };
  EXPECT_TRUE(Mentions(broken([](ModelSpec& s) { s.blocks.clear(); }), {"num_hidden_layers"}));
  EXPECT_TRUE(Mentions(broken([](ModelSpec& s) { s.residual_scale = NAN; }), {"residual_scale"}));
  EXPECT_TRUE(Mentions(broken([](ModelSpec& s) { s.norm.eps = NAN; }), {"norm.eps"}));
  EXPECT_TRUE(
      Mentions(broken([](ModelSpec& s) { s.position.fraction = NAN; }), {"position.fraction"}));
  // XPOS: the largest factor of a key is 2^64, at the last position.
  const auto xpos = [&](double base, int positions) {
    return broken([&](ModelSpec& s) {
      s.position.xpos_base = base;
      s.max_position_embeddings = positions;
    });
  };
  for (const double base :
       {-1.0, static_cast<double>(NAN), static_cast<double>(INFINITY), 1e-300}) {
    EXPECT_TRUE(Mentions(xpos(base, 64), {"position.xpos_base"})) << base;
  }
  // Biases of relative positions need dense attention with equal heads, without caps and latents.
  const auto biased = [&](auto change) {
    return broken([&](ModelSpec& s) {
      s.relative_bias = RelativeBias{.buckets = 32, .max_distance = 128};
      s.attention(1) = s.attention(0);
      change(s);
    });
  };
  EXPECT_TRUE(biased([](ModelSpec&) {}).ok());
  EXPECT_TRUE(Mentions(biased([&](ModelSpec& s) { s.attention(1) = spec.attention(1); }),
                       {"attention[1].kind: expected \"dense\"", "relative_bias is set"}));
  EXPECT_TRUE(Mentions(biased([](ModelSpec& s) { s.attention(1).soft_cap = 5; }),
                       {"attention[1].soft_cap: expected 0, found 5 (relative_bias is set)"}));
  EXPECT_TRUE(Mentions(biased([](ModelSpec& s) { s.attention(1).num_heads = 2; }),
                       {"attention[1].num_heads: expected 4, found 2 (relative_bias is set)"}));
  EXPECT_TRUE(Mentions(biased([](ModelSpec& s) {
                         AttentionSpec& a = s.attention(0);
                         a.qk_norm = QkNorm::kNone;
                         a.num_kv_heads = a.num_heads;
                         a.head_dim = 6;
                         a.latent = LatentSpec{.rank = 4, .rope_dim = 2, .value_dim = 4};
                       }),
                       {"attention[0].latent: expected none"}));
  EXPECT_TRUE(Mentions(biased([](ModelSpec& s) { s.relative_bias->max_distance = 16; }),
                       {"relative_bias.max_distance: expected an integer in [17, ", "found 16"}));
  EXPECT_TRUE(Mentions(biased([](ModelSpec& s) {
                         s.relative_bias->max_distance = 1 << 20;
                         s.max_position_embeddings = 1 << 24;
                         for (int l = 0; l < s.num_layers(); ++l) s.attention(l).num_heads = 64;
                       }),
                       {"attention[0].num_heads: expected an integer in [1, 63], found 64"}));
  EXPECT_TRUE(xpos(512.0, 18131).ok());
  EXPECT_TRUE(Mentions(xpos(512.0, 18132),
                       {"position.xpos_base: expected 0 or a number >= 512.0", "found 512"}));
  EXPECT_TRUE(Mentions(broken([](ModelSpec& s) { s.feed_forward(0).routing->widths.resize(3); }),
                       {"feed_forward[0].routing.widths", "list of 8", "found 3"}));
  EXPECT_TRUE(Mentions(broken([](ModelSpec& s) {
                         s.attention(1).routing->widths = {1, 2, 3, 4};
                       }),
                       {"attention[1].routing.widths"}));
}

}  // namespace
}  // namespace moeserve
