#include "server/completions/completion_request.h"

#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "engine/text/tokenizer/pair_tokenizer.h"
#include "server/base/api_error.h"
#include "tests/server/fake_engine.h"

namespace moeserve::server {
namespace {

RequestRules CompletionRules() {
  RequestRules rules;
  rules.served_names = {"tiny", "alias"};
  rules.vocab_size = testing::kVocabSize;
  return rules;
}

Result<CompletionParams> ParseCompletionText(const std::string& text,
                                             const RequestRules& rules = CompletionRules()) {
  return ParseCompletion(nlohmann::json::parse(text), rules);
}

TEST(ParseCompletion, TakesTheDefaults) {
  const auto params = ParseCompletionText(R"({"prompt": "hi"})");
  ASSERT_TRUE(params.ok()) << params.status();
  EXPECT_EQ(params->model, "tiny");
  ASSERT_EQ(params->prompts.size(), 1u);
  EXPECT_EQ(params->prompts[0].text, "hi");
  EXPECT_FALSE(params->max_tokens);
  EXPECT_EQ(params->n, 1);
  EXPECT_EQ(params->sampling.temperature, 1.0);
  EXPECT_EQ(params->sampling.top_p, 1.0);
  EXPECT_EQ(params->sampling.top_k, 0);
  EXPECT_FALSE(params->sampling.seed);
  EXPECT_FALSE(params->logprobs);
  EXPECT_TRUE(params->add_special_tokens);
  EXPECT_TRUE(params->sampling.skip_special_tokens);
}

TEST(ParseCompletion, CheckpointDefaultsReplaceThoseOfTheApi) {
  RequestRules rules = CompletionRules();
  rules.defaults.temperature = 0.6;
  rules.defaults.top_p = 0.9;
  rules.defaults.top_k = 20;
  rules.defaults.min_p = 0.05;
  const auto defaulted = ParseCompletionText(R"({"prompt": "hi", "top_p": null})", rules);
  ASSERT_TRUE(defaulted.ok());
  EXPECT_EQ(defaulted->sampling.temperature, 0.6);
  EXPECT_EQ(defaulted->sampling.top_p, 0.9);
  EXPECT_EQ(defaulted->sampling.top_k, 20);
  EXPECT_EQ(defaulted->sampling.min_p, 0.05);
  const auto asked =
      ParseCompletionText(R"({"prompt": "hi", "temperature": 0, "top_k": -1})", rules);
  ASSERT_TRUE(asked.ok());
  EXPECT_EQ(asked->sampling.temperature, 0.0);
  EXPECT_LE(asked->sampling.top_k, 0);  // disabled
}

TEST(ParseCompletion, TakesEveryFormOfPrompt) {
  EXPECT_EQ(ParseCompletionText(R"({"prompt": ["a", "b"]})")->prompts.size(), 2u);
  const auto ids = ParseCompletionText(R"({"prompt": [1, 2.0, 3]})");
  ASSERT_TRUE(ids.ok());
  ASSERT_EQ(ids->prompts.size(), 1u);
  EXPECT_EQ(ids->prompts[0].ids, (std::vector<TokenId>{1, 2, 3}));
  EXPECT_EQ(ParseCompletionText(R"({"prompt": [[1], [2, 3]]})")->prompts[1].ids,
            (std::vector<TokenId>{2, 3}));
}

TEST(ParseCompletion, WarnsOfHintsThatHaveNoEffect) {
  const auto params =
      ParseCompletionText(R"({"prompt": "x", "reasoning_effort": "high", "verbosity": "low"})");
  ASSERT_TRUE(params.ok()) << params.status();
  ASSERT_EQ(params->warnings.size(), 2u);
  EXPECT_EQ(ParseCompletionText(R"({"prompt": "x", "max_tokens": 3, "max_completion_tokens": 5})")
                ->max_tokens,
            5);
}

TEST(ParseCompletion, TakesFieldsAtTheirDefaultsThatItDoesNotImplement) {
  EXPECT_TRUE(
      ParseCompletionText(R"({"prompt": "x", "presence_penalty": 0, "frequency_penalty": 0.0,
    "repetition_penalty": 1, "logit_bias": {}, "response_format": {"type": "text"},
    "min_tokens": 0, "bad_words": [], "tools": null, "tool_choice": "none", "suffix": null,
    "use_beam_search": false, "spaces_between_special_tokens": true, "length_penalty": 1.0,
    "priority": 0, "best_of": 1, "user": "me", "metadata": {"a": 1}, "store": false,
    "parallel_tool_calls": true, "stop": null, "logprobs": null, "reasoning_effort": "none",
    "verbosity": "medium", "modalities": ["text"], "thinking": {"type": "disabled"},
    "documents": [], "typical_p": 1.0, "mirostat": 0, "no_stop_trim": false})")
          .ok());
}

TEST(ParseCompletion, BestOf) {
  const auto params = ParseCompletionText(R"({"prompt": "x", "n": 2, "best_of": 5})");
  ASSERT_TRUE(params.ok());
  EXPECT_EQ(params->n, 5) << "so many are generated";
  EXPECT_EQ(params->best, 2);
  const auto all = ParseCompletionText(R"({"prompt": "x", "n": 2, "best_of": 2, "stream": true})");
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(all->n, 2);
  EXPECT_EQ(all->best, 0);
}

TEST(ParseCompletion, CountsUnknownFields) {
  EXPECT_EQ(ParseCompletionText(R"({"prompt": "x", "colour": 1, "shape": null})")->ignored_fields,
            2);
  RequestRules strict = CompletionRules();
  strict.strict_fields = true;
  const auto refused = ParseCompletionText(R"({"prompt": "x", "colour": 1})", strict);
  EXPECT_EQ(ApiCode(refused.status()), "invalid_value");
  EXPECT_EQ(ApiParam(refused.status()), "colour");
}

struct CompletionRefusal {
  const char* body;
  const char* code;
  const char* param;
};

void PrintTo(const CompletionRefusal& refusal, std::ostream* out) {
  *out << refusal.code << ' ' << refusal.param;
}

class Refusals : public ::testing::TestWithParam<CompletionRefusal> {};

TEST_P(Refusals, NameCodeAndField) {
  const auto params = ParseCompletionText(GetParam().body);
  ASSERT_FALSE(params.ok());
  EXPECT_EQ(ApiCode(params.status()), GetParam().code) << params.status();
  EXPECT_EQ(ApiParam(params.status()), GetParam().param) << params.status();
}

INSTANTIATE_TEST_SUITE_P(
    Prompt, Refusals,
    ::testing::Values(CompletionRefusal{R"({})", "missing_field", "prompt"},
                      CompletionRefusal{R"({"prompt": null})", "missing_field", "prompt"},
                      CompletionRefusal{R"({"prompt": []})", "invalid_value", "prompt"},
                      CompletionRefusal{R"({"prompt": [[]]})", "invalid_value", "prompt"},
                      CompletionRefusal{R"({"prompt": 3})", "invalid_value", "prompt"},
                      CompletionRefusal{R"({"prompt": {"a": 1}})", "invalid_value", "prompt"},
                      CompletionRefusal{R"({"prompt": [1, "a"]})", "invalid_value", "prompt"},
                      CompletionRefusal{R"({"prompt": ["a", 1]})", "invalid_value", "prompt"},
                      CompletionRefusal{R"({"prompt": ["a", [1]]})", "invalid_value", "prompt"},
                      CompletionRefusal{R"({"prompt": [[1], 2]})", "invalid_value", "prompt"},
                      CompletionRefusal{R"({"prompt": [-1]})", "invalid_value", "prompt"},
                      CompletionRefusal{R"({"prompt": [300]})", "invalid_value", "prompt"},
                      CompletionRefusal{R"({"prompt": [1.5]})", "invalid_value", "prompt"},
                      CompletionRefusal{R"({"prompt": [18446744073709551615]})", "invalid_value",
                                        "prompt"},
                      CompletionRefusal{R"({"prompt": [true]})", "invalid_value", "prompt"}));

INSTANTIATE_TEST_SUITE_P(
    Fields, Refusals,
    ::testing::Values(
        CompletionRefusal{R"({"prompt": "x", "model": "other"})", "model_not_found", "model"},
        CompletionRefusal{R"({"prompt": "x", "model": 5})", "invalid_value", "model"},
        CompletionRefusal{R"({"prompt": "x", "max_tokens": -1})", "invalid_value", "max_tokens"},
        CompletionRefusal{R"({"prompt": "x", "max_tokens": 0})", "invalid_value", "max_tokens"},
        CompletionRefusal{R"({"prompt": "x", "max_tokens": 1.5})", "invalid_value", "max_tokens"},
        CompletionRefusal{R"({"prompt": "x", "max_tokens": "1"})", "invalid_value", "max_tokens"},
        CompletionRefusal{R"({"prompt": "x", "temperature": 2.1})", "invalid_value", "temperature"},
        CompletionRefusal{R"({"prompt": "x", "temperature": -0.1})", "invalid_value",
                          "temperature"},
        CompletionRefusal{R"({"prompt": "x", "temperature": "hot"})", "invalid_value",
                          "temperature"},
        CompletionRefusal{R"({"prompt": "x", "top_p": -0.1})", "invalid_value", "top_p"},
        CompletionRefusal{R"({"prompt": "x", "top_p": 1.1})", "invalid_value", "top_p"},
        CompletionRefusal{R"({"prompt": "x", "min_p": 1.1})", "invalid_value", "min_p"},
        CompletionRefusal{R"({"prompt": "x", "top_k": -2})", "invalid_value", "top_k"},
        CompletionRefusal{R"({"prompt": "x", "n": 0})", "invalid_value", "n"},
        CompletionRefusal{R"({"prompt": "x", "n": 129})", "invalid_value", "n"},
        CompletionRefusal{R"({"prompt": ["x","x","x","x","x"], "n": 128})", "invalid_value", "n"},
        CompletionRefusal{R"({"prompt": "x", "n": 3, "best_of": 2})", "invalid_value", "best_of"},
        CompletionRefusal{R"({"prompt": "x", "best_of": 0})", "invalid_value", "best_of"},
        CompletionRefusal{R"({"prompt": "x", "best_of": 129})", "invalid_value", "best_of"},
        CompletionRefusal{R"({"prompt": "x", "best_of": 2, "stream": true})", "invalid_value",
                          "best_of"},
        CompletionRefusal{R"({"prompt": ["x","x","x","x","x"], "best_of": 128})", "invalid_value",
                          "best_of"},
        CompletionRefusal{R"({"prompt": "x", "logprobs": 21})", "invalid_value", "logprobs"},
        CompletionRefusal{R"({"prompt": "x", "logprobs": true})", "invalid_value", "logprobs"},
        CompletionRefusal{R"({"prompt": "x", "echo": 1})", "invalid_value", "echo"},
        CompletionRefusal{R"({"prompt": "x", "stop": ""})", "invalid_value", "stop"},
        CompletionRefusal{R"({"prompt": "x", "stop": ["a", ""]})", "invalid_value", "stop"},
        CompletionRefusal{R"({"prompt": "x", "stop": 5})", "invalid_value", "stop"},
        CompletionRefusal{R"({"prompt": "x", "stop": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]})",
                          "invalid_value", "stop"},
        CompletionRefusal{R"({"prompt": "x", "seed": 9223372036854775808})", "invalid_value",
                          "seed"},
        CompletionRefusal{R"({"prompt": "x", "stop_token_ids": [300]})", "invalid_value",
                          "stop_token_ids"},
        CompletionRefusal{R"({"prompt": "x", "stream_options": {}})", "invalid_value",
                          "stream_options"},
        CompletionRefusal{R"({"prompt": "x", "stream": true, "stream_options": 1})",
                          "invalid_value", "stream_options"},
        CompletionRefusal{R"({"prompt": "x", "reasoning_effort": 1})", "invalid_value",
                          "reasoning_effort"},
        CompletionRefusal{R"({"prompt": "x", "messages": []})", "unsupported_parameter",
                          "messages"},
        CompletionRefusal{R"({"prompt": "x", "max_completion_tokens": 0})", "invalid_value",
                          "max_completion_tokens"},
        CompletionRefusal{R"({"prompt": "x", "prediction": {"type": "content", "content": 5}})",
                          "invalid_value", "prediction.content"},
        CompletionRefusal{R"({"prompt": "x", "thinking": {"type": "enabled"}})",
                          "unsupported_parameter", "thinking"},
        CompletionRefusal{R"({"prompt": "x", "modalities": ["text", "audio"]})",
                          "unsupported_parameter", "modalities"},
        CompletionRefusal{R"({"prompt": "x", "prediction": {"type": "content"}})", "invalid_value",
                          "prediction"},
        CompletionRefusal{R"({"prompt": "x", "mirostat": 2})", "unsupported_parameter", "mirostat"},
        CompletionRefusal{R"({"prompt": "x", "repeat_penalty": 1.1})", "unsupported_parameter",
                          "repeat_penalty"},
        CompletionRefusal{R"({"prompt": "x", "repeat_penalty": "a"})", "invalid_value",
                          "repeat_penalty"},
        CompletionRefusal{R"({"prompt": "x", "no_stop_trim": 1})", "invalid_value", "no_stop_trim"},
        CompletionRefusal{R"({"prompt": "x", "request_id": "a b"})", "invalid_value", "request_id"},
        CompletionRefusal{R"({"prompt": "x", "cache_salt": ""})", "invalid_value", "cache_salt"},
        CompletionRefusal{R"({"prompt": "x", "truncate_prompt_tokens": 0})", "invalid_value",
                          "truncate_prompt_tokens"}));

INSTANTIATE_TEST_SUITE_P(
    LogitFields, Refusals,
    ::testing::Values(
        CompletionRefusal{R"({"prompt": "x", "presence_penalty": 3})", "invalid_value",
                          "presence_penalty"},
        CompletionRefusal{R"({"prompt": "x", "frequency_penalty": "a"})", "invalid_value",
                          "frequency_penalty"},
        CompletionRefusal{R"({"prompt": "x", "repetition_penalty": 0})", "invalid_value",
                          "repetition_penalty"},
        CompletionRefusal{R"({"prompt": "x", "logit_bias": [1]})", "invalid_value", "logit_bias"},
        CompletionRefusal{R"({"prompt": "x", "logit_bias": {"-1": 1}})", "invalid_value",
                          "logit_bias"},
        CompletionRefusal{R"({"prompt": "x", "logit_bias": {"01": 1}})", "invalid_value",
                          "logit_bias"},
        CompletionRefusal{R"({"prompt": "x", "logit_bias": {"99999999999": 1}})", "invalid_value",
                          "logit_bias"},
        CompletionRefusal{R"({"prompt": "x", "logit_bias": {"5": 101}})", "invalid_value",
                          "logit_bias"},
        CompletionRefusal{R"({"prompt": "x", "min_tokens": -1})", "invalid_value", "min_tokens"},
        CompletionRefusal{R"({"prompt": "x", "allowed_token_ids": []})", "invalid_value",
                          "allowed_token_ids"},
        CompletionRefusal{R"({"prompt": "x", "allowed_token_ids": [100000]})", "invalid_value",
                          "allowed_token_ids"},
        CompletionRefusal{R"({"prompt": "x", "bad_words": "a"})", "invalid_value", "bad_words"},
        CompletionRefusal{R"({"prompt": "x", "bad_words": [""]})", "invalid_value", "bad_words"},
        CompletionRefusal{R"({"prompt": "x", "priority": -1})", "invalid_value", "priority"},
        CompletionRefusal{R"({"prompt": "x", "priority": 1001})", "invalid_value", "priority"}));

TEST(ParseCompletion, TakesFieldsThatChangeLogits) {
  testing::ByteTokenizer tokenizer;
  RequestRules rules = CompletionRules();
  rules.tokenizer = &tokenizer;
  rules.defaults.repetition_penalty = 1.2;
  rules.min_priority = -4;
  const auto params =
      ParseCompletionText(R"({"prompt": "x", "presence_penalty": 1.5, "frequency_penalty": -0.5,
    "logit_bias": {"5": 1, "7": -100}, "allowed_token_ids": [1, 2], "bad_words": ["no"],
    "min_tokens": 3, "priority": -4, "cache_salt": "mine"})",
                          rules);
  ASSERT_TRUE(params.ok()) << params.status();
  const SamplingParams& s = params->sampling;
  EXPECT_EQ(s.presence_penalty, 1.5);
  EXPECT_EQ(s.frequency_penalty, -0.5);
  EXPECT_EQ(s.repetition_penalty, 1.2);
  EXPECT_EQ(s.logit_bias, (std::vector<std::pair<TokenId, float>>{{5, 1.0f}, {7, -100.0f}}));
  EXPECT_EQ(s.allowed_token_ids, (std::vector<TokenId>{1, 2}));
  EXPECT_EQ(s.bad_words, (std::vector<std::vector<TokenId>>{{'n', 'o'}, {' ', 'n', 'o'}}));
  EXPECT_EQ(s.min_tokens, 3);
  EXPECT_EQ(params->priority, -4);
  EXPECT_EQ(params->cache_salt, "mine");
}

