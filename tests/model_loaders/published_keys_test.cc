// Keys that published files have and that transformers does not write: they are accepted with the
// values that say what is computed, and refused by name with others.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "model_loaders/checkpoint/loader.h"
#include "tests/model_loaders/patched_folder.h"
#include "tests/model_loaders/support.h"
#include "tests/support/golden.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

struct PublishedKeys {
  std::string family;   // folder of tests/golden/families
  std::string right;    // a patch (RFC 7396) of config.json with which it is read as without
  std::string wrong;    // one with which it is refused
  std::string message;  // a part of the error
};

TEST(PublishedKeys, AreReadOrRefusedByName) {
  const std::vector<PublishedKeys> cases = {
      {"qwen3-5-moe-wrapped-tied",
       R"({"language_model_only": false, "text_config": {"attn_output_gate": true,
           "mamba_ssm_dtype": "float32", "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
           "mtp_use_dedicated_embeddings": false, "output_gate_type": "swish"}})",
       R"({"text_config": {"attn_output_gate": false}})",
       "text_config.attn_output_gate: expected true, found false"},
      {"qwen3-5", R"({"attn_output_gate": true, "mlp_only_layers": []})",
       R"({"mlp_only_layers": [0]})", "mlp_only_layers: expected [], found [0]"},
      {"qwen3-next", R"({"mamba_ssm_dtype": "float32"})", R"({"mamba_ssm_dtype": "bfloat16"})",
       "mamba_ssm_dtype: expected \"float32\", found \"bfloat16\""},
      {"qwen3-5-moe", R"({"output_gate_type": "silu"})", R"({"output_gate_type": "sigmoid"})",
       "output_gate_type"},
      {"nemotron-h", R"({"layer_norm_epsilon": 1e-5, "norm_eps": 1e-5})",
       R"({"layer_norm_epsilon": 1e-5, "norm_eps": 1e-6})", "norm_eps: expected 1e-05"},
      {"minimax-m2", R"({"shared_moe_mode": "sigmoid"})", R"({"shared_intermediate_size": 8})",
       "shared_intermediate_size: expected 0, found 8"},
      {"llama4", R"({"attn_temperature_tuning": 4})", R"({"attn_temperature_tuning": "yes"})",
       "attn_temperature_tuning: expected true or false"},
      {"ernie4-5-moe", R"({"compression_ratio": 1.0})", R"({"compression_ratio": 2.0})",
       "compression_ratio: expected 1.0, found 2.0"},
  };
  for (const PublishedKeys& c : cases) {
    SCOPED_TRACE(c.family);
    const auto load = [&](const std::string& patch) {
      TempFolder folder;
      CopyPatched(SourcePath("tests/golden/families/" + c.family), patch, folder.path());
      return LoadCheckpoint(folder.path(), {.require_tokenizer = false});
    };
    const auto right = load(c.right);
    EXPECT_TRUE(right.ok()) << right.status();
    const auto wrong = load(c.wrong);
    EXPECT_TRUE(Mentions(wrong.status(), {c.message}));
  }
}

}  // namespace
}  // namespace moeserve::testing
