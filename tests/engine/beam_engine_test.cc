// Beam search in the engine: its answers are those of the definition with a forward pass over all
// tokens for every log-probability, and have the same bits whatever is served beside them.

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "nlohmann/json.hpp"
#include "tests/support/beam_runs.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

std::vector<BeamParams> ManyParams() {
  std::vector<BeamParams> all;
  for (const auto early : {EarlyStopping::kFalse, EarlyStopping::kTrue, EarlyStopping::kNever}) {
    for (const double penalty : {1.0, 0.0, -1.0, 2.0}) all.push_back({4, penalty, early});
  }
  all.push_back({1, 1.0, EarlyStopping::kFalse});
  all.push_back({2, 1.0, EarlyStopping::kNever});
  all.push_back({9, -0.5, EarlyStopping::kFalse});
  return all;
}

class BeamModelTest : public ::testing::TestWithParam<const char*> {};

TEST_P(BeamModelTest, EqualsWholePasses) {
  WholePasses reference(GetParam());
  const auto engine = StartEngine(GetParam(), BeamOptions());
  size_t ended_early = 0;
  for (const BeamParams& params : ManyParams()) {
    for (const int prompt : {1, 15, 16, 40}) {
      const Request r = BeamRequest("a", BeamPrompt(prompt, prompt), 12, params);
      const auto expected = reference.Best(r, static_cast<size_t>(params.num_beams));
      EXPECT_EQ(RunBeams(*engine, r, params.num_beams), expected)
          << params.num_beams << " beams, penalty " << params.length_penalty << ", early stopping "
          << static_cast<int>(params.early_stopping) << ", prompt " << prompt;
      for (const auto& h : expected) ended_early += h.tokens.size() < 12 ? 1 : 0;
    }
  }
  EXPECT_GT(ended_early, 50u);
  engine->ExpectIdle();
}

// Long prompts in small steps beside other requests, with little memory: beams are preempted at
// many lengths, and computed again.
TEST_P(BeamModelTest, CompanyAndPreemptionsChangeNoBit) {
  const int kTokens = 40;
  std::vector<Request> requests;
  for (int i = 0; i < 4; ++i) {
    requests.push_back(BeamRequest("r" + std::to_string(i), BeamPrompt(5 + 14 * i, i % 2), kTokens,
                                   {.num_beams = 2 + i, .early_stopping = EarlyStopping::kNever}));
    requests.back().sampling.stop_token_ids = {7, 100 + i};
    requests.back().routing_record = true;
    requests.back().sampling.logprobs = 1;
  }
  std::vector<std::vector<ReferenceHypothesis>> expected;
  std::vector<AnswerBits> bits;
  {
    EngineOptions alone = BeamOptions();
    alone.prefix_cache = false;
    const auto engine = StartEngine(GetParam(), alone);
    for (const Request& r : requests) {
      const SinkList sinks = SubmitBeams(*engine, r, 2);
      expected.push_back(HypothesesOf(sinks));
      for (const auto& sink : sinks) bits.push_back(BitsOf(*sink));
    }
  }
  WholePasses reference(GetParam());
  EXPECT_EQ(expected.front(), reference.Best(requests.front(), 2));
  uint64_t preemptions = 0;
  for (const bool prefix_cache : {false, true}) {
    for (const int pages : {22, 23, 25, 28, 34}) {
      EngineOptions options = BeamOptions();
      options.max_model_len = 128;
      options.prefix_cache = prefix_cache;
      options.max_step_tokens = 17;
      options.window_pages = false;
      options.kv_cache_bytes = pages * StartEngine(GetParam(), options)->BytesFor(16);
      const auto engine = StartEngine(GetParam(), options);
      std::vector<SinkList> sinks;
      SinkList company;
      for (size_t i = 0; i < requests.size(); ++i) {
        sinks.push_back(SubmitBeams(*engine, requests[i], 2));
        Request other = BeamRequest("c" + std::to_string(i), BeamPrompt(20, 9), 30, {});
        other.sampling.beam.reset();
        other.sampling.ignore_eos = true;
        company.push_back(engine->Submit(other));
      }
      for (size_t i = 0; i < requests.size(); ++i) {
        EXPECT_EQ(HypothesesOf(sinks[i]), expected[i]) << i << ", pages " << pages;
        for (size_t k = 0; k < 2; ++k) EXPECT_EQ(BitsOf(*sinks[i][k]), bits[2 * i + k]);
        EXPECT_TRUE(company[i]->Wait().ok());
      }
      engine->ExpectIdle();
      preemptions += engine->get().Stats().preemptions;
    }
  }
  EXPECT_GT(preemptions, 10u);
}

