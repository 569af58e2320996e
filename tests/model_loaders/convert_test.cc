// Conversion to the native format: a new folder computes what its source computes, and has its
// tokenizer and its defaults.
#include <sys/resource.h>

#include <algorithm>
#include <bit>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/kinds.h"
#include "gtest/gtest.h"
#include "model_loaders/architectures/native/write_config.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/files/safetensors.h"
#include "model_loaders/write/convert_folder.h"
#include "model_loaders/write/quantize_folder.h"
#include "tests/model_loaders/gguf_bytes.h"
#include "tests/model_loaders/support.h"
#include "tests/support/family_cases.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Names = std::set<std::string>;

const LoadOptions kAnyTokenizer = {.require_tokenizer = false};

fs::path Family(const std::string& name) { return SourcePath("tests/golden/families/" + name); }
fs::path Gguf(const std::string& name) {
  return SourcePath("tests/golden/gguf/models/" + name + ".gguf");
}

Names NamesInFolder(const fs::path& folder) {
  Names names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

// A place for new folders. Everything else in it was left behind by an error.
struct Place {
  TempFolder parent;
  fs::path made = parent.path() / "made";
};

// Returns the logits of one made-up prompt, in two steps.
std::vector<float> ConvertedLogits(const fs::path& model, DType compute) {
  auto runner = ModelRunner::Load(model, {.compute = compute});
  EXPECT_TRUE(runner.ok()) << runner.status();
  if (!runner.ok()) return {};
  std::vector<int32_t> tokens;
  for (int i = 0; i < 20; ++i) tokens.push_back((7 * i + 3) % (*runner)->vocab());
  return (*runner)->Run(tokens, 16);
}

// Returns the logits of a model's prediction layers; nothing if it has none.
std::vector<float> ConvertedPredictions(const fs::path& model) {
  RunnerOptions options;
  options.load.predictions = true;
  auto runner = ModelRunner::Load(model, options);
  EXPECT_TRUE(runner.ok()) << runner.status();
  if (!runner.ok() || (*runner)->spec().prediction == nullptr) return {};
  (void)(*runner)->Run({5, 7, 11, 13}, 4);
  return (*runner)->Predict({7, 11, 13}, 0);
}

auto Fields(const GenerationDefaults& d) {
  return std::tie(d.temperature, d.top_p, d.top_k, d.min_p, d.repetition_penalty);
}
auto Fields(const TokenizerConfig& c) {
  return std::tie(c.chat_template, c.named_chat_templates, c.bos_token, c.eos_token, c.pad_token,
                  c.unk_token, c.tokenizer_class, c.add_bos_token, c.add_eos_token);
}

// Checks what two folders say beside their weights.
void ExpectSameTexts(const Checkpoint& a, const Checkpoint& b) {
  EXPECT_EQ(NativeConfigJson(a.spec), NativeConfigJson(b.spec));
  EXPECT_EQ(a.eos_token_ids, b.eos_token_ids);
  EXPECT_EQ(Fields(a.generation), Fields(b.generation));
  EXPECT_EQ(Fields(a.tokenizer_config), Fields(b.tokenizer_config));
}

void ExpectSameModel(const fs::path& source, const fs::path& made) {
  auto from = LoadCheckpoint(source, kAnyTokenizer);
  auto to = LoadCheckpoint(made, kAnyTokenizer);
  ASSERT_TRUE(from.ok()) << from.status();
  ASSERT_TRUE(to.ok()) << to.status();
  ExpectSameTexts(*from, *to);
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const std::vector<float> expected = ConvertedLogits(source, compute);
    ASSERT_FALSE(expected.empty());
    EXPECT_EQ(ConvertedLogits(made, compute), expected) << Name(compute);
  }
}

// Returns whether the folder's files have the answers of prediction layers.
bool HasPredictions(const fs::path& folder) {
  const auto answers = ReadFamilyAnswers(folder);
  return answers.ok() && !answers->prediction.empty();
}

class ConvertFamilyTest : public ::testing::TestWithParam<FamilyCase> {};

