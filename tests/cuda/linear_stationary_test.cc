// Products with weights that stay in shared memory must have the bits of the other tiles, with any
// numbers of rows, inputs and outputs per expert and any number of multiprocessors.

#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "kernels/cuda/linear/linear.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/emulator_test_support.h"
#include "tests/cuda/linear_case.h"

#if defined(MOESERVE_CUDA_EMULATION)
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/linear/linear_chunks.cuh"
#include "kernels/cuda/linear/linear_params.h"
#endif

namespace moeserve::testing {
namespace {

using cuda::LaunchLinear;
using cuda::LinearTile;

class CudaLinearStationaryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int major = 0;
    ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
    if (major != 9) GTEST_SKIP() << "needs compute capability 9.0";
  }
};

bool IsOffered(const LinearArgs& args) {
  const std::vector<LinearTile> tiles = cuda::LinearTilesThatFit(args);
  return std::find(tiles.begin(), tiles.end(), LinearTile::kStationary) != tiles.end();
}

// Calls f() for few and for many multiprocessors, in every order of threads and blocks, with the
// emulated device; otherwise once.
template <typename F>
void OnEveryDevice(F&& f) {
#if defined(MOESERVE_CUDA_EMULATION)
  const int before = cuda::DeviceAttribute(cudaDevAttrMultiProcessorCount);
  for (const int multiprocessors : {1, 3, 20}) {
    SCOPED_TRACE(::testing::Message() << multiprocessors << " multiprocessors");
    SetEmulatedMultiprocessors(multiprocessors);
    cuda::InEveryOrder(f);
  }
  SetEmulatedMultiprocessors(before);
#else
  f();
#endif
}

// Routes that give expert e `rows[e]` rows, not next to each other.
std::vector<std::vector<int>> RoutesOf(const std::vector<int>& rows, Random& random) {
  std::vector<std::vector<int>> routes;
  for (size_t e = 0; e < rows.size(); ++e) {
    routes.resize(routes.size() + static_cast<size_t>(rows[e]), {static_cast<int>(e)});
  }
  for (size_t i = routes.size(); i > 1; --i) {
    std::swap(routes[i - 1], routes[static_cast<size_t>(random.Below(static_cast<int>(i)))]);
  }
  return routes;
}

// Returns rows of width `cols` for the experts given for each row. Inputs that the expert does not
// have are NaN.
DeviceRows RowsOfExperts(const BankCase& bank, const std::vector<int>& experts, int cols, int spare,
                         Random& random) {
  const int64_t rows = static_cast<int64_t>(experts.size());
  std::vector<float> values = random.Normals((rows + spare) * cols);
  for (int64_t r = 0; r < rows + spare; ++r) {
    const int in = r < rows ? bank.bank->shape().in_features_of(experts[r]) : 0;
    for (int c = in; c < cols; ++c) {
      values[r * cols + c] = std::numeric_limits<float>::quiet_NaN();
    }
  }
  return DeviceRows(rows + spare, cols, RoundUp16(cols), DType::kBF16, values);
}

struct Settings {
  bool gather, pad;
  Activation activation;
  DType type;
};

