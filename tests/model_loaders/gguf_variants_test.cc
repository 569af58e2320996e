// GGUF files of models whose layers differ: layouts of other writers than the goldens', settings
// that the goldens do not have, and what is refused.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "model_loaders/checkpoint/loader.h"
#include "tests/model_loaders/gguf_bytes.h"
#include "tests/model_loaders/patched_folder.h"
#include "tests/model_loaders/support.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;

GgufParts VariantParts(const std::string& name) {
  return PartsOf(ReadFile(std::string(MOESERVE_GGUF_DIR) + "/variants/" + name + "-bf16.gguf"));
}

void RemoveTensors(GgufParts& parts, const std::string& name) {
  std::erase_if(parts.tensors, [&](const GgufTensorBytes& tensor) {
    return tensor.name.find(name) != std::string::npos;
  });
}

class GgufVariant : public ::testing::Test {
 protected:
  fs::path Write(const GgufParts& parts) {
    WriteFile(folder_.path() / "a.gguf", GgufBytes(parts));
    return folder_.path() / "a.gguf";
  }
  Result<Checkpoint> LoadParts(const GgufParts& parts) {
    return LoadCheckpoint(Write(parts), {.require_tokenizer = false});
  }
  std::vector<float> Logits(const fs::path& model) {
    auto runner = ModelRunner::Load(model, {.compute = DType::kF32});
    EXPECT_TRUE(runner.ok()) << runner.status();
    if (!runner.ok()) return {};
    return (*runner)->Run({5, 17, 3, 90, 41, 8, 8, 60, 33, 71, 12, 9}, 12);
  }
  std::vector<float> Logits(const GgufParts& parts) { return Logits(Write(parts)); }
  std::vector<float> FolderLogits(const std::string& family, const std::string& patch) {
    TempFolder patched;
    CopyPatched(SourcePath("tests/golden/families/" + family), patch, patched.path());
    return Logits(patched.path());
  }

 private:
  TempFolder folder_;
};

// The numbers that published models of Llama 4 have can be given by keys.
TEST_F(GgufVariant, ChunksAndScalesOfQueriesHaveKeys) {
  GgufParts parts = VariantParts("llama4");
  const auto usual = LoadParts(parts);
  ASSERT_TRUE(usual.ok()) << usual.status();
  const AttentionSpec& chunked = usual->spec.attention(2);
  EXPECT_EQ(chunked.window, 8192);
  EXPECT_EQ(chunked.window_kind, WindowKind::kChunk);
  EXPECT_FALSE(chunked.query_scale.has_value());
  ASSERT_TRUE(usual->spec.attention(3).query_scale.has_value());
  EXPECT_EQ(usual->spec.attention(3).query_scale->step, 8192.0);
  EXPECT_EQ(usual->spec.attention(3).query_scale->first, 1);
  parts.Set(GgufU32("llama4.attention.sliding_window", 7));
  parts.Set(GgufF32("llama4.attention.temperature_scale", 0.4f));
  parts.Set(GgufU32("llama4.attention.temperature_length", 5));
  EXPECT_EQ(Logits(parts), FolderLogits("llama4", "{}"));
  // A window of 0 means that all layers rotate and see all positions.
  GgufParts plain = VariantParts("llama4");
  plain.Set(GgufU32("llama4.attention.sliding_window", 0));
  EXPECT_EQ(Logits(plain), FolderLogits("llama4", R"({"attention_chunk_size":null,)"
                                                  R"("layer_types":["full_attention",)"
                                                  R"("full_attention","full_attention",)"
                                                  R"("full_attention"],)"
                                                  R"("no_rope_layers":[1,1,1,1]})"));
}

