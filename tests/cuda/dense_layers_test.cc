// Dense layers by a library: results, independence of rows, and the choice of an algorithm.

#include "kernels/cuda/dense/dense_layers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>

#include "kernels/cuda/linear/linear.h"
#include "tests/cuda/linear_case.h"

namespace moeserve::testing {
namespace {

using cuda::DenseLayers;
using cuda::DenseLibrary;
using cuda::DenseShape;

// How a library misbehaves.
enum class DenseFault : uint8_t {
  kNone,
  kRefuses,         // it refuses products of one row
  kDependsOnRows,   // the first row of products with many rows differs
  kDependsOnPlace,  // the last row of products with several rows differs
};

// A library whose algorithms have these faults, in this order.
class FaultyLibrary : public DenseLibrary {
 public:
  FaultyLibrary(std::unique_ptr<DenseLibrary> library, std::vector<DenseFault> faults)
      : library_(std::move(library)), faults_(std::move(faults)) {}

  Result<int> FindAlgorithms(const DenseShape& shape, int64_t rows) override {
    ++searches;
    MOESERVE_ASSIGN_OR_RETURN(const int found, library_->FindAlgorithms(shape, rows));
    EXPECT_GT(found, 0);
    return static_cast<int>(faults_.size());
  }

  absl::Status Multiply(const DenseShape& shape, int algorithm, const void* weights,
                        const void* input, int64_t rows, float* output,
                        cudaStream_t stream) override {
    const DenseFault fault = faults_[static_cast<size_t>(algorithm)];
    if (fault == DenseFault::kRefuses && rows == 1) return absl::InternalError("not supported");
    MOESERVE_RETURN_IF_ERROR(library_->Multiply(shape, 0, weights, input, rows, output, stream));
    float* changed = nullptr;
    if (fault == DenseFault::kDependsOnRows && rows > 100) changed = output;
    if (fault == DenseFault::kDependsOnPlace && rows > 1) {
      changed = output + (rows - 1) * shape.output_stride;
    }
    if (changed != nullptr) {
      EXPECT_EQ(cudaMemsetAsync(changed, 0, sizeof(float), stream), cudaSuccess);
    }
    multiplied = algorithm;
    return absl::OkStatus();
  }

  int searches = 0;
  int multiplied = -1;  // the algorithm of the last product

 private:
  const std::unique_ptr<DenseLibrary> library_;
  const std::vector<DenseFault> faults_;
};

class CudaDenseLayersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto library = cuda::OpenDenseLibrary();
    if (!library.ok()) GTEST_SKIP() << library.status().message();
    library_ = *std::move(library);
  }

  DenseLayers Layers() { return DenseLayers(std::move(library_)); }
  // Returns layers with a faulty library, which they own.
  std::pair<DenseLayers, FaultyLibrary*> Layers(std::vector<DenseFault> faults) {
    auto faulty = std::make_unique<FaultyLibrary>(std::move(library_), std::move(faults));
    FaultyLibrary* const pointer = faulty.get();
    return {DenseLayers(std::move(faulty)), pointer};
  }

 private:
  std::unique_ptr<DenseLibrary> library_;
};

// Runs a product as the backend does.
bool RunProduct(DenseLayers& layers, const LinearArgs& args) {
  if (!layers.Ready(args)) {
    const absl::Status status = layers.Prepare(args, nullptr);
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_TRUE(layers.Ready(args));
  return layers.Run(args, nullptr);
}

::testing::AssertionResult Near(const std::vector<double>& actual,
                                const std::vector<double>& expected, DType out, int n) {
  const double sums = 8 * std::sqrt(n + 1.0) * Epsilon(DType::kF32) + 1e-5;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double bound =
        sums * (1 + std::abs(expected[i])) + 2 * Epsilon(out) * std::abs(expected[i]);
    if (!(std::abs(actual[i] - expected[i]) <= bound)) {
      return ::testing::AssertionFailure()
             << "column " << i << ": " << actual[i] << " instead of " << expected[i];
    }
  }
  return ::testing::AssertionSuccess();
}

struct DenseCase {
  int rows, in, out;
  bool gated, bias, pad;
  DType type;
  int64_t spare;  // columns between the outputs of two rows
  Activation activation;
};

