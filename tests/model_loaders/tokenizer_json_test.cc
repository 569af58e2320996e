// tokenizer.json and tokenizer_config.json: accepted files, refused files with their error
// messages, and random damage, which must not crash the reader.
#include "model_loaders/tokenizer/tokenizer_json.h"

#include <fstream>
#include <random>

#include "engine/text/tokenizer/models/byte_level.h"
#include "engine/text/tokenizer/utf8.h"
#include "gtest/gtest.h"
#include "model_loaders/tokenizer/tokenizer_config.h"
#include "nlohmann/json.hpp"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using Ids = std::vector<TokenId>;

Json Sample() {
  Json json = Json::parse(R"({
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [
      {"id": 259, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
       "normalized": false, "special": true},
      {"id": 260, "content": "<t>", "single_word": true, "lstrip": true, "rstrip": true,
       "normalized": true, "special": false}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
      {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|[^\\r\\n]?\\p{L}+|\\s+(?!\\S)|\\s+"},
       "behavior": "Isolated", "invert": false},
      {"type": "Split", "pattern": {"String": "-"}, "behavior": "Removed", "invert": false},
      {"type": "Digits", "individual_digits": true},
      {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
    "post_processor": {"type": "Sequence", "processors": [
      {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true},
      {"type": "TemplateProcessing",
       "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
       "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [259], "tokens": ["<s>"]}}}]},
    "decoder": {"type": "Sequence", "decoders": [
      {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
      {"type": "Fuse"}]},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
      "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
      "vocab": {"th": 256, "the": 257, "Ġthe": 258}, "merges": [["t", "h"], ["th", "e"], ["Ġ", "the"]]}
  })");
  for (int byte = 0; byte < 256; ++byte) {
    json["model"]["vocab"][std::string(ByteLevelChar(static_cast<uint8_t>(byte)))] = byte;
  }
  return json;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Parse(const Json& json) {
  return ParseTokenizerJson(json.dump(), "tokenizer.json");
}

TEST(TokenizerJson, ReadsEveryPart) {
  const auto tokenizer = Parse(Sample());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(*(*tokenizer)->Encode("the the-12", true), (Ids{259, 257, 258, '1', '2'}));
  EXPECT_EQ(*(*tokenizer)->Encode("<s>a <t> b", false), (Ids{259, 'a', 260, 'b'}));
  EXPECT_EQ((*tokenizer)->vocab_size(), 261);
  EXPECT_EQ(*(*tokenizer)->Decode(Ids{259, 258}, true), " the");
}

TEST(TokenizerJson, OldFormsReadTheSame) {
  Json json = Sample();
  json["model"]["merges"] = {"#version: 0.2", "t h", "th e", "Ġ the"};
  json["model"].erase("type");
  json.erase("version");
  json.erase("truncation");
  json["truncation"] = {{"max_length", 1}};  // ignored
  const auto tokenizer = Parse(json);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(*(*tokenizer)->Encode("the the", false), (Ids{257, 258}));
}

TEST(TokenizerJson, NullPartsDoNothing) {
  Json json = Sample();
  for (const char* key : {"normalizer", "pre_tokenizer", "post_processor", "decoder"}) {
    json[key] = nullptr;
  }
  json.erase("added_tokens");
  const auto tokenizer = Parse(json);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(*(*tokenizer)->Encode("the a", true), (Ids{257, 'a'}));
  EXPECT_EQ(*(*tokenizer)->Decode(Ids{257, 'a'}, true), "the a");
}

Json UnigramSample() {
  return Json::parse(R"({
    "added_tokens": [{"id": 1, "content": "</s>", "single_word": false, "lstrip": false,
                      "rstrip": false, "normalized": false, "special": true}],
    "normalizer": {"type": "Sequence", "normalizers": [
      {"type": "Lowercase"}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]},
    "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"},
    "post_processor": {"type": "RobertaProcessing", "sep": ["</s>", 1], "cls": ["a", 2],
                       "trim_offsets": true, "add_prefix_space": true},
    "decoder": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"},
    "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false, "vocab": [
      ["<unk>", 0.0], ["</s>", 0.0], ["\u2581", -2.0], ["a", -1.0], ["ab", -1.5], ["b", -0.5]]}
  })");
}

TEST(TokenizerJson, Unigram) {
  const auto tokenizer = Parse(UnigramSample());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  // "ab" and "a", "b" have equal scores; the path that was found first is kept.
  EXPECT_EQ(*(*tokenizer)->Encode("AB  a", false), (Ids{2, 4, 2, 3}));
  EXPECT_EQ(*(*tokenizer)->Encode("bxyb", true), (Ids{2, 2, 5, 0, 5, 1}));
  EXPECT_EQ(*(*tokenizer)->Decode(Ids{2, 4, 2, 3, 1}, true), "ab a");
}

// As in Llama 2: a normalizer that inserts "▁", and byte tokens.
Json LlamaSample() {
  Json json = Json::parse(R"({
    "added_tokens": [
      {"id": 256, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
       "normalized": false, "special": true},
      {"id": 257, "content": "<t>", "single_word": false, "lstrip": false, "rstrip": false,
       "normalized": true, "special": true}],
    "normalizer": {"type": "Sequence", "normalizers": [
      {"type": "Prepend", "prepend": "_"},
      {"type": "Replace", "pattern": {"String": " "}, "content": "_"}]},
    "decoder": {"type": "Sequence", "decoders": [
      {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
      {"type": "ByteFallback"}, {"type": "Fuse"},
      {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    "model": {"type": "BPE", "unk_token": "<s>", "fuse_unk": true, "byte_fallback": true,
      "vocab": {"<s>": 256, "<t>": 257, "_<t>": 258, "_": 259, "a": 260, "_a": 261},
      "merges": [["_", "a"]]}
  })");
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", byte);
    json["model"]["vocab"][name] = byte;
  }
  return json;
}

TEST(TokenizerJson, LlamaStyle) {
  const auto tokenizer = Parse(LlamaSample());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(*(*tokenizer)->Encode("a aé<s>a", false), (Ids{261, 261, 0xC3, 0xA9, 256, 261}));
  EXPECT_EQ(*(*tokenizer)->Decode(Ids{261, 261, 0xC3, 0xA9, 256, 261}, true), "a aé a");
  // A run of bytes that is not UTF-8 becomes as many U+FFFD.
  EXPECT_EQ(*(*tokenizer)->Decode(Ids{0xC3, 0xA9, 0xC3, 260}, true), "\uFFFD\uFFFD\uFFFDa");
  EXPECT_EQ((*tokenizer)->TokenBytes(0xC3), "\xC3");
  EXPECT_EQ((*tokenizer)->TokenBytes(261), " a");
}

// The search for special tokens in normalised text must know which of it was trusted, although the
// normalizer inserts text.
TEST(TokenizerJson, TrustedTokensInNormalizedText) {
  Json json = LlamaSample();
  for (const char* prepend : {"", "_"}) {
    json["normalizer"]["normalizers"][0]["prepend"] = prepend;
    const bool prepends = prepend[0] != '\0';
    // The searched form of the token begins with the inserted text, too.
    const std::string text = prepends ? "a <t>a <t>" : "a<t>a<t>";
    const auto tokenizer = Parse(json);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    const std::vector<TextSpan> trusted = {{1, prepends ? 5u : 4u}};
    const auto ids = (*tokenizer)->EncodeTrusted(text, trusted, false);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(std::count(ids->begin(), ids->end(), 257), 1) << prepend;
    EXPECT_EQ((*ids)[1], 257) << prepend;
    const auto all = (*tokenizer)->Encode(text, false);
    EXPECT_EQ(std::count(all->begin(), all->end(), 257), 2) << prepend;
  }
}

// A normalizer that reads characters would read beyond the end of a span that splits one.
TEST(TokenizerJson, TrustedSpansHaveWholeCharacters) {
  Json json = LlamaSample();
  json["normalizer"] = {{"type", "Sequence"},
                        {"normalizers", {json["normalizer"], {{"type", "Lowercase"}}}}};
  const auto tokenizer = Parse(json);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const std::string text = "é a<t>é";
  const auto plain = (*tokenizer)->EncodeTrusted(text, {}, false);
  ASSERT_TRUE(plain.ok()) << plain.status();
  for (const TextSpan none :
       {TextSpan{0, 1}, TextSpan{1, 2}, TextSpan{8, 9}, TextSpan{9, 12}, TextSpan{20, 30}}) {
    const auto ids = (*tokenizer)->EncodeTrusted(text, std::vector{none}, false);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, *plain) << none.begin;
  }
}

// Each step doubles the text or token.
TEST(TokenizerJson, TextsDoNotGrowWithoutBounds) {
  const Json twice =
      Json::parse(R"({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"})");
  Json json = LlamaSample();
  json["normalizer"] = {{"type", "Sequence"}, {"normalizers", Json(40, twice)}};
  const auto tokenizer = Parse(json);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->Encode("a", false).status().code(), absl::StatusCode::kResourceExhausted);
  json["normalizer"]["normalizers"] = Json(257, twice);
  EXPECT_NE(std::string(Parse(json).status().message()).find("expected at most 256 stages"),
            std::string::npos);
  json["normalizer"] = nullptr;
  json["decoder"] = {{"type", "Sequence"}, {"decoders", Json(11, twice)}};
  EXPECT_NE(std::string(Parse(json).status().message()).find("more than 1024 times as long"),
            std::string::npos);
  json["decoder"]["decoders"].erase(0);
  EXPECT_TRUE(Parse(json).ok());
}

