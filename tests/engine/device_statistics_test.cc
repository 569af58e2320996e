// A device that counts its plans says the same as the recorder that sees them on the host.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/statistics/stats_fields.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/golden.h"
#include "tests/support/model_runner.h"

namespace moeserve::testing {
namespace {

// That of the tests where it keeps plans to itself, else the emulated one.
std::string CountingDevice() {
  const std::string device = TestDevice();
  return device == "cpu" ? "cuda_emulated" : device;
}

// Routed attention and feed-forward, sub-tokens, experts of unequal width, top-k and top-p.
std::vector<GoldenModel> SmallRoutedModels() {
  std::vector<GoldenModel> models;
  for (const GoldenModel& m : GoldenModels()) {
    for (const char* name : {"tiny-moa-groups-split-cosine", "tiny-split-unequal-sigmoid",
                             "tiny-sigmoid-top-p", "tiny-layer-lists"}) {
      if (m.name == name) models.push_back(m);
    }
  }
  return models;
}

Request Greedy(const std::string& id, std::vector<TokenId> prompt, int max_tokens) {
  Request r;
  r.id = id;
  r.prompt = std::move(prompt);
  r.sampling.max_tokens = max_tokens;
  r.sampling.temperature = 0.0;
  r.sampling.ignore_eos = true;
  return r;
}

// What an engine says about the same requests.
struct Told {
  std::vector<std::vector<TokenId>> tokens;
  std::vector<Usage> usage;
  std::vector<RoutingRecord> records;
  ExpertStats stats;
  std::vector<uint32_t> table;
};

class DeviceStatisticsTest : public ::testing::TestWithParam<GoldenModel> {
 protected:
  void SetUp() override {
    auto golden = ReadGolden(GetParam().golden);
    ASSERT_TRUE(golden.ok()) << golden.status();
    golden_ = *std::move(golden);
  }

  // Requests one after the other and samples side by side: the same steps on every device.
  Told Ask(const std::string& device, EngineOptions options) {
    options.max_step_tokens = 7;
    options.max_num_seqs = 4;
    options.max_prompt_rows = 5;
    options.kv_cache_bytes = 0;
    auto started = TestEngine::Start(GetParam().model, options, DType::kF32, device);
    EXPECT_TRUE(started.ok()) << started.status();
    TestEngine& engine = **started;
    Told told;
    const int generated = std::min(6, engine.get().max_model_len() - golden_.length);
    for (int n : {1, 3, 1}) {
      std::vector<Request> requests;
      std::vector<std::shared_ptr<TokenSink>> sinks;
      std::vector<std::shared_ptr<CollectingSink>> collected;
      for (int i = 0; i < n; ++i) {
        requests.push_back(
            Greedy(std::to_string(i), golden_.Prompt(n % golden_.prompts), generated - i % 2));
        requests.back().routing_record = options.routing_records;
        collected.push_back(std::make_shared<CollectingSink>());
        sinks.push_back(collected.back());
      }
      EXPECT_TRUE(engine.get().Submit(std::move(requests), std::move(sinks)).ok());
      for (const auto& sink : collected) {
        EXPECT_TRUE(sink->Wait().ok());
        told.tokens.push_back(sink->tokens());
        told.usage.push_back(sink->last().usage);
        told.records.push_back(sink->routing());
      }
      // Complete as soon as the last answer ended, without waiting for anything else.
      told.stats = engine.get().ExpertSnapshot();
    }
    if (const TokenExpertCounts* table = engine.get().token_expert_counts()) {
      told.table = table->Columns(0, table->experts());
    }
    return told;
  }