INSTANTIATE_TEST_SUITE_P(
    Unsupported, Refusals,
    ::testing::Values(
        CompletionRefusal{R"({"prompt": "x", "suffix": "y"})", "unsupported_parameter", "suffix"},
        CompletionRefusal{R"({"prompt": "x", "use_beam_search": 1})", "invalid_value",
                          "use_beam_search"},
        CompletionRefusal{R"({"prompt": "x", "tools": [{}]})", "unsupported_parameter", "tools"},
        CompletionRefusal{R"({"prompt": "x", "tool_choice": "auto"})", "unsupported_parameter",
                          "tool_choice"},
        CompletionRefusal{R"({"prompt": "x", "prompt_logprobs": 21})", "invalid_value",
                          "prompt_logprobs"},
        CompletionRefusal{R"({"prompt": "x", "prompt_logprobs": 1, "stream": true})",
                          "invalid_value", "prompt_logprobs"},
        CompletionRefusal{R"({"prompt": "x", "return_routed_experts": true})", "not_enabled",
                          "return_routed_experts"},
        CompletionRefusal{R"({"prompt": "x", "return_routing": true})", "not_enabled",
                          "return_routing"},
        CompletionRefusal{R"({"prompt": "x", "return_routing": 1})", "invalid_value",
                          "return_routing"}));

