// Dense and grouped linear layers compared with double arithmetic on the stored values.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>

#include "tests/reference/oracle.h"
#include "tests/support/backends.h"
#include "tests/support/compare.h"
#include "tests/support/device_rows.h"
#include "tests/support/plans.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

struct Types {
  DType rows;
  DType weights;
};

constexpr Types kLinearTypes[] = {{DType::kF32, DType::kF32},
                                  {DType::kF32, DType::kBF16},
                                  {DType::kF32, DType::kF16},
                                  {DType::kBF16, DType::kBF16}};

Matrix AsMatrix(const HostTensor& t) {
  Matrix m(static_cast<size_t>(t.shape[0]), std::vector<double>(t.shape[1]));
  for (int64_t i = 0; i < t.size(); ++i) m[i / t.shape[1]][i % t.shape[1]] = ElementAsF32(t, i);
  return m;
}

std::vector<double> AsVector(const HostTensor& t) {
  std::vector<double> v;
  for (int64_t i = 0; i < t.size(); ++i) v.push_back(ElementAsF32(t, i));
  return v;
}

// Returns the tolerance for a sum of n exact products: the rounding errors of the sum and of the
// result.
double SumTolerance(const Types& t, DType out, int64_t n) {
  return 4 * std::sqrt(static_cast<double>(n)) * Epsilon(DType::kF32) + 2 * Epsilon(out) +
         (t.rows == DType::kBF16 ? 1e-5 : 0.0);
}

class LinearTest : public ::testing::TestWithParam<BackendOptions> {
 protected:
  void SetUp() override { backend_ = std::move(CreateBackend(GetParam())).value(); }
  std::unique_ptr<Backend> backend_;
};

TEST_P(LinearTest, DenseMatchesDoubleArithmetic) {
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
        const HostTensor w = MakeTensor(random.Normals(int64_t{out} * in), {out, in}, t.weights);
        const HostTensor b = MakeTensor(random.Normals(out), {out});
        auto bank =
            std::move(backend_->NewLinearBank({{in}, {out}, false, bias, t.weights})).value();
        bank->LoadWeight(0, LinearBank::Half::kMain, 0, w);
        if (bias) bank->LoadBias(0, LinearBank::Half::kMain, 0, b);
        const std::vector<float> values = random.Normals(int64_t{rows} * in);
        const DeviceRows x = MakeRows(*backend_, rows, in, in, t.rows, &values);
        const DeviceRows y = MakeRows(*backend_, rows, out, out + 3, DType::kF32, nullptr);
        backend_->Linear({.bank = bank.get(), .input = x.view, .output = y.view});
        const Matrix matrix = AsMatrix(w);
        for (int r = 0; r < rows; ++r) {
          ASSERT_TRUE(RowNear(RowOf(*backend_, y.view, r, out),
                              OracleLinear(RowOf(*backend_, x.view, r, in), matrix,
                                           bias ? AsVector(b) : std::vector<double>{}),
                              SumTolerance(t, DType::kF32, in)))
              << Name(t.rows) << " x " << Name(t.weights) << ", " << rows << " x " << in << " x "
              << out << ", row " << r;
          // Memory behind the row must be unchanged.
          ASSERT_TRUE(std::isnan(RowOf(*backend_, y.view, r, out + 1)[out]));
        }
      }
    }
  }
}

std::vector<std::vector<std::vector<int>>> AdversarialRoutings(int rows, int experts,
                                                               Random& random) {
  std::vector<std::vector<std::vector<int>>> routings;
  std::vector<std::vector<int>> all_first(rows, {0}), all_last(rows, {experts - 1}), every, mixed;
  for (int r = 0; r < rows; ++r) {
    std::vector<int> all, some;
    for (int e = 0; e < experts; ++e) {
      all.push_back(e);
      if (random.Below(3) == 0) some.push_back(e);
    }
    if (some.empty()) some.push_back(random.Below(experts));
    every.push_back(all);
    mixed.push_back(some);
  }
  return {all_first, all_last, every, mixed};
}