TEST(TokenizerJson, IncrementalDecodingEqualsDecoding) {
  std::mt19937 random(17);
  const char* decoders[] = {
      R"({"type": "ByteFallback"})",
      R"({"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"})",
      R"({"type": "WordPiece", "prefix": "<", "cleanup": true})",
      R"({"type": "BPEDecoder", "suffix": "a"})",
      R"({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"},
          {"type": "Strip", "content": "a", "start": 2, "stop": 2}]})",
      "null"};
  for (const char* decoder : decoders) {
    Json json = LlamaSample();
    json["decoder"] = Json::parse(decoder);
    const auto tokenizer = Parse(json);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    for (int i = 0; i < 300; ++i) {
      constexpr TokenId kChosen[] = {0xE4, 0xB8, 0xAD, 0xE4, 'x', 256, 257, 259, 260, 261};
      Ids ids(random() % 12);
      for (TokenId& id : ids) id = kChosen[random() % std::size(kChosen)];
      IncrementalDecoder stream(tokenizer->get(), true);
      std::string text;
      for (const TokenId id : ids) {
        text += stream.Push(id);
        ASSERT_TRUE(IsValidUtf8(text)) << decoder;
      }
      EXPECT_EQ(text + stream.Finish(), *(*tokenizer)->Decode(ids, true)) << decoder;
    }
  }
}

