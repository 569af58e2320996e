// What the answers of beam search say beside their tokens, how searches end, and that their memory
// is given back.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "base/steady_clock.h"
#include "engine/engine.h"
#include "engine/text/structured/compile_constraint.h"
#include "engine/text/structured/vocabulary_index.h"
#include "model_loaders/architectures/native/config_json.h"
#include "tests/support/beam_runs.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

TEST(BeamLifeTest, ReasonsAndLogProbabilities) {
  const auto engine = StartEngine(kRoutedModel, BeamOptions());
  Request r = BeamRequest("a", BeamPrompt(20, 3), 12, {.early_stopping = EarlyStopping::kNever});
  r.sampling.logprobs = 2;
  r.sampling.prompt_logprobs = 1;
  const SinkList sinks = SubmitBeams(*engine, r, 4);
  std::set<FinishReason> reasons;
  for (const auto& sink : sinks) {
    ASSERT_TRUE(sink->Wait().ok());
    const OutputDelta& last = sink->last();
    const auto length = sink->tokens().size();
    const bool stops = std::ranges::count(r.sampling.stop_token_ids, sink->tokens().back()) > 0;
    reasons.insert(last.finish_reason);
    EXPECT_EQ(last.finish_reason == FinishReason::kStop, stops || sink->tokens().back() == 0);
    EXPECT_EQ(last.stop_token.has_value(), stops);
    EXPECT_EQ(last.usage.completion_tokens, static_cast<int>(length));
    EXPECT_EQ(last.usage.prompt_tokens, 20);
    EXPECT_EQ(sink->prompt_logprobs().size(), 20u);
    ASSERT_EQ(sink->logprobs().size(), length);
    double sum = 0.0;
    for (size_t i = 0; i < length; ++i) {
      EXPECT_EQ(sink->logprobs()[i].token, sink->tokens()[i]);
      EXPECT_EQ(sink->logprobs()[i].top.size(), 2u);
      sum += static_cast<double>(sink->logprobs()[i].logprob);
    }
    EXPECT_NEAR(sum, last.beam->cumulative_logprob, 1e-5);
    EXPECT_DOUBLE_EQ(last.beam->score, last.beam->cumulative_logprob / static_cast<double>(length));
  }
  EXPECT_FALSE(reasons.empty());
}

// What a hypothesis says about its routes is what a request says that computes the same tokens.
TEST(BeamLifeTest, RoutesBelongToTheHypothesis) {
  for (const bool prefix_cache : {false, true}) {
    EngineOptions options = BeamOptions();
    options.prefix_cache = prefix_cache;
    const auto engine = StartEngine(kRoutedModel, options);
    Request r = BeamRequest("a", BeamPrompt(37, 5), 25, {.num_beams = 5});
    r.routing_record = r.expert_counts = true;
    for (int round = 0; round < 2; ++round) {
      const SinkList sinks = SubmitBeams(*engine, r, 3);
      for (const auto& sink : sinks) {
        ASSERT_TRUE(sink->Wait().ok());
        Request same = r;
        same.id = "same";
        same.sampling = {};
        same.prompt.insert(same.prompt.end(), sink->tokens().begin(), sink->tokens().end() - 1);
        same.sampling.max_tokens = 1;
        const auto plain = engine->Submit(same);
        ASSERT_TRUE(plain->Wait().ok());
        EXPECT_EQ(sink->routing().tokens, plain->routing().tokens);
        EXPECT_EQ(sink->routing().offsets, plain->routing().offsets);
        EXPECT_EQ(sink->routing().experts, plain->routing().experts);
        EXPECT_EQ(sink->routing().weights, plain->routing().weights);
        EXPECT_EQ(sink->last().expert_counts, plain->last().expert_counts);
        EXPECT_EQ(sink->last().usage.routed_tokens, plain->last().usage.routed_tokens);
        EXPECT_EQ(sink->last().usage.expert_routes, plain->last().usage.expert_routes);
        EXPECT_EQ(sink->last().usage.activated_parameters,
                  plain->last().usage.activated_parameters);
        EXPECT_EQ(sink->last().usage.cached_tokens, prefix_cache && round == 1 ? 32 : 0);
        EXPECT_EQ(sink->routing().reused.empty(), !prefix_cache || round == 0);
      }
    }
    engine->ExpectIdle();
  }
}

