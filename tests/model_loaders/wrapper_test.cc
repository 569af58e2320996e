// Folders of models whose decoder has its keys in "text_config": how the parts of the configuration
// and of the files belong together, and what is refused.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "base/error_text.h"
#include "model_loaders/architectures/huggingface/wrappers.h"
#include "model_loaders/checkpoint/loader.h"
#include "nlohmann/json.hpp"
#include "tests/model_loaders/patched_folder.h"
#include "tests/model_loaders/support.h"
#include "tests/support/family_cases.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

const LoadOptions kNoTokenizer = {.require_tokenizer = false};

fs::path Family(const std::string& name) { return SourcePath("tests/golden/families/" + name); }

// A copy of a golden model.
class Copy {
 public:
  explicit Copy(const std::string& name, const std::string& patch = "{}") {
    CopyPatched(Family(name), patch, folder_.path());
  }
  const fs::path& path() const { return folder_.path(); }
  Result<Checkpoint> Load(const std::vector<std::string>& ignored = {}) const {
    LoadOptions options = kNoTokenizer;
    options.ignored_keys = ignored;
    return LoadCheckpoint(path(), options);
  }
  Json config() const { return Json::parse(ReadFile(path() / "config.json")); }
  void SetConfig(const Json& config) const { WriteFile(path() / "config.json", config.dump()); }
  void Rename(const std::string& from, const std::string& to) const {
    RenameTensors(path(), [&](const std::string& name) {
      return name.starts_with(from) ? to + name.substr(from.size()) : name;
    });
  }
  void Remove(const std::string& beginning) const {
    RenameTensors(path(), [&](const std::string& name) {
      return name.starts_with(beginning) ? std::string() : name;
    });
  }
  std::vector<float> Logits() const {
    auto runner = ModelRunner::Load(path());
    EXPECT_TRUE(runner.ok()) << runner.status();
    return runner.ok() ? (*runner)->Run({5, 17, 3, 80, 44}, 5) : std::vector<float>();
  }

 private:
  TempFolder folder_;
};

// The golden models that are wrappers.
std::vector<std::string> WrapperCases() {
  std::vector<std::string> names;
  for (const FamilyCase& c : FamilyCases()) {
    if (!fs::exists(c.folder / "model.safetensors")) continue;
    if (Json::parse(ReadFile(c.folder / "config.json")).contains("text_config")) {
      names.push_back(c.name);
    }
  }
  return names;
}

std::string AllNotes(const Checkpoint& checkpoint) {
  std::string notes;
  for (const std::string& note : checkpoint.notes) notes += note + '\n';
  return notes;
}

// How the names of the decoder's tensors begin in a copy.
std::string PrefixOf(const Copy& copy) {
  std::string found;
  RenameTensors(copy.path(), [&](const std::string& name) {
    constexpr std::string_view kEmbedding = "embed_tokens.weight";
    if (name.ends_with(kEmbedding)) found = name.substr(0, name.size() - kEmbedding.size());
    return name;
  });
  return found;
}

TEST(Wrappers, NamesOfTheDecoderMayBeginInAnyOfTheKnownWays) {
  ASSERT_GE(WrapperCases().size(), 8u);
  for (const std::string& name : WrapperCases()) {
    SCOPED_TRACE(name);
    const std::vector<float> expected = Copy(name).Logits();
    for (const std::string prefix : {"model.language_model.", "language_model.model.", "model."}) {
      const Copy copy(name);
      const std::string own = PrefixOf(copy);
      ASSERT_FALSE(own.empty());
      // Names of other parts begin with "model." as well.
      RenameTensors(copy.path(), [&](const std::string& tensor) {
        const bool other = tensor.starts_with("model.vis") || tensor.starts_with("model.res");
        if (tensor.starts_with(own) && !other) return prefix + tensor.substr(own.size());
        return tensor;
      });
      EXPECT_EQ(copy.Logits(), expected) << prefix;
    }
  }
}

