// The papers' statistics: values computed by hand, and properties.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <set>
#include <vector>

#include "engine/statistics/expert_profile.h"
#include "engine/statistics/expert_recorder.h"
#include "engine/statistics/measures/activated.h"
#include "engine/statistics/measures/agreement.h"
#include "engine/statistics/measures/collapse.h"
#include "engine/statistics/measures/load_balance.h"
#include "engine/statistics/measures/macs.h"
#include "engine/statistics/measures/router_losses.h"
#include "engine/statistics/measures/symmetric_eigen.h"
#include "engine/statistics/measures/token_affinity.h"
#include "kernels/cpu/route_counters.h"
#include "tests/support/random.h"

namespace moeserve {
namespace {

using ::moeserve::testing::Random;

// Returns statistics of a block with four experts, two sub-tokens per token and up to two experts
// per row.
BlockExpertStats SmallBlock() {
  BlockExpertStats b;
  b.num_experts = 4;
  b.split_heads = 2;
  b.max_selected = 2;
  b.tokens[0] = 3;
  b.tokens[1] = 2;
  b.rows[0] = 6;
  b.rows[1] = 4;
  b.selections = {10, 6, 4, 0};
  b.touching_tokens = {5, 4, 3, 0};
  b.expert_parameters = {10, 20, 30, 40};
  b.expert_widths = {1, 2, 3, 4};
  b.router.rows = 10;
  b.router.entropy_sum = 12.0;
  b.router.squared_logsumexp_sum = 40.0;
  b.router.probability_sums = {5.0, 3.0, 1.5, 0.5};
  b.router.selections = {10, 6, 4, 0};
  return b;
}

TEST(Load, OfASmallBlock) {
  const BlockExpertStats b = SmallBlock();
  EXPECT_EQ(SelectionRatios(b), (std::vector<double>{2.0, 1.2, 0.8, 0.0}));
  EXPECT_EQ(SelectionRatiosOfChoices(b), (std::vector<double>{0.5, 0.3, 0.2, 0.0}));
  EXPECT_EQ(LoadShares(b), (std::vector<double>{0.5, 0.3, 0.2, 0.0}));
  EXPECT_EQ(ActivatedExperts(b, 0.0), 3);
  EXPECT_EQ(ActivatedExperts(b, 0.8), 2) << "the ratio must exceed the threshold";
  EXPECT_EQ(ActivatedExperts(b, 2.0), 0);
}

TEST(Load, OrderIsByLoadThenNumber) {
  BlockExpertStats b = SmallBlock();
  b.selections = {1, 5, 1, 5};
  EXPECT_EQ(ExpertsByLoad(b), (std::vector<int>{1, 3, 0, 2}));
}

TEST(Load, NothingRanIsZeroNotNan) {
  BlockExpertStats b;
  b.selections = {0, 0};
  for (const auto& shares : {SelectionRatios(b), SelectionRatiosOfChoices(b), LoadShares(b)}) {
    EXPECT_EQ(shares, (std::vector<double>{0.0, 0.0}));
  }
}

TEST(Router, OfASmallBlock) {
  const RouterSummary r = SummarizeRouter(SmallBlock());
  EXPECT_EQ(r.rows, 10u);
  EXPECT_DOUBLE_EQ(r.entropy_mean, 1.2);
  EXPECT_DOUBLE_EQ(r.entropy_loss, -4.8);
  EXPECT_DOUBLE_EQ(r.z_loss, 4.0);
  // T = (1, 0.6, 0.4, 0), P = (0.5, 0.3, 0.15, 0.05)
  EXPECT_DOUBLE_EQ(r.balance_loss, 4 * (0.5 + 0.18 + 0.06));
  EXPECT_DOUBLE_EQ(r.parameter_penalty, 4 * (0.5 + 0.36 + 0.18));
  EXPECT_DOUBLE_EQ(r.normalized_balance_loss, 4 * (0.25 + 0.09 + 0.03));
}

TEST(Router, EvenRoutingHasNormalizedLossOne) {
  BlockExpertStats b = SmallBlock();
  b.router.probability_sums = {2.5, 2.5, 2.5, 2.5};
  b.router.selections = {5, 5, 5, 5};
  EXPECT_DOUBLE_EQ(SummarizeRouter(b).normalized_balance_loss, 1.0);
  EXPECT_DOUBLE_EQ(SummarizeRouter(b).balance_loss, 2.0) << "k experts of a row";
}

TEST(Router, PenaltyOfEqualExpertsIsTheBalanceLossTimesTheirWidth) {
  BlockExpertStats b = SmallBlock();
  b.expert_widths = {7, 7, 7, 7};
  const RouterSummary r = SummarizeRouter(b);
  EXPECT_DOUBLE_EQ(r.parameter_penalty, 7 * r.balance_loss);
}

TEST(Router, WithoutRowsAllIsZero) {
  BlockExpertStats b = SmallBlock();
  b.router = RouterStats();
  b.router.probability_sums = {0, 0, 0, 0};
  b.router.selections = {0, 0, 0, 0};
  const RouterSummary r = SummarizeRouter(b);
  EXPECT_EQ(r.entropy_mean, 0.0);
  EXPECT_EQ(r.balance_loss, 0.0);
  EXPECT_EQ(r.normalized_balance_loss, 0.0);
  EXPECT_EQ(r.probability_mean, (std::vector<double>{0, 0, 0, 0}));
}

TEST(Activated, ComputeCountsRowsAndUniqueTokens) {
  const ActivatedParameters a = ActivatedOf(SmallBlock());
  EXPECT_DOUBLE_EQ(a.compute, (10 * 10 + 6 * 20 + 4 * 30) / 5.0);
  EXPECT_DOUBLE_EQ(a.unique, (5 * 10 + 4 * 20 + 3 * 30) / 5.0);
  EXPECT_EQ(a.total, 100);
  EXPECT_DOUBLE_EQ(a.compute_ratio(), 0.68);
  EXPECT_DOUBLE_EQ(a.unique_ratio(), 0.44);
}

TEST(Activated, ModelAddsWhatEveryTokenUses) {
  ExpertStats stats;
  stats.always_active_parameters = 1000;
  stats.blocks = {SmallBlock(), SmallBlock()};
  stats.tokens = 5;
  const ActivatedParameters a = ActivatedOf(stats);
  EXPECT_DOUBLE_EQ(a.compute, 1136.0);
  EXPECT_DOUBLE_EQ(a.compute, MeanActivatedParameters(stats));
  EXPECT_DOUBLE_EQ(a.unique, 1088.0);
  EXPECT_EQ(a.total, 1200);
  EXPECT_DOUBLE_EQ(MeanActivatedRatio(stats), 0.68);
  stats.blocks.clear();
  EXPECT_EQ(MeanActivatedRatio(stats), 0.0);
}

TEST(Activated, DiversityIsAMeanOverBlocksAndTokens) {
  ExpertStats stats;
  stats.diversity_blocks = 2;
  // one token selected 2 distinct experts in two blocks, three tokens 4
  stats.diversity_histogram = {0, 0, 1, 0, 3};
  EXPECT_DOUBLE_EQ(MeanDiversity(stats), (1 * 2 + 3 * 4) / 4.0 / 2.0);
  stats.diversity_histogram = {0, 0, 0};
  EXPECT_EQ(MeanDiversity(stats), 0.0);
}

// One column per expert, one row per token.
const std::vector<uint32_t> kCounts = {4, 0, 0,  //
                                       2, 2, 0,  //
                                       0, 0, 0,  //
                                       0, 8, 0};
TokenCounts Counts(const std::vector<uint32_t>& counts = kCounts) { return {4, 3, counts}; }

TEST(TokenAffinity, PmiIsTheQuotientOfProbabilities) {
  const auto top = TopTokens(Counts(), 1, 10);
  ASSERT_EQ(top.size(), 3u);
  ASSERT_EQ(top[0].size(), 2u);
  // p(0, 0) = 4/16, p(token 0) = 4/16, p(expert 0) = 6/16
  EXPECT_EQ(top[0][0].token, 0);
  EXPECT_DOUBLE_EQ(top[0][0].pmi, 16.0 / 6.0);
  EXPECT_DOUBLE_EQ(top[0][0].share, 1.0);
  EXPECT_EQ(top[0][1].token, 1);
  EXPECT_DOUBLE_EQ(top[0][1].pmi, 2.0 * 16.0 / (4.0 * 6.0));
  EXPECT_DOUBLE_EQ(top[0][1].share, 0.5);
  EXPECT_EQ(top[0][1].count, 2u);
  EXPECT_TRUE(top[2].empty());
}

TEST(TokenAffinity, RareTokensAreLeftOut) {
  const auto top = TopTokens(Counts(), 3, 10);
  ASSERT_EQ(top[0].size(), 1u);
  EXPECT_EQ(top[0][0].token, 0);
  EXPECT_EQ(TopTokens(Counts(), 9, 10)[1].size(), 0u);
  EXPECT_EQ(TopTokens(Counts(), 0, 10)[2].size(), 0u) << "a token that never came is never listed";
}

TEST(TokenAffinity, EvidenceIsTheLogLikelihoodRatio) {
  const auto top = TopTokens(Counts(), 1, 10, TokenRank::kG2);
  ASSERT_EQ(top[0].size(), 2u);
  EXPECT_EQ(top[0][0].token, 0);
  // Token 0 and expert 0: 4 of both, 0 of the token alone, 2 of the expert alone, 10 of neither.
  const double together = 4 * std::log(4 * 16.0 / (4 * 6)) + 2 * std::log(2 * 16.0 / (12 * 6)) +
                          10 * std::log(10 * 16.0 / (12 * 10));
  EXPECT_NEAR(top[0][0].g2, 2 * together, 1e-12);
  // Token 1 and expert 1: 2 of both, where 2.5 are expected.
  const auto& last = top[1].back();
  EXPECT_EQ(last.token, 1);
  const double apart = 2 * std::log(2 * 16.0 / (4 * 10)) + 2 * std::log(2 * 16.0 / (4 * 6)) +
                       8 * std::log(8 * 16.0 / (12 * 10)) + 4 * std::log(4 * 16.0 / (12 * 6));
  EXPECT_NEAR(last.g2, -2 * apart, 1e-12);
}

// A token that came five times, always to one expert, has the largest possible PMI, although a
// frequent token that prefers the expert says more about it.
TEST(TokenAffinity, EvidenceDoesNotFavourRareTokens) {
  const std::vector<uint32_t> counts = {5,   0,    //
                                        800, 200,  //
                                        195, 800};
  const TokenCounts table{3, 2, counts};
  EXPECT_EQ(TopTokens(table, 5, 1)[0][0].token, 0);
  EXPECT_EQ(TopTokens(table, 5, 1, TokenRank::kG2)[0][0].token, 1);
  EXPECT_EQ(TopTokens(table, 5, 1, TokenRank::kCount)[1][0].token, 2);
}

TEST(TokenAffinity, IndependentTokensAndOneExpertGiveNoEvidence) {
  const std::vector<uint32_t> even = {3, 6, 5, 10};
  for (const auto& expert : TopTokens({2, 2, even}, 1, 5, TokenRank::kG2)) {
    for (const TokenAffinity& token : expert) EXPECT_NEAR(token.g2, 0.0, 1e-12);
  }
  const std::vector<uint32_t> one = {3, 6};
  const auto alone = TopTokens({2, 1, one}, 1, 5, TokenRank::kG2);
  for (const TokenAffinity& token : alone[0]) EXPECT_EQ(token.g2, 0.0);
}

TEST(TokenAffinity, TopIsTheBeginningOfAll) {
  Random random(3);
  std::vector<uint32_t> counts(200 * 5);
  for (uint32_t& c : counts) c = static_cast<uint32_t>(random.Below(4));
  const TokenCounts table{200, 5, counts};
  const auto all = TopTokens(table, 1, 1000);
  for (const int top : {0, 1, 7, 50}) {
    const auto some = TopTokens(table, 1, top);
    for (size_t e = 0; e < 5; ++e) {
      ASSERT_EQ(some[e].size(), static_cast<size_t>(top));
      for (size_t i = 0; i < some[e].size(); ++i) EXPECT_EQ(some[e][i].token, all[e][i].token);
    }
  }
  for (const auto& list : all) {
    for (size_t i = 1; i < list.size(); ++i) {
      EXPECT_GE(list[i - 1].pmi, list[i].pmi);
      if (list[i - 1].pmi == list[i].pmi && list[i - 1].count == list[i].count) {
        EXPECT_LT(list[i - 1].token, list[i].token);
      }
    }
  }
}

TEST(TokenDistance, IsTheAreaBetweenDistributionFunctions) {
  const std::vector<double> w = TokenDistances(Counts());
  // D_0 = (2/3, 1/3, 0, 0), D_1 = (0, 0.2, 0, 0.8)
  EXPECT_NEAR(w[0 * 3 + 1], 2.0 / 3.0 + 0.8 + 0.8, 1e-15);
  EXPECT_EQ(w[0 * 3 + 1], w[1 * 3 + 0]);
  EXPECT_EQ(w[0], 0.0);
  for (const int i : {2, 5, 6, 7, 8}) EXPECT_TRUE(std::isnan(w[static_cast<size_t>(i)])) << i;
}

TEST(TokenDistance, MovingEverythingBySomeIdsIsThatDistance) {
  std::vector<uint32_t> counts(50 * 2);
  for (int v = 0; v < 20; ++v) {
    counts[static_cast<size_t>(v * 2)] = static_cast<uint32_t>(v % 7 + 1);
    counts[static_cast<size_t>((v + 13) * 2 + 1)] = static_cast<uint32_t>(v % 7 + 1);
  }
  EXPECT_NEAR(TokenDistances({50, 2, counts})[1], 13.0, 1e-12);
}

TEST(TokenDistance, IsAMetric) {
  Random random(5);
  std::vector<uint32_t> counts(30 * 6);
  for (uint32_t& c : counts) c = static_cast<uint32_t>(random.Below(9)) + 1;
  const std::vector<double> w = TokenDistances({30, 6, counts});
  for (size_t a = 0; a < 6; ++a) {
    EXPECT_EQ(w[a * 6 + a], 0.0);
    for (size_t b = 0; b < 6; ++b) {
      EXPECT_EQ(w[a * 6 + b], w[b * 6 + a]);
      for (size_t c = 0; c < 6; ++c) EXPECT_LE(w[a * 6 + b], w[a * 6 + c] + w[c * 6 + b] + 1e-12);
    }
  }
}

TEST(TokenDivergence, OfASmallTable) {
  const double eps = 0.5;
  const std::vector<double> kl = TokenDivergences(Counts(), eps);
  const double a[4] = {4.5 / 8, 2.5 / 8, 0.5 / 8, 0.5 / 8};
  const double b[4] = {0.5 / 12, 2.5 / 12, 0.5 / 12, 8.5 / 12};
  double expected = 0.0;
  for (int v = 0; v < 4; ++v) expected += a[v] * std::log(a[v] / b[v]);
  EXPECT_NEAR(kl[0 * 3 + 1], expected, 1e-14);
  EXPECT_NE(kl[0 * 3 + 1], kl[1 * 3 + 0]);
  for (size_t i = 0; i < 9; ++i) EXPECT_GE(kl[i], i % 4 == 0 ? 0.0 : 1e-6);
  EXPECT_EQ(kl[0], 0.0);
}

TEST(SymmetricEigen, RebuildsTheMatrix) {
  Random random(7);
  for (const size_t n : {1u, 2u, 5u, 33u}) {
    std::vector<double> m(n * n);
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j <= i; ++j) m[i * n + j] = m[j * n + i] = random.Normal();
    }
    const SymmetricEigen eigen = EigenOfSymmetric(m, n);
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < n; ++j) {
        double sum = 0.0, dot = 0.0;
        for (size_t k = 0; k < n; ++k) {
          sum += eigen.values[k] * eigen.vectors[k * n + i] * eigen.vectors[k * n + j];
          dot += eigen.vectors[i * n + k] * eigen.vectors[j * n + k];
        }
        EXPECT_NEAR(sum, m[i * n + j], 1e-12);
        EXPECT_NEAR(dot, i == j ? 1.0 : 0.0, 1e-12);
      }
    }
  }
}