TEST(TokenizerJson, UnigramRefusals) {
  const auto message = [](const char* pointer, const Json& value) {
    Json json = UnigramSample();
    json[Json::json_pointer(pointer)] = value;
    return std::string(Parse(json).status().message());
  };
  EXPECT_NE(message("/model/unk_id", 6).find("unk_id: expected an id of the vocabulary, found 6"),
            std::string::npos);
  EXPECT_NE(message("/model/vocab/3/0", "b").find("token \"b\" is listed twice"),
            std::string::npos);
  EXPECT_NE(message("/model/vocab/3", 1).find("model.vocab[3]: expected a pair"),
            std::string::npos);
  EXPECT_NE(message("/model/vocab/3/0", std::string(1025, 'x')).find("found one of 1025"),
            std::string::npos);
  Json json = UnigramSample();
  json["model"]["unk_id"] = nullptr;
  const auto tokenizer = Parse(json);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->Encode("abx", false).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(TokenizerJson, WordPiece) {
  const auto tokenizer = Parse(Json::parse(R"({
    "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                   "strip_accents": null, "lowercase": true},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 1], "cls": ["[CLS]", 0]},
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
    "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
              "max_input_chars_per_word": 5,
              "vocab": {"[CLS]": 0, "[SEP]": 1, "[UNK]": 2, "un": 3, "##aff": 4, "##a": 5,
                        ".": 6, "una": 7}}
  })"));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  // The longest token comes first, and a word of which a part is unknown is unknown as a whole.
  EXPECT_EQ(*(*tokenizer)->Encode("Un\u00C0ff. una unaffa x", false), (Ids{2, 6, 7, 2, 2}));
  EXPECT_EQ(*(*tokenizer)->Encode("una una.", true), (Ids{0, 7, 7, 6, 1}));
  EXPECT_EQ(*(*tokenizer)->Decode(Ids{3, 4, 6, 7}, true), "unaff. una");
}

