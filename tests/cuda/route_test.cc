// Routing on the device must have the same bits as on the CPU: scores, selection, gates and every
// array of the routing plan.

#include <gtest/gtest.h>

#include <span>

#include "base/kinds.h"
#include "tests/cuda/emulator_test_support.h"
#include "tests/cuda/route_support.h"

namespace moeserve::cuda {
namespace {

// Returns the largest number of routes per row that the settings and these overrides allow.
int MostRoutes(const RouteSettings& s, std::span<const RouteOverride> overrides) {
  int most = std::min(s.k, s.num_experts);
  for (const RouteOverride& o : overrides) {
    if (o.k > 0) most = std::max(most, std::min(o.k, s.num_experts));
    if (o.p > 0.0f) most = s.num_experts;
  }
  return most;
}

// Returns the forms with clusters of blocks. Routers, or rows, that are too many for a cluster are
// routed by a grid.
std::vector<RouteVariant> ClusterVariants() {
  std::vector<RouteVariant> variants;
  for (const int blocks : {8, 16}) {
    for (const RouteKernelKind kernel : {RouteKernelKind::kAuto, RouteKernelKind::kAny}) {
      for (const PlanForm plan : {PlanForm::kSameLaunch, PlanForm::kChunks}) {
        variants.push_back({.kernel = kernel, .plan = plan, .cluster_blocks = blocks});
      }
    }
  }
  return variants;
}

// Returns all forms of a launch that the shape allows.
std::vector<RouteVariant> AllVariants() {
  std::vector<RouteVariant> variants;
  for (const RouteTile tile : kRouteTiles) {
    for (const RouteKernelKind kernel : {RouteKernelKind::kAuto, RouteKernelKind::kAny}) {
      for (const PlanForm plan : {PlanForm::kSameLaunch, PlanForm::kChunks}) {
        variants.push_back({tile, kernel, plan});
      }
    }
  }
  for (const RouteVariant& cluster : ClusterVariants()) variants.push_back(cluster);
  return variants;
}

// Makes the router select the top k without choice values, as most routers do.
void SelectTopK(RouteCase& c, int k) {
  c.settings.select = SelectKind::kTopK;
  c.settings.k = k;
  c.settings.choice_bias = false;
  c.settings.groups = c.settings.best_groups = 1;
}

struct CompareOptions {
  std::vector<RouteVariant> variants = {{}};
  bool overrides = true;  // whether rows may have overrides
};

class RouteTest : public ::testing::Test {
 protected:
  // Routes `count` rows on the device, in all forms, and on the CPU, and compares all results.
  void Compare(const RouteCase& c, int count, const CompareOptions& options = {}) {
    SCOPED_TRACE("seed " + std::to_string(c.seed) + ", experts " +
                 std::to_string(c.settings.num_experts) + ", width " +
                 std::to_string(c.settings.input_width) + ", rows " + std::to_string(count));
    const int experts = c.settings.num_experts, width = c.settings.input_width;
    Random random(c.seed + 77);
    const bool bf16 = random.Below(2) == 1;
    const int64_t stride = random.Below(2) == 1 ? (width + 15) / 16 * 16 : width + 3;
    std::vector<float> rows = MakeRows(count, width, random, bf16);

    std::vector<float> bias(static_cast<size_t>(experts));
    int allowed = experts;
    for (int e = 1; e < experts; ++e) {
      bias[static_cast<size_t>(e)] = random.Below(3) == 0 ? -std::numeric_limits<float>::infinity()
                                                          : static_cast<float>(random.Normal());
      allowed -= std::isinf(bias[static_cast<size_t>(e)]);
    }
    const DeviceArray<float> device_bias(bias);
    std::vector<RouteOverride> overrides;
    std::vector<RouteOverride> device_overrides;
    const bool has_overrides = random.Below(2) == 1 && options.overrides;
    for (int r = 0; has_overrides && r < count; ++r) {
      RouteOverride o;
      const int kind = random.Below(6);
      if (kind == 1 || kind == 4) o.k = 1 + random.Below(experts);
      if ((kind == 2 || kind == 5) && c.settings.gate != Gate::kSoftmaxSelected) o.p = 0.4f;
      if (kind >= 3) {
        o.bias = bias.data();
        o.allowed = allowed;
      }
      overrides.push_back(o);
      device_overrides.push_back(
          {o.k, o.p, o.bias == nullptr ? nullptr : device_bias.data(), o.allowed});
    }
    const DeviceArray<RouteOverride> uploaded_overrides(device_overrides);

    const int rows_per_token = count % 2 == 0 && random.Below(2) == 1 ? 2 : 1;
    std::vector<int32_t> sequence(static_cast<size_t>(count / rows_per_token));
    const bool has_padding = random.Below(2) == 1;
    for (int32_t& s : sequence) s = has_padding && random.Below(4) == 0 ? -1 : 3;
    std::vector<bool> padding;
    for (int r = 0; r < count; ++r) {
      padding.push_back(sequence[static_cast<size_t>(r / rows_per_token)] < 0);
    }
    const DeviceArray<int32_t> device_sequence(sequence);

    Random token_random(c.seed + 78);
    std::vector<int32_t> tokens(sequence.size()), zeros(sequence.size());
    for (int32_t& t : tokens) t = token_random.Below(kVocabulary);
    const DeviceArray<int32_t> device_tokens(tokens);
    cpu_->BeginStep({.token_ids = tokens, .position = zeros, .sequence = zeros}, nullptr, false);

    std::vector<float> cpu_scores;
    HostPlan expected = FromCpu(RouteOnCpu(*cpu_, c, rows, &cpu_scores, overrides));
    const std::vector<uint8_t> nonfinite = expected.row_nonfinite;
    const GivenRoutes kept = Without(expected, padding);
    const auto router = std::move(cpu_->NewRouter(c.settings, c.tensors)).value();
    expected = FromCpu(cpu_->Route({.router = router.get(),
                                    .input = {rows.data(), DType::kF32, count, width, width},
                                    .given = &kept}));
    for (size_t r = 0; r < padding.size(); ++r) {
      expected.row_nonfinite[r] = padding[r] ? 0 : nonfinite[r];
    }

    const auto device_router = std::move(CudaRouter::Create(c.settings, c.tensors)).value();
    const int k_max = MostRoutes(c.settings, overrides) + random.Below(2);
    PlanMemory plan = PlanMemory::Create(count, k_max, experts).value();
    RouteScratch scratch =
        RouteScratch::Create(count, k_max, experts, device_router->tables().columns,
                             ChangedWidth(c.settings))
            .value();
    const DeviceRows input(rows, width, stride, bf16);
    const int64_t scores_stride = experts + 2;
    std::vector<uint8_t> expected_failed(sequence.size(), 0);
    for (int r = 0; r < count; ++r) {
      if (expected.row_nonfinite[static_cast<size_t>(r)] == 2) {
        expected_failed[static_cast<size_t>(r / rows_per_token)] = 1;
      }
    }
    for (const RouteVariant& variant : options.variants) {
      SCOPED_TRACE(::testing::Message()
                   << "tile " << static_cast<int>(variant.tile) << ", kernel "
                   << static_cast<int>(variant.kernel) << ", plan "
                   << static_cast<int>(variant.plan) << ", cluster " << variant.cluster_blocks);
      const DeviceArray<float> scores(static_cast<size_t>(count * scores_stride));
      const DeviceArray<uint8_t> failed(std::vector<uint8_t>(sequence.size(), 0));
      for (int run = 0; run < 2; ++run) {
        const RoutingPlan routed =
            LaunchRoute({.router = device_router.get(),
                         .input = input.view(),
                         .sequence = has_padding ? device_sequence.data() : nullptr,
                         .token_ids = device_tokens.data(),
                         .rows_per_token = rows_per_token,
                         .scores = scores.data(),
                         .scores_stride = scores_stride,
                         .overrides = has_overrides ? uploaded_overrides.data() : nullptr,
                         .failed = failed.data(),
                         .k_max = k_max,
                         .plan = &plan,
                         .scratch = &scratch,
                         .variant = variant},
                        nullptr);
        ASSERT_EQ(routed.capacity, count * k_max);
        ExpectSame(FromCuda(routed), expected);
        if (HasFatalFailure()) return;
      }
      ExpectSameScores(scores.Read(), scores_stride, cpu_scores, experts, padding);
      if (HasFatalFailure()) return;
      EXPECT_EQ(failed.Read(), expected_failed);
    }

    // Build a plan from the same routes, as given routes.
    const DeviceArray<int32_t> given_offsets(kept.offsets), given_experts(kept.experts);
    const DeviceArray<float> given_weights(kept.weights);
    HostPlan given = expected;
    std::fill(given.row_nonfinite.begin(), given.row_nonfinite.end(), uint8_t{0});
    for (const PlanForm form : {PlanForm::kAuto, PlanForm::kSameLaunch, PlanForm::kChunks}) {
      ExpectSame(FromCuda(LaunchGivenPlan({.rows = count,
                                           .num_experts = experts,
                                           .k_max = k_max,
                                           .offsets = given_offsets.data(),
                                           .experts = given_experts.data(),
                                           .weights = given_weights.data(),
                                           .plan = &plan,
                                           .scratch = &scratch,
                                           .plan_form = form},
                                          nullptr)),
                 given);
      if (HasFatalFailure()) return;
    }
    cpu_->BeginStep({}, nullptr, false);
  }

