// Experts that do not fit into a device's memory: the bits of a model whose experts all do.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/exchange/loopback_transport.h"
#include "kernels/exchange/message_exchange.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/family_cases.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"
#include "tests/support/native_model.h"

namespace moeserve::testing {
namespace {

struct SlotsSetup {
  std::string name;
  std::filesystem::path model;
  std::filesystem::path golden;  // empty: a family
  Quantization quantization = Quantization::kNone;
  bool fp8 = false;  // experts are rounded to FP8 and kept so
};
void PrintTo(const SlotsSetup& s, std::ostream* out) { *out << s.name; }

std::vector<SlotsSetup> SlotsSetups() {
  std::vector<SlotsSetup> setups;
  for (const GoldenModel& m : GoldenModels()) {
    setups.push_back({m.name, m.model, m.golden});
    if (m.name.starts_with("tiny-")) continue;
    setups.push_back({m.name + "_int8_channel", m.model, m.golden, Quantization::kInt8Channel});
    setups.push_back({m.name + "_int4_k", m.model, m.golden, Quantization::kInt4K});
  }
  for (const FamilyCase& c : FamilyCases()) {
    const bool fp8 = c.name == "qwen3-moe-fp8";
    setups.push_back({TestName(c), c.folder, "", Quantization::kNone, fp8});
  }
  for (SlotsSetup& s : setups) std::ranges::replace(s.name, '-', '_');
  return setups;
}

// What steps report of a routed block.
struct ReportedBlock {
  std::vector<int32_t> offsets, rows;
  std::vector<float> weights, scores;
  bool operator==(const ReportedBlock&) const = default;
};

class SlotsTest : public ::testing::TestWithParam<SlotsSetup> {
 protected:
  struct Outcome {
    std::vector<float> logits;
    std::vector<ReportedBlock> blocks;
    TierCounts counts;
    int64_t weight_bytes = 0;
    uint64_t replayed = 0;
  };

  void SetUp() override {
    if (TestDevice() == "cpu") GTEST_SKIP() << "slots are of other devices";
    if (GetParam().golden.empty()) {
      const auto answers = ReadFamilyAnswers(GetParam().model);
      ASSERT_TRUE(answers.ok()) << answers.status();
      prompt_ = answers->Prompt(0);
      other_ = answers->Prompt(answers->prompts - 1);
    } else {
      const auto golden = ReadGolden(GetParam().golden);
      ASSERT_TRUE(golden.ok()) << golden.status();
      prompt_ = golden->Prompt(0);
      other_ = golden->Prompt(golden->prompts - 1);
    }
    prompt_.resize(std::min<size_t>(prompt_.size(), 21));
  }

  Result<std::unique_ptr<ModelRunner>> LoadWith(std::optional<int64_t> memory,
                                                Exchange* exchange = nullptr) const {
    RunnerOptions options{.compute = DType::kBF16,
                          .quantization = GetParam().quantization,
                          .cache_tokens = 2048,
                          .keep_fp8 = GetParam().fp8,
                          .round_to_fp8 = GetParam().fp8};
    options.tiers.memory = memory;
    options.exchange = exchange;
    options.split_head = SplitChoice::kOff;
    return ModelRunner::Load(GetParam().model, options);
  }

