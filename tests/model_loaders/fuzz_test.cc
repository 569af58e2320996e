// Reads valid files with pseudo-random mutations. Reading must neither crash nor throw, and an
// accepted file must meet the guarantees of its reader.
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "engine/spec/weights.h"
#include "gtest/gtest.h"
#include "model_loaders/architectures/native/config_json.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/files/gguf/gguf_file.h"
#include "model_loaders/files/safetensors.h"
#include "model_loaders/files/torch/pickle.h"
#include "model_loaders/files/torch/torch_file.h"
#include "model_loaders/files/torch/zip_file.h"
#include "model_loaders/inspect.h"
#include "model_loaders/tokenizer/generation_config.h"
#include "model_loaders/tokenizer/gguf_tokenizer.h"
#include "tests/model_loaders/torch_bytes.h"
#include "tests/support/native_model.h"

namespace moeserve {
namespace {

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : state_(seed) {}

  std::string Mutate(std::string_view text) {
    std::string out(text);
    if (Below(2) == 0) {
      // Replaces a single value, after which the text usually still parses.
      ReplaceValue(&out, Below(out.size() + 1));
    } else {
      for (uint64_t edits = 1 + Below(3); edits > 0; --edits) Edit(&out);
    }
    return out;
  }

  // Like Mutate(), for binary formats.
  std::string MutateBytes(std::string_view bytes) {
    std::string out(bytes);
    for (uint64_t edits = 1 + Below(2); edits > 0; --edits) EditBytes(&out);
    return out;
  }

  uint64_t Below(uint64_t bound) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (state_ >> 33) % bound;
  }

 private:
  // Values that often break parsers.
  static constexpr std::string_view kHostile[] = {"0",
                                                  "-1",
                                                  "1",
                                                  "2",
                                                  "3",
                                                  "4",
                                                  "8",
                                                  "9223372036854775807",
                                                  "9223372036854775808",
                                                  "18446744073709551615",
                                                  "18446744073709551616",
                                                  "-9223372036854775808",
                                                  "2147483647",
                                                  "2147483648",
                                                  "4294967296",
                                                  "1e308",
                                                  "1e999",
                                                  "-0.0",
                                                  "0.5",
                                                  "1e-320",
                                                  "null",
                                                  "true",
                                                  "false",
                                                  "\"gelu\"",
                                                  "\"\"",
                                                  "{}",
                                                  "[]",
                                                  "[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]",
                                                  "\"\\ud800\"",
                                                  "NaN",
                                                  "\"rms\"",
                                                  "65536",
                                                  "1048576",
                                                  "16777216",
                                                  "10000",
                                                  ",",
                                                  ":",
                                                  "}",
                                                  "]",
                                                  "\"",
                                                  "\\",
                                                  "\"F64\"",
                                                  "\"I8\"",
                                                  "[9223372036854775807,2]",
                                                  "[0,0]",
                                                  "[4294967296,4294967296]",
                                                  "\xff",
                                                  "\"kind\":"};

  void Edit(std::string* text) {
    if (text->empty()) {
      *text = "{}";
      return;
    }
    const size_t at = Below(text->size());
    switch (Below(6)) {
      case 0:
        (*text)[at] = static_cast<char>(Below(256));
        break;
      case 1:
        text->erase(at, 1 + Below(8));
        break;
      case 2:
        text->insert(at, kHostile[Below(std::size(kHostile))]);
        break;
      case 3:
        text->resize(at);
        break;
      case 4: {  // copies one part over another
        const std::string piece = text->substr(at, 1 + Below(24));
        text->replace(Below(text->size()), piece.size(), piece);
        break;
      }
      default:
        ReplaceValue(text, at);
    }
  }

  // Replaces, inserts or removes a byte, or overwrites a number of 1 to 8 bytes.
  void EditBytes(std::string* bytes) {
    if (bytes->empty()) bytes->push_back('.');
    const size_t at = Below(bytes->size());
    const auto size = static_cast<size_t>(1) << Below(4);
    switch (Below(5)) {
      case 0:
        (*bytes)[at] = static_cast<char>(Below(256));
        break;
      case 1:
        bytes->insert(at, 1, static_cast<char>(Below(256)));
        break;
      case 2:
        bytes->erase(at, size);
        break;
      case 3: {
        const std::string piece = bytes->substr(at, 1 + Below(24));
        bytes->insert(Below(bytes->size()), piece);
        break;
      }
      default: {
        constexpr uint64_t kNumbers[] = {0, 1, 2, 7, 255, 1u << 31, ~0u, 1ull << 62, ~0ull};
        const uint64_t number = kNumbers[Below(std::size(kNumbers))] - Below(2);
        for (size_t i = 0; i < size && at + i < bytes->size(); ++i) {
          (*bytes)[at + i] = static_cast<char>(number >> (8 * i));
        }
      }
    }
  }

