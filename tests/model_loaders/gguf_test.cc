// GGUF files: the models and blocks that tests/reference/families/make_gguf_goldens.py wrote with
// the Python package `gguf`.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "engine/spec/weights.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/files/gguf/gguf_file.h"
#include "model_loaders/files/safetensors.h"
#include "model_loaders/write/quantize_folder.h"
#include "tests/model_loaders/gguf_bytes.h"
#include "tests/model_loaders/patched_folder.h"
#include "tests/model_loaders/support.h"
#include "tests/support/family_cases.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;

fs::path Golden(const std::string& name) { return SourcePath("tests/golden/gguf/" + name); }

TEST(GgufBlocks, AreConvertedAsByTheReferenceToTheLastBit) {
  const auto file = GgufFile::Open(Golden("blocks.gguf"));
  ASSERT_TRUE(file.ok()) << file.status();
  const auto expected = SafetensorsFile::Open(Golden("blocks.safetensors"));
  ASSERT_TRUE(expected.ok()) << expected.status();
  ASSERT_EQ((*file)->tensors().size(), 9u);
  for (const TensorEntry& entry : (*file)->tensors()) {
    SCOPED_TRACE(entry.name);
    const TensorEntry* const reference = (*expected)->Find(entry.name);
    ASSERT_NE(reference, nullptr);
    EXPECT_EQ(entry.type, ElementType::kF32);
    EXPECT_EQ(entry.shape, reference->shape);
    EXPECT_EQ(entry.converted_from, entry.name);
    EXPECT_LT((*file)->StoredBytes(entry) * 3, entry.end);
    const auto data = (*file)->Read(entry);
    ASSERT_TRUE(data.ok()) << data.status();
    EXPECT_EQ(data->bytes, (*expected)->Bytes(*reference));
  }
}

TEST(GgufBlocks, PartsAreThoseOfTheWhole) {
  const auto file = GgufFile::Open(Golden("blocks.gguf"));
  ASSERT_TRUE(file.ok()) << file.status();
  std::mt19937 random(1);
  for (const TensorEntry& entry : (*file)->tensors()) {
    const std::string whole((*file)->Read(entry)->bytes);
    const auto elements = static_cast<int64_t>(whole.size() / sizeof(float));
    for (int i = 0; i < 200; ++i) {
      const int64_t first = random() % (elements + 1);
      const int64_t count = random() % (elements - first + 1);
      const auto part = (*file)->ReadPart(entry, first, count);
      ASSERT_TRUE(part.ok()) << part.status();
      ASSERT_EQ(part->bytes, whole.substr(first * sizeof(float), count * sizeof(float)));
    }
  }
}

// One expert of a stack must not cost the conversion of all of them.
TEST(GgufBlocks, APartConvertsOnlyItsBlocks) {
  const auto file = GgufFile::Open(Golden("blocks.gguf"));
  ASSERT_TRUE(file.ok()) << file.status();
  const std::vector<TensorEntry>& tensors = (*file)->tensors();
  const auto entry = std::find_if(tensors.begin(), tensors.end(),
                                  [](const TensorEntry& tensor) { return tensor.name == "Q4_K"; });
  ASSERT_NE(entry, tensors.end());
  const auto slice = (*file)->ReadPart(*entry, 512, 512);
  const auto block = (*file)->ReadPart(*entry, 512, 1);
  ASSERT_TRUE(slice.ok() && block.ok());
  EXPECT_EQ(slice->bytes.size(), 512u * 4);
  EXPECT_EQ(block->bytes, slice->bytes.substr(0, 4));
}

// All logits of the prompts of a family's case, and behind them those of prediction layers.
std::vector<std::vector<float>> GgufLogits(const fs::path& model, const FamilyAnswers& answers,
                                           DType compute) {
  RunnerOptions options{.compute = compute};
  options.load.predictions = true;
  auto runner = ModelRunner::Load(model, options);
  EXPECT_TRUE(runner.ok()) << runner.status();
  std::vector<std::vector<float>> logits;
  if (!runner.ok()) return logits;
  for (int p = 0; p < answers.prompts; ++p) {
    const std::vector<int32_t> prompt = answers.Prompt(p);
    logits.push_back((*runner)->Run(prompt, answers.length));
    if ((*runner)->spec().prediction == nullptr) continue;
    logits.push_back((*runner)->Predict({prompt.begin() + 1, prompt.end()}, 0));
  }
  return logits;
}