struct Refusal {
  const char* pointer;  // JSON pointer to the value that is replaced
  const char* value;    // the new value
  const char* message;  // part of the error message
};

TEST(TokenizerJson, RefusesByNamePlaceAndValue) {
  const Refusal refusals[] = {
      {"", "[]", "tokenizer.json: expected an object, found array"},
      {"/version", "\"2.0\"", "version: expected \"1.0\", found string \"2.0\""},
      {"/extra", "1", "extra: this key is not supported"},
      {"/normalizer", R"({"type": "ByteLevel"})", "normalizer.type: expected BertNormalizer"},
      {"/normalizer/normalizers/0/type", "\"Other\"", "normalizer.normalizers[0].type"},
      {"/normalizer", R"({"type": "Replace", "pattern": {"String": ""}, "content": ""})",
       "normalizer.pattern: expected 1 to 1024 bytes, found 0"},
      {"/normalizer", R"({"type": "Precompiled", "precompiled_charsmap": "!"})",
       "normalizer.precompiled_charsmap: expected base64"},
      {"/normalizer", R"({"type": "Precompiled", "precompiled_charsmap": "/////wAA"})",
       "normalizer.precompiled_charsmap: expected a trie of 4 to 2 bytes"},
      {"/normalizer", R"({"type": "Strip", "strip_left": true})",
       "normalizer.strip_right: expected true or false"},
      {"/normalizer", "7", "normalizer: expected an object or null, found number 7"},
      {"/pre_tokenizer", R"({"type": "UnicodeScripts"})",
       "pre_tokenizer.type: expected BertPreTokenizer, ByteLevel"},
      {"/pre_tokenizer", R"({"type": "Metaspace", "replacement": "ab"})",
       "pre_tokenizer.replacement: expected one character, found string \"ab\""},
      {"/pre_tokenizer", R"({"type": "Metaspace", "replacement": "_", "add_prefix_space": false})",
       "expected prepend_scheme never with add_prefix_space false"},
      {"/pre_tokenizer", R"({"type": "FixedLength", "length": 0})",
       "pre_tokenizer.length: expected an integer from 1"},
      {"/pre_tokenizer/pretokenizers/0/behavior", "\"Other\"",
       "pretokenizers[0].behavior: expected"},
      {"/pre_tokenizer/pretokenizers/0/invert", "1",
       "invert: expected true or false, found number 1"},
      {"/pre_tokenizer/pretokenizers/0/pattern", R"({"Regex": "[a&&b]"})", "'&&' inside brackets"},
      {"/pre_tokenizer/pretokenizers/0/pattern", "{}", "expected one of Regex and String"},
      {"/pre_tokenizer/pretokenizers/0/pattern", "\"a\"", "pattern: expected an object"},
      {"/pre_tokenizer/pretokenizers/3/add_prefix_space", "null",
       "add_prefix_space: expected true"},
      {"/pre_tokenizer/pretokenizers/3/other", "1", "other: this key is not supported"},
      {"/pre_tokenizer/pretokenizers/0", R"({"type":"ByteLevel","add_prefix_space":true})",
       "expected ByteLevel to be the last stage, found Split after it"},
      {"/pre_tokenizer/pretokenizers/0", "null",
       "pretokenizers[0]: expected an object, found null"},
      {"/post_processor", R"({"type": "Other"})",
       "post_processor.type: expected BertProcessing, ByteLevel"},
      {"/post_processor/processors/1/single/1/Sequence/id", "\"B\"", "expected \"A\", found \"B\""},
      {"/post_processor/processors/1/single/0/SpecialToken/id", "\"<q>\"",
       "special_tokens[\"<q>\"]"},
      {"/post_processor/processors/1/special_tokens/<s>/ids/0", "900",
       "expected ids of tokens, found 900"},
      {"/post_processor/processors/1/special_tokens/<s>/ids/0", "-1", "expected an id from 0 to"},
      {"/decoder", R"({"type": "CTC"})", "decoder.type: expected BPEDecoder, ByteFallback"},
      {"/decoder/decoders/1", R"({"type": "ByteFallback"})",
       "decoder.decoders[1].type: expected Strip or Fuse after a decoder that joins all tokens"},
      {"/decoder", R"({"type": "Replace", "pattern": {"Regex": "a"}, "content": ""})",
       "decoder.pattern: expected String, found Regex"},
      {"/decoder/decoders/1/type", "\"ByteLevel\"", "decoder.decoders[1].type"},
      {"/model/type", "\"Unigram\"", "model.type: expected BPE after the pre-tokenizer ByteLevel"},
      {"/model/dropout", "0.1", "model.dropout: expected null or 0, found number 0.1"},
      {"/model/continuing_subword_prefix", "\"##\"",
       "model.continuing_subword_prefix: expected null"},
      {"/model/end_of_word_suffix", "\"</w>\"", "model.end_of_word_suffix: expected null or \"\""},
      {"/model/surprise", "true", "model.surprise: this key is not supported"},
      {"/model/vocab", "[]", "model.vocab: expected an object, found array"},
      {"/model/vocab/the", "-1", "model.vocab[\"the\"]: expected an id from 0"},
      {"/model/vocab/the", "4194304", "model.vocab[\"the\"]: expected an id from 0"},
      {"/model/vocab/the", "257.0", "model.vocab[\"the\"]: expected an id from 0"},
      {"/model/vocab/the", "256", "vocab: id 256 belongs to both"},
      {"/model/vocab/new", "1000", "token \"<s>\": expected id 260 (the next one free), found 259"},
      {"/model/merges", "{}", "model.merges: expected an array, found object"},
      {"/model/merges/1", "[\"t\", \"q\"]",
       "merges[1]: expected tokens of the vocabulary, found \"tq\""},
      {"/model/merges/1", "[\"t\"]", "model.merges[1]: expected a pair of strings, found array"},
      {"/model/merges/1", "\"t h\"", "model.merges[1]: expected a pair of strings"},
      {"/model/merges", "[\"t h e\"]", "expected two tokens with one space between them"},
      {"/model/merges", "[[\"\", \"t\"]]", "merges[0]: one half is empty"},
      {"/model/merges", "[1]", "model.merges[0]: expected a string, found number 1"},
      {"/model/unk_token", "5", "model.unk_token: expected a string, found number 5"},
      {"/added_tokens", "{}", "added_tokens: expected an array, found object"},
      {"/added_tokens/0", "3", "added_tokens[0]: expected an object, found number 3"},
      {"/added_tokens/0/id", "300", "expected id 259 (the next one free), found 300"},
      {"/added_tokens/0/content", "\"the\"",
       "token \"the\": expected id 257 (the model's), found 259"},
      {"/added_tokens/0/content", "\"\"", "expected 1 to 4096 bytes of content, found 0"},
      {"/added_tokens/0/lstrip", "\"no\"", "added_tokens[0].lstrip: expected true or false"},
      {"/added_tokens/1/content", "\"<s>\"", "token \"<s>\""},
  };
  for (const Refusal& refusal : refusals) {
    Json json = Sample();
    json[Json::json_pointer(refusal.pointer)] = Json::parse(refusal.value);
    const auto tokenizer = Parse(json);
    ASSERT_FALSE(tokenizer.ok()) << refusal.pointer << " = " << refusal.value;
    EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(tokenizer.status().message()).find(refusal.message), std::string::npos)
        << "wanted: " << refusal.message << "\nfound:  " << tokenizer.status().message();
  }
}

