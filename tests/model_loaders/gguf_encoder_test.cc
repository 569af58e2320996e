// Encoders and encoder-decoders in GGUF files, which
// tests/reference/families/make_gguf_encoder_goldens.py wrote: the results of the folders that the
// files were made of, settings that follow from keys and tensors, and files that must be refused.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "model_loaders/checkpoint/loader.h"
#include "tests/model_loaders/gguf_bytes.h"
#include "tests/model_loaders/patched_folder.h"
#include "tests/model_loaders/support.h"
#include "tests/support/encoder_golden.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;

fs::path EncoderFile(const std::string& name) {
  return SourcePath("tests/golden/gguf/encoders/" + name + ".gguf");
}

GgufParts EncoderParts(const std::string& name) { return PartsOf(ReadFile(EncoderFile(name))); }

void RemoveTensor(GgufParts& parts, const std::string& name) {
  std::erase_if(parts.tensors, [&](const GgufTensorBytes& t) { return t.name == name; });
}

Result<Checkpoint> LoadParts(const GgufParts& parts) {
  TempFolder folder;
  WriteFile(folder.path() / "a.gguf", GgufBytes(parts));
  return LoadCheckpoint(folder.path() / "a.gguf", {.require_tokenizer = false});
}

ModelSpec EncoderSpec(const GgufParts& parts) {
  const Result<Checkpoint> checkpoint = LoadParts(parts);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  return checkpoint.ok() ? checkpoint->spec : ModelSpec();
}

// Returns the vectors, or the logits of labels, of the texts of a golden file.
std::vector<std::vector<float>> TextsOf(const fs::path& model, const EncoderGolden& golden,
                                        DType compute = DType::kF32) {
  std::vector<std::vector<float>> texts;
  auto runner = ModelRunner::Load(model, {.compute = compute});
  EXPECT_TRUE(runner.ok()) << runner.status();
  if (!runner.ok()) return texts;
  for (int i = 0; i < golden.texts(); ++i) {
    StepSetup setup;
    setup.texts = &texts.emplace_back();
    (*runner)->RunTogether({{0, 0, golden.tokens[i], golden.types[i]}}, setup);
  }
  return texts;
}

struct GgufEncoderCase {
  std::string name;
  // A patch of the folder's config.json, for settings that all files of the architecture imply.
  std::string patch = "{}";
  std::string pooling = "";  // the folder's, by a module of sentence-transformers
};
void PrintTo(const GgufEncoderCase& c, std::ostream* out) { *out << c.name; }

class GgufEncoderTest : public ::testing::TestWithParam<GgufEncoderCase> {};

TEST_P(GgufEncoderTest, HasTheVectorsOfTheSafetensorsFolder) {
  const fs::path folder = SourcePath("tests/golden/encoders/" + GetParam().name);
  const auto golden = ReadEncoderGolden(folder / "golden.safetensors");
  ASSERT_TRUE(golden.ok()) << golden.status();
  TempFolder patched;
  CopyPatched(folder, GetParam().patch, patched.path());
  ZeroTensors(patched.path(), ".mlp.experts.bias");
  if (!GetParam().pooling.empty()) {
    fs::create_directory(patched.path() / "1_Pooling");
    WriteFile(patched.path() / "modules.json",
              R"([{"type":"sentence_transformers.models.Pooling","path":"1_Pooling"}])");
    WriteFile(patched.path() / "1_Pooling/config.json",
              R"({"pooling_mode_)" + GetParam().pooling + R"(":true})");
  }
  GgufParts parts = EncoderParts(GetParam().name);
  for (const std::string module : {"dense_2", "dense_3"}) {
    RemoveTensor(parts, module + ".weight");
    for (const char* key : {"_feat_in", "_feat_out"}) {
      parts.Remove("gemma-embedding." + module + key);
    }
  }
  const fs::path file = patched.path() / "a.gguf";
  WriteFile(file, GgufBytes(parts));
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const auto found = TextsOf(file, *golden, compute);
    ASSERT_FALSE(found.empty());
    EXPECT_FALSE(found.front().empty());
    EXPECT_EQ(found, TextsOf(patched.path(), *golden, compute));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Gguf, GgufEncoderTest,
    ::testing::Values(GgufEncoderCase{"bert-vectors", R"({"hidden_act":"gelu"})", "cls_token"},
                      GgufEncoderCase{"xlm-roberta-vectors"},
                      GgufEncoderCase{"roberta-cross-encoder"}, GgufEncoderCase{"nomic-dense"},
                      GgufEncoderCase{"nomic-experts"},
                      GgufEncoderCase{"modernbert-vectors", "{}", "cls_token"},
                      GgufEncoderCase{
                          "modernbert-names",
                          R"({"architectures":["ModernBertForSequenceClassification"]})"},
                      GgufEncoderCase{"gemma3-bidirectional"}, GgufEncoderCase{"qwen3-vectors"},
                      GgufEncoderCase{"t5-encoder", R"({"relative_attention_max_distance":128})"}),
    [](const auto& info) {
      return TestName({info.param.name, {}});
    });