TEST(SymmetricEigen, RankOneHasOneValue) {
  constexpr size_t kN = 6;
  std::vector<double> m(kN * kN);
  for (size_t i = 0; i < kN; ++i) {
    for (size_t j = 0; j < kN; ++j) m[i * kN + j] = static_cast<double>((i + 1) * (j + 1));
  }
  std::vector<double> values = EigenOfSymmetric(m, kN).values;
  std::sort(values.begin(), values.end());
  EXPECT_NEAR(values.back(), 91.0, 1e-12);
  for (size_t i = 0; i + 1 < kN; ++i) EXPECT_NEAR(values[i], 0.0, 1e-13);
}

HiddenSample Sample(int64_t width, std::vector<float> rows, std::vector<int32_t> experts) {
  HiddenSample s;
  s.width = width;
  s.rows = std::move(rows);
  s.experts = std::move(experts);
  s.capacity = s.size();
  s.seen = static_cast<uint64_t>(s.size());
  return s;
}

TEST(Collapse, TwoClassesOnALine) {
  // The class means are 1 and 5, the overall mean is 3, so Sigma_B = 4. All rows are 1 away from
  // their class mean, so Sigma_W = 1. The second component varies within the classes only and does
  // not count.
  const auto c = RepresentationCollapse(Sample(2, {0, 7, 2, -7, 4, 7, 6, -7}, {3, 3, 9, 9}));
  ASSERT_TRUE(c.ok()) << c.status();
  EXPECT_DOUBLE_EQ(c->value, 0.25);
  EXPECT_EQ(c->classes, 2);
  EXPECT_EQ(c->rank, 1);
  EXPECT_EQ(c->rows, 4);
}

