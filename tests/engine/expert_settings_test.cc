// Settings of experts and layers, compared with models that compute the same without them: experts
// without matrices, latent widths, projections around the split, stacks of sub-layers, keys and
// values of other layers, and inputs of layers.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/routes/routing_control.h"
#include "engine/spec/weights.h"
#include "kernels/registry.h"
#include "model_loaders/architectures/native/config_json.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

using Json = nlohmann::json;

// A model in memory whose tensors can be changed. All tensors are f32.
class TestModel {
 public:
  explicit TestModel(const Json& config) : config_(config) {
    const auto parsed = ParseNativeConfig(config.dump());
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    if (!parsed.ok()) return;
    spec_ = parsed->spec;
    tensors_ = RandomTensors(spec_);
  }
  const ModelSpec& spec() const { return spec_; }

  std::vector<float> Values(std::string_view name) const {
    const RawTensor& tensor = tensors_[IndexOf(name)];
    std::vector<float> values(tensor.bytes.size() / sizeof(float));
    std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    return values;
  }
  // Sets element (row, column) to value(row, column); a vector has one row.
  void Fill(std::string_view name, const std::function<float(int64_t, int64_t)>& value) {
    RawTensor& tensor = tensors_[IndexOf(name)];
    const int64_t columns = tensor.shape.back();
    const int64_t rows = tensor.shape.size() == 1 ? 1 : tensor.shape.front();
    std::vector<float> values;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) values.push_back(value(r, c));
    }
    std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  }
  void FillZeros(std::string_view name) {
    Fill(name, [](int64_t, int64_t) { return 0.0f; });
  }
  void FillIdentity(std::string_view name) {
    Fill(name, [](int64_t r, int64_t c) { return r == c ? 1.0f : 0.0f; });
  }

  // Returns the logits of 40 tokens, computed in steps of `chunk` tokens.
  std::vector<float> Logits(const RunnerOptions& options = {}, int chunk = 16) const {
    const TempFolder folder;
    WriteFile(folder.path() / "config.json", config_.dump());
    WriteFile(folder.path() / "model.safetensors", SafetensorsBytes(tensors_));
    const auto runner = ModelRunner::Load(folder.path(), options);
    EXPECT_TRUE(runner.ok()) << runner.status();
    if (!runner.ok()) return {};
    std::vector<int32_t> tokens;
    for (int i = 0; i < 40; ++i) tokens.push_back((i * 37 + 11) % (*runner)->vocab());
    return (*runner)->Run(tokens, chunk);
  }

 private:
  size_t IndexOf(std::string_view name) const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i].name == name) return i;
    }
    ADD_FAILURE() << "no tensor " << name;
    return 0;
  }

  Json config_;
  ModelSpec spec_;
  std::vector<RawTensor> tensors_;
};

constexpr int kHidden = 16;

Json Config(const Json& feed_forward) {
  return {{"model_type", "routed_decoder"},
          {"vocab_size", 288},
          {"hidden_size", kHidden},
          {"num_hidden_layers", feed_forward.is_array() ? feed_forward.size() : 1},
          {"max_position_embeddings", 64},
          {"bos_token_id", nullptr},
          {"eos_token_id", 256},
          {"attention", {{"kind", "dense"}, {"num_heads", 2}, {"head_dim", 8}}},
          {"feed_forward", feed_forward}};
}

Json Routed(const char* expert, const char* routing) {
  return {{"kind", "routed"}, {"expert", Json::parse(expert)}, {"routing", Json::parse(routing)}};
}

constexpr const char* kPlain = R"({"form": "plain", "activation": "relu", "bias": true})";
constexpr const char* kGated = R"({"form": "gated", "activation": "silu"})";

// Layer 0 splits tokens into rows of 8 elements; both layers have 7 experts.
Json LayersOfSeven(const Json& of_both) {
  Json split = Routed(kPlain, R"({"split": {"heads": 2}, "select": {"kind": "top_k", "k": 3}})");
  Json whole = Routed(kPlain, R"({"select": {"kind": "top_p", "p": 0.7}, "renormalize": true})");
  split["routing"].update(of_both);
  whole["routing"].update(of_both);
  split["routing"]["widths"] = 16;
  whole["routing"]["widths"] = 32;
  return Json::array({split, whole});
}