  // The logits and reports of steps with a prompt, single tokens, and several sequences.
  Outcome RunSteps(std::optional<int64_t> memory, Exchange* exchange = nullptr) const {
    auto loaded = LoadWith(memory, exchange);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    if (!loaded.ok()) return {};
    ModelRunner& runner = **loaded;
    Outcome outcome;
    StepSetup setup{.options = {.report = {.plans = true, .scores = exchange == nullptr}}};
    setup.report = [&](const StepReport& report) {
      for (const BlockReport& b : report.blocks) {
        const auto count = static_cast<size_t>(b.plan.expert_offsets[b.plan.num_experts]);
        ReportedBlock& block = outcome.blocks.emplace_back();
        block.offsets.assign(b.plan.expert_offsets, b.plan.expert_offsets + b.plan.num_experts + 1);
        block.rows.assign(b.plan.row_of_assignment, b.plan.row_of_assignment + count);
        block.weights.assign(b.plan.weight_of_assignment, b.plan.weight_of_assignment + count);
        block.scores.assign(b.scores.begin(), b.scores.end());
      }
    };
    const auto add = [&](const std::vector<float>& logits) {
      outcome.logits.insert(outcome.logits.end(), logits.begin(), logits.end());
    };
    add(runner.Run(prompt_, static_cast<int>(prompt_.size()), 0, setup));
    add(runner.Run({prompt_.begin(), prompt_.begin() + 4}, 1, 0, setup, 1));
    add(runner.RunTogether({{3, 0, {prompt_.begin(), prompt_.begin() + 7}},
                            {4, 0, {other_.begin(), other_.begin() + 1}},
                            {5, 0, {other_.begin(), other_.begin() + 5}}},
                           setup));
    outcome.counts = runner.model().tier_counts();
    outcome.weight_bytes = runner.backend().weight_bytes();
    outcome.replayed = runner.backend().replayed_steps();
    return outcome;
  }

  static void ExpectSame(const Outcome& a, const Outcome& b) {
    ASSERT_EQ(a.logits.size(), b.logits.size());
    const auto same = [](float x, float y) { return std::memcmp(&x, &y, sizeof(x)) == 0; };
    const auto [at, other] =
        std::mismatch(a.logits.begin(), a.logits.end(), b.logits.begin(), same);
    EXPECT_TRUE(at == a.logits.end())
        << "logit " << at - a.logits.begin() << ": " << *other << " instead of " << *at;
    EXPECT_TRUE(a.blocks == b.blocks);
  }

  // Returns the bytes of the largest expert, which a refused model states.
  int64_t LargestExpert() const {
    const auto refused = LoadWith(1);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << refused.status();
    const std::string message(refused.status().message());
    EXPECT_NE(message.find("found 1"), std::string::npos) << message;
    const std::string before = "expected at least ";
    const size_t at = message.find(before);
    EXPECT_NE(at, std::string::npos) << message;
    return at == std::string::npos ? 1 : std::stoll(message.substr(at + before.size()));
  }

