// The CPU's fused feed-forward must have the same bits as its two separate products, for every
// instruction set, type and number of threads.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/registry.h"
#include "tests/support/backends.h"
#include "tests/support/device_rows.h"
#include "tests/support/plans.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

struct FeedForwardTypes {
  DType rows;
  DType weights;
  Quantization quantization;
};

constexpr FeedForwardTypes kFeedForwardTypes[] = {
    {DType::kF32, DType::kF32, Quantization::kNone},
    {DType::kF32, DType::kBF16, Quantization::kNone},
    {DType::kBF16, DType::kBF16, Quantization::kNone},
    {DType::kF32, DType::kBF16, Quantization::kInt8},
    {DType::kBF16, DType::kBF16, Quantization::kInt8},
    {DType::kBF16, DType::kBF16, Quantization::kInt8Channel},
    {DType::kBF16, DType::kBF16, Quantization::kInt4},
    {DType::kBF16, DType::kBF16, Quantization::kInt4K}};

struct Banks {
  std::unique_ptr<LinearBank> up, down;
};

Banks MakeBanks(Backend& backend, Random& random, const FeedForwardTypes& t,
                const std::vector<int>& widths, int model, bool gated) {
  const auto experts = static_cast<int>(widths.size());
  Banks b;
  b.up = std::move(backend.NewLinearBank({{model}, widths, gated, true, t.weights, t.quantization}))
             .value();
  b.down = std::move(backend.NewLinearBank({widths, std::vector<int>(widths.size(), model), false,
                                            true, t.weights, t.quantization}))
               .value();
  using Half = LinearBank::Half;
  for (int e = 0; e < experts; ++e) {
    const int64_t w = widths[e];
    b.up->LoadWeight(e, Half::kMain, 0,
                     MakeTensor(random.Normals(w * model, 0.3), {w, model}, t.weights));
    b.up->LoadBias(e, Half::kMain, 0, MakeTensor(random.Normals(w), {w}));
    if (gated) {
      b.up->LoadWeight(e, Half::kGate, 0,
                       MakeTensor(random.Normals(w * model, 0.3), {w, model}, t.weights));
      b.up->LoadBias(e, Half::kGate, 0, MakeTensor(random.Normals(w), {w}));
    }
    b.down->LoadWeight(e, Half::kMain, 0,
                       MakeTensor(random.Normals(w * model, 0.3), {model, w}, t.weights));
    b.down->LoadBias(e, Half::kMain, 0, MakeTensor(random.Normals(model), {model}));
  }
  return b;
}

class FeedForwardTest : public ::testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Backend> MakeBackend(int threads) {
    return std::move(CreateBackend({.device = "cpu", .threads = threads, .cpu_isa = GetParam()}))
        .value();
  }
};

// Routes every row to expert 0 (more rows than one pass takes), none to expert 1, and some to each
// other expert.
std::vector<std::vector<int>> UnevenRoutes(Random& random, int experts, int rows) {
  std::vector<std::vector<int>> routes(static_cast<size_t>(rows), {0});
  for (std::vector<int>& row : routes) {
    for (int e = 2; e < experts; ++e) {
      if (random.Below(e) == 0) row.push_back(e);
    }
  }
  return routes;
}

TEST_P(FeedForwardTest, HasTheBitsOfTheTwoProducts) {
  const std::vector<int> widths = {40, 16, 7, 130, 64, 1, 33, 96, 160};
  const auto experts = static_cast<int>(widths.size());
  const int model = 72, stride = 176;
  for (const int threads : {1, 3}) {
    const std::unique_ptr<Backend> backend = MakeBackend(threads);
    for (const FeedForwardTypes& t : kFeedForwardTypes) {
      for (const bool gated : {false, true}) {
        Random random(7);
        const Banks banks = MakeBanks(*backend, random, t, widths, model, gated);
        for (const int rows : {1, 5, 230}) {
          const Grouped grouped = MakePlan(*backend, experts, UnevenRoutes(random, experts, rows));
          const RoutingPlan& plan = grouped.plan;
          const std::vector<float> values = random.Normals(int64_t{rows} * model);
          const DeviceRows x = MakeRows(*backend, rows, model, model, t.rows, &values);
          const int64_t n = plan.num_assignments;
          const DeviceRows hidden = MakeRows(*backend, n, stride, stride, t.rows, nullptr);
          // The type of the results is independent of the type of the hidden units.
          const DType out = rows == 5 ? DType::kF32 : t.rows;
          const DeviceRows pair = MakeRows(*backend, n, model, model, out, nullptr);
          const DeviceRows fused = MakeRows(*backend, n, model, model, out, nullptr);
          const ActivationKind activation = ActivationKind::kSilu;
          const auto& cpu = dynamic_cast<const cpu::CpuBackend&>(*backend);
          const uint64_t visits = cpu.expert_visits();
          backend->Linear({.bank = banks.up.get(),
                           .plan = &plan,
                           .gather = true,
                           .input = x.view,
                           .output = hidden.view,
                           .activation = activation,
                           .pad_output = true});
          backend->Linear(
              {.bank = banks.down.get(), .plan = &plan, .input = hidden.view, .output = pair.view});
          const uint64_t of_pair = cpu.expert_visits() - visits;
          backend->FusedFeedForward({.up = banks.up.get(),
                                     .down = banks.down.get(),
                                     .plan = &plan,
                                     .gather = true,
                                     .input = x.view,
                                     .output = fused.view,
                                     .activation = activation});
          EXPECT_EQ(cpu.expert_visits() - visits, 2 * of_pair);
          const std::vector<float> a = HostRows(*backend, pair.view);
          const std::vector<float> b = HostRows(*backend, fused.view);
          ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0)
              << Name(t.rows) << " rows, " << Name(t.weights) << " weights, "
              << static_cast<int>(t.quantization) << ", gated " << gated << ", " << rows
              << " rows, " << threads << " threads";
          ASSERT_TRUE(std::all_of(a.begin(), a.end(), [](float v) { return v == v; }));
        }
      }
    }
  }
}