// Compares the bits of a routed product with those of the smallest tile.
void ExpectSameBits(const BankCase& bank, const std::vector<int>& rows, const Settings& s,
                    Random& random) {
  constexpr int kSpare = 70;
  const std::vector<int>& out = bank.bank->shape().out_features;
  const int experts = bank.bank->num_experts();
  const std::vector<std::vector<int>> routes = RoutesOf(rows, random);
  const DevicePlan plan(experts, routes, kSpare);
  int widest_in = 0;
  for (int e = 0; e < experts; ++e) {
    widest_in = std::max(widest_in, bank.bank->shape().in_features_of(e));
  }
  const int widest = *std::max_element(out.begin(), out.end());
  std::vector<int> expert_of_row;
  for (const std::vector<int>& route : routes) expert_of_row.push_back(route[0]);
  const DeviceRows x = RowsOfExperts(bank, s.gather ? expert_of_row : plan.expert, widest_in,
                                     s.gather ? 0 : kSpare, random);
  LinearArgs args{.bank = bank.bank.get(),
                  .plan = &plan.plan,
                  .gather = s.gather,
                  .input = x.view(),
                  .output = {},
                  .activation = s.activation,
                  .pad_output = s.pad};
  std::vector<int64_t> written;
  for (const int e : plan.expert) written.push_back(s.pad ? RoundUp16(out[e]) : out[e]);
  const int64_t stride = RoundUp16(widest) + (s.type == DType::kF32 ? 3 : 0);
  DeviceRows expected(plan.plan.capacity, widest, stride, s.type);
  args.output = expected.view();
  ASSERT_TRUE(IsOffered(args));
  LaunchLinear(args, LinearTile::kRows8, nullptr);
  const RowsView bits = expected.Fetch();
  OnEveryDevice([&] {
    DeviceRows y(plan.plan.capacity, widest, stride, s.type);
    args.output = y.view();
    LaunchLinear(args, LinearTile::kStationary, nullptr);
    const RowsView result = y.Fetch();
    for (int64_t a = 0; a < plan.assignments(); ++a) {
      ASSERT_TRUE(SameBits(result, bits, a, a, written[a]))
          << "assignment " << a << " of expert " << plan.expert[a];
    }
    ASSERT_TRUE(y.OthersUntouched(plan.assignments(), written));
  });
}

// Numbers of rows at and beside the borders of row tiles, of experts with unequal numbers of inputs
// and outputs, with each compiled epilogue.
TEST_F(CudaLinearStationaryTest, UnequalExpertsHaveTheSameBits) {
  Random random(31);
  struct Case {
    std::vector<int> in, out;
  };
  const Case cases[] = {
      // Tiles of 256 packed rows and up to 256 inputs.
      {{256, 64, 200, 130, 8, 192, 70}, {200, 256, 64, 17, 320, 90, 129}},
      // Tiles of 128 packed rows and up to 512 inputs.
      {{512, 64, 448, 200, 8, 320, 130}, {128, 150, 64, 17, 260, 90, 70}},
      // Few outputs.
      {{256, 16, 64, 128, 8, 192, 70}, {128, 100, 64, 17, 24, 90, 70}},
  };
  const std::vector<int> rows = {0, 1, 63, 64, 65, 200, 350};
  int turn = 0;
  for (const Case& c : cases) {
    for (const Settings& s : {Settings{true, false, ActivationKind::kNone, DType::kF32},
                              Settings{false, true, ActivationKind::kNone, DType::kBF16},
                              Settings{true, true, ActivationKind::kSilu, DType::kBF16}}) {
      const bool gated = s.activation.kind == ActivationKind::kSilu;
      const BankCase bank(c.in, c.out, gated, turn % 2 == 0, DType::kBF16, random);
      std::vector<int> rotated(rows.size());
      for (size_t e = 0; e < rows.size(); ++e) {
        rotated[e] = rows[(e + static_cast<size_t>(turn)) % rows.size()];
      }
      ++turn;
      SCOPED_TRACE(::testing::Message() << "turn " << turn);
      ExpectSameBits(bank, rotated, s, random);
      if (HasFatalFailure()) return;
    }
  }
}