class GgufPairTest : public ::testing::TestWithParam<std::string> {};

TEST_P(GgufPairTest, HasTheAnswersOfTheSafetensorsFolder) {
  TempFolder patched;
  CopyPatched(SourcePath("tests/golden/pairs/" + GetParam()),
              R"({"relative_attention_max_distance":128})", patched.path());
  std::vector<AnswerBits> answers;
  for (const fs::path& model : {EncoderFile(GetParam()), patched.path()}) {
    auto engine = TestEngine::Start(model, {.max_num_seqs = 2});
    ASSERT_TRUE(engine.ok()) << engine.status();
    for (const int length : {1, 20, 150}) {
      Request request;
      request.id = "pair";
      for (int i = 0; i < length; ++i) request.source.push_back(3 + i * 7 % 90);
      request.prompt = {0};
      request.sampling.temperature = 0.0;
      request.sampling.ignore_eos = true;
      request.sampling.max_tokens = 150;
      request.sampling.logprobs = 0;
      answers.push_back(BitsOf(*(*engine)->Submit(request)));
    }
  }
  ASSERT_EQ(answers.size(), 6u);
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(answers[i] == answers[i + 3]) << i;
}

INSTANTIATE_TEST_SUITE_P(Gguf, GgufPairTest, ::testing::Values("t5", "t5-gated-untied", "umt5"),
                         [](const auto& info) {
                           return TestName({info.param, {}});
                         });

// ---- settings

TEST(GgufEncoder, OfBert) {
  GgufParts parts = EncoderParts("bert-vectors");
  const ModelSpec spec = EncoderSpec(parts);
  EXPECT_EQ(spec.kind, ModelKind::kEncoder);
  EXPECT_EQ(spec.norm.eps, 1e-12f);
  EXPECT_EQ(spec.token_types, 2);
  EXPECT_EQ(spec.max_position_embeddings, 160);
  EXPECT_TRUE(spec.position.count_padding);
  EXPECT_EQ(spec.feed_forward(0).expert.activation, ActivationKind::kGelu);
  ASSERT_TRUE(spec.pooling.has_value());
  EXPECT_EQ(spec.pooling->kind, PoolingKind::kFirst);
  EXPECT_TRUE(spec.pooling->normalize);
  // Without a key, vectors are the mean of all rows, and a note says so.
  parts.Remove("bert.pooling_type");
  const Result<Checkpoint> checkpoint = LoadParts(parts);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->spec.pooling->kind, PoolingKind::kMean);
  ASSERT_FALSE(checkpoint->notes.empty());
  EXPECT_NE(checkpoint->notes[0].find("bert.pooling_type"), std::string::npos);
}

// Older converters join nothing; newer ones join queries, keys and values.
TEST(GgufEncoder, HasJoinedProjections) {
  const auto golden =
      ReadEncoderGolden(SourcePath("tests/golden/encoders/bert-vectors/golden.safetensors"));
  GgufParts parts = EncoderParts("bert-vectors");
  for (const std::string layer : {"blk.0.", "blk.1."}) {
    for (const std::string kind : {".weight", ".bias"}) {
      parts.Tensor(layer + "attn_q" + kind).name = layer + "attn_qkv" + kind;
      for (const std::string other : {"attn_k", "attn_v"}) {
        const GgufTensorBytes part = parts.Tensor(layer + other + kind);
        GgufTensorBytes& all = parts.Tensor(layer + "attn_qkv" + kind);
        all.shape[0] += part.shape[0];
        all.data += part.data;
        RemoveTensor(parts, part.name);
      }
    }
  }
  TempFolder folder;
  WriteFile(folder.path() / "a.gguf", GgufBytes(parts));
  EXPECT_EQ(TextsOf(folder.path() / "a.gguf", *golden),
            TextsOf(EncoderFile("bert-vectors"), *golden));
}

