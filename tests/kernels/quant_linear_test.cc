// Linear layers with integer weights: compared with double arithmetic on the same integers, and
// bit-identical for a row whatever other rows there are, for every instruction set of the CPU and
// the CUDA device.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/registry.h"
#include "tests/reference/oracle.h"
#include "tests/support/backends.h"
#include "tests/support/compare.h"
#include "tests/support/device_rows.h"
#include "tests/support/integer_weights.h"
#include "tests/support/plans.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

constexpr Quantization kQuantTypes[] = {Quantization::kInt8, Quantization::kInt8Channel,
                                        Quantization::kInt4, Quantization::kInt4K};
constexpr DType kRowTypes[] = {DType::kF32, DType::kBF16};
using Half = LinearBank::Half;

// Returns the row as the kernels quantize it: groups of columns as int8 with one scale each. The
// arithmetic is the kernels' (f32, ties to even), so the integers are equal and only the sums are
// rounded differently.
std::vector<double> RoundedInput(const std::vector<double>& row, Quantization type) {
  std::vector<double> out;
  const auto group = static_cast<size_t>(QuantGroup(type));
  for (size_t begin = 0; begin < row.size(); begin += group) {
    const size_t end = std::min(row.size(), begin + group);
    float largest = 0.0f;
    for (size_t i = begin; i < end; ++i) {
      largest = std::max(largest, std::fabs(static_cast<float>(row[i])));
    }
    const float inverse = largest < 1e-35f ? 0.0f : 127.0f / largest;
    const float scale = largest * (1.0f / 127.0f);
    for (size_t i = begin; i < end; ++i) {
      const float level = std::nearbyint(static_cast<float>(row[i]) * inverse);
      out.push_back(static_cast<double>(level) * scale);
    }
  }
  return out;
}

struct Sums {
  std::vector<double> value;
  std::vector<double> size;  // sum of the magnitudes of the terms that are added in f32
};

Sums OracleSums(const std::vector<double>& row, const QuantizedMatrix& m,
                const std::vector<double>& bias) {
  const std::vector<double> x = RoundedInput(row, m.type);
  const int64_t group = QuantGroup(m.type);
  const std::vector<double> w = ElementsOf(m);
  Sums y;
  for (int64_t r = 0; r < m.rows; ++r) {
    double sum = bias.empty() ? 0.0 : bias[static_cast<size_t>(r)];
    double size = std::fabs(sum);
    for (int64_t begin = 0; begin < m.columns; begin += group) {
      double part = 0.0;
      for (int64_t c = begin; c < std::min(m.columns, begin + group); ++c) {
        part += x[static_cast<size_t>(c)] * w[static_cast<size_t>(r * m.columns + c)];
      }
      sum += part;
      size += std::fabs(part);
    }
    y.value.push_back(sum);
    y.size.push_back(size);
  }
  return y;
}

std::vector<double> Oracle(const std::vector<double>& row, const QuantizedMatrix& m,
                           const std::vector<double>& bias) {
  return OracleSums(row, m, bias).value;
}

// Returns the tolerance for the rounding errors of a sum over groups and of the result.
double Tolerance(Quantization type, int in, DType out) {
  const auto groups = static_cast<double>(QuantGroups(type, in));
  return 4 * std::sqrt(groups + 2) * Epsilon(DType::kF32) + 2 * Epsilon(out);
}

std::vector<double> Widened(const std::vector<float>& v) { return {v.begin(), v.end()}; }

LinearBankShape QuantShape(Quantization type, std::vector<int> in, std::vector<int> out, bool gated,
                           bool bias) {
  return {.in_features = std::move(in),
          .out_features = std::move(out),
          .gated = gated,
          .bias = bias,
          .weight_dtype = DType::kBF16,
          .quantization = type};
}

class QuantLinearTest : public ::testing::TestWithParam<BackendOptions> {
 protected:
  void SetUp() override { backend_ = std::move(CreateBackend(GetParam())).value(); }
  bool IsCpu() const { return GetParam().device == "cpu"; }
  std::unique_ptr<LinearBank> Bank(LinearBankShape shape) {
    return std::move(backend_->NewLinearBank(std::move(shape))).value();
  }
  std::unique_ptr<Backend> backend_;
};