TEST(Wrappers, ADecoderAloneIsTheSameModel) {
  for (const std::string& name : WrapperCases()) {
    SCOPED_TRACE(name);
    const Copy copy(name);
    const std::vector<float> expected = copy.Logits();
    Json text = copy.config()["text_config"];
    text["tie_word_embeddings"] = copy.config()["tie_word_embeddings"];
    copy.SetConfig(text);
    // Other parts do not belong to it.
    EXPECT_TRUE(Mentions(copy.Load().status(), {"expected no such tensor"}));
    const std::string own = PrefixOf(copy);
    RenameTensors(copy.path(), [&](const std::string& tensor) {
      const bool head = tensor.ends_with("lm_head.weight");
      const bool other = tensor.starts_with("model.vis") || tensor.starts_with("model.res");
      return head || (tensor.starts_with(own) && !other) ? tensor : std::string();
    });
    EXPECT_EQ(copy.Logits(), expected);
  }
}

// Mistral 3 has a decoder of Mistral, which no golden wrapper has.
TEST(Wrappers, ADecoderOfMistralIsTheSameModelAsAlone) {
  for (const char* name : {"mistral", "mistral-window"}) {
    SCOPED_TRACE(name);
    const Copy copy(name);
    const std::vector<float> alone = copy.Logits();
    ASSERT_FALSE(alone.empty());
    Json text = copy.config();
    text.erase("architectures");
    copy.SetConfig({{"model_type", "mistral3"},
                    {"text_config", text},
                    {"vision_config", Json::object()},
                    {"spatial_merge_size", 2}});
    copy.Rename("model.", "language_model.model.");
    copy.Rename("lm_head.", "language_model.lm_head.");
    EXPECT_EQ(copy.Logits(), alone);
  }
}

TEST(Wrappers, OtherPartsAreCountedAndOthersThanThoseAreRefused) {
  const Copy copy("minimax-m3");
  const auto loaded = copy.Load();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const std::string notes = AllNotes(*loaded);
  EXPECT_NE(notes.find("the model is a minimax_m3_vl, of which the decoder of text "
                       "(minimax_m3_vl_text) is computed; not computed: vision_tower.* ("),
            std::string::npos)
      << notes;
  EXPECT_NE(notes.find("multi_modal_projector.* (4 tensors), patch_merge_mlp.* (4 tensors)"),
            std::string::npos)
      << notes;
  for (const std::string other : {"vision_model.", "audio_tower.", "mtp_", "model.visual.", "x."}) {
    const Copy renamed("minimax-m3");
    renamed.Rename("patch_merge_mlp.", other);
    EXPECT_TRUE(Mentions(renamed.Load().status(),
                         {"tensor \"" + other + "linear_1.bias\": expected no such tensor"}));
  }
  const Copy mtp("minimax-m3");
  mtp.Rename("patch_merge_mlp.", "mtp.");
  EXPECT_TRUE(mtp.Load().ok());
}

TEST(Wrappers, TheHeadIsWhatTheFilesSay) {
  // Untied at the top, tied in the text: the stored head counts.
  const std::string head = "language_model.lm_head.";
  const Copy tied("kimi-k25", R"({"tie_word_embeddings": true})");
  const auto loaded = tied.Load();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_FALSE(loaded->spec.tie_word_embeddings);
  EXPECT_EQ(tied.Logits(), Copy("kimi-k25").Logits());
  // Without a head, a flag that says false is contradicted; one that is absent is not.
  const Copy refused("kimi-k25");
  refused.Remove(head);
  EXPECT_TRUE(Mentions(refused.Load().status(), {"lm_head.weight\" is missing"}));
  const Copy top("kimi-k25", R"({"text_config": {"tie_word_embeddings": true}})");
  top.Remove(head);
  EXPECT_TRUE(Mentions(top.Load().status(), {"lm_head.weight\" is missing"}));
  const Copy inner(
      "kimi-k25",
      R"({"tie_word_embeddings": null, "text_config": {"tie_word_embeddings": false}})");
  inner.Remove(head);
  EXPECT_TRUE(Mentions(inner.Load().status(), {"lm_head.weight\" is missing"}));
  const Copy silent(
      "kimi-k25", R"({"tie_word_embeddings": null, "text_config": {"tie_word_embeddings": null}})");
  silent.Remove(head);
  const auto read = silent.Load();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(read->spec.tie_word_embeddings);
  // A head without an embedding is both.
  const Copy both("kimi-k25-tied");
  const std::vector<float> expected = both.Logits();
  both.Rename("language_model.model.embed_tokens.", head);
  EXPECT_EQ(both.Logits(), expected);
  const Copy neither("kimi-k25-tied");
  neither.Remove("language_model.model.embed_tokens.");
  EXPECT_TRUE(Mentions(neither.Load().status(), {"embed_tokens.weight\" is missing"}));
}

