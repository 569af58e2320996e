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
#include "model_loaders/files/safetensors.h"
#include "model_loaders/inspect.h"
#include "model_loaders/loader.h"
#include "model_loaders/tokenizer/generation_config.h"
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

// Folders with one damaged file. Reads the data of every tensor if a folder is accepted.
TEST(Fuzz, Folders) {
  testing::TempFolder folder;
  testing::WriteNativeModel(folder.path(), testing::TinyConfig());
  testing::WriteFile(folder.path() / "generation_config.json", R"({"top_k": 3})");
  testing::WriteFile(folder.path() / "tokenizer_config.json",
                     R"({"added_tokens_decoder": {"3": {}}, "eos_token": "<|endoftext|>"})");
  Mutator mutator(4);
  for (const char* name : {"config.json", "model.safetensors", "tokenizer.json",
                           "generation_config.json", "tokenizer_config.json"}) {
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
