// Checkpoints of fairseq: the models that tests/reference/fairseq/make_fairseq_goldens.py wrote,
// and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "base/error_text.h"
#include "model_loaders/architectures/fairseq/options.h"
#include "model_loaders/checkpoint/fairseq_files.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/files/torch/torch_file.h"
#include "model_loaders/write/convert_folder.h"
#include "nlohmann/json.hpp"
#include "tests/model_loaders/fairseq_support.h"
#include "tests/model_loaders/support.h"
#include "tests/model_loaders/torch_bytes.h"
#include "tests/support/family_cases.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// Returns the largest difference from the expected log-probabilities; infinity if the model cannot
// be loaded.
double WorstDifference(const fs::path& model, const FamilyAnswers& answers) {
  auto runner = ModelRunner::Load(model);
  EXPECT_TRUE(runner.ok()) << runner.status();
  if (!runner.ok()) return HUGE_VAL;
  double worst = 0.0;
  for (int p = 0; p < answers.prompts; ++p) {
    const std::vector<float> logits = (*runner)->Run(answers.Prompt(p), answers.length);
    for (int i = 0; i < answers.length; ++i) {
      const float* const row = logits.data() + int64_t{i} * answers.vocab;
      const float* const expected =
          answers.logprobs.data() + (int64_t{p} * answers.length + i) * answers.vocab;
      for (int t = 0; t < answers.vocab; ++t) {
        const double error = std::abs(LogSoftmaxAt(row, answers.vocab, t) - expected[t]);
        if (!(error <= worst)) worst = error;
      }
    }
  }
  return worst;
}

class FairseqModel : public ::testing::TestWithParam<FamilyCase> {
 protected:
  void SetUp() override {
    auto answers = ReadFamilyAnswers(GetParam().folder);
    ASSERT_TRUE(answers.ok()) << answers.status();
    answers_ = *std::move(answers);
  }

  FamilyAnswers answers_;
};

TEST_P(FairseqModel, LogprobsInF32) {
  const double worst = WorstDifference(GetParam().folder, answers_);
  std::printf("%s: largest difference %.2e\n", GetParam().name.c_str(), worst);
  EXPECT_LE(worst, 1e-4);
}

// Continues the prompts through the cache, one token per step, up to the first near tie.
TEST_P(FairseqModel, GreedyTokensInF32) {
  auto runner = ModelRunner::Load(GetParam().folder);
  ASSERT_TRUE(runner.ok()) << runner.status();
  for (int p = 0; p < answers_.prompts; ++p) {
    std::vector<float> logits = (*runner)->Run(answers_.Prompt(p), answers_.length);
    for (int i = 0; i < answers_.continuation; ++i) {
      const size_t at = static_cast<size_t>(p * answers_.continuation + i);
      if (answers_.margin[at] < 2e-4) break;
      const float* row = logits.data() + logits.size() - static_cast<size_t>(answers_.vocab);
      const int token = static_cast<int>(std::max_element(row, row + answers_.vocab) - row);
      ASSERT_EQ(token, answers_.greedy[at]) << "prompt " << p << ", step " << i;
      logits = (*runner)->Run({token}, 1, answers_.length + i);
    }
  }
}

// Every file of a checkpoint stands for all of it.
TEST_P(FairseqModel, FilesStandForTheirCheckpoint) {
  const auto folder = LoadModel(GetParam().folder);
  ASSERT_TRUE(folder.ok()) << folder.status();
  int files = 0;
  for (const auto& entry : fs::directory_iterator(GetParam().folder)) {
    if (entry.path().extension() != ".pt") continue;
    ++files;
    const auto file = LoadModel(entry.path());
    ASSERT_TRUE(file.ok()) << entry.path() << ": " << file.status();
    EXPECT_EQ(file->identity.state, folder->identity.state);
    EXPECT_EQ(file->weight_bytes, folder->weight_bytes);
  }
  EXPECT_GT(files, 0);
}

// The native folder that `moeserve convert` writes is the same model.
TEST_P(FairseqModel, ConvertedFolderHasItsLogprobs) {
  TempFolder folder;
  const auto converted = ConvertFolder(GetParam().folder, folder.path() / "native");
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_LE(WorstDifference(folder.path() / "native", answers_), 1e-4);
}

INSTANTIATE_TEST_SUITE_P(Fairseq, FairseqModel, ::testing::ValuesIn(FairseqCases()),
                         [](const auto& info) { return TestName(info.param); });