// A conversion of the conversion changes nothing more, so the format loses nothing.
TEST_P(ConvertFamilyTest, ComputesTheSameAndStaysTheSame) {
  const Place place;
  const auto done = ConvertFolder(GetParam().folder, place.made);
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_EQ(NamesInFolder(place.parent.path()), Names{"made"});
  ExpectSameModel(GetParam().folder, place.made);
  if (HasPredictions(GetParam().folder)) {
    const std::vector<float> expected = ConvertedPredictions(GetParam().folder);
    EXPECT_FALSE(expected.empty());
    EXPECT_EQ(ConvertedPredictions(place.made), expected);
  }
  const fs::path again = place.parent.path() / "again";
  ASSERT_TRUE(ConvertFolder(place.made, again).ok());
  ASSERT_EQ(NamesInFolder(again), NamesInFolder(place.made));
  for (const std::string& name : NamesInFolder(again)) {
    EXPECT_EQ(ReadFile(again / name), ReadFile(place.made / name)) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Convert, ConvertFamilyTest, ::testing::ValuesIn(FamilyCases()),
                         [](const auto& info) { return TestName(info.param); });

TEST(Convert, GgufFilesComputeTheSame) {
  int files = 0;
  for (const auto& entry : fs::directory_iterator(Gguf("").parent_path())) {
    SCOPED_TRACE(entry.path());
    const Place place;
    const auto done = ConvertFolder(entry.path(), place.made);
    ASSERT_TRUE(done.ok()) << done.status();
    EXPECT_FALSE(done->has_tokenizer);
    ExpectSameModel(entry.path(), place.made);
    ++files;
  }
  EXPECT_GT(files, 10);
}

std::string ConvertedBytes(const HostTensor& t) {
  return {static_cast<const char*>(t.data), static_cast<size_t>(t.size()) * SizeOf(t.dtype)};
}

bool IsRouter(const std::string& name) { return name.find(".router.") != std::string::npos; }

// What the files must contain for a tensor.
void ExpectConverted(const HostTensor& from, const HostTensor& to, ConvertType type, bool rounded) {
  ASSERT_EQ(from.shape, to.shape);
  if (type == ConvertType::kF32) {
    EXPECT_EQ(to.dtype, DType::kF32);
    EXPECT_EQ(Widened(to), Widened(from));
    return;
  }
  if (type == ConvertType::kStored || !rounded) {
    EXPECT_EQ(to.dtype, from.dtype);
    EXPECT_EQ(ConvertedBytes(to), ConvertedBytes(from));
    return;
  }
  const bool half = type == ConvertType::kF16;
  EXPECT_EQ(to.dtype, half ? DType::kF16 : DType::kBF16);
  for (int64_t i = 0; i < from.size(); ++i) {
    const float value = ElementAsF32(from, i);
    ASSERT_EQ(ElementAsF32(to, i),
              half ? F32FromF16(F16FromF32(value)) : F32FromBf16(Bf16FromF32(value)));
  }
}

// Sources of all kinds: whole, stacked, transposed, in blocks, with additions, in several files.
TEST(Convert, TypesOfTensors) {
  TempFolder native;
  WriteNativeModel(native.path(), TinyConfig(), DType::kF32);
  const fs::path sources[] = {native.path(),
                              Family("llama-fp8-shards"),
                              Family("gpt-oss-mxfp4"),
                              Family("gemma"),
                              Family("mixtral-torch-file"),
                              Family("granitemoe-fused"),
                              Gguf("mixtral-q8_0"),
                              Gguf("qwen2-f16")};
  for (const fs::path& source : sources) {
    for (const ConvertType type : AllKinds<ConvertType>()) {
      SCOPED_TRACE(source.string() + " as " + std::string(KindName(type)));
      const Place place;
      const auto done = ConvertFolder(source, place.made, {.type = type});
      ASSERT_TRUE(done.ok()) << done.status();
      const auto from = LoadCheckpoint(source, kAnyTokenizer);
      const auto to = LoadCheckpoint(place.made, kAnyTokenizer);
      ASSERT_TRUE(from.ok() && to.ok());
      const auto tensors = RequiredTensors(from->spec);
      for (const TensorRequirement& t : tensors) {
        SCOPED_TRACE(t.name);
        const auto before = from->weights->Get(t.name, t.shape);
        const auto after = to->weights->Get(t.name, t.shape);
        ASSERT_TRUE(before.ok() && after.ok());
        ExpectConverted(*before, *after, type, t.shape.size() == 2 && !IsRouter(t.name));
      }
      EXPECT_EQ(done->weights.tensors, tensors.size());
      EXPECT_EQ(done->weights.files, 1u);
      EXPECT_EQ(done->weights.bytes, to->weight_bytes);
      EXPECT_EQ(done->source_bytes, from->weight_bytes);
      EXPECT_EQ(done->dtype, to->weights->DominantDType());
      EXPECT_EQ(done->source_dtype, from->weights->DominantDType());
      int64_t bytes = 0;
      for (const auto& [unused, size] : done->weights.types) bytes += size;
      EXPECT_EQ(bytes, to->weight_bytes);
    }
  }
}

// What a bf16 run rounds when it loads FP8 weights can be rounded ahead of time. (It does not round
// embeddings, but these are bf16 already.)
TEST(Convert, Bf16GivesTheResultsOfABf16Run) {
  for (const fs::path& source : {Family("llama-fp8-shards"), Family("deepseek-v3-biases-fp8")}) {
    const Place place;
    ASSERT_TRUE(ConvertFolder(source, place.made, {.type = ConvertType::kBf16}).ok());
    EXPECT_EQ(ConvertedLogits(place.made, DType::kBF16), ConvertedLogits(source, DType::kBF16));
    EXPECT_NE(ConvertedLogits(place.made, DType::kF32), ConvertedLogits(source, DType::kF32));
  }
}

TEST(Convert, SplitsLargeModels) {
  TempFolder source;
  WriteNativeModel(source.path(), TinyConfig(), DType::kF32);
  const auto whole = LoadCheckpoint(source.path());
  ASSERT_TRUE(whole.ok()) << whole.status();
  for (const int64_t limit : {int64_t{1}, int64_t{3000}, whole->weight_bytes - 1}) {
    SCOPED_TRACE(limit);
    const Place place;
    const auto done = ConvertFolder(source.path(), place.made, {.shard_bytes = limit});
    ASSERT_TRUE(done.ok()) << done.status();
    const Json index = Json::parse(ReadFile(place.made / "model.safetensors.index.json"));
    EXPECT_EQ(index["metadata"]["total_size"], whole->weight_bytes);
    EXPECT_EQ(index["weight_map"].size(), done->weights.tensors);
    Names shards;
    for (const auto& [tensor, file] : index["weight_map"].items()) shards.insert(file);
    EXPECT_EQ(shards.size(), done->weights.files);
    EXPECT_GE(shards.size(), 2u);
    size_t number = 0;
    for (const std::string& name : shards) {
      char expected[64];
      std::snprintf(expected, sizeof(expected), "model-%05zu-of-%05zu.safetensors", ++number,
                    shards.size());
      EXPECT_EQ(name, expected);
      const auto file = SafetensorsFile::Open(place.made / name);
      ASSERT_TRUE(file.ok()) << file.status();
      const auto& tensors = (*file)->tensors();
      uint64_t bytes = 0;
      for (const TensorEntry& entry : tensors) {
        bytes += entry.end - entry.begin;
        EXPECT_EQ(entry.begin % static_cast<uint64_t>(SizeOf(entry.type)), 0u);
      }
      EXPECT_TRUE(bytes <= static_cast<uint64_t>(limit) || tensors.size() == 1) << name;
    }
    EXPECT_EQ(limit == 1, shards.size() == done->weights.tensors);
    ExpectSameModel(source.path(), place.made);
  }
  const Place place;
  ASSERT_TRUE(ConvertFolder(source.path(), place.made, {.shard_bytes = whole->weight_bytes}).ok());
  EXPECT_EQ(NamesInFolder(place.made),
            (Names{"config.json", "model.safetensors", "tokenizer.json"}));
}

// The progress of a folder goes up to the bytes of all its tensors.
class Told {
 public:
  WriteProgress Callback() {
    return [this](int64_t written, int64_t total) {
      EXPECT_GT(written, last_);
      EXPECT_LE(written, total);
      last_ = written;
      total_ = total;
    };
  }
  void ExpectAll(int64_t bytes) const {
    EXPECT_EQ(last_, bytes);
    EXPECT_EQ(total_, bytes);
  }

 private:
  int64_t last_ = 0;
  int64_t total_ = 0;
};

TEST(Convert, TellsHowMuchIsWritten) {
  TempFolder source;
  WriteNativeModel(source.path(), TinyConfig(), DType::kF32);
  for (const ConvertType type : {ConvertType::kStored, ConvertType::kBf16}) {
    for (const int64_t limit : {int64_t{1}, int64_t{1} << 40}) {
      const Place place;
      Told told;
      const auto done =
          ConvertFolder(source.path(), place.made,
                        {.type = type, .shard_bytes = limit, .progress = told.Callback()});
      ASSERT_TRUE(done.ok()) << done.status();
      told.ExpectAll(done->weights.bytes);
    }
  }
  TempFolder parent;
  Told told;
  const auto done =
      QuantizeFolder(source.path(), parent.path() / "int4", Quantization::kInt4, told.Callback());
  ASSERT_TRUE(done.ok()) << done.status();
  told.ExpectAll(done->bytes);
}

TEST(Convert, KeepsOrWidensIntegers) {
  TempFolder source, parent;
  WriteNativeModel(source.path(), TinyConfig(), DType::kBF16);
  const fs::path integers = parent.path() / "int4";
  ASSERT_TRUE(QuantizeFolder(source.path(), integers, Quantization::kInt4).ok());
  const Place place;
  const auto done = ConvertFolder(integers, place.made);
  ASSERT_TRUE(done.ok()) << done.status();
  auto from = LoadCheckpoint(integers);
  auto to = LoadCheckpoint(place.made);
  ASSERT_TRUE(from.ok() && to.ok());
  EXPECT_EQ(to->weights->StoredQuantization(), Quantization::kInt4);
  EXPECT_EQ(to->weight_bytes, from->weight_bytes);
  EXPECT_EQ(ReadFile(place.made / "model.safetensors").size(),
            ReadFile(integers / "model.safetensors").size());
  ExpectSameModel(integers, place.made);

  const Place wide;
  ASSERT_TRUE(ConvertFolder(integers, wide.made, {.type = ConvertType::kF32}).ok());
  to = LoadCheckpoint(wide.made);
  ASSERT_TRUE(to.ok()) << to.status();
  EXPECT_EQ(to->weights->StoredQuantization(), Quantization::kNone);
  EXPECT_EQ(ConvertedLogits(wide.made, DType::kF32), ConvertedLogits(integers, DType::kF32));
}

TEST(Convert, CopiesTheTextFiles) {
  TempFolder source;
  WriteNativeModel(source.path(), TinyConfig(), DType::kBF16);
  const auto write = [&](const char* name, std::string_view text) {
    WriteFile(source.path() / name, text);
  };
  write("generation_config.json", R"({"top_k": 3, "temperature": 0.3, "eos_token_id": [7, 256]})");
  write("tokenizer_config.json", R"({"eos_token": "<|endoftext|>", "add_bos_token": false})");
  write("chat_template.jinja", "{{ messages[0].content }}");
  write("special_tokens_map.json", "{}");
  write("notes.txt", "not part of a model");
  const Place place;
  const auto done = ConvertFolder(source.path(), place.made);
  ASSERT_TRUE(done.ok()) << done.status();
  const Names copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                        "special_tokens_map.json", "generation_config.json"};
  EXPECT_EQ(Names(done->other_files.begin(), done->other_files.end()), copied);
  EXPECT_TRUE(done->has_tokenizer);
  EXPECT_FALSE(done->tokenizer_stays);
  Names all = copied;
  all.insert({"config.json", "model.safetensors"});
  EXPECT_EQ(NamesInFolder(place.made), all);
  for (const std::string& name : copied) {
    EXPECT_EQ(ReadFile(place.made / name), ReadFile(source.path() / name)) << name;
  }
  const auto from = LoadCheckpoint(source.path());
  const auto to = LoadCheckpoint(place.made);
  ASSERT_TRUE(from.ok() && to.ok());
  ExpectSameTexts(*from, *to);
  EXPECT_EQ(to->eos_token_ids, (std::vector<TokenId>{256, 7}));
  EXPECT_EQ(*to->tokenizer->Encode("ab<|endoftext|>", true),
            *from->tokenizer->Encode("ab<|endoftext|>", true));

  // A folder of Hugging Face's cache, whose files are links.
  TempFolder cache;
  const fs::path snapshot = cache.path() / "models--org--tiny" / "snapshots" / "abc";
  fs::create_directories(snapshot);
  fs::create_directories(cache.path() / "models--org--tiny" / "blobs");
  for (const std::string& name : all) {
    fs::copy_file(place.made / name, cache.path() / "models--org--tiny" / "blobs" / name);
    fs::create_symlink(fs::path("../../blobs") / name, snapshot / name);
  }
  const fs::path again = place.parent.path() / "again";
  ASSERT_TRUE(ConvertFolder(cache.path() / "models--org--tiny", again).ok());
  EXPECT_EQ(NamesInFolder(again), all);
  for (const std::string& name : all) {
    EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(again / name))) << name;
    EXPECT_EQ(ReadFile(again / name), ReadFile(place.made / name)) << name;
  }
  // A file of a folder stands for it.
  const fs::path third = place.parent.path() / "third";
  ASSERT_TRUE(ConvertFolder(place.made / "config.json", third).ok());
  EXPECT_EQ(NamesInFolder(third), all);
}