// Few rows, so that most chunks have one tile and a consumer often has none; also no rows at all.
TEST_F(CudaLinearStationaryTest, FewRowsHaveTheSameBits) {
  Random random(32);
  constexpr int kExperts = 45;
  constexpr ActivationKind kKinds[] = {ActivationKind::kRelu, ActivationKind::kGelu,
                                       ActivationKind::kGeluTanh};
  int turn = 0;
  for (const int most : {512, 256, 64}) {
    std::vector<int> in, out, rows;
    for (int e = 0; e < kExperts; ++e) {
      in.push_back(e == 7 ? most : 1 + random.Below(most));
      out.push_back(1 + random.Below(200));
      rows.push_back(random.Below(3) == 0 ? 0 : random.Below(5) == 0 ? 70 : 1 + random.Below(4));
    }
    const BankCase bank(in, out, false, true, DType::kBF16, random);
    const Settings s{turn % 2 == 0, turn % 2 == 1, kKinds[turn % 3], DType::kBF16};
    ++turn;
    for (const auto& numbers : {rows, std::vector<int>(kExperts, 0)}) {
      SCOPED_TRACE(::testing::Message() << "up to " << most << " inputs");
      ExpectSameBits(bank, numbers, s, random);
      if (HasFatalFailure()) return;
    }
  }
}

