// Encoding of one text and of pairs with types, special marks and spans, and the tokenizers of
// encoders in folders without tokenizer.json. tests/tokenizer/parity.py compares the results with
// Hugging Face's library on many texts.
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "model_loaders/files/gguf/gguf_file.h"
#include "model_loaders/tokenizer/gguf_tokenizer.h"
#include "model_loaders/tokenizer/tokenizer_config.h"
#include "model_loaders/tokenizer/tokenizer_folder.h"
#include "model_loaders/tokenizer/tokenizer_json.h"
#include "nlohmann/json.hpp"
#include "tests/model_loaders/gguf_bytes.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using TokenIds = std::vector<TokenId>;
using TokenMarks = std::vector<uint8_t>;

json BertSample() {
  return json::parse(R"({
    "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                   "strip_accents": null, "lowercase": true},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "post_processor": {"type": "TemplateProcessing",
      "single": [
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
      "pair": [
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
        {"SpecialToken": {"id": "[SEP]", "type_id": 1}}],
      "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [0], "tokens": ["[CLS]"]},
                         "[SEP]": {"id": "[SEP]", "ids": [1], "tokens": ["[SEP]"]}}},
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
    "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
              "max_input_chars_per_word": 100,
              "vocab": {"[CLS]": 0, "[SEP]": 1, "[UNK]": 2, "un": 3, "##aff": 4, "##a": 5, ".": 6}}
  })");
}

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseJson(const json& root) {
  return ParseTokenizerJson(root.dump(), "tokenizer.json");
}

std::string SpelledBy(const EncodedTexts& texts, std::string_view first, std::string_view second) {
  std::string out;
  for (size_t i = 0; i < texts.ids.size(); ++i) {
    const TextSpan span = texts.spans[i];
    out += (texts.texts[i] == 1 ? second : first).substr(span.begin, span.end - span.begin);
    out += '|';
  }
  return out;
}