TEST(TokenizerJson, RefusesAMissingKey) {
  for (const char* pointer :
       {"/model", "/model/vocab", "/model/merges", "/added_tokens/0/id", "/added_tokens/0/special",
        "/pre_tokenizer/type", "/pre_tokenizer/pretokenizers",
        "/pre_tokenizer/pretokenizers/0/invert", "/pre_tokenizer/pretokenizers/2/individual_digits",
        "/decoder/decoders", "/post_processor/processors/1/single",
        "/post_processor/processors/1/special_tokens"}) {
    Json json = Sample();
    const Json::json_pointer key(pointer);
    json[key.parent_pointer()].erase(key.back());
    EXPECT_FALSE(Parse(json).ok()) << pointer;
  }
}

TEST(TokenizerJson, RefusesHostileText) {
  std::string deep = "{\"normalizer\":";
  for (int i = 0; i < 100000; ++i) deep += "[";
  std::string sequences = "{\"pre_tokenizer\":";
  for (int i = 0; i < 5000; ++i) sequences += R"({"type":"Sequence","pretokenizers":[)";
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("null"), std::string("{}"), std::string("{}x"),
        std::string("\xFF"), std::string("{\"model\":\"\xFF\"}"), std::string(1, '\0'), deep,
        sequences, std::string(R"({"model":{},"model":{}})"),
        std::string(R"({"model":{"vocab":{"a":0,"a":1},"merges":[]}})"),
        std::string(R"({"model":{"vocab":{"a":1e999},"merges":[]}})")}) {
    const auto tokenizer = ParseTokenizerJson(text, "tokenizer.json");
    ASSERT_FALSE(tokenizer.ok()) << text.substr(0, 60);
    EXPECT_EQ(std::string(tokenizer.status().message()).find("tokenizer.json: "), 0u)
        << tokenizer.status().message();
  }
}