// An expert without matrices must give the same bits as an expert whose matrices compute the same.
TEST(NullExperts, EqualExpertsWithMatrices) {
  TestModel null_experts(Config(LayersOfSeven(
      {{"num_experts", 3}, {"null_experts", {{"zero", 1}, {"copy", 1}, {"constant", 2}}}})));
  TestModel matrices(Config(LayersOfSeven({{"num_experts", 7}})));
  for (int layer = 0; layer < 2; ++layer) {
    const int64_t width = layer == 0 ? 8 : 16;
    const auto expert = [&](int e) {
      return "blocks." + std::to_string(layer) + ".feed_forward.experts." + std::to_string(e) + ".";
    };
    for (const int e : {3, 5, 6}) matrices.FillZeros(expert(e) + "down.weight");
    for (const int e : {3, 4}) matrices.FillZeros(expert(e) + "down.bias");
    for (const int e : {5, 6}) {
      const std::vector<float> constant = null_experts.Values(expert(e) + "constant");
      matrices.Fill(expert(e) + "down.bias", [&](int64_t, int64_t c) { return constant[c]; });
    }
    // x = relu(x) - relu(-x)
    const auto plus_and_minus = [width](int64_t unit, int64_t c) {
      return unit == c ? 1.0f : unit == c + width ? -1.0f : 0.0f;
    };
    matrices.Fill(expert(4) + "up.weight", plus_and_minus);
    matrices.FillZeros(expert(4) + "up.bias");
    matrices.Fill(expert(4) + "down.weight",
                  [&](int64_t c, int64_t unit) { return plus_and_minus(unit, c); });
  }
  const std::vector<float> in_f32 = null_experts.Logits();
  EXPECT_EQ(in_f32, matrices.Logits());
  EXPECT_EQ(null_experts.Logits({.compute = DType::kBF16}),
            matrices.Logits({.compute = DType::kBF16}));

  // All kinds must have been selected.
  for (const int e : {5, 6}) {
    TestModel other = null_experts;
    other.FillZeros("blocks.0.feed_forward.experts." + std::to_string(e) + ".constant");
    EXPECT_NE(other.Logits(), in_f32) << "expert " << e;
  }
  const TestModel swapped(Config(
      LayersOfSeven({{"num_experts", 3}, {"null_experts", {{"zero", 2}, {"constant", 2}}}})));
  EXPECT_NE(swapped.Logits(), in_f32);
}

TEST(NullExperts, DoNotDependOnOtherRows) {
  const TestModel model(Config(LayersOfSeven(
      {{"num_experts", 3}, {"null_experts", {{"zero", 1}, {"copy", 2}, {"constant", 1}}}})));
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    EXPECT_EQ(model.Logits({.compute = compute}, 40), model.Logits({.compute = compute}, 1));
  }
}

TEST(NullExperts, CanBeNamedInOverrides) {
  const TestModel model(
      Config(LayersOfSeven({{"num_experts", 3}, {"null_experts", {{"copy", 4}}}})));
  const auto create = [&](int expert) {
    RoutingChange change;
    change.experts.push_back({.layer = 1, .expert = expert, .bias = 2.0});
    return RoutingControl::Create(change, model.spec(), {.enabled = true}).status();
  };
  EXPECT_TRUE(create(6).ok()) << create(6);
  EXPECT_FALSE(create(7).ok());
}

int64_t ColumnsOf(const ModelSpec& spec, const std::string& name) {
  for (const TensorRequirement& tensor : RequiredTensors(spec)) {
    if (tensor.name == name) return tensor.shape.back();
  }
  return 0;
}

constexpr int kPlaceOfExpert[] = {1, 2, 4, 5, 0, 3};

// Returns the name of a tensor of an expert whose id is another one.
std::string InOtherPlace(const std::string& name) {
  constexpr std::string_view kExperts = ".experts.";
  const size_t at = name.find(kExperts);
  if (at == name.npos) return name;
  std::string out = name;
  char& id = out[at + kExperts.size()];
  id = static_cast<char>('0' + kPlaceOfExpert[id - '0']);
  return out;
}