TEST(FairseqSpec, XMoeRouterIsThatOfTheOriginalCode) {
  const auto checkpoint = LoadModel(FairseqGolden("xmoe-two-ranks"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const ModelSpec& spec = checkpoint->spec;
  ASSERT_EQ(spec.num_layers(), 2);
  EXPECT_FALSE(spec.feed_forward(0).routed());
  ASSERT_TRUE(spec.feed_forward(1).routed());
  const RoutedLayerSpec& routing = *spec.feed_forward(1).routing;
  EXPECT_EQ(routing.num_experts, 4);
  EXPECT_EQ(routing.select.k, 2);
  EXPECT_TRUE(routing.renormalize);
  EXPECT_EQ(routing.score.kind, ScoreKind::kCosine);
  EXPECT_EQ(routing.score.dim, 16);
  EXPECT_FALSE(routing.score.normalize_row);
  EXPECT_EQ(routing.score.temperature, TemperatureKind::kNone);
  EXPECT_TRUE(spec.tie_word_embeddings);
  EXPECT_EQ(spec.position.kind, PositionKind::kSinusoidal);
  EXPECT_EQ(spec.position.first, 2);
  EXPECT_EQ(spec.max_position_embeddings, 40);
  EXPECT_EQ(spec.embedding_scale, 4.0);
  EXPECT_EQ(spec.bos_token_id, 0);
  EXPECT_EQ(checkpoint->eos_token_ids, std::vector<TokenId>{2});
  for (const char* part : {"second experts: ", "at random", "X-MoE: ", "capacity: ", "padding: "}) {
    EXPECT_TRUE(Contains(checkpoint->notes, part)) << part;
  }
}

TEST(FairseqSpec, MhMoeSplitsTokens) {
  const auto checkpoint = LoadModel(FairseqGolden("mhmoe-xmoe-kv-heads"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const AttentionSpec& attention = checkpoint->spec.attention(0);
  const FeedForwardSpec& feed_forward = checkpoint->spec.feed_forward(0);
  const RoutedLayerSpec& routing = *feed_forward.routing;
  EXPECT_EQ(routing.split.heads, 2);
  EXPECT_TRUE(routing.split.projection);
  EXPECT_TRUE(routing.split.bias);
  EXPECT_FALSE(routing.split.residual);
  EXPECT_EQ(routing.select.k, 3);
  EXPECT_FALSE(routing.renormalize);
  EXPECT_EQ(routing.widths, std::vector<int>(4, 10));
  EXPECT_EQ(feed_forward.expert.form, ExpertForm::kPlain);
  EXPECT_EQ(attention.num_kv_heads, 2);
  EXPECT_EQ(attention.group_order, GroupOrder::kTile);
  EXPECT_EQ(checkpoint->spec.position.fraction, 0.5);
  EXPECT_TRUE(Contains(checkpoint->notes, "MH-MoE: "));
  EXPECT_TRUE(Contains(checkpoint->notes, "does not use moe_normalize_gate_prob_before_dropping"));
  EXPECT_FALSE(Contains(checkpoint->notes, "second experts: "));
}

TEST(FairseqSpec, DeepNormIsAScaledResidual) {
  const auto checkpoint = LoadModel(FairseqGolden("dense-deepnorm"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const double alpha = std::pow(6.0, 0.25);
  EXPECT_EQ(checkpoint->spec.norm.placement, NormPlacement::kPost);
  EXPECT_DOUBLE_EQ(checkpoint->spec.residual_scale, 1.0 / alpha);
  EXPECT_FLOAT_EQ(checkpoint->spec.norm.eps, static_cast<float>(1e-5 / (alpha * alpha)));
}

// eps of the last norm is that of the options; that of the others follows from DeepNorm's factor.
TEST(FairseqSpec, DeepNormCanHaveALastNorm) {
  const auto checkpoint = LoadModel(FairseqGolden("smoe-deepnorm-final"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const NormSpec& norm = checkpoint->spec.norm;
  EXPECT_EQ(norm.placement, NormPlacement::kPost);
  EXPECT_TRUE(norm.HasFinal());
  EXPECT_FLOAT_EQ(norm.final_eps.value_or(0.0f), 1e-2f);
  EXPECT_FLOAT_EQ(norm.eps, 5e-3f);  // alpha = 4^0.25
  EXPECT_DOUBLE_EQ(checkpoint->spec.residual_scale, 1.0 / std::sqrt(2.0));
}

TEST(FairseqSpec, TransformerLmIsADenseDecoder) {
  const auto gpt = LoadModel(FairseqGolden("transformer-lm-gpt"));
  ASSERT_TRUE(gpt.ok()) << gpt.status();
  EXPECT_EQ(gpt->spec.norm.placement, NormPlacement::kPre);
  EXPECT_TRUE(gpt->spec.norm.HasFinal());
  EXPECT_EQ(gpt->spec.position.kind, PositionKind::kLearned);
  EXPECT_TRUE(gpt->spec.tie_word_embeddings);
  EXPECT_FALSE(gpt->spec.feed_forward(1).routed());
  const auto bare = LoadModel(FairseqGolden("transformer-lm-no-final-norm"));
  ASSERT_TRUE(bare.ok()) << bare.status();
  EXPECT_EQ(bare->spec.norm.placement, NormPlacement::kPre);
  EXPECT_FALSE(bare->spec.norm.HasFinal());
}

TEST(FairseqSpec, XposIsRotaryPositionsWithABase) {
  const auto checkpoint = LoadModel(FairseqGolden("xmoe-xpos"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const PositionSpec& position = checkpoint->spec.position;
  EXPECT_EQ(position.kind, PositionKind::kRope);
  EXPECT_EQ(position.pairing, RopePairing::kInterleaved);
  EXPECT_EQ(position.fraction, 1.0);
  EXPECT_EQ(position.xpos_base, 8.0);
}

TEST(FairseqSpec, BucketsOfPositionsAreThoseOfTwoDirections) {
  const auto checkpoint = LoadModel(FairseqGolden("dense-relative-bias"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->spec.position.kind, PositionKind::kSinusoidal);
  ASSERT_TRUE(checkpoint->spec.relative_bias.has_value());
  EXPECT_EQ(checkpoint->spec.relative_bias->buckets, 14);
  EXPECT_EQ(checkpoint->spec.relative_bias->max_distance, 20);
  EXPECT_TRUE(checkpoint->spec.relative_bias->bidirectional);
}

// What is computed as in the original code needs no sentence.
TEST(FairseqSpec, DecisionsAreThoseThatConcernTheModel) {
  const auto all =
      LoadModel(FairseqGolden("smoe-more-ranks-than-experts"));  // "all", and room for all tokens
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_FALSE(Contains(all->notes, "second experts: "));
  EXPECT_FALSE(Contains(all->notes, "capacity: "));
  const auto noise = LoadModel(FairseqGolden("smoe-post-norm-one-rank"));
  ASSERT_TRUE(noise.ok()) << noise.status();
  EXPECT_TRUE(Contains(noise->notes, "with random noise"));
  EXPECT_TRUE(Contains(noise->notes, "moe_gating_use_fp32 is false"));
  const auto fraction = LoadModel(FairseqGolden("xmoe-top1-subln-learned"));
  ASSERT_TRUE(fraction.ok()) << fraction.status();
  EXPECT_FALSE(Contains(fraction->notes, "second experts: "));
  EXPECT_TRUE(Contains(fraction->notes, "moe_eval_capacity_token_fraction is 0.25"));
  const auto dense = LoadModel(FairseqGolden("dense-deepnorm"));
  ASSERT_TRUE(dense.ok()) << dense.status();
  EXPECT_FALSE(Contains(dense->notes, "capacity: "));
}

TEST(FairseqFileNames, MissingAndSuperfluousFiles) {
  const std::string stem = "checkpoint_last-";
  {
    FairseqCopy copy("xmoe-two-ranks");
    fs::remove(copy / (stem + "rank-0.pt"));
    const std::vector<std::string> message = {
        "expected the file checkpoint_last-rank-0.pt beside "
        "checkpoint_last-rank-1.pt, found none"};
    EXPECT_TRUE(Mentions(LoadModel(copy.path()).status(), message));
    EXPECT_TRUE(Mentions(LoadModel(copy / (stem + "shared.pt")).status(), message));
  }
  {
    FairseqCopy copy("xmoe-two-ranks");
    fs::remove(copy / (stem + "rank-1.pt"));
    EXPECT_TRUE(Mentions(LoadModel(copy.path()).status(),
                         {"checkpoint_last-rank-0.pt: expected 2 files of processes",
                          "moe_expert_count is 4", "2 experts", "found 1"}));
    fs::remove(copy / (stem + "rank-0.pt"));
    EXPECT_TRUE(Mentions(LoadModel(copy.path()).status(),
                         {"expected the file checkpoint_last-rank-0.pt beside"}));
  }
  {
    FairseqCopy copy("xmoe-two-ranks");
    fs::remove(copy / (stem + "shared.pt"));
    EXPECT_TRUE(Mentions(LoadModel(copy / (stem + "rank-1.pt")).status(),
                         {"expected the file checkpoint_last-shared.pt beside"}));
  }
  {
    FairseqCopy copy("xmoe-two-ranks");
    fs::copy(copy / (stem + "rank-1.pt"), copy / (stem + "rank-2.pt"));
    EXPECT_TRUE(
        Mentions(LoadModel(copy.path()).status(), {"expected 2 files of processes", "found 3"}));
  }
  {
    FairseqCopy copy("xmoe-two-ranks");
    fs::copy(copy / (stem + "rank-1.pt"), copy / (stem + "rank-1-shard0.pt"));
    EXPECT_TRUE(Mentions(LoadModel(copy.path()).status(),
                         {"checkpoint_last-rank-1-shard0.pt: expected a file with whole tensors"}));
    EXPECT_TRUE(
        Mentions(LoadModel(copy / (stem + "rank-1-shard0.pt")).status(), {"found a shard"}));
    EXPECT_TRUE(LoadModel(copy / (stem + "shared.pt")).ok());
  }
  {
    FairseqCopy copy("xmoe-two-ranks");
    fs::copy(FairseqGolden("moa") / "checkpoint_best.pt", copy.path());
    EXPECT_TRUE(Mentions(LoadModel(copy.path()).status(),
                         {"found 2 of them (checkpoint_best.pt, checkpoint_last-shared.pt)"}));
    EXPECT_TRUE(LoadModel(copy / "checkpoint_best.pt").ok());
    EXPECT_TRUE(LoadModel(copy / (stem + "rank-0.pt")).ok());
  }
  {
    FairseqCopy copy("mhmoe-four-heads");
    fs::copy_file(FairseqGolden("xmoe-two-ranks") / (stem + "rank-1.pt"),
                  copy / (stem + "rank-1.pt"), fs::copy_options::overwrite_existing);
    EXPECT_TRUE(Mentions(LoadModel(copy.path()).status(),
                         {"checkpoint_last-rank-1.pt: expected 4 experts of a layer, as in "
                          "checkpoint_last-rank-0.pt, found 2"}));
  }
}

// Of more processes than experts, the first ones have all experts.
TEST(FairseqFileNames, CopiesOfExpertsAreNotRead) {
  FairseqCopy copy("smoe-more-ranks-than-experts");
  const auto answers = ReadFamilyAnswers(FairseqGolden("smoe-more-ranks-than-experts"));
  ASSERT_TRUE(answers.ok()) << answers.status();
  WriteFile(copy / "checkpoint_last-rank-2.pt", "not read");
  WriteFile(copy / "checkpoint_last-rank-3.pt", "not read");
  EXPECT_LE(WorstDifference(copy.path(), *answers), 1e-4);
  fs::remove(copy / "checkpoint_last-rank-3.pt");
  EXPECT_TRUE(
      Mentions(LoadModel(copy.path()).status(), {"expected 2 files of processes", "found 3"}));
  fs::remove(copy / "checkpoint_last-rank-2.pt");
  EXPECT_LE(WorstDifference(copy.path(), *answers), 1e-4);
  // The order of the files is that of the experts, and it matters.
  fs::rename(copy / "checkpoint_last-rank-0.pt", copy / "other");
  fs::rename(copy / "checkpoint_last-rank-1.pt", copy / "checkpoint_last-rank-0.pt");
  fs::rename(copy / "other", copy / "checkpoint_last-rank-1.pt");
  EXPECT_GT(WorstDifference(copy.path(), *answers), 1e-2);
}

TEST(FairseqFileNames, RanksAreNumbers) {
  TempFolder folder;
  WriteFile(folder.path() / "a-shared.pt", "");
  for (int rank = 0; rank < 12; ++rank)
    WriteFile(folder.path() / Concat("a-rank-", rank, ".pt"), "");
  const auto found = FindFairseq(folder.path());
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_TRUE(found->has_value());
  EXPECT_EQ((*found)->main, "a-shared.pt");
  ASSERT_EQ((*found)->ranks.size(), 12u);
  for (int rank = 0; rank < 12; ++rank) {
    EXPECT_EQ((*found)->ranks[static_cast<size_t>(rank)], Concat("a-rank-", rank, ".pt"));
  }
  WriteFile(folder.path() / "a-rank-13.pt", "");
  EXPECT_TRUE(Mentions(FindFairseq(folder.path()).status(), {"expected the file a-rank-12.pt"}));
  fs::remove(folder.path() / "a-rank-13.pt");
  WriteFile(folder.path() / "a-rank-01.pt", "");  // not a name that fairseq gives
  EXPECT_TRUE(Mentions(FindFairseq(folder.path()).status(), {"found 2 of them"}));
}

TEST(FairseqFileNames, OtherFoldersAreNotCheckpoints) {
  TempFolder folder;
  EXPECT_FALSE(FindFairseq(folder.path())->has_value());
  EXPECT_FALSE(FindFairseq(folder.path() / "none.pt")->has_value());
  WriteFile(folder.path() / "optimizer.pt", "");
  EXPECT_TRUE(FindFairseq(folder.path())->has_value());
  WriteFile(folder.path() / "model.safetensors", "");
  EXPECT_FALSE(FindFairseq(folder.path())->has_value());
  fs::remove(folder.path() / "model.safetensors");
  for (const char* config : {"{}", "[]", "no JSON", R"({"model_type": "llama"})"}) {
    WriteFile(folder.path() / "config.json", config);
    EXPECT_FALSE(FindFairseq(folder.path())->has_value()) << config;
  }
  WriteFile(folder.path() / "config.json", R"({"model_type": "torchscale"})");
  EXPECT_TRUE(FindFairseq(folder.path())->has_value());
}

// Writes the tensors of a golden model of one file after a change, with its options in config.json.
class Rewritten {
 public:
  explicit Rewritten(const std::string& model) {
    const auto files = FindFairseq(FairseqGolden(model));
    EXPECT_TRUE(files.ok() && files->has_value());
    const auto file = TorchFile::Open(FairseqGolden(model) / (*files)->main);
    EXPECT_TRUE(file.ok()) << file.status();
    const PickleValue* const inner = (*file)->root().Get("model");
    const auto state = TorchStateDict::Make(**file, inner != nullptr ? *inner : (*file)->root());
    EXPECT_TRUE(state.ok()) << state.status();
    for (const TensorEntry& entry : (*state)->tensors()) {
      const auto data = (*state)->Read(entry);
      EXPECT_TRUE(data.ok()) << data.status();
      tensors.push_back(
          {entry.name, std::string(Name(entry.type)), entry.shape, std::string(data->bytes)});
    }
    if (inner == nullptr) {
      options = Json::parse(ReadFile(FairseqGolden(model) / "config.json"));
    } else {
      options = (*ReadFairseqOptions((*file)->root()))->values;
      options["model_type"] = "torchscale";
    }
  }

  RawTensor& operator[](const std::string& name) {
    for (RawTensor& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    ADD_FAILURE() << name;
    return tensors[0];
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

TEST(FairseqTensors, RewrittenModelsLoad) {
  for (const char* name : {"dense-bare", "smoe-one-file", "moa"}) {
    const auto checkpoint = Rewritten(name).Load();
    EXPECT_TRUE(checkpoint.ok()) << name << ": " << checkpoint.status();
  }
}

TEST(FairseqTensors, TheHeadIsTheEmbeddingOnlyIfItHasItsData) {
  Rewritten model("dense-bare");
  EXPECT_TRUE(model.Load()->spec.tie_word_embeddings);
  model["output_projection.weight"].bytes.back() ^= 1;
  const auto checkpoint = model.Load();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_FALSE(checkpoint->spec.tie_word_embeddings);
  EXPECT_TRUE(Contains(checkpoint->notes, "LM head: "));
  std::erase_if(model.tensors,
                [](const RawTensor& t) { return t.name == "output_projection.weight"; });
  EXPECT_TRUE(model.Load()->spec.tie_word_embeddings);
  model.options["share_decoder_input_output_embed"] = false;
  EXPECT_TRUE(Mentions(model.Load().status(), {"decoder.output_projection.weight\" is missing"}));
}

TEST(FairseqTensors, ATemperatureMeansThePapersScores) {
  Rewritten model("smoe-one-file");
  for (const char* layer : {"0", "1"}) {
    const std::string gate = Concat("decoder.layers.", layer, ".moe_layer.gate.");
    RawTensor& router = model[gate + "wg.weight"];
    RawTensor projection = router;
    projection.name = gate + "wg_reduction.weight";
    router = {gate + "wg", "F32", {5, 5}, std::string(100, '\x3f')};
    model.tensors.push_back(std::move(projection));
    model.tensors.push_back({gate + "gating_t", "F32", {1}, std::string("\0\0\0\x3f", 4)});
  }
  model.options["use_xmoe"] = true;
  const auto checkpoint = model.Load();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const ScoreSpec& score = checkpoint->spec.feed_forward(1).routing->score;
  EXPECT_EQ(score.dim, 5);
  EXPECT_TRUE(score.normalize_row);
  EXPECT_EQ(score.temperature, TemperatureKind::kDivide);
  EXPECT_TRUE(Contains(checkpoint->notes, "because the files have a temperature"));
}

// Files with the projections of MH-MoE have them also around tokens that are not split.
TEST(FairseqTensors, ProjectionsWithoutASplit) {
  Rewritten model("smoe-one-file");
  model.options.update({{"mhmoe_heads_number", 1}, {"moe_top_k", 2}});
  EXPECT_FALSE(model.Load()->spec.feed_forward(0).routing->split.projection);
  for (const char* layer : {"0", "1"}) {
    const std::string prefix = Concat("decoder.layers.", layer, ".moe_layer.");
    for (const char* name : {"multi_heads", "out_proj"}) {
      model.tensors.push_back(
          {prefix + name + ".weight", "F32", {16, 16}, std::string(1024, '\0')});
      model.tensors.push_back({prefix + name + ".bias", "F32", {16}, std::string(64, '\0')});
    }
  }
  const auto checkpoint = model.Load();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const SplitSpec& split = checkpoint->spec.feed_forward(1).routing->split;
  EXPECT_EQ(split.heads, 1);
  EXPECT_TRUE(split.projection);
  EXPECT_TRUE(split.merge_projection);
  EXPECT_TRUE(split.bias);
}

TEST(FairseqTensors, OtherModelsAreRefusedByName) {
  const std::string zeros(4, '\0');
  const auto with = [&](const std::string& name) {
    Rewritten model("moa");
    model.tensors.push_back({name, "F32", {1}, zeros});
    return model.Load().status();
  };
  EXPECT_TRUE(Mentions(with("decoder.layers.0.encoder_attn.k_proj.weight"),
                       {"model.pt: ", "expected an encoder beside a decoder", "encoder_attn"}));
  EXPECT_TRUE(Mentions(with("encoder.version"), {"no_cross_attention: expected false"}));
  EXPECT_TRUE(
      Mentions(with("encoder.sentence_encoder.embed_tokens.weight"), {"found fairseq's RoBERTa"}));
  EXPECT_TRUE(Mentions(with("decoder.layers.0.retention.q_proj.weight"), {"layers of RetNet"}));
  EXPECT_TRUE(Mentions(with("decoder.layers.0.w_resid"), {"w_resid", "expected no such tensor"}));
  EXPECT_TRUE(with("decoder.layers.1.self_attn.q_proj.w_noise").ok());
  // The same tensor in a wrapper and without.
  EXPECT_TRUE(Mentions(with("module.decoder.version"), {"\"decoder.version\"", "in one file"}));
}

TEST(FairseqTensors, WrongTypesAndShapes) {
  Rewritten model("dense-bare");
  model["embed_tokens.weight"].shape = {37 * 16};
  EXPECT_TRUE(Mentions(model.Load().status(),
                       {"tensor \"decoder.embed_tokens.weight\": expected a matrix"}));
  Rewritten positions("dense-bare");
  RawTensor& tensor = positions["embed_positions.weight"];
  tensor.shape[0] -= 2;
  tensor.bytes.resize(tensor.bytes.size() - 2 * 16 * 4);
  EXPECT_TRUE(Mentions(positions.Load().status(),
                       {"expected shape [42, 16]", "found [40, 16]", "max_target_positions + 2"}));
  Rewritten integers("dense-bare");
  integers["layer_norm.weight"] = {"layer_norm.weight", "I64", {16}, std::string(128, '\0')};
  EXPECT_TRUE(Mentions(integers.Load().status(), {"decoder.layer_norm.weight", "found I64"}));
}

}  // namespace
}  // namespace moeserve::testing