std::vector<Activation> GatedActivations() {
  std::vector<Activation> all = {ActivationKind::kSilu,     ActivationKind::kGelu,
                                 ActivationKind::kGeluTanh, ActivationKind::kRelu,
                                 ActivationKind::kTanh,     ActivationKind::kRelu2};
  Activation general = ActivationKind::kSilu;
  general.limit = 0.75f;
  all.push_back(general);
  general.slope = 1.702f;
  general.up_offset = 1.0f;
  all.push_back(general);
  general.limit = 0.0f;
  all.push_back(general);
  Activation limited = ActivationKind::kGeluTanh;
  limited.limit = 0.5f;
  limited.up_offset = -0.25f;
  all.push_back(limited);
  Activation after = ActivationKind::kSilu;
  after.limit = 0.4f;
  after.limit_after = true;
  all.push_back(after);
  return all;
}

// Gated experts of very unequal widths: up and down projections, and the weighted sum of their
// outputs. Those of width 0 have no matrices, and products leave their rows as they are.
TEST_P(LinearTest, UnequalGatedExpertsMatchDoubleArithmetic) {
  Random random(2);
  const std::vector<int> widths = {0, 1, 3, 8, 24, 0, 33, 64, 130, 0};
  const int experts = static_cast<int>(widths.size());
  const int model = 24;
  std::vector<int> outputs;
  std::vector<int32_t> sources;
  for (const int width : widths) {
    outputs.push_back(width == 0 ? 0 : model);
    sources.push_back(width == 0 ? kAssignZeros : kAssignNothing);
  }
  const auto zeros = std::move(backend_->Upload(sources)).value();
  for (const Types& t : kLinearTypes) {
    for (const Activation& activation : GatedActivations()) {
      auto up =
          std::move(backend_->NewLinearBank({{model}, widths, true, true, t.weights})).value();
      auto down =
          std::move(backend_->NewLinearBank({widths, outputs, false, true, t.weights})).value();
      std::vector<Matrix> gate_w, up_w, down_w;
      std::vector<std::vector<double>> gate_b, up_b, down_b;
      for (int e = 0; e < experts; ++e) {
        const HostTensor g =
            MakeTensor(random.Normals(widths[e] * model, 0.3), {widths[e], model}, t.weights);
        const HostTensor u =
            MakeTensor(random.Normals(widths[e] * model, 0.3), {widths[e], model}, t.weights);
        const HostTensor d =
            MakeTensor(random.Normals(widths[e] * model, 0.3), {model, widths[e]}, t.weights);
        const HostTensor gb = MakeTensor(random.Normals(widths[e]), {widths[e]});
        const HostTensor ub = MakeTensor(random.Normals(widths[e]), {widths[e]});
        const HostTensor db = MakeTensor(random.Normals(model), {model});
        if (widths[e] > 0) {
          up->LoadWeight(e, LinearBank::Half::kGate, 0, g);
          up->LoadWeight(e, LinearBank::Half::kMain, 0, u);
          up->LoadBias(e, LinearBank::Half::kGate, 0, gb);
          up->LoadBias(e, LinearBank::Half::kMain, 0, ub);
          down->LoadWeight(e, LinearBank::Half::kMain, 0, d);
          down->LoadBias(e, LinearBank::Half::kMain, 0, db);
        }
        gate_w.push_back(AsMatrix(g));
        up_w.push_back(AsMatrix(u));
        down_w.push_back(AsMatrix(d));
        gate_b.push_back(AsVector(gb));
        up_b.push_back(AsVector(ub));
        down_b.push_back(AsVector(db));
      }
      for (int rows : {1, 7, 65}) {
        const std::vector<float> values = random.Normals(int64_t{rows} * model);
        const DeviceRows x = MakeRows(*backend_, rows, model, model, t.rows, &values);
        for (const auto& routing : AdversarialRoutings(rows, experts, random)) {
          const Grouped g = MakePlan(*backend_, experts, routing);
          const int64_t n = g.plan.capacity;
          const DeviceRows hidden = MakeRows(*backend_, n, 130, 144, t.rows, nullptr);
          const DeviceRows results = MakeRows(*backend_, n, model, model, t.rows, nullptr);
          const DeviceRows sum = MakeRows(*backend_, rows, model, model, DType::kF32, nullptr);
          backend_->Linear({.bank = up.get(),
                            .plan = &g.plan,
                            .gather = true,
                            .input = x.view,
                            .output = hidden.view,
                            .activation = activation,
                            .pad_output = true});
          backend_->Linear(
              {.bank = down.get(), .plan = &g.plan, .input = hidden.view, .output = results.view});
          const RoutingPlan host = backend_->HostPlan(0);
          for (int a = 0; a < host.num_assignments; ++a) {
            if (widths[host.expert_of_assignment[a]] > 0) continue;
            for (const double value : RowOf(*backend_, results.view, a, model)) {
              ASSERT_TRUE(std::isnan(value)) << "assignment " << a;
            }
          }
          backend_->AssignRows({.plan = &g.plan,
                                .sources = static_cast<const int32_t*>(zeros->data()),
                                .input = x.view,
                                .output = results.view});
          backend_->Combine({.plan = &g.plan, .results = results.view, .output = sum.view});
          for (int r = 0; r < rows; ++r) {
            std::vector<double> expected(model, 0.0);
            for (int e : routing[r]) {
              if (widths[e] == 0) continue;
              const std::vector<double> row = RowOf(*backend_, x.view, r, model);
              std::vector<double> h = OracleLinear(row, gate_w[e], gate_b[e]);
              const std::vector<double> u = OracleLinear(row, up_w[e], up_b[e]);
              for (size_t i = 0; i < h.size(); ++i) {
                h[i] = OracleGated(activation, h[i], u[i]);
              }
              const std::vector<double> y = OracleLinear(h, down_w[e], down_b[e]);
              for (int i = 0; i < model; ++i) expected[i] += 0.25 * (e + 1) * y[i];
            }
            // Hidden units and each expert's output are rounded to the activation type.
            ASSERT_TRUE(RowNear(RowOf(*backend_, sum.view, r, model), expected,
                                t.rows == DType::kF32 ? 1e-5 : 2e-2))
                << Name(t.rows) << " x " << Name(t.weights) << ", row " << r << " of " << rows;
          }
        }
      }
    }
  }
}