// One layer selects 3 of 8 experts for each of 2 sub-tokens: 6 (row, expert) pairs per token.
TEST(RecordSize, CountsAllThatIsHeldAtOnce) {
  ModelSpec spec;
  spec.AddLayers(2);
  RoutedLayerSpec& routing = spec.feed_forward(1).routing.emplace();
  routing.num_experts = 8;
  routing.select.k = 3;
  routing.split.heads = 2;
  GenerationParams params;
  params.n = 10;
  std::vector<PreparedPrompt> prompts(2);
  for (PreparedPrompt& prompt : prompts) {
    prompt.ids.resize(4);
    prompt.max_tokens = 5;
  }
  const auto fits = [&](bool stream, int64_t max_routes) {
    params.stream = stream;
    const absl::Status status = CheckRecordSize(params, prompts, spec, max_routes);
    EXPECT_EQ(ApiParam(status), status.ok() ? "" : "return_routing");
    return status.ok();
  };
  EXPECT_TRUE(fits(false, 0));  // without a record, there is no limit
  params.routing.record = true;
  EXPECT_TRUE(fits(false, 2 * 10 * 9 * 6));
  EXPECT_FALSE(fits(false, 2 * 10 * 9 * 6 - 1));
  EXPECT_TRUE(fits(true, 2 * 10 * 4 * 6));
  EXPECT_FALSE(fits(true, 2 * 10 * 4 * 6 - 1));
  const auto routes = [&](const RoutingChange& change) {
    const auto control = RoutingControl::Create(change, spec, {.enabled = true});
    EXPECT_TRUE(control.ok()) << control.status();
    return MostRoutes(spec, &*control);
  };
  EXPECT_EQ(routes({.top_k = 1}), 2);
  EXPECT_EQ(routes({.top_p = 0.5}), 16);
  routing.select = {.kind = SelectKind::kTopP, .p = 0.3, .max_experts = 4};
  EXPECT_EQ(MostRoutes(spec, nullptr), 8);
  EXPECT_EQ(routes({.top_p = 0.5}), 8);
  EXPECT_EQ(routes({.top_k = 7}), 14);
}

