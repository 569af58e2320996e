// All tiles of the linear kernels, in all orders, must give the same bits, with every epilogue.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include "kernels/cuda/linear/linear.h"
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

// Every tile size, rows with every alignment and both output types must have the same bits.
TEST(CudaLinearTilesTest, TilesAndAlignmentsGiveTheSameBits) {
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
TEST(CudaLinearTilesTest, EpiloguesGiveTheSameBits) {
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
TEST(CudaLinearTilesTest, BordersOfTilesGiveTheSameBits) {
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
TEST(CudaLinearTilesTest, RoundedActivationsDifferNextToTiesOnly) {
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
TEST(CudaLinearTilesTest, OrdersOfTilesGiveTheSameBits) {
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

// Pairs of tiles that share their weights: experts with numbers of rows at the borders of tiles,
// warpgroups and pairs, or without rows, and sums of more blocks than there are stages. Few workers
// take many tiles.
TEST(CudaLinearTilesTest, PairsGiveTheSameBits) {
  Random random(23);
  struct Case {
    int in;
    std::vector<int> rows, widths;  // of each expert
    Activation activation;
    DType type;
  };
  const Case cases[] = {
      {72,
       {0, 1, 64, 65, 128, 129, 0, 192, 193, 257, 385, 0},
       {320, 192, 320, 17, 256, 200, 64, 250, 320, 192, 64, 5},
       ActivationKind::kGelu,
       DType::kBF16},
      {24, {300, 0, 2, 130}, {260, 320, 400, 65}, ActivationKind::kNone, DType::kF32},
      {712, {130, 0, 70, 260}, {260, 64, 192, 100}, ActivationKind::kRelu, DType::kBF16}};
  for (const Case& c : cases) {
    const auto experts = static_cast<int>(c.rows.size());
    const int rows = *std::max_element(c.rows.begin(), c.rows.end());
    const BankCase bank({c.in}, c.widths, false, true, DType::kBF16, random);
    std::vector<std::vector<int>> routing(static_cast<size_t>(rows));
    for (int e = 0; e < experts; ++e) {
      for (int r = 0; r < c.rows[static_cast<size_t>(e)]; ++r) {
        routing[static_cast<size_t>(r)].push_back(e);
      }
    }
    const DevicePlan plan(experts, routing, 5);
    const DeviceRows x(rows, c.in, c.in, DType::kBF16, random.Normals(int64_t{rows} * c.in));
    const auto run = [&](LinearTile tile, cuda::TileOrder order, DeviceRows& y) {
      LaunchLinear({.bank = bank.bank.get(),
                    .plan = &plan.plan,
                    .gather = true,
                    .input = x.view(),
                    .output = y.view(),
                    .activation = c.activation},
                   tile, nullptr, order);
    };
    DeviceRows expected(plan.plan.capacity, 400, 400, c.type);
    run(LinearTile::kRows8, cuda::TileOrder::kAuto, expected);
    const RowsView bits = expected.Fetch();
    std::vector<int64_t> columns;
    for (const int e : plan.expert) columns.push_back(c.widths[static_cast<size_t>(e)]);
    const auto compare = [&](LinearTile tile, cuda::TileOrder order) {
      DeviceRows y(plan.plan.capacity, 400, 400, c.type);
      run(tile, order, y);
      const RowsView result = y.Fetch();
      for (int64_t a = 0; a < plan.assignments(); ++a) {
        ASSERT_TRUE(SameBits(result, bits, a, a, columns[static_cast<size_t>(a)]))
            << "assignment " << a << ", inputs " << c.in;
      }
      ASSERT_TRUE(y.OthersUntouched(plan.assignments(), columns));
      ASSERT_TRUE(CountersAreZero(*bank.bank));
    };
    for (const LinearTile tile :
         {LinearTile::kWarpgroup256Pair, LinearTile::kWarpgroup192x192Pair}) {
      SCOPED_TRACE(std::string(cuda::kLinearTileNames[static_cast<size_t>(tile)]));
#if defined(MOESERVE_CUDA_EMULATION)
      SetEmulatedMultiprocessors(7);  // 3 pairs
      compare(tile, cuda::TileOrder::kFixed);
      cuda::InEveryOrder([&] { compare(tile, cuda::TileOrder::kDynamic); });
      const emulator::Order before = emulator::GetOrder();
      emulator::SetOrder({emulator::Order::kEager, 0});
      compare(tile, cuda::TileOrder::kDynamic);
      emulator::SetOrder(before);
      SetEmulatedMultiprocessors(132);
#else
      for (const auto order : {cuda::TileOrder::kFixed, cuda::TileOrder::kDynamic}) {
        compare(tile, order);
      }
#endif
      if (HasFatalFailure()) return;
    }
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
TEST(CudaLinearTilesTest, SchedulesTakeEachTileOnce) {
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

}  // namespace
}  // namespace moeserve::testing