TEST(Wrappers, ADecoderWithoutAHeadOrAnEmbeddingUsesTheOther) {
  const Copy head("mixtral-tied-flag-own-head", "{}");
  const Copy silent("hy-v3", R"({"tie_word_embeddings": null})");
  silent.Remove("lm_head.");
  const auto read = silent.Load();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(read->spec.tie_word_embeddings);
  const Copy tied("hy-v3-two-shared-tied");
  const std::vector<float> expected = tied.Logits();
  tied.Rename("model.embed_tokens.", "lm_head.");
  EXPECT_EQ(tied.Logits(), expected);
}

TEST(Wrappers, EndsOfTheWholeFileAreFurtherOnes) {
  const auto ends = [](const std::string& patch) {
    const auto loaded = Copy("glm4v-moe", patch).Load();
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return loaded.ok() ? loaded->spec.eos_token_ids : std::vector<int32_t>();
  };
  EXPECT_EQ(ends(R"({"eos_token_id": [7, 2, 9]})"), (std::vector<int32_t>{2, 7, 9}));
  EXPECT_EQ(ends(R"({"eos_token_id": 8, "text_config": {"eos_token_id": null}})"),
            (std::vector<int32_t>{8}));
  EXPECT_EQ(ends(R"({"eos_token_id": null})"), (std::vector<int32_t>{2}));
  EXPECT_TRUE(Mentions(Copy("glm4v-moe", R"({"eos_token_id": 96})").Load().status(),
                       {"config.json: ", "eos_token_id"}));
  EXPECT_TRUE(Mentions(Copy("glm4v-moe", R"({"eos_token_id": "x"})").Load().status(),
                       {"config.json: eos_token_id"}));
}