// Llama 4 Maverick, which has 128 experts, does not normalise queries and keys.
TEST_F(GgufVariant, TheNumberOfExpertsDecidesAboutNorms) {
  GgufParts parts = VariantParts("llama4");
  const auto few = LoadParts(parts);
  ASSERT_TRUE(few.ok()) << few.status();
  EXPECT_EQ(few->spec.attention(0).qk_norm, QkNorm::kL2);
  EXPECT_TRUE(few->spec.attention(0).qk_norm_after_rope);
  EXPECT_EQ(few->spec.attention(3).qk_norm, QkNorm::kNone);
  parts.Set(GgufU32("llama4.expert_count", 128));
  for (GgufTensorBytes& tensor : parts.tensors) {
    const bool experts = tensor.name.find("_exps.") != std::string::npos ||
                         tensor.name.find("ffn_gate_inp.") != std::string::npos;
    if (!experts) continue;
    tensor.shape[0] *= 32;
    std::string data;
    for (int i = 0; i < 32; ++i) data += tensor.data;
    tensor.data = data;
  }
  const auto many = LoadParts(parts);
  ASSERT_TRUE(many.ok()) << many.status();
  EXPECT_EQ(many->spec.attention(0).qk_norm, QkNorm::kNone);
}

TEST_F(GgufVariant, Mistral4HasTheScaleOfItsAuthorsWithoutKeys) {
  GgufParts parts = VariantParts("mistral4");
  parts.Remove("mistral4.attention.temperature_scale");
  parts.Remove("mistral4.attention.temperature_length");
  EXPECT_EQ(Logits(parts),
            FolderLogits("mistral4", R"({"rope_parameters":{"llama_4_scaling_beta":0.1}})"));
  parts.Remove("mistral4.rope.scaling.type");
  parts.Remove("mistral4.rope.scaling.factor");
  EXPECT_TRUE(Mentions(
      LoadParts(parts).status(),
      {"mistral4.attention.temperature_length: expected a number above 0", "found no such key"}));
}

// Mistral Large 3 has the architecture of DeepSeek-V3, but scales queries.
TEST_F(GgufVariant, DeepSeekWithScaledQueries) {
  GgufParts parts =
      PartsOf(ReadFile(std::string(MOESERVE_GGUF_DIR) + "/models/deepseek-v3-bf16.gguf"));
  parts.Set(GgufF32("deepseek2.attention.temperature_scale", 0.1f));
  parts.Set(GgufU32("deepseek2.attention.temperature_length", 16));
  const auto checkpoint = LoadParts(parts);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const std::optional<QueryScaleSpec> scale = checkpoint->spec.attention(0).query_scale;
  ASSERT_TRUE(scale.has_value());
  EXPECT_EQ(scale->step, 16.0);
  EXPECT_EQ(scale->factor, 0.1);
  EXPECT_EQ(scale->first, 0);
}

TEST_F(GgufVariant, StepWithoutDivisors) {
  GgufParts parts = VariantParts("step3p5");
  RemoveTensors(parts, "rope_freqs");
  EXPECT_EQ(Logits(parts),
            FolderLogits("step3p5", R"({"rope_parameters":{"full_attention":{"factor":null,)"
                                    R"("high_freq_factor":null,"low_freq_factor":null,)"
                                    R"("original_max_position_embeddings":null,)"
                                    R"("rope_type":"default"}}})"));
}

// One tensor of gate and up projections, or two.
TEST_F(GgufVariant, GemmaWithSeparateProjections) {
  GgufParts parts = VariantParts("gemma4-moe");
  const std::vector<float> expected = Logits(parts);
  for (int layer = 0; layer < 3; ++layer) {
    const std::string block = "blk." + std::to_string(layer);
    GgufTensorBytes& joined = parts.Tensor(block + ".ffn_gate_up_exps.weight");
    GgufTensorBytes up = joined;
    up.name = block + ".ffn_up_exps.weight";
    joined.name = block + ".ffn_gate_exps.weight";
    up.shape[1] = joined.shape[1] = 12;
    const size_t half = joined.data.size() / 12;  // of one of 6 experts
    const std::string whole = joined.data;
    joined.data.clear();
    up.data.clear();
    for (size_t expert = 0; expert < 6; ++expert) {
      joined.data += whole.substr(2 * expert * half, half);
      up.data += whole.substr((2 * expert + 1) * half, half);
    }
    parts.tensors.push_back(up);
  }
  EXPECT_EQ(Logits(parts), expected);
}