  // Replaces the number or literal at or after `at` by another value. Most of the resulting texts
  // still parse.
  void ReplaceValue(std::string* text, size_t at) {
    const size_t colon = text->find(':', at);
    if (colon == std::string::npos) return;
    const size_t end = text->find_first_of(",}]", colon);
    if (end == std::string::npos) return;
    text->replace(colon + 1, end - colon - 1, kHostile[Below(std::size(kHostile))]);
  }

  uint64_t state_;
};

TEST(Fuzz, Configurations) {
  const std::string good = testing::TinyConfig().dump();
  Mutator mutator(1);
  int accepted = 0;
  for (int i = 0; i < 6000; ++i) {
    const std::string text = mutator.Mutate(good);
    const auto config = ParseNativeConfig(text);
    if (!config.ok()) {
      EXPECT_FALSE(config.status().message().empty());
      continue;
    }
    ++accepted;
    EXPECT_TRUE(Validate(config->spec).ok()) << text;
    const ModelSummary summary = Summarize(config->spec);
    EXPECT_GE(summary.activated.min, 0);
    EXPECT_LE(summary.activated.min, summary.activated.max);
    EXPECT_LE(summary.activated.max, summary.parameters);
    EXPECT_FALSE(SummaryText(summary).empty());
  }
  // Enough mutations must be accepted, else the test would only reach the JSON parser.
  EXPECT_GT(accepted, 100);
}

TEST(Fuzz, SafetensorsHeaders) {
  const auto spec = ParseNativeConfig(testing::TinyConfig().dump())->spec;
  std::vector<testing::RawTensor> tensors = testing::RandomTensors(spec);
  tensors.resize(6);
  const std::string good = testing::SafetensorsHeader(tensors, {{"format", "pt"}});
  const uint64_t size = testing::SafetensorsData(tensors).size();
  ASSERT_TRUE(ParseSafetensorsHeader(good, size).ok());
  Mutator mutator(2);
  for (int i = 0; i < 6000; ++i) {
    const std::string text = mutator.Mutate(good);
    const auto header = ParseSafetensorsHeader(text, size);
    if (!header.ok()) continue;
    uint64_t covered = 0;
    for (const TensorEntry& entry : header->tensors) {
      ASSERT_EQ(entry.begin, covered) << text;
      ASSERT_LE(entry.end, size) << text;
      covered = entry.end;
    }
    ASSERT_EQ(covered, size) << text;
  }
}

TEST(Fuzz, GenerationConfigs) {
  Mutator mutator(3);
  for (int i = 0; i < 3000; ++i) {
    const std::string text = mutator.Mutate(
        R"({"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0, "eos_token_id": [1, 2]})");
    const auto config = ParseGenerationConfig(text, 10);
    if (!config.ok()) continue;
    for (const TokenId id : config->eos_token_ids) ASSERT_TRUE(id >= 0 && id < 10) << text;
  }
}

// Returns the pickles of the files in tests/data/torch_files.
std::vector<std::string> GoodPickles() {
  std::vector<std::string> pickles;
  for (const char* name : {"state-1.13.pt", "state-2.15.pt", "checkpoint-1.13-p1.pt",
                           "checkpoint-2.15-p2.pt", "checkpoint-2.15-p5.pt"}) {
    const std::string bytes = testing::ReadFile(std::string(MOESERVE_TORCH_FILES_DIR) + "/" + name);
    const auto zip = ZipFile::Parse(bytes);
    EXPECT_TRUE(zip.ok()) << zip.status();
    for (const ZipEntry& entry : zip->entries()) {
      if (entry.name.ends_with("/data.pkl")) pickles.emplace_back(entry.bytes);
    }
  }
  return pickles;
}

// Visits every value, each in all its places, and returns a number that depends on all of them.
size_t Walk(const PickleValue& value, int depth, size_t* budget) {
  EXPECT_LE(depth, 200);
  if (*budget == 0) return 0;
  --*budget;
  size_t sum = static_cast<size_t>(value.integer);
  for (const char c : value.text) sum += static_cast<unsigned char>(c);
  EXPECT_TRUE(value.kind != PickleKind::kDict || value.items.size() % 2 == 0);
  EXPECT_TRUE(value.kind != PickleKind::kCall || value.items.size() == PickleValue::kCallItems);
  for (size_t i = 0; i < value.items.size(); ++i) {
    const bool state = value.Is(PickleKind::kCall) && i == PickleValue::kState;
    if (value.items[i] != nullptr && !state) sum += Walk(*value.items[i], depth + 1, budget);
  }
  return sum;
}