// A SentencePiece model with the pieces <unk>, <s>, </s>, "▁", "a", "b", "▁a".
std::string SentencePieces() {
  const auto field = [](int number, std::string_view bytes) {
    return std::string(1, static_cast<char>(number << 3 | 2)) +
           std::string(1, static_cast<char>(bytes.size())) + std::string(bytes);
  };
  const auto piece = [&](std::string_view text, float score, char type) {
    std::string out = field(1, text) + '\x15';
    const uint32_t bits = std::bit_cast<uint32_t>(score);
    for (int i = 0; i < 4; ++i) out.push_back(static_cast<char>(bits >> (8 * i)));
    return field(1, out + '\x18' + type);
  };
  constexpr char kNormal = 1, kUnknown = 2, kControl = 3;
  return piece("<unk>", 0, kUnknown) + piece("<s>", 0, kControl) + piece("</s>", 0, kControl) +
         piece("▁", -3, kNormal) + piece("a", -2, kNormal) + piece("b", -2.5f, kNormal) +
         piece("▁a", -1, kNormal) + field(2, std::string("\x18\x01", 2));
}

// A GGUF file with sampling defaults, a tokenizer of the pieces above, and templates.
void WriteGguf(const fs::path& path) {
  GgufParts parts = PartsOf(ReadFile(Gguf("qwen2-bf16")));
  parts.Set(GgufF32("general.sampling.temp", 0.7f));
  parts.Set(GgufF32("general.sampling.top_p", 0.9f));
  parts.Set(GgufF32("general.sampling.min_p", 0.05f));
  parts.Set(GgufText("tokenizer.ggml.model", "llama"));
  parts.Set(GgufTexts("tokenizer.ggml.tokens", {"<unk>", "<s>", "</s>", "▁", "a", "b", "▁a"}));
  parts.Set(GgufInts("tokenizer.ggml.token_type", {2, 3, 3, 1, 1, 1, 1}));
  parts.Set(GgufFloats("tokenizer.ggml.scores", {0, 0, 0, -3, -2, -2.5f, -1}));
  parts.Set(GgufText("tokenizer.chat_template", "{{ messages[0].content }} \n"));
  parts.Set(GgufText("tokenizer.chat_template.tool_use", "{{ tools }}"));
  WriteFile(path, GgufBytes(parts));
}

