// A model with short convolutions keeps a state of each sequence. However its steps are cut,
// whatever runs beside it, and whether a state was computed, found as a snapshot, copied or
// advanced over accepted drafts: an answer has the same bits.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/memory/memory_pool.h"
#include "engine/memory/state_pool.h"
#include "engine/model/model.h"
#include "kernels/registry.h"
#include "model_loaders/architectures/native/config_json.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

constexpr int kStatePositions = 2048;

// Writes a model of four layers, two of them short convolutions.
class StateModel {
 public:
  StateModel() {
    const nlohmann::json expert = {{"form", "plain"}, {"activation", "relu"}};
    const nlohmann::json heads = {{"kind", "dense"}, {"num_heads", 2}, {"head_dim", 8}};
    const nlohmann::json config = {
        {"model_type", "routed_decoder"},
        {"vocab_size", 64},
        {"hidden_size", 16},
        {"num_hidden_layers", 6},
        {"max_position_embeddings", kStatePositions},
        {"bos_token_id", nullptr},
        {"eos_token_id", 1},
        {"attention",
         {{{"kind", "short_conv"}},
          heads,
          {{"kind", "short_conv"}, {"conv", 5}, {"bias", true}},
          {{"kind", "delta"}, {"num_heads", 2}, {"key_dim", 6}, {"value_dim", 8}},
          heads,
          {{"kind", "ssm"}, {"num_heads", 2}, {"head_dim", 8}, {"state_dim", 6}}}},
        {"feed_forward",
         {{"kind", "routed"},
          {"expert", expert},
          {"routing",
           {{"num_experts", 4}, {"widths", 8}, {"select", {{"kind", "top_k"}, {"k", 2}}}}}}}};
    const auto parsed = ParseNativeConfig(config.dump());
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    WriteFile(folder_.path() / "config.json", config.dump());
    WriteFile(folder_.path() / "model.safetensors", SafetensorsBytes(RandomTensors(parsed->spec)));
  }

  const std::filesystem::path& folder() const { return folder_.path(); }

  std::unique_ptr<TestEngine> Start(const EngineOptions& options) const {
    auto engine = TestEngine::Start(folder_.path(), options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }

 private:
  TempFolder folder_;
};

// The first 50 tokens of all prompts are the same.
Request StateRequest(const std::string& id, int prompt, int tokens, int seed) {
  Request r;
  r.id = id;
  for (int i = 0; i < prompt; ++i) {
    r.prompt.push_back(2 + (i * 29 + i / 5 + (i < 50 ? 0 : seed * 13 + 7)) % 62);
  }
  r.sampling.max_tokens = tokens;
  r.sampling.temperature = seed % 2 == 0 ? 0.0 : 1.0;
  r.sampling.seed = static_cast<uint64_t>(seed);
  r.sampling.ignore_eos = true;
  r.sampling.logprobs = 2;
  return r;
}

// Options of an engine that computes every request alone and whole.
EngineOptions Plain() {
  EngineOptions options;
  options.max_num_seqs = 1;
  options.max_step_tokens = kStatePositions;
  options.prefix_cache = false;
  options.draft.max_tokens = 0;
  return options;
}

std::vector<AnswerBits> PlainAnswers(const StateModel& model,
                                     const std::vector<Request>& requests) {
  const auto engine = model.Start(Plain());
  std::vector<AnswerBits> answers;
  for (const Request& r : requests) answers.push_back(BitsOf(*engine->Submit(r)));
  return answers;
}

// Submits all requests at once and compares the answers.
void ExpectAnswers(TestEngine& engine, const std::vector<Request>& requests,
                   const std::vector<AnswerBits>& expected) {
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  for (const Request& r : requests) sinks.push_back(engine.Submit(r));
  for (size_t i = 0; i < sinks.size(); ++i) EXPECT_EQ(BitsOf(*sinks[i]), expected[i]) << i;
  engine.ExpectIdle();
}

std::vector<Request> ManyRequests(int count) {
  std::vector<Request> requests;
  for (int i = 0; i < count; ++i) {
    requests.push_back(StateRequest(std::to_string(i), 20 + i * 37 % 180, 30 + i * 29 % 90, i));
  }
  return requests;
}

TEST(StateMemoryTest, StepsOfAnyLength) {
  const StateModel model;
  std::vector<Request> requests;
  for (const int length : {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 1025}) {
    requests.push_back(StateRequest(std::to_string(length), length, 9, length));
  }
  const std::vector<AnswerBits> expected = PlainAnswers(model, requests);
  for (const int chunk : {1, 7, 16, 63, 64, 65, 128, 512}) {
    EngineOptions options = Plain();
    options.max_step_tokens = chunk;
    const auto engine = model.Start(options);
    ExpectAnswers(*engine, requests, expected);
    // Each prompt takes many steps beside answers of others, and finds snapshots.
    options.max_num_seqs = std::min(chunk, 6);
    options.prefix_cache = true;
    options.snapshot_interval = 32;
    options.snapshots = 200;
    const auto busy = model.Start(options);
    ExpectAnswers(*busy, requests, expected);
    ExpectAnswers(*busy, requests, expected);
    EXPECT_GT(busy->get().Stats().prefix_hit_tokens, 1024);
  }
}

// Prompts that leave one computed text after each of its pages begin there.
TEST(StateMemoryTest, AHitAtEveryPage) {
  constexpr int kPages = 20;
  const StateModel model;
  const Request whole = StateRequest("whole", kPages * kPageTokens + 1, 1, 2);
  std::vector<Request> requests;
  for (int page = 1; page <= kPages; ++page) {
    Request r = StateRequest(std::to_string(page), 3 * page, 12, page + 3);
    const auto own = r.prompt;
    r.prompt.assign(whole.prompt.begin(), whole.prompt.begin() + page * kPageTokens);
    r.prompt.push_back(whole.prompt[r.prompt.size()] == 5 ? 6 : 5);  // leaves the text
    r.prompt.insert(r.prompt.end(), own.begin(), own.end());
    requests.push_back(std::move(r));
  }
  const std::vector<AnswerBits> expected = PlainAnswers(model, requests);
  EngineOptions options = Plain();
  options.prefix_cache = true;
  options.snapshot_interval = kPageTokens;
  options.snapshots = 200;
  const auto engine = model.Start(options);
  ASSERT_TRUE(engine->Submit(whole)->Wait().ok());
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto sink = engine->Submit(requests[i]);
    EXPECT_EQ(BitsOf(*sink), expected[i]) << "page " << i + 1;
    EXPECT_EQ(sink->last().usage.cached_tokens, static_cast<int>(i + 1) * kPageTokens);
  }
}