// RoBERTa's files have the tokenizer of GPT-2 or of XLM-R; padding has no positions there.
TEST(GgufEncoder, OfRoberta) {
  GgufParts parts = EncoderParts("xlm-roberta-vectors");
  EXPECT_TRUE(EncoderSpec(parts).position.count_padding);
  parts.Set(GgufText("tokenizer.ggml.model", "t5"));
  parts.Set(GgufU32("tokenizer.ggml.padding_token_id", 1));
  parts.Set(GgufTexts("tokenizer.ggml.tokens", {"<s>", "<pad>", "</s>", "<unk>", "a"}));
  parts.Set(GgufFloats("tokenizer.ggml.scores", {0, 0, 0, 0, -1}));
  parts.Set(GgufInts("tokenizer.ggml.token_type", {3, 3, 3, 2, 1}));
  parts.Set(GgufU32("tokenizer.ggml.bos_token_id", 0));
  parts.Set(GgufU32("tokenizer.ggml.eos_token_id", 2));
  parts.Set(GgufU32("tokenizer.ggml.unknown_token_id", 3));
  // Older converters store the table of one type as a vector.
  std::vector<uint64_t>& types = parts.Tensor("token_types.weight").shape;
  ASSERT_EQ(types, (std::vector<uint64_t>{1, 32}));
  types.erase(types.begin());
  const ModelSpec spec = EncoderSpec(parts);
  EXPECT_EQ(spec.token_types, 1);
  EXPECT_FALSE(spec.position.count_padding);
  EXPECT_EQ(spec.pad_token_id, 1);
  EXPECT_EQ(spec.max_position_embeddings, 160);
}

TEST(GgufEncoder, HasLabels) {
  GgufParts parts = EncoderParts("roberta-cross-encoder");
  ModelSpec spec = EncoderSpec(parts);
  EXPECT_EQ(spec.head.kind, HeadKind::kSequenceClassification);
  EXPECT_EQ(spec.head.scores, LabelScores::kSigmoid);
  EXPECT_EQ(spec.head.layer->activation, ActivationKind::kTanh);
  EXPECT_EQ(spec.pooling->kind, PoolingKind::kFirst);
  EXPECT_FALSE(spec.pooling->normalize);
  parts.Set(GgufU32("bert.pooling_type", 4));
  parts.Set(GgufTexts("bert.classifier.output_labels", {"relevant"}));
  EXPECT_EQ(EncoderSpec(parts).head.labels, (std::vector<std::string>{"relevant"}));
  // Older converters store the matrix of one label as a vector.
  parts.Tensor("cls.output.weight").shape.erase(parts.Tensor("cls.output.weight").shape.begin());
  EXPECT_EQ(EncoderSpec(parts).head.labels.size(), 1u);
  // A pooling makes vectors; the classifier is not needed then.
  parts.Set(GgufU32("bert.pooling_type", 1));
  spec = EncoderSpec(parts);
  EXPECT_EQ(spec.head.kind, HeadKind::kNone);
  EXPECT_EQ(spec.pooling->kind, PoolingKind::kMean);
  spec = EncoderSpec(EncoderParts("modernbert-names"));
  EXPECT_EQ(spec.head.labels.size(), 3u);
  EXPECT_EQ(spec.head.scores, LabelScores::kSoftmax);
  EXPECT_EQ(spec.head.layer->activation, ActivationKind::kGelu);
}

TEST(GgufEncoder, OfModernBert) {
  GgufParts parts = EncoderParts("modernbert-vectors");
  parts.Set(GgufText("modern-bert.hidden_activation", "silu"));
  parts.Set(GgufU32("modern-bert.attention.sliding_window_pattern", 2));
  const ModelSpec spec = EncoderSpec(parts);
  EXPECT_EQ(spec.feed_forward(0).expert.activation, ActivationKind::kSilu);
  EXPECT_EQ(spec.attention(0).window, std::nullopt);
  EXPECT_EQ(spec.attention(1).window, 6);
  EXPECT_EQ(spec.attention(2).window, std::nullopt);
  EXPECT_EQ(spec.position.theta, 160000.0);
  EXPECT_EQ(spec.attention(1).position->theta, 10000.0);
}

