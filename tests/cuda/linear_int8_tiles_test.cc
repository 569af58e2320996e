// All tiles of products with int8-channel weights must give the same bits, with every epilogue, for
// experts with any numbers of rows, inputs and outputs, on devices of any size.

#include <gtest/gtest.h>

#include <limits>
#include <tuple>

#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/quantized/linear_int8.h"
#include "tests/cuda/emulator_test_support.h"
#include "tests/cuda/linear_case.h"
#include "tests/support/integer_weights.h"

namespace moeserve::testing {
namespace {

using cuda::LinearTile;
using cuda::TileOrder;

std::unique_ptr<cuda::CudaLinearBank> Int8Bank(std::vector<int> in, std::vector<int> out,
                                               bool gated, Random& random) {
  using Half = LinearBank::Half;
  auto bank = std::move(cuda::CudaLinearBank::Create({std::move(in), std::move(out), gated, true,
                                                      DType::kBF16, Quantization::kInt8Channel}))
                  .value();
  for (int e = 0; e < bank->num_experts(); ++e) {
    const int outputs = bank->shape().out_features[e];
    for (const Half half : {Half::kMain, Half::kGate}) {
      if ((half == Half::kGate && !gated) || outputs == 0) continue;
      bank->LoadQuantized(
          e, half, 0,
          MakeWeight(random, Quantization::kInt8Channel, outputs, bank->shape().in_features_of(e))
              .integers);
      bank->LoadBias(e, half, 0, MakeTensor(random.Normals(outputs), {outputs}));
    }
  }
  return bank;
}

// Computes the product with a tile.
void MultiplyInt8(const LinearArgs& args, LinearTile tile, TileOrder order = TileOrder::kAuto) {
  cuda::Int8Rows rows;
  ASSERT_TRUE(rows.Reserve(args).ok());
  cuda::LaunchLinearInt8(args, tile, rows, nullptr, order);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

// Compares the bits of every tile with those of the smallest one of mma.sync. `written` are the
// columns that the product writes of each row; other memory must stay unchanged.
void ExpectInt8TilesAgree(LinearArgs args, int64_t rows, int64_t cols, int64_t stride, DType type,
                          const std::vector<int64_t>& written) {
  DeviceRows expected(rows, cols, stride, type);
  args.output = expected.view();
  MultiplyInt8(args, LinearTile::kRows8);
  const RowsView bits = expected.Fetch();
  ASSERT_TRUE(expected.OthersUntouched(static_cast<int64_t>(written.size()), written));
  for (const LinearTile tile : kInt8Tiles) {
    for (const TileOrder order : {TileOrder::kDynamic, TileOrder::kFixed}) {
      if (order == TileOrder::kFixed && tile < LinearTile::kWarpgroup) continue;
      DeviceRows y(rows, cols, stride, type);
      args.output = y.view();
      MultiplyInt8(args, tile, order);
      const RowsView result = y.Fetch();
      for (size_t r = 0; r < written.size(); ++r) {
        const auto row = static_cast<int64_t>(r);
        ASSERT_TRUE(SameBits(result, bits, row, row, written[r]))
            << "tile " << cuda::kLinearTileNames[static_cast<size_t>(tile)] << ", row " << r;
      }
      ASSERT_TRUE(y.OthersUntouched(static_cast<int64_t>(written.size()), written));
    }
  }
}

// Routes that give expert e `rows[e]` rows, not next to each other.
std::vector<std::vector<int>> MixedRoutes(const std::vector<int>& rows, Random& random) {
  std::vector<std::vector<int>> routes;
  for (size_t e = 0; e < rows.size(); ++e) {
    routes.resize(routes.size() + static_cast<size_t>(rows[e]), {static_cast<int>(e)});
  }
  for (size_t i = routes.size(); i > 1; --i) {
    std::swap(routes[i - 1], routes[static_cast<size_t>(random.Below(static_cast<int>(i)))]);
  }
  return routes;
}

// The numbers of rows of the experts, around the sizes of tiles.
std::vector<std::vector<int>> SomeExpertRows() {
  return {{0, 1, 63, 65, 129}, {3, 0, 8, 9, 1}, {33, 31, 16, 17, 2}};
}

// First products of experts: gathered rows of 1 to 3 blocks of inputs, to unequal widths.
void ExpectFirstProductsAgree() {
  Random random(21);
  const std::vector<int> widths = {40, 8, 200, 64, 333};
  int turn = 0;
  for (const int in : {100, 256, 300}) {
    const bool gated = in != 256;
    const auto bank = Int8Bank({in}, widths, gated, random);
    for (const std::vector<int>& rows : SomeExpertRows()) {
      const DevicePlan plan(5, MixedRoutes(rows, random), 3);
      const auto inputs = static_cast<int64_t>(plan.plan.rows);
      DeviceRows x(inputs, in, in + 8, DType::kBF16, random.Normals(inputs * in));
      std::vector<int64_t> written;
      for (int a = 0; a < plan.assignments(); ++a) {
        written.push_back(RoundUp16(widths[plan.expert[a]]));
      }
      const Activation activation = gated ? ActivationKind::kSilu : ActivationKind::kRelu;
      ExpectInt8TilesAgree({.bank = bank.get(),
                            .plan = &plan.plan,
                            .gather = true,
                            .input = x.view(),
                            .output = {},
                            .activation = activation,
                            .pad_output = true},
                           plan.plan.capacity, 333, 336,
                           turn++ % 3 == 2 ? DType::kF32 : DType::kBF16, written);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

// Second products: rows of unequal widths, whose other inputs are NaN, without an activation.
void ExpectSecondProductsAgree() {
  Random random(22);
  constexpr int kOut = 150, kWidest = 333;
  const std::vector<int> widths = {40, 8, 200, 129, kWidest};
  const auto bank = Int8Bank(widths, std::vector<int>(5, kOut), false, random);
  for (const std::vector<int>& rows : SomeExpertRows()) {
    for (const DType type : {DType::kF32, DType::kBF16}) {
      const DevicePlan plan(5, MixedRoutes(rows, random), 3);
      const int64_t capacity = plan.plan.capacity;
      std::vector<float> values = random.Normals(capacity * kWidest);
      for (int64_t a = 0; a < capacity; ++a) {
        const int in = a < plan.assignments() ? widths[plan.expert[static_cast<size_t>(a)]] : 0;
        for (int64_t c = in; c < kWidest; ++c) {
          values[static_cast<size_t>(a * kWidest + c)] = std::numeric_limits<float>::quiet_NaN();
        }
      }
      DeviceRows x(capacity, kWidest, kWidest + 3, type, values);
      ExpectInt8TilesAgree(
          {.bank = bank.get(), .plan = &plan.plan, .input = x.view(), .output = {}}, capacity, kOut,
          kOut + 2, type,
          std::vector<int64_t>(static_cast<size_t>(plan.assignments()), int64_t{kOut}));
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

// Rows of many blocks of inputs, few for each expert: a block passes over experts, and the rings
// of stages are filled several times.
void ExpectLongRowsAgree() {
  Random random(25);
  constexpr int kOut = 80, kWidest = 2100;
  const std::vector<int> widths = {1300, 140, kWidest, 1000};
  const auto bank = Int8Bank(widths, std::vector<int>(4, kOut), false, random);
  for (const std::vector<int>& rows :
       {std::vector<int>{2, 9, 1, 0}, std::vector<int>{0, 1, 11, 5}}) {
    const DevicePlan plan(4, MixedRoutes(rows, random), 0);
    const int64_t count = plan.assignments();
    DeviceRows x(count, kWidest, 2104, DType::kBF16, random.Normals(count * kWidest));
    ExpectInt8TilesAgree({.bank = bank.get(), .plan = &plan.plan, .input = x.view(), .output = {}},
                         count, kOut, kOut, DType::kF32,
                         std::vector<int64_t>(static_cast<size_t>(count), int64_t{kOut}));
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(LinearInt8TilesTest, LongRowsHaveTheSameBits) { cuda::InEveryOrder(ExpectLongRowsAgree); }

TEST(LinearInt8TilesTest, FirstProductsOfExpertsHaveTheSameBits) {
  cuda::InEveryOrder(ExpectFirstProductsAgree);
}

TEST(LinearInt8TilesTest, SecondProductsOfExpertsHaveTheSameBits) {
  cuda::InEveryOrder(ExpectSecondProductsAgree);
}

#if defined(MOESERVE_CUDA_EMULATION)
// A block computes many tiles, or few.
TEST(LinearInt8TilesTest, OnDevicesOfAnySize) {
  const int before = cuda::DeviceAttribute(cudaDevAttrMultiProcessorCount);
  for (const int multiprocessors : {1, 20}) {
    SCOPED_TRACE(::testing::Message() << multiprocessors << " multiprocessors");
    SetEmulatedMultiprocessors(multiprocessors);
    ExpectFirstProductsAgree();
    ExpectSecondProductsAgree();
    ExpectLongRowsAgree();
  }
  SetEmulatedMultiprocessors(before);
}
#endif

// Every form of the epilogue, with and without alignment of the results.
TEST(LinearInt8TilesTest, EveryEpilogueHasTheSameBits) {
  Random random(23);
  constexpr int kIn = 136;
  std::vector<std::pair<bool, Activation>> epilogues;
  for (const ActivationKind kind :
       {ActivationKind::kNone, ActivationKind::kSilu, ActivationKind::kGelu,
        ActivationKind::kGeluTanh, ActivationKind::kRelu, ActivationKind::kTanh,
        ActivationKind::kRelu2}) {
    epilogues.emplace_back(false, kind);
    epilogues.emplace_back(true, kind);
  }
  epilogues.emplace_back(true, GeneralActivation());
  Activation limited = ActivationKind::kGelu;
  limited.limit = 0.5f;
  epilogues.emplace_back(true, limited);
  for (const auto& [rows, out] : std::vector<std::pair<int, int>>{{70, 150}, {5, 35}}) {
    for (const bool gated : {false, true}) {
      const auto bank = Int8Bank({kIn}, {out}, gated, random);
      DeviceRows x(rows, kIn, kIn, DType::kBF16, random.Normals(int64_t{rows} * kIn));
      for (const auto& [is_gated, activation] : epilogues) {
        if (is_gated != gated) continue;
        for (const DType type : {DType::kF32, DType::kBF16}) {
          for (const bool pad : {false, true}) {
            ExpectInt8TilesAgree({.bank = bank.get(),
                                  .input = x.view(),
                                  .output = {},
                                  .activation = activation,
                                  .pad_output = pad},
                                 rows, out, pad ? RoundUp16(out) : out + 1, type,
                                 std::vector<int64_t>(static_cast<size_t>(rows),
                                                      pad ? RoundUp16(out) : int64_t{out}));
            ASSERT_FALSE(HasFatalFailure())
                << "activation " << static_cast<int>(activation.kind) << ", gated " << gated;
          }
        }
      }
    }
  }
}

// Few rows per expert stream weights, many use wgmma, if there are tiles for a large device.
TEST(LinearInt8TilesTest, TilesFollowTheRowsOfExperts) {
  const LinearBankShape shape{{256},        std::vector<int>(8, 2048), true, false,
                              DType::kBF16, Quantization::kInt8Channel};
  const auto bank = std::move(cuda::CudaLinearBank::Create(shape)).value();
  RoutingPlan plan{.rows = 0, .num_experts = 8};
  const auto tile = [&](int rows, DType type) {
    plan.rows = rows;
    plan.capacity = rows * 2;
    const RowsView input{nullptr, DType::kBF16, rows, 256, 256};
    const RowsView output{nullptr, type, rows * 2, 2048, 2048};
    const LinearArgs args{.bank = bank.get(),
                          .plan = &plan,
                          .gather = true,
                          .input = input,
                          .output = output,
                          .activation = ActivationKind::kSilu};
    const std::vector<LinearTile> fit = cuda::Int8TilesThatFit(args);
    const LinearTile chosen = cuda::DefaultInt8Tile(args);
    EXPECT_NE(std::find(fit.begin(), fit.end(), chosen), fit.end());
    return chosen;
  };
  int major = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  if (major != 9) {
    EXPECT_LE(tile(1, DType::kBF16), LinearTile::kRows128);
    return;
  }
  EXPECT_EQ(tile(1, DType::kBF16), LinearTile::kStream8x16);
  EXPECT_EQ(tile(8, DType::kBF16), LinearTile::kStream8x64);
  EXPECT_EQ(tile(64, DType::kBF16), LinearTile::kStream32x64);
  EXPECT_EQ(tile(160, DType::kBF16), LinearTile::kRows64);
  EXPECT_EQ(tile(4096, DType::kBF16), LinearTile::kWarpgroup256);
  EXPECT_EQ(tile(4096, DType::kF32), LinearTile::kRows128);  // with an activation
}

// Rows that shared memory cannot hold are rounded before the product.
TEST(LinearInt8TilesTest, RowsThatAreTooLong) {
  constexpr int kIn = 40000, kOut = 20;
  Random random(26);
  const auto bank = Int8Bank({kIn}, {kOut}, false, random);
  for (const int rows : {1, 8}) {
    DeviceRows x(rows, kIn, kIn, DType::kBF16, random.Normals(int64_t{rows} * kIn));
    LinearArgs args{.bank = bank.get(), .input = x.view(), .output = {}};
    const std::vector<LinearTile> fit = cuda::Int8TilesThatFit(args);
    const bool fits = std::find(fit.begin(), fit.end(), LinearTile::kStream8x64) != fit.end();
    EXPECT_EQ(fits, rows == 1 && cuda::SharedMemoryLimit() > 100000) << rows;
    DeviceRows expected(rows, kOut, kOut, DType::kF32), y(rows, kOut, kOut, DType::kF32);
    args.output = expected.view();
    MultiplyInt8(args, LinearTile::kRows128);
    args.output = y.view();
    MultiplyInt8(args, LinearTile::kStream8x64);
    const RowsView bits = expected.Fetch(), result = y.Fetch();
    for (int r = 0; r < rows; ++r) EXPECT_TRUE(SameBits(result, bits, r, r, kOut)) << r;
  }
}

// Segments of rows, each with a matrix of its own.
TEST(LinearInt8TilesTest, SegmentsHaveTheSameBits) {
  Random random(24);
  constexpr int kIn = 144, kOut = 72, kSegments = 3;
  const auto bank = Int8Bank({kIn}, std::vector<int>(kSegments, kOut), false, random);
  for (const int rows : {1, 9, 130}) {
    for (const DType type : {DType::kF32, DType::kBF16}) {
      DeviceRows x(rows, kIn * kSegments, kIn * kSegments, type,
                   random.Normals(int64_t{rows} * kIn * kSegments));
      ExpectInt8TilesAgree(
          {.bank = bank.get(), .input = x.view(), .output = {}, .segments = true}, rows,
          kOut * kSegments, kOut * kSegments, type,
          std::vector<int64_t>(static_cast<size_t>(rows), int64_t{kOut} * kSegments));
    }
  }
}

}  // namespace
}  // namespace moeserve::testing