TEST(StateMemoryTest, CompanyAndPreemptions) {
  const StateModel model;
  const std::vector<Request> requests = ManyRequests(14);
  const std::vector<AnswerBits> expected = PlainAnswers(model, requests);
  uint64_t preemptions = 0, hits = 0;
  for (const int tokens : {320, 512, 900, 3000}) {
    for (const int snapshots : {0, 1, 3, 40}) {
      EngineOptions options;
      options.max_num_seqs = 6;
      options.max_model_len = 320;
      options.snapshots = snapshots;
      options.snapshot_interval = 48;
      options.draft = {.max_tokens = snapshots == 3 ? 4 : 0, .always = true};
      options.kv_cache_bytes = (tokens + 15) / 16 * model.Start(options)->BytesFor(16);
      const auto engine = model.Start(options);
      for (int round = 0; round < 2; ++round) ExpectAnswers(*engine, requests, expected);
      preemptions += engine->get().Stats().preemptions;
      hits += engine->get().Stats().prefix_hit_tokens;
      if (snapshots == 0) {
        EXPECT_EQ(engine->get().Stats().prefix_hit_tokens, 0);
      }
    }
  }
  EXPECT_GT(preemptions, 20);
  EXPECT_GT(hits, 1000);
}

// A model, its memory, and one sequence, without the engine's thread.
class OneSequence {
 public:
  static constexpr int kTokens = 70;
  static constexpr int kPrompt = 50;

  OneSequence(const std::filesystem::path& folder, bool prefix_cache) {
    auto checkpoint = *LoadCheckpoint(folder, {.require_tokenizer = false});
    backend_ = *CreateBackend({.device = "cpu", .threads = 1});
    model_ = *Model::Create(checkpoint.spec, {}, *checkpoint.weights, *backend_);
    cache_ = *backend_->NewKvCache(CacheShapes(checkpoint.spec), KvCacheType::kF32, {32});
    states_ = *backend_->NewStates(StateShapes(checkpoint.spec), 9, 0);
    routes_ = std::make_unique<RouteLog>(RouteLayout(checkpoint.spec), 32, false);
    pool_ = std::make_unique<StatePool>(*states_, 1);
    memory_ =
        std::make_unique<MemoryPool>(*cache_, *routes_, pool_.get(), prefix_cache,
                                     std::vector<PageUse>(1), SnapshotUse{.interval = kPageTokens});
    tokens_ = StateRequest("", kTokens, 1, 3).prompt;
  }