struct GgufCase {
  std::string file;    // "mixtral-bf16"
  std::string family;  // folder of tests/golden/families
  bool exact = true;   // the same results as from the folder, to the last bit
  // A patch (RFC 7396) of the folder's config.json, which replaces settings that no GGUF file can
  // have by those that all files of the architecture imply.
  std::string patch = "{}";
  std::string files = "models";  // folder of the file
};
void PrintTo(const GgufCase& c, std::ostream* out) { *out << c.file; }

class GgufModelTest : public ::testing::TestWithParam<GgufCase> {};

TEST_P(GgufModelTest, HasTheLogitsOfTheSafetensorsFolder) {
  const fs::path folder = SourcePath("tests/golden/families/" + GetParam().family);
  const auto answers = ReadFamilyAnswers(folder);
  ASSERT_TRUE(answers.ok()) << answers.status();
  TempFolder patched;
  CopyPatched(folder, GetParam().patch, patched.path());
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    SCOPED_TRACE(Name(compute));
    const auto found =
        GgufLogits(Golden(GetParam().files + "/" + GetParam().file + ".gguf"), *answers, compute);
    const auto expected = GgufLogits(patched.path(), *answers, compute);
    ASSERT_EQ(found.size(), expected.size());
    double worst = 0.0;
    for (size_t p = 0; p < found.size(); ++p) {
      ASSERT_EQ(found[p].size(), expected[p].size());
      ASSERT_FALSE(found[p].empty());
      for (size_t i = 0; i < found[p].size(); ++i) {
        const double error = std::abs(double{found[p][i]} - expected[p][i]);
        if (!(error <= worst)) worst = error;
      }
    }
    std::printf("%s, %s: largest difference %.2e\n", GetParam().file.c_str(),
                std::string(Name(compute)).c_str(), worst);
    if (GetParam().exact) {
      EXPECT_EQ(worst, 0.0);
    } else {
      EXPECT_LE(worst, compute == DType::kF32 ? 1e-4 : 0.1);
    }
  }
}

// Not exact are llama3, because the file has the factors of the frequencies, rounded to f32, and
// F16, which has no room for small numbers of BF16.
INSTANTIATE_TEST_SUITE_P(
    Gguf, GgufModelTest,
    ::testing::Values(GgufCase{"llama-biases-tied-bf16", "llama-biases-tied"},
                      GgufCase{"llama-biases-tied-f32", "llama-biases-tied"},
                      GgufCase{"llama-llama3-shards-bf16", "llama-llama3-shards", false},
                      GgufCase{"mixtral-bf16", "mixtral"}, GgufCase{"mixtral-f32", "mixtral"},
                      GgufCase{"olmoe-bf16", "olmoe"}, GgufCase{"olmoe-f32", "olmoe"},
                      GgufCase{"qwen2-bf16", "qwen2"}, GgufCase{"qwen2-f16", "qwen2", false},
                      GgufCase{"qwen2-moe-bf16", "qwen2-moe"},
                      GgufCase{"qwen2-moe-f32", "qwen2-moe"},
                      GgufCase{"qwen3-yarn-tied-bf16", "qwen3-yarn-tied"},
                      GgufCase{"qwen3-moe-bf16", "qwen3-moe"},
                      GgufCase{"qwen3-moe-f32", "qwen3-moe"}),
    [](const auto& info) {
      return TestName({info.param.file, {}});
    });

// What the patches replace: DeepSeek's two scales of yarn are equal, and its rotary pairs adjacent;
// gpt-oss has one limit of activations, no factor for yarn, and a window in every second layer,
// beginning with the first; Gemma's scale follows from the head's width, its windows from a period.
INSTANTIATE_TEST_SUITE_P(
    Architectures, GgufModelTest,
    ::testing::Values(
        GgufCase{"bailing-groups-bf16", "bailing-groups"},
        GgufCase{"deepseek-v2-groups-legacy-bf16", "deepseek-v2-groups"},
        GgufCase{"deepseek-v3-bf16", "deepseek-v3", true, R"({"rope_parameters":{"mscale":0.9}})"},
        GgufCase{"deepseek-v3-direct-query-half-bf16", "deepseek-v3-direct-query-half", true,
                 R"({"rope_interleave":true})"},
        GgufCase{"dots1-bf16", "dots1"}, GgufCase{"ernie4-5-moe-bf16", "ernie4-5-moe"},
        GgufCase{"gemma2-bf16", "gemma2", true, R"({"query_pre_attn_scalar":12})"},
        GgufCase{"gemma3-old-keys-bf16", "gemma3-old-keys", true,
                 R"({"query_pre_attn_scalar":12,"sliding_window_pattern":6})"},
        GgufCase{"glm4-moe-groups-bf16", "glm4-moe-groups"},
        GgufCase{"gpt-oss-bf16", "gpt-oss", true,
                 R"({"swiglu_limit":7.0,"rope_parameters":{"attention_factor":null}})"},
        GgufCase{"gpt-oss-mxfp4-bf16", "gpt-oss-mxfp4", true,
                 R"({"swiglu_limit":7.0,"rope_parameters":{"attention_factor":null},)"
                 R"("layer_types":["sliding_attention","full_attention"]})"},
        GgufCase{"granitemoeshared-bf16", "granitemoeshared"}, GgufCase{"hunyuan-bf16", "hunyuan"},
        GgufCase{"phi3-longrope-long-bf16", "phi3-longrope-long"},
        GgufCase{"phi3-window-partial-bf16", "phi3-window-partial"}),
    [](const auto& info) {
      return TestName({info.param.file, {}});
    });