// The order of the experts in a plan changes no bit of products, whatever experts it has.
TEST_P(FeedForwardTest, AnyOrderOfExpertsHasTheSameBits) {
  const std::vector<int> widths = {40, 16, 7, 130, 64, 1, 33, 96, 160};
  const auto experts = static_cast<int>(widths.size());
  const int model = 72, stride = 176;
  for (const int threads : {1, 3}) {
    const std::unique_ptr<Backend> backend = MakeBackend(threads);
    for (const FeedForwardTypes& t : kFeedForwardTypes) {
      Random random(11);
      const Banks banks = MakeBanks(*backend, random, t, widths, model, true);
      for (const int rows : {1, 5, 230}) {
        const Grouped grouped = MakePlan(*backend, experts, UnevenRoutes(random, experts, rows));
        const std::vector<float> values = random.Normals(int64_t{rows} * model);
        const DeviceRows x = MakeRows(*backend, rows, model, model, t.rows, &values);
        const auto run = [&](const RoutingPlan& plan, bool fused) {
          const std::vector<float> ones(static_cast<size_t>(plan.num_assignments * stride), 1.0f);
          const int64_t n = plan.num_assignments;
          const DeviceRows hidden = MakeRows(*backend, n, stride, stride, t.rows, &ones);
          const DeviceRows out = MakeRows(*backend, n, model, model, t.rows, &ones);
          if (fused) {
            backend->FusedFeedForward({.up = banks.up.get(),
                                       .down = banks.down.get(),
                                       .plan = &plan,
                                       .gather = true,
                                       .input = x.view,
                                       .output = out.view,
                                       .activation = ActivationKind::kSilu});
          } else {
            backend->Linear({.bank = banks.up.get(),
                             .plan = &plan,
                             .gather = true,
                             .input = x.view,
                             .output = hidden.view,
                             .activation = ActivationKind::kSilu,
                             .pad_output = true});
            backend->Linear({.bank = banks.down.get(),
                             .plan = &plan,
                             .input = hidden.view,
                             .output = out.view});
          }
          return HostRows(*backend, out.view);
        };
        const std::vector<float> expected = run(grouped.plan, false);
        std::vector<int32_t> order(static_cast<size_t>(experts));
        std::iota(order.begin(), order.end(), 0);
        for (int early = 0; early <= experts; early += early == 0 ? 1 : 4) {
          for (size_t i = order.size() - 1; i > 0; --i) {
            std::swap(order[i], order[static_cast<size_t>(random.Below(static_cast<int>(i) + 1))]);
          }
          RoutingPlan plan = grouped.plan;
          plan.order = order.data();
          plan.num_early = early;
          for (const bool fused : {false, true}) {
            const std::vector<float> found = run(plan, fused);
            ASSERT_EQ(std::memcmp(found.data(), expected.data(), expected.size() * sizeof(float)),
                      0)
                << Name(t.weights) << ' ' << static_cast<int>(t.quantization) << ", " << rows
                << " rows, " << early << " early, fused " << fused;
          }
        }
      }
    }
  }
}

// Among the shapes that occur in practice, only many experts with some rows each are fused: not few
// experts, not few rows, and not so many rows that weights would be read twice.
TEST_P(FeedForwardTest, FusesWhereAThreadHasItsOwnExperts) {
  const std::unique_ptr<Backend> backend = MakeBackend(2);
  const FeedForwardTypes bf16{DType::kBF16, DType::kBF16, Quantization::kNone};
  Random random(1);
  const Banks many = MakeBanks(*backend, random, bf16, std::vector<int>(64, 32), 16, true);
  const Banks few = MakeBanks(*backend, random, bf16, std::vector<int>(8, 32), 16, true);
  const auto fuses = [&](const Banks& b, int64_t rows) {
    return backend->FusesFeedForward({.up = b.up.get(),
                                      .down = b.down.get(),
                                      .input = {.dtype = DType::kBF16},
                                      .output = {.rows = rows}});
  };
  EXPECT_TRUE(fuses(many, 64 * 32));
  EXPECT_FALSE(fuses(many, 64));
  EXPECT_FALSE(fuses(many, 64 * 1000));
  EXPECT_FALSE(fuses(few, 8 * 32));
}

INSTANTIATE_TEST_SUITE_P(Cpu, FeedForwardTest, ::testing::ValuesIn(CpuInstructionSets()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace moeserve::testing