TEST(Fuzz, Pickles) {
  Mutator mutator(5);
  int accepted = 0;
  for (const std::string& good : GoodPickles()) {
    ASSERT_TRUE(PickleTree::Parse(good).ok());
    for (int i = 0; i < 4000; ++i) {
      const std::string bytes = mutator.MutateBytes(good);
      const auto tree = PickleTree::Parse(bytes);
      if (!tree.ok()) {
        EXPECT_FALSE(tree.status().message().empty());
        continue;
      }
      ++accepted;
      size_t budget = 100'000;
      Walk(tree->root(), 1, &budget);
      EXPECT_FALSE(ShowPickle(tree->root()).empty());
    }
  }
  EXPECT_GT(accepted, 100);
}

TEST(Fuzz, ZipArchives) {
  Mutator mutator(6);
  int accepted = 0;
  for (const bool torch_style : {false, true}) {
    const std::string good =
        testing::ZipBytes({{"a/data.pkl", "N."}, {"a/data/0", "12345678"}, {"a/version", "3"}},
                          {.descriptors = torch_style, .zip64 = torch_style});
    ASSERT_TRUE(ZipFile::Parse(good).ok());
    for (int i = 0; i < 10'000; ++i) {
      const std::string bytes = mutator.MutateBytes(good);
      const auto zip = ZipFile::Parse(bytes);
      if (!zip.ok()) continue;
      ++accepted;
      std::vector<std::string_view> parts;
      for (const ZipEntry& entry : zip->entries()) {
        ASSERT_GE(entry.bytes.data(), bytes.data());
        ASSERT_LE(entry.bytes.data() + entry.bytes.size(), bytes.data() + bytes.size());
        for (const std::string_view other : parts) {
          ASSERT_TRUE(entry.bytes.data() >= other.data() + other.size() ||
                      other.data() >= entry.bytes.data() + entry.bytes.size());
        }
        parts.push_back(entry.bytes);
        ASSERT_EQ(zip->Find(entry.name), &entry);
      }
    }
  }
  EXPECT_GT(accepted, 100);
}

// Files with a damaged pickle whose CRC is right. Reads the data of every tensor of an accepted
// file.
TEST(Fuzz, TorchFiles) {
  testing::TempFolder folder;
  const auto path = folder.path() / "a.bin";
  const std::string good = testing::PickleDict(
      {{"a", testing::PickleTensor("FloatStorage", "0", 6, 0, {2, 3}, {3, 1})},
       {"b", testing::PickleTensor("HalfStorage", "1", 8, 1, {3, 2}, {1, 3})},
       {"c", testing::PickleTensor("FloatStorage", "0", 6, 2, {4, 1}, {0, 7})}});
  Mutator mutator(7);
  int accepted = 0;
  for (int i = 0; i < 2000; ++i) {
    testing::WriteFile(path, testing::TorchBytes(i == 0 ? good : mutator.MutateBytes(good),
                                                 {std::string(24, 'x'), std::string(16, 'y')}));
    const auto file = TorchStateDict::Open(path);
    if (!file.ok()) continue;
    ++accepted;
    for (const TensorEntry& entry : (*file)->tensors()) {
      const auto data = (*file)->Read(entry);
      ASSERT_TRUE(data.ok()) << data.status();
      ASSERT_EQ(data->bytes.size(), entry.end - entry.begin);
      ASSERT_EQ(ByteCount(entry.shape, entry.type), data->bytes.size());
      ASSERT_EQ(data->bytes.find_first_not_of("xy"), std::string_view::npos);
    }
  }
  EXPECT_GT(accepted, 50);
}

// Reads the data of every tensor and the tokenizer of an accepted file.
TEST(Fuzz, GgufFiles) {
  testing::TempFolder folder;
  const auto path = folder.path() / "a.gguf";
  Mutator mutator(8);
  int accepted = 0;
  int tokenizers = 0;
  for (const char* name : {"blocks", "tokenizers/qwen2", "tokenizers/spm", "tokenizers/gemma4"}) {
    const std::string good =
        testing::ReadFile(std::string(MOESERVE_GGUF_DIR) + "/" + name + ".gguf");
    ASSERT_TRUE(ParseGguf(good).ok());
    for (int i = 0; i < 1000; ++i) {
      testing::WriteFile(path, mutator.MutateBytes(good));
      const auto file = GgufFile::Open(path);
      if (!file.ok()) {
        EXPECT_EQ(file.status().message().find("a.gguf: "), 0u) << file.status();
        continue;
      }
      ++accepted;
      for (const TensorEntry& entry : (*file)->tensors()) {
        const auto data = (*file)->Read(entry);
        ASSERT_TRUE(data.ok()) << data.status();
        ASSERT_EQ(data->bytes.size(), entry.end);
        ASSERT_EQ(ByteCount(entry.shape, entry.type), data->bytes.size());
      }
      const auto tokenizer = ReadGgufTokenizer(**file);
      if (!tokenizer.ok() || *tokenizer == nullptr) continue;
      ++tokenizers;
      const auto ids = (*tokenizer)->Encode("Some text <|im_end|>\n", true);
      ASSERT_TRUE(ids.ok()) << ids.status();
      ASSERT_TRUE((*tokenizer)->Decode(*ids, false).ok());
    }
  }
  EXPECT_GT(accepted, 250);
  EXPECT_GT(tokenizers, 50);
}