TEST_F(GgufVariant, LayersThatPredictFurtherTokensAreIgnored) {
  GgufParts mimo = VariantParts("mimo-v2-flash");
  const std::vector<float> expected = Logits(mimo);
  mimo.Set(GgufU32("mimo2.block_count", 4));
  mimo.Set(GgufU32("mimo2.nextn_predict_layers", 1));
  mimo.Set(GgufInts("mimo2.attention.head_count_kv", {2, 4, 4, 4}));
  mimo.Set(GgufInts("mimo2.attention.sliding_window_pattern", {0, 1, 1, 1}));
  mimo.tensors.push_back({"blk.3.nextn.eh_proj.weight", {32}, 0, std::string(128, '\0')});
  EXPECT_EQ(Logits(mimo), expected);
  GgufParts step = VariantParts("step3p5");
  const std::vector<float> other = Logits(step);
  step.Set(GgufU32("step35.block_count", 5));
  step.Set(GgufU32("step35.nextn_predict_layers", 1));
  step.Set(GgufInts("step35.attention.head_count", {4, 6, 6, 4, 6}));
  step.Set(GgufInts("step35.attention.head_count_kv", {2, 2, 2, 2, 2}));
  step.Set(GgufInts("step35.attention.sliding_window_pattern", {0, 1, 1, 0, 1}));
  step.Set(GgufFloats("step35.swiglu_clamp_exp", {0.0f, 0.0f, 0.5f, 0.25f, 0.0f}));
  step.Set(GgufFloats("step35.swiglu_clamp_shexp", {0.5f, 0.0f, 0.25f, 0.0f, 0.0f}));
  step.tensors.push_back({"blk.4.nextn.eh_proj.weight", {32}, 0, std::string(128, '\0')});
  EXPECT_EQ(Logits(step), other);
}

TEST_F(GgufVariant, MimoWindowsHaveOnePositionMore) {
  const auto checkpoint = LoadParts(VariantParts("mimo-v2-flash"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->spec.attention(1).window, 6);  // the file has 5
  EXPECT_TRUE(checkpoint->spec.attention(1).sinks);
  EXPECT_FALSE(checkpoint->spec.attention(0).sinks);
  EXPECT_EQ(checkpoint->spec.attention(1).num_kv_heads, 4);
}

TEST_F(GgufVariant, HorizonMayRotateAPartOfHeads) {
  GgufParts parts = VariantParts("k2-horizon-mova");
  parts.Set(GgufU32("k2-horizon.rope.dimension_count", 8));
  EXPECT_EQ(Logits(parts), FolderLogits("k2-horizon-mova", R"({"rope_head_dim":8})"));
  // The weights of several experts have the sum 1, whatever the key says.
  parts.Set(GgufBool("k2-horizon.expert_weights_norm", 0));
  EXPECT_EQ(Logits(parts), FolderLogits("k2-horizon-mova", R"({"rope_head_dim":8})"));
}

// Whatever the choice of experts, softmax gates are those of the selected ones.
TEST_F(GgufVariant, CommandGates) {
  GgufParts parts = VariantParts("cohere2-moe");
  const std::vector<float> expected = Logits(parts);
  parts.Set(GgufU32("cohere2moe.expert_gating_func", 3));
  EXPECT_EQ(Logits(parts), expected);
  parts.Remove("cohere2moe.expert_gating_func");
  const auto checkpoint = LoadParts(parts);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->spec.feed_forward(1).routing->gate, GateKind::kSigmoid);
}

struct VariantDamage {
  std::string name;
  std::string file;
  std::function<void(GgufParts&)> change;
  std::vector<std::string> mentions;
};
void PrintTo(const VariantDamage& d, std::ostream* out) { *out << d.name; }

class GgufVariantDamage : public GgufVariant,
                          public ::testing::WithParamInterface<VariantDamage> {};

TEST_P(GgufVariantDamage, IsRefused) {
  GgufParts parts = VariantParts(GetParam().file);
  GetParam().change(parts);
  std::vector<std::string> mentions = GetParam().mentions;
  mentions.push_back("a.gguf: ");
  EXPECT_TRUE(Mentions(LoadParts(parts).status(), mentions));
}

