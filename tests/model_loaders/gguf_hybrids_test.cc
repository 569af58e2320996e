// GGUF files of hybrid models: layouts of other writers than the goldens', and what is refused.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "engine/spec/weights.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/model_loaders/gguf_bytes.h"
#include "tests/model_loaders/support.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;

GgufParts HybridParts(const std::string& name) {
  return PartsOf(ReadFile(std::string(MOESERVE_GGUF_DIR) + "/models/" + name + "-bf16.gguf"));
}

// The files of this name are in a folder of the test.
class GgufHybrid : public ::testing::Test {
 protected:
  fs::path Write(const GgufParts& parts) {
    WriteFile(folder_.path() / "a.gguf", GgufBytes(parts));
    return folder_.path() / "a.gguf";
  }
  Result<Checkpoint> LoadParts(const GgufParts& parts) {
    return LoadCheckpoint(Write(parts), {.require_tokenizer = false});
  }
  std::vector<float> Logits(const GgufParts& parts) {
    auto runner = ModelRunner::Load(Write(parts), {.compute = DType::kF32});
    EXPECT_TRUE(runner.ok()) << runner.status();
    if (!runner.ok()) return {};
    return (*runner)->Run({5, 17, 3, 90, 41, 8, 8, 60}, 8);
  }

 private:
  TempFolder folder_;
};

TEST(GgufBlockOrder, PutsTheFirstHeadsOfAllGroupsFirst) {
  // Two groups of three heads, each with two rows.
  const BlockOrder order{.size = 2, .outer = 2, .inner = 3};
  const std::vector<int64_t> stored = {0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11};
  for (int64_t i = 0; i < 12; ++i) {
    EXPECT_EQ(order.Stored(i), stored[static_cast<size_t>(i)]);
    EXPECT_EQ(BlockOrder().Stored(i), i);
  }
}

// Early files of Qwen3-Next have the rows of each key head together.
TEST_F(GgufHybrid, JoinedRowsOfKeyHeads) {
  GgufParts parts = HybridParts("qwen3-next");
  const std::vector<float> expected = Logits(parts);
  // 2 key heads of 8 rows, 2 value heads of 12 rows for each; a row has 32 elements of bf16.
  constexpr size_t kRow = 64, kKey = 8, kValues = 24;
  for (int layer = 0; layer < 3; ++layer) {
    const std::string block = "blk." + std::to_string(layer);
    GgufTensorBytes& joined = parts.Tensor(block + ".attn_qkv.weight");
    const std::string rows = joined.data, gates = parts.Tensor(block + ".attn_gate.weight").data;
    joined.name = block + ".ssm_in.weight";
    joined.shape[0] = 2 * (2 * kKey + 2 * kValues);
    joined.data.clear();
    for (size_t head = 0; head < 2; ++head) {
      joined.data += rows.substr(head * kKey * kRow, kKey * kRow);
      joined.data += rows.substr((2 + head) * kKey * kRow, kKey * kRow);
      joined.data += rows.substr((4 * kKey + head * kValues) * kRow, kValues * kRow);
      joined.data += gates.substr(head * kValues * kRow, kValues * kRow);
    }
    std::erase_if(parts.tensors, [&](const GgufTensorBytes& tensor) {
      return tensor.name == block + ".attn_gate.weight";
    });
  }
  EXPECT_EQ(Logits(parts), expected);
}

// Programs that quantize files drop dimensions of size 1.
TEST_F(GgufHybrid, ShapesWithoutDimensionsOfOne) {
  GgufParts kimi = HybridParts("kimi-linear");
  const std::vector<float> expected = Logits(kimi);
  for (GgufTensorBytes& tensor : kimi.tensors) {
    if (tensor.name.find("ssm_conv1d") != std::string::npos) {
      ASSERT_EQ(tensor.shape.size(), 4u);
      tensor.shape = {tensor.shape[1], 1, tensor.shape[3]};
    } else if (tensor.name.find("ssm_a") != std::string::npos) {
      tensor.shape = {tensor.shape[2], 1};
    }
  }
  EXPECT_EQ(Logits(kimi), expected);
  GgufParts granite = HybridParts("granitemoehybrid-mamba");
  const std::vector<float> other = Logits(granite);
  GgufTensorBytes& norm = granite.Tensor("blk.0.ssm_norm.weight");
  ASSERT_EQ(norm.shape, (std::vector<uint64_t>{1, 64}));
  norm.shape = {64};
  EXPECT_EQ(Logits(granite), other);
}