// Both dense layers follow the pooling.
TEST(GgufEncoder, OfEmbeddingGemma) {
  const auto golden = ReadEncoderGolden(
      SourcePath("tests/golden/encoders/gemma3-bidirectional/golden.safetensors"));
  GgufParts parts = EncoderParts("gemma3-bidirectional");
  const ModelSpec spec = EncoderSpec(parts);
  EXPECT_EQ(spec.attention(0).window, 7);
  EXPECT_EQ(spec.attention(1).window, std::nullopt);
  ASSERT_EQ(spec.pooling->dense.size(), 2u);
  EXPECT_EQ(spec.pooling->dense[0].width, 48);
  const auto all = TextsOf(EncoderFile("gemma3-bidirectional"), *golden);
  std::vector<std::vector<float>> matrices;
  for (const std::string module : {"dense_2", "dense_3"}) {
    const GgufTensorBytes tensor = parts.Tensor(module + ".weight");
    std::vector<float>& matrix = matrices.emplace_back();
    for (size_t i = 0; i < tensor.data.size(); i += 2) {  // BF16
      const uint32_t bits = (static_cast<uint32_t>(static_cast<uint8_t>(tensor.data[i])) << 16) |
                            (static_cast<uint32_t>(static_cast<uint8_t>(tensor.data[i + 1])) << 24);
      matrix.push_back(std::bit_cast<float>(bits));
    }
    RemoveTensor(parts, tensor.name);
    for (const char* key : {"_feat_in", "_feat_out"}) {
      parts.Remove("gemma-embedding." + module + key);
    }
  }
  TempFolder folder;
  WriteFile(folder.path() / "a.gguf", GgufBytes(parts));
  const auto pooled = TextsOf(folder.path() / "a.gguf", *golden);
  ASSERT_EQ(pooled.size(), all.size());
  for (size_t t = 0; t < all.size(); ++t) {
    std::vector<double> vector(pooled[t].begin(), pooled[t].end());
    for (const std::vector<float>& matrix : matrices) {
      std::vector<double> next(matrix.size() / vector.size());
      for (size_t i = 0; i < matrix.size(); ++i) {
        next[i / vector.size()] += vector[i % vector.size()] * matrix[i];
      }
      vector = next;
    }
    ASSERT_EQ(all[t].size(), vector.size());
    for (size_t i = 0; i < vector.size(); ++i) EXPECT_NEAR(all[t][i], vector[i], 1e-3);
  }
}

// Decoders with a pooling make vectors; with other attention, encoders.
TEST(GgufEncoder, OfDecoders) {
  GgufParts parts = EncoderParts("qwen3-vectors");
  ModelSpec spec = EncoderSpec(parts);
  EXPECT_EQ(spec.kind, ModelKind::kDecoder);
  EXPECT_EQ(spec.head.kind, HeadKind::kNone);
  EXPECT_EQ(spec.pooling->kind, PoolingKind::kLast);
  EXPECT_TRUE(spec.pooling->normalize);
  parts.Set(GgufBool("qwen3.attention.causal", 0));
  spec = EncoderSpec(parts);
  EXPECT_EQ(spec.kind, ModelKind::kEncoder);
  EXPECT_FALSE(IsCausal(spec, spec.attention(0)));
  parts.Remove("qwen3.pooling_type");
  EXPECT_EQ(EncoderSpec(parts).pooling->kind, PoolingKind::kMean);
  parts.Remove("qwen3.attention.causal");
  EXPECT_EQ(EncoderSpec(parts).head.kind, HeadKind::kLanguageModel);
}

// The rows of Qwen3-Reranker's files are those of "yes" and "no"; the last label's score counts.
TEST(GgufEncoder, OfRerankers) {
  const auto golden =
      ReadEncoderGolden(SourcePath("tests/golden/encoders/qwen3-vectors/golden.safetensors"));
  const auto rows = TextsOf(EncoderFile("qwen3-vectors"), *golden);
  GgufParts parts = EncoderParts("qwen3-vectors");
  parts.Set(GgufU32("qwen3.pooling_type", 4));
  parts.Set(GgufTexts("qwen3.classifier.output_labels", {"yes", "no"}));
  std::vector<float> matrix(64);
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = std::sin(static_cast<float>(i));
  parts.tensors.push_back({"cls.output.weight",
                           {2, 32},
                           0,
                           std::string(reinterpret_cast<const char*>(matrix.data()), 256),
                           std::nullopt});
  const ModelSpec spec = EncoderSpec(parts);
  EXPECT_EQ(spec.head.labels, (std::vector<std::string>{"no", "yes"}));
  EXPECT_EQ(spec.head.scores, LabelScores::kSoftmax);
  TempFolder folder;
  WriteFile(folder.path() / "a.gguf", GgufBytes(parts));
  const auto found = TextsOf(folder.path() / "a.gguf", *golden);
  ASSERT_EQ(found.size(), rows.size());
  for (size_t t = 0; t < rows.size(); ++t) {
    ASSERT_EQ(found[t].size(), 2u);
    for (size_t label = 0; label < 2; ++label) {
      double sum = 0.0;
      for (size_t i = 0; i < 32; ++i) sum += double{rows[t][i]} * matrix[(1 - label) * 32 + i];
      EXPECT_NEAR(found[t][label], sum, 1e-4);
    }
  }
}