  std::vector<int32_t> prompt_, other_;
};

TEST_P(SlotsTest, LogitsHaveTheBitsOfExpertsThatAllFit) {
  if (LoadWith(1).ok()) GTEST_SKIP() << "a model without experts";
  const Outcome all = RunSteps(std::nullopt);
  ASSERT_FALSE(all.logits.empty());
  EXPECT_FALSE(all.counts.in_force);
  const int64_t largest = LargestExpert();
  const Outcome one = RunSteps(largest);
  const int64_t bytes = one.counts.expert_bytes;
  ASSERT_GE(bytes, largest);
  {
    SCOPED_TRACE("one expert at a time");
    ExpectSame(all, one);
    ASSERT_TRUE(one.counts.in_force);
    EXPECT_GT(one.counts.read_bytes, 0u);
    EXPECT_GT(one.counts.waves, 0u);
    EXPECT_LT(one.weight_bytes, all.weight_bytes);
    EXPECT_EQ(one.replayed, 0u);
  }
  {
    SCOPED_TRACE("a third");
    const Outcome third = RunSteps(std::max(bytes / 3, largest));
    ExpectSame(all, third);
    EXPECT_EQ(third.counts.expert_bytes, bytes);
    EXPECT_TRUE(third.counts.in_force);
    EXPECT_LE(third.counts.read_bytes, one.counts.read_bytes);
    EXPECT_EQ(third.replayed, 0u);
  }
  SCOPED_TRACE("all");
  const Outcome stay = RunSteps(bytes);
  ExpectSame(all, stay);
  EXPECT_FALSE(stay.counts.in_force);
  EXPECT_EQ(stay.counts.hit_bytes + stay.counts.read_bytes + stay.counts.waves, 0u);
  EXPECT_EQ(stay.replayed, all.replayed);
}

// Each of two ranks has slots for its experts.
TEST_P(SlotsTest, RanksWithSlots) {
  Outcome one = RunSteps(std::nullopt);
  for (ReportedBlock& block : one.blocks) block.scores.clear();
  const int64_t largest = LargestExpert();
  std::vector<std::unique_ptr<Transport>> transports = LoopbackTransports(2);
  std::vector<Outcome> found(2);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < found.size(); ++r) {
    threads.emplace_back([&, r] {
      MessageExchange exchange(std::move(transports[r]), {.timeout = absl::Seconds(300)});
      found[r] = RunSteps(largest, &exchange);
      EXPECT_TRUE(exchange.status().ok()) << exchange.status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Outcome& rank : found) {
    ExpectSame(one, rank);
    EXPECT_TRUE(rank.counts.in_force);
    EXPECT_GT(rank.counts.read_bytes, 0u);
  }
}

// An engine with slots for two experts gives the answers, records and statistics of one without.
TEST(SlotsEngineTest, AnswersRecordsAndStatistics) {
  if (TestDevice() == "cpu") GTEST_SKIP() << "slots are of other devices";
  constexpr int kRequests = 4;
  EngineOptions options;
  options.max_model_len = 64;
  options.routing_records = true;
  struct Answers {
    std::vector<AnswerBits> bits;
    std::vector<RoutingRecord> records;
    ExpertStats statistics;
    TierCounts tiers;
  };
  const auto run = [&](std::optional<int64_t> memory) {
    Answers answers;
    auto engine =
        TestEngine::Start(SourcePath("deploy/models/mh-moe"), options, DType::kBF16, TestDevice(),
                          Quantization::kNone, {}, false, {.tiers = {.memory = memory}});
    EXPECT_TRUE(engine.ok()) << engine.status();
    if (!engine.ok()) return answers;
    for (int i = 0; i < kRequests; ++i) {
      Request r;
      r.id = std::to_string(i);
      for (int t = 0; t < 9 + i; ++t) r.prompt.push_back((t * 7 + i) % 40);
      r.sampling.max_tokens = 4;
      r.sampling.temperature = i % 2 == 1 ? 0.9 : 0.0;
      r.sampling.seed = static_cast<uint64_t>(i);
      r.sampling.ignore_eos = true;
      r.sampling.logprobs = 2;
      r.routing_record = true;
      const auto sink = (*engine)->Submit(r);
      answers.bits.push_back(BitsOf(*sink));
      answers.records.push_back(sink->routing());
    }
    answers.statistics = (*engine)->get().ExpertSnapshot();
    answers.tiers = (*engine)->get().Stats().tiers;
    return answers;
  };
  const Answers expected = run(std::nullopt);
  const Answers found = run(int64_t{1} << 20);
  EXPECT_FALSE(expected.tiers.in_force);
  EXPECT_TRUE(found.tiers.in_force);
  EXPECT_GT(found.tiers.read_bytes, 0u);
  ASSERT_EQ(found.bits.size(), expected.bits.size());
  for (size_t i = 0; i < expected.bits.size(); ++i) {
    EXPECT_TRUE(found.bits[i] == expected.bits[i]) << "request " << i;
    ExpectSameRoutes(found.records[i], expected.records[i], "request " + std::to_string(i));
  }
  ASSERT_EQ(found.statistics.blocks.size(), expected.statistics.blocks.size());
  for (size_t b = 0; b < expected.statistics.blocks.size(); ++b) {
    EXPECT_EQ(found.statistics.blocks[b].selections, expected.statistics.blocks[b].selections);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, SlotsTest, ::testing::ValuesIn(SlotsSetups()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace moeserve::testing