  void ExpectSame(Told device, Told host) {
    EXPECT_EQ(device.tokens, host.tokens);
    EXPECT_EQ(device.table, host.table);
    ASSERT_EQ(device.usage.size(), host.usage.size());
    for (size_t i = 0; i < host.usage.size(); ++i) {
      EXPECT_EQ(device.usage[i].routed_tokens, host.usage[i].routed_tokens) << i;
      EXPECT_EQ(device.usage[i].expert_routes, host.usage[i].expert_routes) << i;
      EXPECT_EQ(device.usage[i].activated_parameters, host.usage[i].activated_parameters) << i;
      EXPECT_EQ(device.records[i].offsets, host.records[i].offsets) << i;
      EXPECT_EQ(device.records[i].experts, host.records[i].experts) << i;
    }
    int different = 0;
    ForEachCounterOfModel(device.stats, host.stats, [&](auto& d, auto& h) {
      if constexpr (std::is_same_v<std::decay_t<decltype(d)>, double>) {
        different += std::abs(d - h) > 1e-4 * (1.0 + std::abs(h));
      } else {
        different += d != h;
      }
    });
    EXPECT_EQ(different, 0);
  }

  Golden golden_;
};

TEST_P(DeviceStatisticsTest, EqualTheHosts) {
  EngineOptions options;
  options.recorder.router_stats_interval = 3;
  const Told host = Ask("cpu", options), device = Ask(CountingDevice(), options);
  EXPECT_GT(host.stats.tokens, 0u);
  ExpectSame(device, host);
}

// Routes on the host for the records, counts on the device: each step is counted once.
TEST_P(DeviceStatisticsTest, EqualTheHostsWithRecords) {
  EngineOptions options;
  options.routing_records = true;
  ExpectSame(Ask(CountingDevice(), options), Ask("cpu", options));
}

TEST_P(DeviceStatisticsTest, AnObserverSeesEveryPlanOnce) {
  class Observer : public StepHooks {
   public:
    void OnPlan(int, BlockKind, const RoutingPlan& plan) override {
      ++plans;
      assignments += static_cast<uint64_t>(plan.expert_offsets[plan.num_experts]);
    }
    uint64_t plans = 0, assignments = 0;
  };
  Observer observer;
  EngineOptions options;
  const Told host = Ask("cpu", options);
  options.recorder.observer = &observer;
  const Told device = Ask(CountingDevice(), options);
  ExpectSame(device, host);
  EXPECT_EQ(observer.plans, device.stats.steps * device.stats.blocks.size());
  uint64_t selections = 0;
  for (const BlockExpertStats& b : device.stats.blocks) {
    for (uint64_t n : b.selections) selections += n;
  }
  EXPECT_EQ(observer.assignments, selections);
}

TEST_P(DeviceStatisticsTest, OffNothingIsCountedAndAnswersStay) {
  EngineOptions options;
  const Told on = Ask(CountingDevice(), options);
  options.expert_stats = false;
  const Told off = Ask(CountingDevice(), options);
  EXPECT_EQ(on.tokens, off.tokens);
  EXPECT_EQ(off.stats.steps, 0u);
  EXPECT_TRUE(off.table.empty());
  for (const Usage& u : off.usage) EXPECT_EQ(u.expert_routes, 0u);
}

// Sequences that lose their cache run twice: of that only the recomputed_ counters know.
TEST_P(DeviceStatisticsTest, PreemptedTokensAreCountedApart) {
  EngineOptions options{.max_num_seqs = 4, .prefix_cache = false, .routing_records = true};
  options.max_model_len = 40;
  std::vector<uint64_t> from_records;
  uint64_t tokens = 0;
  int64_t bytes = 0;
  {
    auto any = TestEngine::Start(GetParam().model, options, DType::kF32, CountingDevice());
    ASSERT_TRUE(any.ok()) << any.status();
    bytes = (*any)->BytesFor(40) * 2;
  }
  options.kv_cache_bytes = bytes;
  auto started = TestEngine::Start(GetParam().model, options, DType::kF32, CountingDevice());
  ASSERT_TRUE(started.ok()) << started.status();
  TestEngine& engine = **started;
  const RouteLayout& layout = engine.get().route_layout();
  from_records.resize(layout.num_experts);
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  for (int i = 0; i < 4; ++i) {
    std::vector<TokenId> prompt = golden_.Prompt(i % golden_.prompts);
    prompt.resize(std::min<size_t>(prompt.size(), 8));
    Request r = Greedy(std::to_string(i), prompt, 30);
    r.routing_record = true;
    sinks.push_back(engine.Submit(std::move(r)));
  }
  for (const auto& sink : sinks) {
    ASSERT_TRUE(sink->Wait().ok());
    const RoutingRecord& record = sink->routing();
    tokens += static_cast<uint64_t>(record.tokens);
    for (size_t row = 0; row + 1 < record.offsets.size(); ++row) {
      const RoutedBlock& block = layout.blocks[static_cast<size_t>(
          layout.block_of_row[row % static_cast<size_t>(layout.rows_per_token)])];
      for (uint32_t a = record.offsets[row]; a < record.offsets[row + 1]; ++a) {
        ++from_records[block.first_expert + record.experts[a]];
      }
    }
  }
  const ExpertStats stats = engine.get().ExpertSnapshot();
  EXPECT_GT(stats.recomputed_tokens, 0u);
  EXPECT_EQ(stats.tokens, tokens);
  std::vector<uint64_t> selections;
  for (const BlockExpertStats& b : stats.blocks) {
    selections.insert(selections.end(), b.selections.begin(), b.selections.end());
  }
  EXPECT_EQ(selections, from_records);
  const TokenExpertCounts* table = engine.get().token_expert_counts();
  ASSERT_NE(table, nullptr);
  const std::vector<uint32_t> pairs = table->Columns(0, table->experts());
  std::vector<uint64_t> sums(layout.num_experts);
  for (size_t i = 0; i < pairs.size(); ++i) sums[i % layout.num_experts] += pairs[i];
  EXPECT_EQ(sums, from_records);
}

// Counts its steps on the device and refuses their plans.
class CountingHooks : public StepHooks {
 public:
  explicit CountingHooks(RouteCounters* counters) : counters_(counters) {}
  bool WantsPlans() const override { return false; }
  RouteCounters* Counters() override { return counters_; }
  void OnPlan(int, BlockKind, const RoutingPlan&) override { ++plans; }
  void OnOutcome(const StepOutcome& outcome) override {
    tokens += outcome.failed.size();
    for (const TokenRoutes& t : outcome.routes) {
      routes += t.routes;
      parameters += t.parameters;
    }
    counted = outcome.routes.size();
  }
  uint64_t plans = 0, tokens = 0, routes = 0, parameters = 0;
  size_t counted = 0;

