// Pruned models of Hugging Face families, whose experts are vectors in part: what is refused.

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/inspect.h"
#include "tests/model_loaders/patched_folder.h"
#include "tests/model_loaders/support.h"
#include "tests/support/family_cases.h"
#include "tests/support/golden.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

constexpr const char* kByIds = "mixtral-replaced";  // {"0": [1, 4], "1": [0]} of five experts
constexpr const char* kByNames = "qwen3-moe-replaced-named";  // [0, 2, 5] of six, in layer 1

absl::Status LoadPatched(const std::string& name, const std::string& patch,
                         const std::function<std::string(const std::string&)>& rename = {}) {
  TempFolder folder;
  CopyPatched(SourcePath("tests/golden/families/" + name), patch, folder.path());
  if (rename) RenameTensors(folder.path(), rename);
  return LoadCheckpoint(folder.path(), {.require_tokenizer = false}).status();
}

TEST(ReplacedExperts, IdsThatDoNotFitTheModel) {
  const std::string key = "config.json: approximate_experts";
  const std::vector<std::pair<const char*, std::string>> cases = {
      {R"({"0": [1, 5], "1": [0]})", ".0: expected ids in [0, 4], found 5"},
      {R"({"0": [1, -4], "1": [0]})", ".0: expected different ids of at least 0, found -4"},
      {R"({"0": [4, 4], "1": [0]})", ".0: expected different ids of at least 0, found 4"},
      {R"({"0": [1, "4"], "1": [0]})", ".0: expected a list of at most 65536 integers"},
      {R"({"0": [0, 1, 2, 3, 4], "1": [0]})", ".0: expected at most 4 experts, so that one stays"},
      {R"({"0": [1, 4], "2": [0]})", ".2: expected a layer with experts, found layer 2"},
      {R"({"0": [1, 4], "01": [0]})", ".01: expected the number of a layer as key"},
      {R"({"0": [1, 4], "first": [0]})", ".first: expected the number of a layer as key"},
      {R"([[1, 4]])", " does not have 0"},
      {R"([[1, 4], [0, 2]])", " has 2"},
      {R"({"0": [1], "1": [0]})", " does not have 4"},
      {R"(7)", ": expected an object"},
  };
  for (const auto& [value, expected] : cases) {
    SCOPED_TRACE(value);
    const auto status = LoadPatched(kByIds, Concat(R"({"approximate_experts": )", value, "}"));
    const size_t at = expected.starts_with(" ") ? key.find("approximate") : 0;
    EXPECT_TRUE(Mentions(status, {key.substr(at) + expected})) << status;
  }
  EXPECT_TRUE(LoadPatched(kByIds, R"({"approximate_experts": [[4, 1], [0]]})").ok());
}

TEST(ReplacedExperts, TensorsThatAreMissingOrSuperfluous) {
  const std::string vector = "model.layers.0.block_sparse_moe.experts.4.approx_value";
  auto status = LoadPatched(
      kByIds, "{}", [&](const std::string& name) { return name == vector ? std::string() : name; });
  EXPECT_TRUE(Mentions(status, {vector, "missing"})) << status;
  // Vectors of experts that have matrices, and matrices of an expert that has a vector.
  status = LoadPatched(kByIds, "{}", [&](const std::string& name) {
    return name == "model.norm.weight" ? vector.substr(0, vector.find("4.")) + "2.approx_value"
                                       : name;
  });
  EXPECT_TRUE(Mentions(status, {"experts.2.approx_value", "approximate_experts does not have 2"}))
      << status;
  status = LoadPatched(kByIds, R"({"approximate_experts": {"1": null}})");
  EXPECT_TRUE(Mentions(status, {"layers.1.block_sparse_moe.experts.0.w1.weight"})) << status;
  status = LoadPatched(kByNames, "{}", [&](const std::string& name) {
    return name.ends_with("expert_replacements.2.value") ? name + "s" : name;
  });
  EXPECT_TRUE(Mentions(status, {"model.layers.1.mlp.expert_replacements.2.value"})) << status;
}

// Patches are merged into the file's object.
std::string Substitution(const std::string& patch) {
  return Concat(R"({"compression_config": {"transform_config": {"expert_substitution": )", patch,
                "}}}");
}

