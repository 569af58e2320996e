// Attention with a window keeps only the pages that its tokens still see. That changes how much
// memory a sequence takes, and nothing else.

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/memory/memory_pool.h"
#include "model_loaders/architectures/native/config_json.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

constexpr int kPromptStep = 512;

// Writes a model of two layers, one of them routed, with these windows.
class WindowModel {
 public:
  WindowModel(int first_window, int second_window, int positions) {
    nlohmann::json attention = nlohmann::json::array();
    for (const int window : {first_window, second_window}) {
      attention.push_back({{"kind", "dense"}, {"num_heads", 1}, {"head_dim", 8}});
      if (window > 0) attention.back()["window"] = window;
    }
    const nlohmann::json expert = {{"form", "plain"}, {"activation", "relu"}};
    const nlohmann::json config = {
        {"model_type", "routed_decoder"},
        {"vocab_size", 64},
        {"hidden_size", 8},
        {"num_hidden_layers", 2},
        {"max_position_embeddings", positions},
        {"bos_token_id", nullptr},
        {"eos_token_id", 1},
        {"attention", attention},
        {"feed_forward",
         {{{"kind", "dense"}, {"width", 8}, {"expert", expert}},
          {{"kind", "routed"},
           {"expert", expert},
           {"routing",
            {{"num_experts", 4}, {"widths", 4}, {"select", {{"kind", "top_k"}, {"k", 2}}}}}}}}};
    const auto parsed = ParseNativeConfig(config.dump());
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    WriteFile(folder_.path() / "config.json", config.dump());
    WriteFile(folder_.path() / "model.safetensors", SafetensorsBytes(RandomTensors(parsed->spec)));
  }