  // Gives the sequence, of which `known` tokens are known, memory. Returns how many of its tokens
  // the prefix cache has.
  int Admit(int known) {
    const std::span<const TokenId> tokens(tokens_.data(), static_cast<size_t>(known));
    EXPECT_TRUE(memory_->Admit(sequence_, tokens, "", known - 1, false));
    return sequence_.computed;
  }
  void Preempt() { memory_->Release(sequence_); }

  // Computes the tokens up to `end`, `chunk` per step, and returns their logits.
  std::vector<float> Compute(int end, int chunk) {
    const auto vocab = static_cast<size_t>(model_->spec().vocab_size);
    std::vector<float> all;
    while (sequence_.computed < end) {
      const int begin = sequence_.computed, rows = std::min(chunk, end - begin);
      EXPECT_TRUE(memory_->Reserve(sequence_, begin + rows));
      Batch batch;
      batch.page_tables.emplace_back(sequence_.pages());
      memory_->AddStates(sequence_, rows, 0, kPrompt, batch.states);
      for (int i = begin; i < begin + rows; ++i) {
        batch.logit_rows.push_back(batch.num_tokens());
        batch.tokens.push_back(tokens_[static_cast<size_t>(i)]);
        batch.positions.push_back(i);
        batch.sequence.push_back(0);
        batch.phase.push_back(Phase::kPrefill);
      }
      std::vector<float> logits(static_cast<size_t>(rows) * vocab);
      model_->Forward(batch, *cache_, {}, {.logits = logits});
      memory_->Advance(sequence_, rows, tokens_, "");
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<KvCacheStorage> cache_;
  std::unique_ptr<StateStorage> states_;
  std::unique_ptr<RouteLog> routes_;
  std::unique_ptr<StatePool> pool_;
  std::unique_ptr<MemoryPool> memory_;
  SequenceMemory sequence_;
  std::vector<TokenId> tokens_;
};

TEST(StateMemoryTest, PreemptionAtEveryLength) {
  const StateModel model;
  OneSequence whole(model.folder(), false);
  whole.Admit(OneSequence::kTokens);
  const std::vector<float> expected = whole.Compute(OneSequence::kTokens, OneSequence::kTokens);
  const auto vocab = static_cast<int64_t>(expected.size()) / OneSequence::kTokens;
  for (const bool prefix_cache : {false, true}) {
    OneSequence sequence(model.folder(), prefix_cache);
    int most_found = 0;
    for (int length = 1; length < OneSequence::kTokens; ++length) {
      for (const int chunk : {1, 7}) {
        SCOPED_TRACE(::testing::Message() << "after " << length << " tokens, steps of " << chunk);
        sequence.Admit(length);
        sequence.Compute(length, chunk);
        sequence.Preempt();
        const int found = sequence.Admit(OneSequence::kTokens);
        most_found = std::max(most_found, found);
        const std::vector<float> rest = sequence.Compute(OneSequence::kTokens, chunk);
        ASSERT_TRUE(
            std::equal(rest.begin(), rest.end(), expected.begin() + found * vocab, expected.end()));
        sequence.Preempt();
      }
    }
    EXPECT_EQ(most_found, prefix_cache ? 64 : 0);
  }
}

TEST(StateMemoryTest, AcceptedAndRejectedDrafts) {
  const StateModel model;
  std::vector<Request> requests = ManyRequests(10);
  for (Request& r : requests) r.sampling.max_tokens = 150;
  const std::vector<AnswerBits> expected = PlainAnswers(model, requests);
  for (int most = 1; most <= 8; ++most) {
    EngineOptions options;
    options.max_num_seqs = 5;
    options.draft = {.max_tokens = most, .always = true};
    options.snapshot_interval = 16;
    options.snapshots = 400;
    const auto engine = model.Start(options);
    for (int round = 0; round < 2; ++round) ExpectAnswers(*engine, requests, expected);
    const EngineStats stats = engine->get().Stats();
    EXPECT_GT(stats.accepted_tokens, 20) << most;
    EXPECT_GT(stats.drafted_tokens, stats.accepted_tokens + 30) << most;
    // The answers' own states are found: a prompt that goes on from an answer.
    for (size_t i = 0; i < requests.size(); ++i) {
      Request next = requests[i];
      next.prompt.insert(next.prompt.end(), expected[i].tokens.begin(), expected[i].tokens.end());
      const uint64_t before = engine->get().Stats().prefix_hit_tokens;
      next.sampling.max_tokens = 20;
      const AnswerBits answer = BitsOf(*engine->Submit(next));
      EXPECT_EQ(engine->get().Stats().prefix_hit_tokens - before,
                (next.prompt.size() - 1) / 16 * 16);
      EXPECT_EQ(answer, PlainAnswers(model, {next}).front());
    }
  }
}

// Which part of a prompt is found: up to the last snapshot.
TEST(StateMemoryTest, SnapshotsWhereTextsBranch) {
  const StateModel model;
  EngineOptions options;
  options.max_num_seqs = 2;
  options.snapshots = 40;
  const auto engine = model.Start(options);
  const auto hit = [&](int prompt, int seed) {
    const Request request = StateRequest("r", prompt, 12, seed);
    const uint64_t before = engine->get().Stats().prefix_hit_tokens;
    EXPECT_EQ(BitsOf(*engine->Submit(request)), PlainAnswers(model, {request}).front());
    return engine->get().Stats().prefix_hit_tokens - before;
  };
  EXPECT_EQ(hit(100, 1), 0);
  EXPECT_EQ(hit(100, 1), 96);  // the last full page of the prompt
  EXPECT_EQ(hit(97, 1), 96);   // the same snapshot
  EXPECT_EQ(hit(96, 1), 0);    // the last token is always computed, and there is none before
  EXPECT_EQ(hit(96, 1), 80);   // but now there is
  EXPECT_EQ(hit(140, 1), 96);  // a longer prompt
  EXPECT_EQ(hit(100, 2), 0);   // shares 48 tokens, after which there was no snapshot
  EXPECT_EQ(hit(100, 3), 48);  // but now there is
  EXPECT_EQ(hit(1500, 4), 48);
  EXPECT_EQ(hit(1500, 4), 1488);
  EXPECT_EQ(hit(1200, 4), 1024);  // the interval
}

TEST(StateMemoryTest, SamplesOfOnePrompt) {
  const StateModel model;
  std::vector<Request> requests;
  for (int i = 0; i < 4; ++i) {
    requests.push_back(StateRequest(std::to_string(i), 77, 60, 1));
    requests.back().sampling.seed = static_cast<uint64_t>(i);
  }
  const std::vector<AnswerBits> expected = PlainAnswers(model, requests);
  for (const int running : {1, 2, 4}) {
    for (const int drafts : {0, 3}) {
      EngineOptions options;
      options.max_num_seqs = running;
      options.draft = {.max_tokens = drafts, .always = true};
      const auto engine = model.Start(options);
      std::vector<std::shared_ptr<TokenSink>> sinks;
      std::vector<std::shared_ptr<CollectingSink>> collected;
      for (int i = 0; i < 4; ++i) {
        collected.push_back(std::make_shared<CollectingSink>());
        sinks.push_back(collected.back());
      }
      EXPECT_TRUE(engine->get().Submit(requests, std::move(sinks)).ok());
      for (size_t i = 0; i < 4; ++i) EXPECT_EQ(BitsOf(*collected[i]), expected[i]) << i;
      engine->ExpectIdle();
    }
  }
}

// A storage that notes what it is asked for.
class NotedStates : public StateStorage {
 public:
  explicit NotedStates(int slots) : StateStorage({{2, 4}}, slots, 0) {}
  void DoClear(int32_t) override {}
  void DoAdvance(int32_t, int, int32_t) override {}
};

TEST(StatePoolTest, DropsTheLeastRecentlyUsedSnapshot) {
  NotedStates storage(5);
  StatePool pool(storage, 2);
  const int32_t first = pool.Take(), second = pool.Take();
  EXPECT_NE(first, second);
  std::vector<int32_t> slots;
  for (uint64_t content = 1; content <= 3; ++content) {
    slots.push_back(pool.TakeForSnapshot().value());
    EXPECT_FALSE(pool.HasSnapshot(content));
    pool.Publish(slots.back(), content);
    EXPECT_TRUE(pool.HasSnapshot(content));
  }
  EXPECT_EQ(pool.Use(1), slots[0]);
  EXPECT_EQ(pool.TakeForSnapshot(), slots[1]);  // content 2 is the least recently used one
  EXPECT_FALSE(pool.HasSnapshot(2));
  EXPECT_TRUE(pool.HasSnapshot(1) && pool.HasSnapshot(3));
  pool.Publish(slots[1], 3);  // there is one already
  EXPECT_EQ(pool.Use(3), slots[2]);
  EXPECT_EQ(pool.TakeForSnapshot(), slots[1]);
  EXPECT_TRUE(pool.TakeForSnapshot().has_value() && pool.TakeForSnapshot().has_value());
  EXPECT_EQ(pool.TakeForSnapshot(), std::nullopt);  // all are being written
  pool.Release(second);
  EXPECT_EQ(pool.Take(), second);
}

}  // namespace
}  // namespace moeserve::testing