VariantDamage VariantKey(std::string name, std::string file, GgufKey key,
                         std::vector<std::string> mentions) {
  return {std::move(name), std::move(file), [key](GgufParts& p) { p.Set(key); },
          std::move(mentions)};
}

VariantDamage VariantWithoutKey(std::string name, std::string file, const std::string& key) {
  return {std::move(name),
          std::move(file),
          [key](GgufParts& p) { p.Remove(key); },
          {"metadata: " + key + ": expected", "found no such key"}};
}

VariantDamage VariantWithoutTensor(std::string name, std::string file, const std::string& tensor,
                                   const std::string& expected) {
  return {std::move(name),
          std::move(file),
          [tensor](GgufParts& p) { RemoveTensors(p, tensor); },
          {expected}};
}

VariantDamage VariantDivisors(std::string name, std::string file, size_t count, float value,
                              std::vector<std::string> mentions) {
  return {std::move(name), std::move(file),
          [count, value](GgufParts& p) {
            GgufTensorBytes& tensor = p.Tensor("rope_freqs.weight");
            tensor.shape = {count};
            tensor.data.clear();
            for (size_t i = 0; i < count; ++i) {
              tensor.data.append(reinterpret_cast<const char*>(&value), sizeof(value));
            }
          },
          std::move(mentions)};
}