TEST(TokenizerJson, GapsInTheIdsAreNoTokens) {
  Json json = Sample();
  json["added_tokens"] = Json::array();
  json["post_processor"] = nullptr;
  json["model"]["vocab"]["far"] = 5000;
  const auto tokenizer = Parse(json);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->vocab_size(), 5001);
  EXPECT_EQ((*tokenizer)->TokenString(4000), "");
  EXPECT_FALSE((*tokenizer)->Decode(Ids{4000}, false).ok());
}

TEST(TokenizerJson, NoMutationCrashesIt) {
  const std::string original = Sample().dump();
  const Json original_json = Sample();
  std::mt19937 random(4);
  int accepted = 0;
  for (int round = 0; round < 5000; ++round) {
    std::string text;
    if (round % 2 == 0) {
      // Edits bytes: overwrites, removes, duplicates or truncates.
      text = original;
      for (int edits = 1 + random() % 4; edits > 0 && !text.empty(); --edits) {
        const size_t at = random() % text.size();
        switch (random() % 5) {
          case 0:
            text[at] = static_cast<char>(random() % 256);
            break;
          case 1:
            text[at] = "{}[]\",:0-1eE.\\ntf"[random() % 17];
            break;
          case 2:
            text.erase(at, 1 + random() % 20);
            break;
          case 3:
            text.insert(at, text.substr(random() % text.size(), random() % 40));
            break;
          case 4:
            if (random() % 8 == 0) text.resize(at);
            break;
        }
      }
    } else {
      // Replaces values anywhere in the JSON tree by other values; the text stays valid JSON.
      static const Json kValues[] = {nullptr,
                                     true,
                                     0,
                                     -1,
                                     259,
                                     1e300,
                                     4194303,
                                     18446744073709551615u,
                                     "",
                                     "A",
                                     "<s>",
                                     "\\p{L}+",
                                     "(a|",
                                     "Sequence",
                                     "BPE",
                                     "ByteLevel",
                                     "Split",
                                     Json::array(),
                                     Json::object(),
                                     {1, "x"}};
      Json json = original_json;
      Json* node = &json;
      while (node->is_structured() && !node->empty() && (node == &json || random() % 6 != 0)) {
        auto it = node->begin();
        std::advance(it, random() % node->size());
        node = &*it;
      }
      *node = kValues[random() % std::size(kValues)];
      text = json.dump();
    }
    const auto tokenizer = ParseTokenizerJson(text, "tokenizer.json");
    if (!tokenizer.ok()) {
      ASSERT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
      continue;
    }
    ++accepted;
    const auto ids = (*tokenizer)->Encode("the <s> <t>é 12-a\xF0\x9F\x98\x80", true);
    if (!ids.ok()) continue;
    for (const TokenId id : *ids) ASSERT_LT(id, (*tokenizer)->vocab_size());
    ASSERT_TRUE((*tokenizer)->Decode(*ids, true).ok());
  }
  // The test is meaningful only if both outcomes occur.
  EXPECT_GT(accepted, 100);
  EXPECT_LT(accepted, 4000);
}