TEST_P(QuantLinearTest, DenseMatchesDoubleArithmetic) {
  Random random(1);
  struct Size {
    int rows, in, out;
  };
  const Size sizes[] = {{1, 1, 1},     {2, 3, 5},     {3, 8, 16},    {4, 31, 17},     {5, 32, 48},
                        {6, 33, 63},   {7, 63, 64},   {8, 64, 65},   {13, 65, 80},    {1, 96, 130},
                        {63, 100, 33}, {65, 129, 96}, {200, 71, 70}, {197, 256, 144}, {4, 70, 16},
                        {5, 130, 7},   {6, 41, 12}};
  for (const Quantization type : kQuantTypes) {
    for (const DType rows_type : kRowTypes) {
      for (const Size& s : sizes) {
        for (const bool bias : {false, true}) {
          const IntegerWeight w = MakeWeight(random, type, s.out, s.in);
          const std::vector<float> b = random.Normals(s.out);
          const auto bank = Bank(QuantShape(type, {s.in}, {s.out}, false, bias));
          bank->LoadQuantized(0, Half::kMain, 0, w.integers);
          if (bias) bank->LoadBias(0, Half::kMain, 0, MakeTensor(b, {s.out}));
          const std::vector<float> values = random.Normals(int64_t{s.rows} * s.in);
          const DeviceRows x = MakeRows(*backend_, s.rows, s.in, s.in + 5, rows_type, &values);
          const DType out_type = s.rows % 2 == 0 ? DType::kF32 : rows_type;
          const DeviceRows y = MakeRows(*backend_, s.rows, s.out, s.out + 3, out_type, nullptr);
          backend_->Linear({.bank = bank.get(), .input = x.view, .output = y.view});
          for (int r = 0; r < s.rows; ++r) {
            ASSERT_TRUE(RowNear(RowOf(*backend_, y.view, r, s.out),
                                Oracle(RowOf(*backend_, x.view, r, s.in), w.integers,
                                       bias ? Widened(b) : std::vector<double>{}),
                                Tolerance(type, s.in, out_type)))
                << Name(type) << ", " << Name(rows_type) << ", " << s.rows << " x " << s.in << " x "
                << s.out << ", row " << r;
            // Memory behind the row must be unchanged.
            ASSERT_TRUE(
                std::isnan(RowOf(*backend_, y.view, r, s.out + 1)[static_cast<size_t>(s.out)]));
          }
        }
      }
    }
  }
}

// With one scale per row, a row of more than kWholeRow columns has several scales. Values of the
// largest magnitude show whether the sums of integers fit.
TEST_P(QuantLinearTest, RowsLongerThanAGroup) {
  Random random(7);
  const int in = kWholeRow + 70, out = 17;
  if (!IsCpu()) {
    for (const Quantization type : {Quantization::kInt8Channel, Quantization::kInt4K}) {
      const auto shape = QuantShape(type, {in}, {out}, false, false);
      EXPECT_TRUE(absl::IsUnimplemented(backend_->NewLinearBank(shape).status()));
    }
    return;
  }
  for (const Quantization type : {Quantization::kInt8Channel, Quantization::kInt4K}) {
    for (const int rows : {3, 8}) {
      const IntegerWeight w = MakeWeight(random, type, out, in);
      const auto bank = Bank(QuantShape(type, {in}, {out}, false, false));
      bank->LoadQuantized(0, Half::kMain, 0, w.integers);
      const auto ones = Bank(QuantShape(type, {in}, {out}, false, false));
      ones->LoadWeight(
          0, Half::kMain, 0,
          MakeTensor(std::vector<float>(static_cast<size_t>(out) * in, 1.0f), {out, in}));
      const std::vector<float> values = random.Normals(int64_t{rows} * in);
      const std::vector<float> large(static_cast<size_t>(rows) * in, -3.0f);
      const DeviceRows x = MakeRows(*backend_, rows, in, in, DType::kF32, &values);
      const DeviceRows same = MakeRows(*backend_, rows, in, in, DType::kF32, &large);
      const DeviceRows y = MakeRows(*backend_, rows, out, out, DType::kF32, nullptr);
      const DeviceRows sums = MakeRows(*backend_, rows, out, out, DType::kF32, nullptr);
      backend_->Linear({.bank = bank.get(), .input = x.view, .output = y.view});
      backend_->Linear({.bank = ones.get(), .input = same.view, .output = sums.view});
      for (int r = 0; r < rows; ++r) {
        EXPECT_TRUE(RowNear(RowOf(*backend_, y.view, r, out),
                            Oracle(RowOf(*backend_, x.view, r, in), w.integers, {}),
                            Tolerance(type, in, DType::kF32)));
        for (const double sum : RowOf(*backend_, sums.view, r, out))
          EXPECT_NEAR(sum / in, -3.0, 2e-3);
      }
    }
  }
}