TEST(Collapse, DoesNotDependOnTurnsMovesAndScale) {
  Random random(11);
  constexpr int64_t kWidth = 6;
  std::vector<float> rows = random.Normals(400 * kWidth);
  std::vector<int32_t> experts;
  for (size_t i = 0; i < 400; ++i) {
    experts.push_back(random.Below(5) * 2);
    for (size_t j = 0; j < kWidth; ++j) {
      rows[i * kWidth + j] += static_cast<float>(experts.back() == static_cast<int32_t>(2 * j));
    }
  }
  const auto plain = RepresentationCollapse(Sample(kWidth, rows, experts));
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(plain->rank, 4) << "one less than the classes";
  for (size_t i = 0; i < 400; ++i) {
    float* x = &rows[i * kWidth];
    const float a = x[0], b = x[3];
    x[0] = 0.6f * a - 0.8f * b;
    x[3] = 0.8f * a + 0.6f * b;
    for (size_t j = 0; j < kWidth; ++j) x[j] = 4.0f * x[j] + static_cast<float>(j);
  }
  const auto turned = RepresentationCollapse(Sample(kWidth, rows, experts));
  ASSERT_TRUE(turned.ok());
  EXPECT_NEAR(turned->value, plain->value, 1e-4 * plain->value);
}