// Each expert computes its own segment of the columns, as the heads of latent attention do.
TEST_P(LinearTest, SegmentsMatchDoubleArithmetic) {
  Random random(12);
  for (const Types& t : kLinearTypes) {
    for (const auto& [experts, in, out] :
         std::vector<std::array<int, 3>>{{1, 24, 40}, {3, 12, 20}, {5, 33, 7}, {4, 16, 16}}) {
      // Segments are wider than the experts' inputs and outputs.
      const int in_width = in + 8, out_width = out + 16;
      auto bank = std::move(backend_->NewLinearBank(
                                {{in}, std::vector<int>(experts, out), false, true, t.weights}))
                      .value();
      std::vector<Matrix> weights;
      std::vector<std::vector<double>> biases;
      for (int e = 0; e < experts; ++e) {
        const HostTensor w = MakeTensor(random.Normals(out * in, 0.3), {out, in}, t.weights);
        const HostTensor b = MakeTensor(random.Normals(out), {out});
        bank->LoadWeight(e, LinearBank::Half::kMain, 0, w);
        bank->LoadBias(e, LinearBank::Half::kMain, 0, b);
        weights.push_back(AsMatrix(w));
        biases.push_back(AsVector(b));
      }
      for (const int rows : {1, 9, 70}) {
        const std::vector<float> values = random.Normals(int64_t{rows} * experts * in_width);
        const DeviceRows x =
            MakeRows(*backend_, rows, experts * in_width, experts * in_width + 2, t.rows, &values);
        const std::vector<float> before(static_cast<size_t>(rows * experts * out_width), 7.0f);
        const DeviceRows y = MakeRows(*backend_, rows, experts * out_width, experts * out_width + 3,
                                      DType::kF32, &before);
        backend_->Linear({.bank = bank.get(), .input = x.view, .output = y.view, .segments = true});
        for (int r = 0; r < rows; ++r) {
          const std::vector<double> from = RowOf(*backend_, x.view, r, experts * in_width);
          const std::vector<double> to = RowOf(*backend_, y.view, r, experts * out_width);
          for (int e = 0; e < experts; ++e) {
            const auto begin = from.begin() + e * in_width;
            const auto result = to.begin() + e * out_width;
            ASSERT_TRUE(RowNear({result, result + out},
                                OracleLinear({begin, begin + in}, weights[e], biases[e]),
                                t.rows == DType::kF32 ? 1e-5 : 2e-2))
                << Name(t.rows) << " x " << Name(t.weights) << ", expert " << e << ", row " << r;
            for (int i = out; i < out_width; ++i) ASSERT_EQ(result[i], 7.0) << "untouched";
          }
        }
      }
    }
  }
}