// The rows before the head are scaled if it is the table of tokens, or if networks have no gate.
TEST(GgufEncoder, OfT5) {
  const double root = 1.0 / std::sqrt(32.0);
  ModelSpec spec = EncoderSpec(EncoderParts("t5"));
  EXPECT_EQ(spec.output_scale, root);
  EXPECT_EQ(spec.num_layers(), 3);
  EXPECT_EQ(spec.encoder->num_layers(), 2);
  EXPECT_EQ(spec.max_position_embeddings, 4096);
  EXPECT_EQ(spec.feed_forward(0).expert.activation, ActivationKind::kRelu);
  GgufParts parts = EncoderParts("t5-gated-untied");
  spec = EncoderSpec(parts);
  EXPECT_EQ(spec.output_scale, 1.0);
  EXPECT_FALSE(spec.tie_word_embeddings);
  EXPECT_EQ(spec.feed_forward(0).expert.activation, ActivationKind::kGeluTanh);
  RemoveTensor(parts, "output.weight");
  EXPECT_EQ(EncoderSpec(parts).output_scale, root);
}

// ---- refused files

struct EncoderDamage {
  std::string name;
  std::string file;
  std::function<void(GgufParts&)> change;
  std::vector<std::string> message;
};
void PrintTo(const EncoderDamage& d, std::ostream* out) { *out << d.name; }

EncoderDamage WithKey(std::string name, std::string file, const GgufKey& key,
                      std::vector<std::string> message) {
  return {std::move(name), std::move(file), [key](GgufParts& p) { p.Set(key); },
          std::move(message)};
}
EncoderDamage Without(std::string name, std::string file, const std::string& key_or_tensor,
                      std::vector<std::string> message) {
  return {std::move(name), std::move(file),
          [key_or_tensor](GgufParts& p) {
            p.Remove(key_or_tensor);
            RemoveTensor(p, key_or_tensor);
          },
          std::move(message)};
}

class GgufEncoderDamage : public ::testing::TestWithParam<EncoderDamage> {};