// Samples of a prompt are served earlier. After each number of steps of a search, they take its
// memory.
TEST_P(BeamModelTest, PreemptionsAtEveryLength) {
  constexpr int kTokens = 34;
  Request r = BeamRequest("a", BeamPrompt(21, 3), kTokens, {.num_beams = 3});
  r.sampling.stop_token_ids.clear();
  r.sampling.ignore_eos = true;
  WholePasses reference(GetParam());
  const auto expected = reference.Best(r, 3);
  std::set<uint64_t> recomputed;
  for (const bool prefix_cache : {false, true}) {
    EngineOptions options = BeamOptions();
    options.max_model_len = 128;
    options.prefix_cache = prefix_cache;
    options.window_pages = false;
    options.max_num_seqs = 40;
    options.kv_cache_bytes = 17 * StartEngine(GetParam(), options)->BytesFor(16);
    for (int step = 1; step < kTokens; ++step) {
      const auto engine = StartEngine(GetParam(), options);
      const auto stopping = StartCounter(*engine, {1, step + 1});
      const SinkList search = SubmitBeams(*engine, r, 3);
      stopping->Go();
      stopping->WaitUntilStopped();
      Request sample = CounterRequest();
      sample.prompt = BeamPrompt(20, 5);
      sample.priority = -1;
      sample.sampling.max_tokens = 3;
      std::vector<Request> samples(24, sample);
      std::vector<std::shared_ptr<TokenSink>> sinks;
      for (size_t i = 0; i < samples.size(); ++i) {
        samples[i].id = std::to_string(i);
        sinks.push_back(std::make_shared<CollectingSink>());
      }
      EXPECT_TRUE(engine->get().Submit(std::move(samples), sinks).ok());
      stopping->Go();
      EXPECT_EQ(HypothesesOf(search), expected) << step;
      EXPECT_TRUE(stopping->Wait().ok());
      engine->ExpectIdle();
      recomputed.insert(engine->get().ExpertSnapshot().recomputed_tokens);
    }
  }
  EXPECT_GT(recomputed.size(), 20u);
}

INSTANTIATE_TEST_SUITE_P(Models, BeamModelTest,
                         ::testing::Values(kRoutedModel, kStateModel, kWindowModel),
                         [](const auto& test) {
                           std::string name = std::string(test.param).substr(13);
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

EarlyStopping EarlyStoppingOf(const nlohmann::json& value) {
  if (value == "never") return EarlyStopping::kNever;
  return value == true ? EarlyStopping::kTrue : EarlyStopping::kFalse;
}

// tests/reference/families/make_beam_goldens.py says what is in the file.
TEST(BeamEngineTest, TransformersFindsTheSame) {
  const auto searches = nlohmann::json::parse(ReadFile(SourcePath("tests/golden/beams.json")));
  ASSERT_GT(searches.size(), 60u);
  std::map<std::string, std::unique_ptr<TestEngine>> engines;
  for (const auto& search : searches) {
    SCOPED_TRACE(search.dump());
    const std::string model = search["model"];
    auto& engine = engines[model];
    if (engine == nullptr) engine = StartEngine("tests/golden/families/" + model, BeamOptions());
    Request r = BeamRequest("a", search["prompt"], search["max_tokens"],
                            {.num_beams = search["num_beams"],
                             .length_penalty = search["length_penalty"],
                             .early_stopping = EarlyStoppingOf(search["early_stopping"])});
    SamplingParams& p = r.sampling;
    p.stop_token_ids = search["ends"].get<TokenList>();
    p.no_repeat_ngram_size = search.value("no_repeat_ngram_size", 0);
    p.bad_words = search.value("bad_words", std::vector<TokenList>());
    p.min_tokens = search.value("min_tokens", 0);
    p.repetition_penalty = search.value("repetition_penalty", 1.0);
    const auto found = RunBeams(*engine, r, p.beam->num_beams);
    const auto& expected = search["hypotheses"];
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i].tokens, expected[i]["tokens"].get<TokenList>()) << i;
      EXPECT_NEAR(found[i].score, expected[i]["score"], 1e-4) << i;
    }
  }
}