void ExpectSameBits(const std::vector<double>& a, const std::vector<double>& b) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(double)), 0);
}

// A row must have the same bits whatever other rows the product has.
TEST_P(LinearTest, RowsDoNotInfluenceEachOther) {
  Random random(3);
  for (const Types& t : kLinearTypes) {
    const int in = 67, out = 150;
    const HostTensor w = MakeTensor(random.Normals(int64_t{out} * in), {out, in}, t.weights);
    auto bank = std::move(backend_->NewLinearBank({{in}, {out}, false, false, t.weights})).value();
    bank->LoadWeight(0, LinearBank::Half::kMain, 0, w);
    std::vector<float> values = random.Normals(int64_t{300} * in);
    for (int i = 0; i < in; ++i) {
      values[5 * in + i] = std::numeric_limits<float>::quiet_NaN();
      values[77 * in + i] = std::numeric_limits<float>::infinity();
    }
    const DeviceRows x = MakeRows(*backend_, 300, in, in, t.rows, &values);
    const DeviceRows together = MakeRows(*backend_, 300, out, out, DType::kF32, nullptr);
    backend_->Linear({.bank = bank.get(), .input = x.view, .output = together.view});
    for (int r : {0, 4, 6, 76, 78, 299}) {
      RowsView one = x.view;
      one.data = x.view.row(r);
      one.rows = 1;
      const DeviceRows alone = MakeRows(*backend_, 1, out, out, DType::kF32, nullptr);
      backend_->Linear({.bank = bank.get(), .input = one, .output = alone.view});
      ExpectSameBits(RowOf(*backend_, alone.view, 0, out), RowOf(*backend_, together.view, r, out));
      ASSERT_FALSE(HasFailure()) << "row " << r;
    }
  }
}