TEST(Convert, WritesWhatAGgufFileSays) {
  TempFolder folder;
  const fs::path gguf = folder.path() / "a.gguf";
  WriteGguf(gguf);
  const auto from = LoadCheckpoint(gguf);
  ASSERT_TRUE(from.ok()) << from.status();
  ASSERT_EQ(from->tokenizer_config.named_chat_templates.size(), 1u);
  const Place place;
  auto done = ConvertFolder(gguf, place.made);
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_FALSE(done->has_tokenizer);
  EXPECT_TRUE(done->tokenizer_stays);
  const Names texts = {"chat_template.jinja", "tokenizer_config.json", "generation_config.json"};
  EXPECT_EQ(Names(done->other_files.begin(), done->other_files.end()), texts);
  auto to = LoadCheckpoint(place.made, kAnyTokenizer);
  ASSERT_TRUE(to.ok()) << to.status();
  EXPECT_EQ(to->tokenizer, nullptr);
  ExpectSameTexts(*from, *to);

  // The tokenizer's own file, and the same with fairseq's ids. In both, the GGUF file's settings
  // say that a text begins with <s>.
  const fs::path model = folder.path() / "own.model";
  const fs::path dictionary = folder.path() / "mydict.txt";
  WriteFile(model, SentencePieces());
  WriteFile(dictionary, "▁a 5\nb 3\n");
  const fs::path second = place.parent.path() / "second";
  done = ConvertFolder(gguf, second, {.tokenizer = {.tokenizer = model}});
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_TRUE(done->has_tokenizer);
  EXPECT_FALSE(done->tokenizer_stays);
  EXPECT_TRUE(fs::exists(second / "tokenizer.model"));
  to = LoadCheckpoint(second);
  ASSERT_TRUE(to.ok()) << to.status();
  ExpectSameTexts(*from, *to);
  EXPECT_EQ(*to->tokenizer->Encode("ab", true), (std::vector<TokenId>{1, 6, 5}));
  EXPECT_EQ(*to->tokenizer->Encode("ab", true), *from->tokenizer->Encode("ab", true));

  const fs::path third = place.parent.path() / "third";
  done = ConvertFolder(gguf, third, {.tokenizer = {.tokenizer = model, .dictionary = dictionary}});
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_EQ(ReadFile(third / "sentencepiece.bpe.model"), SentencePieces());
  EXPECT_EQ(ReadFile(third / "dict.txt"), ReadFile(dictionary));
  to = LoadCheckpoint(third);
  ASSERT_TRUE(to.ok()) << to.status();
  EXPECT_EQ(*to->tokenizer->Encode("ab", true), (std::vector<TokenId>{0, 4, 5}));
}