TEST(PreparePrompts, TextGetsSpecialTokensAndIdsDoNot) {
  testing::ByteTokenizer tokenizer;
  tokenizer.add_bos = true;
  auto params = ParseCompletionText(R"({"prompt": ["ab"], "echo": true})");
  auto prompts = PreparePrompts(*params, {&tokenizer, 256});
  ASSERT_TRUE(prompts.ok());
  EXPECT_EQ((*prompts)[0].ids, (std::vector<TokenId>{testing::kBos, 'a', 'b'}));
  EXPECT_EQ((*prompts)[0].echo_text, "ab");
  params = ParseCompletionText(R"({"prompt": ["ab"], "add_special_tokens": false})");
  EXPECT_EQ((*PreparePrompts(*params, {&tokenizer, 256}))[0].ids.size(), 2u);
  params = ParseCompletionText(R"({"prompt": [97, 98], "echo": true})");
  prompts = PreparePrompts(*params, {&tokenizer, 256});
  EXPECT_EQ((*prompts)[0].ids.size(), 2u);
  EXPECT_EQ((*prompts)[0].echo_text, "ab");
}

// An encoder may have a vocabulary and a tokenizer of its own.
TEST(PreparePrompts, SourcesHaveTheirOwnVocabulary) {
  auto with_bos = std::make_unique<testing::ByteTokenizer>();
  with_bos->add_bos = true;
  const PairTokenizer tokenizer(std::move(with_bos), std::make_unique<testing::ByteTokenizer>());
  const PromptRules rules = {.tokenizer = &tokenizer,
                             .max_model_len = 256,
                             .decoder_start = TokenId{7},
                             .max_source = 256};
  const auto params = ParseCompletionText(R"({"prompt": "ab", "decoder_prompt": "c"})");
  const auto prompts = PreparePrompts(*params, rules);
  ASSERT_TRUE(prompts.ok()) << prompts.status();
  EXPECT_EQ((*prompts)[0].source, (std::vector<TokenId>{testing::kBos, 'a', 'b'}));
  EXPECT_EQ((*prompts)[0].ids, (std::vector<TokenId>{7, 'c'}));
  RequestRules larger = CompletionRules();
  larger.source_vocab_size = testing::kVocabSize + 5;
  const std::string last = std::to_string(testing::kVocabSize + 4);
  EXPECT_TRUE(ParseCompletionText("{\"prompt\": [" + last + "]}", larger).ok());
  EXPECT_FALSE(ParseCompletionText("{\"prompt\": [" + last + "]}").ok());
  EXPECT_FALSE(
      ParseCompletionText("{\"prompt\": [1], \"decoder_prompt\": [" + last + "]}", larger).ok());
}

