// Encoders and encoder-decoders in checkpoints of fairseq: what is read of the models that
// tests/reference/fairseq/make_fairseq_text_goldens.py wrote, and what is refused. The tests of the
// engine compare their answers.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "model_loaders/architectures/native/describe.h"
#include "model_loaders/checkpoint/fairseq_files.h"
#include "model_loaders/files/torch/torch_file.h"
#include "model_loaders/inspect.h"
#include "model_loaders/write/convert_folder.h"
#include "tests/model_loaders/fairseq_support.h"
#include "tests/model_loaders/support.h"
#include "tests/model_loaders/torch_bytes.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

fs::path TextsGolden(const std::string& name) {
  const fs::path encoder = SourcePath("tests/golden/encoders/" + name);
  return fs::exists(encoder) ? encoder : SourcePath("tests/golden/pairs/" + name);
}

const std::vector<std::string>& TextsModels() {
  static const std::vector<std::string> names = {"fairseq-xmoe-mlm",
                                                 "fairseq-xmoe-mlm-inserted",
                                                 "fairseq-mlm-deepnorm",
                                                 "fairseq-mlm-plain-head",
                                                 "fairseq-classifier",
                                                 "fairseq-xmoe-mt",
                                                 "fairseq-smoe-mt-average",
                                                 "fairseq-moa",
                                                 "fairseq-moa-routed-feed-forward",
                                                 "fairseq-transformer"};
  return names;
}

// A copy of a golden model's files that a test can change.
class TextsCopy {
 public:
  explicit TextsCopy(const std::string& name) {
    for (const auto& entry : fs::directory_iterator(TextsGolden(name))) {
      if (entry.path().extension() == ".pt") fs::copy(entry.path(), folder_.path());
    }
  }
  absl::Status Load(Json options) const {
    options["model_type"] = "torchscale";
    WriteFile(path() / "config.json", options.dump());
    return LoadModel(path()).status();
  }
  const fs::path& path() const { return folder_.path(); }

 private:
  TempFolder folder_;
};

TEST(FairseqTexts, ConvertedFoldersHaveTheSameSpec) {
  for (const std::string& name : TextsModels()) {
    SCOPED_TRACE(name);
    const auto original = LoadModel(TextsGolden(name));
    ASSERT_TRUE(original.ok()) << original.status();
    TempFolder folder;
    const auto converted = ConvertFolder(TextsGolden(name), folder.path() / "native");
    ASSERT_TRUE(converted.ok()) << converted.status();
    const auto native = LoadModel(folder.path() / "native");
    ASSERT_TRUE(native.ok()) << native.status();
    EXPECT_EQ(native->spec.num_blocks(), original->spec.num_blocks());
    EXPECT_EQ(PromptVocabulary(native->spec), PromptVocabulary(original->spec));
    EXPECT_EQ(native->spec.head.labels, original->spec.head.labels);
  }
}