// The patches: in hybrids of Granite, only attention without positions is beside state spaces.
INSTANTIATE_TEST_SUITE_P(
    Hybrids, GgufModelTest,
    ::testing::Values(GgufCase{"granitemoehybrid-mamba-bf16", "granitemoehybrid-mamba"},
                      GgufCase{"bailing-hybrid-bf16", "bailing-hybrid"},
                      GgufCase{"kimi-linear-bf16", "kimi-linear"}, GgufCase{"lfm2-bf16", "lfm2"},
                      GgufCase{"lfm2-moe-bf16", "lfm2-moe"},
                      GgufCase{"nemotron-h-bf16", "nemotron-h"},
                      GgufCase{"nemotron-h-latent-groups-bf16", "nemotron-h-latent-groups"},
                      GgufCase{"nemotron-h-pattern-biases-bf16", "nemotron-h-pattern-biases"},
                      GgufCase{"qwen3-5-bf16", "qwen3-5"},
                      GgufCase{"qwen3-5-moe-bf16", "qwen3-5-moe"},
                      GgufCase{"qwen3-next-bf16", "qwen3-next"}),
    [](const auto& info) {
      return TestName({info.param.file, {}});
    });

// AFMoE has a window in all layers but every fourth; DeepSeek's two scales of yarn are equal.
INSTANTIATE_TEST_SUITE_P(
    Relatives, GgufModelTest,
    ::testing::Values(
        GgufCase{"afmoe-bf16", "afmoe", true,
                 R"({"layer_types":["sliding_attention","sliding_attention",)"
                 R"("sliding_attention","full_attention"]})"},
        GgufCase{"deepseek-v32-bf16", "deepseek-v32", true,
                 R"({"rope_parameters":{"mscale":0.9}})"},
        GgufCase{"exaone-moe-bf16", "exaone-moe"}, GgufCase{"glm-moe-dsa-bf16", "glm-moe-dsa"},
        GgufCase{"glm4-moe-lite-bf16", "glm4-moe-lite"}, GgufCase{"glm4v-moe-bf16", "glm4v-moe"},
        GgufCase{"granite-bf16", "granite"}, GgufCase{"hy-v3-bf16", "hy-v3"},
        GgufCase{"mellum-bf16", "mellum"}, GgufCase{"minimax-m2-bf16", "minimax-m2"},
        GgufCase{"phimoe-bf16", "phimoe", true,
                 R"({"router_jitter_noise":0.01,"rope_parameters":{)"
                 R"("short_mscale":1.243163121016122,"long_mscale":1.243163121016122}})"},
        GgufCase{"qwen3-vl-moe-bf16", "qwen3-vl-moe"}, GgufCase{"solar-open-bf16", "solar-open"}),
    [](const auto& info) {
      return TestName({info.param.file, {}});
    });

