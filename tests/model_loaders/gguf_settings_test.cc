// The settings of the architectures of GGUF files: what follows from keys, from tensors, or from
// the architecture alone; layouts that the goldens do not have; and files that must be refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "base/check.h"
#include "engine/spec/weights.h"
#include "model_loaders/architectures/native/write_config.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/model_loaders/gguf_bytes.h"
#include "tests/model_loaders/support.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;

fs::path GoldenFile(const std::string& name) {
  return SourcePath("tests/golden/gguf/models/" + name + ".gguf");
}

GgufParts PartsOfModel(const std::string& name) { return PartsOf(ReadFile(GoldenFile(name))); }

Result<Checkpoint> Load(const GgufParts& parts) {
  TempFolder folder;
  WriteFile(folder.path() / "a.gguf", GgufBytes(parts));
  return LoadCheckpoint(folder.path() / "a.gguf", {.require_tokenizer = false});
}

// Returns the settings of a valid file.
ModelSpec SpecOf(const GgufParts& parts) {
  const Result<Checkpoint> checkpoint = Load(parts);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  MOESERVE_CHECK(checkpoint.ok(), "a valid file");
  return checkpoint->spec;
}

// Returns the logits of a text.
std::vector<float> SettingsLogits(const GgufParts& parts) {
  TempFolder folder;
  WriteFile(folder.path() / "a.gguf", GgufBytes(parts));
  auto runner = ModelRunner::Load(folder.path() / "a.gguf");
  EXPECT_TRUE(runner.ok()) << runner.status();
  if (!runner.ok()) return {};
  return (*runner)->Run({3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26}, 12);
}

// ---- settings

TEST(GgufSettings, OfDeepSeek) {
  const ModelSpec spec = SpecOf(PartsOfModel("deepseek-v3-bf16"));
  ASSERT_EQ(spec.num_layers(), 3);
  const AttentionSpec& attention = spec.attention(0);
  ASSERT_TRUE(attention.latent.has_value());
  EXPECT_EQ(attention.num_heads, 4);
  EXPECT_EQ(attention.num_kv_heads, 4);
  EXPECT_EQ(attention.head_dim, 20);
  EXPECT_EQ(attention.latent->query_rank, 24);
  EXPECT_EQ(attention.latent->rank, 20);
  EXPECT_EQ(attention.latent->rope_dim, 8);
  EXPECT_EQ(attention.latent->value_dim, 10);
  const double magnitude = 0.09 * std::log(4.0) + 1.0;
  EXPECT_DOUBLE_EQ(attention.scale, magnitude * magnitude / std::sqrt(20.0));
  EXPECT_EQ(spec.position.pairing, RopePairing::kInterleaved);
  EXPECT_EQ(spec.position.scaling.kind, RopeScalingKind::kYarn);
  EXPECT_EQ(spec.position.scaling.magnitude, 1.0);
  EXPECT_FALSE(spec.feed_forward(0).routed());
  ASSERT_TRUE(spec.feed_forward(1).routed());
  const RoutedLayerSpec& routing = *spec.feed_forward(1).routing;
  EXPECT_EQ(routing.gate, GateKind::kSigmoid);
  EXPECT_TRUE(routing.select.bias);
  EXPECT_EQ(routing.select.groups, 4);
  EXPECT_EQ(routing.select.best_groups, 2);
  EXPECT_EQ(routing.select.group_score, GroupScoreKind::kSumOfTwo);
  EXPECT_EQ(spec.feed_forward(1).shared_width, 16);
}