  // Builds plans from random routes on the device and on the CPU, and compares them.
  void CompareGiven(int rows, int experts) {
    SCOPED_TRACE(std::to_string(rows) + " rows, " + std::to_string(experts) + " experts");
    const int most = std::min(experts, 8);
    Random random(static_cast<uint64_t>(rows + experts));
    GivenRoutes given;
    given.offsets.push_back(0);
    for (int r = 0; r < rows; ++r) {
      for (int e = 0, left = most; e < experts && left > 0; e += 1 + random.Below(experts / 2)) {
        if (random.Below(3) == 0) continue;
        given.experts.push_back(e);
        given.weights.push_back(static_cast<float>(random.Normal()));
        --left;
      }
      given.offsets.push_back(static_cast<int32_t>(given.experts.size()));
    }
    const RouteCase c = MakeCase(experts, 1, Gate::kSoftmax, 1);
    const auto router = std::move(cpu_->NewRouter(c.settings, c.tensors)).value();
    std::vector<float> input(static_cast<size_t>(rows));
    const HostPlan expected = FromCpu(cpu_->Route({.router = router.get(),
                                                   .input = {input.data(), DType::kF32, rows, 1, 1},
                                                   .given = &given}));
    PlanMemory plan = PlanMemory::Create(rows, most, experts).value();
    RouteScratch scratch = RouteScratch::Create(rows, most, experts, experts).value();
    const DeviceArray<int32_t> offsets(given.offsets), ids(given.experts);
    const DeviceArray<float> weights(given.weights);
    for (const PlanForm form : {PlanForm::kAuto, PlanForm::kSameLaunch, PlanForm::kChunks}) {
      ExpectSame(FromCuda(LaunchGivenPlan({.rows = rows,
                                           .num_experts = experts,
                                           .k_max = most,
                                           .offsets = offsets.data(),
                                           .experts = ids.data(),
                                           .weights = weights.data(),
                                           .plan = &plan,
                                           .scratch = &scratch,
                                           .plan_form = form},
                                          nullptr)),
                 expected);
      if (HasFatalFailure()) return;
    }
  }