TEST(TokenizerConfig, ReadsWhatTheServerUses) {
  const auto config = ParseTokenizerConfig(R"({
    "bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>", "pad_token": null,
    "add_bos_token": true, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1e30,
    "chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
  })",
                                           "tokenizer_config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->bos_token, "<s>");
  EXPECT_EQ(config->eos_token, "</s>");
  EXPECT_EQ(config->pad_token, std::nullopt);
  EXPECT_EQ(config->unk_token, std::nullopt);
  EXPECT_EQ(config->add_bos_token, true);
  EXPECT_EQ(config->add_eos_token, std::nullopt);
  EXPECT_EQ(config->tokenizer_class, "PreTrainedTokenizerFast");
  EXPECT_EQ(config->chat_template, "D");
  ASSERT_EQ(config->named_chat_templates.size(), 2u);
  EXPECT_EQ(config->named_chat_templates[1].second, "T");
}

TEST(TokenizerConfig, RefusesWrongTypes) {
  for (const char* text :
       {"[]", "{", R"({"bos_token": 1})", R"({"bos_token": {}})", R"({"chat_template": 3})",
        R"({"chat_template": [1]})", R"({"add_bos_token": "yes"})", R"({"tokenizer_class": []})"}) {
    const auto config = ParseTokenizerConfig(text, "tokenizer_config.json");
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

class TokenizerFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = std::filesystem::path(::testing::TempDir()) /
           (std::string("tokenizer_json_test_") +
            ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  void Write(const char* name, const std::string& text) { std::ofstream(dir_ / name) << text; }

  std::filesystem::path dir_;
};

TEST_F(TokenizerFolderTest, LoadsAFolder) {
  EXPECT_EQ(LoadTokenizerJson(dir_).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(LoadTokenizerConfig(dir_).ok());
  EXPECT_EQ(LoadTokenizerConfig(dir_)->chat_template, std::nullopt);
  Write("tokenizer.json", Sample().dump());
  Write("tokenizer_config.json", R"({"chat_template": "inner"})");
  EXPECT_TRUE(LoadTokenizerJson(dir_).ok());
  EXPECT_EQ(LoadTokenizerConfig(dir_)->chat_template, "inner");
  Write("chat_template.jinja", "outer");
  EXPECT_EQ(LoadTokenizerConfig(dir_)->chat_template, "outer");
}

TEST_F(TokenizerFolderTest, AFolderInPlaceOfAFileIsRefused) {
  std::filesystem::create_directory(dir_ / "tokenizer.json");
  EXPECT_EQ(LoadTokenizerJson(dir_).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace moeserve