  std::unique_ptr<TestEngine> Start(bool keeps_pages, EngineOptions options = {}) const {
    options.max_step_tokens = kPromptStep;
    options.window_pages = !keeps_pages;
    auto engine = TestEngine::Start(folder_.path(), options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }

  const std::filesystem::path& folder() const { return folder_.path(); }

 private:
  TempFolder folder_;
};

Request MakeRequest(const std::string& id, int prompt, int tokens, int seed) {
  Request r;
  r.id = id;
  // All prompts begin alike.
  for (int i = 0; i < prompt; ++i) {
    r.prompt.push_back(2 + (i * 31 + i / 7 + (i < 400 ? 0 : seed * 13)) % 62);
  }
  r.sampling.max_tokens = tokens;
  r.sampling.temperature = 1.0;
  r.sampling.seed = static_cast<uint64_t>(seed);
  r.sampling.ignore_eos = true;
  r.sampling.logprobs = 2;
  return r;
}

TEST(WindowMemoryTest, OneSequenceNeedsAnEighthOfThePages) {
  constexpr int kLength = 32768, kWindow = 1024;
  const WindowModel model(kWindow, kWindow, kLength);
  EngineOptions options;
  options.max_num_seqs = 1;
  options.expert_stats = true;
  const auto full = model.Start(true, options);
  const Request request = MakeRequest("long", kLength - 40, 40, 3);
  const AnswerBits expected = BitsOf(*full->Submit(request));

  options.kv_cache_bytes = full->BytesFor(kLength) / 8;
  const auto windowed = model.Start(false, options);
  EXPECT_LE(windowed->get().Stats().kv_blocks_total, PagesFor(kLength) / 8);
  EXPECT_EQ(BitsOf(*windowed->Submit(request)), expected);
  EXPECT_EQ(windowed->get().Stats().preemptions, 0);
  windowed->ExpectIdle();
}

// The windows of the two layers; 0: all positions.
class WindowsTest : public ::testing::TestWithParam<std::pair<int, int>> {
 protected:
  const WindowModel model_{GetParam().first, GetParam().second, 2048};
};

INSTANTIATE_TEST_SUITE_P(Windows, WindowsTest,
                         ::testing::Values(std::pair(48, 20), std::pair(0, 20), std::pair(70, 0),
                                           std::pair(1, 0)));

// Requests compete for pages, share beginnings and samples, and are preempted.
TEST_P(WindowsTest, CompanyChangesNothing) {
  const WindowModel& model = model_;
  EngineOptions options;
  options.max_num_seqs = 8;
  const auto full = model.Start(true, options);
  std::vector<Request> requests;
  std::vector<AnswerBits> expected;
  for (int i = 0; i < 12; ++i) {
    requests.push_back(MakeRequest(std::to_string(i), 300 + i * 137 % 1100, 200 + i * 29 % 300, i));
    expected.push_back(BitsOf(*full->Submit(requests.back())));
  }
  uint64_t preemptions = 0, hits = 0;
  const bool mixed = GetParam().first == 0 || GetParam().second == 0;
  for (const int tokens : {mixed ? 1472 : 832, mixed ? 1500 : 1000, 1600, 6000}) {
    for (const bool prefix_cache : {true, false}) {
      options.prefix_cache = prefix_cache;
      options.kv_cache_bytes = full->BytesFor(tokens);
      const auto engine = model.Start(false, options);
      for (int round = 0; round < 2; ++round) {
        std::vector<std::shared_ptr<CollectingSink>> sinks;
        for (const Request& r : requests) sinks.push_back(engine->Submit(r));
        for (size_t i = 0; i < sinks.size(); ++i) {
          EXPECT_EQ(BitsOf(*sinks[i]), expected[i]) << tokens << " request " << i;
        }
      }
      engine->ExpectIdle();
      preemptions += engine->get().Stats().preemptions;
      hits += engine->get().Stats().prefix_hit_tokens;
    }
  }
  EXPECT_GT(preemptions, 0);
  EXPECT_GT(hits, 0);
}

// The samples share the last page of the prompt, which is not full, until each copies it.
TEST_P(WindowsTest, SamplesOfOnePrompt) {
  const WindowModel& model = model_;
  EngineOptions options;
  options.max_num_seqs = 4;
  std::vector<Request> requests;
  for (int i = 0; i < 4; ++i) {
    requests.push_back(MakeRequest(std::to_string(i), 260, 60, 5));
    requests.back().sampling.seed = static_cast<uint64_t>(i);
  }
  const auto full = model.Start(true, options);
  std::vector<AnswerBits> expected;
  for (const Request& r : requests) expected.push_back(BitsOf(*full->Submit(r)));
  options.kv_cache_bytes = full->BytesFor(1500);
  const auto windowed = model.Start(false, options);
  for (TestEngine* engine : {full.get(), windowed.get()}) {
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

// Of two equal layers, one has a window. Both together take little more than half of the memory.
TEST(WindowMemoryTest, OnlyTheLayerWithAWindowReleasesPages) {
  constexpr int kLength = 32768;
  const WindowModel model(1024, 0, kLength);
  EngineOptions options;
  options.max_num_seqs = 1;
  const auto full = model.Start(true, options);
  const Request request = MakeRequest("long", kLength - 40, 40, 3);
  const AnswerBits expected = BitsOf(*full->Submit(request));

  options.kv_cache_bytes = full->BytesFor(kLength) * 9 / 16;
  const auto windowed = model.Start(false, options);
  EXPECT_EQ(BitsOf(*windowed->Submit(request)), expected);
  EXPECT_EQ(windowed->get().Stats().preemptions, 0);
  windowed->ExpectIdle();

  options.kv_cache_bytes = full->BytesFor(kLength) / 2;
  const auto refused = TestEngine::Start(model.folder(), options);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
}

// A prompt continues a cached prefix only where the window behind it is cached, too.
TEST(WindowMemoryTest, PrefixesEndWhereTheWindowIsCached) {
  const WindowModel model(64, 0, 2048);
  EngineOptions options;
  options.max_num_seqs = 1;
  const auto full = model.Start(true, options);
  // The pages of the window are used again while the text grows.
  options.kv_cache_bytes = full->BytesFor(2048) * 3 / 4;
  const auto windowed = model.Start(false, options);
  const auto expect_hits = [&](const Request& request, int in_full, int in_windowed) {
    const uint64_t before = full->get().Stats().prefix_hit_tokens;
    const uint64_t windowed_before = windowed->get().Stats().prefix_hit_tokens;
    EXPECT_EQ(BitsOf(*windowed->Submit(request)), BitsOf(*full->Submit(request)));
    EXPECT_EQ(full->get().Stats().prefix_hit_tokens - before, in_full);
    EXPECT_EQ(windowed->get().Stats().prefix_hit_tokens - windowed_before, in_windowed);
  };
  Request request = MakeRequest("a", 1600, 8, 3);
  expect_hits(request, 0, 0);
  expect_hits(request, 1584, 1584);
  request.prompt.resize(500);
  expect_hits(request, 496, 0);
  expect_hits(request, 496, 496);
}

}  // namespace
}  // namespace moeserve::testing