 private:
  RouteCounters* const counters_;
};

// Steps of several shapes, each run, recorded and replayed; one is recorded full and replayed with
// a row that only fills it up.
TEST_P(DeviceStatisticsTest, ReplayedStepsCountAndFetchNoPlan) {
  const auto runner = ModelRunner::Load(GetParam().model, {.device = CountingDevice()});
  ASSERT_TRUE(runner.ok()) << runner.status();
  Backend& backend = (*runner)->backend();
  const CountSettings settings = RecorderCounts((*runner)->spec(), {});
  auto counters = backend.NewRouteCounters(settings);
  ASSERT_TRUE(counters.ok()) << counters.status();
  ASSERT_NE(*counters, nullptr);
  CountingHooks hooks(counters->get());
  uint64_t tokens = 0, steps = 0;
  for (int position = 0; position < 4; ++position) {
    for (int sequences : {1, 4, 4, 3, 2}) {
      std::vector<ModelRunner::Part> parts;
      for (int s = 0; s < sequences; ++s) {
        parts.push_back({sequences + s, position, {golden_.tokens[static_cast<size_t>(position)]}});
      }
      (*runner)->RunTogether(parts, &hooks);
      EXPECT_EQ(hooks.counted, static_cast<size_t>(sequences));
      tokens += static_cast<uint64_t>(sequences);
      ++steps;
    }
  }
  EXPECT_EQ(hooks.plans, 0u);
  EXPECT_EQ(hooks.tokens, tokens);
  const auto counts = (*counters)->Read();
  ASSERT_TRUE(counts.ok()) << counts.status();
  EXPECT_EQ(counts->model.steps, steps);
  EXPECT_EQ(counts->model.tokens[kTokenPrefill], tokens);
  uint64_t selections = 0, parameters = 0;
  for (size_t i = 0; i < settings.blocks.size(); ++i) {
    for (size_t e = 0; e < counts->blocks[i].experts.size(); ++e) {
      const uint64_t n = counts->blocks[i].experts[e].selections;
      selections += n;
      parameters += n * static_cast<uint64_t>(settings.blocks[i].expert_parameters[e]);
    }
  }
  EXPECT_EQ(hooks.routes, selections);
  for (size_t i = 0; i < settings.blocks.size(); ++i) {
    const CountedBlock& b = settings.blocks[i];
    uint64_t seen = 0;
    for (uint64_t n : counts->blocks[i].distinct_histogram) seen += n;
    EXPECT_EQ(seen, tokens) << "block " << i;
    if (EmptyExpertStats((*runner)->spec()).blocks[i].select != SelectKind::kTopK) continue;
    uint64_t chosen = 0;
    for (const ExpertCount& e : counts->blocks[i].experts) chosen += e.selections;
    EXPECT_EQ(chosen % (tokens * static_cast<uint64_t>(b.sub_tokens)), 0u) << "block " << i;
  }
  EXPECT_EQ(hooks.parameters, parameters);
  // Without counters, the same steps leave them alone.
  CountingHooks none(nullptr);
  (*runner)->RunTogether({{0, 0, {golden_.tokens[0]}}}, &none);
  EXPECT_EQ(none.counted, 0u);
  EXPECT_EQ(none.tokens, 1u);
  EXPECT_EQ((*counters)->Read()->model.steps, steps);
}

// Looks at scores and inputs of every other step. Without routes to give, RoutesFor() is asked
// whenever the operations of a block are issued: not in a step that is replayed.
class LookingHooks : public StepHooks {
 public:
  explicit LookingHooks(bool at_once = false) : at_once_(at_once) {}
  bool WantsPlans() const override { return false; }
  bool WantsScores() const override { return looks; }
  bool WantsInputs() const override { return looks; }
  bool GivesRoutes() const override { return at_once_; }
  const GivenRoutes* RoutesFor(int, BlockKind) override {
    ++issued;
    return nullptr;
  }
  void OnOutcome(const StepOutcome&) override { outcomes_.push_back(seen.size()); }
  void OnPlan(int layer, BlockKind block, const RoutingPlan& plan) override {
    Seen& s = seen.emplace_back();
    s.slot = PlanSlot(layer, block);
    for (int r = 0; r < plan.rows; ++r) {
      for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
        s.experts.push_back(plan.expert_of_assignment[plan.assignments_of_row[i]]);
      }
    }
  }
  void OnScores(int, BlockKind, const RoutingPlan& plan, std::span<const float> scores) override {
    EXPECT_EQ(scores.size(), static_cast<size_t>(plan.rows) * plan.num_experts);
    seen.back().scores.assign(scores.begin(), scores.end());
  }
  void OnInputs(int, BlockKind, const RoutingPlan&, std::span<const float> inputs) override {
    seen.back().inputs.assign(inputs.begin(), inputs.end());
  }