TEST(Convert, AGivenTokenizerReplacesThatOfTheSource) {
  TempFolder source;
  WriteNativeModel(source.path(), TinyConfig());
  const fs::path pieces = source.path() / "sentencepiece.bpe.model";
  WriteFile(pieces, SentencePieces());
  const Place place;
  // Without a dictionary, the name says whose ids the pieces have.
  ASSERT_TRUE(ConvertFolder(source.path(), place.made, {.tokenizer = {.tokenizer = pieces}}).ok());
  EXPECT_EQ(NamesInFolder(place.made),
            (Names{"config.json", "model.safetensors", "sentencepiece.bpe.model"}));
  EXPECT_EQ(*LoadCheckpoint(place.made)->tokenizer->Encode("a", true),
            (std::vector<TokenId>{0, 7}));
  const fs::path other = place.parent.path() / "other.json";
  WriteFile(other, TinyTokenizerJson());
  const fs::path back = place.parent.path() / "back";
  ASSERT_TRUE(ConvertFolder(place.made, back, {.tokenizer = {.tokenizer = other}}).ok());
  EXPECT_EQ(NamesInFolder(back), (Names{"config.json", "model.safetensors", "tokenizer.json"}));
}

// The end of text that tokenizer_config.json names is another id in another tokenizer.
TEST(Convert, TheEndOfTextFollowsTheTokenizer) {
  TempFolder source;
  WriteNativeModel(source.path(), TinyConfig());
  WriteFile(source.path() / "tokenizer_config.json", R"({"eos_token": "Z"})");
  const auto ends = [](const fs::path& folder, TokenId id) {
    const auto checkpoint = LoadCheckpoint(folder, kAnyTokenizer);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    if (!checkpoint.ok()) return false;
    const std::vector<TokenId>& ids = checkpoint->eos_token_ids;
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  };
  const Place place;
  ASSERT_TRUE(ConvertFolder(source.path(), place.made).ok());
  EXPECT_TRUE(ends(place.made, 'Z'));
  const fs::path other = place.parent.path() / "other.json";
  WriteFile(other, TinyTokenizerJson());
  fs::remove(source.path() / "tokenizer.json");
  EXPECT_FALSE(ends(source.path(), 'Z'));
  const fs::path given = place.parent.path() / "given";
  const auto done = ConvertFolder(source.path(), given, {.tokenizer = {.tokenizer = other}});
  ASSERT_TRUE(done.ok()) << done.status();
  EXPECT_TRUE(ends(given, 'Z'));
}