// Weights and inputs of the largest integers show whether sums in few bits fit.
TEST_P(QuantLinearTest, LargestIntegers) {
  const int in = 160, out = 33;
  for (const Quantization type : kQuantTypes) {
    for (const int rows : {1, 8}) {
      for (const float weight : {1.0f, -1.0f}) {
        for (const float input : {3.0f, -3.0f}) {
          const auto bank = Bank(QuantShape(type, {in}, {out}, false, false));
          bank->LoadWeight(0, Half::kMain, 0,
                           MakeTensor(std::vector<float>(size_t{out} * in, weight), {out, in}));
          const std::vector<float> values(static_cast<size_t>(rows) * in, input);
          const DeviceRows x = MakeRows(*backend_, rows, in, in, DType::kF32, &values);
          const DeviceRows y = MakeRows(*backend_, rows, out, out, DType::kF32, nullptr);
          backend_->Linear({.bank = bank.get(), .input = x.view, .output = y.view});
          for (int r = 0; r < rows; ++r) {
            for (const double sum : RowOf(*backend_, y.view, r, out)) {
              EXPECT_NEAR(sum / in, weight * input, 4e-3) << Name(type) << ", row " << r;
            }
          }
        }
      }
    }
  }
}

void ExpectSameQuantBits(const std::vector<double>& a, const std::vector<double>& b) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(double)), 0);
}

// Weights quantized at load must equal integers from a file, also if they are loaded in parts that
// begin in the middle of a panel.
TEST_P(QuantLinearTest, NumbersAndTheirIntegersLoadAlike) {
  Random random(2);
  for (const Quantization type : kQuantTypes) {
    const int in = 75, parts[] = {9, 40, 30};
    const auto rounded = Bank(QuantShape(type, {in}, {79}, false, false));
    const auto stored = Bank(QuantShape(type, {in}, {79}, false, false));
    int row = 0;
    for (const int n : parts) {
      const IntegerWeight w = MakeWeight(random, type, n, in);
      rounded->LoadWeight(0, Half::kMain, row, w.numbers);
      stored->LoadQuantized(0, Half::kMain, row, w.integers);
      row += n;
    }
    const std::vector<float> values = random.Normals(7 * in);
    const DeviceRows x = MakeRows(*backend_, 7, in, in, DType::kBF16, &values);
    const DeviceRows a = MakeRows(*backend_, 7, 79, 79, DType::kF32, nullptr);
    const DeviceRows b = MakeRows(*backend_, 7, 79, 79, DType::kF32, nullptr);
    backend_->Linear({.bank = rounded.get(), .input = x.view, .output = a.view});
    backend_->Linear({.bank = stored.get(), .input = x.view, .output = b.view});
    for (int r = 0; r < 7; ++r) {
      ExpectSameQuantBits(RowOf(*backend_, a.view, r, 79), RowOf(*backend_, b.view, r, 79));
      EXPECT_NE(RowOf(*backend_, a.view, r, 79)[0], 0.0);
    }
  }
}

std::vector<std::vector<std::vector<int>>> Routings(int rows, int experts, Random& random) {
  std::vector<std::vector<int>> last(static_cast<size_t>(rows), {experts - 1}), every, mixed;
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
  return {last, every, mixed};
}