// Constants in the places of replaced experts must be those at the end, whatever form the experts
// have, if the router's rows move with them.
TEST(ReplacedExperts, EqualConstantsWithOtherIds) {
  for (const char* form :
       {kPlain, kGated, R"({"form": "gated", "activation": "silu", "bias": true,
                            "inner_norm": true})",
        R"({"form": "plain", "activation": "relu", "sublayer": "residual", "depth": 2})"}) {
    SCOPED_TRACE(form);
    Json at_the_end = Routed(form, R"({"num_experts": 4, "widths": [5, 9, 3, 12],
                                       "null_experts": {"constant": 2}, "renormalize": true,
                                       "select": {"kind": "top_k", "k": 3}})");
    Json between = at_the_end;
    between["routing"]["null_experts"] = {{"replaced", {0, 3}}};
    const TestModel last(Config(at_the_end));
    TestModel replaced(Config(between));
    for (const TensorRequirement& tensor : RequiredTensors(last.spec())) {
      const std::vector<float> values = last.Values(tensor.name);
      const int64_t columns = tensor.shape.back();
      const bool router = tensor.name.ends_with("router.weight");
      replaced.Fill(InOtherPlace(tensor.name), [&](int64_t r, int64_t c) {
        const int64_t row = router ? std::ranges::find(kPlaceOfExpert, r) - kPlaceOfExpert : r;
        return values[static_cast<size_t>(row * columns + c)];
      });
    }
    const std::vector<float> expected = last.Logits();
    const std::vector<float> found = replaced.Logits();
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 1e-5) << i;
    for (const DType compute : {DType::kF32, DType::kBF16}) {
      EXPECT_EQ(replaced.Logits({.compute = compute}, 40),
                replaced.Logits({.compute = compute}, 1));
    }
    TestModel other = replaced;
    other.FillZeros("blocks.0.feed_forward.experts.3.constant");
    EXPECT_NE(other.Logits(), found);
  }
}

// Identity matrices around the experts must change nothing.
TEST(LatentExperts, IdentityMatricesChangeNothing) {
  Json with = Routed(kGated, R"({"num_experts": 4, "widths": [5, 9, 3, 12], "latent_width": 8,
                                 "split": {"heads": 2}, "null_experts": {"copy": 1},
                                 "select": {"kind": "top_k", "k": 2}})");
  Json without = with;
  without["routing"].erase("latent_width");
  TestModel latent(Config(with));
  const TestModel plain(Config(without));
  EXPECT_NE(latent.Logits(), plain.Logits());
  latent.FillIdentity("blocks.0.feed_forward.latent_down.weight");
  latent.FillIdentity("blocks.0.feed_forward.latent_up.weight");
  EXPECT_EQ(latent.Logits(), plain.Logits());
}

// Each of the two projections can be left out; an identity has the same effect.
TEST(SplitProjections, MissingOnesAreIdentities) {
  for (const int heads : {1, 2}) {
    const auto with = [&](bool split, bool merge) {
      Json layer = Routed(kGated, R"({"num_experts": 4, "widths": 6,
                                      "select": {"kind": "top_k", "k": 2}})");
      layer["routing"]["split"] = {
          {"heads", heads}, {"projection", split}, {"merge_projection", merge}};
      return Config(layer);
    };
    TestModel both(with(true, true));
    const std::vector<float> random = both.Logits();
    TestModel no_merge = both;
    no_merge.FillIdentity("blocks.0.feed_forward.merge.weight");
    no_merge.FillZeros("blocks.0.feed_forward.merge.bias");
    EXPECT_EQ(TestModel(with(true, false)).Logits(), no_merge.Logits()) << heads;
    EXPECT_NE(random, no_merge.Logits()) << heads;
    TestModel no_split = both;
    no_split.FillIdentity("blocks.0.feed_forward.split.weight");
    no_split.FillZeros("blocks.0.feed_forward.split.bias");
    EXPECT_EQ(TestModel(with(false, true)).Logits(), no_split.Logits()) << heads;
    EXPECT_NE(random, no_split.Logits()) << heads;
  }
}