TEST(EncodeTexts, PairsWithTypesAndSpans) {
  const auto tokenizer = ParseJson(BertSample());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const std::string first = "U\u0300N\u00C0FF  xy.";
  const auto made = (*tokenizer)->EncodeTexts(first, "una", true);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->ids, (TokenIds{0, 3, 4, 2, 6, 1, 3, 5, 1}));
  EXPECT_EQ(made->types, (TokenMarks{0, 0, 0, 0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(made->special, (TokenMarks{1, 0, 0, 0, 0, 1, 0, 0, 1}));
  EXPECT_EQ(made->texts, (TokenMarks{0, 0, 0, 0, 0, 0, 1, 1, 0}));
  EXPECT_EQ(SpelledBy(*made, first, "una"), "|U\u0300N|\u00C0FF|xy|.||un|a||");
  const auto bare = (*tokenizer)->EncodeTexts(first, "una", false);
  ASSERT_TRUE(bare.ok());
  EXPECT_EQ(bare->ids, (TokenIds{3, 4, 2, 6, 3, 5}));
  EXPECT_EQ(bare->types, (TokenMarks{0, 0, 0, 0, 1, 1}));
  EXPECT_FALSE((*tokenizer)->EncodeTexts("a", "\xFF", true).ok());
}

TEST(EncodeTexts, CutsTheLongerTextFirst) {
  const auto tokenizer = ParseJson(BertSample());
  ASSERT_TRUE(tokenizer.ok());
  const auto cut = [&](std::string_view a, std::optional<std::string_view> b, size_t most,
                       bool begin = false) {
    return (*tokenizer)->EncodeTexts(a, b, true, {.most = most, .cuts_begin = begin})->ids;
  };
  EXPECT_EQ(cut("una.", std::nullopt, 4), (TokenIds{0, 3, 5, 1}));
  EXPECT_EQ(cut("una.", std::nullopt, 4, true), (TokenIds{0, 5, 6, 1}));
  EXPECT_EQ(cut("una.", "un", 6), (TokenIds{0, 3, 5, 1, 3, 1}));
  EXPECT_EQ(cut("un", "una.", 6), (TokenIds{0, 3, 1, 3, 5, 1}));
  EXPECT_EQ(cut("una.", "una.", 6), (TokenIds{0, 3, 1, 3, 5, 1}));
  EXPECT_EQ(cut("una..", "una.", 6), (TokenIds{0, 3, 5, 1, 3, 1}));
  EXPECT_EQ(cut("una.", "una.", 3), (TokenIds{0, 1, 1}));
  const auto refused = (*tokenizer)->EncodeTexts("a", "b", true, {.most = 2});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(refused.status().message()).find("at least 3"), std::string::npos);
}

TEST(EncodeTexts, DamagedPostProcessors) {
  struct Damage {
    const char* pointer;
    json value;
    const char* message;
  };
  const Damage damages[] = {
      {"/post_processor/pair/3/Sequence/id", "C", "expected \"A\" or \"B\", found \"C\""},
      {"/post_processor/pair/3/Sequence/type_id", 256,
       "type_id: expected an integer from 0 to 255"},
      {"/post_processor/pair/0", 5, "pair[0]"},
      {"/post_processor/pair", "x", "pair: expected an array"},
      {"/post_processor/special_tokens/[SEP]/ids", json{77}, "expected ids of tokens, found 77"},
      {"/post_processor/special_tokens/[SEP]/ids", json{-1}, "expected an id from 0"},
  };
  for (const Damage& damage : damages) {
    json root = BertSample();
    root[json::json_pointer(damage.pointer)] = damage.value;
    const auto tokenizer = ParseJson(root);
    ASSERT_FALSE(tokenizer.ok()) << damage.pointer;
    EXPECT_NE(std::string(tokenizer.status().message()).find(damage.message), std::string::npos)
        << tokenizer.status();
  }
  // Of two processors that put tokens around a text, no rule for two texts follows.
  json root = BertSample();
  root["post_processor"] = {{"type", "Sequence"},
                            {"processors", {root["post_processor"], root["post_processor"]}}};
  const auto tokenizer = ParseJson(root);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->EncodeTexts("a", "b", true).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE((*tokenizer)->EncodeTexts("a", std::nullopt, true).ok());
}

TEST(EncodeTexts, RandomTextsHaveTheIdsOfEncode) {
  json root = BertSample();
  const json normalizers[] = {
      root["normalizer"],
      json::parse(R"({"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "NFD"},
        {"type": "Replace", "pattern": {"String": "a"}, "content": ""},
        {"type": "Strip", "strip_left": true, "strip_right": true},
        {"type": "Prepend", "prepend": "__"}]})"),
      nullptr};
  const std::vector<std::string> bits = {"un",     "A",      "aff",       " ",      "\u00C0",
                                         "\u0300", "\uFB01", ".",         "\u4E2D", "\u0130",
                                         "\t",     "\u00BD", "\U0001F600"};
  std::mt19937 random(3);
  for (const json& normalizer : normalizers) {
    root["normalizer"] = normalizer;
    const auto tokenizer = ParseJson(root);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    for (int round = 0; round < 500; ++round) {
      std::string text;
      for (size_t n = random() % 12; n > 0; --n) text += bits[random() % bits.size()];
      const auto made = (*tokenizer)->EncodeTexts(text, std::nullopt, true);
      ASSERT_TRUE(made.ok()) << text;
      EXPECT_EQ(made->ids, *(*tokenizer)->Encode(text, true)) << text;
      EXPECT_EQ(made->spans.size(), made->ids.size());
      for (const TextSpan& span : made->spans) {
        ASSERT_TRUE(span.begin <= span.end && span.end <= text.size()) << text;
        EXPECT_NE(text.c_str()[span.begin] & 0xC0, 0x80) << text;
        EXPECT_NE(text.c_str()[span.end] & 0xC0, 0x80) << text;
      }
    }
  }
}

class EncoderFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  void Write(const char* name, std::string_view data) {
    std::ofstream(folder_ / name, std::ios::binary)
        .write(data.data(), static_cast<std::streamsize>(data.size()));
  }

  const fs::path folder_ = fs::path(::testing::TempDir()) / "encoder_folder_test";
};

TEST_F(EncoderFolderTest, BertVocabulary) {
  Write("vocab.txt", "[PAD]\nun\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n##a\r\nun\n\nUN\n");
  const auto tokenizer = LoadTokenizerFolder(folder_);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->EncodeTexts("U\u0301NA [MASK]", "x", true)->ids,
            (TokenIds{3, 7, 6, 5, 4, 2, 4}));
  EXPECT_EQ(MaskToken(*LoadTokenizerConfig(folder_), **tokenizer), 5);
  EXPECT_EQ(TokenizerFiles(folder_), (std::vector<std::string>{"vocab.txt"}));
  Write("tokenizer_config.json",
        R"({"do_lower_case": false, "tokenizer_class": "BertTokenizer", "mask_token": "un"})");
  const auto cased = LoadTokenizerFolder(folder_);
  ASSERT_TRUE(cased.ok()) << cased.status();
  EXPECT_EQ(*(*cased)->Encode("UNa", true), (TokenIds{3, 9, 6, 4}));
  EXPECT_EQ(MaskToken(*LoadTokenizerConfig(folder_), **cased), 7);
  Write("tokenizer_config.json", R"({"tokenizer_class": "EsmTokenizer"})");
  EXPECT_NE(std::string(LoadTokenizerFolder(folder_).status().message()).find("EsmTokenizer"),
            std::string::npos);
  Write("tokenizer_config.json", "{}");
  Write("vocab.txt", "[UNK]\n[SEP]\n");
  EXPECT_NE(std::string(LoadTokenizerFolder(folder_).status().message()).find("[CLS]"),
            std::string::npos);
}

