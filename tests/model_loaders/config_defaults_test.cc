// Keys that a config.json leaves out have the defaults of the family's configuration class.
// tests/reference/families/make_config_defaults.py wrote what the classes make of them.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/native/write_config.h"
#include "model_loaders/architectures/registry.h"
#include "model_loaders/files/mapped_file.h"
#include "nlohmann/json.hpp"
#include "tests/support/golden.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

using Json = nlohmann::json;

// A configuration as text, or the error of its reader.
struct ReadDefaults {
  std::string spec = {};
  std::string error = {};
};

ReadDefaults ReadJson(const Json& config) {
  const auto read = ReadConfig(config.dump(), {});
  if (!read.ok()) return {.error = std::string(read.status().message())};
  return {.spec = NativeConfigJson((*read)->spec).dump()};
}

// Returns whether an error of reading `without`, which lacks `key`, says so: it names the key, the
// object that it was in or the other name of the key; or the file with the default is wrong, too.
bool Explained(const ReadDefaults& without, const ReadDefaults& with_default,
               const std::string& key) {
  const std::string object = key.substr(0, key.find('.'));
  const auto named = [&](const std::string& name) {
    return without.error.find(name) != std::string::npos;
  };
  constexpr std::pair<const char*, const char*> kOtherNames[] = {
      {"num_local_experts", "num_experts"},
      {"num_local_experts", "n_routed_experts"},
      {"num_experts", "n_routed_experts"},
      {"moe_num_experts", "n_routed_experts"},
      {"moe_top_k", "num_experts_per_tok"},
      {"num_experts_per_token", "num_experts_per_tok"},
      {"num_attention_groups", "num_key_value_heads"}};
  const auto renamed = [&](const auto& names) {
    return object == names.first && named(names.second);
  };
  return named(object) || std::ranges::any_of(kOtherNames, renamed) ||
         without.error == with_default.error;
}

// Returns the parent of the key "KEY.NAME.NAME" and the last of its names.
std::pair<Json*, std::string> FindDefault(Json& config, std::string path) {
  Json* at = &config;
  for (size_t dot; (dot = path.find('.')) != std::string::npos;) {
    at = &(*at)[path.substr(0, dot)];
    path = path.substr(dot + 1);
  }
  return {at, path};
}

// Returns all keys, those of objects of rotary parameters as "KEY.NAME".
std::vector<std::string> Keys(const Json& object, const std::string& prefix = "") {
  std::vector<std::string> keys;
  for (const auto& [key, value] : object.items()) {
    keys.push_back(prefix + key);
    if (!value.is_object() || (prefix.empty() && !key.starts_with("rope_"))) continue;
    for (std::string& inner : Keys(value, prefix + key + ".")) keys.push_back(std::move(inner));
  }
  return keys;
}

Json Patched(Json config, const Json& patch) {
  for (const auto& [key, value] : patch.items()) {
    // A default id outside of the small vocabulary stands for none.
    const bool outside = (key == "bos_token_id" || key == "eos_token_id") && value.is_number() &&
                         value > config["vocab_size"];
    config[key] = outside ? Json() : value;
  }
  if (patch.contains("intermediate_size")) config.erase("block_ff_dim");  // An older name.
  // Files with the older keys of rotary positions get the newer ones.
  if (patch.contains("rope_parameters")) {
    for (const char* key : {"rope_scaling", "rope_theta", "rope_local_base_freq"}) {
      config.erase(key);
    }
  }
  return config;
}

class ConfigDefaultsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto text = ReadTextFile(SourcePath("tests/golden/config_defaults.json"), 4 << 20);
    ASSERT_TRUE(text.ok()) << text.status();
    cases_ = Json::parse(*text);
  }

  static Json Config(const std::string& name) {
    const auto text =
        ReadTextFile(SourcePath("tests/golden/families/" + name + "/config.json"), 1 << 20);
    const Json config = text.ok() ? Json::parse(*text) : Json();
    // Of a wrapper, the keys of its decoder are compared.
    return config.contains("text_config") ? config["text_config"] : config;
  }

  Json cases_;
};

// Without a key, the configuration is the one with the class's default, or the key is required.
TEST_F(ConfigDefaultsTest, AKeyLeftOutHasTheDefaultOfTheClass) {
  std::set<std::string> seen;
  int compared = 0;
  for (const auto& [name, known] : cases_.items()) {
    const Json config = Config(name);
    const std::set<std::string> refused(known["refused"].begin(), known["refused"].end());
    for (const std::string& key : Keys(config)) {
      if (key == "model_type" || key == "quantization_config" || refused.contains(key)) continue;
      const std::string what = name + " without " + key;
      Json without = config;
      const auto [parent, last] = FindDefault(without, key);
      parent->erase(last);
      const ReadDefaults found = ReadJson(without);
      const Json patch = known["without"].value(key, Json::object());
      // If other keys get defaults, the key is another name of one of them.
      const bool other_name = !patch.empty() && !patch.contains(key.substr(0, key.find('.')));
      const ReadDefaults expected = ReadJson(Patched(other_name ? without : config, patch));
      if (!found.error.empty()) {
        EXPECT_TRUE(Explained(found, expected, key)) << what << ": " << found.error;
        continue;
      }
      // The default may contradict other keys.
      if (expected.error.find(' ' + key + ": expected ") != std::string::npos) continue;
      EXPECT_EQ(found.spec, expected.spec) << what << expected.error;
      ++compared;
      seen.insert(config["model_type"].get<std::string>());
    }
  }
  EXPECT_GE(seen.size(), 31u);
  EXPECT_GE(compared, 2000);
}