// Early files have no key for the gate, which is softmax then, and none for groups.
TEST(GgufSettings, OfDeepSeekWithoutKeys) {
  GgufParts parts = PartsOfModel("deepseek-v2-groups-legacy-bf16");
  for (const char* key : {"expert_gating_func", "expert_group_count", "expert_group_used_count",
                          "expert_weights_norm"}) {
    parts.Remove(std::string("deepseek2.") + key);
  }
  const RoutedLayerSpec routing = *SpecOf(parts).feed_forward(1).routing;
  EXPECT_EQ(routing.gate, GateKind::kSoftmax);
  EXPECT_EQ(routing.select.groups, 1);
  EXPECT_FALSE(routing.select.bias);
  EXPECT_FALSE(routing.renormalize);
  EXPECT_EQ(routing.scale, 1.5);
}

// A multiplier of 0 means that the model has neither of DeepSeek's two scales.
TEST(GgufSettings, OfDeepSeekWithoutScales) {
  GgufParts parts = PartsOfModel("deepseek-v3-bf16");
  parts.Set(GgufF32("deepseek2.rope.scaling.yarn_log_multiplier", 0.0f));
  const ModelSpec spec = SpecOf(parts);
  EXPECT_DOUBLE_EQ(spec.position.scaling.magnitude, 0.1 * std::log(4.0) + 1.0);
  EXPECT_DOUBLE_EQ(spec.attention(0).scale, 1.0 / std::sqrt(20.0));
}

TEST(GgufSettings, OfGptOss) {
  const ModelSpec spec = SpecOf(PartsOfModel("gpt-oss-bf16"));
  EXPECT_EQ(spec.attention(0).window, 6);
  EXPECT_EQ(spec.attention(1).window, std::nullopt);
  EXPECT_TRUE(spec.attention(1).sinks);
  const FeedForwardSpec& block = spec.feed_forward(1);
  EXPECT_EQ(block.expert.activation_limit, 7.0f);
  EXPECT_EQ(block.expert.activation_slope, 1.702f);
  EXPECT_EQ(block.expert.up_offset, 1.0f);
  EXPECT_TRUE(block.expert.bias);
  EXPECT_TRUE(block.routing->score.bias);
  EXPECT_EQ(block.routing->gate, GateKind::kSoftmaxSelected);
  EXPECT_FALSE(spec.position.scaling.truncate);
  EXPECT_EQ(spec.position.scaling.beta_fast, 4.0);
  EXPECT_DOUBLE_EQ(spec.position.scaling.magnitude, 0.1 * std::log(4.0) + 1.0);
}

