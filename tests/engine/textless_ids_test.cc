// Ids that the tokenizer does not know are never drawn, on the host and on devices.

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "engine/engine.h"
#include "engine/sample/sampler.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/support/devices.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/golden.h"

namespace moeserve::testing {
namespace {

// Knows the ids below `size` except those in `holes`.
class PartialTokenizer : public Tokenizer {
 public:
  explicit PartialTokenizer(int size, std::set<TokenId> holes = {})
      : size_(size), holes_(std::move(holes)) {}
  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view, bool, bool) const override {
    return std::vector<TokenId>();
  }
  absl::StatusOr<std::vector<TokenId>> EncodeTrusted(std::string_view, std::span<const TextSpan>,
                                                     bool) const override {
    return std::vector<TokenId>();
  }
  absl::StatusOr<std::string> Decode(std::span<const TokenId>, bool) const override { return ""; }
  std::string TokenBytes(TokenId id) const override { return std::string(TokenString(id)); }
  std::string_view TokenString(TokenId id) const override {
    return id < size_ && !holes_.contains(id) ? "t" : "";
  }
  std::optional<TokenId> TokenToId(std::string_view) const override { return std::nullopt; }
  bool IsSpecial(TokenId) const override { return false; }
  int vocab_size() const override { return size_; }

 private:
  int size_;
  std::set<TokenId> holes_;
};

TEST(TextlessIds, AreThoseThatTheTokenizerLacks) {
  EXPECT_TRUE(TextlessIds(nullptr, {}, 10).empty());
  const PartialTokenizer whole(10), part(7), holes(10, {3, 8});
  EXPECT_TRUE(TextlessIds(&whole, {}, 10).empty());
  const TextlessIds tail(&part, {}, 10);
  EXPECT_EQ(tail.ids(), (std::vector<TokenId>{7, 8, 9}));
  EXPECT_EQ(tail.drawable(), 7);
  const TextlessIds scattered(&holes, {}, 10);
  EXPECT_EQ(scattered.ids(), (std::vector<TokenId>{3, 8}));
  EXPECT_FALSE(scattered.drawable().has_value());
  // The end of a response needs no text.
  const std::vector<TokenId> eos = {9};
  EXPECT_EQ(TextlessIds(&part, eos, 10).ids(), (std::vector<TokenId>{7, 8}));
  EXPECT_FALSE(TextlessIds(&part, eos, 10).drawable().has_value());
}

struct Served {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Engine> engine;
};

Served Serve(std::shared_ptr<const Tokenizer> tokenizer) {
  Served out;
  auto checkpoint = *LoadCheckpoint(SourcePath("tests/golden/tiny-moa-groups-split-cosine"),
                                    {.require_tokenizer = false});
  out.backend = *CreateBackend({.device = TestDevice(), .threads = 2});
  auto model = *Model::Create(checkpoint.spec, {}, *checkpoint.weights, *out.backend);
  out.engine = *Engine::Create({.max_num_seqs = 4}, std::move(model), std::move(tokenizer), {});
  return out;
}

std::shared_ptr<CollectingSink> RunOn(Engine& engine, SamplingParams params) {
  Request request;
  request.id = "a";
  request.prompt = {1, 2, 3, 4, 5};
  request.sampling = std::move(params);
  request.sampling.seed = 7;
  request.sampling.ignore_eos = true;
  auto sink = std::make_shared<CollectingSink>();
  EXPECT_TRUE(engine.Submit(std::move(request), sink).ok());
  EXPECT_TRUE(sink->Wait().ok()) << sink->Wait();
  return sink;
}

TEST(TextlessIds, AreNeitherDrawnNorListed) {
  const auto full = Serve(nullptr);
  const int vocab = full.engine->spec().vocab_size;
  const int kept = vocab / 4;
  std::set<TokenId> holes;
  for (TokenId id = 0; id < vocab; id += 2) holes.insert(id);
  const std::shared_ptr<const Tokenizer> tokenizers[] = {
      std::make_shared<PartialTokenizer>(kept), std::make_shared<PartialTokenizer>(vocab, holes)};
  for (const auto& tokenizer : tokenizers) {
    const auto served = Serve(tokenizer);
    SamplingParams hot;
    hot.temperature = 2.0;
    hot.max_tokens = 40;
    hot.logprobs = 5;
    hot.prompt_logprobs = 3;
    SamplingParams greedy = hot;
    greedy.temperature = 0.0;
    SamplingParams biased = hot;
    biased.logit_bias = {{vocab - 2, 100.0f}, {1, 1.0f}};
    biased.repetition_penalty = 1.2;
    for (const SamplingParams& params : {hot, greedy, biased}) {
      const auto sink = RunOn(*served.engine, params);
      EXPECT_EQ(sink->tokens().size(), 40u);
      for (const TokenId id : sink->tokens()) EXPECT_EQ(tokenizer->TokenString(id), "t") << id;
      for (const TokenLogprob& logprob : sink->logprobs()) {
        EXPECT_EQ(logprob.top.size(), 5u);
        for (const auto& [id, value] : logprob.top) EXPECT_EQ(tokenizer->TokenString(id), "t");
      }
      if (params.temperature == 0.0) {
        EXPECT_EQ(sink->logprobs()[0].rank, 0);
      }
      // Scores of the prompt are the model's own.
      const auto all = RunOn(*full.engine, params);
      ASSERT_EQ(all->prompt_logprobs().size(), sink->prompt_logprobs().size());
      for (size_t i = 1; i < all->prompt_logprobs().size(); ++i) {
        EXPECT_EQ(all->prompt_logprobs()[i]->logprob, sink->prompt_logprobs()[i]->logprob);
        EXPECT_EQ(all->prompt_logprobs()[i]->top, sink->prompt_logprobs()[i]->top);
      }
    }
  }
}

// The log-probability of a drawn token is that of the softmax over the whole vocabulary.
TEST(TextlessIds, LogprobsAreOverTheWholeVocabulary) {
  const std::vector<float> logits = {1.0f, 3.0f, 2.0f, 5.0f, 9.0f};
  const std::span<const float> all(logits);
  const TokenLogprob whole = Logprob(all, 1, 5);
  const TokenLogprob part = Logprob(all, 1, 5, all.first(3));
  EXPECT_EQ(part.logprob, whole.logprob);
  EXPECT_EQ(part.rank, 0);
  ASSERT_EQ(part.top.size(), 3u);
  EXPECT_EQ(part.top[0].first, 1);
  EXPECT_EQ(part.top[0].second, whole.logprob);
}

}  // namespace
}  // namespace moeserve::testing