TEST(Convert, RefusesWrongPlaces) {
  TempFolder parent;
  WriteFile(parent.path() / "file", "x");
  const fs::path source = Family("qwen2");
  const auto status = [](const fs::path& from, const fs::path& to) {
    return ConvertFolder(from, to).status();
  };
  EXPECT_TRUE(Mentions(status(source, parent.path()),
                       {"expected no such folder or an empty one, found one with files"}));
  EXPECT_TRUE(Mentions(status(source, parent.path() / "file"),
                       {"expected no such folder or an empty one, found a file"}));
  EXPECT_TRUE(Mentions(status(source, source), {"found one with files"}));
  EXPECT_FALSE(status(source, parent.path() / "no" / "parent").ok());
  EXPECT_TRUE(Mentions(status(parent.path() / "nothing", parent.path() / "new"),
                       {"nothing: expected a model folder", "found nothing"}));
  EXPECT_EQ(NamesInFolder(parent.path()), Names{"file"});
  EXPECT_EQ(ReadFile(parent.path() / "file"), "x");
  fs::create_directory(parent.path() / "empty");
  EXPECT_TRUE(status(source, parent.path() / "empty" / "").ok());
  EXPECT_EQ(NamesInFolder(parent.path()), (Names{"empty", "file"}));
}