TEST(BeamLifeTest, StatisticsCountEveryRow) {
  EngineOptions options = BeamOptions();
  options.prefix_cache = false;
  const auto engine = StartEngine(kRoutedModel, options);
  RunBeams(*engine, BeamRequest("a", BeamPrompt(37, 5), 25, {.num_beams = 5}), 1);
  const EngineStats stats = engine->get().Stats();
  EXPECT_GT(stats.beam_rows, 25u);
  EXPECT_LE(stats.beam_rows, 5u * 24u);
  const ExpertStats experts = engine->get().ExpertSnapshot();
  for (const BlockExpertStats& b : experts.blocks) {
    EXPECT_EQ(b.tokens[static_cast<int>(Phase::kPrefill)], 37u) << b.layer;
    EXPECT_EQ(b.tokens[static_cast<int>(Phase::kDecode)], stats.beam_rows) << b.layer;
    EXPECT_EQ(b.rejected_tokens, 0u);
    EXPECT_EQ(b.recomputed_tokens, 0u);
  }
  EXPECT_EQ(stats.prompt_tokens, 37u);
}

TEST(BeamLifeTest, CancelFreesEverythingAtEveryStep) {
  for (const char* model : {kRoutedModel, kStateModel}) {
    EngineOptions options = BeamOptions();
    options.max_step_tokens = 16;
    const auto engine = StartEngine(model, options);
    for (int step = 1; step < 24; ++step) {
      SCOPED_TRACE(step);
      Request r = BeamRequest("a", BeamPrompt(30, 3), 120, {.num_beams = 6});
      r.sampling.ignore_eos = true;
      r.sampling.stop_token_ids.clear();
      const auto counter = StartCounter(*engine, {1, step + 1});
      const SinkList sinks = SubmitBeams(*engine, r, 3);
      counter->Go();
      counter->WaitUntilStopped();
      engine->get().Cancel(sinks[static_cast<size_t>(step % 3)].get());
      counter->Go();
      for (const auto& sink : sinks) EXPECT_TRUE(absl::IsCancelled(sink->Wait()));
      EXPECT_TRUE(counter->Wait().ok());
      engine->ExpectIdle();
    }
    // All memory is there for the next request.
    const Request r = BeamRequest("b", BeamPrompt(30, 3), 12, {.num_beams = 6});
    WholePasses reference(model);
    EXPECT_EQ(RunBeams(*engine, r, 6), reference.Best(r, 6));
  }
}

TEST(BeamLifeTest, ADeadlineCutsTheSearch) {
  const auto engine = StartEngine(kRoutedModel, BeamOptions());
  Request r = BeamRequest("a", BeamPrompt(30, 3), 120, {.num_beams = 8});
  r.sampling.stop_token_ids.clear();
  r.sampling.ignore_eos = true;
  for (const int step : {2, 5, 20}) {
    SCOPED_TRACE(step);
    const auto counter = StartCounter(*engine, {1, step + 1});
    r.deadline = SteadyNow() + absl::Milliseconds(400);
    const SinkList sinks = SubmitBeams(*engine, r, 4);
    counter->Go();
    counter->WaitUntilStopped();
    absl::SleepFor(r.deadline - SteadyNow() + absl::Milliseconds(1));
    counter->Go();
    for (const auto& sink : sinks) {
      ASSERT_TRUE(sink->Wait().ok()) << sink->Wait();
      EXPECT_TRUE(sink->last().timed_out);
      EXPECT_FALSE(sink->last().absent);
      EXPECT_EQ(sink->last().finish_reason, FinishReason::kLength);
      EXPECT_EQ(static_cast<int>(sink->tokens().size()), step);
      EXPECT_GT(sink->last().usage.expert_routes, 0u);
    }
    EXPECT_TRUE(counter->Wait().ok());
    engine->ExpectIdle();
  }
  r.deadline = SteadyNow() - absl::Milliseconds(1);
  for (const auto& sink : SubmitBeams(*engine, r, 4)) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(sink->Wait())) << sink->Wait();
  }
  engine->ExpectIdle();
}

TEST(BeamLifeTest, AFailureEndsAllResults) {
  const TempFolder folder;
  nlohmann::json config = TinyConfig();
  const auto parsed = ParseNativeConfig(config.dump());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  std::vector<RawTensor> tensors = RandomTensors(parsed->spec);
  tensors.back().bytes.assign(tensors.back().bytes.size(), '\xFF');  // not a number
  WriteFile(folder.path() / "config.json", config.dump());
  WriteFile(folder.path() / "model.safetensors", SafetensorsBytes(tensors));
  const auto engine = TestEngine::Start(folder.path(), BeamOptions());
  ASSERT_TRUE(engine.ok()) << engine.status();
  Request r = BeamRequest("a", {3, 4, 5}, 10, {});
  r.sampling.stop_token_ids.clear();
  for (const auto& sink : SubmitBeams(**engine, r, 3)) {
    EXPECT_TRUE(absl::IsInternal(sink->Wait())) << tensors.back().name;
    EXPECT_EQ(sink->endings(), 1);
  }
  (*engine)->ExpectIdle();
  EXPECT_EQ((*engine)->get().Stats().finished_error, 3u);
}