TEST_F(GgufHybrid, LayersThatPredictFurtherTokensAreIgnored) {
  GgufParts parts = HybridParts("qwen3-5-moe");
  const std::vector<float> expected = Logits(parts);
  parts.Set(GgufU32("qwen35moe.block_count", 5));
  parts.Set(GgufU32("qwen35moe.nextn_predict_layers", 1));
  parts.tensors.push_back({"blk.4.nextn.eh_proj.weight", {32}, 0, std::string(128, '\0')});
  EXPECT_EQ(Logits(parts), expected);
  GgufParts nemotron = HybridParts("nemotron-h");
  const std::vector<float> other = Logits(nemotron);
  nemotron.Set(GgufU32("nemotron_h_moe.block_count", 6));
  nemotron.Set(GgufU32("nemotron_h_moe.nextn_predict_layers", 1));
  // The further layer has two blocks.
  nemotron.Set(GgufInts("nemotron_h_moe.attention.head_count_kv", {0, 0, 2, 0, 0, 2}));
  nemotron.Set(GgufInts("nemotron_h_moe.feed_forward_length", {0, 16, 0, 40, 0, 16}));
  nemotron.tensors.push_back({"blk.5.attn_norm.weight", {32}, 0, std::string(128, '\0')});
  EXPECT_EQ(Logits(nemotron), other);
}

TEST_F(GgufHybrid, AnIndexerLimitsTheContext) {
  GgufParts parts = HybridParts("deepseek-v32");
  const auto checkpoint = LoadParts(parts);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->spec.max_position_embeddings, 128);
  EXPECT_EQ(checkpoint->context_reason,
            "sparse attention beyond deepseek32.attention.indexer.top_k is not computed");
  parts.Set(GgufU32("deepseek32.attention.indexer.top_k", 512));
  const auto whole = LoadParts(parts);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->spec.max_position_embeddings, 512);
  EXPECT_EQ(whole->context_reason, "");
}

// Rates of decays must be negative in files, so that their logarithms exist.
TEST_F(GgufHybrid, RatesOfAnotherSignAreRefused) {
  for (const float rate : {0.5f, 0.0f, -0.0f, std::numeric_limits<float>::quiet_NaN(),
                           -std::numeric_limits<float>::infinity()}) {
    SCOPED_TRACE(rate);
    GgufParts parts = HybridParts("qwen3-5");
    std::memcpy(parts.Tensor("blk.1.ssm_a").data.data() + sizeof(rate), &rate, sizeof(rate));
    const auto checkpoint = LoadParts(parts);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_TRUE(checkpoint->weights->Get("blocks.0.attention.decay_log", {4}).ok());
    EXPECT_TRUE(
        Mentions(checkpoint->weights->Get("blocks.1.attention.decay_log", {4}).status(),
                 {"a.gguf: tensor \"blk.1.ssm_a\": expected numbers below 0, found another"}));
  }
}

struct HybridDamage {
  std::string name;
  std::string file;
  std::function<void(GgufParts&)> change;
  std::vector<std::string> mentions;
};
void PrintTo(const HybridDamage& d, std::ostream* out) { *out << d.name; }

class GgufHybridDamage : public GgufHybrid, public ::testing::WithParamInterface<HybridDamage> {};

TEST_P(GgufHybridDamage, IsRefused) {
  GgufParts parts = HybridParts(GetParam().file);
  GetParam().change(parts);
  std::vector<std::string> mentions = GetParam().mentions;
  mentions.push_back("a.gguf: ");
  EXPECT_TRUE(Mentions(LoadParts(parts).status(), mentions));
}

HybridDamage HybridKey(std::string name, std::string file, GgufKey key,
                       std::vector<std::string> mentions) {
  return {std::move(name), std::move(file), [key](GgufParts& p) { p.Set(key); },
          std::move(mentions)};
}

HybridDamage WithoutKey(std::string name, std::string file, const std::string& key) {
  return {std::move(name),
          std::move(file),
          [key](GgufParts& p) { p.Remove(key); },
          {"metadata: " + key + ": expected", "found no such key"}};
}

HybridDamage WithoutTensor(std::string name, std::string file, const std::string& tensor) {
  return {std::move(name),
          std::move(file),
          [tensor](GgufParts& p) {
            std::erase_if(p.tensors, [&](const GgufTensorBytes& t) { return t.name == tensor; });
          },
          {"tensor \"" + tensor + "\" is missing"}};
}

HybridDamage Reshaped(std::string name, std::string file, const std::string& tensor,
                      std::vector<uint64_t> shape, std::vector<std::string> mentions) {
  mentions.push_back("tensor \"" + tensor + "\": expected shape");
  return {std::move(name), std::move(file),
          [tensor, shape](GgufParts& p) { p.Tensor(tensor).shape = shape; }, std::move(mentions)};
}