INSTANTIATE_TEST_SUITE_P(
    Heads, GgufVariantDamage,
    ::testing::Values(
        VariantKey(
            "FewLayers", "gemma4-moe", GgufInts("gemma4.attention.head_count_kv", {2, 2}),
            {"gemma4.attention.head_count_kv: expected an integer or an array of 3 integers"}),
        VariantKey("NoKvHeads", "gemma4-moe", GgufInts("gemma4.attention.head_count_kv", {2, 0, 2}),
                   {"gemma4.attention.head_count_kv"}),
        VariantKey("ManyKvHeads", "gemma4-moe",
                   GgufInts("gemma4.attention.head_count_kv", {2, 0x7FFFFFFF, 2}),
                   {"gemma4.attention.head_count_kv"}),
        VariantKey("OtherKvHeads", "gemma4-moe",
                   GgufInts("gemma4.attention.head_count_kv", {2, 4, 2}),
                   {"tensor \"blk.1.attn_k.weight\": expected shape [64, 32]"}),
        VariantWithoutKey("NoKvHeadsAtAll", "gemma4-moe", "gemma4.attention.head_count_kv"),
        VariantKey("Heads", "step3p5", GgufInts("step35.attention.head_count", {4, 4, 6, 4}),
                   {"tensor \"blk.1.attn_"}),
        VariantKey("NoHeads", "step3p5", GgufInts("step35.attention.head_count", {4, -1, 6, 4}),
                   {"step35.attention.head_count"}),
        VariantKey("WindowWidth", "gemma4-moe", GgufU32("gemma4.attention.key_length_swa", 0),
                   {"gemma4.attention.key_length_swa: expected an integer in [1, ", "found 0"}),
        VariantKey("WindowWidthHuge", "gemma4-moe",
                   GgufU32("gemma4.attention.key_length_swa", 0x7FFFFFFF),
                   {"gemma4.attention.key_length_swa: expected an integer in [1, "}),
        VariantKey("WindowValues", "gemma4-moe", GgufU32("gemma4.attention.value_length_swa", 16),
                   {"gemma4.attention.value_length_swa: expected 8, found 16"}),
        VariantKey("WindowRotation", "gemma4-moe", GgufU32("gemma4.rope.dimension_count_swa", 10),
                   {"gemma4.rope.dimension_count_swa: expected an integer in [1, 8]", "found 10"}),
        VariantKey("Rotation", "step3p5", GgufU32("step35.rope.dimension_count", 0),
                   {"step35.rope.dimension_count"}),
        VariantKey("ValueWidth", "mimo-v2-flash", GgufU32("mimo2.attention.value_length", 0),
                   {"mimo2.attention.value_length"}),
        VariantKey("OtherValues", "mimo-v2-flash", GgufU32("mimo2.attention.value_length", 12),
                   {"tensor \"blk.0.attn_v.weight\": expected shape [24, 32]"}),
        VariantKey("ValueScale", "mimo-v2-flash",
                   GgufF32("mimo2.attention.value_scale", std::numeric_limits<float>::infinity()),
                   {"mimo2.attention.value_scale: expected a finite number"}),
        VariantWithoutTensor("NoValues", "gemma4-moe", "blk.0.attn_v.weight",
                             "tensor \"blk.0.attn_v.weight\" is missing"),
        VariantWithoutTensor("NoHeadGates", "step3p5", "blk.1.attn_gate.weight",
                             "tensor \"blk.1.attn_gate.weight\" is missing"),
        VariantDivisors("FewDivisors", "gemma4-moe", 4, 1.0f,
                        {"tensor \"rope_freqs.weight\": expected F32 [8], found F32 [4]"}),
        VariantDivisors(
            "NothingRotated", "gemma4-moe", 8, 1e30f,
            {"tensor \"rope_freqs.weight\": expected a divisor below 1e30, found none"}),
        VariantDivisors("Infinite", "gemma4-moe", 8, std::numeric_limits<float>::infinity(),
                        {"tensor \"rope_freqs.weight\": expected numbers above 0"}),
        VariantDivisors("HalfTheDivisors", "step3p5", 2, 1.0f,
                        {"tensor \"rope_freqs.weight\": expected F32 [4], found F32 [2]"})),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    ValueExperts, GgufVariantDamage,
    ::testing::Values(
        VariantKey("Count", "k2-horizon-mova",
                   GgufU32("k2-horizon.attention.value_expert_count", 5),
                   {"tensor \"blk.1.attn_v_gate.weight\": expected shape [5, 32]"}),
        VariantKey("CountHuge", "k2-horizon-mova",
                   GgufU32("k2-horizon.attention.value_expert_count", 0x7FFFFFFF),
                   {"k2-horizon.attention.value_expert_count: expected at least 1 expert"}),
        VariantKey("NoValueExperts", "k2-horizon-mova",
                   GgufU32("k2-horizon.attention.value_expert_count", 0),
                   {"k2-horizon.attention.value_expert_used_count: expected 0, found 2"}),
        VariantKey("Chosen", "k2-horizon-mova",
                   GgufU32("k2-horizon.attention.value_expert_used_count", 5),
                   {"k2-horizon.attention.value_expert_used_count"}),
        VariantWithoutKey("NoChosen", "k2-horizon-mova",
                          "k2-horizon.attention.value_expert_used_count"),
        VariantKey("NoExperts", "k2-horizon-mova", GgufU32("k2-horizon.expert_count", 0),
                   {"k2-horizon.attention.value_expert_count: expected 0", "found 4"}),
        VariantKey("NormGroups", "k2-horizon-mova",
                   GgufU32("k2-horizon.attention.group_norm_groups", 3),
                   {"k2-horizon.attention.group_norm_groups"}),
        VariantWithoutTensor("NoValueStack", "k2-horizon-mova", "blk.2.attn_v_exps",
                             "tensor \"blk.2.attn_v_exps.weight\" is missing"),
        VariantWithoutTensor("NoValueRouter", "k2-horizon-mova", "blk.1.attn_v_gate.weight",
                             "tensor \"blk.1.attn_v_gate.weight\" is missing")),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Layers, GgufVariantDamage,
    ::testing::Values(
        VariantKey("SharedCaches", "gemma4-moe", GgufU32("gemma4.attention.shared_kv_layers", 1),
                   {"gemma4.attention.shared_kv_layers: expected 0, found 1"}),
        VariantKey("LayerInputs", "gemma4-moe",
                   GgufU32("gemma4.embedding_length_per_layer_input", 16),
                   {"gemma4.embedding_length_per_layer_input: expected 0, found 16"}),
        VariantWithoutKey("NoWindow", "gemma4-moe", "gemma4.attention.sliding_window"),
        VariantWithoutTensor("NoExpertNorm", "gemma4-moe", "pre_ffw_norm_2",
                             "tensor \"blk.0.pre_ffw_norm_2.weight\" is missing"),
        VariantWithoutTensor("NoSharedNorm", "gemma4-moe", "blk.1.post_ffw_norm_1",
                             "tensor \"blk.1.post_ffw_norm_1.weight\" is missing"),
        VariantWithoutTensor("NoRouterNorm", "gemma4-moe", "ffn_gate_inp.scale",
                             "tensor \"blk.0.ffn_gate_inp.scale\" is missing"),
        VariantWithoutTensor("NoExpertScale", "gemma4-moe", "blk.2.ffn_down_exps.scale",
                             "tensor \"blk.2.ffn_down_exps.scale\" is missing"),
        VariantWithoutTensor("NoLayerScale", "gemma4-moe", "blk.2.layer_output_scale",
                             "tensor \"blk.2.layer_output_scale.weight\" is missing"),
        VariantWithoutTensor("NoRouter", "gemma4-moe", "blk.1.ffn_gate_inp.weight",
                             "tensor \"blk.1.ffn_gate_inp.weight\" is missing"),
        VariantWithoutTensor("NoDense", "gemma4-moe", "blk.1.ffn_up.weight",
                             "tensor \"blk.1.ffn_up.weight\" is missing"),
        VariantKey("Step", "llama4", GgufU32("llama4.interleave_moe_layer_step", 2),
                   {"tensor \"blk.0.ffn_"}),
        VariantKey("NoStep", "llama4", GgufU32("llama4.interleave_moe_layer_step", 0),
                   {"llama4.interleave_moe_layer_step: expected an integer of at least 1"}),
        VariantKey("Chunk", "llama4", GgufInts("llama4.attention.sliding_window", {-1}),
                   {"llama4.attention.sliding_window"}),
        VariantKey("ScaleStep", "llama4", GgufU32("llama4.attention.temperature_length", 0),
                   {"llama4.attention.temperature_length: expected a number above 0, found 0"}),
        VariantWithoutTensor("NoSharedExpert", "llama4", "blk.0.ffn_up_shexp",
                             "tensor \"blk.0.ffn_up_shexp.weight\" is missing"),
        VariantKey("EveryLayers", "step3p5", GgufU32("step35.moe_every_n_layers", 2),
                   {"step35.moe_every_n_layers: expected 1, found 2"}),
        VariantKey("FewLimits", "step3p5", GgufFloats("step35.swiglu_clamp_exp", {1.0f}),
                   {"step35.swiglu_clamp_exp: expected a number of at least 0 or an array of 4"}),
        VariantKey("NegativeLimit", "step3p5",
                   GgufFloats("step35.swiglu_clamp_shexp", {0.0f, 0.0f, -1.0f, 0.0f}),
                   {"step35.swiglu_clamp_shexp: expected a number of at least 0"}),
        VariantKey("Limits", "step3p5", GgufTexts("step35.swiglu_clamp_exp", {"1", "1", "1", "1"}),
                   {"step35.swiglu_clamp_exp: expected a number of at least 0"}),
        VariantWithoutKey("NoLogitScale", "cohere2-moe", "cohere2moe.logit_scale"),
        VariantKey("Gate", "cohere2-moe", GgufU32("cohere2moe.expert_gating_func", 4),
                   {"cohere2moe.expert_gating_func"}),
        VariantWithoutTensor("NoNorm", "cohere2-moe", "blk.3.attn_norm",
                             "tensor \"blk.3.attn_norm.weight\" is missing"),
        VariantKey("Dense", "cohere2-moe", GgufU32("cohere2moe.leading_dense_block_count", 1),
                   {"tensor \"blk.0.ffn_"}),
        VariantKey("Windows", "mimo-v2-flash",
                   GgufInts("mimo2.attention.sliding_window_pattern", {0, 1}),
                   {"mimo2.attention.sliding_window_pattern: expected an array of 3 bools"}),
        VariantWithoutTensor("NoMimoRouter", "mimo-v2-flash", "blk.1.ffn_up_exps",
                             "tensor \"blk.1.ffn_up_exps.weight\" is missing"),
        VariantKey("Length", "mistral4",
                   GgufF32("mistral4.attention.temperature_length",
                           std::numeric_limits<float>::quiet_NaN()),
                   {"mistral4.attention.temperature_length: expected a finite number"})),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace moeserve::testing