  std::unique_ptr<Backend> cpu_ = MakeCpu();
};

constexpr int kRowCounts[] = {0, 1, 2, 7, 8, 9, 63, 64, 65, 257, 600};

TEST_F(RouteTest, EqualsTheCpuInEverySettingAndSize) {
  uint64_t seed = 1;
  for (Gate gate : AllKinds<Gate>()) {
    for (int experts : {1, 2, 3, 8, 10, 33, 60, 64, 100, 256, 300, 1024}) {
      for (int width : {4, 24, 250, 600}) {
        const int64_t work = int64_t{experts} * width;
        int count = kRowCounts[seed % std::size(kRowCounts)];
        while (count > 9 && work * count > 3'000'000) count /= 8;
        Compare(MakeCase(experts, width, gate, seed++), count);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(RouteTest, ChangedRowsScaledExpertsAndTablesEqualTheCpu) {
  uint64_t seed = 7000;
  for (Gate gate : AllKinds<Gate>()) {
    for (int experts : {1, 5, 33, 64, 300}) {
      for (int width : {4, 24, 250, 600}) {
        int count = kRowCounts[seed % std::size(kRowCounts)];
        while (count > 9 && int64_t{experts} * width * count > 2'000'000) count /= 8;
        RouteCase c = MakeCase(experts, width, gate, seed);
        AddRareSettings(c, gate != Gate::kSparseMixer && seed % 2 == 1);
        Compare(c, count);
        if (HasFatalFailure()) return;
        ++seed;
      }
    }
  }
}

// All tiles, kernels and forms of the plan compute the same bits.
TEST_F(RouteTest, EveryVariantEqualsTheCpu) {
  uint64_t seed = 100;
  for (const int dim : {0, 5, 16, 64}) {
    for (const int experts : {5, 64, 100, 256}) {
      RouteCase c = MakeScoreCase(experts, 250, dim, ++seed);
      c.settings.gate =
          std::vector{Gate::kSoftmax, Gate::kSigmoid, Gate::kSoftmaxSelected}[seed % 3];
      SelectTopK(c, std::min(experts, static_cast<int>(1 + seed * 5 % 32)));
      if (seed % 4 == 0) AddRareSettings(c, false);
      const int count = std::vector{1, 3, 8, 9, 33}[seed % 5];
      Compare(c, count, {.variants = AllVariants(), .overrides = false});
      if (HasFatalFailure()) return;
    }
  }
  // Settings that only one of the kernels supports.
  for (const Gate gate : AllKinds<Gate>()) {
    for (const int count : {2, 20}) {
      Compare(MakeCase(48, 100, gate, ++seed), count, {.variants = AllVariants()});
      if (HasFatalFailure()) return;
    }
  }
}

// Clusters route any number of rows up to 32, of any width, with fewer columns than blocks and with
// columns that do not divide among them.
TEST_F(RouteTest, ClustersOfBlocksEqualTheCpu) {
  uint64_t seed = 700;
  for (const int experts : {1, 7, 8, 60, 129, 256}) {
    for (const int width : {1, 8, 252, 256, 1000, 2048}) {
      if (width > 1000 && experts > 60) continue;
      RouteCase c = MakeScoreCase(experts, width, 0, ++seed);
      if (seed % 3 != 0) SelectTopK(c, std::min(experts, static_cast<int>(1 + seed * 5 % 16)));
      const int count = std::vector{1, 2, 3, 8, 17, 32, 33}[seed % 7];
      Compare(c, count, {.variants = ClusterVariants(), .overrides = seed % 2 == 0});
      if (HasFatalFailure()) return;
    }
  }
}

// The vectors of a cosine router may be of any length. Products that underflow to -0 show which
// partial sums are added.
TEST_F(RouteTest, CosinesOfEveryLengthAndOfMinusZeros) {
  for (const int dim :
       {1, 7, 8, 9, 16, 17, 31, 40, 63, 64, 65, 127, 128, 129, 248, 256, 257, 600}) {
    for (const bool zeros : {false, true}) {
      RouteCase c = MakeScoreCase(40, 4, dim, static_cast<uint64_t>(dim));
      SelectTopK(c, 3);
      if (zeros) {
        c.settings.normalize_row = c.settings.normalize_expert = false;
        c.settings.temperature = Temperature::kNone;
        std::vector<float> w(static_cast<size_t>(40 * dim), -1e-30f);
        std::fill(w.begin(), w.begin() + 10 * dim, 1e-30f);
        c.tensors.weight = MakeTensor(w, {40, dim});
        c.tensors.projection =
            MakeTensor(std::vector<float>(static_cast<size_t>(4 * dim), 1e-30f), {dim, 4});
        c.tensors.bias = {};
      }
      Compare(c, 5, {.variants = {{}, {.kernel = RouteKernelKind::kAny}}, .overrides = false});
      if (HasFatalFailure()) return;
    }
  }
}

// The numbers of rows at which the form of the plan changes.
TEST_F(RouteTest, RowsAroundTheLimitsOfPlans) {
  for (const int experts : {8, 64, 256}) {
    for (const int rows : {1, 255, 256, 257, 1023, 1024, 1025}) {
      RouteCase c = MakeScoreCase(experts, 8, rows % 2 == 0 ? 16 : 0, 70 + rows);
      SelectTopK(c, 3);
      Compare(c, rows,
              {.variants = {{.plan = PlanForm::kSameLaunch}, {.plan = PlanForm::kChunks}},
               .overrides = false});
      if (HasFatalFailure()) return;
    }
  }
  for (const int rows : {1, 9}) {
    Compare(MakeCase(4096, 8, Gate::kSoftmax, 71), rows);
    if (HasFatalFailure()) return;
  }
}

TEST_F(RouteTest, EveryRowCountInBothPaths) {
  for (int count : kRowCounts) {
    for (int experts : {5, 64}) {
      Compare(MakeCase(experts, 40, Gate::kSoftmax, static_cast<uint64_t>(900 + count)), count);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(RouteTest, LongRowsPassThroughEveryStage) {
  for (int count : {1, 9, 260}) {
    RouteCase c = MakeCase(17, 2600, Gate::kSoftmax, static_cast<uint64_t>(300 + count));
    Compare(c, count);
    if (HasFatalFailure()) return;
  }
}

TEST_F(RouteTest, ManyExpertsManyRows) {
  RouteCase c = MakeCase(1024, 16, Gate::kSoftmax, 41);
  c.settings.select = SelectKind::kTopK;
  c.settings.k = 8;
  Compare(c, 300);
}

// As many rows as one launch takes, with enough experts that tiles of 16 rows are used.
TEST_F(RouteTest, ManyExpertsInOneLaunch) {
  for (int experts : {100, 300}) {
    for (Gate gate : {Gate::kSoftmax, Gate::kSigmoid}) {
      Compare(MakeCase(experts, 280, gate, static_cast<uint64_t>(77 + experts)), 250);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(RouteTest, TopPAtItsEnds) {
  for (float p : {0.0f, 1e-38f, 0.5f, 1.0f, 2.0f}) {
    for (bool strict : {false, true}) {
      for (Gate gate : {Gate::kSoftmax, Gate::kSigmoid}) {
        for (int k : {1, 5, 48}) {
          RouteCase c = MakeCase(48, 32, gate, static_cast<uint64_t>(5000 + k));
          c.settings.select = SelectKind::kTopP;
          c.settings.p = p;
          c.settings.k = k;
          c.settings.compare = strict ? TopPCompare::kGt : TopPCompare::kGe;
          Compare(c, 9);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Products that underflow are zeros of either sign, which must count as equal scores.
TEST_F(RouteTest, ZerosTieWhateverTheirSign) {
  RouteCase c;
  c.settings.num_experts = 3;
  c.settings.input_width = 256;
  std::vector<float> w(3 * 256, 1e-30f);
  std::fill(w.begin(), w.begin() + 256, -1e-30f);
  c.tensors.weight = MakeTensor(w, {3, 256});
  std::vector<float> row(256, 1e-30f), scores;
  const HostPlan expected = FromCpu(RouteOnCpu(*cpu_, c, row, &scores));
  ASSERT_TRUE(std::signbit(scores[0]) && !std::signbit(scores[1]));
  ASSERT_EQ(expected.expert_of_assignment, std::vector<int32_t>{0});
  const auto router = std::move(CudaRouter::Create(c.settings, c.tensors)).value();
  PlanMemory plan = PlanMemory::Create(1, 1, 3).value();
  RouteScratch scratch = RouteScratch::Create(1, 1, 3, 3).value();
  const DeviceRows input(row, 256, 256, false);
  ExpectSame(FromCuda(LaunchRoute({.router = router.get(),
                                   .input = input.view(),
                                   .k_max = 1,
                                   .plan = &plan,
                                   .scratch = &scratch},
                                  nullptr)),
             expected);
}

// Plans of given routes for the largest numbers of rows of one block, and for more chunks of rows
// than a warp has lanes.
TEST_F(RouteTest, GivenRoutesOfManyRows) {
  for (const int experts : {3, 8, 64, 256, 4096}) {
    for (const int rows : {1, 255, 256, 257, 1023, 1024, 1025, 40 * kPlanChunk + 3}) {
      if (experts > 3 && rows > 1025) continue;
      CompareGiven(rows, experts);
      if (HasFatalFailure()) return;
    }
  }
}

// A row's bits must depend neither on other rows nor on the kernel chosen for their number.
TEST_F(RouteTest, ARowRoutesTheSameInFewAndInMany) {
  const RouteCase c = MakeCase(60, 300, Gate::kSigmoid, 12);
  const int experts = 60, width = 300;
  Random random(3);
  const std::vector<float> rows = MakeRows(400, width, random, true);
  const auto router = std::move(CudaRouter::Create(c.settings, c.tensors)).value();
  const int k_max = std::min(c.settings.k, experts);
  PlanMemory plan = PlanMemory::Create(400, k_max, experts).value();
  RouteScratch scratch =
      RouteScratch::Create(400, k_max, experts, router->tables().columns).value();
  const auto routes_of = [&](int first, int count) {
    const std::vector<float> some(rows.begin() + first * width,
                                  rows.begin() + (first + count) * width);
    const DeviceRows input(some, width, width, true);
    const HostPlan p = FromCuda(LaunchRoute({.router = router.get(),
                                             .input = input.view(),
                                             .k_max = k_max,
                                             .plan = &plan,
                                             .scratch = &scratch},
                                            nullptr));
    return Without(p, std::vector<bool>(static_cast<size_t>(count)));
  };
  const GivenRoutes all = routes_of(0, 400);
  for (auto [first, count] : {std::pair{0, 1}, {13, 7}, {100, 200}, {399, 1}}) {
    const GivenRoutes some = routes_of(first, count);
    const int32_t begin = all.offsets[static_cast<size_t>(first)];
    const size_t n = some.experts.size();
    ASSERT_EQ(all.offsets[static_cast<size_t>(first + count)] - begin, static_cast<int32_t>(n));
    for (size_t i = 0; i < n; ++i) {
      ASSERT_EQ(some.experts[i], all.experts[static_cast<size_t>(begin) + i]);
      ASSERT_EQ(BitsFromF32(some.weights[i]),
                BitsFromF32(all.weights[static_cast<size_t>(begin) + i]));
    }
  }
}

// When a captured step is replayed, it must route the rows that are in memory then.
TEST_F(RouteTest, ReplayedGraphsRouteAnew) {
  for (int count : {40, 300}) {
    RouteCase c = MakeCase(33, 64, Gate::kSoftmax, 77);
    c.settings.select = SelectKind::kTopK;
    c.settings.k = 4;
    Random random(5);
    std::vector<float> rows = MakeRows(count, 64, random, false);
    DeviceRows input(rows, 64, 64, false);
    const auto router = std::move(CudaRouter::Create(c.settings, c.tensors)).value();
    PlanMemory plan = PlanMemory::Create(count, 4, 33).value();
    RouteScratch scratch = RouteScratch::Create(count, 4, 33, router->tables().columns).value();
    cudaStream_t stream;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    const RoutingPlan routed = LaunchRoute({.router = router.get(),
                                            .input = input.view(),
                                            .k_max = 4,
                                            .plan = &plan,
                                            .scratch = &scratch},
                                           stream);
    cudaGraph_t graph;
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cudaGraphExec_t exec;
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (int step = 0; step < 3; ++step) {
      rows = MakeRows(count, 64, random, false);
      input.Write(rows);
      ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      std::vector<float> scores;
      ExpectSame(FromCuda(routed), FromCpu(RouteOnCpu(*cpu_, c, rows, &scores)));
      if (HasFatalFailure()) return;
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

// The order of threads and blocks must not affect the result.
TEST_F(RouteTest, OrderOfThreadsDoesNotShow) {
  InEveryOrder([this] {
    for (int count : {1, 30, 300}) {
      for (int experts : {7, 40}) {
        Compare(MakeCase(experts, 280, Gate::kSoftmax, static_cast<uint64_t>(600 + count)), count);
        if (HasFatalFailure()) return;
      }
    }
    for (const bool cosine : {false, true}) {
      for (const int count : {1, 33}) {
        RouteCase c = MakeScoreCase(70, 300, cosine ? 16 : 0, 50);
        SelectTopK(c, 4);
        Compare(c, count, {.variants = AllVariants(), .overrides = false});
        if (HasFatalFailure()) return;
      }
    }
  });
}

TEST_F(RouteTest, RefusesRoutersThatAreTooLarge) {
  RouteCase c = MakeCase(5, 8, Gate::kSoftmax, 1);
  c.settings.num_experts = kMaxRoutedExperts + 1;
  EXPECT_EQ(CudaRouter::Create(c.settings, c.tensors).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace moeserve::cuda