// Gated experts of very unequal widths: the up projection gathers its rows from tokens, the down
// projection reads one row per assignment, whose width depends on the expert.
TEST_P(QuantLinearTest, UnequalGatedExpertsMatchDoubleArithmetic) {
  Random random(3);
  const std::vector<int> widths = {1, 3, 8, 24, 33, 64, 67, 130};
  const int experts = static_cast<int>(widths.size());
  const int model = 72, widest = 130, stride = 144;
  for (const Quantization type : kQuantTypes) {
    const auto up = Bank(QuantShape(type, {model}, widths, true, true));
    const auto down =
        Bank(QuantShape(type, widths, std::vector<int>(widths.size(), model), false, true));
    std::vector<IntegerWeight> gate_w, up_w, down_w;
    std::vector<std::vector<float>> gate_b, up_b, down_b;
    for (int e = 0; e < experts; ++e) {
      gate_w.push_back(MakeWeight(random, type, widths[e], model));
      up_w.push_back(MakeWeight(random, type, widths[e], model));
      down_w.push_back(MakeWeight(random, type, model, widths[e]));
      gate_b.push_back(random.Normals(widths[e]));
      up_b.push_back(random.Normals(widths[e]));
      down_b.push_back(random.Normals(model));
      up->LoadWeight(e, Half::kGate, 0, gate_w[e].numbers);
      up->LoadQuantized(e, Half::kMain, 0, up_w[e].integers);
      down->LoadQuantized(e, Half::kMain, 0, down_w[e].integers);
      up->LoadBias(e, Half::kGate, 0, MakeTensor(gate_b[e], {widths[e]}));
      up->LoadBias(e, Half::kMain, 0, MakeTensor(up_b[e], {widths[e]}));
      down->LoadBias(e, Half::kMain, 0, MakeTensor(down_b[e], {model}));
    }
    for (const DType rows_type : kRowTypes) {
      for (const ActivationKind activation :
           {ActivationKind::kSilu, ActivationKind::kGelu, ActivationKind::kRelu,
            ActivationKind::kTanh, ActivationKind::kRelu2}) {
        for (const int rows : {1, 6, 41}) {
          const std::vector<float> values = random.Normals(int64_t{rows} * model);
          const DeviceRows x = MakeRows(*backend_, rows, model, model, rows_type, &values);
          for (const auto& routing : Routings(rows, experts, random)) {
            const Grouped g = MakePlan(*backend_, experts, routing);
            const int64_t n = g.plan.capacity;
            const DeviceRows hidden = MakeRows(*backend_, n, widest, stride, rows_type, nullptr);
            const DeviceRows results = MakeRows(*backend_, n, model, model, DType::kF32, nullptr);
            backend_->Linear({.bank = up.get(),
                              .plan = &g.plan,
                              .gather = true,
                              .input = x.view,
                              .output = hidden.view,
                              .activation = activation,
                              .pad_output = true});
            backend_->Linear({.bank = down.get(),
                              .plan = &g.plan,
                              .input = hidden.view,
                              .output = results.view});
            const RoutingPlan host = backend_->HostPlan(0);
            for (int64_t a = 0; a < host.num_assignments; ++a) {
              const int e = host.expert_of_assignment[a];
              const std::vector<double> row =
                  RowOf(*backend_, x.view, host.row_of_assignment[a], model);
              const Sums gate = OracleSums(row, gate_w[e].integers, Widened(gate_b[e]));
              const Sums main = OracleSums(row, up_w[e].integers, Widened(up_b[e]));
              const std::vector<double> actual = RowOf(*backend_, hidden.view, a, widths[e]);
              for (size_t i = 0; i < actual.size(); ++i) {
                const double act = OracleActivation(activation, gate.value[i]);
                // No activation has a slope above 1.2, and its own error is relative to its
                // argument.
                const double sums =
                    8 * Epsilon(DType::kF32) *
                    (1.2 * gate.size[i] * std::fabs(main.value[i]) + std::fabs(act) * main.size[i]);
                const double own = 1e-6 * std::fabs(gate.value[i] * main.value[i]);
                const double expected = act * main.value[i];
                ASSERT_NEAR(actual[i], expected,
                            sums + own + 2 * Epsilon(rows_type) * std::fabs(expected))
                    << Name(type) << ", " << Name(rows_type) << ", expert " << e << " of row "
                    << host.row_of_assignment[a] << ", unit " << i;
              }
              ASSERT_TRUE(RowNear(RowOf(*backend_, results.view, a, model),
                                  Oracle(actual, down_w[e].integers, Widened(down_b[e])),
                                  Tolerance(type, widths[e], DType::kF32)))
                  << Name(type) << ", " << Name(rows_type) << ", expert " << e;
            }
          }
        }
      }
    }
  }
}

