// Tokens that only tokenizer_config.json, special_tokens_map.json or added_tokens.json name.
#include <algorithm>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "model_loaders/checkpoint/loader.h"
#include "nlohmann/json.hpp"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

using Json = nlohmann::json;
using Ids = std::vector<TokenId>;

// A model with 288 ids; its tokenizer.json has the bytes and, with id 256, <|endoftext|>.
class TokenSources : public ::testing::Test {
 protected:
  void SetUp() override { WriteNativeModel(folder_.path(), TinyConfig()); }

  void Write(const char* name, const Json& json) { WriteFile(folder_.path() / name, json.dump()); }

  Checkpoint Load() {
    auto checkpoint = LoadCheckpoint(folder_.path());
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    return checkpoint.ok() ? *std::move(checkpoint) : Checkpoint();
  }

  static bool Ends(const Checkpoint& checkpoint, TokenId id) {
    const auto& ids = checkpoint.eos_token_ids;
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  }

  TempFolder folder_;
};

TEST_F(TokenSources, AddedTokensDecoderAddsTokens) {
  Write("tokenizer_config.json",
        {{"added_tokens_decoder",
          {{"256", {{"content", "<|endoftext|>"}, {"special", true}}},
           {"260", {{"content", "<|new|>"}, {"special", true}, {"__type", "AddedToken"}}},
           {"258", {{"content", "<plain>"}, {"special", false}}}}}});
  const Checkpoint checkpoint = Load();
  const Tokenizer& tokenizer = *checkpoint.tokenizer;
  EXPECT_EQ(*tokenizer.Encode("a<|new|><plain>b<|endoftext|>", false),
            (Ids{'a', 260, 258, 'b', 256}));
  EXPECT_EQ(*tokenizer.Decode(Ids{260, 258}, false), "<|new|><plain>");
  EXPECT_EQ(*tokenizer.Decode(Ids{260, 258}, true), "<plain>");
  EXPECT_TRUE(tokenizer.IsSpecial(260));
  EXPECT_FALSE(tokenizer.IsSpecial(258));
}

TEST_F(TokenSources, TheOlderFilesAddTokens) {
  Write("added_tokens.json", {{"<x>", 258}, {"<plain>", 257}});
  Write("special_tokens_map.json", {{"eos_token", {{"content", "<x>"}, {"lstrip", false}}}});
  Write("tokenizer_config.json", {{"eos_token", "<|endoftext|>"}});
  const Checkpoint checkpoint = Load();
  EXPECT_EQ(*checkpoint.tokenizer->Encode("a<x><plain>", false), (Ids{'a', 258, 257}));
  EXPECT_TRUE(checkpoint.tokenizer->IsSpecial(258));
  EXPECT_FALSE(checkpoint.tokenizer->IsSpecial(257));
  // Without added_tokens_decoder, special_tokens_map.json replaces tokenizer_config.json.
  EXPECT_EQ(checkpoint.tokenizer_config.eos_token, "<x>");
  EXPECT_TRUE(Ends(checkpoint, 258));
  // With it, the older files do not count, except for names that tokenizer_config.json lacks.
  Write("tokenizer_config.json",
        {{"eos_token", "<|endoftext|>"}, {"added_tokens_decoder", Json::object()}});
  const Checkpoint newer = Load();
  EXPECT_EQ(newer.tokenizer_config.eos_token, "<|endoftext|>");
  EXPECT_FALSE(newer.tokenizer->TokenToId("<x>").has_value());
}

TEST_F(TokenSources, IdsThatAreTakenOrOutsideAreLeftOut) {
  Write("added_tokens.json",
        {{"<far>", 288}, {"<taken>", 'a'}, {"<eot>", 256}, {"<|endoftext|>", 270}});
  const Checkpoint checkpoint = Load();
  for (const char* text : {"<far>", "<taken>", "<eot>"}) {
    EXPECT_FALSE(checkpoint.tokenizer->TokenToId(text).has_value()) << text;
  }
  EXPECT_EQ(checkpoint.tokenizer->TokenToId("<|endoftext|>"), 256);
  EXPECT_EQ(checkpoint.tokenizer->vocab_size(), 257);
}

TEST_F(TokenSources, NamedTokensOfTheVocabularyAreSpecial) {
  Write("tokenizer_config.json", {{"pad_token", "Q"},
                                  {"additional_special_tokens", {"R", {{"content", "S"}}}},
                                  {"unk_token", "<not in the vocabulary>"}});
  const Checkpoint checkpoint = Load();
  for (const char c : {'Q', 'R', 'S'}) EXPECT_TRUE(checkpoint.tokenizer->IsSpecial(c)) << c;
  EXPECT_FALSE(checkpoint.tokenizer->IsSpecial('T'));
  EXPECT_EQ(checkpoint.tokenizer->vocab_size(), 257);
}

TEST_F(TokenSources, TheEndOfTextOfTheTokenizerEndsGenerations) {
  EXPECT_FALSE(Ends(Load(), 'Z'));
  for (const Json& token : {Json("Z"), Json{{"content", "Z"}, {"lstrip", false}}}) {
    Write("tokenizer_config.json", {{"eos_token", token}});
    const Checkpoint checkpoint = Load();
    EXPECT_TRUE(Ends(checkpoint, 'Z')) << token;
    for (const TokenId id : checkpoint.spec.eos_token_ids) EXPECT_TRUE(Ends(checkpoint, id));
  }
  Write("tokenizer_config.json", {{"eos_token", "<not in the vocabulary>"}});
  EXPECT_EQ(Load().eos_token_ids, Load().spec.eos_token_ids);
}

TEST_F(TokenSources, DamagedFilesAreRefusedByName) {
  for (const char* text : {"[]", "{\"a\": -1}", "{\"a\": \"b\"}", "{", "{\"a\": 1e9}"}) {
    WriteFile(folder_.path() / "added_tokens.json", text);
    const auto checkpoint = LoadCheckpoint(folder_.path());
    ASSERT_FALSE(checkpoint.ok()) << text;
    EXPECT_NE(checkpoint.status().message().find("added_tokens.json"), std::string::npos)
        << checkpoint.status();
  }
}

}  // namespace
}  // namespace moeserve::testing