TEST(GgufEncoder, WordPiece) {
  testing::GgufParts parts;
  parts.Set(testing::GgufText("general.architecture", "bert"));
  parts.Set(testing::GgufText("tokenizer.ggml.model", "bert"));
  parts.Set(testing::GgufTexts("tokenizer.ggml.tokens",
                               {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "\u2581un", "a"}));
  parts.Set(testing::GgufInts("tokenizer.ggml.token_type", {3, 3, 3, 3, 3, 1, 1}));
  parts.Set(testing::GgufU32("tokenizer.ggml.unknown_token_id", 1));
  parts.Set(testing::GgufU32("tokenizer.ggml.cls_token_id", 2));
  parts.Set(testing::GgufU32("tokenizer.ggml.seperator_token_id", 3));
  parts.Set(testing::GgufU32("tokenizer.ggml.mask_token_id", 4));
  const fs::path path = fs::path(::testing::TempDir()) / "word_piece.gguf";
  const auto load = [&] {
    const std::string bytes = testing::GgufBytes(parts);
    std::ofstream(path, std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    const auto file = GgufFile::Open(path);
    EXPECT_TRUE(file.ok()) << file.status();
    auto tokenizer = ReadGgufTokenizer(**file);
    if (tokenizer.ok()) {
      EXPECT_EQ(MaskToken(*ReadGgufTokenizerConfig(**file), **tokenizer), 4);
    }
    return tokenizer;
  };
  const auto tokenizer = load();
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const auto made = (*tokenizer)->EncodeTexts("UNA [MASK]", "b", true);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->ids, (TokenIds{2, 5, 6, 4, 3, 1, 3}));
  EXPECT_EQ(made->types, (TokenMarks{0, 0, 0, 0, 0, 1, 1}));
  EXPECT_EQ(*(*tokenizer)->Decode(made->ids, true), "una");
  parts.Set(testing::GgufTexts("tokenizer.ggml.tokens",
                               {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "a"}));
  EXPECT_FALSE(load().ok());  // a token twice
  fs::remove(path);
}

// Without further keys, T5's settings count: a text ends with </s>. XLM-RoBERTa's files have both.
TEST(GgufEncoder, Unigram) {
  testing::GgufParts parts;
  parts.Set(testing::GgufText("general.architecture", "t5"));
  parts.Set(testing::GgufText("tokenizer.ggml.model", "t5"));
  parts.Set(testing::GgufTexts("tokenizer.ggml.tokens",
                               {"<pad>", "</s>", "<unk>", "\u2581", "a", "\u2581a", "<mask>"}));
  parts.Set(testing::GgufInts("tokenizer.ggml.token_type", {3, 3, 2, 1, 1, 1, 3}));
  parts.Set(testing::GgufFloats("tokenizer.ggml.scores", {0, 0, 0, -2, -3, -1, 0}));
  const fs::path path = fs::path(::testing::TempDir()) / "unigram.gguf";
  const auto load = [&] {
    const std::string bytes = testing::GgufBytes(parts);
    std::ofstream(path, std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return ReadGgufTokenizer(**GgufFile::Open(path));
  };
  const auto t5 = load();
  ASSERT_TRUE(t5.ok()) << t5.status();
  const auto made = (*t5)->EncodeTexts("  a  aa", "x", true);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->ids, (TokenIds{5, 5, 4, 1, 3, 2, 1}));
  EXPECT_EQ(made->types, TokenMarks(7, 0));
  EXPECT_EQ(SpelledBy(*made, "  a  aa", "x"), "a|  a|a||x|x||");
  parts.Set(testing::GgufBool("tokenizer.ggml.add_bos_token", 1));
  parts.Set(testing::GgufU32("tokenizer.ggml.bos_token_id", 0));
  parts.Set(testing::GgufU32("tokenizer.ggml.mask_token_id", 6));
  const auto roberta = load();
  ASSERT_TRUE(roberta.ok()) << roberta.status();
  EXPECT_EQ((*roberta)->EncodeTexts("a <mask>", "a", true)->ids, (TokenIds{0, 5, 6, 1, 1, 5, 1}));
  fs::remove(path);
}

}  // namespace
}  // namespace moeserve
