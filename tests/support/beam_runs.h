// Requests with beam search for an engine, and what they should answer: the definition of beam
// search, with a forward pass over all tokens for every log-probability.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <semaphore>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/beam/log_softmax.h"
#include "engine/engine.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/support/beam_reference.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"

namespace moeserve::testing {

using TokenList = std::vector<TokenId>;
using SinkList = std::vector<std::shared_ptr<CollectingSink>>;

inline const char* const kRoutedModel = "tests/golden/tiny-moa-groups-split-cosine";
inline const char* const kStateModel = "tests/golden/tiny-short-convolution";
inline const char* const kWindowModel = "tests/golden/tiny-window-interleaved-rope";
inline const char* const kTextModel = "deploy/models/smoe";

inline EngineOptions BeamOptions() {
  EngineOptions options;
  options.max_num_seqs = 16;
  options.routing_records = true;
  return options;
}

inline std::unique_ptr<TestEngine> StartEngine(const std::string& model,
                                               const EngineOptions& options) {
  auto engine = TestEngine::Start(SourcePath(model), options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return *std::move(engine);
}

// A prompt of ids in [1, 300).
inline TokenList BeamPrompt(int length, int seed) {
  TokenList prompt;
  for (int i = 0; i < length; ++i) prompt.push_back(1 + (i * 37 + i / 3 + seed * 101) % 299);
  return prompt;
}

// Many ids end, so that hypotheses of all lengths are found.
inline Request BeamRequest(const std::string& id, TokenList prompt, int max_tokens,
                           const BeamParams& beam) {
  Request r;
  r.id = id;
  r.prompt = std::move(prompt);
  r.sampling.max_tokens = max_tokens;
  r.sampling.beam = beam;
  for (TokenId t = 2; t < 320; t += 23) r.sampling.stop_token_ids.push_back(t);
  return r;
}

// Submits a search whose n best hypotheses are wanted.
inline SinkList SubmitBeams(TestEngine& engine, const Request& request, int n) {
  std::vector<Request> requests;
  SinkList sinks;
  std::vector<std::shared_ptr<TokenSink>> to;
  for (int i = 0; i < n; ++i) {
    requests.push_back(request);
    requests.back().id += "-" + std::to_string(i);
    sinks.push_back(std::make_shared<CollectingSink>());
    to.push_back(sinks.back());
  }
  const absl::Status status = engine.get().Submit(std::move(requests), to);
  if (!status.ok()) {
    for (const auto& sink : sinks) sink->OnError(status);
  }
  return sinks;
}

inline std::vector<ReferenceHypothesis> HypothesesOf(const SinkList& sinks) {
  std::vector<ReferenceHypothesis> found;
  for (const auto& sink : sinks) {
    const absl::Status status = sink->Wait();
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(sink->endings(), 1);
    if (!status.ok() || sink->last().absent) continue;
    EXPECT_TRUE(sink->last().beam.has_value());
    found.push_back(
        {sink->tokens(), sink->last().beam->cumulative_logprob, sink->last().beam->score});
  }
  return found;
}

inline std::vector<ReferenceHypothesis> RunBeams(TestEngine& engine, const Request& request,
                                                 int n) {
  return HypothesesOf(SubmitBeams(engine, request, n));
}

// The rules about tokens as their documentation reads, on log-probabilities.
inline void ApplyRules(const SamplingParams& p, const TokenList& ends, const TokenList& prompt,
                       const TokenList& generated, std::vector<float>& row) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  TokenList all = prompt;
  all.insert(all.end(), generated.begin(), generated.end());
  for (const auto& [id, bias] : p.logit_bias) row[static_cast<size_t>(id)] += bias;
  for (size_t t = 0; t < row.size(); ++t) {
    const auto id = static_cast<TokenId>(t);
    const bool allowed =
        p.allowed_token_ids.empty() || std::ranges::count(p.allowed_token_ids, id) > 0;
    if (!allowed) row[t] = kNever;
    const auto ends_with = [&](const TokenList& word) {
      TokenList now = all;
      now.push_back(id);
      return now.size() >= word.size() && std::equal(word.rbegin(), word.rend(), now.rbegin());
    };
    for (const TokenList& word : p.bad_words) {
      if (ends_with(word)) row[t] = kNever;
    }
    const auto size = static_cast<size_t>(p.no_repeat_ngram_size);
    for (size_t i = 0; size > 0 && i + size <= all.size(); ++i) {
      const auto at = all.begin() + static_cast<int64_t>(i);
      if (ends_with(TokenList(at, at + static_cast<int64_t>(size)))) row[t] = kNever;
    }
    const auto count = static_cast<float>(std::ranges::count(generated, id));
    const bool known = count > 0 || std::ranges::count(prompt, id) > 0;
    float& v = row[t];
    if (v == kNever) continue;
    const auto repetition = static_cast<float>(p.repetition_penalty);
    if (known && repetition != 1.0f) v = v > 0.0f ? v / repetition : v * repetition;
    if (count > 0.0f) {
      v -= static_cast<float>(p.frequency_penalty) * count + static_cast<float>(p.presence_penalty);
    }
  }
  if (static_cast<int>(generated.size()) < p.min_tokens) {
    for (const TokenId id : ends) row[static_cast<size_t>(id)] = kNever;
  }
}

// Beam search in which the model runs over all tokens for each log-probability.
class WholePasses {
 public:
  explicit WholePasses(const std::string& model) {
    auto runner = ModelRunner::Load(SourcePath(model));
    EXPECT_TRUE(runner.ok()) << runner.status();
    runner_ = *std::move(runner);
    eos_ = LoadCheckpoint(SourcePath(model), {.require_tokenizer = false})->eos_token_ids;
  }