TEST(Collapse, CollapsedClassesAreZero) {
  const auto c = RepresentationCollapse(Sample(1, {1, 1, 2, 2}, {0, 0, 1, 1}));
  ASSERT_TRUE(c.ok());
  EXPECT_EQ(c->value, 0.0);
}

TEST(Collapse, NeedsClassesThatDiffer) {
  EXPECT_EQ(RepresentationCollapse(Sample(1, {1, 2}, {0, 0})).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(RepresentationCollapse(Sample(1, {}, {})).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(RepresentationCollapse(Sample(1, {1, 1}, {0, 1})).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

BlockRoutes Routes(std::vector<std::vector<uint16_t>> rows, std::vector<uint16_t> top1) {
  BlockRoutes out;
  for (const auto& row : rows) {
    out.experts.insert(out.experts.end(), row.begin(), row.end());
    out.offsets.push_back(out.experts.size());
  }
  out.top1 = std::move(top1);
  return out;
}

// A recorder for a model with one routed block, to which a test feeds artificial steps.
class CountedSteps {
 public:
  CountedSteps(const ModelSpec& spec, const RecorderOptions& options) {
    auto counters = std::make_unique<cpu::CpuRouteCounters>(RecorderCounts(spec, options));
    counters_ = counters.get();
    recorder_ = std::make_unique<ExpertRecorder>(spec, options, nullptr, std::move(counters));
  }

  // Runs a step with the report contents that the recorder requested, and returns these.
  ReportContents Run(const Batch& batch, const RoutingPlan& plan, std::span<const float> scores,
                     std::span<const float> inputs) {
    const StepOptions step = recorder_->BeginStep(batch.tokens);
    const RoutingPlan* const plans[] = {&plan};
    std::vector<uint8_t> kind;
    for (const Phase phase : batch.phase) kind.push_back(static_cast<uint8_t>(phase));
    std::vector<TokenRoutes> routes(kind.size());
    counters_->Count(kind, batch.tokens, plans, routes);
    if (step.meanwhile) step.meanwhile();
    BlockReport block;
    block.plan = plan;
    if (step.report.scores) block.scores = scores;
    if (step.report.inputs) block.inputs = inputs;
    StepReport report{.failed = {}, .routes = routes, .blocks = {}};
    if (step.report.any()) report.blocks = {&block, 1};
    recorder_->EndStep(batch, report);
    return step.report;
  }
  const ExpertRecorder& recorder() const { return *recorder_; }

 private:
  cpu::CpuRouteCounters* counters_;
  std::unique_ptr<ExpertRecorder> recorder_;
};

// A row with a NaN is counted as non-finite and not sampled, so that the samples stay usable.
TEST(Recorder, RowsThatAreNotFiniteAreNotSampled) {
  ModelSpec spec;
  spec.vocab_size = 8;
  spec.hidden_size = 2;
  spec.AddLayers(1);
  RoutedLayerSpec& routing = spec.feed_forward(0).routing.emplace();
  routing.num_experts = 2;
  routing.widths = {4, 4};
  const RecorderOptions options{.router_stats_interval = 1, .hidden_samples = 8};
  CountedSteps steps(spec, options);
  const std::vector<int32_t> table = {0};
  Batch batch;
  batch.tokens = {3, 4, 5};
  batch.positions = {0, 1, 2};
  batch.sequence = {0, 0, 0};
  batch.phase = {Phase::kRecompute, Phase::kPrefill, Phase::kPrefill};
  batch.page_tables = {table};

  const std::vector<int32_t> offsets = {0, 1, 3}, experts = {0, 1, 1}, rows = {0, 1, 2};
  const std::vector<int32_t> row_offsets = {0, 1, 2, 3}, of_row = {0, 1, 2};
  const std::vector<float> weights = {0.0f, 0.0f, 1.0f};
  const std::vector<uint8_t> status = {2, 2, 0};
  const RoutingPlan plan{.rows = 3,
                         .num_experts = 2,
                         .num_assignments = 3,
                         .expert_offsets = offsets.data(),
                         .expert_of_assignment = experts.data(),
                         .row_of_assignment = rows.data(),
                         .weight_of_assignment = weights.data(),
                         .row_offsets = row_offsets.data(),
                         .assignments_of_row = of_row.data(),
                         .row_nonfinite = status.data()};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const ReportContents contents =
      steps.Run(batch, plan, std::vector<float>{nan, nan, nan, nan, 0, 1},
                std::vector<float>{nan, nan, nan, 1, 2, 3});
  EXPECT_TRUE(contents.scores && contents.inputs);

  const ExpertRecorder& recorder = steps.recorder();
  const BlockExpertStats block = recorder.Snapshot().blocks[0];
  EXPECT_EQ(block.nonfinite_rows, 1u) << "the recomputed row was counted before";
  EXPECT_EQ(block.router.rows, 1u);
  EXPECT_EQ(block.selections, (std::vector<uint64_t>{0, 2}));
  const HiddenSample sample = recorder.HiddenSamples()[0];
  EXPECT_EQ(sample.seen, 1u);
  EXPECT_EQ(sample.rows, (std::vector<float>{2, 3}));
  EXPECT_EQ(sample.experts, (std::vector<int32_t>{1}));
}

TEST(Recorder, ExpertsWithoutMatricesHaveNoWidth) {
  ModelSpec spec;
  spec.vocab_size = 8;
  spec.hidden_size = 2;
  spec.AddLayers(1);
  spec.feed_forward(0).expert = {.residual = true, .depth = 2};
  RoutedLayerSpec& routing = spec.feed_forward(0).routing.emplace();
  routing.null_experts = {.zero = 1, .copy = 1, .constant = 1, .replaced = {0, 2}};
  routing.num_experts = 7;
  routing.widths = {4, 6};
  const CountedSteps steps(spec, {});
  const BlockExpertStats block = steps.recorder().Snapshot().blocks[0];
  EXPECT_EQ(block.num_experts, 7);
  EXPECT_EQ(block.selections.size(), 7u);
  EXPECT_EQ(block.expert_widths, (std::vector<int>{0, 4, 0, 6, 0, 0, 0}));
  for (int e = 0; e < 7; ++e) {
    const int64_t macs = 2 * 3 * 2 * block.expert_widths[static_cast<size_t>(e)];
    EXPECT_EQ(ExpertMacs(spec, 0, BlockKind::kFeedForward, e), macs) << e;
  }
  // Each of two sub-layers has three matrices and a norm.
  EXPECT_EQ(block.expert_parameters,
            (std::vector<int64_t>{2, 2 * (3 * 4 * 2 + 2), 2, 2 * (3 * 6 * 2 + 2), 0, 0, 2}));
}

// Returns a stack of one layer with dense attention and experts of these widths.
ModelSpec StackOf(Stack stack, const std::vector<int>& widths) {
  ModelSpec spec;
  spec.stack = stack;
  spec.vocab_size = 8;
  spec.hidden_size = 2;
  spec.AddLayers(1);
  for (BlockSpec& block : spec.blocks) block.stack = stack;
  RoutedLayerSpec& routing = spec.feed_forward(0).routing.emplace();
  routing.num_experts = static_cast<int>(widths.size());
  routing.widths = widths;
  return spec;
}

TEST(Recorder, StacksHaveParametersOfTheirOwn) {
  ModelSpec decoder = StackOf(Stack::kDecoder, {3});
  decoder.kind = ModelKind::kEncoderDecoder;
  decoder.encoder = std::make_shared<const ModelSpec>(StackOf(Stack::kEncoder, {4, 6}));
  const ExpertStats encoder_stats = EmptyExpertStats(*decoder.encoder);
  const ExpertStats decoder_stats = EmptyExpertStats(decoder);
  EXPECT_EQ(encoder_stats.blocks[0].expert_parameters,
            (std::vector<int64_t>{3 * 4 * 2, 3 * 6 * 2}));
  EXPECT_EQ(decoder_stats.blocks[0].expert_parameters, (std::vector<int64_t>{3 * 3 * 2}));
  // Attention, three norms, and a row of the router for each expert.
  EXPECT_EQ(encoder_stats.always_active_parameters, 4 * 2 + 3 * 2 + 2 * 2);
  EXPECT_EQ(decoder_stats.always_active_parameters, 4 * 2 + 3 * 2 + 1 * 2);
}

// If only some rows are sampled, every token must get its turn, with all of its sub-tokens.
TEST(Recorder, SampledRouterScoresMissNobody) {
  constexpr int kTokens = 12, kHeads = 4;
  ModelSpec spec;
  spec.vocab_size = 8;
  spec.hidden_size = 8;
  spec.AddLayers(1);
  RoutedLayerSpec& routing = spec.feed_forward(0).routing.emplace();
  routing.num_experts = kTokens;
  routing.widths.assign(kTokens, 4);
  routing.split.heads = kHeads;
  CountedSteps steps(spec, {.router_stats_interval = 4, .router_stats_rows = 8});
  const std::vector<int32_t> table = {0};
  Batch batch;
  batch.page_tables = {table};
  for (int t = 0; t < kTokens; ++t) {
    batch.tokens.push_back(0);
    batch.positions.push_back(t);
    batch.sequence.push_back(0);
    batch.phase.push_back(Phase::kPrefill);
  }
  // Every row selects, with probability 1, the expert whose id is the row's token number. So the
  // sum of an expert's probabilities is the number of sampled rows of that token.
  const int rows = kTokens * kHeads;
  std::vector<int32_t> offsets, experts, of_row, row_offsets;
  std::vector<float> scores(static_cast<size_t>(rows) * kTokens, -1000.0f);
  for (int r = 0; r < rows; ++r) {
    experts.push_back(r / kHeads);
    of_row.push_back(r);
    scores[static_cast<size_t>(r) * kTokens + static_cast<size_t>(r / kHeads)] = 1000.0f;
  }
  for (int r = 0; r <= rows; ++r) row_offsets.push_back(r);
  for (int e = 0; e <= kTokens; ++e) offsets.push_back(e * kHeads);
  const std::vector<float> weights(static_cast<size_t>(rows), 1.0f);
  const std::vector<uint8_t> status(static_cast<size_t>(rows), 0);
  const RoutingPlan plan{.rows = rows,
                         .num_experts = kTokens,
                         .num_assignments = rows,
                         .expert_offsets = offsets.data(),
                         .expert_of_assignment = experts.data(),
                         .row_of_assignment = of_row.data(),
                         .weight_of_assignment = weights.data(),
                         .row_offsets = row_offsets.data(),
                         .assignments_of_row = of_row.data(),
                         .row_nonfinite = status.data()};
  constexpr int kSamples = 12;  // two tokens per sample, so that every token is sampled twice
  for (int step = 0; step < 4 * kSamples; ++step) {
    const ReportContents contents = steps.Run(batch, plan, scores, {});
    EXPECT_EQ(contents.scores, step % 4 == 0);
  }
  const RouterStats router = steps.recorder().Snapshot().blocks[0].router;
  EXPECT_EQ(router.rows, static_cast<uint64_t>(kSamples * 8));
  for (int t = 0; t < kTokens; ++t) {
    EXPECT_NEAR(router.probability_sums[t], 2.0 * kHeads, 1e-9) << "token " << t;
  }
}

TEST(Agreement, FluctuationOfFirstChoicesAndOfSets) {
  const BlockRoutes a = Routes({{0, 1}, {2, 3}, {1, 2}, {0}}, {0, 2, 1, 0});
  const BlockRoutes b = Routes({{0, 1}, {2, 3}, {1, 3}, {0, 1}}, {1, 2, 1, 0});
  const Fluctuation f = RoutingFluctuation(a, b);
  EXPECT_EQ(f.rows, 4u);
  EXPECT_DOUBLE_EQ(f.top1, 0.25);
  EXPECT_DOUBLE_EQ(f.sets, 0.5);
  EXPECT_EQ(RoutingFluctuation(a, a).sets, 0.0);
}

TEST(Agreement, Correlation) {
  const std::vector<double> a = {1, 2, 3}, b = {10, 20, 30}, c = {3, 2, 1}, d = {1, 2, 2};
  EXPECT_DOUBLE_EQ(Correlation(a, b), 1.0);
  EXPECT_DOUBLE_EQ(Correlation(a, c), -1.0);
  EXPECT_NEAR(Correlation(a, d), std::sqrt(3.0) / 2.0, 1e-15);
  EXPECT_TRUE(std::isnan(Correlation(a, std::vector<double>{7, 7, 7})));
  EXPECT_DOUBLE_EQ(InterRunConsistency({a, c}), 0.0) << "the diagonal counts";
  EXPECT_NEAR(InterRunConsistency({a, b, c}), (3 + 2 - 4) / 9.0, 1e-15);
}

ExpertProfile SmallProfile(uint64_t seed) {
  Random random(seed);
  ExpertProfile p;
  p.model = "m";
  p.vocabulary = 3;
  BlockExpertStats b = SmallBlock();
  for (auto* counts :
       {&b.selections, &b.decode_selections, &b.visits, &b.recomputed_selections,
        &b.rejected_selections, &b.touching_tokens, &b.router.selections, &b.distinct_histogram}) {
    counts->resize(4);
    for (uint64_t& n : *counts) n = static_cast<uint64_t>(random.Below(100));
  }
  b.weight_sums = {random.Uniform(), random.Uniform(), 0.0, 1.0};
  p.stats.blocks = {b};
  p.stats.tokens = 5;
  p.stats.diversity_blocks = 1;
  p.stats.diversity_histogram = {1, 2, 3, 4};
  p.token_counts = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}};
  p.hidden = {Sample(1, {1, 2, 3}, {0, 1, 0})};
  p.hidden[0].capacity = 4;
  p.routes = RouteSequence{{0, 1}, {Routes({{0, 1}, {2}, {}, {3}}, {1, 2, BlockRoutes::kNone, 3})}};
  return p;
}

TEST(Profile, MergingAddsEverything) {
  ExpertProfile a = SmallProfile(1);
  const ExpertProfile first = a, b = SmallProfile(2);
  ASSERT_TRUE(Merge(a, b).ok());
  const BlockExpertStats& sum = a.stats.blocks[0];
  EXPECT_EQ(a.model, "m");
  EXPECT_EQ(a.stats.tokens, 10u);
  EXPECT_EQ(sum.selections[3],
            first.stats.blocks[0].selections[3] + b.stats.blocks[0].selections[3]);
  EXPECT_EQ(sum.router.rows, 20u);
  EXPECT_DOUBLE_EQ(sum.weight_sums[0],
                   first.stats.blocks[0].weight_sums[0] + b.stats.blocks[0].weight_sums[0]);
  EXPECT_EQ(sum.expert_parameters, first.stats.blocks[0].expert_parameters);
  EXPECT_EQ(a.token_counts[0][11], 24u);
  EXPECT_EQ(a.routes->tokens, (std::vector<int32_t>{0, 1, 0, 1}));
  EXPECT_EQ(a.routes->blocks[0],
            Routes({{0, 1}, {2}, {}, {3}, {0, 1}, {2}, {}, {3}},
                   {1, 2, BlockRoutes::kNone, 3, 1, 2, BlockRoutes::kNone, 3}));
}

TEST(Profile, TokenCountsStopAtTheirMaximum) {
  ExpertProfile a = SmallProfile(1), b = SmallProfile(1);
  a.token_counts[0][0] = UINT32_MAX - 1;
  ASSERT_TRUE(Merge(a, b).ok());
  EXPECT_EQ(a.token_counts[0][0], UINT32_MAX);
  ASSERT_TRUE(Merge(a, b).ok());
  EXPECT_EQ(a.token_counts[0][0], UINT32_MAX);
}

TEST(Profile, WhatOnlyOneKeptIsDropped) {
  ExpertProfile a = SmallProfile(1), b = SmallProfile(2);
  b.hidden.clear();
  b.routes.reset();
  b.token_counts.clear();
  ASSERT_TRUE(Merge(a, b).ok());
  EXPECT_TRUE(a.hidden.empty());
  EXPECT_FALSE(a.routes.has_value());
  EXPECT_TRUE(a.token_counts.empty());
  EXPECT_EQ(a.stats.tokens, 10u);
}

TEST(Profile, SamplesThatFitAreJoined) {
  ExpertProfile a = SmallProfile(1), b = SmallProfile(2);
  a.hidden[0].capacity = b.hidden[0].capacity = 100;
  ASSERT_TRUE(Merge(a, b).ok());
  EXPECT_EQ(a.hidden[0].rows, (std::vector<float>{1, 2, 3, 1, 2, 3}));
  EXPECT_EQ(a.hidden[0].experts, (std::vector<int32_t>{0, 1, 0, 0, 1, 0}));
  EXPECT_EQ(a.hidden[0].seen, 6u);
}

TEST(Profile, LargerSamplesStayFair) {
  // One sample kept 30 of 300 rows, the other 10 of 10. A row of either text should be in the
  // merged sample with probability 30 / 310.
  double of_second = 0.0, expected = 0.0;
  constexpr int kTrials = 400;
  for (int t = 0; t < kTrials; ++t) {
    ExpertProfile a = SmallProfile(1), b = SmallProfile(2);
    a.hidden = {Sample(1, std::vector<float>(30, 1.0f), std::vector<int32_t>(30, 0))};
    b.hidden = {Sample(1, std::vector<float>(10, 2.0f), std::vector<int32_t>(10, 1))};
    a.hidden[0].seen = 300 + static_cast<uint64_t>(t);  // makes another random draw in every trial
    expected += 10.0 * 30.0 / (310.0 + t);
    b.hidden[0].capacity = 30;
    ASSERT_TRUE(Merge(a, b).ok());
    ASSERT_EQ(a.hidden[0].size(), 30);
    ASSERT_EQ(a.hidden[0].rows.size(), 30u);
    EXPECT_EQ(a.hidden[0].seen, 310u + static_cast<uint64_t>(t));
    of_second +=
        static_cast<double>(std::count(a.hidden[0].rows.begin(), a.hidden[0].rows.end(), 2.0f));
  }
  EXPECT_NEAR(of_second / kTrials, expected / kTrials, 0.1);
}

TEST(Profile, OtherArchitecturesAreRefused) {
  const ExpertProfile a = SmallProfile(1);
  const auto refused = [&](auto change, bool comparable) {
    ExpertProfile to = a, other = a;
    change(other);
    EXPECT_EQ(CheckComparable(to, other).ok(), comparable);
    EXPECT_EQ(Merge(to, other).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(to.stats.tokens, a.stats.tokens) << "a refused merge changes nothing";
  };
  refused([](ExpertProfile& p) { p.vocabulary = 4; }, true);
  refused([](ExpertProfile& p) { p.stats.blocks.clear(); }, false);
  refused([](ExpertProfile& p) { p.stats.blocks[0].layer = 1; }, false);
  refused([](ExpertProfile& p) { p.stats.blocks[0].block = BlockKind::kAttention; }, false);
  refused([](ExpertProfile& p) { p.stats.blocks[0].num_experts = 3; }, false);
  refused([](ExpertProfile& p) { p.stats.blocks[0].split_heads = 1; }, true);
  refused([](ExpertProfile& p) { p.stats.blocks[0].expert_widths[1] = 9; }, true);
  refused([](ExpertProfile& p) { p.hidden[0].width = 3; }, true);
}

// With routing overrides, a server can count more experts per token than the model selects.
TEST(Profile, LongerHistogramsMerge) {
  const ExpertProfile a = SmallProfile(1);
  for (const bool longer_first : {false, true}) {
    ExpertProfile to = a, other = a;
    ExpertProfile& longer = longer_first ? to : other;
    longer.stats.blocks[0].distinct_histogram.resize(9);
    longer.stats.blocks[0].distinct_histogram[8] = 3;
    longer.stats.diversity_histogram.resize(9);
    ASSERT_TRUE(Merge(to, other).ok());
    EXPECT_EQ(to.stats.blocks[0].distinct_histogram.size(), 9u);
    EXPECT_EQ(to.stats.blocks[0].distinct_histogram[8], 3u);
    EXPECT_EQ(to.stats.blocks[0].distinct_histogram[1],
              2 * a.stats.blocks[0].distinct_histogram[1]);
    EXPECT_EQ(to.stats.diversity_histogram.size(), 9u);
  }
}

}  // namespace
}  // namespace moeserve