TEST(BeamEngineTest, RulesChangeLogProbabilities) {
  WholePasses reference(kRoutedModel);
  const auto engine = StartEngine(kRoutedModel, BeamOptions());
  const TokenList prompt = BeamPrompt(20, 3);
  const Request plain = BeamRequest("a", prompt, 12, {.length_penalty = -1.0});
  const auto unchanged = RunBeams(*engine, plain, 4);
  const TokenList first = unchanged.front().tokens;
  ASSERT_GT(first.size(), 2u);
  std::vector<SamplingParams> rules(8, plain.sampling);
  rules[0].bad_words = {{first[0]}, {first[1], first[2]}};
  rules[1].min_tokens = 11;
  rules[2].no_repeat_ngram_size = 1;
  rules[3].logit_bias = {{11, 4.0f}, {first[0], -30.0f}, {31, 2.5f}};
  rules[3].no_repeat_ngram_size = 2;
  for (TokenId t = 0; t < 320; t += 3) rules[4].allowed_token_ids.push_back(t);
  rules[5].presence_penalty = 0.5;
  rules[5].frequency_penalty = 0.25;
  rules[5].repetition_penalty = 1.5;
  rules[6].ignore_eos = true;
  rules[6].stop_token_ids.clear();
  rules[6].logit_bias = {{0, 3.0f}};
  rules[7].allowed_token_ids = {3, 5, 40};
  rules[7].no_repeat_ngram_size = 3;
  rules[7].temperature = 0.0;
  for (size_t i = 0; i < rules.size(); ++i) {
    Request r = plain;
    r.sampling = rules[i];
    const auto expected = reference.Best(r, 4);
    EXPECT_NE(expected, unchanged) << i;
    EXPECT_EQ(RunBeams(*engine, r, 4), expected) << i;
  }
  engine->ExpectIdle();
}

// Pages that no later position sees are released by every beam.
TEST(BeamEngineTest, WindowsReleasePages) {
  WholePasses reference(kWindowModel);
  Request r = BeamRequest("a", BeamPrompt(90, 3), 60, {.num_beams = 5});
  r.sampling.stop_token_ids = {7};
  const auto expected = reference.Best(r, 5);
  for (const bool window_pages : {false, true}) {
    EngineOptions options;
    options.max_num_seqs = 8;
    options.max_step_tokens = 16;
    options.window_pages = window_pages;
    const auto engine = StartEngine(kWindowModel, options);
    EXPECT_EQ(RunBeams(*engine, r, 5), expected);
    engine->ExpectIdle();
  }
}

TEST(BeamEngineTest, FewerResultsAreTheFirstOnes) {
  const auto engine = StartEngine(kRoutedModel, BeamOptions());
  const Request r = BeamRequest("a", BeamPrompt(20, 3), 12, {});
  const auto all = RunBeams(*engine, r, 4);
  ASSERT_EQ(all.size(), 4u);
  for (int n = 1; n < 4; ++n) {
    EXPECT_EQ(RunBeams(*engine, r, n),
              std::vector<ReferenceHypothesis>(all.begin(), all.begin() + n));
  }
}

}  // namespace
}  // namespace moeserve::testing