// Llama 4 has the chunks and scales of queries of the published models.
INSTANTIATE_TEST_SUITE_P(
    Variants, GgufModelTest,
    ::testing::Values(
        GgufCase{"cohere2-moe-bf16", "cohere2-moe", true, "{}", "variants"},
        GgufCase{"cohere2-moe-dense-first-bf16", "cohere2-moe-dense-first", true, "{}", "variants"},
        GgufCase{"gemma4-moe-bf16", "gemma4-moe", true, "{}", "variants"},
        GgufCase{"glm4-moe-mtp-bf16", "glm4-moe-mtp", true, "{}", "variants"},
        GgufCase{"gemma4-old-keys-bf16", "gemma4-old-keys", true, "{}", "variants"},
        GgufCase{"k2-horizon-mova-bf16", "k2-horizon-mova", true, "{}", "variants"},
        GgufCase{"llama4-bf16", "llama4", true,
                 R"({"attention_chunk_size":8192,"attn_scale":0.1,"floor_scale":8192})",
                 "variants"},
        GgufCase{"mimo-v2-flash-bf16", "mimo-v2-flash", true, "{}", "variants"},
        GgufCase{"mistral4-bf16", "mistral4", true, "{}", "variants"},
        GgufCase{"step3p5-bf16", "step3p5", true, "{}", "variants"}),
    [](const auto& info) {
      return TestName({info.param.file, {}});
    });

// Blocks give the results of the values to which the reference converts them.
TEST(GgufModel, BlocksGiveTheLogitsOfTheirValues) {
  for (const std::string file : {"mixtral-q8_0", "olmoe-q4_0"}) {
    SCOPED_TRACE(file);
    const std::string family = file.substr(0, file.find('-'));
    const auto answers = ReadFamilyAnswers(SourcePath("tests/golden/families/" + family));
    ASSERT_TRUE(answers.ok()) << answers.status();
    for (const DType compute : {DType::kF32, DType::kBF16}) {
      const auto found = GgufLogits(Golden("models/" + file + ".gguf"), *answers, compute);
      ASSERT_FALSE(found.empty());
      EXPECT_EQ(found, GgufLogits(Golden("models/" + file + "-widened.gguf"), *answers, compute));
      EXPECT_NE(found, GgufLogits(Golden("models/" + family + "-bf16.gguf"), *answers, compute));
    }
  }
}

TEST(GgufModel, DescribesTheFile) {
  const auto checkpoint =
      LoadCheckpoint(Golden("models/mixtral-q8_0.gguf"), {.require_tokenizer = false});
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->directory_name, "mixtral-q8_0.gguf");
  EXPECT_EQ(checkpoint->block_type, "Q8_0");
  EXPECT_EQ(checkpoint->tokenizer, nullptr);
  EXPECT_EQ(checkpoint->eos_token_ids, (std::vector<TokenId>{2}));
  EXPECT_EQ(checkpoint->spec.bos_token_id, 1);
  // Most weights are blocks, for which bf16 suffices.
  EXPECT_EQ(checkpoint->weights->DominantDType(), DType::kBF16);
  EXPECT_LT(checkpoint->weight_bytes, 42'240);
  EXPECT_TRUE(checkpoint->identity.place.ends_with("/mixtral-q8_0.gguf"));
  EXPECT_NE(checkpoint->identity.state.find("mixtral-q8_0.gguf"), std::string::npos);
  const auto f32 = LoadCheckpoint(Golden("models/mixtral-f32.gguf"), {.require_tokenizer = false});
  EXPECT_EQ(f32->weights->DominantDType(), DType::kF32);
  EXPECT_EQ(f32->block_type, "");
}

TEST(GgufModel, MayBeTheOnlyWeightsOfAFolder) {
  TempFolder folder;
  const std::string bytes = ReadFile(Golden("models/qwen2-bf16.gguf"));
  WriteFile(folder.path() / "a.gguf", bytes);
  const LoadOptions options{.require_tokenizer = false};
  const auto checkpoint = LoadCheckpoint(folder.path(), options);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->directory_name, folder.path().filename().string());
  EXPECT_TRUE(
      Mentions(QuantizeFolder(folder.path(), folder.path() / "b", Quantization::kInt8).status(),
               {"expected a folder with safetensors", "found a GGUF file"}));
  WriteFile(folder.path() / "b.gguf", bytes);
  EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path(), options).status(),
                       {"expected one .gguf file", "found 2 of them (a.gguf, b.gguf)"}));
  EXPECT_TRUE(LoadCheckpoint(folder.path() / "b.gguf", options).ok());
  EXPECT_TRUE(
      Mentions(LoadCheckpoint(folder.path() / "c.gguf", options).status(),
               {"c.gguf: expected a model folder, a .gguf file or a .pt file, found nothing"}));
  // Other weights have priority.
  WriteFile(folder.path() / "model.safetensors", "x");
  EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path(), options).status(), {"config.json"}));
}

