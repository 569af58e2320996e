// The device's linear kernels compared with double arithmetic, and their guarantees about bits.

#include "kernels/cuda/linear/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <tuple>

#include "tests/cuda/device_array.h"
#include "tests/cuda/emulator_test_support.h"
#include "tests/cuda/linear_case.h"

#if defined(MOESERVE_CUDA_EMULATION)
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/linear/linear_params.h"
#include "kernels/cuda/linear/linear_schedule.cuh"
#endif

namespace moeserve::testing {
namespace {

using cuda::LaunchLinear;
using cuda::LinearTile;

struct Types {
  DType rows;
  DType weights;
};
constexpr Types kLinearTypes[] = {{DType::kF32, DType::kF32},
                                  {DType::kF32, DType::kBF16},
                                  {DType::kF32, DType::kF16},
                                  {DType::kBF16, DType::kBF16}};
constexpr LinearTile kTiles[] = {
    LinearTile::kRows8,        LinearTile::kRows16,       LinearTile::kRows32,
    LinearTile::kRows64,       LinearTile::kRows128,      LinearTile::kWarpgroup128,
    LinearTile::kWarpgroup192, LinearTile::kWarpgroup256, LinearTile::kWarpgroup192x192};
constexpr LinearTile kWarpgroupTiles[] = {LinearTile::kWarpgroup128, LinearTile::kWarpgroup192,
                                          LinearTile::kWarpgroup256, LinearTile::kWarpgroup192x192};

// With the test's values, sums of n products are about 1, and activations do not increase their
// argument. So the tolerance is the rounding error of the sums, relative to 1, plus that of the
// result.
::testing::AssertionResult SumsNear(const std::vector<double>& actual,
                                    const std::vector<double>& expected, const Types& t, DType out,
                                    int64_t n) {
  const double sums = 8 * std::sqrt(static_cast<double>(n) + 1) * Epsilon(DType::kF32) +
                      (t.rows == DType::kBF16 ? 1e-5 : 0.0);
  for (size_t i = 0; i < expected.size(); ++i) {
    const double bound =
        sums * (1 + std::abs(expected[i])) + 2 * Epsilon(out) * std::abs(expected[i]);
    if (!(std::abs(actual[i] - expected[i]) <= bound)) {
      return ::testing::AssertionFailure() << "element " << i << " of " << expected.size() << ": "
                                           << actual[i] << " instead of " << expected[i];
    }
  }
  return ::testing::AssertionSuccess();
}

int64_t RoundUp16(int64_t n) { return (n + 15) / 16 * 16; }

TEST(CudaLinearTest, DenseMatchesDoubleArithmetic) {
  Random random(1);
  for (const Types& t : kLinearTypes) {
    for (const auto& [rows, in, out] : std::vector<std::tuple<int, int, int>>{{1, 1, 1},
                                                                              {2, 3, 5},
                                                                              {7, 16, 16},
                                                                              {8, 33, 17},
                                                                              {9, 64, 63},
                                                                              {63, 24, 65},
                                                                              {64, 128, 96},
                                                                              {65, 250, 130},
                                                                              {200, 31, 320}}) {
      for (const bool bias : {false, true}) {
        const DType out_type = bias ? t.rows : DType::kF32;
        const BankCase bank({in}, {out}, false, bias, t.weights, random);
        DeviceRows x(rows, in, in, t.rows, random.Normals(int64_t{rows} * in));
        DeviceRows y(rows, out, out + 3, out_type);
        LaunchLinear({.bank = bank.bank.get(), .input = x.view(), .output = y.view()}, nullptr);
        const RowsView result = y.Fetch();
        const RowsView input = x.Fetch();
        for (int r = 0; r < rows; ++r) {
          ASSERT_TRUE(SumsNear(RowOf(result, r, out),
                               bank.Expected(0, RowOf(input, r, in), ActivationKind::kNone), t,
                               out_type, in))
              << Name(t.rows) << " x " << Name(t.weights) << ", " << rows << " x " << in << " x "
              << out << ", row " << r;
        }
        ASSERT_TRUE(y.OthersUntouched(rows, std::vector<int64_t>(rows, out)));
      }
    }
  }
}

// Every tile size, rows with every alignment and both output types must have the same bits.
TEST(CudaLinearTest, TilesAndAlignmentsGiveTheSameBits) {
  Random random(2);
  for (const auto& [rows, in, out] :
       std::vector<std::tuple<int, int, int>>{{150, 200, 330}, {9, 64, 100}, {1, 40, 17}}) {
    const BankCase bank({in}, {out}, false, true, DType::kBF16, random);
    const std::vector<float> values = random.Normals(int64_t{rows} * in);
    DeviceRows wide(rows, in, (in + 7) / 8 * 8, DType::kBF16, values);
    DeviceRows narrow(rows, in, (in + 7) / 8 * 8, DType::kBF16, values, 1);
    DeviceRows expected(rows, out, out, DType::kF32);
    LaunchLinear({.bank = bank.bank.get(), .input = narrow.view(), .output = expected.view()},
                 nullptr);
    const RowsView bits = expected.Fetch();
    for (const LinearTile tile : kTiles) {
      for (const int64_t stride : {int64_t{out}, RoundUp16(out)}) {
        DeviceRows y(rows, out, stride, DType::kF32);
        LaunchLinear({.bank = bank.bank.get(), .input = wide.view(), .output = y.view()}, tile,
                     nullptr);
        const RowsView result = y.Fetch();
        for (int r = 0; r < rows; ++r) {
          ASSERT_TRUE(SameBits(result, bits, r, r, out))
              << "tile " << static_cast<int>(tile) << ", row " << r << " of " << rows;
        }
        ASSERT_TRUE(y.OthersUntouched(rows, std::vector<int64_t>(rows, out)));
      }
      DeviceRows rounded(rows, out, RoundUp16(out), DType::kBF16);
      LaunchLinear({.bank = bank.bank.get(), .input = wide.view(), .output = rounded.view()}, tile,
                   nullptr);
      const RowsView result = rounded.Fetch();
      for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < out; ++c) {
          const float exact = reinterpret_cast<const float*>(bits.row(r))[c];
          ASSERT_EQ(reinterpret_cast<const Bf16*>(result.row(r))[c], Bf16FromF32(exact));
        }
      }
    }
  }
}

