// Inputs of layers and shared keys and values in Gemma 4 (E2B, E4B): what is refused, and what does
// not change the answers.

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "engine/run/engine_options.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/model_loaders/patched_folder.h"
#include "tests/model_loaders/support.h"
#include "tests/support/golden.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

// Five layers: sliding, full, sliding, and two that share keys: sliding, full.
constexpr const char* kInputs = "tests/golden/families/gemma4-inputs";

Result<Checkpoint> LoadGemma4(const std::string& patch) {
  TempFolder folder;
  CopyPatched(SourcePath(kInputs), patch, folder.path());
  return LoadCheckpoint(folder.path(), {.require_tokenizer = false});
}

TEST(Gemma4, ContradictionsAreRefused) {
  const std::vector<std::pair<const char*, std::vector<std::string>>> cases = {
      {R"({"num_kv_shared_layers": 5})",
       {"config.json: num_kv_shared_layers: expected an integer in [0, 4], found 5"}},
      {R"({"num_kv_shared_layers": -1})",
       {"config.json: num_kv_shared_layers: expected an integer in [0, 4], found -1"}},
      // Layer 0 slides, and layer 1 sees all positions.
      {R"({"num_kv_shared_layers": 4})",
       {"config.json: num_kv_shared_layers: expected a layer of the type of layer 1 before them"}},
      {R"({"num_kv_shared_layers": 1})", {"model.layers.3.self_attn.k_proj.weight"}},
      {R"({"vocab_size_per_layer_input": 95})",
       {"config.json: vocab_size_per_layer_input: expected 96 (vocab_size), found 95"}},
      {R"({"hidden_size_per_layer_input": -6})",
       {"config.json: hidden_size_per_layer_input: expected an integer in [1, 1048576], found -6"}},
      {R"({"hidden_size_per_layer_input": 0})",
       {"model.embed_tokens_per_layer.weight", "hidden_size_per_layer_input is none"}},
      {R"({"hidden_size_per_layer_input": 7})",
       {"model.embed_tokens_per_layer.weight", "expected shape [96, 35]", "found [96, 30]"}},
      {R"({"use_double_wide_mlp": false})",
       {"model.layers.3.mlp.gate_proj.weight", "expected shape [24, 32]", "found [48, 32]"}},
  };
  for (const auto& [patch, expected] : cases) {
    SCOPED_TRACE(patch);
    const absl::Status status = LoadGemma4(patch).status();
    EXPECT_TRUE(Mentions(status, expected)) << status;
  }
}

// Only layers with keys of their own have a part of the cache, in the table of their windows.
TEST(Gemma4, SharedKeysTakeNoCache) {
  const auto checkpoint = LoadGemma4("{}");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const ModelSpec& spec = checkpoint->spec;
  ASSERT_EQ(CacheShapes(spec).size(), 3u);
  std::vector<int> layers;
  for (int b = 0; b < spec.num_blocks(); ++b) {
    if (spec.blocks[static_cast<size_t>(b)].attention() != nullptr) {
      layers.push_back(CacheLayer(spec, b));
    }
  }
  EXPECT_EQ(layers, (std::vector<int>{0, 1, 2, 2, 1}));
  EngineOptions options;
  options.max_model_len = 512;
  const std::vector<KvLayerShape> shapes = CacheLayers(options, spec);
  ASSERT_EQ(shapes.size(), 3u);
  EXPECT_EQ(shapes[0].table, 1);
  EXPECT_EQ(shapes[1].table, 0);
  EXPECT_EQ(shapes[2].table, 1);
  const std::vector<PageUse> uses = PageUseOf(options, spec, false);
  ASSERT_EQ(uses.size(), 2u);
  EXPECT_FALSE(uses[0].window.has_value());
  EXPECT_EQ(uses[1].window, 6);
}

}  // namespace
}  // namespace moeserve::testing