TEST(GgufModel, MayBeSplit) {
  const GgufParts whole = PartsOf(ReadFile(Golden("models/qwen3-moe-bf16.gguf")));
  TempFolder folder;
  const auto write = [&](int number, int parts, std::vector<GgufKey> keys,
                         std::vector<GgufTensorBytes> tensors) {
    GgufParts part;
    part.keys = std::move(keys);
    part.tensors = std::move(tensors);
    part.Set(GgufU32("split.no", static_cast<uint32_t>(number)));
    part.Set(GgufU32("split.count", static_cast<uint32_t>(parts)));
    part.Set(GgufU32("split.tensors.count", static_cast<uint32_t>(whole.tensors.size())));
    char name[64];
    std::snprintf(name, sizeof(name), "m-%05d-of-%05d.gguf", number + 1, parts);
    WriteFile(folder.path() / name, GgufBytes(part));
  };
  const auto middle = whole.tensors.begin() + 9;
  write(0, 3, whole.keys, {});
  write(1, 3, {}, {whole.tensors.begin(), middle});
  write(2, 3, {}, {middle, whole.tensors.end()});
  const LoadOptions options{.require_tokenizer = false};
  const fs::path first = folder.path() / "m-00001-of-00003.gguf";
  const auto answers = ReadFamilyAnswers(SourcePath("tests/golden/families/qwen3-moe"));
  const auto expected = GgufLogits(Golden("models/qwen3-moe-bf16.gguf"), *answers, DType::kF32);
  EXPECT_EQ(GgufLogits(first, *answers, DType::kF32), expected);
  EXPECT_EQ(GgufLogits(folder.path(), *answers, DType::kF32), expected);
  EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path() / "m-00002-of-00003.gguf", options).status(),
                       {"m-00002-of-00003.gguf: metadata: split.no: expected 0", "found 1"}));
  write(2, 3, {}, {middle + 1, whole.tensors.end()});
  EXPECT_TRUE(Mentions(LoadCheckpoint(first, options).status(),
                       {"m-00001-of-00003.gguf: metadata: split.tensors.count: expected"}));
  write(2, 3, {}, {middle - 1, whole.tensors.end()});
  EXPECT_TRUE(Mentions(LoadCheckpoint(first, options).status(),
                       {"m-00003-of-00003.gguf: tensor", "expected it in one file"}));
  fs::remove(folder.path() / "m-00003-of-00003.gguf");
  EXPECT_TRUE(Mentions(LoadCheckpoint(first, options).status(), {"m-00003-of-00003.gguf"}));
  fs::rename(first, folder.path() / "renamed.gguf");
  EXPECT_TRUE(Mentions(LoadCheckpoint(folder.path() / "renamed.gguf", options).status(),
                       {"renamed.gguf: expected a name that ends with -00001-of-00003.gguf"}));
}

// Newer converters keep the shape [1, d] of the gate of a shared expert.
TEST(GgufModel, HasAGateThatIsAVectorOrAMatrix) {
  const auto answers = ReadFamilyAnswers(SourcePath("tests/golden/families/qwen2-moe"));
  const fs::path vector = Golden("models/qwen2-moe-bf16.gguf");
  GgufParts parts = PartsOf(ReadFile(vector));
  for (const char* name : {"blk.0.ffn_gate_inp_shexp.weight", "blk.1.ffn_gate_inp_shexp.weight"}) {
    std::vector<uint64_t>& shape = parts.Tensor(name).shape;
    ASSERT_EQ(shape.size(), 1u);
    shape.insert(shape.begin(), 1);
  }
  TempFolder folder;
  WriteFile(folder.path() / "a.gguf", GgufBytes(parts));
  EXPECT_EQ(GgufLogits(folder.path(), *answers, DType::kF32),
            GgufLogits(vector, *answers, DType::kF32));
}