TEST_F(ConfigDefaultsTest, NullIsWhatTheClassMakesOfIt) {
  int compared = 0;
  for (const auto& [name, known] : cases_.items()) {
    const Json config = Config(name);
    for (const auto& [key, patch] : known["null"].items()) {
      Json with_null = config;
      const auto [parent, last] = FindDefault(with_null, key);
      (*parent)[last] = nullptr;
      const ReadDefaults found = ReadJson(with_null);
      const ReadDefaults expected = ReadJson(Patched(config, patch));
      if (!found.error.empty()) {
        EXPECT_TRUE(Explained(found, expected, key)) << name << ", " << key << ": " << found.error;
        continue;
      }
      EXPECT_EQ(found.spec, expected.spec) << name << ", " << key << ": null" << expected.error;
      ++compared;
    }
  }
  EXPECT_GE(compared, 90);
}

// Keys that files of these families have although they say nothing about the model.
TEST(NeutralKeys, AreIgnored) {
  const Json harmless = Json::parse(R"({
      "_attn_implementation_autoset": true, "_anything": {"x": 1}, "is_llama_config": true,
      "rope_interleaved": false, "transformers.js_config": {"dtype": "q4"},
      "loss_type": "ForCausalLM", "model_max_length": 4096, "max_sequence_length": 2048,
      "layer_types": ["full_attention", "full_attention"], "num_labels": 2,
      "neftune_noise_alpha": 5, "tokenizer_padding_side": "right", "gradient_checkpointing": false,
      "classifier_dropout": 0.1, "unsloth_version": "2025.3.1", "use_mrope": false,
      "seq_length": 8192, "position_embedding_type": "rope", "attention_bias": false,
      "use_sliding_window": false, "max_window_layers": 3, "is_causal": true,
      "summary_type": "cls_index", "logit_scale": 1})");
  for (const char* name : {"llama", "mixtral", "olmo2", "phi3", "granite", "qwen3-moe"}) {
    const Json config = Json::parse(
        ReadFile(SourcePath(std::string("tests/golden/families/") + name) / "config.json"));
    const ReadDefaults plain = ReadJson(config);
    ASSERT_EQ(plain.error, "") << name;
    for (const auto& [key, value] : harmless.items()) {
      if (config.contains(key)) continue;
      Json with = config;
      with[key] = value;
      const ReadDefaults read = ReadJson(with);
      EXPECT_EQ(read.error, "") << name;
      EXPECT_EQ(read.spec, plain.spec) << name << ' ' << key;
    }
  }
}

TEST(NeutralKeys, OtherValuesAreRefusedWithTheOptionToIgnoreThem) {
  const Json harmful = Json::parse(R"({
      "rope_interleaved": true, "layer_types": ["full_attention", "sliding_attention"],
      "use_mrope": true, "position_embedding_type": "alibi", "logit_scale": 0.5,
      "is_causal": false, "clip_qkv": 8.0, "rotary_emb_base": 5000, "an_unknown_option": 1})");
  const Json config = Json::parse(ReadFile(SourcePath("tests/golden/families/llama/config.json")));
  for (const auto& [key, value] : harmful.items()) {
    Json with = config;
    with[key] = value;
    const std::string error = ReadJson(with).error;
    EXPECT_NE(error.find("config.json: " + key), std::string::npos) << error;
    EXPECT_NE(error.find("--ignore-config " + key), std::string::npos) << error;
    EXPECT_TRUE(ReadConfig(with.dump(), {}, Architectures(), {key}).ok()) << key;
  }
}

TEST(NeutralKeys, LimitsOfQueriesKeysAndValuesAreRead) {
  Json config = Json::parse(ReadFile(SourcePath("tests/golden/families/olmoe-clip/config.json")));
  EXPECT_NE(ReadJson(config).spec.find("\"qkv_clip\":0.6"), std::string::npos);
  for (const Json& value : {Json(0), Json(-1.0), Json("8")}) {
    config["clip_qkv"] = value;
    EXPECT_NE(ReadJson(config).error.find("clip_qkv: expected "), std::string::npos) << value;
  }
  config["clip_qkv"] = nullptr;
  EXPECT_EQ(ReadJson(config).spec.find("qkv_clip"), std::string::npos);
}

}  // namespace
}  // namespace moeserve::testing