TEST_F(CudaDenseLayersTest, MatchesDoubleArithmetic) {
  DenseLayers layers = Layers();
  Random random(1);
  for (const DenseCase& c : std::vector<DenseCase>{
           {1, 8, 1, false, false, false, DType::kF32, 0, ActivationKind::kNone},
           {5, 16, 12, false, false, false, DType::kF32, 0, ActivationKind::kNone},
           {5, 16, 12, false, false, false, DType::kF32, 1, ActivationKind::kNone},
           {33, 72, 65, false, true, false, DType::kF32, 3, ActivationKind::kNone},
           {33, 72, 65, false, true, true, DType::kBF16, 15, ActivationKind::kRelu},
           {130, 64, 40, true, false, false, DType::kBF16, 0, ActivationKind::kSilu},
           {70, 200, 33, true, true, true, DType::kBF16, 15, GeneralActivation()},
           {70, 200, 300, true, true, false, DType::kF32, 0, ActivationKind::kGelu}}) {
    const BankCase bank({c.in}, {c.out}, c.gated, c.bias, DType::kBF16, random);
    DeviceRows x(c.rows, c.in, c.in, DType::kBF16, random.Normals(int64_t{c.rows} * c.in), c.in);
    // The rows of DeviceRows start after one row; another shift would not be aligned.
    ASSERT_EQ(reinterpret_cast<uintptr_t>(x.view().data) % 16, 0U);
    DeviceRows y(c.rows, c.out, c.out + c.spare, c.type);
    const LinearArgs args{.bank = bank.bank.get(),
                          .input = x.view(),
                          .output = y.view(),
                          .activation = c.activation,
                          .pad_output = c.pad};
    ASSERT_TRUE(DenseLayers::Fits(args));
    ASSERT_TRUE(RunProduct(layers, args));
    const RowsView result = y.Fetch();
    const RowsView input = x.Fetch();
    const int64_t written = c.pad ? (c.out + 15) / 16 * 16 : c.out;
    for (int r = 0; r < c.rows; ++r) {
      const std::vector<double> row = RowOf(result, r, written);
      ASSERT_TRUE(Near(row, bank.Expected(0, RowOf(input, r, c.in), c.activation), c.type, c.in))
          << c.rows << " x " << c.in << " x " << c.out << ", row " << r;
      for (int64_t i = c.out; i < written; ++i) ASSERT_EQ(row[static_cast<size_t>(i)], 0.0);
    }
    ASSERT_TRUE(y.OthersUntouched(c.rows, std::vector<int64_t>(c.rows, written)));
  }
  EXPECT_EQ(layers.warnings().size(), 0U);
}

TEST_F(CudaDenseLayersTest, RowsDoNotInfluenceEachOther) {
  DenseLayers layers = Layers();
  Random random(2);
  for (const bool gated : {false, true}) {
    const int rows = 300, in = 136, out = 200;
    const BankCase bank({in}, {out}, gated, gated, DType::kBF16, random);
    std::vector<float> values = random.Normals(int64_t{rows} * in);
    for (int i = 0; i < in; ++i) values[5 * in + i] = std::numeric_limits<float>::quiet_NaN();
    DeviceRows x(rows, in, in, DType::kBF16, values);
    DeviceRows together(rows, out, out, DType::kF32);
    LinearArgs args{.bank = bank.bank.get(),
                    .input = x.view(),
                    .output = together.view(),
                    .activation = gated ? ActivationKind::kSilu : ActivationKind::kNone};
    ASSERT_TRUE(RunProduct(layers, args));
    const RowsView all = together.Fetch();
    for (const auto& [first, count] : {std::pair{0, 1}, {4, 2}, {6, 1}, {100, 129}, {299, 1}}) {
      args.input = x.view();
      args.input.data = x.view().row(first);
      args.input.rows = count;
      DeviceRows some(count, out, out, DType::kF32);
      args.output = some.view();
      ASSERT_TRUE(RunProduct(layers, args));
      const RowsView result = some.Fetch();
      for (int r = 0; r < count; ++r) {
        ASSERT_TRUE(SameBits(result, all, r, first + r, out)) << "row " << first + r;
      }
    }
    ASSERT_TRUE(std::isnan(RowOf(all, 5, 1)[0]));
    ASSERT_FALSE(std::isnan(RowOf(all, 4, 1)[0]) || std::isnan(RowOf(all, 6, 1)[0]));
  }
}