TEST(Wrappers, ContradictionsNameTheirKey) {
  struct Refused {
    std::string name;
    std::string patch;
    std::vector<std::string> expect;
  };
  const std::string rope = R"({"text_config": {"rope_parameters": {"mrope_section": )";
  const std::vector<Refused> cases = {
      {"kimi-k25", R"({"text_config": null})", {"config.json: text_config: expected an object"}},
      {"kimi-k25", R"({"text_config": 3})", {"config.json: text_config: expected an object"}},
      {"kimi-k25",
       R"({"text_config": {"model_type": "llama"}})",
       {"text_config.model_type: expected \"deepseek_v3\" or \"kimi_k2\", found \"llama\""}},
      {"kimi-k25",
       R"({"text_config": {"hidden_size": "x", "vocab_size": null}})",
       {"text_config.hidden_size: expected an integer, found \"x\"",
        "text_config.vocab_size: expected an integer, found no such key"}},
      {"kimi-k25",
       R"({"text_config": {"a_new_option": 1}})",
       {"config.json: text_config.a_new_option: expected no such key",
        "--ignore-config text_config.a_new_option"}},
      {"kimi-k25",
       R"({"a_new_option": 1})",
       {"config.json: a_new_option: expected no such key", "--ignore-config a_new_option"}},
      {"kimi-k25",
       R"({"is_causal": false})",
       {"config.json: is_causal: expected true, found false"}},
      {"kimi-k25",
       R"({"tie_word_embeddings": "yes"})",
       {"config.json: tie_word_embeddings: expected true or false, found \"yes\""}},
      {"kimi-k25",
       R"({"quantization_config": {"quant_method": "compressed-tensors"}})",
       {"quantization_config.quant_method: expected \"fp8\", found \"compressed-tensors\""}},
      {"kimi-k25",
       R"({"quantization_config": {"quant_method": "fp8"},
           "text_config": {"quantization_config": {"quant_method": "mxfp4"}}})",
       {"quantization_config: expected the same as text_config.quantization_config, or none"}},
      {"kimi-k25",
       R"({"text_config": {"num_experts_per_tok": 9}})",
       {"config.json: ", "num_experts_per_tok", "[1, 8], found 9"}},
      {"kimi-k25",
       R"({"text_config": {"num_experts": 9}})",
       {"text_config.num_experts: expected 8, found 9"}},
      {"qwen3-vl-moe",
       rope + "[2, 2, 1]}}}",
       {"mrope_section: expected at most 4 pairs", "found 5"}},
      {"qwen3-vl-moe", rope + "[2, -1]}}}", {"mrope_section: expected a list of at most 8"}},
      {"qwen3-vl-moe", rope + "7}}}", {"mrope_section: expected a list of at most 8 integers"}},
      {"ernie4-5-vl-moe",
       R"({"text_config": {"moe_intermediate_size": [16, 8, 4]}})",
       {"text_config.moe_intermediate_size: expected an integer"}},
      {"ernie4-5-vl-moe",
       R"({"text_config": {"moe_num_experts": 3}})",
       {"expected shape [2, 3]", "found [2, 4]"}},
      {"minimax-m3",
       R"({"text_config": {"rotary_dim": 8}})",
       {"text_config.rotary_dim: expected partial_rotary_factor * head_dim, which is 6.0, found "
        "8"}},
      {"minimax-m3",
       R"({"text_config": {"layer_types": ["full_attention", "full_attention", "sliding"]}})",
       {"text_config.layer_types[2]: expected \"full_attention\" or \"minimax_m3_sparse\""}},
      {"minimax-m3",
       R"({"text_config": {"moe_layer_freq": [1, 1]}})",
       {"text_config.moe_layer_freq: expected a list of 3 numbers 0 or 1"}},
  };
  for (const Refused& c : cases) {
    SCOPED_TRACE(c.patch);
    EXPECT_TRUE(Mentions(Copy(c.name, c.patch).Load().status(), c.expect));
  }
  EXPECT_TRUE(Copy("kimi-k25", R"({"text_config": {"a_new_option": 1}})")
                  .Load({"text_config.a_new_option"})
                  .ok());
}

TEST(Wrappers, ImageTokensOutsideTheVocabularyAreIgnored) {
  const Copy copy("qwen3-vl-moe", R"({"image_token_id": 1000000, "a_new_token_id": -1})");
  EXPECT_TRUE(copy.Load().ok());
}

TEST(Wrappers, ExpertsOfImagesAreIgnoredAsFarAsThereAreAny) {
  const std::string experts = "model.layers.1.mlp.experts.";
  const Copy more("ernie4-5-vl-moe");
  more.Rename(experts + "7.", experts + "8.");
  EXPECT_TRUE(Mentions(more.Load().status(), {experts + "8.", "expected no such tensor"}));
  const Copy list("ernie4-5-vl-moe", R"({"text_config": {"moe_num_experts": [4, 5]}})");
  list.Rename(experts + "7.", experts + "8.");
  EXPECT_TRUE(list.Load().ok());
}

