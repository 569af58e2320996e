// Compares expert statistics that a device counts itself with those of the recorder that counts
// routing plans on the host. Both must be equal.

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

// Returns the device under test if it does not copy its routing plans to the host, else the
// emulated CUDA device.
std::string CountingDevice() {
  const std::string device = TestDevice();
  return device == "cpu" ? "cuda_emulated" : device;
}

// Returns models that together have routed attention and feed-forward, sub-tokens, experts of
// unequal width, top-k and top-p.
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

Request GreedyOnDevice(const std::string& id, std::vector<TokenId> prompt, int max_tokens) {
  Request r;
  r.id = id;
  r.prompt = std::move(prompt);
  r.sampling.max_tokens = max_tokens;
  r.sampling.temperature = 0.0;
  r.sampling.ignore_eos = true;
  return r;
}

// What an engine reports about a set of requests.
struct Told {
  std::vector<std::vector<TokenId>> tokens;
  std::vector<Usage> usage;
  std::vector<RoutingRecord> records;
  ExpertStats stats;
  std::vector<uint32_t> table;
  TokenColumns columns;
};

class DeviceStatisticsTest : public ::testing::TestWithParam<GoldenModel> {
 protected:
  void SetUp() override {
    auto golden = ReadGolden(GetParam().golden);
    ASSERT_TRUE(golden.ok()) << golden.status();
    golden_ = *std::move(golden);
  }