TEST(BeamLifeTest, MissingHypotheses) {
  const auto engine = StartEngine(kRoutedModel, BeamOptions());
  Request r = BeamRequest("a", BeamPrompt(30, 3), 1, {});
  r.sampling.allowed_token_ids = {5, 6};
  const SinkList sinks = SubmitBeams(*engine, r, 4);
  EXPECT_EQ(HypothesesOf(sinks).size(), 2u);
  EXPECT_FALSE(sinks[1]->last().absent);
  EXPECT_TRUE(sinks[2]->last().absent);
  EXPECT_TRUE(sinks[3]->last().absent);
  EXPECT_TRUE(sinks[3]->tokens().empty());
  // Every token is forbidden: an end of the text before min_tokens.
  r.sampling.max_tokens = 3;
  r.sampling.min_tokens = 3;
  r.sampling.allowed_token_ids = {0};
  for (const auto& sink : SubmitBeams(*engine, r, 2)) {
    EXPECT_TRUE(absl::IsInvalidArgument(sink->Wait()));
  }
  engine->ExpectIdle();
}

TEST(BeamLifeTest, RefusedRequests) {
  EngineOptions options = BeamOptions();
  options.max_num_seqs = 8;
  options.max_model_len = 128;
  const auto small = StartEngine(kRoutedModel, options);
  options.kv_cache_bytes = small->BytesFor(160);
  const auto engine = StartEngine(kRoutedModel, options);
  const auto refusal = [&](const auto& change, int n = 1) {
    Request r = BeamRequest("a", BeamPrompt(30, 3), 12, {});
    change(r);
    return std::string(SubmitBeams(*engine, r, n).front()->Wait().message());
  };
  EXPECT_EQ(refusal([](Request&) {}), "");
  const auto sampling = [&](const auto& change) {
    return refusal([&](Request& r) { change(r.sampling); });
  };
  EXPECT_EQ(sampling([](auto& p) { p.temperature = 0.7; }),
            "temperature: expected 1 or 0 with beam search, found 0.7");
  EXPECT_EQ(sampling([](auto& p) { p.top_p = 0.5; }),
            "top_p: expected 1 with beam search, found 0.5");
  EXPECT_EQ(sampling([](auto& p) { p.top_k = 3; }),
            "top_k: expected 0 or -1 with beam search, found 3");
  EXPECT_EQ(sampling([](auto& p) { p.min_p = 0.1; }),
            "min_p: expected 0 with beam search, found 0.1");
  EXPECT_EQ(sampling([](auto& p) { p.seed = 4; }), "seed: expected none with beam search, found 4");
  EXPECT_EQ(sampling([](auto& p) { p.max_tokens = 0; }),
            "max_tokens: expected 1 or more with beam search, found 0");
  EXPECT_EQ(sampling([](auto& p) { p.beam->num_beams = 0; }),
            "num_beams: expected 1 to 64, found 0");
  EXPECT_EQ(sampling([](auto& p) { p.beam->num_beams = 65; }),
            "num_beams: expected 1 to 64, found 65");
  EXPECT_EQ(sampling([](auto& p) { p.beam->num_beams = 9; }),
            "num_beams: expected at most 8 (max-num-seqs), found 9");
  EXPECT_EQ(sampling([](auto& p) { p.beam->length_penalty = 10.5; }),
            "length_penalty: expected -10 to 10, found 10.5");
  EXPECT_NE(sampling([](auto& p) { p.beam->length_penalty = std::nan(""); }), "");
  EXPECT_EQ(refusal([](Request&) {}, 5),
            "n: expected at most num_beams (4) with beam search, found 5");
  // Each beam alone would fit.
  EXPECT_NE(refusal([](Request& r) {
              r.sampling.beam->num_beams = 8;
              r.sampling.max_tokens = 60;
            }).find("can never fit"),
            std::string::npos);
  engine->ExpectIdle();
}

class BeamTextTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto golden = ReadGolden(SourcePath("tests/golden/smoe/golden.safetensors"));
    ASSERT_TRUE(golden.ok()) << golden.status();
    prompt_ = golden->Prompt(0);
    engine_ = StartEngine(kTextModel, BeamOptions());
  }
  std::string Decode(const TokenList& ids) const {
    return *engine_->get().tokenizer()->Decode(ids, true);
  }

  TokenList prompt_;
  std::unique_ptr<TestEngine> engine_;
};