TEST(Convert, RefusesWrongTokenizers) {
  TempFolder folder;
  const fs::path json = folder.path() / "tokenizer.json";
  const fs::path model = folder.path() / "tokenizer.model";
  const fs::path text = folder.path() / "vocabulary.txt";
  WriteFile(json, TinyTokenizerJson());
  WriteFile(model, "damaged");
  WriteFile(text, "x");
  const Place place;
  const auto status = [&](const GivenTokenizer& given) {
    return ConvertFolder(Family("qwen2"), place.made, {.tokenizer = given}).status();
  };
  EXPECT_TRUE(Mentions(status({.tokenizer = text}),
                       {"vocabulary.txt: expected a file *.json (tokenizer.json) or *.model",
                        "found another name"}));
  EXPECT_TRUE(Mentions(status({.tokenizer = json, .dictionary = text}),
                       {"a dictionary belongs to a SentencePiece model", "expected a file *.model",
                        "found another name"}));
  EXPECT_TRUE(Mentions(status({.dictionary = text}),
                       {"a dictionary belongs to a SentencePiece model", "found none"}));
  EXPECT_TRUE(Mentions(status({.tokenizer = folder.path() / "no.json"}),
                       {"no.json: cannot copy: No such file"}));
  EXPECT_TRUE(Mentions(status({.tokenizer = model}), {"tokenizer.model: expected"}));
  EXPECT_TRUE(Mentions(status({.tokenizer = json}),
                       {"expected token ids in [0, 95], found ids up to 256"}));
  EXPECT_TRUE(NamesInFolder(place.parent.path()).empty());
}

TEST(Convert, RefusesNumbersThatTheTypeCannotHold) {
  TempFolder source;
  WriteNativeModel(source.path(), TinyConfig());
  auto tensors = RandomTensors(LoadCheckpoint(source.path())->spec);
  for (RawTensor& t : tensors) {
    const float value = 70000.0f;
    if (t.name != "blocks.0.feed_forward.experts.6.down.weight" && t.name != "norm.weight")
      continue;
    std::memcpy(t.bytes.data() + t.bytes.size() - 4, &value, 4);
  }
  WriteFile(source.path() / "model.safetensors", SafetensorsBytes(tensors));
  const Place place;
  EXPECT_TRUE(
      Mentions(ConvertFolder(source.path(), place.made, {.type = ConvertType::kF16}).status(),
               {"tensor \"blocks.0.feed_forward.experts.6.down.weight\": row 7, column 20: "
                "expected a number "
                "that f16 can hold, found 70000"}));
  EXPECT_TRUE(NamesInFolder(place.parent.path()).empty());
  EXPECT_TRUE(ConvertFolder(source.path(), place.made, {.type = ConvertType::kBf16}).ok());
}

TEST(Convert, TypesHaveNames) {
  EXPECT_EQ(KindNames<ConvertType>(), (std::vector<std::string>{"stored", "f32", "bf16", "f16"}));
  EXPECT_EQ(KindNamed<ConvertType>("int8"), std::nullopt);
}

// Simulates a full disk by a limit on the size of files.
TEST(Convert, LeavesNothingBehindWhereThereIsNoRoom) {
  TempFolder source;
  WriteNativeModel(source.path(), TinyConfig());
  const Place place;
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = limit;
  small.rlim_cur = 16 << 10;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto done = ConvertFolder(source.path(), place.made);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(Mentions(done.status(), {"model.safetensors: cannot write: "}));
  EXPECT_TRUE(NamesInFolder(place.parent.path()).empty());
}

}  // namespace
}  // namespace moeserve::testing