// Settings of the epilogue: each form that is compiled for its own (linear_params.h), and the
// general one.
struct Epilogue {
  bool gated;
  Activation activation;
};

std::vector<Epilogue> Epilogues() {
  std::vector<Epilogue> all;
  for (const ActivationKind kind :
       {ActivationKind::kNone, ActivationKind::kSilu, ActivationKind::kGelu,
        ActivationKind::kGeluTanh, ActivationKind::kRelu, ActivationKind::kTanh,
        ActivationKind::kRelu2}) {
    all.push_back({false, kind});
    all.push_back({true, kind});
  }
  Activation a = GeneralActivation();
  all.push_back({true, a});
  a.limit_after = true;
  all.push_back({true, a});
  a.slope = 1.0f;
  all.push_back({true, a});
  a.kind = ActivationKind::kGelu;
  all.push_back({true, a});
  return all;
}

// Computes the layer with every tile and compares the bits with those of the smallest tile. The
// rows of the output are `stride` elements apart.
void ExpectTilesAgree(const BankCase& bank, const Activation& activation, int rows, bool pad,
                      DType type, int64_t stride, const RowsView& input) {
  const int out = bank.bank->shape().out_features[0];
  const int64_t columns = pad ? RoundUp16(out) : out;
  LinearArgs args{.bank = bank.bank.get(),
                  .input = input,
                  .output = {},
                  .activation = activation,
                  .pad_output = pad};
  args.input.rows = rows;
  DeviceRows expected(rows, out, RoundUp16(out), type);
  args.output = expected.view();
  LaunchLinear(args, kTiles[0], nullptr);
  const RowsView bits = expected.Fetch();
  for (const LinearTile tile : kTiles) {
    DeviceRows y(rows, out, stride, type);
    args.output = y.view();
    LaunchLinear(args, tile, nullptr);
    const RowsView result = y.Fetch();
    for (int r = 0; r < rows; ++r) {
      ASSERT_TRUE(SameBits(result, bits, r, r, columns))
          << "tile " << static_cast<int>(tile) << ", row " << r << " of " << rows << ", " << out
          << " outputs, gated " << bank.bank->shape().gated << ", activation "
          << static_cast<int>(activation.kind);
    }
    ASSERT_TRUE(y.OthersUntouched(rows, std::vector<int64_t>(rows, columns)));
  }
}

// All tile sizes must have the same bits after the epilogue.
TEST(CudaLinearTest, EpiloguesGiveTheSameBits) {
  Random random(12);
  constexpr int kIn = 72;
  bool pad = false;
  for (const auto& [gated, activation] : Epilogues()) {
    for (const auto& [rows, out] :
         std::vector<std::pair<int, int>>{{150, 330}, {70, 37}, {3, 64}}) {
      const DeviceRows x(rows, kIn, kIn, DType::kBF16, random.Normals(int64_t{rows} * kIn));
      const BankCase bank({kIn}, {out}, gated, pad, DType::kBF16, random);
      ExpectTilesAgree(bank, activation, rows, pad, DType::kBF16, RoundUp16(out), x.view());
      if (HasFatalFailure()) return;
      pad = !pad;
    }
  }
}