// The name says nothing; a stack of experts is transposed or not by its shape.
TEST(Wrappers, StacksAreTransposedIfTheirShapeSaysSo) {
  const Copy square("qwen3-vl-moe-tied-dense-first");
  const auto loaded = square.Load();
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Copy wrong("qwen3-vl-moe", R"({"text_config": {"moe_intermediate_size": 13}})");
  EXPECT_TRUE(Mentions(wrong.Load().status(), {"experts.gate_up_proj", "expected shape [6, 26, 32]",
                                               "found [6, 24, 32]"}));
}

// Sparse attention is served as dense up to the length at which both are equal.
TEST(SparseAttention, LimitsTheContext) {
  struct Limited {
    std::string name, patch;
    int tokens;
    std::string reason;
  };
  const std::string topk = "sparse attention beyond index_topk is not computed";
  const std::string blocks =
      "sparse attention beyond index_topk_blocks * index_block_size is not computed";
  const std::vector<Limited> cases = {
      {"deepseek-v32", "{}", 128, topk},
      {"deepseek-v32", R"({"index_topk": 511})", 511, topk},
      {"deepseek-v32", R"({"index_topk": 512})", 512, ""},
      {"deepseek-v32", R"({"index_topk": null, "max_position_embeddings": 9999})", 2048, topk},
      {"glm-moe-dsa", "{}", 128, topk},
      {"minimax-m3", "{}", 96, blocks},
      {"minimax-m3", R"({"text_config": {"layer_types": null}})", 512, ""},
      {"minimax-m3",
       R"({"text_config": {"layer_types": null, "index_topk_blocks": null, "index_block_size": null,
           "sparse_attention_config": {"sparse_topk_blocks": 3, "sparse_block_size": 32,
                                       "sparse_attention_freq": [0, 1, 1],
                                       "sparse_init_block": 0}}})",
       96, blocks},
      {"minimax-m3-dense-attention-tied", "{}", 512, ""},
  };
  for (const Limited& c : cases) {
    SCOPED_TRACE(c.name + c.patch);
    const auto loaded = Copy(c.name, c.patch).Load();
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->spec.max_position_embeddings, c.tokens);
    EXPECT_EQ(loaded->context_reason, c.reason);
    const std::string expected =
        Concat("texts have at most ", c.tokens,
               " tokens, fewer than max_position_embeddings says: ", c.reason);
    const bool said = std::ranges::any_of(loaded->warnings, [&](const std::string& warning) {
      return warning.find(expected) != std::string::npos;
    });
    EXPECT_EQ(said, !c.reason.empty());
  }
}

TEST(SparseAttention, ContradictionsNameTheirKey) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {R"({"index_topk": 0})", {"config.json: index_topk: expected an integer above 0, found 0"}},
      {R"({"q_lora_rank": 0})", {"config.json: q_lora_rank: expected an integer above 0"}},
      {R"({"indexer_types": ["full", "half", "full"]})",
       {"indexer_types[1]: expected \"full\" or \"shared\", found \"half\""}},
      {R"({"indexer_types": ["full"]})", {"indexer_types: expected a list of 3 strings"}},
      {R"({"layer_types": ["full_attention", "indexed_attention", "indexed_attention"]})",
       {"layer_types[0]: expected \"indexed_attention\" or \"deepseek_sparse_attention\""}},
      {R"({"rope_interleave": false})", {"rope_interleave: expected true, found false"}},
      {R"({"mlp_bias": true})", {"mlp_bias: expected false, found true"}}};
  for (const auto& [patch, expect] : cases) {
    SCOPED_TRACE(patch);
    EXPECT_TRUE(Mentions(Copy("glm-moe-dsa", patch).Load().status(), expect));
  }
  const Copy more("glm-moe-dsa");
  more.Rename("model.layers.0.self_attn.indexer.wk.", "model.layers.0.self_attn.indexer.wk2.");
  EXPECT_TRUE(Mentions(more.Load().status(), {"indexer.wk2.weight\": expected no such tensor"}));
}

}  // namespace
}  // namespace moeserve::testing