// Dense banks, and products in segments, in which every expert computes all rows.
TEST_F(CudaLinearStationaryTest, DenseAndSegmentsHaveTheSameBits) {
  Random random(33);
  for (const int experts : {1, 3}) {
    for (const int in : {64, 256, 512}) {
      for (const int rows : {1, 64, 193, 400}) {
        const int out = 144;
        const BankCase bank(std::vector<int>(experts, in), std::vector<int>(experts, out), false,
                            true, DType::kBF16, random);
        const int64_t columns = int64_t{experts} * out;
        const DeviceRows x(rows, int64_t{experts} * in, int64_t{experts} * in + 8, DType::kBF16,
                           random.Normals(int64_t{rows} * experts * in));
        DeviceRows expected(rows, columns, columns, DType::kF32);
        LinearArgs args{.bank = bank.bank.get(),
                        .input = x.view(),
                        .output = expected.view(),
                        .segments = experts > 1};
        ASSERT_TRUE(IsOffered(args));
        LaunchLinear(args, LinearTile::kRows8, nullptr);
        const RowsView bits = expected.Fetch();
        OnEveryDevice([&] {
          DeviceRows y(rows, columns, columns, DType::kF32);
          args.output = y.view();
          LaunchLinear(args, LinearTile::kStationary, nullptr);
          const RowsView result = y.Fetch();
          for (int r = 0; r < rows; ++r) {
            ASSERT_TRUE(SameBits(result, bits, r, r, columns)) << "row " << r << " of " << rows;
          }
          ASSERT_TRUE(y.OthersUntouched(rows, std::vector<int64_t>(rows, columns)));
        });
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The tile is offered only for what it computes itself.
TEST_F(CudaLinearStationaryTest, IsOfferedWhereItFits) {
  Random random(34);
  const auto offered = [&](std::vector<int> in, bool gated, Activation activation, DType type,
                           int64_t shift) {
    const size_t experts = in.size();
    const int widest = *std::max_element(in.begin(), in.end());
    const BankCase bank(std::move(in), std::vector<int>(experts, 16), gated, false, DType::kBF16,
                        random);
    const DevicePlan plan(static_cast<int>(experts), {{0}}, 0);
    const DeviceRows x(1, widest, RoundUp16(widest), DType::kBF16, {}, shift);
    const DeviceRows y(1, 16, 16, type);
    return IsOffered({.bank = bank.bank.get(),
                      .plan = &plan.plan,
                      .input = x.view(),
                      .output = y.view(),
                      .activation = activation});
  };
  EXPECT_TRUE(offered({512, 8}, false, ActivationKind::kNone, DType::kF32, 0));
  EXPECT_TRUE(offered({512, 8}, false, ActivationKind::kGelu, DType::kBF16, 0));
  EXPECT_TRUE(offered({512, 8}, true, ActivationKind::kSilu, DType::kBF16, 0));
  EXPECT_FALSE(offered({8, 513}, false, ActivationKind::kNone, DType::kF32, 0));
  EXPECT_FALSE(offered({512, 8}, false, ActivationKind::kNone, DType::kF32, 1));
  EXPECT_FALSE(offered({512, 8}, false, ActivationKind::kTanh, DType::kBF16, 0));
  EXPECT_FALSE(offered({512, 8}, true, GeneralActivation(), DType::kBF16, 0));
}

#if defined(MOESERVE_CUDA_EMULATION)

constexpr int kChunkRows = 64, kChunkOutputs = 128;
using ChunksOfTest = cuda::TileChunks<kChunkRows, kChunkOutputs>;

// Each warp is a worker. Counts how often each tile is taken, at [row][block of 64 outputs], and
// the cost of each worker's tiles.
__global__ void TakeChunksKernel(const cuda::LinearParams p, int* taken, int* costs, int blocks) {
  const int worker = static_cast<int>(threadIdx.x) / 32;
  ChunksOfTest chunks(p);
  chunks.Start(worker, static_cast<int>(blockDim.x) / 32);
  int cost = 0;
  for (;;) {
    const cuda::LinearTileRange chunk = chunks.Next();
    if (chunk.expert < 0) break;
    for (int row = 0; row < chunk.rows; row += kChunkRows) {
      cost += max(p.entries[chunk.expert].k_blocks, ChunksOfTest::kLeastTileCost);
      if (threadIdx.x % 32 == 0) {
        atomicAdd(&taken[(chunk.row + row) * blocks + chunk.image_row / cuda::kImageBlock], 1);
      }
    }
  }
  if (threadIdx.x % 32 == 0) costs[worker] = cost;
}

// Each tile must be taken exactly once, and the workers' costs must be equal except for one tile.
TEST_F(CudaLinearStationaryTest, ChunksTakeEachTileOnce) {
  constexpr int kBlocks = 5, kExperts = 70;
  Random random(35);
  std::vector<int> in, out;
  for (int e = 0; e < kExperts; ++e) {
    in.push_back(1 + random.Below(512));
    out.push_back(e < 2 ? 320 : 1 + random.Below(300));
  }
  const BankCase bank(in, out, false, false, DType::kBF16, random);
  for (const int most : {0, 3, 300}) {
    std::vector<int> rows;
    for (int e = 0; e < kExperts; ++e) rows.push_back(e % 4 == 1 ? 0 : random.Below(most + 1));
    const DevicePlan plan(kExperts, RoutesOf(rows, random), 3);
    const DeviceRows x(plan.plan.capacity, 512, 512, DType::kBF16);
    const DeviceRows y(plan.plan.capacity, 320, 320, DType::kBF16);
    const cuda::LinearParams p = cuda::internal::LinearParamsOf(
        {.bank = bank.bank.get(), .plan = &plan.plan, .input = x.view(), .output = y.view()});
    std::vector<int> expected(static_cast<size_t>(plan.assignments() * kBlocks + 1));
    for (int e = 0; e < kExperts; ++e) {
      for (int r = plan.offsets[e]; r < plan.offsets[e + 1]; r += kChunkRows) {
        for (int b = 0; b < bank.bank->entry(e).row_blocks; b += 2) expected[r * kBlocks + b] = 1;
      }
    }
    for (const int workers : {1, 2, 7, 32}) {
      const cuda::DeviceArray<int> taken(std::vector<int>(expected.size()));
      const cuda::DeviceArray<int> costs(std::vector<int>(static_cast<size_t>(workers)));
      cuda::Launch(TakeChunksKernel,
                   {.grid = dim3(1), .block = dim3(32u * static_cast<unsigned>(workers))}, p,
                   taken.data(), costs.data(), kBlocks);
      ASSERT_EQ(taken.Read(), expected);
      const std::vector<int> all = costs.Read();
      const int mean = std::accumulate(all.begin(), all.end(), 0) / workers;
      for (const int cost : all) ASSERT_LE(std::abs(cost - mean), 8) << workers << " workers";
    }
  }
}

#endif

}  // namespace
}  // namespace moeserve::testing