TEST_P(GgufEncoderDamage, IsRefused) {
  GgufParts parts = EncoderParts(GetParam().file);
  GetParam().change(parts);
  EXPECT_TRUE(Mentions(LoadParts(parts).status(), GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    Keys, GgufEncoderDamage,
    ::testing::Values(
        WithKey("Architecture", "bert-vectors", GgufText("general.architecture", "jina-bert-v2"),
                {"general.architecture: expected", "\"bert\"", "\"t5encoder\"",
                 "found \"jina-bert-v2\""}),
        Without("NoEps", "bert-vectors", "bert.attention.layer_norm_epsilon",
                {"bert.attention.layer_norm_epsilon: expected a finite number, found no such key"}),
        WithKey("LayersMany", "bert-vectors", GgufU32("bert.block_count", 2'000'000'000),
                {"bert.block_count: expected an integer in [1, ", "found 2000000000"}),
        WithKey("LayersMore", "bert-vectors", GgufU32("bert.block_count", 3),
                {"blk.2.", "is missing"}),
        WithKey("Causal", "bert-vectors", GgufBool("bert.attention.causal", 1),
                {"bert.attention.causal: expected false, found true"}),
        WithKey("Pooling", "bert-vectors", GgufU32("bert.pooling_type", 9),
                {"bert.pooling_type: expected 0 (none), 1 (mean)", "found 9"}),
        WithKey("RankWithoutScores", "bert-vectors", GgufU32("bert.pooling_type", 4),
                {"bert.pooling_type: expected 1 (mean), 2 (cls) or 3 (last), found 4 (rank), but "
                 "no tensor \"cls.output.weight\""}),
        WithKey("Types", "bert-vectors", GgufU32("tokenizer.ggml.token_type_count", 3),
                {"tokenizer.ggml.token_type_count: expected 2 (the rows of token_types.weight), "
                 "found 3"}),
        WithKey("Positions", "bert-vectors", GgufU32("bert.context_length", 512),
                {"tensor \"position_embd.weight\": expected shape [512, 32]",
                 "bert.context_length"}),
        WithKey("Alibi", "bert-vectors", GgufF32("bert.attention.max_alibi_bias", 8.0f),
                {"bert.attention.max_alibi_bias: expected 0"}),
        WithKey("Unknown", "bert-vectors", GgufU32("bert.something", 1),
                {"bert.something: expected no such key"}),
        WithKey("LabelsOther", "roberta-cross-encoder",
                GgufTexts("bert.classifier.output_labels", {"a", "b"}),
                {"bert.classifier.output_labels: expected an array of 1 strings (the rows of "
                 "cls.output.weight)"}),
        WithKey("LabelsNoText", "roberta-cross-encoder",
                GgufTexts("bert.classifier.output_labels", {"\xFF\xFE"}),
                {"classifier.output_labels: expected UTF-8"}),
        Without("NoLayerOfScores", "roberta-cross-encoder", "cls.weight",
                {"tensor \"cls.weight\": expected the layer in front of the scores"}),
        WithKey("ExpertsHuge", "nomic-experts", GgufU32("nomic-bert-moe.expert_count", 0x7FFFFFFF),
                {"nomic-bert-moe.expert_count: expected at least 1 expert", "found 2147483647"}),
        WithKey("PeriodZero", "nomic-experts", GgufU32("nomic-bert-moe.moe_every_n_layers", 0),
                {"nomic-bert-moe.moe_every_n_layers: expected an integer of at least 1, found 0"}),
        WithKey("PeriodOther", "nomic-experts", GgufU32("nomic-bert-moe.moe_every_n_layers", 4),
                {"blk.3."}),
        WithKey("Yarn", "nomic-dense", GgufText("nomic-bert.rope.scaling.type", "yarn"),
                {"nomic-bert.rope.scaling.type: expected \"none\", found \"yarn\""}),
        WithKey("Activation", "modernbert-vectors",
                GgufText("modern-bert.hidden_activation", "mish"),
                {"modern-bert.hidden_activation: expected gelu", "found \"mish\""}),
        WithKey("ModernPeriod", "modernbert-vectors",
                GgufU32("modern-bert.attention.sliding_window_pattern", 0),
                {"modern-bert.attention.sliding_window_pattern: expected an integer of at least "
                 "1, found 0"}),
        WithKey("ScoredBy", "modernbert-names", GgufU32("modern-bert.classifier.pooling_type", 3),
                {"modern-bert.classifier.pooling_type: expected 1 (mean) or 2 (cls), found 3"}),
        WithKey("GemmaCausal", "gemma3-bidirectional",
                GgufBool("gemma-embedding.attention.causal", 1),
                {"gemma-embedding.attention.causal: expected false, found true"}),
        WithKey("DenseSize", "gemma3-bidirectional",
                GgufU32("gemma-embedding.dense_2_feat_out", 40),
                {"gemma-embedding.dense_2_feat_out: expected 48 (dense_2.weight is [48, 32]), "
                 "found 40"}),
        Without("NoDense", "gemma3-bidirectional", "dense_3.weight",
                {"gemma-embedding.dense_3_feat_in: expected a tensor \"dense_3.weight\" of this "
                 "size, found no such tensor"}),
        WithKey("BucketsZero", "t5", GgufU32("t5.attention.relative_buckets_count", 0),
                {"t5.attention.relative_buckets_count: expected", "found 0"}),
        WithKey("StartOutside", "t5", GgufU32("t5.decoder_start_token_id", 96),
                {"t5.decoder_start_token_id: expected", "found 96"}),
        WithKey("DecoderLayers", "t5", GgufU32("t5.decoder_block_count", 0),
                {"t5.decoder_block_count: expected an integer in [1, ", "found 0"}),
        WithKey("PairPooling", "t5", GgufU32("t5.pooling_type", 1),
                {"t5.pooling_type: expected 0, found 1"})),
    [](const auto& info) { return info.param.name; });

// Windows that reach to both sides are those of EmbeddingGemma alone.
TEST(GgufEncoder, OfDecodersWithWindowsIsRefused) {
  GgufParts parts =
      PartsOf(ReadFile(SourcePath("tests/golden/gguf/models/gemma3-old-keys-bf16.gguf")));
  parts.Set(GgufBool("gemma3.attention.causal", 0));
  EXPECT_TRUE(Mentions(LoadParts(parts).status(),
                       {"gemma3.attention.causal: expected true, found false, which this server "
                        "does not support here"}));
}

}  // namespace
}  // namespace moeserve::testing
