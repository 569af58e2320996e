// Weights of MXFP4 on the device: their image, and products with the bits of a bank of the same
// weights in bf16.

#include "kernels/cuda/quantized/linear_mxfp4.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error_text.h"
#include "kernels/cuda/linear/linear_image.h"
#include "tests/cuda/linear_case.h"

namespace moeserve::testing {
namespace {

using cuda::CudaLinearBank;
using cuda::LinearTile;
using Half = LinearBank::Half;

constexpr LinearTile kMxfp4Tiles[] = {
    LinearTile::kRows8,      LinearTile::kRows16,      LinearTile::kRows32,
    LinearTile::kRows64,     LinearTile::kRows128,     LinearTile::kStream8x16,
    LinearTile::kStream8x64, LinearTile::kStream32x16, LinearTile::kStream32x64,
    LinearTile::kWarpgroup,  LinearTile::kAuto};
constexpr float kMagnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

// Returns random numbers of MXFP4 [rows, columns] with random scales of 2^-9 to 2^-3.
std::vector<float> RandomMxfp4(int64_t rows, int64_t columns, Random& random) {
  std::vector<float> values;
  for (int64_t r = 0; r < rows; ++r) {
    float scale = 0.0f;
    int most = 0;
    for (int64_t k = 0; k < columns; ++k) {
      if (k % 32 == 0) {
        scale = std::ldexp(1.0f, -9 + random.Below(7));
        most = 1 + random.Below(8);  // not all blocks have the largest numbers
      }
      const float magnitude = kMagnitudes[random.Below(most)] * scale;
      values.push_back(random.Below(2) == 0 ? magnitude : -magnitude);
    }
  }
  return values;
}

struct Mxfp4Pair {
  std::unique_ptr<CudaLinearBank> bf16, mxfp4;

  Mxfp4Pair(std::vector<int> in, std::vector<int> out, bool gated, bool bias, Random& random) {
    LinearBankShape shape{std::move(in), std::move(out), gated, bias, DType::kBF16};
    bf16 = std::move(CudaLinearBank::Create(shape)).value();
    shape.mxfp4 = true;
    mxfp4 = std::move(CudaLinearBank::Create(shape)).value();
    for (int e = 0; e < bf16->num_experts(); ++e) {
      for (const Half half : {Half::kMain, Half::kGate}) {
        if (half == Half::kMain || gated) Load(half, e, random);
      }
    }
  }