// relu(x + 100) - 100 in place of x, with 100 added and subtracted by biases: a second layer that
// is an identity changes the results by rounding alone. A missing or misplaced ReLU would not.
TEST(SplitProjections, ReluIsBetweenTheLayers) {
  const auto with = [](int depth) {
    Json layer = Routed(kGated, R"({"num_experts": 4, "widths": 6,
                                    "select": {"kind": "top_k", "k": 4}})");
    layer["routing"]["split"] = {{"heads", 2}, {"depth", depth}};
    return Config(layer);
  };
  const TestModel one(with(1));
  const std::string name = "blocks.0.feed_forward.";
  const auto two = [&](float shift) {
    TestModel model(with(2));
    for (const std::string part : {"split", "merge"}) {
      const std::vector<float> weight = one.Values(name + part + ".weight");
      const std::vector<float> bias = one.Values(name + part + ".bias");
      model.Fill(name + part + ".0.weight",
                 [&](int64_t r, int64_t c) { return weight[r * kHidden + c]; });
      model.Fill(name + part + ".0.bias", [&](int64_t, int64_t c) { return bias[c] + shift; });
      model.FillIdentity(name + part + ".1.weight");
      model.Fill(name + part + ".1.bias", [&](int64_t, int64_t) { return -shift; });
    }
    return model.Logits();
  };
  const std::vector<float> expected = one.Logits();
  const auto largest_difference = [&](const std::vector<float>& logits) {
    float largest = 0.0f;
    for (size_t i = 0; i < expected.size(); ++i) {
      largest = std::max(largest, std::abs(logits[i] - expected[i]));
    }
    return largest;
  };
  EXPECT_LT(largest_difference(two(100.0f)), 1e-3f);
  EXPECT_GT(largest_difference(two(0.0f)), 1e-2f) << "negative elements became 0";
}

constexpr const char* kDeepRouting =
    R"({"num_experts": 4, "widths": [5, 9, 3, 12], "select": {"kind": "top_k", "k": 2}})";

// A sub-layer whose network returns zeros changes nothing, in routed, shared and dense networks.
TEST(DeepExperts, SublayersOfZerosChangeNothing) {
  for (const char* norm : {"rms", "layer"}) {
    const auto with = [norm](int depth) {
      Json expert = Json::parse(kGated);
      expert.update({{"sublayer", "residual"}, {"depth", depth}});
      Json routed = Routed(expert.dump().c_str(), kDeepRouting);
      routed["shared_width"] = 7;
      const Json dense = {{"kind", "dense"}, {"expert", expert}, {"width", 11}};
      Json config = Config(Json::array({routed, dense}));
      config["norm"] = {{"kind", norm}};
      return config;
    };
    const TestModel two(with(2));
    TestModel three(with(3));
    EXPECT_NE(three.Logits(), two.Logits());
    std::vector<std::string> networks = {"blocks.1.feed_forward.", "blocks.0.feed_forward.shared."};
    for (int e = 0; e < 4; ++e) {
      networks.push_back("blocks.0.feed_forward.experts." + std::to_string(e) + ".");
    }
    for (const std::string& network : networks) three.FillZeros(network + "layers.2.down.weight");
    EXPECT_EQ(three.Logits(), two.Logits()) << norm;
  }
}