TEST(FairseqTexts, XMoeMaskedLm) {
  const auto checkpoint = LoadModel(TextsGolden("fairseq-xmoe-mlm"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const ModelSpec& spec = checkpoint->spec;
  EXPECT_EQ(spec.kind, ModelKind::kEncoder);
  EXPECT_EQ(spec.head.kind, HeadKind::kMaskedLm);
  ASSERT_TRUE(spec.head.layer.has_value());
  EXPECT_TRUE(spec.head.layer->norm);
  EXPECT_EQ(spec.head.layer->activation, ActivationKind::kGelu);
  EXPECT_TRUE(spec.head_bias);
  EXPECT_TRUE(spec.tie_word_embeddings);
  EXPECT_TRUE(spec.embedding_norm);
  EXPECT_EQ(spec.norm.placement, NormPlacement::kPost);
  EXPECT_EQ(spec.position.kind, PositionKind::kLearned);
  EXPECT_FALSE(spec.position.count_padding);
  EXPECT_EQ(spec.pad_token_id, 1);
  EXPECT_EQ(spec.max_position_embeddings, 160);
  EXPECT_FALSE(spec.feed_forward(0).routed());
  ASSERT_TRUE(spec.feed_forward(1).routed());
  EXPECT_EQ(spec.feed_forward(1).routing->score.kind, ScoreKind::kCosine);
  EXPECT_FALSE(Contains(checkpoint->notes, "padding: "));
}

// X-MoE inserts layers of experts alone, which the number of layers does not count.
TEST(FairseqTexts, InsertedExperts) {
  const auto checkpoint = LoadModel(TextsGolden("fairseq-xmoe-mlm-inserted"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const ModelSpec& spec = checkpoint->spec;
  ASSERT_EQ(spec.num_layers(), 3);
  EXPECT_EQ(spec.FindBlock(1, BlockKind::kAttention), nullptr);
  const BlockSpec& inserted = *spec.FindBlock(1, BlockKind::kFeedForward);
  EXPECT_EQ(inserted.residual.norm_placement, NormPlacement::kNone);
  EXPECT_TRUE(inserted.feed_forward()->expert.residual);
  EXPECT_EQ(inserted.feed_forward()->expert.depth, 3);
  EXPECT_EQ(inserted.routing()->select.k, 1);
  EXPECT_FALSE(spec.feed_forward(0).routed());
  EXPECT_FALSE(spec.feed_forward(2).routed());
  ASSERT_TRUE(spec.relative_bias.has_value());
  EXPECT_TRUE(spec.relative_bias->bidirectional);
}

TEST(FairseqTexts, DeepNormDependsOnBothStacks) {
  const auto alone = LoadModel(TextsGolden("fairseq-mlm-deepnorm"));
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_DOUBLE_EQ(alone->spec.residual_scale, std::pow(6.0, -0.25));
  EXPECT_FLOAT_EQ(alone->spec.norm.outer_eps.value_or(0.0f), 1e-5f);
  const auto plain = LoadModel(TextsGolden("fairseq-mlm-plain-head"));
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_FALSE(plain->spec.tie_word_embeddings);
  EXPECT_FALSE(plain->spec.head.layer.has_value());
  const auto pair = LoadModel(TextsGolden("fairseq-xmoe-mt"));
  ASSERT_TRUE(pair.ok()) << pair.status();
  EXPECT_DOUBLE_EQ(pair->spec.residual_scale, std::pow(6.0, -0.25));
  EXPECT_DOUBLE_EQ(pair->spec.encoder->residual_scale,
                   1.0 / (0.81 * std::pow(81.0 * 2.0, 1.0 / 16)));
}

// Two dictionaries: the decoder's matrix is also the head, the encoder has another one.
TEST(FairseqTexts, TranslatorWithTwoDictionaries) {
  const auto checkpoint = LoadModel(TextsGolden("fairseq-xmoe-mt"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const ModelSpec& spec = checkpoint->spec;
  EXPECT_EQ(spec.kind, ModelKind::kEncoderDecoder);
  EXPECT_FALSE(spec.share_embeddings);
  EXPECT_EQ(spec.vocab_size, 37);
  EXPECT_EQ(PromptVocabulary(spec), 45);
  EXPECT_EQ(LargestVocabulary(spec), 45);
  EXPECT_EQ(DescribeModel(spec).find("vocabulary 37 (of sources 45), hidden size 16, "), 0u);
  EXPECT_EQ(Summarize(spec).embedding_parameters, (45 + 37 + 37) * 16);
  EXPECT_EQ(spec.decoder_start_token_id, 2);
  EXPECT_EQ(checkpoint->eos_token_ids, std::vector<TokenId>{2});
  EXPECT_EQ(spec.encoder->num_layers(), 3);
  EXPECT_EQ(spec.num_layers(), 2);
  EXPECT_TRUE(spec.encoder->feed_forward(1).routed());
  EXPECT_TRUE(spec.feed_forward(1).routed());
  EXPECT_NE(spec.FindBlock(0, BlockKind::kCrossAttention), nullptr);
}

TEST(FairseqTexts, MoaTranslatorHasRoutedAttentionToTheSource) {
  const auto checkpoint = LoadModel(TextsGolden("fairseq-moa"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const ModelSpec& spec = checkpoint->spec;
  EXPECT_TRUE(spec.share_embeddings);
  EXPECT_TRUE(spec.tie_word_embeddings);
  EXPECT_EQ(spec.norm.placement, NormPlacement::kPost);
  const AttentionSpec& cross = *spec.FindBlock(1, BlockKind::kCrossAttention)->cross_attention();
  ASSERT_TRUE(cross.routed());
  EXPECT_EQ(cross.routing->num_experts, 5);
  EXPECT_EQ(cross.routing->select.k, 2);
  EXPECT_EQ(spec.encoder->attention(0).routing->select.k, 3);
  EXPECT_TRUE(Contains(checkpoint->notes, "weights of selected heads: "));
}

TEST(FairseqTexts, ClassifierReadsTheFirstRow) {
  const auto checkpoint = LoadModel(TextsGolden("fairseq-classifier"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const ModelSpec& spec = checkpoint->spec;
  EXPECT_EQ(spec.head.kind, HeadKind::kSequenceClassification);
  EXPECT_EQ(spec.head.labels.size(), 5u);
  EXPECT_EQ(spec.head.layer->activation, ActivationKind::kTanh);
  ASSERT_TRUE(spec.pooling.has_value());
  EXPECT_EQ(spec.pooling->kind, PoolingKind::kFirst);
  EXPECT_TRUE(Contains(checkpoint->notes, "\"sentence_classification_head\""));
}

struct TextsRefusal {
  std::string model;
  Json options;
  std::vector<std::string> message;
};

TEST(FairseqTexts, ContradictoryOptionsAreRefused) {
  const std::string mlm = "fairseq-xmoe-mlm", inserted = "fairseq-xmoe-mlm-inserted";
  const std::string mt = "fairseq-xmoe-mt", joined = "fairseq-smoe-mt-average";
  const std::string moa = "fairseq-moa", dense = "fairseq-transformer";
  const std::string deepnorm = "fairseq-mlm-deepnorm", subln = "fairseq-classifier";
  const std::vector<TextsRefusal> refusals = {
      {mlm, {{"encoder_layers", 0}}, {"encoder_layers: expected an integer in [1, "}},
      {mlm, {{"encoder_layers", 3}}, {"encoder.layers.2.", "is missing"}},
      {mlm, {{"encoder_layers", 1}}, {"expected no such tensor", "encoder_layers is 1"}},
      {mlm, {{"encoder_embed_dim", nullptr}}, {"encoder_embed_dim: expected an integer"}},
      {mlm, {{"encoder_attention_heads", 5}}, {"a divisor of encoder_embed_dim, which is 16"}},
      {mlm,
       {{"encoder_ffn_embed_dim", 20}},
       {"encoder.layers.0.ffn.fc1.weight\": expected shape [20, 16]", "encoder_ffn_embed_dim"}},
      {mlm,
       {{"encoder_normalize_before", true}},
       {"encoder_normalize_before: expected false (the files do not have "
        "encoder.layer_norm.weight)"}},
      {mlm,
       {{"encoder_learned_pos", false}},
       {"encoder.embed_positions.weight", "expected no such tensor"}},
      {mlm,
       {{"max_source_positions", 100}},
       {"expected shape [102, 16]", "max_source_positions + 2", "found [162, 16]"}},
      {mlm, {{"moe_freq", 1}}, {"moe_freq: expected a number with which layer 0 is dense"}},
      {mlm, {{"moe_expert_count", 3}}, {"moe_expert_count"}},
      {mlm, {{"use_xmoe", false}}, {"use_xmoe: expected true"}},
      {mlm, {{"encoder_shape", 5}}, {"encoder_shape: expected no such option"}},
      {mlm, {{"xpos_rel_pos", true}}, {"xpos_rel_pos: expected false (XPOS in an encoder"}},
      {mlm, {{"subln", true}}, {"subln: expected false (the files do not have encoder.layers.0."}},
      {mlm, {{"layernorm_eps", 1e-3}}, {"layernorm_eps: expected 1e-05 (the head of masked"}},
      {inserted, {{"base_sublayers", 2}}, {"base_sublayers: expected 3 (the files have"}},
      {inserted, {{"encoder_layers", 3}}, {"encoder.layers.3."}},
      {deepnorm, {{"encoder_layers", 4}}, {"encoder.layers.3."}},
      {deepnorm, {{"layernorm_eps", 1e-3}}, {"layernorm_eps: expected 1e-05 (the head of masked"}},
      {subln, {{"subln", false}}, {"subln: expected true (the files have encoder.layers.0."}},
      {subln, {{"pooler_activation_fn", "softmax"}}, {"pooler_activation_fn: expected"}},
      {mt, {{"no_cross_attention", true}}, {"no_cross_attention: expected false"}},
      {mt, {{"cross_self_attention", true}}, {"cross_self_attention: expected false"}},
      {mt, {{"decoder_embed_dim", 20}}, {"encoder_embed_dim: expected 20"}},
      {mt,
       {{"rel_pos_buckets", 14}, {"max_rel_pos", 20}},
       {"rel_pos_buckets: expected 0 (biases of relative positions in attention to a source"}},
      {mt,
       {{"encoder_ffn_embed_dim", 20}},
       {"encoder.layers.0.ffn.fc1.weight\": expected shape [20, 16]", "encoder_ffn_embed_dim"}},
      {mt,
       {{"decoder_ffn_embed_dim", 20}},
       {"decoder.layers.0.ffn.fc1.weight\": expected shape [20, 16]", "decoder_ffn_embed_dim"}},
      {mt,
       {{"share_decoder_input_output_embed", false}, {"decoder_layers", 3}},
       {"decoder.layers.2."}},
      {joined,
       {{"encoder_normalize_before", false}, {"subln", false}},
       {"encoder_normalize_before: expected true"}},
      {joined, {{"decoder_learned_pos", false}}, {"decoder.embed_positions.weight"}},
      {moa, {{"num_expert", 0}}, {"num_expert: expected an integer in [1, "}},
      {moa, {{"num_expert", 4}}, {"expected shape [4, ", "num_expert"}},
      {moa,
       {{"encoder_attention_heads", 9}},
       {"encoder_attention_heads: expected an integer in [1, 5], found 9"}},
      {moa,
       {{"decoder_attention_heads", 9}},
       {"decoder_attention_heads: expected an integer in [1, 5], found 9"}},
      {moa,
       {{"head_dim", 4}},
       {"decoder.layers.0.encoder_attn.k_proj.weight", "[1 * head_dim, decoder_embed_dim]"}},
      {moa, {{"scale_heads", true}}, {"scale_heads: expected false"}},
      {dense,
       {{"encoder_xformers_att_config", "{}"}},
       {"encoder_xformers_att_config: expected null"}},
      {dense, {{"no_decoder_final_norm", false}}, {"decoder_normalize_before: expected false"}},
  };
  for (const TextsRefusal& refusal : refusals) {
    const absl::Status status = TextsCopy(refusal.model).Load(refusal.options);
    EXPECT_TRUE(Mentions(status, refusal.message)) << refusal.model << " " << refusal.options;
  }
}

// Files that were cut or changed give errors and nothing else.
TEST(FairseqTexts, DamagedFiles) {
  for (const std::string& name : TextsModels()) {
    const TextsCopy copy(name);
    for (const auto& entry : fs::directory_iterator(copy.path())) {
      const std::string bytes = ReadFile(entry.path());
      for (const size_t parts : {2, 3, 7}) {
        WriteFile(entry.path(), bytes.substr(0, bytes.size() / parts));
        EXPECT_FALSE(LoadModel(copy.path()).ok()) << entry.path();
      }
      std::string changed = bytes;
      for (size_t at = 40; at < changed.size(); at += 97) changed[at] ^= 0x55;
      WriteFile(entry.path(), changed);
      EXPECT_FALSE(LoadModel(copy.path()).ok()) << entry.path();
      WriteFile(entry.path(), bytes);
    }
    EXPECT_TRUE(LoadModel(copy.path()).ok()) << name;
  }
}

// The matrices of one file, with its options in config.json, for tests that change them.
class RewrittenTexts {
 public:
  explicit RewrittenTexts(const std::string& model, const std::string& file) {
    const auto opened = TorchFile::Open(TextsGolden(model) / file);
    EXPECT_TRUE(opened.ok()) << opened.status();
    const auto state = TorchStateDict::Make(**opened, *(*opened)->root().Get("model"));
    EXPECT_TRUE(state.ok()) << state.status();
    for (const TensorEntry& entry : (*state)->tensors()) {
      const auto data = (*state)->Read(entry);
      EXPECT_TRUE(data.ok()) << data.status();
      tensors.push_back(
          {entry.name, std::string(Name(entry.type)), entry.shape, std::string(data->bytes)});
    }
    options = (*ReadFairseqOptions((*opened)->root()))->values;
    options["model_type"] = "torchscale";
  }

  RawTensor& operator[](const std::string& name) {
    for (RawTensor& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    ADD_FAILURE() << name;
    return tensors[0];
  }
  void Remove(const std::string& name) {
    std::erase_if(tensors, [&](const RawTensor& t) { return t.name == name; });
  }
  Result<Checkpoint> Load() const {
    WriteFile(folder_.path() / "model.pt", StateDictBytes(tensors));
    WriteFile(folder_.path() / "config.json", options.dump());
    return LoadModel(folder_.path());
  }

  std::vector<RawTensor> tensors;
  Json options;

 private:
  TempFolder folder_;
};

TEST(FairseqTexts, OneTableOfBothStacksMayBeStoredOnceOrTwice) {
  RewrittenTexts model("fairseq-moa", "checkpoint_best.pt");
  EXPECT_TRUE(model.Load()->spec.share_embeddings);
  RewrittenTexts once("fairseq-moa", "checkpoint_best.pt");
  once.Remove("encoder.embed_tokens.weight");
  once.Remove("decoder.output_projection.weight");
  ASSERT_TRUE(once.Load().ok()) << once.Load().status();
  EXPECT_TRUE(once.Load()->spec.share_embeddings);
  RewrittenTexts other("fairseq-moa", "checkpoint_best.pt");
  other.Remove("decoder.embed_tokens.weight");
  ASSERT_TRUE(other.Load().ok()) << other.Load().status();
  EXPECT_TRUE(other.Load()->spec.tie_word_embeddings);
  model["encoder.embed_tokens.weight"].bytes.back() ^= 1;
  const auto two = model.Load();
  ASSERT_TRUE(two.ok()) << two.status();
  EXPECT_FALSE(two->spec.share_embeddings);
  EXPECT_TRUE(Contains(two->notes, "embeddings: one matrix for both stacks according to"));
  once.Remove("decoder.embed_tokens.weight");
  EXPECT_TRUE(Mentions(once.Load().status(), {"embed_tokens.weight\": expected a matrix"}));
}

TEST(FairseqTexts, MissingTensorsAreNamed) {
  RewrittenTexts model("fairseq-moa", "checkpoint_best.pt");
  model.Remove("decoder.layers.1.encoder_attn.q_proj.w_gate");
  EXPECT_TRUE(Mentions(model.Load().status(),
                       {"decoder.layers.1.encoder_attn.q_proj.w_gate\" is missing"}));
  RewrittenTexts shape("fairseq-transformer", "average.pt");
  shape["encoder.layers.0.fc1.bias"].shape = {12, 2};
  EXPECT_TRUE(Mentions(shape.Load().status(),
                       {"encoder.layers.0.fc1.bias\": expected shape [24]", "found [12, 2]"}));
}

TEST(FairseqTexts, SeveralHeadsOfClassificationAreLeftOut) {
  RewrittenTexts model("fairseq-classifier", "checkpoint_best.pt");
  const std::string old = "classification_heads.sentence_classification_head.";
  const std::vector<RawTensor> tensors = model.tensors;
  for (const RawTensor& tensor : tensors) {
    if (!tensor.name.starts_with(old)) continue;
    RawTensor copy = tensor;
    copy.name = "classification_heads.other." + tensor.name.substr(old.size());
    model.tensors.push_back(std::move(copy));
  }
  const auto checkpoint = model.Load();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->spec.head.kind, HeadKind::kMaskedLm);
  EXPECT_TRUE(Contains(checkpoint->notes, "2 heads of classification"));
}

}  // namespace
}  // namespace moeserve::testing
