// The tokenizers in GGUF files, which tests/reference/families/make_gguf_goldens.py wrote with the
// Python package `gguf`.
#include "model_loaders/tokenizer/gguf_tokenizer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "model_loaders/files/gguf/gguf_file.h"
#include "nlohmann/json.hpp"
#include "tests/model_loaders/gguf_bytes.h"
#include "tests/model_loaders/support.h"
#include "tests/support/family_cases.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

namespace fs = std::filesystem;

fs::path TokenizerGolden(const std::string& name) {
  return std::string(MOESERVE_GGUF_DIR) + "/tokenizers/" + name;
}

class GgufTokenizerTest : public ::testing::TestWithParam<std::string> {};

// Compares a tokenizer with the ids in NAME.json.
void ExpectIds(const fs::path& path, const std::string& name) {
  const auto file = GgufFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto tokenizer = ReadGgufTokenizer(**file);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const auto cases = nlohmann::json::parse(ReadFile(TokenizerGolden("" + name + ".json")));
  ASSERT_GE(cases.size(), 20u);
  for (const auto& c : cases) {
    const auto text = c["text"].get<std::string>();
    SCOPED_TRACE(text);
    const auto ids = (*tokenizer)->Encode(text, /*add_special_tokens=*/true);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, c["ids"].get<std::vector<TokenId>>());
    const auto decoded = (*tokenizer)->Decode(*ids, /*skip_special_tokens=*/true);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(*decoded, c["decoded"].get<std::string>());
  }
}