TEST(ReplacedExperts, SubstitutionsOfOtherKinds) {
  const std::string at = "config.json: compression_config.transform_config.expert_substitution.";
  const std::string target = R"({"targets": {"model.layers.1.mlp.experts": )";
  const std::string experts = "targets.model.layers.1.mlp.experts";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"version": 2})", "version: expected 1, found 2"},
      {R"({"router_semantics": {"preserve_router_weights": false}})",
       "router_semantics.preserve_router_weights: expected true, found false"},
      {R"({"router_semantics": {"renormalize_after_substitution": true}})",
       "router_semantics.renormalize_after_substitution: expected false, found true"},
      {R"({"router_semantics": {"preserve_logical_expert_ids": null}})",
       "router_semantics.preserve_logical_expert_ids"},
      {R"({"router_semantics": {"order": 1}})", "router_semantics.order"},
      {target + R"({"weight_layout": "stacked"}}})",
       experts + R"(.weight_layout: expected "compact_retained_experts", found "stacked")"},
      {target + R"({"num_logical_experts": 7}}})", experts + ": expected num_logical_experts 6"},
      {target + R"({"replacements": {"1": {"format": "linear-v1", "tensors": {"value": "x"}}}}}})",
       experts + R"(.replacements.1.format: expected "constant-v1", found "linear-v1")"},
      {target +
           R"({"replacements": {"6": {"format": "constant-v1", "tensors": {"value": "x"}}}}}})",
       experts + ": expected ids in [0, 5], found 6"},
      {target +
           R"({"replacements": {"a": {"format": "constant-v1", "tensors": {"value": "x"}}}}}})",
       experts + ".replacements.a: expected the id of an expert as key"},
      {target + R"({"replacements": {"2": {"tensors": {"value": 3}}}}}})",
       experts + ".replacements.2.tensors.value: expected the name of a tensor, found 3"},
      {R"({"targets": {"model.experts": {}}})", "targets.model.experts: expected the name of"},
      {R"({"targets": {"model.layers.0.mlp.experts": {"weight_layout": "compact_retained_experts",
        "replacements": {"2": {"format": "constant-v1", "tensors": {"value": "x"}}}}}})",
       "targets.model.layers.0.mlp.experts: expected a layer with experts, found layer 0"},
  };
  for (const auto& [patch, expected] : cases) {
    SCOPED_TRACE(patch);
    const auto status = LoadPatched(kByNames, Substitution(patch));
    EXPECT_TRUE(Mentions(status, {at + expected})) << status;
  }
}

TEST(ReplacedExperts, OtherTransformsAndBothKeysAreRefused) {
  auto status = LoadPatched(
      kByNames, R"({"compression_config": {"transform_config": {"config_groups": {}}}})");
  EXPECT_TRUE(Mentions(status, {"compression_config.transform_config.config_groups"})) << status;
  status = LoadPatched(kByNames, Substitution(R"({"targets": {"model.layers.1.mlp.experts": {
      "replacements": {"2": {"tensors": {"scale": "x"}}}}}})"));
  EXPECT_TRUE(Mentions(status, {"expected one of the keys value, found an unknown key"})) << status;
  status = LoadPatched(kByNames, R"({"approximate_experts": {"1": [0, 2, 5]}})");
  EXPECT_TRUE(Mentions(status, {"compression_config: expected none", "approximate_experts"}))
      << status;
}

// In a wrapper, the whole file has the key for the decoder.
TEST(ReplacedExperts, OfTheDecoderInAWrapper) {
  auto status =
      LoadPatched("gemma4-wrapped", R"({"compression_config": {"transform_config": {}}})");
  EXPECT_TRUE(Mentions(status, {"compression_config.transform_config.expert_substitution"}))
      << status;
  status = LoadPatched("gemma4-wrapped", R"({"text_config": {"approximate_experts": {"1": [7]}}})");
  EXPECT_TRUE(Mentions(status, {"approximate_experts.1: expected ids in [0, 5], found 7"}))
      << status;
}

// The ids stay those of the model before, and what is replaced costs nothing but its vector.
TEST(ReplacedExperts, HaveTheirIdsInReports) {
  const auto checkpoint = LoadCheckpoint(SourcePath(Concat("tests/golden/families/", kByNames)),
                                         {.require_tokenizer = false});
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const ModelSummary summary = Summarize(checkpoint->spec);
  ASSERT_EQ(summary.routed_blocks.size(), 1u);
  const int64_t matrices = 3 * 32 * 16;
  EXPECT_EQ(summary.routed_blocks[0].expert_parameters,
            (std::vector<int64_t>{32, matrices, 32, matrices, matrices, 32}));
}

}  // namespace
}  // namespace moeserve::testing
