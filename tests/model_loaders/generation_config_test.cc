#include "model_loaders/tokenizer/generation_config.h"

#include "gtest/gtest.h"
#include "tests/model_loaders/support.h"

namespace moeserve {
namespace {

using testing::Mentions;

TEST(GenerationConfig, ReadsEveryKey) {
  const auto config = ParseGenerationConfig(
      R"({"temperature": 0, "top_p": 0.9, "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.1,
          "eos_token_id": [1, 2], "no_repeat_ngram_size": 3, "min_new_tokens": 4, "min_length": 5,
          "bad_words_ids": [[6], [7, 8]], "forced_bos_token_id": 9, "forced_eos_token_id": 2})",
      10);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->defaults.temperature, 0.0);
  EXPECT_EQ(config->defaults.top_p, 0.9);
  EXPECT_EQ(config->defaults.top_k, 50);
  EXPECT_EQ(config->defaults.min_p, 0.05);
  EXPECT_EQ(config->defaults.repetition_penalty, 1.1);
  EXPECT_EQ(config->eos_token_ids, (std::vector<TokenId>{1, 2}));
  EXPECT_EQ(config->defaults.no_repeat_ngram_size, 3);
  EXPECT_EQ(config->defaults.min_new_tokens, 4);
  EXPECT_EQ(config->defaults.min_length, 5);
  EXPECT_EQ(config->defaults.bad_words_ids, (std::vector<std::vector<TokenId>>{{6}, {7, 8}}));
  EXPECT_EQ(config->defaults.forced_bos_token_id, 9);
  EXPECT_EQ(config->defaults.forced_eos_token_id, 2);
}

TEST(GenerationConfig, RefusesWrongRules) {
  for (const auto& [text, key] : {
           std::pair{R"({"no_repeat_ngram_size": -1})", "no_repeat_ngram_size"},
           std::pair{R"({"min_new_tokens": 1.5})", "min_new_tokens"},
           std::pair{R"({"min_length": "1"})", "min_length"},
           std::pair{R"({"forced_bos_token_id": 10})", "forced_bos_token_id"},
           std::pair{R"({"forced_eos_token_id": [1]})", "forced_eos_token_id"},
           std::pair{R"({"bad_words_ids": [1]})", "bad_words_ids"},
           std::pair{R"({"bad_words_ids": [[]]})", "bad_words_ids"},
           std::pair{R"({"bad_words_ids": [[10]]})", "bad_words_ids"},
       }) {
    const auto config = ParseGenerationConfig(text, 10);
    ASSERT_FALSE(config.ok()) << text;
    EXPECT_TRUE(Mentions(config.status(), {key})) << config.status();
  }
}

// The ranges are those of requests, ends included.
TEST(GenerationConfig, TakesTheEndsOfTheRanges) {
  const auto low =
      ParseGenerationConfig(R"({"temperature": 0.0, "top_p": 0.0, "top_k": -1, "min_p": 0})", 10);
  ASSERT_TRUE(low.ok()) << low.status();
  EXPECT_EQ(low->defaults.top_p, 0.0);
  EXPECT_EQ(low->defaults.top_k, -1);
  const auto high = ParseGenerationConfig(
      R"({"temperature": 2, "top_p": 1.0, "top_k": 2147483647, "min_p": 1})", 10);
  EXPECT_TRUE(high.ok()) << high.status();
}

TEST(GenerationConfig, EverythingIsOptional) {
  const auto config = ParseGenerationConfig("{}", 10);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_FALSE(config->defaults.temperature.has_value());
  EXPECT_FALSE(config->defaults.top_k.has_value());
  EXPECT_TRUE(config->eos_token_ids.empty());
}

// Such keys are in files that transformers writes.
TEST(GenerationConfig, IgnoresKeysOfOtherProgramsAndNulls) {
  const auto config = ParseGenerationConfig(
      R"({"_from_model_config": true, "do_sample": false, "max_new_tokens": 20, "num_beams": 1,
          "temperature": null, "eos_token_id": null, "pad_token_id": null, "top_k": 7,
          "transformers_version": "5.23.0"})",
      10);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_FALSE(config->defaults.temperature.has_value());
  EXPECT_TRUE(config->eos_token_ids.empty());
  EXPECT_EQ(config->defaults.top_k, 7);
}

TEST(GenerationConfig, RefusesByName) {
  const auto refused = [](const char* text, std::vector<std::string> parts) {
    parts.push_back("generation_config.json: ");
    return Mentions(ParseGenerationConfig(text, 10).status(), parts);
  };
  EXPECT_TRUE(refused("[]", {"expected an object", "[]"}));
  EXPECT_TRUE(refused("{", {"parse error"}));
  EXPECT_TRUE(
      refused(R"({"temperature": -1})", {"temperature: expected a number in [0, 2]", "-1"}));
  EXPECT_TRUE(refused(R"({"temperature": 2.5})", {"temperature", "found 2.5"}));
  EXPECT_TRUE(refused(R"({"temperature": "hot"})", {"temperature", "found \"hot\""}));
  EXPECT_TRUE(refused(R"({"top_p": -1})", {"top_p: expected a number in [0, 1], found -1"}));
  EXPECT_TRUE(refused(R"({"top_k": -2})", {"top_k: expected an integer >= -1", "found -2"}));
  EXPECT_TRUE(refused(R"({"top_k": 2.0})", {"top_k", "found 2.0"}));
  EXPECT_TRUE(refused(R"({"min_p": 1.5})", {"min_p: expected a number in [0, 1], found 1.5"}));
  EXPECT_TRUE(refused(R"({"repetition_penalty": 0})", {"repetition_penalty", "found 0"}));
  EXPECT_TRUE(refused(R"({"eos_token_id": 10})",
                      {"eos_token_id: expected ids in [0, 9], found 10 (vocab_size of config.json "
                       "is 10)"}));
  EXPECT_TRUE(refused(R"({"eos_token_id": [1, "2"]})", {"eos_token_id[1]", "found \"2\""}));
  EXPECT_TRUE(refused(R"({"min_p": 9, "top_p": 9})", {"2 problems", "min_p", "top_p"}));
}

}  // namespace
}  // namespace moeserve