  ReferenceSearch Search(const Request& r) {
    ReferenceSearch search;
    search.params = *r.sampling.beam;
    search.limit = r.sampling.max_tokens;
    TokenList ends = r.sampling.stop_token_ids;
    if (!r.sampling.ignore_eos) ends.insert(ends.end(), eos_.begin(), eos_.end());
    const std::set<TokenId> distinct(ends.begin(), ends.end());
    search.ends.assign(distinct.begin(), distinct.end());
    TokenList forbidden_ends = r.sampling.stop_token_ids;
    forbidden_ends.insert(forbidden_ends.end(), eos_.begin(), eos_.end());
    search.logprobs = [this, r, forbidden_ends](const TokenList& generated) {
      TokenList tokens = r.prompt;
      tokens.insert(tokens.end(), generated.begin(), generated.end());
      std::vector<float>& row = rows_[tokens];
      if (row.empty()) {
        const auto vocab = static_cast<size_t>(runner_->vocab());
        const std::vector<float> logits = runner_->Run(tokens, static_cast<int>(tokens.size()));
        row.resize(vocab);
        LogSoftmax(std::span(logits).last(vocab), row);
      }
      std::vector<float> changed = row;
      ApplyRules(r.sampling, forbidden_ends, r.prompt, generated, changed);
      return changed;
    };
    return search;
  }

  std::vector<ReferenceHypothesis> Best(const Request& r, size_t n) {
    std::vector<ReferenceHypothesis> all = Search(r).Run();
    if (all.size() > n) all.resize(n);
    return all;
  }

 private:
  std::unique_ptr<ModelRunner> runner_;
  TokenList eos_;
  std::map<TokenList, std::vector<float>> rows_;
};

// Stops the engine's thread in the steps that draw certain tokens of a request, until Go().
class StoppingSink : public CollectingSink {
 public:
  // `stops`: counts of drawn tokens, ascending.
  explicit StoppingSink(std::vector<int> stops) : stops_(std::move(stops)) {}

  void OnDelta(OutputDelta delta) override {
    drawn_ += static_cast<int>(delta.tokens.size());
    CollectingSink::OnDelta(std::move(delta));
    if (next_ == stops_.size() || drawn_ < stops_[next_]) return;
    ++next_;
    stopped_.release();
    go_.acquire();
  }
  void WaitUntilStopped() { stopped_.acquire(); }
  void Go() { go_.release(); }

 private:
  const std::vector<int> stops_;
  size_t next_ = 0;
  int drawn_ = 0;
  std::binary_semaphore stopped_{0}, go_{0};
};

// A request without beam search that counts steps.
inline Request CounterRequest() {
  Request r;
  r.id = "counter";
  r.prompt = {3, 4};
  r.sampling.max_tokens = 40;
  r.sampling.temperature = 0.0;
  r.sampling.ignore_eos = true;
  r.priority = -2;
  return r;
}

// Starts such a request and waits for the first stop.
inline std::shared_ptr<StoppingSink> StartCounter(TestEngine& engine, std::vector<int> stops) {
  auto sink = std::make_shared<StoppingSink>(std::move(stops));
  EXPECT_TRUE(engine.get().Submit(CounterRequest(), sink).ok());
  sink->WaitUntilStopped();
  return sink;
}

}  // namespace moeserve::testing