// Files of early converters lack these keys.
TEST(GgufSettings, OfGemma2WithoutKeys) {
  GgufParts parts = PartsOfModel("gemma2-bf16");
  for (const char* key :
       {"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}) {
    parts.Remove(std::string("gemma2.") + key);
  }
  const ModelSpec spec = SpecOf(parts);
  EXPECT_EQ(spec.attention(0).window, 4096);
  EXPECT_EQ(spec.attention(1).window, std::nullopt);
  EXPECT_EQ(spec.attention(1).soft_cap, 50.0);
  EXPECT_EQ(spec.logit_soft_cap, 30.0);
  EXPECT_DOUBLE_EQ(spec.embedding_scale, std::sqrt(32.0));
}

// The largest model, which its number of layers tells, has another scale.
TEST(GgufSettings, OfGemma2WithManyLayers) {
  GgufParts parts = PartsOfModel("gemma2-bf16");
  EXPECT_DOUBLE_EQ(SpecOf(parts).attention(0).scale, 1.0 / std::sqrt(12.0));
  const std::vector<GgufTensorBytes> tensors = parts.tensors;
  for (int layer = 2; layer < 46; ++layer) {
    for (GgufTensorBytes tensor : tensors) {
      if (!tensor.name.starts_with("blk.1.")) continue;
      tensor.name.replace(4, 1, std::to_string(layer));
      parts.tensors.push_back(tensor);
    }
  }
  parts.Set(GgufU32("gemma2.block_count", 46));
  EXPECT_DOUBLE_EQ(SpecOf(parts).attention(0).scale, 1.0 / std::sqrt(32.0 / 4.0));
}

TEST(GgufSettings, OfGemma3) {
  GgufParts parts = PartsOfModel("gemma3-old-keys-bf16");
  ModelSpec spec = SpecOf(parts);
  ASSERT_EQ(spec.num_layers(), 6);
  for (int i = 0; i < 6; ++i) {
    const AttentionSpec& attention = spec.attention(i);
    EXPECT_EQ(attention.window.has_value(), i != 5);
    EXPECT_EQ(PositionOf(spec, attention).theta, i == 5 ? 1000.0 : 300.0);
    EXPECT_EQ(PositionOf(spec, attention).scaling.factor, i == 5 ? 4.0 : 1.0);
  }
  EXPECT_EQ(spec.logit_soft_cap, 0.0);
  // Without a key, layers with windows have this theta.
  parts.Remove("gemma3.rope.freq_base_swa");
  parts.Set(GgufU32("gemma3.attention.sliding_window_pattern", 2));
  spec = SpecOf(parts);
  EXPECT_EQ(spec.attention(1).window, std::nullopt);
  EXPECT_EQ(PositionOf(spec, spec.attention(2)).theta, 10000.0);
}

TEST(GgufSettings, OfGranite) {
  const ModelSpec spec = SpecOf(PartsOfModel("granitemoeshared-bf16"));
  // The numbers before they were rounded to f32.
  EXPECT_EQ(spec.attention(0).scale, 0.2);
  EXPECT_EQ(spec.residual_scale, 0.4);
  EXPECT_EQ(spec.embedding_scale, 3.0);
  EXPECT_EQ(spec.logit_scale, 0.5);
}

// Norms of queries and keys, and the choice bias, follow from the tensors.
TEST(GgufSettings, OfGlmWithoutNormsAndBias) {
  GgufParts parts = PartsOfModel("glm4-moe-groups-bf16");
  EXPECT_EQ(SpecOf(parts).attention(1).qk_norm, QkNorm::kHead);
  EXPECT_TRUE(SpecOf(parts).feed_forward(1).routing->select.bias);
  std::erase_if(parts.tensors, [](const GgufTensorBytes& tensor) {
    return tensor.name.find("attn_q_norm") != std::string::npos ||
           tensor.name.find("attn_k_norm") != std::string::npos ||
           tensor.name.find("exp_probs_b") != std::string::npos;
  });
  parts.Remove("glm4moe.expert_gating_func");
  const ModelSpec spec = SpecOf(parts);
  EXPECT_EQ(spec.attention(1).qk_norm, QkNorm::kNone);
  EXPECT_FALSE(spec.feed_forward(1).routing->select.bias);
  EXPECT_EQ(spec.feed_forward(1).routing->gate, GateKind::kSigmoid);
}

// ---- layouts

// Layers that predict further tokens are counted, and not needed.
TEST(GgufLayouts, NextTokenLayersAreIgnored) {
  GgufParts parts = PartsOfModel("glm4-moe-groups-bf16");
  const std::vector<float> expected = SettingsLogits(parts);
  parts.Set(GgufU32("glm4moe.block_count", 3));
  parts.Set(GgufU32("glm4moe.nextn_predict_layers", 1));
  const std::vector<GgufTensorBytes> tensors = parts.tensors;
  for (GgufTensorBytes tensor : tensors) {
    if (!tensor.name.starts_with("blk.1.")) continue;
    tensor.name[4] = '2';
    parts.tensors.push_back(tensor);
  }
  parts.tensors.push_back({"blk.2.nextn.hnorm.weight", {32}, 0, std::string(128, '\0')});
  EXPECT_EQ(SpecOf(parts).num_layers(), 2);
  EXPECT_EQ(SettingsLogits(parts), expected);
  // `inspect` lists them.
  const auto checkpoint = Load(parts);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const std::string listed = "tensors that the model does not need: blk.*.nextn.hnorm.weight";
  const std::vector<std::string>& notes = checkpoint->notes;
  EXPECT_NE(std::find(notes.begin(), notes.end(), listed), notes.end());
}

TEST(GgufKeys, AreReadWithoutIgnoredOnes) {
  GgufParts parts = PartsOfModel("glm4-moe-groups-bf16");
  const std::string plain = NativeConfigJson(SpecOf(parts)).dump();
  parts.Set(GgufU32("glm4moe.odd_key", 3));
  parts.Set(GgufF32("glm4moe.attention.clamp_kqv", 3.0f));
  TempFolder folder;
  WriteFile(folder.path() / "a.gguf", GgufBytes(parts));
  LoadOptions options{.require_tokenizer = false};
  const auto load = [&] { return LoadCheckpoint(folder.path() / "a.gguf", options); };
  EXPECT_TRUE(Mentions(load().status(), {"--ignore-config glm4moe.odd_key", "clamp_kqv"}));
  options.ignored_keys = {"glm4moe.odd_key", "glm4moe.attention.clamp_kqv"};
  const auto checkpoint = load();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(NativeConfigJson(checkpoint->spec).dump(), plain);
  EXPECT_NE(checkpoint->notes.back().find("glm4moe.odd_key"), std::string::npos);
}

// Some files have the key and value projections of latent attention in both forms.
TEST(GgufLayouts, OneFormOfLatentProjectionsSuffices) {
  GgufParts parts = PartsOfModel("deepseek-v3-bf16");
  const std::vector<float> expected = SettingsLogits(parts);
  for (const std::string layer : {"0", "1", "2"}) {
    parts.tensors.push_back(
        {"blk." + layer + ".attn_kv_b.weight", {88, 20}, 30, std::string(88 * 20 * 2, 'x')});
  }
  EXPECT_EQ(SettingsLogits(parts), expected);
}

// ---- refusals

std::string GgufBytesOf(uint64_t number, int count) {
  std::string bytes;
  for (int i = 0; i < count; ++i) bytes.push_back(static_cast<char>(number >> (8 * i)));
  return bytes;
}

// Any number of a file can be any number: it is accepted with all tensors, or refused.
TEST(GgufHostile, AnyNumberMayBeWrong) {
  constexpr uint32_t kU32 = 4, kF32 = 6;
  TempFolder folder;
  const fs::path path = folder.path() / "a.gguf";
  int refused = 0;
  for (const char* name :
       {"bailing-groups-bf16", "deepseek-v3-bf16", "deepseek-v32-bf16", "ernie4-5-moe-bf16",
        "exaone-moe-bf16", "gemma3-old-keys-bf16", "gpt-oss-bf16", "granitemoehybrid-mamba-bf16",
        "hy-v3-bf16", "kimi-linear-bf16", "lfm2-moe-bf16", "nemotron-h-bf16",
        "phi3-longrope-long-bf16", "qwen3-5-moe-bf16", "qwen3-next-bf16"}) {
    const GgufParts good = PartsOfModel(name);
    for (const GgufKey& key : good.keys) {
      if (key.type != kU32 && key.type != kF32) continue;
      // As floats 0, a subnormal number, two of NaN, infinity and -1.
      for (const uint64_t number : {0u, 7u, 0x7FFFFFFFu, 0xFFFFFFFFu, 0x7F800000u, 0xBF800000u}) {
        SCOPED_TRACE(name + (": " + key.name) + " " + std::to_string(number));
        GgufParts parts = good;
        parts.Set({key.name, key.type, GgufBytesOf(number, 4)});
        WriteFile(path, GgufBytes(parts));
        const auto checkpoint = LoadCheckpoint(path, {.require_tokenizer = false});
        if (checkpoint.ok()) {
          EXPECT_TRUE(Validate(checkpoint->spec).ok());
          for (const TensorRequirement& tensor : RequiredTensors(checkpoint->spec)) {
            ASSERT_TRUE(checkpoint->weights->Get(tensor.name, tensor.shape).ok()) << tensor.name;
          }
        } else {
          ++refused;
          EXPECT_TRUE(Mentions(checkpoint.status(), {"a.gguf: ", "expected", "found"}));
        }
      }
    }
  }
  EXPECT_GT(refused, 200);
}

struct SettingRefusal {
  std::string name;
  std::string file;
  std::function<void(GgufParts&)> change;
  std::vector<std::string> mentions;
};
void PrintTo(const SettingRefusal& r, std::ostream* out) { *out << r.name; }

class GgufRefusal : public ::testing::TestWithParam<SettingRefusal> {};

TEST_P(GgufRefusal, NamesWhatIsWrong) {
  GgufParts parts = PartsOfModel(GetParam().file);
  GetParam().change(parts);
  std::vector<std::string> mentions = GetParam().mentions;
  mentions.push_back("a.gguf: ");
  EXPECT_TRUE(Mentions(Load(parts).status(), mentions));
}

constexpr const char* kDeepSeek = "deepseek-v3-bf16";
constexpr const char* kGptOss = "gpt-oss-bf16";

SettingRefusal SettingKey(std::string name, std::string file, GgufKey key,
                          std::vector<std::string> mentions) {
  return {std::move(name), std::move(file), [key](GgufParts& p) { p.Set(key); },
          std::move(mentions)};
}

SettingRefusal NoKey(std::string name, std::string file, const std::string& key) {
  return {std::move(name),
          std::move(file),
          [key](GgufParts& p) { p.Remove(key); },
          {"metadata: " + key + ": expected", "found no such key"}};
}

SettingRefusal NoTensor(std::string name, std::string file, const std::string& tensor,
                        const std::string& mention) {
  return {std::move(name),
          std::move(file),
          [tensor](GgufParts& p) {
            std::erase_if(p.tensors, [&](const GgufTensorBytes& t) { return t.name == tensor; });
          },
          {tensor, mention}};
}

INSTANTIATE_TEST_SUITE_P(
    DeepSeek, GgufRefusal,
    ::testing::Values(
        NoKey("NoRank", kDeepSeek, "deepseek2.attention.kv_lora_rank"),
        SettingKey(
            "Heads", kDeepSeek, GgufU32("deepseek2.attention.head_count", 30000),
            {"deepseek2.attention.head_count: expected at most 65536 heads in all layers, found "
             "30000 in each of 3"}),
        NoKey("NoRotated", kDeepSeek, "deepseek2.rope.dimension_count"),
        NoKey("NoValueLength", kDeepSeek, "deepseek2.attention.value_length_mla"),
        NoKey("NoLogMultiplier", kDeepSeek, "deepseek2.rope.scaling.yarn_log_multiplier"),
        SettingKey(
            "KeyLength", kDeepSeek, GgufU32("deepseek2.attention.key_length", 29),
            {"deepseek2.attention.key_length: expected 28, found 29 (u32), which this server"}),
        SettingKey("ValueLength", kDeepSeek, GgufU32("deepseek2.attention.value_length", 19),
                   {"deepseek2.attention.value_length: expected 20, found 19 (u32)"}),
        SettingKey("KvHeads", kDeepSeek, GgufU32("deepseek2.attention.head_count_kv", 4),
                   {"deepseek2.attention.head_count_kv: expected 1, found 4 (u32)"}),
        SettingKey("HeadValues", kDeepSeek, GgufU32("deepseek2.attention.value_length_mla", 11),
                   {"tensor \"blk.0.attn_v_b.weight\": expected shape [4, 11, 20] (metadata: "
                    "[deepseek2.attention.head_count, deepseek2.attention.value_length_mla, "
                    "deepseek2.attention.kv_lora_rank]), found [4, 10, 20]"}),
        SettingKey("HeadKeys", kDeepSeek, GgufU32("deepseek2.attention.key_length_mla", 21),
                   {"tensor \"blk.0.attn_k_b.weight\": expected shape [4, 20, 13] (metadata: "
                    "[deepseek2.attention.head_count, deepseek2.attention.kv_lora_rank, "
                    "deepseek2.attention.key_length_mla - deepseek2.rope.dimension_count]), "
                    "found [4, 20, 12]"}),
        SettingKey("RankZero", kDeepSeek, GgufU32("deepseek2.attention.kv_lora_rank", 0),
                   {"deepseek2.attention.key_length: expected 8, found 28"}),
        SettingKey("RotatedMore", kDeepSeek, GgufU32("deepseek2.rope.dimension_count", 20),
                   {"deepseek2.attention.key_length: expected 40, found 28"}),
        SettingKey("LegacyValues", "deepseek-v2-groups-legacy-bf16",
                   GgufU32("deepseek2.attention.value_length", 9),
                   {"tensor \"blk.0.attn_kv_b.weight\": expected shape [84, 20] (metadata: "
                    "[deepseek2.attention.head_count * (deepseek2.attention.key_length - "
                    "deepseek2.rope.dimension_count + deepseek2.attention.value_length), "
                    "deepseek2.attention.kv_lora_rank]), found [88, 20]"}),
        SettingKey("DenseLayers", kDeepSeek, GgufU32("deepseek2.leading_dense_block_count", 4),
                   {"deepseek2.leading_dense_block_count: expected an integer in [0, 3]",
                    "found 4"}),
        SettingKey("NoDenseLayers", kDeepSeek, GgufU32("deepseek2.leading_dense_block_count", 0),
                   {"tensor \"blk.0.ffn_gate_inp.weight\" is missing"}),
        SettingKey("Groups", kDeepSeek, GgufU32("deepseek2.expert_group_count", 3),
                   {"deepseek2.expert_group_count: expected a divisor of 8, found 3"}),
        SettingKey("BestGroups", kDeepSeek, GgufU32("deepseek2.expert_group_used_count", 5),
                   {"deepseek2.expert_group_used_count: expected an integer in [1, 4], found 5"}),
        NoKey("NoBestGroups", kDeepSeek, "deepseek2.expert_group_used_count"),
        SettingKey("Gate", kDeepSeek, GgufU32("deepseek2.expert_gating_func", 3),
                   {"deepseek2.expert_gating_func: expected 1 (softmax) or 2 (sigmoid), found 3"}),
        SettingKey("Shared", kDeepSeek, GgufU32("deepseek2.expert_shared_count", 0x7FFFFFFF),
                   {"deepseek2.expert_shared_count: expected a number of experts with at most",
                    "found 2147483647 of width 16"}),
        SettingKey(
            "Step", kDeepSeek, GgufU32("deepseek2.interleave_moe_layer_step", 0),
            {"deepseek2.interleave_moe_layer_step: expected an integer of at least 1, found 0"}),
        SettingKey("NextToken", kDeepSeek, GgufU32("deepseek2.nextn_predict_layers", 3),
                   {"deepseek2.nextn_predict_layers: expected an integer in [0, 2]", "found 3"}),
        SettingKey("YarnFactor", kDeepSeek,
                   GgufF32("deepseek2.rope.scaling.yarn_attn_factor", 2.0f),
                   {"deepseek2.rope.scaling.yarn_attn_factor: expected 1, found 2"}),
        SettingKey("Temperature", kDeepSeek, GgufF32("deepseek2.attention.temperature_scale", 0.1f),
                   {"deepseek2.attention.temperature_length: expected a number above 0",
                    "found no such key"}),
        NoTensor("NoValues", kDeepSeek, "blk.1.attn_v_b.weight", "is missing"),
        NoTensor("NoChoiceBias", kDeepSeek, "blk.2.exp_probs_b.bias", "is missing"),
        SettingRefusal{"OneChoiceBias",
                       kDeepSeek,
                       [](GgufParts& p) {
                         p.Tensor("blk.1.exp_probs_b.bias").name = "blk.0.exp_probs_b.bias";
                       },
                       {"tensor \"blk.2.exp_probs_b.bias\": expected no such tensor"}}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Others, GgufRefusal,
    ::testing::Values(
        NoKey("GptOssWindow", kGptOss, "gpt-oss.attention.sliding_window"),
        SettingKey(
            "GptOssPeriod", kGptOss,
            {"gpt-oss.attention.sliding_window_pattern", 5, "\xff\xff\xff\xff"},
            {"gpt-oss.attention.sliding_window_pattern: expected an integer of at least 0, found "
             "-1"}),
        SettingKey("GptOssGate", kGptOss, GgufU32("gpt-oss.expert_gating_func", 2),
                   {"gpt-oss.expert_gating_func: expected 1, found 2 (u32)"}),
        NoTensor("GptOssSinks", kGptOss, "blk.1.attn_sinks.weight", "is missing"),
        NoTensor("GptOssRouterBias", kGptOss, "blk.0.ffn_gate_inp.bias", "is missing"),
        NoTensor("GptOssExpertBias", kGptOss, "blk.0.ffn_up_exps.bias",
                 "is missing: expected shape [6, 16]"),
        NoTensor("GptOssNorm", kGptOss, "blk.1.post_attention_norm.weight", "is missing"),
        SettingRefusal{"GptOssSinksShape",
                       kGptOss,
                       [](GgufParts& p) {
                         p.Tensor("blk.0.attn_sinks.weight").shape = {2, 2};
                       },
                       {"tensor \"blk.0.attn_sinks.weight\": expected shape [4]", "found [2, 2]"}},
        NoKey("Gemma3Window", "gemma3-old-keys-bf16", "gemma3.attention.sliding_window"),
        SettingKey("Gemma3Theta", "gemma3-old-keys-bf16",
                   GgufF32("gemma3.rope.freq_base_swa", -1.0f),
                   {"metadata: gemma3.rope.freq_base_swa: expected", "found -1"}),
        NoTensor("Gemma2OutputNorm", "gemma2-bf16", "blk.1.post_ffw_norm.weight", "is missing"),
        SettingKey("Gemma2Cap", "gemma2-bf16", GgufF32("gemma2.attn_logit_softcapping", -1.0f),
                   {"metadata: gemma2.attn_logit_softcapping: expected", "found -1"}),
        NoTensor("Phi3Factors", "phi3-longrope-long-bf16", "rope_factors_short.weight",
                 "expected F32 [4], found no such tensor"),
        SettingKey(
            "Phi3Type", "phi3-longrope-long-bf16", GgufText("phi3.rope.scaling.type", "yarn"),
            {"phi3.rope.scaling.type: expected \"longrope\" with a tensor", "found \"yarn\""}),
        NoKey("Phi3Length", "phi3-longrope-long-bf16", "phi3.rope.scaling.original_context_length"),
        SettingKey(
            "GlmNextToken", "glm4-moe-groups-bf16", GgufU32("glm4moe.nextn_predict_layers", 2),
            {"glm4moe.nextn_predict_layers: expected an integer in [0, 1] (glm4moe.block_count is "
             "2), found 2"}),
        SettingKey("GranitePositions", "granitemoeshared-bf16",
                   GgufU32("granitemoe.rope.scaling.finetuned", 0),
                   {"granitemoe.rope.scaling.finetuned: expected a bool, found 0 (u32)"}),
        SettingKey("ErnieShared", "ernie4-5-moe-bf16",
                   GgufU32("ernie4_5-moe.expert_shared_feed_forward_length", 16),
                   {"tensor \"blk.1.ffn_gate_shexp.weight\": expected shape [16, 32]",
                    "found [32, 32]"})),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace moeserve::testing