TEST_P(GgufTokenizerTest, HasTheIdsOfTheReference) {
  ExpectIds(TokenizerGolden("" + GetParam() + ".gguf"), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Gguf, GgufTokenizerTest,
                         ::testing::Values("gemma4", "gpt-2", "llama-bpe", "olmo", "qwen2",
                                           "smollm", "spm", "spm-no-prefix", "spm-spaces"),
                         [](const auto& info) {
                           return TestName({info.param, {}});
                         });

// A file whose tokenizer.ggml.pre is `pre` has the ids in NAME.json.
struct PreTokenizerCase {
  std::string pre;
  std::string file = "patterns";
  std::string name = pre;
};
void PrintTo(const PreTokenizerCase& c, std::ostream* out) { *out << c.pre; }

class GgufPreTokenizerTest : public ::testing::TestWithParam<PreTokenizerCase> {};

TEST_P(GgufPreTokenizerTest, HasTheIdsOfTheReference) {
  GgufParts parts = PartsOf(ReadFile(TokenizerGolden("" + GetParam().file + ".gguf")));
  parts.Set(GgufText("tokenizer.ggml.pre", GetParam().pre));
  // glm4, unlike llama-bpe, adds no first token unless the file says so.
  // The ids of the patterns are those without a first token.
  if (GetParam().file == "llama-bpe") parts.Set(GgufBool("tokenizer.ggml.add_bos_token", 1));
  if (GetParam().file == "patterns") parts.Set(GgufBool("tokenizer.ggml.add_bos_token", 0));
  TempFolder folder;
  WriteFile(folder.path() / "a.gguf", GgufBytes(parts));
  ExpectIds(folder.path() / "a.gguf", GetParam().name);
}

INSTANTIATE_TEST_SUITE_P(
    Gguf, GgufPreTokenizerTest,
    ::testing::Values(PreTokenizerCase{"bailingmoe2"},
                      PreTokenizerCase{"bailingmoe", "patterns", "bailingmoe2"},
                      PreTokenizerCase{"deepseek-llm"}, PreTokenizerCase{"deepseek-v3"},
                      PreTokenizerCase{"gpt-4o"}, PreTokenizerCase{"kimi-k2"},
                      PreTokenizerCase{"qwen35"}, PreTokenizerCase{"afmoe"},
                      PreTokenizerCase{"cohere2moe"}, PreTokenizerCase{"exaone-moe"},
                      PreTokenizerCase{"k2-horizon"}, PreTokenizerCase{"tekken"},
                      PreTokenizerCase{"tiny_aya", "patterns", "cohere2moe"},
                      PreTokenizerCase{"llama4", "patterns", "gpt-4o"},
                      PreTokenizerCase{"solar-open", "patterns", "bailingmoe2"},
                      PreTokenizerCase{"mellum2", "smollm", "smollm"},
                      PreTokenizerCase{"minimax-m2", "patterns", "gpt-4o"},
                      PreTokenizerCase{"glm4", "llama-bpe", "llama-bpe"},
                      PreTokenizerCase{"dbrx", "llama-bpe", "llama-bpe"},
                      PreTokenizerCase{"lfm2", "llama-bpe", "llama-bpe"},
                      PreTokenizerCase{"pixtral", "llama-bpe", "llama-bpe"},
                      PreTokenizerCase{"hunyuan", "qwen2", "qwen2"},
                      PreTokenizerCase{"refact", "smollm", "smollm"},
                      PreTokenizerCase{"starcoder", "smollm", "smollm"}),
    [](const auto& info) {
      return TestName({info.param.pre, {}});
    });

// Long runs of digits are cut in linear time.
TEST(GgufTokenizer, GroupsOfDigits) {
  GgufParts parts = PartsOf(ReadFile(TokenizerGolden("patterns.gguf")));
  TempFolder folder;
  for (const char* pre : {"afmoe", "cohere2moe"}) {
    parts.Set(GgufText("tokenizer.ggml.pre", pre));
    WriteFile(folder.path() / "a.gguf", GgufBytes(parts));
    const auto file = GgufFile::Open(folder.path() / "a.gguf");
    ASSERT_TRUE(file.ok()) << file.status();
    const auto tokenizer = ReadGgufTokenizer(**file);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    for (const char* end : {"", "a"}) {
      const auto ids = (*tokenizer)->Encode(std::string(300'000, '7') + end, false);
      ASSERT_TRUE(ids.ok()) << ids.status();
      EXPECT_GE(ids->size(), 100'000u);
    }
  }
}

// Encoders enclose texts, and two texts together, as the tokenizers of their authors do.
TEST(GgufTokenizer, OfEncodersEnclosesTexts) {
  GgufParts parts = PartsOf(ReadFile(TokenizerGolden("olmo.gguf")));
  TempFolder folder;
  const auto ids = [&](const char* pre, bool pair) {
    parts.Set(GgufText("tokenizer.ggml.pre", pre));
    WriteFile(folder.path() / "a.gguf", GgufBytes(parts));
    const auto file = GgufFile::Open(folder.path() / "a.gguf");
    EXPECT_TRUE(file.ok()) << file.status();
    const auto tokenizer = ReadGgufTokenizer(**file);
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    if (!pair) return *(*tokenizer)->Encode("a", /*add_special_tokens=*/true);
    return (*tokenizer)->EncodeTexts("a", "a", /*add_special_tokens=*/true)->ids;
  };
  const TokenId a = ids("olmo", false).front();
  const auto config = ReadGgufTokenizerConfig(**GgufFile::Open(folder.path() / "a.gguf"));
  ASSERT_TRUE(config.ok());
  const auto file = GgufFile::Open(folder.path() / "a.gguf");
  const auto tokenizer = ReadGgufTokenizer(**file);
  const TokenId bos = *(*tokenizer)->TokenToId(*config->bos_token);
  const TokenId eos = *(*tokenizer)->TokenToId(*config->eos_token);
  EXPECT_EQ(ids("roberta-bpe", false), (std::vector<TokenId>{bos, a, eos}));
  EXPECT_EQ(ids("roberta-bpe", true), (std::vector<TokenId>{bos, a, eos, eos, a, eos}));
  EXPECT_EQ(ids("modern-bert", false), (std::vector<TokenId>{bos, a, eos}));
  EXPECT_EQ(ids("modern-bert", true), (std::vector<TokenId>{bos, a, eos, a, eos}));
  parts.Set(GgufBool("tokenizer.ggml.add_eos_token", 0));
  EXPECT_EQ(ids("roberta-bpe", false), (std::vector<TokenId>{bos, a}));
}

TEST(GgufTokenizer, HasTemplateAndSpecialTokens) {
  const auto file = GgufFile::Open(TokenizerGolden("qwen2.gguf"));
  ASSERT_TRUE(file.ok()) << file.status();
  const auto config = ReadGgufTokenizerConfig(**file);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->bos_token, "<|endoftext|>");
  EXPECT_EQ(config->eos_token, "<|im_end|>");
  EXPECT_EQ(config->unk_token, std::nullopt);
  EXPECT_EQ(config->add_bos_token, std::nullopt);
  ASSERT_TRUE(config->chat_template.has_value());
  EXPECT_TRUE(config->chat_template->starts_with("{% for m in messages %}<|im_start|>"));
  const auto pieces = GgufFile::Open(TokenizerGolden("spm.gguf"));
  const auto spm = ReadGgufTokenizerConfig(**pieces);
  ASSERT_TRUE(spm.ok()) << spm.status();
  EXPECT_EQ(spm->bos_token, "<s>");
  EXPECT_EQ(spm->unk_token, "<unk>");
  EXPECT_EQ(spm->add_bos_token, true);
  EXPECT_EQ(spm->chat_template, std::nullopt);
}

}  // namespace
}  // namespace moeserve::testing