// With many rows per expert, the CPU computes both products of a sub-layer at once. The results
// must have the bits of single rows, whose products are separate.
TEST(DeepExperts, FusedProductsHaveTheSameBits) {
  Json expert = Json::parse(kGated);
  expert.update({{"sublayer", "residual"}, {"depth", 3}});
  const int experts = 16, width = 24;
  const TestModel model(
      Config(Routed(expert.dump().c_str(),
                    R"({"num_experts": 16, "widths": 24, "select": {"kind": "top_k", "k": 4}})")));
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const RunnerOptions options{.compute = compute, .threads = 1};
    if (options.device == "cpu") {
      auto backend = CreateBackend({.device = "cpu", .threads = 1});
      ASSERT_TRUE(backend.ok()) << backend.status();
      const std::vector<int> widths(experts, width);
      auto up = (*backend)->NewLinearBank({{kHidden}, widths, true, false, compute});
      auto down = (*backend)->NewLinearBank(
          {widths, std::vector<int>(experts, kHidden), false, false, compute});
      ASSERT_TRUE(up.ok() && down.ok());
      const auto fuses = [&](int64_t rows) {
        return (*backend)->FusesFeedForward({.up = up->get(),
                                             .down = down->get(),
                                             .input = {.dtype = compute},
                                             .output = {.rows = rows}});
      };
      EXPECT_TRUE(fuses(40 * 4));
      EXPECT_FALSE(fuses(4));
    }
    EXPECT_EQ(model.Logits(options, 40), model.Logits(options, 1)) << Name(compute);
  }
}

// A block's own settings have the effect of the model's, and a block beside one that adds nothing
// is one after it.
TEST(ResidualForms, AreThoseOfTheModel) {
  const Json layer =
      Routed(kGated,
             R"({"num_experts": 4, "widths": [5, 9, 3, 12], "select": {"kind": "top_k", "k": 2}})");
  for (const char* placement : {"pre", "post", "output", "both"}) {
    Json of_model = Config(Json::array({layer, layer}));
    of_model["norm"] = {{"kind", "layer"}, {"placement", placement}, {"final", true}};
    of_model["residual_scale"] = 0.625;
    Json own = of_model;
    own["norm"]["placement"] = std::string_view(placement) == "pre" ? "output" : "pre";
    own.erase("residual_scale");
    for (const char* key : {"attention", "feed_forward"}) {
      if (own[key].is_object()) own[key] = Json::array({own[key], own[key]});
      for (Json& block : own[key]) {
        block.update({{"norm_placement", placement}, {"residual_scale", 0.625}});
      }
    }
    for (const DType compute : {DType::kF32, DType::kBF16}) {
      const RunnerOptions options{.compute = compute};
      const std::vector<float> logits = TestModel(of_model).Logits(options);
      EXPECT_EQ(TestModel(own).Logits(options), logits) << placement;
      if (std::string_view(placement) == "post") continue;
      Json beside = own;
      beside["feed_forward"][1]["parallel"] = true;
      EXPECT_NE(TestModel(beside).Logits(options), logits) << placement;
      TestModel sequential(own), parallel(beside);
      for (TestModel* model : {&sequential, &parallel}) {
        model->FillZeros("blocks.1.attention.o.weight");
        if (NormsOutput(NormPlacementOf(model->spec(), model->spec().blocks[2]))) {
          model->FillZeros("blocks.1.attention.output_norm.bias");
        }
      }
      EXPECT_EQ(parallel.Logits(options), sequential.Logits(options)) << placement;
    }
  }
}

// With zeros in the norm of one branch's output, only the other branch and its norms matter.
TEST(ResidualForms, BranchesBesideTheExpertsHaveNormsOfTheirOwn) {
  Json layer =
      Routed(kGated, R"({"num_experts": 4, "widths": 12, "select": {"kind": "top_k", "k": 2}})");
  layer.update({{"shared_width", 12}, {"shared_norms", true}});
  const std::string name = "blocks.0.feed_forward.";
  TestModel model{Config(layer)};
  const std::vector<float> both = model.Logits();
  model.FillZeros(name + "experts_norm.weight");
  const std::vector<float> shared = model.Logits();
  EXPECT_NE(shared, both);
  // The experts and the norm that they read do not matter now.
  model.FillZeros(name + "norm.weight");
  EXPECT_EQ(model.Logits(), shared);
  // The shared expert's norm is its own.
  model.FillZeros(name + "shared_norm.weight");
  const std::vector<float> none = model.Logits();
  EXPECT_NE(none, shared);
  model.FillZeros(name + "shared_output_norm.weight");
  EXPECT_EQ(model.Logits(), none) << "a network of zeros has the norm of zeros";
}