TEST(PreparePrompts, FitsTheContextExactly) {
  testing::ByteTokenizer tokenizer;
  const auto prepare = [&](const char* body) {
    return PreparePrompts(*ParseCompletionText(body), {&tokenizer, 8});
  };
  // the default is reduced to what fits
  EXPECT_EQ((*prepare(R"({"prompt": "1234567"})"))[0].max_tokens, 1);
  EXPECT_TRUE(prepare(R"({"prompt": "1234567", "max_tokens": 1})").ok());
  EXPECT_TRUE(prepare(R"({"prompt": "12345678", "max_tokens": 0, "echo": true})").ok());
  for (const char* body : {R"({"prompt": "12345678"})", R"({"prompt": "1234567", "max_tokens": 2})",
                           R"({"prompt": "123456789", "max_tokens": 0, "echo": true})"}) {
    const auto refused = prepare(body);
    EXPECT_EQ(ApiCode(refused.status()), "context_length_exceeded") << body;
    EXPECT_NE(refused.status().message().find("8"), absl::string_view::npos);
  }
}

TEST(PreparePrompts, TruncatesFromTheLeft) {
  testing::ByteTokenizer tokenizer;
  const auto params =
      ParseCompletionText(R"({"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": true})");
  const auto prompts = PreparePrompts(*params, {&tokenizer, 256});
  EXPECT_EQ((*prompts)[0].ids, (std::vector<TokenId>{'e', 'f'}));
  EXPECT_EQ((*prompts)[0].echo_text, "ef");
}

TEST(MakeEngineRequests, OrdersChoicesByPromptThenSample) {
  testing::ByteTokenizer tokenizer;
  const auto params = ParseCompletionText(
      R"({"prompt": ["a", "b"], "n": 2, "seed": 7, "echo": true, "logprobs": 3})");
  const auto prompts = PreparePrompts(*params, {&tokenizer, 256});
  const auto requests = MakeEngineRequests(*params, *prompts, "cmpl-x", absl::InfiniteFuture());
  ASSERT_EQ(requests.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(requests[i].id, "cmpl-x-" + std::to_string(i));
    EXPECT_EQ(requests[i].prompt[0], i < 2 ? 'a' : 'b');
    EXPECT_EQ(requests[i].sampling.sample_index, static_cast<int>(i % 2));
    EXPECT_EQ(requests[i].sampling.seed, 7);
    EXPECT_EQ(requests[i].sampling.prompt_logprobs, 3);
    EXPECT_EQ(requests[i].sampling.logprobs, 3);
    EXPECT_EQ(requests[i].sampling.max_tokens, 16);
  }
}

}  // namespace
}  // namespace moeserve::server