TEST_F(CudaDenseLayersTest, TakesTheFirstAlgorithmWithIndependentRows) {
  auto [layers, library] = Layers({DenseFault::kDependsOnRows, DenseFault::kRefuses,
                                   DenseFault::kDependsOnPlace, DenseFault::kNone});
  Random random(3);
  const BankCase bank({64}, {48}, false, false, DType::kBF16, random);
  for (const int rows : {3, 40, 3}) {
    DeviceRows x(rows, 64, 64, DType::kBF16, random.Normals(int64_t{rows} * 64));
    DeviceRows y(rows, 48, 48, DType::kBF16);
    library->multiplied = -1;
    ASSERT_TRUE(
        RunProduct(layers, {.bank = bank.bank.get(), .input = x.view(), .output = y.view()}));
    EXPECT_EQ(library->multiplied, 3);
  }
  EXPECT_EQ(library->searches, 1);
  EXPECT_EQ(layers.warnings().size(), 0U);
}

TEST_F(CudaDenseLayersTest, WithoutSuchAnAlgorithmTheBankKeepsItsImage) {
  auto [layers, library] = Layers({DenseFault::kDependsOnPlace, DenseFault::kDependsOnRows});
  Random random(4);
  const BankCase bank({64}, {48}, false, false, DType::kBF16, random);
  DeviceRows x(9, 64, 64, DType::kBF16, random.Normals(9 * 64));
  DeviceRows y(9, 48, 48, DType::kF32);
  const LinearArgs args{.bank = bank.bank.get(), .input = x.view(), .output = y.view()};
  EXPECT_FALSE(RunProduct(layers, args));
  EXPECT_FALSE(RunProduct(layers, args));
  ASSERT_EQ(layers.warnings().size(), 1U);
  EXPECT_NE(layers.warnings()[0].find("48 x 64 weights are computed by"), std::string::npos);
  EXPECT_FALSE(bank.bank->row_major());
  cuda::LaunchLinear(args, nullptr);
  const RowsView result = y.Fetch();
  const RowsView input = x.Fetch();
  for (int r = 0; r < 9; ++r) {
    EXPECT_TRUE(Near(RowOf(result, r, 48),
                     bank.Expected(0, RowOf(input, r, 64), ActivationKind::kNone), DType::kF32,
                     64));
  }
}

TEST_F(CudaDenseLayersTest, FitsDenseProductsOfAlignedRowsOnly) {
  Random random(5);
  const BankCase dense({64}, {16}, false, false, DType::kBF16, random);
  const BankCase narrow({60}, {16}, false, false, DType::kBF16, random);
  const BankCase two({64}, {16, 16}, false, false, DType::kBF16, random);
  const BankCase wide({64}, {16}, false, false, DType::kF32, random);
  DeviceRows x(4, 64, 64, DType::kBF16);
  DeviceRows shifted(4, 64, 64, DType::kBF16, {}, 1);
  DeviceRows exact(4, 64, 64, DType::kF32);
  DeviceRows y(4, 16, 16, DType::kF32);
  const DevicePlan plan(1, {{0}, {0}, {0}, {0}}, 0);
  const auto fits = [&](const BankCase& bank, DeviceRows& rows, const RoutingPlan* p = nullptr) {
    return DenseLayers::Fits(
        {.bank = bank.bank.get(), .plan = p, .input = rows.view(), .output = y.view()});
  };
  EXPECT_TRUE(fits(dense, x));
  EXPECT_FALSE(fits(dense, x, &plan.plan));
  EXPECT_FALSE(fits(dense, shifted));
  EXPECT_FALSE(fits(dense, exact));
  EXPECT_FALSE(fits(narrow, x));
  EXPECT_FALSE(fits(two, x));
  EXPECT_FALSE(fits(wide, x));
}

}  // namespace
}  // namespace moeserve::testing