  struct Seen {
    int slot = 0;
    std::vector<int32_t> experts;
    std::vector<float> scores, inputs;
  };
  // Of the last step: how many blocks were told before its outcome.
  size_t told_before_outcome() const { return outcomes_.back(); }
  bool looks = true;
  int issued = 0;
  std::vector<Seen> seen;

 private:
  const bool at_once_;
  std::vector<size_t> outcomes_;
};

void ExpectNear(const std::vector<float>& device, const std::vector<float>& host) {
  ASSERT_EQ(device.size(), host.size());
  for (size_t i = 0; i < host.size(); ++i) {
    ASSERT_NEAR(device[i], host[i], 1e-4 * (1.0 + std::abs(host[i]))) << i;
  }
}

void ExpectSameSight(const LookingHooks& device, const LookingHooks& host) {
  ASSERT_EQ(device.seen.size(), host.seen.size());
  for (size_t b = 0; b < host.seen.size(); ++b) {
    SCOPED_TRACE("block " + std::to_string(b));
    EXPECT_EQ(device.seen[b].slot, host.seen[b].slot);
    EXPECT_EQ(device.seen[b].experts, host.seen[b].experts);
    ASSERT_FALSE(host.seen[b].scores.empty());
    ASSERT_FALSE(host.seen[b].inputs.empty());
    ExpectNear(device.seen[b].scores, host.seen[b].scores);
    ExpectNear(device.seen[b].inputs, host.seen[b].inputs);
  }
}

// A step that is looked at is recorded and replayed like any other, beside those of its size that
// are not, and its hooks see what they see on the host. A row that only fills it up is not shown.
TEST_P(DeviceStatisticsTest, StepsThatAreLookedAtAreReplayed) {
  const auto device = ModelRunner::Load(GetParam().model, {.device = CountingDevice()});
  const auto host = ModelRunner::Load(GetParam().model, {.device = "cpu"});
  ASSERT_TRUE(device.ok()) << device.status();
  ASSERT_TRUE(host.ok()) << host.status();
  const int blocks = static_cast<int>(EmptyExpertStats((*host)->spec()).blocks.size());
  int runs = 0;
  for (int position = 0; position < 4; ++position) {
    for (const int sequences : {4, 3}) {
      for (const bool looks : {true, false}) {
        SCOPED_TRACE(::testing::Message() << position << ", " << sequences << ", " << looks);
        std::vector<ModelRunner::Part> parts;
        for (int s = 0; s < sequences; ++s) {
          const size_t token = static_cast<size_t>(position + s) % golden_.tokens.size();
          parts.push_back({s, position, {golden_.tokens[token]}});
        }
        LookingHooks on_device, on_host;
        on_device.looks = on_host.looks = looks;
        (*device)->RunTogether(parts, &on_device);
        // Once as it is and once to record it; steps with and without a look have their own.
        EXPECT_EQ(on_device.issued, runs < 2 ? blocks : 0);
        EXPECT_EQ(on_device.told_before_outcome(), 0u);
        if (!looks) {
          EXPECT_TRUE(on_device.seen.empty());
          continue;
        }
        (*host)->RunTogether(parts, &on_host);
        ExpectSameSight(on_device, on_host);
        if (HasFatalFailure()) return;
      }
      ++runs;
    }
  }
}

// Prompts are not replayed, but wait for the host no more; hooks that bring routes have to.
TEST_P(DeviceStatisticsTest, PromptsAreLookedAtAfterwardsOrAtOnce) {
  const auto device = ModelRunner::Load(GetParam().model, {.device = CountingDevice()});
  const auto host = ModelRunner::Load(GetParam().model, {.device = "cpu"});
  ASSERT_TRUE(device.ok()) << device.status();
  ASSERT_TRUE(host.ok()) << host.status();
  const std::vector<ModelRunner::Part> parts = {{0, 0, golden_.Prompt(0)},
                                                {1, 0, golden_.Prompt(1 % golden_.prompts)}};
  LookingHooks on_host;
  (*host)->RunTogether(parts, &on_host);
  for (const bool at_once : {false, true}) {
    SCOPED_TRACE(at_once);
    LookingHooks on_device(at_once);
    (*device)->RunTogether(parts, &on_device);
    EXPECT_EQ(on_device.told_before_outcome(), at_once ? on_device.seen.size() : 0u);
    ExpectSameSight(on_device, on_host);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, DeviceStatisticsTest, ::testing::ValuesIn(SmallRoutedModels()),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace moeserve::testing