// Numbers of rows and outputs at and beside the borders of tiles, warpgroups and blocks of weights,
// in both output types, with rows that are aligned and that are not.
TEST(CudaLinearTest, BordersOfTilesGiveTheSameBits) {
  Random random(16);
  constexpr int kIn = 24;
  const DeviceRows x(300, kIn, kIn, DType::kBF16, random.Normals(300 * kIn));
  constexpr int kRows[] = {0, 1, 9, 64, 129, 193, 300};
  constexpr ActivationKind kKinds[] = {ActivationKind::kNone, ActivationKind::kGelu,
                                       ActivationKind::kSilu, ActivationKind::kRelu,
                                       ActivationKind::kGeluTanh};
  int turn = 0;
  for (const int out : {64, 90, 129, 160, 185, 192, 200, 250, 311, 320}) {
    for (const bool gated : {false, true}) {
      const BankCase bank({kIn}, {out}, gated, turn % 2 == 0, DType::kBF16, random);
      for (const DType type : {DType::kBF16, DType::kF32}) {
        for (int i = 0; i < 2; ++i, ++turn) {
          ExpectTilesAgree(bank, kKinds[turn % 5], kRows[turn % 7], turn % 3 == 0, type,
                           RoundUp16(out) + (turn % 4 == 3 ? 1 : 0), x.view());
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Returns act(values) as computed by a layer that has no inputs but zeros and `values` as biases.
std::vector<float> ActivateOnDevice(const std::vector<float>& values, ActivationKind kind,
                                    LinearTile tile) {
  const int n = static_cast<int>(values.size());
  auto bank =
      std::move(cuda::CudaLinearBank::Create({{8}, {n}, false, true, DType::kBF16})).value();
  bank->LoadBias(0, LinearBank::Half::kMain, 0, MakeTensor(values, {n}));
  const DeviceRows x(1, 8, 8, DType::kBF16, std::vector<float>(8, 0.0f));
  DeviceRows y(1, n, RoundUp16(n), DType::kBF16);
  LaunchLinear({.bank = bank.get(), .input = x.view(), .output = y.view(), .activation = kind},
               tile, nullptr);
  std::vector<float> results;
  for (const double v : RowOf(y.Fetch(), 0, n)) results.push_back(static_cast<float>(v));
  return results;
}

// Activations whose results are rounded to bf16 use fewer instructions. Their results may differ
// from the rounded exact ones only next to a tie.
TEST(CudaLinearTest, RoundedActivationsDifferNextToTiesOnly) {
  struct Case {
    ActivationKind kind;
    double from;      // The error is relative from this argument on, and absolute below.
    double relative;  // of the result before it is rounded
    double absolute;
  };
  const Case cases[] = {{ActivationKind::kGelu, -5.6, 8e-6, 1e-12},
                        {ActivationKind::kGeluTanh, -5.0, 8e-6, 1e-12},
                        {ActivationKind::kSilu, -80.0, 1.2e-5, 1e-32}};
  Random random(17);
  std::vector<float> values;
  for (uint32_t i = 0; i < 0x10000; ++i) values.push_back(F32FromBf16(static_cast<Bf16>(i)));
  const size_t representable = values.size();
  for (const float v : random.Normals(60000)) values.push_back(v);
  for (const float v : random.Normals(20000, 3.0)) values.push_back(v);
  for (const Case& c : cases) {
    const auto exact = [&](double x) {
      if (c.kind == ActivationKind::kGelu) return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
      const double u = std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x);
      return x / (1.0 + std::exp(c.kind == ActivationKind::kSilu ? -x : -2.0 * u));
    };
    const std::vector<float> results = ActivateOnDevice(values, c.kind, LinearTile::kRows8);
    const std::vector<float> again = ActivateOnDevice(values, c.kind, LinearTile::kWarpgroup256);
    ASSERT_EQ(std::memcmp(results.data(), again.data(), results.size() * sizeof(float)), 0);
    int differ = 0;
    double largest = 0.0;
    for (size_t i = 0; i < values.size(); ++i) {
      const float x = values[i];
      if (!std::isfinite(x)) {
        ASSERT_FALSE(std::isfinite(results[i])) << x;
        continue;
      }
      const double y = exact(x);
      const double ulp = std::ldexp(1.0, std::max(-126, std::ilogb(y)) - 7);
      // Results below the smallest normal number may be 0.
      const double allowed =
          (x >= c.from ? c.relative * std::abs(y) : c.absolute) + (std::abs(y) < 2e-38 ? 2e-38 : 0);
      const double error = std::abs(results[i] - y);
      ASSERT_LE(error, 0.5 * ulp + allowed) << "of " << x << ": " << results[i];
      if (x >= c.from && std::abs(y) > 1e-37) largest = std::max(largest, (error / ulp - 0.5));
      if (i >= representable && i < representable + 60000) {
        differ += results[i] != F32FromBf16(Bf16FromF32(static_cast<float>(y)));
      }
    }
    RecordProperty("differ_" + std::to_string(static_cast<int>(c.kind)), differ);
    EXPECT_LT(differ, 60);  // 0.1 percent
    EXPECT_LT(largest, 3e-3);
  }
}

// Returns routings of all rows to the first expert, to the last, to every expert, to some experts,
// and to none.
std::vector<std::vector<std::vector<int>>> AdversarialRoutings(int rows, int experts,
                                                               Random& random) {
  std::vector<std::vector<int>> first(rows, {0}), last(rows, {experts - 1}), every(rows),
      some(rows), none(rows);
  for (int r = 0; r < rows; ++r) {
    for (int e = 0; e < experts; ++e) {
      every[r].push_back(e);
      if (random.Below(3) == 0) some[r].push_back(e);
    }
  }
  return {first, last, every, some, none};
}

// Computes `rows` rows of width `model` with the experts' two matrices, and checks both products.
void CheckExperts(const Types& t, const BankCase& up, const BankCase& down, int model, int rows,
                  const std::vector<std::vector<int>>& routing, int spare, const Activation& kind,
                  LinearTile tile, Random& random) {
  const int experts = up.bank->num_experts();
  const DevicePlan plan(experts, routing, spare);
  const int64_t n = plan.assignments();
  const int widest =
      *std::max_element(up.bank->shape().out_features.begin(), up.bank->shape().out_features.end());
  DeviceRows x(rows, model, model, t.rows, random.Normals(int64_t{rows} * model));
  DeviceRows hidden(plan.plan.capacity, widest, RoundUp16(widest), t.rows);
  DeviceRows results(plan.plan.capacity, model, model, t.rows);
  LaunchLinear({.bank = up.bank.get(),
                .plan = &plan.plan,
                .gather = true,
                .input = x.view(),
                .output = hidden.view(),
                .activation = kind,
                .pad_output = true},
               tile, nullptr);
  LaunchLinear({.bank = down.bank.get(),
                .plan = &plan.plan,
                .input = hidden.view(),
                .output = results.view()},
               tile, nullptr);
  const RowsView input = x.Fetch();
  const RowsView middle = hidden.Fetch();
  const RowsView output = results.Fetch();
  std::vector<int64_t> written;
  for (int64_t a = 0; a < n; ++a) {
    const int e = plan.expert[a];
    const int width = up.bank->shape().out_features[e];
    written.push_back(RoundUp16(width));
    // Check a sample of the rows, and all rows near the edges of tiles.
    if (n > 40 && a % 7 != 0 && a % 64 > 1 && a % 64 < 62) continue;
    const std::vector<double> h = RowOf(middle, a, width);
    ASSERT_TRUE(
        SumsNear(h, up.Expected(e, RowOf(input, plan.row[a], model), kind), t, t.rows, model))
        << "hidden, assignment " << a << " of " << n << ", expert " << e << ", width " << model;
    for (const double v : RowOf(middle, a, RoundUp16(width))) ASSERT_FALSE(std::isnan(v));
    ASSERT_TRUE(SumsNear(RowOf(output, a, model), down.Expected(e, h, ActivationKind::kNone), t,
                         t.rows, width))
        << "results, assignment " << a << " of " << n << ", expert " << e << ", width " << model;
  }
  ASSERT_TRUE(hidden.OthersUntouched(n, written));
  ASSERT_TRUE(results.OthersUntouched(n, std::vector<int64_t>(n, model)));
}

TEST(CudaLinearTest, UnequalExpertsMatchDoubleArithmetic) {
  Random random(3);
  const std::vector<int> widths = {1, 3, 8, 24, 33, 64, 200};
  const int experts = static_cast<int>(widths.size());
  const Activation kinds[] = {ActivationKind::kSilu,     ActivationKind::kGelu,
                              ActivationKind::kGeluTanh, ActivationKind::kRelu,
                              ActivationKind::kTanh,     ActivationKind::kRelu2,
                              ActivationKind::kNone,     GeneralActivation()};
  constexpr int kRows[] = {1, 2, 7, 8, 9, 63, 64, 65};
  int turn = 0;
  for (const Types& t : kLinearTypes) {
    for (const int model : {8, 12, 64, 96, 128, 192, 256}) {
      const bool gated = turn % 3 != 0;
      const BankCase up({model}, widths, gated, turn % 2 == 0, t.weights, random);
      const BankCase down(widths, std::vector<int>(widths.size(), model), false, turn % 2 == 0,
                          t.weights, random);
      for (int i = 0; i < 3; ++i, ++turn) {
        const int rows = kRows[turn % 8];
        const auto routings = AdversarialRoutings(rows, experts, random);
        CheckExperts(t, up, down, model, rows, routings[turn % 5], turn % 4 * 13, kinds[turn % 6],
                     turn % 2 == 0 ? LinearTile::kAuto : kTiles[turn % std::size(kTiles)], random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(CudaLinearTest, ManyRowsOfOneExpert) {
  Random random(4);
  const std::vector<int> widths = {24, 3, 130};
  const BankCase up({64}, widths, true, true, DType::kBF16, random);
  const BankCase down(widths, {64, 64, 64}, false, true, DType::kBF16, random);
  for (const LinearTile tile : kTiles) {
    CheckExperts({DType::kBF16, DType::kBF16}, up, down, 64, 200,
                 std::vector<std::vector<int>>(200, {2}), 5, ActivationKind::kSilu, tile, random);
    if (HasFatalFailure()) return;
  }
}

// More experts than the lanes that search for a tile's expert handle at once.
TEST(CudaLinearTest, ManyExperts) {
  Random random(5);
  for (const int experts : {31, 129, 300}) {
    std::vector<int> widths;
    for (int e = 0; e < experts; ++e) widths.push_back(1 + random.Below(20));
    const BankCase up({16}, widths, true, false, DType::kBF16, random);
    const BankCase down(widths, std::vector<int>(widths.size(), 16), false, false, DType::kBF16,
                        random);
    std::vector<std::vector<int>> routing(12);
    for (auto& r : routing) {
      for (int i = 0; i < 3; ++i) r.push_back(random.Below(experts));
    }
    CheckExperts({DType::kBF16, DType::kBF16}, up, down, 16, 12, routing, 3, ActivationKind::kSilu,
                 LinearTile::kAuto, random);
    if (HasFatalFailure()) return;
  }
}

// More tiles than the device has multiprocessors, so that persistent blocks compute several tiles,
// with few and with many stages, full and partial.
TEST(CudaLinearTest, ManyTiles) {
  Random random(9);
  std::vector<int> widths;
  for (int e = 0; e < 80; ++e) widths.push_back(1 + random.Below(300));
  const BankCase up({24}, widths, false, true, DType::kBF16, random);
  const BankCase down(widths, std::vector<int>(widths.size(), 24), false, true, DType::kBF16,
                      random);
  std::vector<std::vector<int>> routing(70);
  for (size_t r = 0; r < routing.size(); ++r) {
    for (int e = 0; e < 80; ++e) {
      if (e < 4 || (r < 3 && e % 3 != 0)) routing[r].push_back(e);
    }
  }
  std::vector<std::vector<int>> few(3);
  for (auto& r : few) {
    for (int e = 0; e < 80; ++e) r.push_back(e);
  }
  for (const LinearTile tile : kWarpgroupTiles) {
    for (const auto& routes : {routing, few}) {
      CheckExperts({DType::kBF16, DType::kBF16}, up, down, 24, static_cast<int>(routes.size()),
                   routes, 3, ActivationKind::kGelu, tile, random);
      if (HasFatalFailure()) return;
    }
  }
}

// Returns whether all counters of the bank's tiles are 0.
bool CountersAreZero(const cuda::CudaLinearBank& bank) {
  constexpr int kCount = cuda::TileCounters::kStreams * cuda::TileCounters::kStride;
  std::vector<int32_t> values(kCount, 1);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(values.data(), bank.tile_counters().data(), kCount * sizeof(int32_t),
                       cudaMemcpyDeviceToHost),
            cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return values == std::vector<int32_t>(kCount, 0);
}

// The order of the tiles must not influence results, in any order of threads and blocks, and each
// launch must leave the counters as it found them.
TEST(CudaLinearTest, OrdersOfTilesGiveTheSameBits) {
  Random random(18);
  std::vector<int> widths;
  // More tiles than multiprocessors.
  constexpr int kExperts = 150;
  for (int e = 0; e < kExperts; ++e) widths.push_back(e < 2 ? 320 : 1 + random.Below(200));
  const BankCase bank({70}, widths, false, true, DType::kBF16, random);
  std::vector<std::vector<int>> routing(200);
  for (size_t r = 0; r < routing.size(); ++r) {
    for (int e = 0; e < kExperts; ++e) {
      if (e < 2 || (r < 2 && e % 20 != 1)) routing[r].push_back(e);
    }
  }
  const DevicePlan plan(kExperts, routing, 5);
  const DeviceRows x(200, 70, 72, DType::kBF16, random.Normals(200 * 70));
  const auto run = [&](LinearTile tile, cuda::TileOrder order, DeviceRows& y, cudaStream_t stream) {
    LaunchLinear({.bank = bank.bank.get(),
                  .plan = &plan.plan,
                  .gather = true,
                  .input = x.view(),
                  .output = y.view(),
                  .activation = ActivationKind::kGelu},
                 tile, stream, order);
  };
  DeviceRows expected(plan.plan.capacity, 320, 320, DType::kBF16);
  run(LinearTile::kRows8, cuda::TileOrder::kAuto, expected, nullptr);
  const RowsView bits = expected.Fetch();
  const auto expect_same = [&](DeviceRows& y) {
    const RowsView result = y.Fetch();
    for (int64_t a = 0; a < plan.assignments(); ++a) {
      ASSERT_TRUE(SameBits(result, bits, a, a, widths[plan.expert[a]])) << "assignment " << a;
    }
    ASSERT_TRUE(CountersAreZero(*bank.bank));
  };
  for (const LinearTile tile : kWarpgroupTiles) {
    DeviceRows fixed(plan.plan.capacity, 320, 320, DType::kBF16);
    run(tile, cuda::TileOrder::kFixed, fixed, nullptr);
    expect_same(fixed);
    cuda::InEveryOrder([&] {
      DeviceRows y(plan.plan.capacity, 320, 320, DType::kBF16);
      run(tile, cuda::TileOrder::kDynamic, y, nullptr);
      expect_same(y);
    });
    if (HasFatalFailure()) return;
  }
  // More streams than there are counters.
  constexpr int kStreams = cuda::TileCounters::kStreams + 2;
  std::vector<cudaStream_t> streams(kStreams);
  std::vector<std::unique_ptr<DeviceRows>> y;
  std::set<const int32_t*> counters;
  for (cudaStream_t& stream : streams) {
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    y.push_back(std::make_unique<DeviceRows>(plan.plan.capacity, 320, 320, DType::kBF16));
    run(LinearTile::kWarpgroup128, cuda::TileOrder::kDynamic, *y.back(), stream);
    counters.insert(bank.bank->tile_counters().Of(stream));
  }
  // The default stream has one counter; the streams without one have a null pointer.
  EXPECT_EQ(counters.size(), size_t{cuda::TileCounters::kStreams});
  EXPECT_EQ(counters.count(bank.bank->tile_counters().Of(nullptr)), size_t{0});
  EXPECT_EQ(counters.count(nullptr), size_t{1});
  for (const auto& rows : y) expect_same(*rows);
  for (const cudaStream_t stream : streams) {
    ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }
}

#if defined(MOESERVE_CUDA_EMULATION)

constexpr int kScheduleRows = 64, kScheduleOutputs = 128;

// Each warp of the block is a worker. Counts how often each tile is taken, at [row][block of 64
// outputs].
__global__ void TakeTilesKernel(const cuda::LinearParams p, int* taken, int blocks) {
  const int worker = static_cast<int>(threadIdx.x) / 32;
  cuda::TileSchedule<kScheduleRows, kScheduleOutputs> schedule(p, worker,
                                                               static_cast<int>(blockDim.x) / 32);
  cuda::LinearTileRange tile = schedule.First();
  while (tile.expert >= 0) {
    schedule.Fetch();
    // Some workers are slower.
    for (int i = 0; i < worker * worker; ++i) __syncwarp();
    if (threadIdx.x % 32 == 0) {
      atomicAdd(&taken[tile.row * blocks + tile.image_row / cuda::kImageBlock], 1);
    }
    tile = schedule.Next();
  }
}

// Each tile must be taken exactly once, whatever the order of the workers, also if there are fewer
// tiles than workers or none.
TEST(CudaLinearTest, SchedulesTakeEachTileOnce) {
  constexpr int kWorkers = 9, kBlocks = 5;
  Random random(19);
  std::vector<int> widths;
  for (int e = 0; e < 40; ++e) widths.push_back(e < 2 ? 320 : 1 + random.Below(300));
  const BankCase many({8}, widths, false, false, DType::kBF16, random);
  const BankCase one({8}, {320}, false, false, DType::kBF16, random);
  const cuda::DeviceArray<int> counter(std::vector<int>{0});
  for (const int rows : {0, 1, 5, 200}) {
    std::vector<std::vector<int>> routing(static_cast<size_t>(rows));
    for (int r = 0; r < rows; ++r) {
      for (int e = 0; e < 40; ++e) {
        if (e == 1 || (r < 5 && e % 3 != 0)) routing[r].push_back(e);
      }
    }
    const DevicePlan plan(40, routing, 3);
    const DeviceRows x(std::max(rows, 1), 8, 8, DType::kBF16);
    for (const bool routed : {true, false}) {
      if (!routed && rows == 0) continue;
      const BankCase& bank = routed ? many : one;
      DeviceRows y(plan.plan.capacity, 320, 320, DType::kBF16);
      RowsView input = x.view();
      input.rows = rows;
      cuda::LinearParams p = cuda::internal::LinearParamsOf({.bank = bank.bank.get(),
                                                             .plan = routed ? &plan.plan : nullptr,
                                                             .gather = routed,
                                                             .input = input,
                                                             .output = y.view()});
      // The number of tiles that begin at [row][block].
      const int all = routed ? plan.assignments() : rows;
      std::vector<int> expected(static_cast<size_t>(all * kBlocks + 1));
      for (int e = 0; e < bank.bank->num_experts(); ++e) {
        const int begin = routed ? plan.offsets[e] : 0, end = routed ? plan.offsets[e + 1] : rows;
        for (int r = begin; r < end; r += kScheduleRows) {
          for (int b = 0; b < bank.bank->entry(e).row_blocks; b += 2) expected[r * kBlocks + b] = 1;
        }
      }
      for (int* const c : {static_cast<int*>(nullptr), counter.data()}) {
        p.counter = c;
        cuda::InEveryOrder([&] {
          const cuda::DeviceArray<int> taken(std::vector<int>(expected.size()));
          cuda::Launch(TakeTilesKernel,
                       {.grid = dim3(1), .block = dim3(32 * kWorkers), .shared_bytes = 0}, p,
                       taken.data(), kBlocks);
          ASSERT_EQ(taken.Read(), expected);
          ASSERT_EQ(counter.Read(), std::vector<int>{0});
        });
        if (HasFatalFailure()) return;
      }
    }
  }
}

#endif

// A row's bits must be the same alone and with other rows, and NaN and Inf must stay in their rows.
TEST(CudaLinearTest, RowsDoNotInfluenceEachOther) {
  Random random(6);
  for (const Types& t : kLinearTypes) {
    const int in = 72, out = 150;
    const BankCase bank({in}, {out}, false, false, t.weights, random);
    std::vector<float> values = random.Normals(int64_t{300} * in);
    for (int i = 0; i < in; ++i) {
      values[5 * in + i] = std::numeric_limits<float>::quiet_NaN();
      values[77 * in + i] = std::numeric_limits<float>::infinity();
    }
    values[4 * in + 3] = std::numeric_limits<float>::infinity();
    DeviceRows x(300, in, in, t.rows, values);
    DeviceRows together(300, out, out, DType::kF32);
    LaunchLinear({.bank = bank.bank.get(), .input = x.view(), .output = together.view()}, nullptr);
    const RowsView all = together.Fetch();
    for (const int r : {0, 4, 5, 6, 76, 78, 299}) {
      RowsView one = x.view();
      one.data = x.view().row(r);
      one.rows = 1;
      DeviceRows alone(1, out, out, DType::kF32);
      LaunchLinear({.bank = bank.bank.get(), .input = one, .output = alone.view()}, nullptr);
      ASSERT_TRUE(SameBits(alone.Fetch(), all, 0, r, out)) << "row " << r;
      const float first = reinterpret_cast<const float*>(all.row(r))[0];
      ASSERT_EQ(std::isnan(first), r == 5);
      ASSERT_EQ(std::isinf(first), r == 4);
    }
    RowsView some = x.view();
    some.rows = 20;
    DeviceRows fewer(20, out, out, DType::kF32);
    LaunchLinear({.bank = bank.bank.get(), .input = some, .output = fewer.view()}, nullptr);
    const RowsView result = fewer.Fetch();
    for (int r = 0; r < 20; ++r) ASSERT_TRUE(SameBits(result, all, r, r, out)) << "row " << r;
  }
}

// Multiplying by the identity must return f32 rows bit by bit: tensor cores must not round away any
// part of them.
TEST(CudaLinearTest, RowsKeepTheirPrecision) {
  Random random(15);
  const int n = 70;
  std::vector<float> identity(n * n, 0.0f);
  for (int i = 0; i < n; ++i) identity[i * n + i] = 1.0f;
  auto bank =
      std::move(cuda::CudaLinearBank::Create({{n}, {n}, false, false, DType::kBF16})).value();
  bank->LoadWeight(0, LinearBank::Half::kMain, 0, MakeTensor(identity, {n, n}, DType::kBF16));
  for (const int rows : {3, 30, 90}) {
    DeviceRows x(rows, n, n, DType::kF32, random.Normals(int64_t{rows} * n));
    DeviceRows y(rows, n, n, DType::kF32);
    LaunchLinear({.bank = bank.get(), .input = x.view(), .output = y.view()}, nullptr);
    const RowsView result = y.Fetch();
    const RowsView input = x.Fetch();
    for (int r = 0; r < rows; ++r) ASSERT_TRUE(SameBits(result, input, r, r, n));
  }
}

// Padding columns must be zero even for a row of NaN.
TEST(CudaLinearTest, PaddingIsZero) {
  Random random(10);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Types& t : kLinearTypes) {
    for (const bool gated : {false, true}) {
      const BankCase bank({8}, {19}, gated, true, t.weights, random);
      DeviceRows x(3, 8, 8, t.rows, std::vector<float>(24, nan));
      DeviceRows y(3, 32, 40, t.rows);
      LaunchLinear({.bank = bank.bank.get(),
                    .input = x.view(),
                    .output = y.view(),
                    .activation = ActivationKind::kGelu,
                    .pad_output = true},
                   nullptr);
      const RowsView result = y.Fetch();
      for (int r = 0; r < 3; ++r) {
        const std::vector<double> row = RowOf(result, r, 32);
        for (int c = 0; c < 19; ++c) ASSERT_TRUE(std::isnan(row[c]));
        for (int c = 19; c < 32; ++c) ASSERT_EQ(row[c], 0.0);
      }
      ASSERT_TRUE(y.OthersUntouched(3, {32, 32, 32}));
    }
  }
}

// Layers wide enough for the wider of the two tiles of 64 rows, and for groups of 8 full blocks of
// 64 outputs.
TEST(CudaLinearTest, WideLayers) {
  Random random(14);
  const int in = 8, out = 100 * 128 - 40;
  const BankCase bank({in}, {out}, false, false, DType::kBF16, random);
  const std::vector<float> values = random.Normals(65 * in);
  DeviceRows x(65, in, in, DType::kBF16, values);
  DeviceRows expected(65, out, out, DType::kBF16);
  LaunchLinear({.bank = bank.bank.get(), .input = x.view(), .output = expected.view()},
               LinearTile::kRows128, nullptr);
  const RowsView all = expected.Fetch();
  for (const int r : {0, 63, 64}) {
    ASSERT_TRUE(SumsNear(RowOf(all, r, out),
                         bank.Expected(0, RowOf(x.Fetch(), r, in), ActivationKind::kNone),
                         {DType::kBF16, DType::kBF16}, DType::kBF16, in));
  }
  for (const LinearTile tile : {LinearTile::kRows8, LinearTile::kRows64}) {
    for (const int rows : {8, 65}) {
      RowsView first = x.view();
      first.rows = rows;
      DeviceRows y(rows, out, out, DType::kBF16);
      LaunchLinear({.bank = bank.bank.get(), .input = first, .output = y.view()}, tile, nullptr);
      const RowsView result = y.Fetch();
      for (int r = 0; r < rows; ++r) ASSERT_TRUE(SameBits(result, all, r, r, out));
    }
  }
}

TEST(CudaLinearTest, NoRowsWriteNothing) {
  Random random(7);
  const BankCase bank({16, 16}, {8, 24}, false, false, DType::kBF16, random);
  const DevicePlan plan(2, {}, 0);
  DeviceRows x(0, 16, 16, DType::kBF16);
  DeviceRows y(0, 24, 32, DType::kBF16);
  LaunchLinear({.bank = bank.bank.get(),
                .plan = &plan.plan,
                .gather = true,
                .input = x.view(),
                .output = y.view()},
               nullptr);
  y.Fetch();
  EXPECT_TRUE(y.OthersUntouched(0, {}));
}

TEST(CudaLinearTest, ReadsRowsOfTheImage) {
  Random random(8);
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    const BankCase bank({70}, {100}, false, false, type, random);
    const std::vector<int32_t> ids = {0, 99, 64, 63, 7, 7, -1};
    const cuda::DeviceMemory device_ids = Upload(ids.data(), ids.size() * sizeof(int32_t));
    DeviceRows y(static_cast<int64_t>(ids.size()), 70, 75, DType::kF32);
    cuda::LaunchReadRows(*bank.bank, device_ids.as<int32_t>(), static_cast<int>(ids.size()), 2.0f,
                         y.view(), nullptr);
    const RowsView result = y.Fetch();
    for (size_t i = 0; i < ids.size(); ++i) {
      for (int k = 0; k < 70; ++k) {
        ASSERT_EQ(reinterpret_cast<const float*>(result.row(static_cast<int64_t>(i)))[k],
                  2.0 * bank.main[0][std::max(ids[i], 0)][k]);
      }
    }
    ASSERT_TRUE(y.OthersUntouched(7, std::vector<int64_t>(7, 70)));
  }
}

}  // namespace
}  // namespace moeserve::testing
