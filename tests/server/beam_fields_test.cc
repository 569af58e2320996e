// Beam search in JSON and protobuf: requests, what is refused, and answers.

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "moeserve/v1/moeserve.pb.h"
#include "server/base/api_error.h"
#include "server/chat/chat_request.h"
#include "server/chat/chat_response.h"
#include "server/completions/completion_request.h"
#include "server/completions/completion_response.h"
#include "server/rpc/messages/messages.h"
#include "server/tools/call_syntax.h"
#include "tests/server/fake_engine.h"

namespace moeserve::server {
namespace {

RequestRules BeamRules() {
  RequestRules rules;
  rules.served_names = {"tiny"};
  rules.vocab_size = testing::kVocabSize;
  rules.strict_fields = true;
  rules.max_num_seqs = 16;
  // What a model prefers for drawing does not matter.
  rules.defaults.temperature = 0.6;
  rules.defaults.top_k = 20;
  rules.defaults.top_p = 0.9;
  rules.defaults.min_p = 0.1;
  rules.defaults.repetition_penalty = 1.1;
  return rules;
}

Result<GenerationParams> ParseBeamBody(const nlohmann::json& fields, bool chat = false) {
  nlohmann::json body = fields;
  if (chat) {
    body["messages"] = {{{"role", "user"}, {"content", "x"}}};
    const auto params = ParseChat(body, body.dump(), BeamRules(), false);
    if (!params.ok()) return params.status();
    return GenerationParams(*params);
  }
  body["prompt"] = "x";
  const auto params = ParseCompletion(body, BeamRules());
  if (!params.ok()) return params.status();
  return GenerationParams(*params);
}

TEST(BeamFields, JsonIsRead) {
  for (const bool chat : {false, true}) {
    const auto params = ParseBeamBody({{"use_beam_search", true},
                                       {"num_beams", 5},
                                       {"n", 3},
                                       {"length_penalty", -0.5},
                                       {"early_stopping", "never"},
                                       {"temperature", 0},
                                       {"top_k", -1}},
                                      chat);
    ASSERT_TRUE(params.ok()) << params.status();
    EXPECT_EQ(params->sampling.beam, (BeamParams{5, -0.5, EarlyStopping::kNever}));
    EXPECT_EQ(params->n, 3);
    EXPECT_EQ(params->sampling.top_p, 1.0);
    EXPECT_EQ(params->sampling.min_p, 0.0);
    EXPECT_EQ(params->sampling.repetition_penalty, 1.1) << "no field of the draw";
    const auto none = ParseBeamBody({{"use_beam_search", false},
                                     {"num_beams", 1},
                                     {"length_penalty", 1},
                                     {"early_stopping", false}},
                                    chat);
    ASSERT_TRUE(none.ok()) << none.status();
    EXPECT_FALSE(none->sampling.beam.has_value());
    EXPECT_EQ(none->sampling.temperature, 0.6);
  }
}

TEST(BeamFields, TheWidthIsNOrFour) {
  EXPECT_EQ(ParseBeamBody({{"use_beam_search", true}})->sampling.beam, BeamParams());
  EXPECT_EQ(ParseBeamBody({{"use_beam_search", true}})->n, 1);
  EXPECT_EQ(ParseBeamBody({{"use_beam_search", true}, {"n", 7}})->sampling.beam->num_beams, 7);
  EXPECT_EQ(ParseBeamBody({{"use_beam_search", true}, {"n", nullptr}})->sampling.beam->num_beams,
            4);
  EXPECT_EQ(ParseBeamBody({{"use_beam_search", true}, {"early_stopping", true}})
                ->sampling.beam->early_stopping,
            EarlyStopping::kTrue);
}

TEST(BeamFields, RefusalsNameFieldExpectedAndFound) {
  struct Case {
    nlohmann::json fields;
    const char* param;
    const char* message;
  };
  const std::vector<Case> cases = {
      {{{"temperature", 0.7}},
       "temperature",
       "'temperature': expected 1 or 0 with 'use_beam_search', found 0.7"},
      {{{"top_p", 0.5}}, "top_p", "'top_p': expected 1 with 'use_beam_search', found 0.5"},
      {{{"top_k", 4}}, "top_k", "'top_k': expected 0 or -1 with 'use_beam_search', found 4"},
      {{{"min_p", 0.25}}, "min_p", "'min_p': expected 0 with 'use_beam_search', found 0.25"},
      {{{"seed", 3}}, "seed", "'seed': expected none with 'use_beam_search', found 3"},
      {{{"max_tokens", 0}, {"echo", true}},
       "max_tokens",
       "'max_tokens': expected 1 or more with 'use_beam_search', found 0"},
      {{{"n", 5}, {"num_beams", 4}},
       "n",
       "'n': expected at most 'num_beams' (4) with 'use_beam_search', found 5"},
      {{{"n", 17}}, "num_beams", "'num_beams': expected 1 to 16 with 'use_beam_search', found 17"},
  };
  for (const Case& c : cases) {
    nlohmann::json body = c.fields;
    body["use_beam_search"] = true;
    const absl::Status status = ParseBeamBody(body).status();
    EXPECT_EQ(ApiParam(status), c.param);
    EXPECT_EQ(status.message(), c.message);
  }
  const std::vector<std::pair<nlohmann::json, const char*>> others = {
      {{{"num_beams", 0}}, "num_beams"},
      {{{"num_beams", 65}}, "num_beams"},
      {{{"num_beams", 2.5}}, "num_beams"},
      {{{"length_penalty", 10.5}}, "length_penalty"},
      {{{"length_penalty", "1"}}, "length_penalty"},
      {{{"early_stopping", "always"}}, "early_stopping"},
      {{{"early_stopping", 1}}, "early_stopping"},
      {{{"best_of", 3}}, "best_of"},
  };
  for (const auto& [fields, param] : others) {
    nlohmann::json body = fields;
    body["use_beam_search"] = true;
    EXPECT_EQ(ApiParam(ParseBeamBody(body).status()), param) << body;
  }
  // Without beam search, its fields would have no effect.
  for (const auto& [name, value] : std::vector<std::pair<std::string, nlohmann::json>>{
           {"num_beams", 2}, {"length_penalty", 0.5}, {"early_stopping", "never"}}) {
    const absl::Status status = ParseBeamBody({{name, value}}).status();
    EXPECT_EQ(ApiParam(status), name);
    EXPECT_EQ(status.message(), "'" + name + "' needs 'use_beam_search': true");
  }
}

v1::GenerateRequest BeamMessage() {
  v1::GenerateRequest request;
  request.set_text("x");
  request.mutable_beam();
  return request;
}

TEST(BeamFields, MessagesAreRead) {
  v1::GenerateRequest request = BeamMessage();
  const auto plain = rpc::ParseGenerate(request, BeamRules());
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->sampling.beam, BeamParams());
  EXPECT_EQ(plain->sampling.temperature, 1.0);
  EXPECT_EQ(plain->sampling.top_k, 0);
  request.set_n(2);
  EXPECT_EQ(rpc::ParseGenerate(request, BeamRules())->sampling.beam->num_beams, 2);
  request.mutable_beam()->set_num_beams(6);
  request.mutable_beam()->set_length_penalty(0.0);
  request.mutable_beam()->set_early_stopping(v1::EARLY_STOPPING_TRUE);
  const auto params = rpc::ParseGenerate(request, BeamRules());
  ASSERT_TRUE(params.ok()) << params.status();
  EXPECT_EQ(params->sampling.beam, (BeamParams{6, 0.0, EarlyStopping::kTrue}));
  EXPECT_EQ(params->n, 2);
  request.clear_beam();
  EXPECT_FALSE(rpc::ParseGenerate(request, BeamRules())->sampling.beam.has_value());
  EXPECT_EQ(rpc::ParseGenerate(request, BeamRules())->sampling.temperature, 0.6);
}

TEST(BeamFields, MessagesAreRefused) {
  const auto refusal = [](const auto& change) {
    v1::GenerateRequest request = BeamMessage();
    change(request);
    const absl::Status status = rpc::ParseGenerate(request, BeamRules()).status();
    return std::make_pair(std::string(ApiParam(status)), std::string(status.message()));
  };
  using Pair = std::pair<std::string, std::string>;
  EXPECT_EQ(refusal([](auto& r) { r.mutable_sampling()->set_temperature(0.5); }),
            Pair("sampling.temperature",
                 "'sampling.temperature': expected 1 or 0 with 'beam', found 0.5"));
  EXPECT_EQ(refusal([](auto& r) { r.mutable_sampling()->set_seed(5); }),
            Pair("sampling.seed", "'sampling.seed': expected none with 'beam', found 5"));
  EXPECT_EQ(refusal([](auto& r) { r.mutable_beam()->set_num_beams(17); }),
            Pair("beam.num_beams", "'beam.num_beams': expected 1 to 16 with 'beam', found 17"));
  EXPECT_EQ(refusal([](auto& r) { r.mutable_beam()->set_num_beams(65); }).first, "beam.num_beams");
  EXPECT_EQ(refusal([](auto& r) { r.mutable_beam()->set_length_penalty(-11); }).first,
            "beam.length_penalty");
  EXPECT_EQ(refusal([](auto& r) {
              r.mutable_beam()->set_early_stopping(static_cast<v1::EarlyStopping>(7));
            }).first,
            "beam.early_stopping");
  EXPECT_EQ(refusal([](auto& r) {
              r.set_n(3);
              r.mutable_beam()->set_num_beams(2);
            }).first,
            "n");
}

OutputDelta BeamOutput(const std::string& text, double score) {
  OutputDelta delta;
  delta.text = text;
  delta.tokens = {'a', 'b'};
  delta.finished = true;
  delta.beam = BeamScore{.cumulative_logprob = 2.0 * score, .score = score};
  return delta;
}

OutputDelta AbsentOutput() {
  OutputDelta delta;
  delta.finished = delta.absent = true;
  return delta;
}

// Two prompts with three choices each, of which one is missing.
template <typename Writer>
void AddBeamOutputs(Writer& writer) {
  const PreparedPrompt prompt;
  for (int i = 0; i < 6; ++i) {
    OutputDelta delta = i == 2 ? AbsentOutput() : BeamOutput(std::to_string(i), -0.25 * i);
    ASSERT_TRUE(writer.Add(i, prompt, std::move(delta)).ok());
  }
}

const AnswerIdentity kBeamIdentity = {.id = "1", .unique_id = "1", .created = 0, .model = "tiny"};

AnswerOptions BeamAnswerOptions() {
  AnswerOptions options;
  options.samples = 3;
  return options;
}

ChatAnswerRules BeamChatRules() {
  static const CallSyntax syntax;
  return {.split = {.syntax = &syntax}};
}

TEST(BeamAnswers, ChoicesHaveScoresAndTheirIndices) {
  const testing::ByteTokenizer tokenizer;
  CompletionWriter completions(kBeamIdentity, BeamAnswerOptions(), &tokenizer, 6);
  ChatWriter chats(kBeamIdentity, BeamAnswerOptions(), BeamChatRules(), &tokenizer, 6);
  AddBeamOutputs(completions);
  AddBeamOutputs(chats);
  for (const OrderedJson& answer : {completions.TakeAnswer({}), chats.TakeAnswer({})}) {
    const OrderedJson& choices = answer["choices"];
    ASSERT_EQ(choices.size(), 5u);
    const std::vector<int> indices = {0, 1, 3, 4, 5};
    for (size_t i = 0; i < indices.size(); ++i) {
      EXPECT_EQ(choices[i]["index"], indices[i]);
      EXPECT_EQ(choices[i]["beam_score"], -0.25 * indices[i]);
      EXPECT_EQ(choices[i]["cumulative_logprob"], -0.5 * indices[i]);
    }
  }
}

TEST(BeamAnswers, StreamsHaveThemToo) {
  const testing::ByteTokenizer tokenizer;
  CompletionWriter completions(kBeamIdentity, BeamAnswerOptions(), &tokenizer, 6);
  ChatWriter chats(kBeamIdentity, BeamAnswerOptions(), BeamChatRules(), &tokenizer, 6);
  AddBeamOutputs(completions);
  AddBeamOutputs(chats);
  for (AnswerWriter* writer : std::initializer_list<AnswerWriter*>{&completions, &chats}) {
    std::string events;
    writer->AppendEvents(2, {}, events);
    EXPECT_EQ(events, "") << "the choice is missing";
    writer->AppendEvents(1, {}, events);
    EXPECT_NE(events.find("\"beam_score\":-0.25,\"cumulative_logprob\":-0.5"), std::string::npos)
        << events;
  }
}

TEST(BeamAnswers, MessagesHaveScores) {
  v1::GenerateResponse with, without;
  ASSERT_TRUE(rpc::Fill(BeamOutput("x", -0.5), {}, nullptr, with).ok());
  EXPECT_EQ(with.beam_score(), -0.5);
  EXPECT_EQ(with.cumulative_logprob(), -1.0);
  ASSERT_TRUE(rpc::Fill(OutputDelta(), {}, nullptr, without).ok());
  EXPECT_FALSE(without.has_beam_score());
  EXPECT_FALSE(without.has_cumulative_logprob());
}

}  // namespace
}  // namespace moeserve::server