// Two layers of attention that read the same rows. The second one has no keys and values of its own
// if `shares` holds.
Json TwoAttentions(bool shares, const Json& more) {
  Json first = {{"kind", "dense"}, {"num_heads", 4},    {"num_kv_heads", 2},
                {"head_dim", 8},   {"qk_norm", "head"}, {"window", 7}};
  first.update(more);
  Json second = first;
  second.update({{"parallel", true}, {"gate", true}});
  if (shares) second["kv_layer"] = 0;
  Json config = Config(Json::object());
  config["num_hidden_layers"] = 2;
  config["attention"] = {first, second};
  config["feed_forward"] = {{{"kind", "none"}}, Json::parse(R"({"kind": "dense", "width": 20,
      "expert": {"form": "gated", "activation": "silu"}})")};
  return config;
}

// A layer that reads the keys and values of another one must compute what it would with keys and
// values that are equal.
TEST(KeysOfAnotherLayer, EqualKeysOfItsOwn) {
  for (const char* more : {"{}", R"({"bias": true, "qk_norm": "full", "qkv_clip": 0.5})",
                           R"({"qk_norm_after_rope": true, "qk_norm": "heads"})",
                           R"({"qk_norm": "l2", "position": {"kind": "rope", "fraction": 0.5}})"}) {
    SCOPED_TRACE(more);
    const Json settings = Json::parse(more);
    const TestModel shared(TwoAttentions(true, settings));
    TestModel own(TwoAttentions(false, settings));
    const auto copy = [&](const std::string& name, const std::vector<float>& values) {
      own.Fill(name, [&, columns = ColumnsOf(own.spec(), name)](int64_t r, int64_t c) {
        return values[static_cast<size_t>(r * columns + c)];
      });
    };
    for (const TensorRequirement& tensor : RequiredTensors(shared.spec())) {
      copy(tensor.name, shared.Values(tensor.name));
    }
    // Both blocks read the same norm of the stream.
    TestModel same = shared;
    const std::string first = "blocks.0.attention.", second = "blocks.1.attention.";
    const std::vector<float> norm = shared.Values(first + "norm.weight");
    same.Fill(second + "norm.weight", [&](int64_t, int64_t c) { return norm[c]; });
    for (const TensorRequirement& tensor : RequiredTensors(own.spec())) {
      for (const char* part : {"norm.", "k.", "v.", "k_norm."}) {
        if (!tensor.name.starts_with(second + part)) continue;
        copy(tensor.name, own.Values(first + tensor.name.substr(second.size())));
      }
    }
    for (const DType compute : {DType::kF32, DType::kBF16}) {
      const std::vector<float> expected = own.Logits({.compute = compute});
      EXPECT_EQ(same.Logits({.compute = compute}), expected);
      EXPECT_EQ(same.Logits({.compute = compute}, 40), expected);
      EXPECT_EQ(same.Logits({.compute = compute}, 1), expected);
    }
  }
}

// Inputs that add zeros must change nothing, and others must.
TEST(LayerInputs, ZerosChangeNothing) {
  const Json plain = TwoAttentions(true, Json::object());
  Json config = plain;
  config["attention"][1].erase("parallel");
  Json with = config;
  with["layer_input"] = {{"width", 5}, {"activation", "gelu_tanh"}, {"scale", 0.5}};
  TestModel inputs(with);
  const std::vector<float> others = inputs.Logits();
  EXPECT_EQ(inputs.Logits({}, 40), others);
  EXPECT_EQ(inputs.Logits({}, 1), others);
  inputs.FillZeros("blocks.0.input.down.weight");
  EXPECT_NE(inputs.Logits(), others);
  inputs.FillZeros("blocks.1.input.down.weight");
  TestModel without(config);
  for (const TensorRequirement& tensor : RequiredTensors(without.spec())) {
    const std::vector<float> values = inputs.Values(tensor.name);
    without.Fill(tensor.name, [&](int64_t r, int64_t c) {
      return values[static_cast<size_t>(r * tensor.shape.back() + c)];
    });
  }
  EXPECT_EQ(inputs.Logits(), without.Logits());
}

}  // namespace
}  // namespace moeserve::testing