// Layouts of other writers than the goldens': joined gate and up projections, and, in early files,
// one tensor per expert.
TEST(GgufModel, HasOtherLayoutsOfExperts) {
  const auto answers = ReadFamilyAnswers(SourcePath("tests/golden/families/mixtral"));
  const auto expected = GgufLogits(Golden("models/mixtral-bf16.gguf"), *answers, DType::kF32);
  const GgufParts stacked = PartsOf(ReadFile(Golden("models/mixtral-bf16.gguf")));
  GgufParts single = stacked;
  GgufParts joined = stacked;
  single.tensors.clear();
  joined.tensors.clear();
  for (const GgufTensorBytes& tensor : stacked.tensors) {
    const size_t end = tensor.name.find("_exps.weight");
    if (end == std::string::npos) {
      single.tensors.push_back(tensor);
      joined.tensors.push_back(tensor);
      continue;
    }
    const uint64_t experts = tensor.shape[0];
    const size_t bytes = tensor.data.size() / experts;
    const bool gate = tensor.name.find("ffn_gate_exps") != std::string::npos;
    GgufTensorBytes both = tensor;
    if (gate) {
      both.name.replace(both.name.find("ffn_gate"), 8, "ffn_gate_up");
      both.shape[1] *= 2;
      both.data.clear();
    }
    std::string up = tensor.name;
    if (gate) up.replace(up.find("ffn_gate"), 8, "ffn_up");
    for (uint64_t e = 0; e < experts; ++e) {
      GgufTensorBytes one = tensor;
      one.name = tensor.name.substr(0, end) + "." + std::to_string(e) + ".weight";
      one.shape.erase(one.shape.begin());
      one.data = tensor.data.substr(e * bytes, bytes);
      if (gate) {
        GgufParts copy = stacked;
        both.data += one.data + copy.Tensor(up).data.substr(e * bytes, bytes);
      }
      single.tensors.push_back(one);
    }
    if (tensor.name.find("ffn_up_exps") == std::string::npos) joined.tensors.push_back(both);
  }
  TempFolder folder;
  const fs::path path = folder.path() / "a.gguf";
  for (const GgufParts* parts : {&single, &joined}) {
    WriteFile(path, GgufBytes(*parts));
    EXPECT_EQ(GgufLogits(path, *answers, DType::kF32), expected);
  }
}

// Newer converters can join the queries, keys and values of a layer. Those of Llama are permuted.
TEST(GgufModel, HasJoinedProjections) {
  for (const std::string family : {"llama-biases-tied", "qwen2-moe"}) {
    SCOPED_TRACE(family);
    const auto answers = ReadFamilyAnswers(SourcePath("tests/golden/families/" + family));
    const fs::path separate = Golden("models/" + family + "-bf16.gguf");
    GgufParts parts = PartsOf(ReadFile(separate));
    for (const std::string layer : {"blk.0.", "blk.1."}) {
      for (const std::string kind : {".weight", ".bias"}) {
        GgufTensorBytes& joined = parts.Tensor(layer + "attn_q" + kind);
        joined.name = layer + "attn_qkv" + kind;
        for (const std::string other : {"attn_k", "attn_v"}) {
          const std::string name = layer + other + kind;
          const GgufTensorBytes part = parts.Tensor(name);
          GgufTensorBytes& all = parts.Tensor(layer + "attn_qkv" + kind);
          all.shape[0] += part.shape[0];
          all.data += part.data;
          std::erase_if(parts.tensors, [&](const GgufTensorBytes& t) { return t.name == name; });
        }
      }
    }
    TempFolder folder;
    WriteFile(folder.path() / "a.gguf", GgufBytes(parts));
    EXPECT_EQ(GgufLogits(folder.path(), *answers, DType::kF32),
              GgufLogits(separate, *answers, DType::kF32));
  }
}

// The keys for sampling become the defaults, as those of generation_config.json do.
TEST(GgufModel, HasSamplingDefaults) {
  GgufParts parts = PartsOf(ReadFile(Golden("models/qwen2-bf16.gguf")));
  parts.Set(GgufF32("general.sampling.temp", 0.5f));
  parts.Set(GgufF32("general.sampling.top_p", 0.75f));
  parts.Set({"general.sampling.top_k", 5, std::string("\x14\0\0\0", 4)});
  parts.Set(GgufU32("tokenizer.ggml.eot_token_id", 7));
  TempFolder folder;
  const fs::path path = folder.path() / "a.gguf";
  WriteFile(path, GgufBytes(parts));
  auto checkpoint = LoadCheckpoint(path, {.require_tokenizer = false});
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->generation.temperature, 0.5);
  EXPECT_EQ(checkpoint->generation.top_p, 0.75);
  EXPECT_EQ(checkpoint->generation.top_k, 20);
  EXPECT_EQ(checkpoint->eos_token_ids, (std::vector<TokenId>{2, 7}));
  parts.Set(GgufF32("general.sampling.temp", -1.0f));
  WriteFile(path, GgufBytes(parts));
  EXPECT_TRUE(Mentions(LoadCheckpoint(path, {.require_tokenizer = false}).status(),
                       {"a.gguf: metadata: general.sampling.temp: expected a number", "-1"}));
}

}  // namespace
}  // namespace moeserve::testing