// A row must have the same bits whatever other rows there are, and for any number of threads.
TEST_P(QuantLinearTest, RowsAndThreadsDoNotMatter) {
  const int in = 267, out = 150, rows = 300;
  for (const Quantization type : kQuantTypes) {
    for (const DType rows_type : kRowTypes) {
      std::vector<std::vector<double>> first;
      for (const int threads : {1, 2, 3}) {
        if (!IsCpu() && threads > 1) break;
        Random random(4);
        BackendOptions options = GetParam();
        options.threads = threads;
        const auto backend = std::move(CreateBackend(options)).value();
        const auto bank =
            std::move(backend->NewLinearBank(QuantShape(type, {in}, {out}, false, false))).value();
        bank->LoadWeight(0, Half::kMain, 0, MakeWeight(random, type, out, in).numbers);
        std::vector<float> values = random.Normals(int64_t{rows} * in);
        values[5 * in + 7] = std::numeric_limits<float>::quiet_NaN();
        values[77 * in + 266] = std::numeric_limits<float>::infinity();
        std::fill_n(values.begin() + 78 * in, in, 0.0f);
        const DeviceRows x = MakeRows(*backend, rows, in, in, rows_type, &values);
        const DeviceRows together = MakeRows(*backend, rows, out, out, DType::kF32, nullptr);
        backend->Linear({.bank = bank.get(), .input = x.view, .output = together.view});
        for (int r = 0; r < rows; ++r) {
          const std::vector<double> row = RowOf(*backend, together.view, r, out);
          if (threads == 1) first.push_back(row);
          ExpectSameQuantBits(row, first[static_cast<size_t>(r)]);
          ASSERT_EQ(std::isnan(row[0]), r == 5 || r == 77) << "row " << r;
          ASSERT_EQ(row[0] == 0.0, r == 78) << "row " << r;
        }
        for (const int begin : {0, 4, 6, 76, 78, 295}) {
          for (const int count : {1, 2, 3, 5}) {
            RowsView part = x.view;
            part.data = x.view.row(begin);
            part.rows = count;
            const DeviceRows alone = MakeRows(*backend, count, out, out, DType::kF32, nullptr);
            backend->Linear({.bank = bank.get(), .input = part, .output = alone.view});
            for (int i = 0; i < count; ++i) {
              ExpectSameQuantBits(RowOf(*backend, alone.view, i, out),
                                  RowOf(*backend, together.view, begin + i, out));
            }
            ASSERT_FALSE(HasFailure()) << count << " rows from " << begin;
          }
        }
      }
    }
  }
}

// A weight that no scale can represent makes the outputs of its row NaN, and no other outputs.
TEST_P(QuantLinearTest, WeightsThatAreNotFiniteShow) {
  Random random(5);
  for (const Quantization type : kQuantTypes) {
    const int in = 70, out = 40;
    std::vector<float> w = random.Normals(out * in);
    w[17 * in + 3] = std::numeric_limits<float>::quiet_NaN();
    w[18 * in + 69] = std::numeric_limits<float>::infinity();
    const auto bank = Bank(QuantShape(type, {in}, {out}, false, false));
    bank->LoadWeight(0, Half::kMain, 0, MakeTensor(w, {out, in}));
    const std::vector<float> values = random.Normals(in);
    const DeviceRows x = MakeRows(*backend_, 1, in, in, DType::kF32, &values);
    const DeviceRows y = MakeRows(*backend_, 1, out, out, DType::kF32, nullptr);
    backend_->Linear({.bank = bank.get(), .input = x.view, .output = y.view});
    const std::vector<double> row = RowOf(*backend_, y.view, 0, out);
    for (int i = 0; i < out; ++i) {
      EXPECT_EQ(std::isnan(row[static_cast<size_t>(i)]), i == 17 || i == 18) << i;
    }
  }
}

// Input rows that are tiny, huge or zero in some groups.
TEST_P(QuantLinearTest, InputsOfAnyMagnitude) {
  Random random(6);
  const int in = 160, out = 33;
  for (const Quantization type : kQuantTypes) {
    const IntegerWeight w = MakeWeight(random, type, out, in);
    const auto bank = Bank(QuantShape(type, {in}, {out}, false, false));
    bank->LoadQuantized(0, Half::kMain, 0, w.integers);
    std::vector<float> values;
    for (const double scale : {1e-44, 1e-38, 1e-30, 1e-3, 1e3, 1e30}) {
      std::vector<float> row = random.Normals(in, scale);
      for (int i = 64; i < 128; ++i) row[static_cast<size_t>(i)] = 0.0f;
      values.insert(values.end(), row.begin(), row.end());
    }
    const int rows = static_cast<int>(values.size()) / in;
    const DeviceRows x = MakeRows(*backend_, rows, in, in, DType::kF32, &values);
    const DeviceRows y = MakeRows(*backend_, rows, out, out, DType::kF32, nullptr);
    backend_->Linear({.bank = bank.get(), .input = x.view, .output = y.view});
    for (int r = 0; r < rows; ++r) {
      EXPECT_TRUE(RowNear(RowOf(*backend_, y.view, r, out),
                          Oracle(RowOf(*backend_, x.view, r, in), w.integers, {}),
                          Tolerance(type, in, DType::kF32)))
          << Name(type) << ", row " << r;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, QuantLinearTest, ::testing::ValuesIn(AvailableBackends()),
                         [](const auto& info) { return BackendName(info.param); });

}  // namespace
}  // namespace moeserve::testing