INSTANTIATE_TEST_SUITE_P(
    Layers, GgufHybridDamage,
    ::testing::Values(
        HybridKey("FewLayers", "lfm2", GgufInts("lfm2.attention.head_count_kv", {0, 0, 2}),
                  {"lfm2.attention.head_count_kv: expected an integer or an array of 4 integers "
                   "(the number of layers), found an array of 3 i32"}),
        HybridKey("ManyLayers", "lfm2",
                  GgufInts("lfm2.attention.head_count_kv", std::vector<int32_t>(4096, 0)),
                  {"expected an integer or an array of 4 integers", "an array of 4096 i32"}),
        HybridKey("Texts", "lfm2", GgufTexts("lfm2.attention.head_count_kv", {"0", "0", "2", "0"}),
                  {"expected an integer or an array of 4 integers"}),
        HybridKey("OtherHeads", "lfm2", GgufInts("lfm2.attention.head_count_kv", {0, 4, 2, 0}),
                  {"lfm2.attention.head_count_kv: expected 0 or 4 for layer 2, found 2"}),
        HybridKey("NegativeHeads", "lfm2", GgufInts("lfm2.attention.head_count_kv", {0, 0, -2, 0}),
                  {"lfm2.attention.head_count_kv", "-2"}),
        HybridKey("OtherLayer", "lfm2", GgufInts("lfm2.attention.head_count_kv", {0, 2, 0, 0}),
                  {"tensor \"blk.1.attn_q.weight\" is missing"}),
        WithoutKey("NoHeads", "lfm2-moe", "lfm2moe.attention.head_count_kv"),
        WithoutKey("NoTaps", "lfm2-moe", "lfm2moe.shortconv.l_cache"),
        HybridKey("Taps", "lfm2-moe", GgufU32("lfm2moe.shortconv.l_cache", 100'000),
                  {"lfm2moe.shortconv.l_cache"}),
        HybridKey("MoreTaps", "lfm2-moe", GgufU32("lfm2moe.shortconv.l_cache", 4),
                  {"tensor \"blk.0.shortconv.conv.weight\": expected shape [32, 4]"}),
        HybridKey("TwoBlocks", "nemotron-h",
                  GgufInts("nemotron_h_moe.feed_forward_length", {0, 16, 16, 40, 0}),
                  {"nemotron_h_moe.feed_forward_length: expected 0 for layer 2", "found 16"}),
        HybridKey("Width", "nemotron-h",
                  GgufInts("nemotron_h_moe.feed_forward_length", {0, 16, 0, 48, 0}),
                  {"tensor \"blk.3.ffn_up.weight\": expected shape [48, 32]"}),
        HybridKey("NegativeWidth", "nemotron-h",
                  GgufInts("nemotron_h_moe.feed_forward_length", {0, 16, 0, -1, 0}),
                  {"nemotron_h_moe.feed_forward_length"}),
        HybridKey("LatentWidth", "nemotron-h-latent-groups",
                  GgufU32("nemotron_h_moe.moe_latent_size", 16),
                  {"tensor \"blk.1.ffn_latent_down.weight\": expected shape [16, 32]"}),
        HybridKey("Interval", "qwen3-next", GgufU32("qwen3next.full_attention_interval", 0),
                  {"qwen3next.full_attention_interval: expected an integer of at least 1"}),
        HybridKey("OtherInterval", "qwen3-next", GgufU32("qwen3next.full_attention_interval", 2),
                  {"tensor \"blk.1.attn_"}),
        HybridKey("Windows", "exaone-moe",
                  GgufInts("exaone-moe.attention.sliding_window_pattern", {1, 0, 1}),
                  {"sliding_window_pattern: expected an array of 4 bools"}),
        HybridKey("WindowsOfTwo", "exaone-moe",
                  GgufInts("exaone-moe.attention.sliding_window_pattern", {1, 0, 2, 0}),
                  {"sliding_window_pattern: expected an array of 4 bools"}),
        WithoutKey("NoIndexer", "deepseek-v32", "deepseek32.attention.indexer.top_k"),
        HybridKey("Indexer", "glm-moe-dsa", GgufU32("glm-dsa.attention.indexer.top_k", 0),
                  {"glm-dsa.attention.indexer.top_k: expected an integer of at least 1, found 0"}),
        WithoutTensor("NoRouter", "hy-v3", "blk.1.ffn_up_exps.weight")),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Mixers, GgufHybridDamage,
    ::testing::Values(
        WithoutKey("NoInner", "qwen3-5", "qwen35.ssm.inner_size"),
        WithoutKey("NoState", "qwen3-5", "qwen35.ssm.state_size"),
        WithoutKey("NoRank", "granitemoehybrid-mamba", "granitehybrid.ssm.time_step_rank"),
        HybridKey("Inner", "qwen3-5", GgufU32("qwen35.ssm.inner_size", 50),
                  {"qwen35.ssm.inner_size: expected a multiple of the number of heads "
                   "(qwen35.ssm.time_step_rank is 4), found 50"}),
        HybridKey("InnerHuge", "qwen3-5", GgufU32("qwen35.ssm.inner_size", 0x7FFFFFFC),
                  {"qwen35.ssm.inner_size"}),
        HybridKey("NoHeadsAtAll", "qwen3-5", GgufU32("qwen35.ssm.time_step_rank", 0),
                  {"qwen35.ssm.inner_size: expected a multiple"}),
        HybridKey("KeyHeads", "qwen3-5", GgufU32("qwen35.ssm.group_count", 3),
                  {"qwen35.ssm.group_count"}),
        HybridKey("NoKeyHeads", "qwen3-5", GgufU32("qwen35.ssm.group_count", 0),
                  {"qwen35.ssm.group_count"}),
        HybridKey("KeyWidth", "qwen3-5-moe", GgufU32("qwen35moe.ssm.state_size", 16),
                  {"tensor \"blk.0.attn_qkv.weight\": expected shape [112, 32]"}),
        HybridKey("Groups", "nemotron-h", GgufU32("nemotron_h_moe.ssm.group_count", 3),
                  {"nemotron_h_moe.ssm.group_count"}),
        HybridKey("GroupsOfNorm", "nemotron-h", GgufU32("nemotron_h_moe.ssm.group_count", 4),
                  {"tensor \"blk.0.ssm_norm.weight\": expected shape [4, 12]"}),
        HybridKey("ChannelWidth", "kimi-linear", GgufU32("kimi-linear.kda.head_dim", 0),
                  {"kimi-linear.kda.head_dim"}),
        HybridKey("ChannelWidthHuge", "kimi-linear", GgufU32("kimi-linear.kda.head_dim", 1 << 30),
                  {"kimi-linear.kda.head_dim"}),
        HybridKey("KimiHeads", "kimi-linear",
                  GgufInts("kimi-linear.attention.head_count_kv", {0, 2, 0}),
                  {"kimi-linear.attention.head_count_kv: expected 1, found 2"}),
        WithoutKey("NoBound", "bailing-hybrid", "bailingmoe3.kda.gate_lower_bound"),
        HybridKey("Bound", "bailing-hybrid", GgufF32("bailingmoe3.kda.gate_lower_bound", 1.0f),
                  {"bailingmoe3.kda.gate_lower_bound"}),
        HybridKey("SafeGate", "bailing-hybrid", GgufBool("bailingmoe3.kda.safe_gate", 0),
                  {"bailingmoe3.kda.safe_gate: expected true, found false"}),
        HybridKey("Clamp", "bailing-hybrid", GgufFloats("bailingmoe3.swiglu_clamp_exp", {1, 1, 1}),
                  {"bailingmoe3.swiglu_clamp_exp: expected"}),
        WithoutTensor("NoHeadGate", "bailing-hybrid", "blk.1.attn_gate.weight"),
        HybridKey("TwoExperts", "phimoe", GgufU32("phimoe.expert_used_count", 3),
                  {"phimoe.expert_used_count: expected 2, found 3"}),
        WithoutTensor("NoNormBias", "phimoe", "blk.1.ffn_norm.bias"),
        WithoutTensor("NoStrengths", "kimi-linear", "blk.0.ssm_beta.weight"),
        WithoutTensor("NoRates", "kimi-linear", "blk.2.ssm_a"),
        WithoutTensor("NoBias", "granitemoehybrid-mamba", "blk.2.ssm_dt.bias"),
        WithoutTensor("NoOut", "qwen3-5", "blk.0.ssm_out.weight"),
        WithoutTensor("NoGate", "afmoe", "blk.0.attn_gate.weight"),
        Reshaped("Rates", "qwen3-5", "blk.0.ssm_a", {2, 2}, {"[4]"}),
        Reshaped("Convolution", "qwen3-5", "blk.0.ssm_conv1d.weight", {4, 80}, {"[80, 4]"}),
        Reshaped("Queries", "qwen3-5", "blk.3.attn_q.weight", {64, 64}, {"[128, 32]"})),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace moeserve::testing
