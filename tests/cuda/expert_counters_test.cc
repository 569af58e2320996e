// The counts that a device computes from its routing plans must equal the CPU's counts from the
// same plans.

#include "kernels/cuda/statistics/expert_counters.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "engine/routes/route_layout.h"
#include "engine/statistics/expert_recorder.h"
#include "engine/statistics/token_rows.h"
#include "kernels/cpu/route_counters.h"
#include "tests/cuda/route_support.h"

namespace moeserve::cuda {
namespace {

// kWhole and kSplit: a model with three routed blocks, without and with sub-tokens. kManyBlocks:
// more blocks than one launch counts.
enum class Shape : uint8_t { kWhole, kSplit, kManyBlocks };

// Layer 0 has routed attention and a feed-forward with four sub-tokens; layer 1 has two sub-tokens
// and many experts.
ModelSpec Spec(Shape shape) {
  const bool split = shape == Shape::kSplit;
  ModelSpec spec;
  spec.vocab_size = 8;
  spec.hidden_size = 8;
  spec.AddLayers(shape == Shape::kManyBlocks ? 60 : 2);
  const auto routed = [](RoutedLayerSpec& r, int experts, int k, int heads) {
    r.num_experts = experts;
    r.widths.assign(static_cast<size_t>(experts), 4);
    r.select.k = k;
    r.split.heads = heads;
  };
  routed(spec.attention(0).routing.emplace(), 5, 2, 1);
  routed(spec.feed_forward(0).routing.emplace(), 12, 3, split ? 4 : 1);
  routed(spec.feed_forward(1).routing.emplace(), 70, 9, split ? 2 : 1);
  for (int l = 2; l < spec.num_layers(); ++l) {
    routed(spec.feed_forward(l).routing.emplace(), 2 + l % 9, 2, 1);
  }
  return spec;
}

// Returns random routes for `rows` rows, with expert ids in ascending order.
GivenRoutes RandomRoutes(int rows, int experts, int most, Random& random) {
  GivenRoutes g;
  g.offsets.push_back(0);
  for (int r = 0; r < rows; ++r) {
    std::vector<int32_t> chosen;
    const int n = random.Below(most + 1);
    // Experts with low ids are selected much more often, so that some experts have many rows and
    // some none.
    while (static_cast<int>(chosen.size()) < n) {
      const int e = random.Below(1 + random.Below(experts));
      if (std::find(chosen.begin(), chosen.end(), e) == chosen.end()) chosen.push_back(e);
    }
    std::sort(chosen.begin(), chosen.end());
    for (int32_t e : chosen) {
      g.experts.push_back(e);
      g.weights.push_back(static_cast<float>(random.Uniform()));
    }
    g.offsets.push_back(static_cast<int32_t>(g.experts.size()));
  }
  return g;
}

void ExpectSameCounts(const CountsSnapshot& device, const CountsSnapshot& host) {
  EXPECT_EQ(device.model.steps, host.model.steps);
  for (int kind = 0; kind < kCountedKinds; ++kind) {
    EXPECT_EQ(device.model.tokens[kind], host.model.tokens[kind]);
  }
  for (int p = 0; p < 2; ++p) {
    EXPECT_EQ(device.model.expert_rows[p].buckets, host.model.expert_rows[p].buckets);
    EXPECT_EQ(device.model.expert_rows[p].sum, host.model.expert_rows[p].sum);
    EXPECT_EQ(device.model.active_experts[p].buckets, host.model.active_experts[p].buckets);
    EXPECT_EQ(device.model.active_experts[p].sum, host.model.active_experts[p].sum);
  }
  EXPECT_EQ(device.diversity_histogram, host.diversity_histogram);
  ASSERT_EQ(device.blocks.size(), host.blocks.size());
  for (size_t i = 0; i < host.blocks.size(); ++i) {
    SCOPED_TRACE("block " + std::to_string(i));
    EXPECT_EQ(device.blocks[i].nonfinite_rows, host.blocks[i].nonfinite_rows);
    EXPECT_EQ(device.blocks[i].distinct_histogram, host.blocks[i].distinct_histogram);
    ASSERT_EQ(device.blocks[i].experts.size(), host.blocks[i].experts.size());
    for (size_t e = 0; e < host.blocks[i].experts.size(); ++e) {
      SCOPED_TRACE("expert " + std::to_string(e));
      const ExpertCount& d = device.blocks[i].experts[e];
      const ExpertCount& h = host.blocks[i].experts[e];
      EXPECT_EQ(d.selections, h.selections);
      EXPECT_EQ(d.decode_selections, h.decode_selections);
      EXPECT_EQ(d.recomputed_selections, h.recomputed_selections);
      EXPECT_EQ(d.rejected_selections, h.rejected_selections);
      EXPECT_EQ(d.touching_tokens, h.touching_tokens);
      EXPECT_EQ(d.visits, h.visits);
      EXPECT_NEAR(d.weight_sum, h.weight_sum, 1e-12 * (1.0 + h.weight_sum));
    }
  }
}

// The second value says whether the token x expert table has rows for the most frequent tokens
// only.
class ExpertCountersTest : public ::testing::TestWithParam<std::tuple<Shape, bool>> {};

TEST_P(ExpertCountersTest, EqualTheCpusOverManySteps) {
  const ModelSpec spec = Spec(std::get<Shape>(GetParam()));
  const ExpertStats empty = EmptyExpertStats(spec);
  CountSettings settings = RecorderCounts(spec, {});
  std::optional<TokenRows> rows_of_tokens;
  if (std::get<bool>(GetParam())) {
    settings.own_rows = 3;
    rows_of_tokens.emplace(settings.vocabulary, settings.own_rows);
  }
  size_t changed = 0;
  const std::vector<CountedBlock>& blocks = settings.blocks;
  for (CountedBlock& b : settings.blocks) {
    for (size_t e = 0; e < b.expert_parameters.size(); ++e) {
      b.expert_parameters[e] = (int64_t{1} << 33) + static_cast<int64_t>(7 * e);
    }
  }
  ExpertCounters counters = ExpertCounters::Create(settings, 50).value();
  cpu::CpuRouteCounters host(settings);
  const auto cpu = MakeCpu();
  Random random(9);
  // As in a model, all blocks share the scratch memory, and plans stay in memory until the step is
  // counted.
  std::vector<PlanMemory> memory(blocks.size());
  RouteScratch scratch;
  int step = 0;
  for (int tokens : {1, 7, 50, 300, 3, 40, 600}) {
    const bool decode = step++ % 3 == 1;
    const int padding = random.Below(5);
    const int all = tokens + padding;
    ASSERT_TRUE(counters.Reserve(all).ok());
    std::vector<uint8_t> kind;
    std::vector<int32_t> token_ids;
    for (int t = 0; t < tokens; ++t) {
      // Another token is frequent in every step.
      token_ids.push_back(random.Below(2) == 0 ? step % spec.vocab_size
                                               : random.Below(spec.vocab_size));
      kind.push_back(!decode               ? static_cast<uint8_t>(random.Below(kCountedKinds))
                     : random.Below(3) > 0 ? kTokenDecode
                                           : kTokenRejected);
    }
    kind.resize(static_cast<size_t>(all), kTokenPadding);
    const DeviceArray<uint8_t> device_kind(kind);
    token_ids.resize(static_cast<size_t>(all), 0);
    const DeviceArray<int32_t> device_token_ids(token_ids);
    std::vector<TokenRoutes> routes(static_cast<size_t>(all));
    const DeviceArray<TokenRoutes> device_routes(routes);
    std::vector<RoutingPlan> device_plans, host_plans;
    std::vector<std::vector<uint8_t>> statuses;
    for (size_t i = 0; i < blocks.size(); ++i) {
      const CountedBlock& b = blocks[i];
      const int rows = tokens * b.sub_tokens, device_rows = all * b.sub_tokens;
      const int most = empty.blocks[i].max_selected;
      GivenRoutes given = RandomRoutes(rows, b.num_experts, most, random);
      RouteCase c = MakeCase(b.num_experts, 8, Gate::kSoftmax, i);
      const auto router = std::move(cpu->NewRouter(c.settings, c.tensors)).value();
      std::vector<float> input(static_cast<size_t>(rows) * 8);
      RoutingPlan plan = cpu->Route({.router = router.get(),
                                     .input = {input.data(), DType::kF32, rows, 8, 8},
                                     .given = &given,
                                     .slot = static_cast<int>(i)});
      std::vector<uint8_t>& status = statuses.emplace_back(static_cast<size_t>(device_rows));
      for (int r = 0; r < rows; ++r) {
        const int s = random.Below(12);
        status[static_cast<size_t>(r)] = static_cast<uint8_t>(s < 3 ? s : 0);
      }
      plan.row_nonfinite = status.data();
      host_plans.push_back(plan);
      for (int a = 0; a < plan.num_assignments; ++a) {
        TokenRoutes& token = routes[static_cast<size_t>(plan.row_of_assignment[a] / b.sub_tokens)];
        ++token.routes;
        token.parameters += static_cast<uint64_t>(
            b.expert_parameters[static_cast<size_t>(plan.expert_of_assignment[a])]);
      }

      given.offsets.resize(static_cast<size_t>(device_rows) + 1, given.offsets.back());
      const DeviceArray<int32_t> offsets(given.offsets), experts(given.experts);
      const DeviceArray<float> weights(given.weights);
      ASSERT_TRUE(memory[i].Reserve(device_rows, most, b.num_experts).ok());
      ASSERT_TRUE(scratch.Reserve(device_rows, most, b.num_experts, 1).ok());
      device_plans.push_back(LaunchGivenPlan({.rows = device_rows,
                                              .num_experts = b.num_experts,
                                              .k_max = most,
                                              .offsets = offsets.data(),
                                              .experts = experts.data(),
                                              .weights = weights.data(),
                                              .plan = &memory[i],
                                              .scratch = &scratch},
                                             nullptr));
      ASSERT_EQ(cudaMemcpy(memory[i].arrays().row_nonfinite, status.data(), status.size(),
                           cudaMemcpyHostToDevice),
                cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    }
    if (rows_of_tokens) {
      const auto changes =
          rows_of_tokens->Assign(std::span(token_ids).first(static_cast<size_t>(tokens)));
      if (!changes.empty()) {
        host.AssignTokenRows(changes);
        counters.LaunchAssignRows(changes, nullptr);
        changed += changes.size();
      }
    }
    std::vector<const RoutingPlan*> seen;
    for (const RoutingPlan& plan : host_plans) seen.push_back(&plan);
    std::vector<TokenRoutes> host_routes(static_cast<size_t>(tokens));
    host.Count(std::span(kind).first(static_cast<size_t>(tokens)),
               std::span(token_ids).first(static_cast<size_t>(tokens)), seen, host_routes);
    for (int t = 0; t < tokens; ++t) {
      ASSERT_EQ(host_routes[static_cast<size_t>(t)].routes, routes[static_cast<size_t>(t)].routes);
      ASSERT_EQ(host_routes[static_cast<size_t>(t)].parameters,
                routes[static_cast<size_t>(t)].parameters);
    }
    counters.LaunchCount({.tokens = all,
                          .kind = device_kind.data(),
                          .token_ids = device_token_ids.data(),
                          .routes = device_routes.data()},
                         device_plans, nullptr);
    const CountsSnapshot counts = std::move(counters.Read(nullptr)).value();
    ExpectSameCounts(counts, host.Read());
    const std::vector<TokenRoutes> device =
        FromDevice(device_routes.data(), static_cast<size_t>(all));
    for (int t = 0; t < all; ++t) {
      ASSERT_EQ(device[static_cast<size_t>(t)].routes, routes[static_cast<size_t>(t)].routes) << t;
      ASSERT_EQ(device[static_cast<size_t>(t)].parameters,
                routes[static_cast<size_t>(t)].parameters)
          << t;
    }
    std::vector<uint32_t> pairs(static_cast<size_t>(counters.token_experts_size()));
    ASSERT_EQ(static_cast<int64_t>(pairs.size()),
              settings.table_rows() * RouteLayout(spec).num_experts);
    ASSERT_TRUE(host.ReadTokenExperts(0, pairs).ok());
    EXPECT_EQ(FromDevice(counters.token_experts(), pairs.size()), pairs);
    if (HasFailure()) return;
  }
  EXPECT_EQ(changed > static_cast<size_t>(settings.own_rows), rows_of_tokens.has_value())
      << "rows change hands";
}

// A step of `tokens` decoded tokens, each routed to both experts of a block, for any number of
// blocks.
class TwoExperts {
 public:
  explicit TwoExperts(int tokens)
      : tokens_(tokens),
        kind_(std::vector<uint8_t>(static_cast<size_t>(tokens), kTokenDecode)),
        ids_(std::vector<int32_t>(static_cast<size_t>(tokens), 0)),
        routes_(std::vector<TokenRoutes>(static_cast<size_t>(tokens), TokenRoutes{})),
        weights_(std::vector<float>(2 * static_cast<size_t>(tokens), 0.5f)) {
    std::vector<int32_t> offsets, experts;
    for (int t = 0; t <= tokens; ++t) offsets.push_back(2 * t);
    for (int t = 0; t < tokens; ++t) experts.insert(experts.end(), {0, 1});
    offsets_.Write(offsets);
    experts_.Write(experts);
  }
  RoutingPlan Plan() {
    memory_.push_back(PlanMemory::Create(tokens_, 2, 2).value());
    return LaunchGivenPlan({.rows = tokens_,
                            .num_experts = 2,
                            .k_max = 2,
                            .offsets = offsets_.data(),
                            .experts = experts_.data(),
                            .weights = weights_.data(),
                            .plan = &memory_.back(),
                            .scratch = &scratch_},
                           nullptr);
  }
  ExpertCounters::Step Step() const {
    return {.tokens = tokens_,
            .kind = kind_.data(),
            .token_ids = ids_.data(),
            .routes = routes_.data()};
  }
  std::vector<TokenRoutes> routes() const { return routes_.Read(); }

 private:
  const int tokens_;
  DeviceArray<uint8_t> kind_;
  DeviceArray<int32_t> ids_;
  DeviceArray<TokenRoutes> routes_;
  DeviceArray<float> weights_;
  DeviceArray<int32_t> offsets_{static_cast<size_t>(tokens_) + 1};
  DeviceArray<int32_t> experts_{2 * static_cast<size_t>(tokens_)};
  RouteScratch scratch_ = RouteScratch::Create(tokens_, 2, 2, 1).value();
  std::vector<PlanMemory> memory_;
};

CountSettings BlocksOfTwo(size_t count) {
  CountSettings settings;
  settings.blocks.resize(
      count,
      {.num_experts = 2, .most_distinct = 2, .in_diversity = true, .expert_parameters = {3, 10}});
  return settings;
}

// A counter in the table must stay at its maximum, however many threads increment it at once.
TEST(ExpertCountersTable, StopsAtItsMaximum) {
  const int tokens = 40;
  CountSettings settings = BlocksOfTwo(1);
  settings.vocabulary = 1;
  ExpertCounters counters = ExpertCounters::Create(settings, tokens).value();
  const std::vector<uint32_t> start = {UINT32_MAX - 3, UINT32_MAX - tokens};
  ASSERT_EQ(cudaMemcpy(const_cast<uint32_t*>(counters.token_experts()), start.data(), 8,
                       cudaMemcpyHostToDevice),
            cudaSuccess);
  TwoExperts step(tokens);
  const RoutingPlan plan = step.Plan();
  counters.LaunchCount(step.Step(), {&plan, 1}, nullptr);
  ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  EXPECT_EQ(FromDevice(counters.token_experts(), 2),
            (std::vector<uint32_t>{UINT32_MAX, UINT32_MAX}));
}

size_t LaunchesOfStep(ExpertCounters& counters, const ExpertCounters::Step& step,
                      const std::vector<RoutingPlan>& plans) {
  const Stream stream = Stream::Create().value();
  EXPECT_EQ(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  counters.LaunchCount(step, plans, stream.get());
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream.get(), &graph), cudaSuccess);
  size_t nodes = 0;
  EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &nodes), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  return nodes;
}

TEST(ExpertCountersLaunch, IsOneForAllBlocks) {
  TwoExperts step(3);
  const std::vector<RoutingPlan> plans(100, step.Plan());
  for (const auto& [blocks, launches] :
       {std::pair<size_t, size_t>{0, 1}, {1, 1}, {48, 1}, {49, 2}, {96, 2}, {97, 3}}) {
    ExpertCounters counters = ExpertCounters::Create(BlocksOfTwo(blocks), 3).value();
    EXPECT_EQ(LaunchesOfStep(counters, step.Step(), {plans.begin(), plans.begin() + blocks}),
              launches)
        << blocks << " blocks";
  }
}

// In a model without routed blocks, steps and tokens are still counted.
TEST(ExpertCountersLaunch, WithoutBlocksTokensAreCounted) {
  ExpertCounters counters = ExpertCounters::Create(BlocksOfTwo(0), 3).value();
  TwoExperts step(3);
  for (int i = 0; i < 2; ++i) counters.LaunchCount(step.Step(), {}, nullptr);
  const CountsSnapshot counts = counters.Read(nullptr).value();
  EXPECT_EQ(counts.model.steps, 2u);
  EXPECT_EQ(counts.model.tokens[kTokenDecode], 6u);
  EXPECT_EQ(counts.diversity_histogram, (std::vector<uint64_t>{6}));
  EXPECT_EQ(step.routes()[0].routes, 0u);
}

// Together, 49 blocks need two launches. If the missing block is the last one, the second launch
// counts no block.
TEST(ExpertCountersLaunch, BlocksThatWereNotRoutedAreLeftOut) {
  const int tokens = 5;
  TwoExperts step(tokens);
  const RoutingPlan plan = step.Plan();
  for (const size_t missing : {0, 48}) {
    SCOPED_TRACE(missing);
    std::vector<RoutingPlan> plans(49, plan);
    plans[missing] = {};
    ExpertCounters counters = ExpertCounters::Create(BlocksOfTwo(plans.size()), tokens).value();
    for (int i = 0; i < 2; ++i) counters.LaunchCount(step.Step(), plans, nullptr);
    const CountsSnapshot counts = counters.Read(nullptr).value();
    EXPECT_EQ(counts.model.steps, 2u);
    EXPECT_EQ(counts.model.tokens[kTokenDecode], 2u * tokens);
    EXPECT_EQ(counts.diversity_histogram[2 * 48], 2u * tokens);
    for (size_t i = 0; i < plans.size(); ++i) {
      const uint64_t expected = i == missing ? 0 : 2 * tokens;
      EXPECT_EQ(counts.blocks[i].experts[1].selections, expected) << i;
      EXPECT_EQ(counts.blocks[i].distinct_histogram, (std::vector<uint64_t>{0, 0, expected})) << i;
    }
  }
}

std::string NameOf(const ::testing::TestParamInfo<std::tuple<Shape, bool>>& info) {
  constexpr const char* kNames[] = {"WholeTokens", "SubTokens", "ManyBlocks"};
  return std::string(kNames[static_cast<int>(std::get<Shape>(info.param))]) +
         (std::get<bool>(info.param) ? "FrequentTokens" : "");
}

INSTANTIATE_TEST_SUITE_P(Models, ExpertCountersTest,
                         ::testing::Combine(::testing::Values(Shape::kWhole, Shape::kSplit,
                                                              Shape::kManyBlocks),
                                            ::testing::Bool()),
                         NameOf);

}  // namespace
}  // namespace moeserve::cuda