// Models with a damaged header. Reads the data of every tensor of an accepted file.
TEST(Fuzz, GgufModels) {
  testing::TempFolder folder;
  const auto path = folder.path() / "a.gguf";
  Mutator mutator(9);
  int accepted = 0;
  for (const char* name :
       {"models/mixtral-q8_0", "models/qwen2-moe-bf16", "models/llama-llama3-shards-bf16",
        "variants/gemma4-moe-bf16", "variants/step3p5-bf16", "encoders/roberta-cross-encoder",
        "encoders/nomic-experts", "encoders/gemma3-bidirectional", "encoders/umt5"}) {
    const std::string good =
        testing::ReadFile(std::string(MOESERVE_GGUF_DIR) + "/" + name + ".gguf");
    const size_t head = 3000;  // of about as many bytes before the data
    for (int i = 0; i < 500; ++i) {
      testing::WriteFile(path, mutator.MutateBytes(good.substr(0, head)) + good.substr(head));
      auto checkpoint = LoadCheckpoint(path, {.require_tokenizer = false});
      if (!checkpoint.ok()) {
        ASSERT_NE(checkpoint.status().message().find("a.gguf: "), absl::string_view::npos)
            << checkpoint.status();
        continue;
      }
      ++accepted;
      EXPECT_TRUE(Validate(checkpoint->spec).ok());
      for (const TensorRequirement& tensor : RequiredTensors(checkpoint->spec)) {
        ASSERT_TRUE(checkpoint->weights->Get(tensor.name, tensor.shape).ok());
      }
    }
  }
  EXPECT_GT(accepted, 50);
}

// Folders with one damaged file. Reads the data of every tensor if a folder is accepted.
TEST(Fuzz, Folders) {
  testing::TempFolder folder;
  testing::WriteNativeModel(folder.path(), testing::TinyConfig());
  testing::WriteFile(folder.path() / "generation_config.json", R"({"top_k": 3})");
  testing::WriteFile(folder.path() / "tokenizer_config.json",
                     R"({"added_tokens_decoder": {"270": {"content": "<x>", "special": true}},
                         "eos_token": "<|endoftext|>", "additional_special_tokens": ["<x>"]})");
  testing::WriteFile(folder.path() / "special_tokens_map.json", R"({"pad_token": "<x>"})");
  Mutator mutator(4);
  for (const char* name :
       {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json",
        "tokenizer_config.json", "special_tokens_map.json"}) {
    const std::string good = testing::ReadFile(folder.path() / name);
    const bool binary = std::string_view(name) == "model.safetensors";
    // damage after this offset would not be detected
    const size_t head = binary ? 4096 : good.size();
    for (int i = 0; i < 300; ++i) {
      testing::WriteFile(folder.path() / name,
                         mutator.Mutate(good.substr(0, head)) + good.substr(head));
      auto checkpoint = LoadCheckpoint(folder.path());
      if (!checkpoint.ok()) continue;
      unsigned sum = 0;
      for (const TensorRequirement& tensor : RequiredTensors(checkpoint->spec)) {
        const auto loaded = checkpoint->weights->Get(tensor.name, tensor.shape);
        ASSERT_TRUE(loaded.ok()) << loaded.status();
        size_t bytes = SizeOf(loaded->dtype);
        for (const int64_t dim : tensor.shape) bytes *= static_cast<size_t>(dim);
        const auto* data = static_cast<const unsigned char*>(loaded->data);
        for (size_t b = 0; b < bytes; ++b) sum += data[b];
      }
      EXPECT_NE(sum, 0u);
    }
    testing::WriteFile(folder.path() / name, good);
  }
  EXPECT_TRUE(LoadCheckpoint(folder.path()).ok());
}

}  // namespace
}  // namespace moeserve