// A numeric error must reach its request: an activation must not turn a NaN into a number, nor an
// infinity that it should pass on into a finite number.
TEST_P(LinearTest, ActivationsKeepWhatIsNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity,
                                     1.0f};
  for (const DType type : {DType::kF32, DType::kBF16}) {
    const HostTensor w = MakeTensor(std::vector<float>(40, 1.0f), {40, 1}, type);
    for (const bool gated : {false, true}) {
      auto bank = std::move(backend_->NewLinearBank({{1}, {40}, gated, false, type})).value();
      bank->LoadWeight(0, LinearBank::Half::kMain, 0, w);
      if (gated) bank->LoadWeight(0, LinearBank::Half::kGate, 0, w);
      for (const ActivationKind activation :
           {ActivationKind::kNone, ActivationKind::kSilu, ActivationKind::kGelu,
            ActivationKind::kGeluTanh, ActivationKind::kRelu, ActivationKind::kTanh,
            ActivationKind::kRelu2}) {
        if (gated && activation == ActivationKind::kNone) continue;
        const DeviceRows x = MakeRows(*backend_, 4, 1, 1, type, &values);
        const DeviceRows y = MakeRows(*backend_, 4, 40, 40, type, nullptr);
        backend_->Linear(
            {.bank = bank.get(), .input = x.view, .output = y.view, .activation = activation});
        for (int i = 0; i < 40; ++i) {
          EXPECT_TRUE(std::isnan(RowOf(*backend_, y.view, 0, 40)[i]));
          // Without a gate, tanh is 1 for infinity, and ReLU is 0 for negative infinity.
          const bool tanh = activation == ActivationKind::kTanh && !gated;
          EXPECT_EQ(std::isfinite(RowOf(*backend_, y.view, 1, 40)[i]), tanh);
          EXPECT_EQ(std::isfinite(RowOf(*backend_, y.view, 2, 40)[i]),
                    tanh || ((activation == ActivationKind::kRelu ||
                              activation == ActivationKind::kRelu2) &&
                             !gated));
          EXPECT_TRUE(std::isfinite(RowOf(*backend_, y.view, 3, 40)[i]));
          EXPECT_NE(RowOf(*backend_, y.view, 3, 40)[i], 0.0);
        }
        ASSERT_FALSE(HasFailure())
            << Name(type) << ", gated " << gated << ", activation " << static_cast<int>(activation);
      }
    }
  }
}

// tanh of tiny, small and large numbers, at and around the boundary between both of its formulas.
TEST_P(LinearTest, TanhIsExactForAllMagnitudes) {
  const float boundary = 0.625f;
  std::vector<float> values = {0.0f, boundary, 1e30f, std::numeric_limits<float>::infinity()};
  values.push_back(std::nextafter(boundary, 0.0f));
  values.push_back(std::nextafter(boundary, 1.0f));
  for (float v = 1e-30f; v < 100.0f; v *= 1.37f) values.push_back(v);
  const auto positive = values.size();
  for (size_t i = 0; i < positive; ++i) values.push_back(-values[i]);
  const auto rows = static_cast<int64_t>(values.size());
  const HostTensor w = MakeTensor(std::vector<float>(17, 1.0f), {17, 1}, DType::kF32);
  auto bank = std::move(backend_->NewLinearBank({{1}, {17}, false, false, DType::kF32})).value();
  bank->LoadWeight(0, LinearBank::Half::kMain, 0, w);
  const DeviceRows x = MakeRows(*backend_, values, 1);
  const DeviceRows y = MakeRows(*backend_, rows, 17, 17, DType::kF32, nullptr);
  backend_->Linear(
      {.bank = bank.get(), .input = x.view, .output = y.view, .activation = ActivationKind::kTanh});
  const std::vector<float> results = HostRows(*backend_, y.view);
  for (size_t i = 0; i < results.size(); ++i) {
    const double exact = std::tanh(double{values[i / 17]});
    ASSERT_NEAR(results[i], exact, 4e-7 * std::abs(exact)) << "tanh of " << values[i / 17];
  }
}

// All backends, and devices whose dense layers a library computes.
std::vector<BackendOptions> LinearBackends() {
  std::vector<BackendOptions> all = AvailableBackends();
  const BackendOptions library{.device = "cuda_cublaslt"};
  if (CreateBackend(library).ok()) all.push_back(library);
  all.push_back({.device = "cuda_emulated_cublaslt"});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Backends, LinearTest, ::testing::ValuesIn(LinearBackends()),
                         [](const auto& info) { return BackendName(info.param); });

}  // namespace
}  // namespace moeserve::testing