TEST_F(BeamTextTest, StopStringsEndAHypothesis) {
  WholePasses reference(kTextModel);
  for (const std::vector<std::string>& stop :
       {std::vector<std::string>{" the"}, {"e", "of"}, {"fied, then"}}) {
    Request r = BeamRequest("a", prompt_, 14, {.early_stopping = EarlyStopping::kNever});
    r.sampling.stop_token_ids.clear();
    r.sampling.stop = stop;
    ReferenceSearch search = reference.Search(r);
    search.text_ends = [&](const TokenList& tokens) {
      const std::string text = Decode(tokens);
      return std::ranges::any_of(
          stop, [&](const std::string& s) { return text.find(s) != std::string::npos; });
    };
    const SinkList sinks = SubmitBeams(*engine_, r, 4);
    EXPECT_EQ(HypothesesOf(sinks), search.Run()) << stop.front();
    int matched = 0;
    for (const auto& sink : sinks) {
      const std::string whole = Decode(sink->tokens());
      if (!sink->last().stop_string.has_value()) {
        EXPECT_EQ(sink->text(), whole);
        continue;
      }
      ++matched;
      EXPECT_EQ(sink->last().finish_reason, FinishReason::kStop);
      EXPECT_EQ(sink->text(), whole.substr(0, whole.find(*sink->last().stop_string)));
    }
    EXPECT_GT(matched, 0) << stop.front();
  }
}

TEST_F(BeamTextTest, StructuredOutput) {
  const auto vocabulary =
      VocabularyIndex::Build(*engine_->get().tokenizer(), {0}, engine_->get().spec().vocab_size);
  const auto constrained = [&](ConstraintSpec::Kind kind, const std::string& text, int tokens) {
    ConstraintSpec spec;
    spec.kind = kind;
    spec.text = text;
    Request r = BeamRequest("a", prompt_, tokens, {.num_beams = 6});
    r.sampling.stop_token_ids.clear();
    r.sampling.constraint = *CompileConstraint(spec, *vocabulary);
    return r;
  };
  // Every answer is complete, and the six best ones differ.
  for (const int tokens : {40, 12, 9}) {
    const SinkList sinks =
        SubmitBeams(*engine_,
                    constrained(ConstraintSpec::Kind::kRegex,
                                "the (man|men|land|king)( of [a-z]{2,8})?\\.", tokens),
                    6);
    std::set<std::string> texts;
    for (const auto& sink : sinks) {
      ASSERT_TRUE(sink->Wait().ok()) << sink->Wait();
      if (sink->last().absent) continue;
      EXPECT_EQ(sink->last().finish_reason, FinishReason::kStop) << sink->text();
      EXPECT_TRUE(sink->text().starts_with("the ") && sink->text().ends_with(".")) << sink->text();
      texts.insert(sink->text());
    }
    EXPECT_GT(texts.size(), 3u) << tokens;
  }
  // A choice of three texts has three hypotheses.
  ConstraintSpec spec;
  spec.kind = ConstraintSpec::Kind::kChoice;
  spec.choices = {"yes", "no", "perhaps"};
  Request r = BeamRequest("a", prompt_, 20, {.num_beams = 6});
  r.sampling.constraint = *CompileConstraint(spec, *vocabulary);
  r.sampling.stop_token_ids.clear();
  std::multiset<std::string> texts;
  for (const auto& sink : SubmitBeams(*engine_, r, 6)) {
    ASSERT_TRUE(sink->Wait().ok());
    if (!sink->last().absent) texts.insert(sink->text());
  }
  for (const std::string& text : spec.choices) EXPECT_GE(texts.count(text), 1u) << text;
  engine_->ExpectIdle();
}

TEST_F(BeamTextTest, NoRepeatHoldsForGreedyAndSampling) {
  for (const int size : {1, 2, 3}) {
    for (const double temperature : {0.0, 1.0}) {
      Request r;
      r.id = "a";
      r.prompt = prompt_;
      r.sampling.max_tokens = 80;
      r.sampling.temperature = temperature;
      r.sampling.seed = 3;
      r.sampling.ignore_eos = true;
      r.sampling.no_repeat_ngram_size = size;
      const auto sink = engine_->Submit(r);
      ASSERT_TRUE(sink->Wait().ok());
      TokenList all = prompt_;
      std::set<TokenList> known;
      for (size_t i = 0; i + static_cast<size_t>(size) <= all.size(); ++i) {
        known.insert(TokenList(all.begin() + static_cast<int64_t>(i),
                               all.begin() + static_cast<int64_t>(i) + size));
      }
      for (const TokenId token : sink->tokens()) {
        all.push_back(token);
        EXPECT_TRUE(known.insert(TokenList(all.end() - size, all.end())).second) << size;
      }
    }
  }
}

}  // namespace
}  // namespace moeserve::testing