  // Runs requests one after the other, with the samples of a request in parallel, so that every
  // device runs the same steps.
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
        requests.push_back(GreedyOnDevice(std::to_string(i), golden_.Prompt(n % golden_.prompts),
                                          generated - i % 2));
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
      // The snapshot must be complete as soon as the last response has ended.
      told.stats = engine.get().ExpertSnapshot();
    }
    if (const auto table = engine.get().token_expert_counts()) {
      told.table = table->Columns(0, table->experts());
      told.columns = table->ReadColumns(0, table->experts());
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

TEST_P(DeviceStatisticsTest, CountsOfFrequentTokensEqualTheHosts) {
  EngineOptions options;
  const Told all = Ask("cpu", options);
  size_t experts = 0;
  for (const BlockExpertStats& b : all.stats.blocks) experts += b.selections.size();
  options.recorder.token_counts_bytes = static_cast<int64_t>(16 * experts * sizeof(uint32_t));
  const Told host = Ask("cpu", options), device = Ask(CountingDevice(), options);
  ExpectSame(device, host);
  EXPECT_EQ(device.columns.tokens, host.columns.tokens);
  EXPECT_EQ(device.columns.counts, host.columns.counts);
  if (experts == 0) return;
  ASSERT_FALSE(host.columns.tokens.empty());
  std::vector<uint64_t> sums(experts), of_all(experts);
  for (size_t i = 0; i < host.columns.counts.size(); ++i) {
    sums[i % experts] += host.columns.counts[i];
    const int32_t token = host.columns.tokens[i / experts];
    if (token < 0) continue;
    EXPECT_LE(host.columns.counts[i],
              all.table[static_cast<size_t>(token) * experts + i % experts]);
  }
  for (size_t i = 0; i < all.table.size(); ++i) of_all[i % experts] += all.table[i];
  EXPECT_EQ(sums, of_all);
}

// The host gets the routes for the records while the device counts them: each step must be counted
// once.
TEST_P(DeviceStatisticsTest, EqualTheHostsWithRecords) {
  EngineOptions options;
  options.routing_records = true;
  ExpectSame(Ask(CountingDevice(), options), Ask("cpu", options));
}

TEST_P(DeviceStatisticsTest, AnObserverSeesEveryPlanOnce) {
  class Observer : public StepObserver {
   public:
    ReportContents contents() const override { return {.plans = true}; }
    void OnStep(const Batch&, const StepReport& report) override {
      for (const BlockReport& block : report.blocks) {
        ++plans;
        assignments += static_cast<uint64_t>(block.plan.expert_offsets[block.plan.num_experts]);
      }
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

// Preempted sequences run their tokens again. Only the recomputed_ counters may include the
// repeated work.
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
    Request r = GreedyOnDevice(std::to_string(i), prompt, 30);
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
  const auto table = engine.get().token_expert_counts();
  ASSERT_TRUE(table.has_value());
  const std::vector<uint32_t> pairs = table->Columns(0, table->experts());
  std::vector<uint64_t> sums(layout.num_experts);
  for (size_t i = 0; i < pairs.size(); ++i) sums[i % layout.num_experts] += pairs[i];
  EXPECT_EQ(sums, from_records);
}

// Runs steps of several shapes three times: the first run is eager, the second captures a CUDA
// graph, the third replays it. One graph is captured with all rows in use and replayed with a
// padding row.
TEST_P(DeviceStatisticsTest, ReplayedStepsCountAndFetchNoPlan) {
  const auto runner = ModelRunner::Load(GetParam().model, {.device = CountingDevice()});
  ASSERT_TRUE(runner.ok()) << runner.status();
  Backend& backend = (*runner)->backend();
  const CountSettings settings = RecorderCounts((*runner)->spec(), {});
  auto counters = backend.NewRouteCounters(settings);
  ASSERT_TRUE(counters.ok()) << counters.status();
  ASSERT_NE(*counters, nullptr);
  uint64_t tokens = 0, steps = 0, reported = 0, routes = 0, token_parameters = 0;
  StepSetup setup;
  setup.options.counters = counters->get();
  size_t counted = 0;
  setup.report = [&](const StepReport& report) {
    EXPECT_TRUE(report.blocks.empty());
    reported += report.failed.size();
    counted = report.routes.size();
    for (const TokenRoutes& t : report.routes) {
      routes += t.routes;
      token_parameters += t.parameters;
    }
  };
  for (int position = 0; position < 4; ++position) {
    for (int sequences : {1, 4, 4, 3, 2}) {
      std::vector<ModelRunner::Part> parts;
      for (int s = 0; s < sequences; ++s) {
        parts.push_back({sequences + s, position, {golden_.tokens[static_cast<size_t>(position)]}});
      }
      (*runner)->RunTogether(parts, setup);
      EXPECT_EQ(counted, static_cast<size_t>(sequences));
      tokens += static_cast<uint64_t>(sequences);
      ++steps;
    }
  }
  EXPECT_GT(backend.replayed_steps(), 0u);
  EXPECT_EQ(reported, tokens);
  EXPECT_EQ((*counters)->Read().model.steps, 0u) << "visible before they were refreshed";
  ASSERT_TRUE((*counters)->Refresh().ok());
  const CountsSnapshot counts = (*counters)->Read();
  EXPECT_EQ(counts.model.steps, steps);
  EXPECT_EQ(counts.model.tokens[kTokenPrefill], tokens);
  uint64_t selections = 0, parameters = 0;
  for (size_t i = 0; i < settings.blocks.size(); ++i) {
    for (size_t e = 0; e < counts.blocks[i].experts.size(); ++e) {
      const uint64_t n = counts.blocks[i].experts[e].selections;
      selections += n;
      parameters += n * static_cast<uint64_t>(settings.blocks[i].expert_parameters[e]);
    }
  }
  EXPECT_EQ(routes, selections);
  for (size_t i = 0; i < settings.blocks.size(); ++i) {
    const CountedBlock& b = settings.blocks[i];
    uint64_t seen = 0;
    for (uint64_t n : counts.blocks[i].distinct_histogram) seen += n;
    EXPECT_EQ(seen, tokens) << "block " << i;
    if (EmptyExpertStats((*runner)->spec()).blocks[i].select != SelectKind::kTopK) continue;
    uint64_t chosen = 0;
    for (const ExpertCount& e : counts.blocks[i].experts) chosen += e.selections;
    EXPECT_EQ(chosen % (tokens * static_cast<uint64_t>(b.sub_tokens)), 0u) << "block " << i;
  }
  EXPECT_EQ(token_parameters, parameters);
  // The same steps without counters must not change the counters.
  setup.options.counters = nullptr;
  (*runner)->RunTogether({{0, 0, {golden_.tokens[0]}}}, setup);
  EXPECT_EQ(counted, 0u);
  EXPECT_EQ(reported, tokens + 1);
  ASSERT_TRUE((*counters)->Refresh().ok());
  EXPECT_EQ((*counters)->Read().model.steps, steps);
}

// Copies of what a step reported about one routed block.
struct SeenBlock {
  int slot = 0;
  std::vector<int32_t> experts;
  std::vector<float> scores, inputs;
};

std::vector<SeenBlock> RunAndRead(ModelRunner& runner, const std::vector<ModelRunner::Part>& parts,
                                  ReportContents contents) {
  std::vector<SeenBlock> seen;
  StepSetup setup;
  setup.options.report = contents;
  setup.report = [&](const StepReport& report) {
    for (const BlockReport& block : report.blocks) {
      const RoutingPlan& plan = block.plan;
      SeenBlock& s = seen.emplace_back();
      s.slot = runner.spec().Find(block.layer, block.block);
      for (int r = 0; r < plan.rows; ++r) {
        for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
          s.experts.push_back(plan.expert_of_assignment[plan.assignments_of_row[i]]);
        }
      }
      if (contents.scores) {
        EXPECT_EQ(block.scores.size(), static_cast<size_t>(plan.rows) * plan.num_experts);
      }
      s.scores.assign(block.scores.begin(), block.scores.end());
      s.inputs.assign(block.inputs.begin(), block.inputs.end());
    }
  };
  runner.RunTogether(parts, setup);
  return seen;
}

constexpr ReportContents kEverything{.plans = true, .scores = true, .inputs = true};

void ExpectNear(const std::vector<float>& device, const std::vector<float>& host) {
  ASSERT_EQ(device.size(), host.size());
  for (size_t i = 0; i < host.size(); ++i) {
    ASSERT_NEAR(device[i], host[i], 1e-4 * (1.0 + std::abs(host[i]))) << i;
  }
}

void ExpectSameReports(const std::vector<SeenBlock>& device, const std::vector<SeenBlock>& host) {
  ASSERT_EQ(device.size(), host.size());
  ASSERT_FALSE(host.empty());
  for (size_t b = 0; b < host.size(); ++b) {
    SCOPED_TRACE("block " + std::to_string(b));
    EXPECT_EQ(device[b].slot, host[b].slot);
    EXPECT_EQ(device[b].experts, host[b].experts);
    ASSERT_FALSE(host[b].scores.empty());
    ASSERT_FALSE(host[b].inputs.empty());
    ExpectNear(device[b].scores, host[b].scores);
    ExpectNear(device[b].inputs, host[b].inputs);
  }
}

// A step that reports its blocks is captured in a graph and replayed like any other step. Its graph
// is separate from that of steps of the same size without reported blocks. The step must report
// what the same step reports on the host, without padding rows.
TEST_P(DeviceStatisticsTest, StepsWithReportsAreReplayed) {
  const auto device = ModelRunner::Load(GetParam().model, {.device = CountingDevice()});
  const auto host = ModelRunner::Load(GetParam().model, {.device = "cpu"});
  ASSERT_TRUE(device.ok()) << device.status();
  ASSERT_TRUE(host.ok()) << host.status();
  int runs = 0;
  for (int position = 0; position < 4; ++position) {
    for (const int sequences : {4, 3}) {
      for (const bool contents : {true, false}) {
        SCOPED_TRACE(::testing::Message() << position << ", " << sequences << ", " << contents);
        std::vector<ModelRunner::Part> parts;
        for (int s = 0; s < sequences; ++s) {
          const size_t token = static_cast<size_t>(position + s) % golden_.tokens.size();
          parts.push_back({s, position, {golden_.tokens[token]}});
        }
        const uint64_t replayed = (*device)->backend().replayed_steps();
        const auto seen = RunAndRead(**device, parts, contents ? kEverything : ReportContents{});
        // The first run is eager, the second captures a graph and replays it. Steps with and
        // without reported blocks have separate graphs.
        EXPECT_EQ((*device)->backend().replayed_steps() - replayed, runs < 1 ? 0u : 1u);
        if (!contents) {
          EXPECT_TRUE(seen.empty());
          continue;
        }
        ExpectSameReports(seen, RunAndRead(**host, parts, kEverything));
        if (HasFatalFailure()) return;
      }
      ++runs;
    }
  }
}

// Steps with prompt tokens are not replayed. Their reports, also for given routes, must equal the
// host's.
TEST_P(DeviceStatisticsTest, PromptsReportWhatTheHostReports) {
  const auto device = ModelRunner::Load(GetParam().model, {.device = CountingDevice()});
  const auto host = ModelRunner::Load(GetParam().model, {.device = "cpu"});
  ASSERT_TRUE(device.ok()) << device.status();
  ASSERT_TRUE(host.ok()) << host.status();
  const std::vector<ModelRunner::Part> parts = {{0, 0, golden_.Prompt(0)},
                                                {1, 0, golden_.Prompt(1 % golden_.prompts)}};
  ExpectSameReports(RunAndRead(**device, parts, kEverything),
                    RunAndRead(**host, parts, kEverything));
  EXPECT_EQ((*device)->backend().replayed_steps(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Models, DeviceStatisticsTest, ::testing::ValuesIn(SmallRoutedModels()),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace moeserve::testing