 private:
  // Loads the matrix in two parts, of different types.
  void Load(Half half, int e, Random& random) const {
    const int in = bf16->shape().in_features_of(e), out = bf16->shape().out_features[e];
    int row = 0;
    for (const int count : {out / 3, out - out / 3}) {
      if (count == 0) continue;
      const HostTensor t = MakeTensor(RandomMxfp4(count, in, random), {count, in},
                                      row == 0 ? DType::kBF16 : DType::kF32);
      bf16->LoadWeight(e, half, row, t);
      mxfp4->LoadWeight(e, half, row, t);
      row += count;
    }
    EXPECT_TRUE(mxfp4->holds_weights());
    if (!bf16->shape().bias || out == 0) return;
    const HostTensor t = MakeTensor(random.Normals(out), {out});
    bf16->LoadBias(e, half, 0, t);
    mxfp4->LoadBias(e, half, 0, t);
  }
};

// Computes the product with both banks and compares the bits of all bytes of the outputs.
void CheckSameBits(const Mxfp4Pair& banks, LinearArgs args, int64_t out_rows, int64_t out_columns,
                   DType type, const std::string& what) {
  const int64_t stride = RoundUp16(out_columns) + 3 * (out_rows % 2);
  const auto rows = [&] { return DeviceRows(out_rows, out_columns, stride, type); };
  DeviceRows expected = rows();
  args.bank = banks.bf16.get();
  args.output = expected.view();
  cuda::LaunchLinear(args, LinearTile::kRows8, nullptr);
  const RowsView e = expected.Fetch();
  for (const LinearTile tile : kMxfp4Tiles) {
    DeviceRows actual = rows();
    args.bank = banks.mxfp4.get();
    args.output = actual.view();
    cuda::LaunchLinearMxfp4(args, tile, nullptr);
    const RowsView a = actual.Fetch();
    for (int64_t r = -1; r <= out_rows; ++r) {
      ASSERT_TRUE(SameBits(a, e, r, r, stride))
          << what << ", tile " << static_cast<int>(tile) << ", row " << r;
    }
  }
}

std::vector<char> ReadDevice(const CudaLinearBank& bank, int64_t bytes) {
  std::vector<char> host(static_cast<size_t>(bytes));
  EXPECT_EQ(cudaMemcpy(host.data(), bank.weights(), host.size(), cudaMemcpyDeviceToHost),
            cudaSuccess);
  return host;
}

// Returns element (packed row, k) of an image of blocks of 64 x 64 in the layout of linear_image.h.
float ElementOfImage(const std::vector<char>& image, int k_blocks, int row, int k) {
  const char* const strip =
      image.data() + (row / 64 * k_blocks + k / 64) * 2176 + row % 64 / 16 * 544;
  uint32_t word;
  std::memcpy(&word, strip + ((row % 8 * 4 + k % 8 / 2) * 4 + k % 64 / 16) * 4, 4);
  // The bits 15, 8, 7 and 6 of the low or the high half of the word's register.
  const auto bit = [&](int register_bit) {
    const int at = register_bit + k % 2 * 16;
    switch (row % 16 / 8 + k % 16 / 8 * 2) {
      case 0:
        return word >> at & 1;
      case 1:
        return word >> (at - 4) & 1;
      case 2:
        return word >> (at + 6) % 32 & 1;
      default:
        return word >> (register_bit == 8 ? at + 2 : at - 6) & 1;
    }
  };
  const float magnitude = kMagnitudes[bit(8) * 4 + bit(7) * 2 + bit(6)];
  const auto scale =
      static_cast<uint8_t>(strip[512 + row % 8 * 4 + k % 64 / 32 * 2 + row % 16 / 8]);
  return std::ldexp(bit(15) == 0 ? magnitude : -magnitude, scale - 253);
}

TEST(LinearMxfp4Test, EachNumberHasItsPlaceInTheImage) {
  constexpr int kIn = 160, kOut = 70;
  for (const bool gated : {false, true}) {
    LinearBankShape shape{{kIn}, {kOut}, gated, false, DType::kBF16};
    const auto plain = std::move(CudaLinearBank::Create(shape)).value();
    shape.mxfp4 = true;
    const auto bank = std::move(CudaLinearBank::Create(shape)).value();
    const cuda::LinearBankEntry& m = bank->entry(0);
    EXPECT_EQ(m.k_blocks, 3);
    const int blocks = m.row_blocks * m.k_blocks;
    EXPECT_EQ(bank->bytes(), blocks * 2176);
    EXPECT_LT(static_cast<double>(bank->bytes()), 0.27 * static_cast<double>(plain->bytes()));
    Random random(1);
    const int packed_rows = m.row_blocks * 64;
    std::vector<float> expected(static_cast<size_t>(packed_rows) * 192, 0.0f);
    for (const bool gate : {false, true}) {
      if (gate && !gated) continue;
      const std::vector<float> values = RandomMxfp4(kOut, kIn, random);
      bank->LoadWeight(0, gate ? Half::kGate : Half::kMain, 0,
                       MakeTensor(values, {kOut, kIn}, DType::kBF16));
      for (int r = 0; r < kOut; ++r) {
        // Eight rows of the gate and eight of the other half alternate.
        const int row = !gated ? r : r / 8 * 16 + (gate ? 0 : 8) + r % 8;
        for (int k = 0; k < kIn; ++k) expected[row * 192 + k] = values[r * kIn + k];
      }
    }
    ASSERT_TRUE(bank->holds_weights());
    const std::vector<char> image = ReadDevice(*bank, bank->bytes());
    for (int row = 0; row < packed_rows; ++row) {
      for (int k = 0; k < 192; ++k) {
        const float actual = ElementOfImage(image, m.k_blocks, row, k);
        ASSERT_EQ(actual, expected[row * 192 + k]) << "row " << row << ", column " << k;
        ASSERT_EQ(std::signbit(actual), std::signbit(expected[row * 192 + k]));
      }
    }
  }
}

TEST(LinearMxfp4Test, OnlyNumbersOfMxfp4AreStored) {
  const auto stores = [](const std::vector<float>& values, DType type) {
    const auto in = static_cast<int>(values.size());
    LinearBankShape shape{{in}, {1}, false, false, DType::kBF16};
    shape.mxfp4 = true;
    const auto bank = std::move(CudaLinearBank::Create(shape)).value();
    bank->LoadWeight(0, Half::kMain, 0, MakeTensor(values, {1, in}, type));
    if (!bank->holds_weights()) return false;
    const std::vector<char> image = ReadDevice(*bank, bank->bytes());
    for (int k = 0; k < in; ++k) {
      EXPECT_EQ(ElementOfImage(image, bank->entry(0).k_blocks, 0, k), values[k]) << k;
    }
    return true;
  };
  const auto scaled = [](int exponent) {
    std::vector<float> values;
    for (const float m : kMagnitudes) {
      for (const float v : {m, -m}) values.push_back(std::ldexp(v, exponent));
    }
    return values;
  };
  for (const DType type : {DType::kBF16, DType::kF32}) {
    // -127 is the least exponent of the files' scales.
    for (const int exponent : {-127, -126, -125, -20, 0, 1}) {
      EXPECT_TRUE(stores(scaled(exponent), type)) << exponent;
    }
    EXPECT_FALSE(stores(scaled(2), type));
    EXPECT_TRUE(stores({0.5f, 0.0f, -0.5f}, type));
    EXPECT_FALSE(stores({4.0f, 5.0f}, type));
    EXPECT_FALSE(stores({6.0f, 0.25f}, type));
    EXPECT_FALSE(stores({1.25f}, type));
    EXPECT_FALSE(stores({std::numeric_limits<float>::infinity()}, type));
    EXPECT_FALSE(stores({1.0f, std::numeric_limits<float>::quiet_NaN()}, type));
    // Each 32 inputs have their own scale.
    std::vector<float> two(64, 1.0f);
    two[33] = 1e-3f;
    EXPECT_FALSE(stores(two, type));
    std::fill(two.begin() + 32, two.end(), std::ldexp(1.5f, -20));
    EXPECT_TRUE(stores(two, type));
  }
  EXPECT_TRUE(stores(scaled(-9), DType::kF16));
}

TEST(LinearMxfp4Test, DenseProductsHaveTheBitsOfBf16Weights) {
  Random random(2);
  const Activation kinds[] = {ActivationKind::kNone, ActivationKind::kGelu, ActivationKind::kSilu,
                              GeneralActivation()};
  int turn = 0;
  for (const auto& [rows, in, out] : std::vector<std::tuple<int, int, int>>{
           {1, 32, 1}, {7, 96, 65}, {8, 64, 17}, {9, 160, 130}, {65, 224, 64}, {200, 64, 200}}) {
    for (const bool gated : {false, true}) {
      const Mxfp4Pair banks({in}, {out}, gated, turn % 3 != 0, random);
      // Rows that are 16-byte aligned, and rows that are not.
      for (const int more : {8, 3}) {
        DeviceRows x(rows, in, in + more, DType::kBF16, random.Normals(int64_t{rows} * in));
        const Activation kind = kinds[gated ? 2 + turn % 2 : turn % 2];
        CheckSameBits(banks, {.input = x.view(), .output = {}, .activation = kind}, rows, out,
                      turn % 4 < 2 ? DType::kBF16 : DType::kF32,
                      Concat(rows, " x ", in, " x ", out, gated ? " gated" : ""));
        if (HasFatalFailure()) return;
        ++turn;
      }
    }
  }
}

TEST(LinearMxfp4Test, ExpertsHaveTheBitsOfBf16Weights) {
  Random random(3);
  const std::vector<int> widths = {32, 96, 64, 0, 224, 33};
  const int experts = static_cast<int>(widths.size()), model = 96;
  const Mxfp4Pair up({model}, widths, true, true, random);
  std::vector<int> outputs;
  for (const int width : widths) outputs.push_back(width > 0 ? model : 0);
  const Mxfp4Pair down(widths, outputs, false, true, random);
  for (const int rows : {1, 9, 70}) {
    std::vector<std::vector<int>> routes(static_cast<size_t>(rows));
    for (auto& route : routes) {
      for (int e = 0; e < experts; ++e) {
        if (e == 4 || random.Below(3) == 0) route.push_back(e);
      }
    }
    const DevicePlan plan(experts, routes, 5);
    const int64_t capacity = plan.plan.capacity;
    DeviceRows x(rows, model, model, DType::kBF16, random.Normals(int64_t{rows} * model));
    CheckSameBits(up,
                  {.plan = &plan.plan,
                   .gather = true,
                   .input = x.view(),
                   .output = {},
                   .activation = GeneralActivation(),
                   .pad_output = true},
                  capacity, 224, DType::kBF16, Concat("up, rows ", rows));
    if (HasFatalFailure()) return;
    DeviceRows hidden(capacity, 224, 240, DType::kBF16, random.Normals(capacity * 224));
    CheckSameBits(down, {.plan = &plan.plan, .input = hidden.view(), .output = {}}, capacity, model,
                  DType::kF32, Concat("down, rows ", rows));
    if (HasFatalFailure()) return;
  }
}

// Sums of several slices, as in linear_bank.h.
TEST(LinearMxfp4Test, SlicesHaveTheBitsOfBf16Weights) {
  Random random(4);
  const Mxfp4Pair banks({1536, 2304, 3104}, {24, 70, 64}, false, true, random);
  ASSERT_EQ(banks.mxfp4->max_slices(), 4);
  ASSERT_EQ(banks.mxfp4->entry(1).slice_blocks, banks.bf16->entry(1).slice_blocks);
  std::vector<std::vector<int>> routes(12, {1});
  for (int i = 0; i < 9; ++i) routes.push_back({0, 2});
  const DevicePlan plan(3, routes, 2);
  const int64_t capacity = plan.plan.capacity;
  DeviceRows x(capacity, 3104, 3104, DType::kBF16, random.Normals(capacity * 3104));
  CheckSameBits(banks, {.plan = &plan.plan, .input = x.view(), .output = {}}, capacity, 70,
                DType::kF32, "slices");
}

TEST(LinearMxfp4Test, SegmentsHaveTheBitsOfBf16Weights) {
  Random random(5);
  const Mxfp4Pair banks({64}, {48, 48, 48}, false, false, random);
  for (const int rows : {3, 40}) {
    DeviceRows x(rows, 3 * 64, 3 * 64, DType::kBF16, random.Normals(int64_t{rows} * 3 * 64));
    CheckSameBits(banks, {.input = x.view(), .output = {}, .segments = true}, rows, 3 * 48,
                  DType::kF32, "segments");
  }
}

// More tiles than the device has multiprocessors, so that persistent blocks compute several, with
// sums that are shorter and longer than the stages in flight.
TEST(LinearMxfp4Test, ManyTilesHaveTheBitsOfBf16Weights) {
  constexpr int kExperts = 140, kMany = 5, kRows = 130, kWidest = 704;
  Random random(7);
  std::vector<int> in(kExperts, 64);
  in[kMany] = 576;
  in[77] = kWidest;
  const Mxfp4Pair banks(in, std::vector<int>(kExperts, 24), true, false, random);
  std::vector<std::vector<int>> routes(kRows, {kMany});
  for (int e = 0; e < kExperts; ++e) {
    if (e != kMany) routes[1].push_back(e);
  }
  std::sort(routes[1].begin(), routes[1].end());
  const DevicePlan plan(kExperts, routes, 1);
  DeviceRows x(kRows, kWidest, kWidest, DType::kBF16, random.Normals(int64_t{kRows} * kWidest));
  CheckSameBits(banks,
                {.plan = &plan.plan,
                 .gather = true,
                 .input = x.view(),
                 .output = {},
                 .activation = GeneralActivation()},
                plan.plan.capacity, 24, DType::kBF16, "many tiles");
}

// Only LaunchLinearMxfp4() computes with such a bank, so nothing chooses another kernel for it.
TEST(LinearMxfp4Test, OtherKernelsDoNotTakeTheBank) {
  Random random(6);
  const Mxfp4Pair banks({64}, {64}, false, false, random);
  EXPECT_NE(banks.mxfp4->signature(), banks.bf16->signature());
  DeviceRows x(8, 64, 64, DType::kBF16, random.Normals(8 * 64)), y(8, 64, 64, DType::kF32);
  LinearArgs args{.bank = banks.bf16.get(), .input = x.view(), .output = y.view()};
  EXPECT_FALSE(cuda::LinearTilesThatFit(args).empty());
  args.bank = banks.mxfp4.get();
  EXPECT_TRUE(cuda::LinearTilesThatFit(args).empty());
}

}  // namespace
}  // namespace moeserve::testing
