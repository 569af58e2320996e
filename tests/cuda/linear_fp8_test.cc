// Weights of FP8 on the device: their image, and the definition of their sums, which all tiles
// share.

#include "kernels/cuda/quantized/linear_fp8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/error_text.h"
#include "tests/cuda/linear_case.h"

namespace moeserve::testing {
namespace {

using cuda::CudaLinearBank;
using cuda::LinearTile;
using Half = LinearBank::Half;

constexpr LinearTile kFp8Tiles[] = {
    LinearTile::kRows8,      LinearTile::kRows16,      LinearTile::kRows32,
    LinearTile::kRows64,     LinearTile::kRows128,     LinearTile::kStream8x16,
    LinearTile::kStream8x64, LinearTile::kStream32x16, LinearTile::kStream32x64,
    LinearTile::kWarpgroup,  LinearTile::kAuto};

// Returns the value of E4M3 without a scale.
float Fp8Value(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return code < 128 ? magnitude : -magnitude;
}

// The numbers of one half of one expert: codes [out][in], scales [out][groups of 128 inputs].
struct Fp8Numbers {
  int in = 0, out = 0;
  std::vector<uint8_t> codes;
  std::vector<float> scales;

  int groups() const { return (in + 127) / 128; }
  float Scale(int r, int k) const { return scales[r * groups() + k / 128]; }
  Matrix Widened() const {
    Matrix m(static_cast<size_t>(out));
    for (int r = 0; r < out; ++r) {
      for (int k = 0; k < in; ++k) {
        m[r].push_back(static_cast<double>(Fp8Value(codes[r * in + k])) * Scale(r, k));
      }
    }
    return m;
  }
};

// A bank of random FP8 numbers, whose products have a magnitude of about 1.
struct Fp8Case {
  std::unique_ptr<CudaLinearBank> bank;
  std::vector<Fp8Numbers> main, gate;  // [expert]
  std::vector<std::vector<double>> main_bias, gate_bias;

  Fp8Case(std::vector<int> in, std::vector<int> out, bool gated, bool bias, Random& random) {
    LinearBankShape shape{std::move(in), std::move(out), gated, bias, DType::kBF16};
    shape.fp8 = true;
    bank = std::move(CudaLinearBank::Create(shape)).value();
    for (int e = 0; e < bank->num_experts(); ++e) {
      main.push_back(Load(Half::kMain, e, random, main_bias));
      if (gated) gate.push_back(Load(Half::kGate, e, random, gate_bias));
    }
    EXPECT_TRUE(bank->holds_weights());
    EXPECT_EQ(bank->max_slices(), 1);
  }

  // Returns the outputs before rounding.
  std::vector<double> Expected(int e, const std::vector<double>& x, const Activation& kind) const {
    std::vector<double> y = OracleLinear(x, main[e].Widened(), main_bias[e]);
    if (gate.empty()) {
      for (double& v : y) v = OracleActivation(kind.kind, v);
      return y;
    }
    const std::vector<double> g = OracleLinear(x, gate[e].Widened(), gate_bias[e]);
    for (size_t i = 0; i < y.size(); ++i) y[i] = OracleGated(kind, g[i], y[i]);
    return y;
  }

 private:
  // Loads the half in two parts, the second one from rows that are further apart.
  Fp8Numbers Load(Half half, int e, Random& random, std::vector<std::vector<double>>& biases) {
    Fp8Numbers n{bank->shape().in_features_of(e), bank->shape().out_features[e], {}, {}};
    for (int i = 0; i < n.in * n.out; ++i) {
      // Normal numbers of up to 30, and all others now and then.
      int code = random.Below(8) == 0 ? random.Below(128) : 8 + random.Below(86);
      if (code == 127) code = 0;
      n.codes.push_back(static_cast<uint8_t>(code + 128 * random.Below(2)));
    }
    for (int i = 0; i < n.groups() * n.out; ++i) {
      n.scales.push_back(static_cast<float>((0.2 + random.Uniform()) * 0.2 / std::sqrt(n.in)));
    }
    const int first = n.out / 3, stride = n.in + 5;
    std::vector<uint8_t> apart(static_cast<size_t>(n.out) * stride, 0x7f);
    for (int r = 0; r < n.out; ++r) {
      std::copy_n(n.codes.begin() + r * n.in, n.in, apart.begin() + r * stride);
    }
    bank->LoadFp8(e, half, 0,
                  {.rows = first,
                   .columns = n.in,
                   .values = n.codes.data(),
                   .row_stride = n.in,
                   .scales = {n.scales.begin(), n.scales.begin() + first * n.groups()},
                   .owner = nullptr});
    bank->LoadFp8(e, half, first,
                  {.rows = n.out - first,
                   .columns = n.in,
                   .values = apart.data() + first * stride,
                   .row_stride = stride,
                   .scales = {n.scales.begin() + first * n.groups(), n.scales.end()},
                   .owner = nullptr});
    biases.emplace_back();
    if (bank->shape().bias && n.out > 0) {
      const HostTensor t = MakeTensor(random.Normals(n.out), {n.out});
      bank->LoadBias(e, half, 0, t);
      for (int i = 0; i < n.out; ++i) biases.back().push_back(ElementAsF32(t, i));
    }
    return n;
  }
};

// Computes the product with all tiles and compares the bits of all bytes of the outputs. Returns
// the outputs.
std::unique_ptr<DeviceRows> CheckFp8Tiles(const Fp8Case& c, LinearArgs args, int64_t out_rows,
                                          int64_t out_columns, DType type,
                                          const std::string& what) {
  const int64_t stride = RoundUp16(out_columns) + 3 * (out_rows % 2);
  const auto compute = [&](LinearTile tile) {
    auto rows = std::make_unique<DeviceRows>(out_rows, out_columns, stride, type);
    args.bank = c.bank.get();
    args.output = rows->view();
    cuda::LaunchLinearFp8(args, tile, nullptr);
    return rows;
  };
  std::unique_ptr<DeviceRows> expected = compute(LinearTile::kRows8);
  const RowsView e = expected->Fetch();
  for (const LinearTile tile : kFp8Tiles) {
    const std::unique_ptr<DeviceRows> actual = compute(tile);
    const RowsView a = actual->Fetch();
    for (int64_t r = -1; r <= out_rows; ++r) {
      EXPECT_TRUE(SameBits(a, e, r, r, stride))
          << what << ", tile " << static_cast<int>(tile) << ", row " << r;
      if (::testing::Test::HasFailure()) return expected;
    }
  }
  return expected;
}

std::vector<double> Fp8InputRow(const std::vector<float>& values, int64_t row, int64_t cols) {
  std::vector<double> x;
  for (int64_t k = 0; k < cols; ++k) {
    x.push_back(F32FromBf16(Bf16FromF32(values[static_cast<size_t>(row * cols + k)])));
  }
  return x;
}

double Fp8Output(const RowsView& rows, int64_t r, int64_t c) {
  const HostTensor t{rows.row(r), rows.dtype, {rows.cols}, nullptr};
  return ElementAsF32(t, c);
}

// Each product of a row of a unit matrix is one weight.
TEST(LinearFp8Test, EachNumberIsWidenedExactly) {
  constexpr int kIn = 200, kOut = 70;
  for (const bool gated : {false, true}) {
    Random random(1);
    LinearBankShape shape{{kIn}, {kOut}, gated, false, DType::kBF16};
    const auto plain = std::move(CudaLinearBank::Create(shape)).value();
    shape.fp8 = true;
    const auto bank = std::move(CudaLinearBank::Create(shape)).value();
    EXPECT_EQ(bank->entry(0).k_blocks, 4);
    EXPECT_EQ(bank->bytes(), bank->entry(0).row_blocks * 4 * 4224);
    EXPECT_LT(static_cast<double>(bank->bytes()), 0.516 * static_cast<double>(plain->bytes()));
    EXPECT_NE(bank->signature(), plain->signature());
    // All codes but NaN; the gate's numbers are other ones.
    const auto code = [](bool gate, int r, int k) {
      const int c = (r * 37 + k + (gate ? 101 : 0)) % 256;
      return static_cast<uint8_t>(c % 128 == 127 ? c - 1 : c);
    };
    std::vector<float> scales[2];
    for (const bool gate : {false, true}) {
      if (gate && !gated) continue;
      std::vector<uint8_t> codes;
      for (int r = 0; r < kOut; ++r) {
        for (int k = 0; k < kIn; ++k) codes.push_back(code(gate, r, k));
      }
      for (int i = 0; i < kOut * 2; ++i)
        scales[gate].push_back(0.1f + static_cast<float>(random.Uniform()));
      bank->LoadFp8(0, gate ? Half::kGate : Half::kMain, 0,
                    {.rows = kOut,
                     .columns = kIn,
                     .values = codes.data(),
                     .row_stride = kIn,
                     .scales = scales[gate],
                     .owner = nullptr});
    }
    ASSERT_TRUE(bank->holds_weights());
    std::vector<float> unit(kIn * kIn, 0.0f);
    for (int k = 0; k < kIn; ++k) unit[k * kIn + k] = 1.0f;
    const DeviceRows x(kIn, kIn, kIn, DType::kBF16, unit);
    DeviceRows y(kIn, kOut, kOut, DType::kF32);
    cuda::LaunchLinearFp8({.bank = bank.get(), .input = x.view(), .output = y.view()},
                          LinearTile::kRows32, nullptr);
    const RowsView actual = y.Fetch();
    for (int k = 0; k < kIn; ++k) {
      for (int r = 0; r < kOut; ++r) {
        const auto weight = [&](bool gate) {
          return Fp8Value(code(gate, r, k)) * scales[gate][r * 2 + k / 128];
        };
        const float expected = gated ? weight(true) * weight(false) : weight(false);
        ASSERT_EQ(static_cast<float>(Fp8Output(actual, k, r)), expected) << r << ' ' << k;
      }
    }
  }
}

TEST(LinearFp8Test, NansAreNotStored) {
  for (const int code : {0x7e, 0xfe, 0x7f, 0xff}) {
    LinearBankShape shape{{40}, {3}, false, false, DType::kBF16};
    shape.fp8 = true;
    const auto bank = std::move(CudaLinearBank::Create(shape)).value();
    std::vector<uint8_t> codes(40 * 3, 0x38);
    codes[79] = static_cast<uint8_t>(code);
    bank->LoadFp8(0, Half::kMain, 0,
                  {.rows = 3,
                   .columns = 40,
                   .values = codes.data(),
                   .row_stride = 40,
                   .scales = {1.0f, 1.0f, 1.0f},
                   .owner = nullptr});
    EXPECT_EQ(bank->holds_weights(), (code & 0x7f) != 0x7f);
  }
}

// The sums as LinearBankShape::fp8 states them, computed from products with bf16 weights.
TEST(LinearFp8Test, EachSumOf128InputsIsScaledOnce) {
  Random random(2);
  constexpr int kRows = 9, kOut = 70;
  for (const int in : {40, 128, 192, 400}) {
    const Fp8Case c({in}, {kOut}, false, false, random);
    const std::vector<float> values = random.Normals(int64_t{kRows} * in);
    const DeviceRows x(kRows, in, in + 8, DType::kBF16, values);
    const auto actual = CheckFp8Tiles(c, {.input = x.view(), .output = {}}, kRows, kOut,
                                      DType::kF32, Concat(in, " inputs"));
    if (HasFailure()) return;
    std::vector<float> expected(kRows * kOut, 0.0f);
    for (int group = 0; group < c.main[0].groups(); ++group) {
      const int first = group * 128, width = std::min(128, in - first);
      const auto bank =
          std::move(CudaLinearBank::Create({{width}, {kOut}, false, false, DType::kBF16})).value();
      std::vector<float> unscaled;
      for (int r = 0; r < kOut; ++r) {
        for (int k = 0; k < width; ++k) {
          unscaled.push_back(Fp8Value(c.main[0].codes[r * in + first + k]));
        }
      }
      bank->LoadWeight(0, Half::kMain, 0, MakeTensor(unscaled, {kOut, width}, DType::kBF16));
      DeviceRows part(kRows, kOut, kOut, DType::kF32);
      cuda::LaunchLinear(
          {.bank = bank.get(), .input = x.view().Columns(first, width), .output = part.view()},
          LinearTile::kRows8, nullptr);
      const RowsView sums = part.Fetch();
      for (int i = 0; i < kRows * kOut; ++i) {
        const auto sum = static_cast<float>(Fp8Output(sums, i / kOut, i % kOut));
        expected[i] = std::fma(sum, c.main[0].Scale(i % kOut, first), expected[i]);
      }
    }
    const RowsView a = actual->Fetch();
    for (int i = 0; i < kRows * kOut; ++i) {
      ASSERT_EQ(static_cast<float>(Fp8Output(a, i / kOut, i % kOut)), expected[i])
          << in << " inputs, row " << i / kOut << ", output " << i % kOut;
    }
  }
}

TEST(LinearFp8Test, DenseProductsAreNearTheOracle) {
  Random random(3);
  const Activation kinds[] = {ActivationKind::kNone, ActivationKind::kGelu, ActivationKind::kSilu,
                              GeneralActivation()};
  int turn = 0;
  for (const auto& [rows, in, out] : std::vector<std::tuple<int, int, int>>{
           {1, 32, 1}, {7, 96, 65}, {8, 264, 17}, {9, 160, 130}, {65, 224, 64}, {200, 136, 200}}) {
    for (const bool gated : {false, true}) {
      const Fp8Case c({in}, {out}, gated, turn % 3 != 0, random);
      // Rows that are 16-byte aligned, and rows that are not.
      for (const int more : {8, 3}) {
        const std::vector<float> values = random.Normals(int64_t{rows} * in);
        const DeviceRows x(rows, in, in + more, DType::kBF16, values);
        const Activation kind = kinds[gated ? 2 + turn % 2 : turn % 2];
        const DType type = turn % 4 < 2 ? DType::kBF16 : DType::kF32;
        const auto y =
            CheckFp8Tiles(c, {.input = x.view(), .output = {}, .activation = kind}, rows, out, type,
                          Concat(rows, " x ", in, " x ", out, gated ? " gated" : ""));
        if (HasFailure()) return;
        const RowsView actual = y->Fetch();
        for (const int r : {0, rows / 2, rows - 1}) {
          const std::vector<double> expected = c.Expected(0, Fp8InputRow(values, r, in), kind);
          for (int i = 0; i < out; ++i) {
            const double bound = type == DType::kBF16 ? 0.005 : 2e-5;
            ASSERT_NEAR(Fp8Output(actual, r, i), expected[i],
                        bound * std::max(1.0, std::abs(expected[i])))
                << r << ' ' << i;
          }
        }
        ++turn;
      }
    }
  }
}

TEST(LinearFp8Test, ExpertsAreNearTheOracle) {
  Random random(4);
  const std::vector<int> widths = {32, 96, 130, 0, 224, 33};
  const int experts = static_cast<int>(widths.size()), model = 160;
  const Fp8Case up({model}, widths, true, true, random);
  std::vector<int> outputs;
  for (const int width : widths) outputs.push_back(width > 0 ? model : 0);
  const Fp8Case down(widths, outputs, false, true, random);
  for (const int rows : {1, 9, 70}) {
    std::vector<std::vector<int>> routes(static_cast<size_t>(rows));
    for (auto& route : routes) {
      for (int e = 0; e < experts; ++e) {
        if (e == 4 || random.Below(3) == 0) route.push_back(e);
      }
    }
    const DevicePlan plan(experts, routes, 5);
    const int64_t capacity = plan.plan.capacity;
    const std::vector<float> values = random.Normals(int64_t{rows} * model);
    const DeviceRows x(rows, model, model, DType::kBF16, values);
    const auto y = CheckFp8Tiles(up,
                                 {.plan = &plan.plan,
                                  .gather = true,
                                  .input = x.view(),
                                  .output = {},
                                  .activation = GeneralActivation(),
                                  .pad_output = true},
                                 capacity, 224, DType::kBF16, Concat("up, rows ", rows));
    if (HasFailure()) return;
    const RowsView actual = y->Fetch();
    for (int a = 0; a < plan.assignments(); a += 1 + a % 7) {
      const int e = plan.expert[a];
      const std::vector<double> expected =
          up.Expected(e, Fp8InputRow(values, plan.row[a], model), GeneralActivation());
      for (int i = 0; i < widths[e]; ++i) ASSERT_NEAR(Fp8Output(actual, a, i), expected[i], 0.02);
    }
    const DeviceRows hidden(capacity, 224, 240, DType::kBF16, random.Normals(capacity * 224));
    CheckFp8Tiles(down, {.plan = &plan.plan, .input = hidden.view(), .output = {}}, capacity, model,
                  DType::kF32, Concat("down, rows ", rows));
    if (HasFailure()) return;
  }
}

TEST(LinearFp8Test, SegmentsAndManyTilesHaveTheSameBits) {
  Random random(5);
  const Fp8Case segments({136}, {48, 48, 48}, false, false, random);
  for (const int rows : {3, 40}) {
    const DeviceRows x(rows, 3 * 136, 3 * 136, DType::kBF16,
                       random.Normals(int64_t{rows} * 3 * 136));
    CheckFp8Tiles(segments, {.input = x.view(), .output = {}, .segments = true}, rows, 3 * 48,
                  DType::kF32, "segments");
    if (HasFailure()) return;
  }
  // More tiles than the device has multiprocessors, with sums that are shorter and longer than the
  // stages in flight.
  constexpr int kExperts = 140, kMany = 5, kRows = 70, kWidest = 1160;
  std::vector<int> in(kExperts, 64);
  in[kMany] = 576;
  in[77] = kWidest;
  const Fp8Case many(in, std::vector<int>(kExperts, 24), true, false, random);
  std::vector<std::vector<int>> routes(kRows, {kMany});
  for (int e = 0; e < kExperts; ++e) {
    if (e != kMany) routes[1].push_back(e);
  }
  std::sort(routes[1].begin(), routes[1].end());
  const DevicePlan plan(kExperts, routes, 1);
  const DeviceRows x(kRows, kWidest, kWidest, DType::kBF16,
                     random.Normals(int64_t{kRows} * kWidest));
  CheckFp8Tiles(many,
                {.plan = &plan.plan,
                 .gather = true,
                 .input = x.view(),
                 .output = {},
                 .activation = ActivationKind::kSilu},
                plan.plan.capacity, 24, DType::kBF16, "many tiles");
}

// The bits of a row depend neither on the other rows nor on their number, with the tiles that are
// chosen for these numbers.
TEST(LinearFp8Test, RowsDoNotDependOnTheirCompany) {
  Random random(6);
  constexpr int kIn = 392, kOut = 136, kRows = 150;
  const Fp8Case c({kIn}, {kOut}, false, true, random);
  const std::vector<float> values = random.Normals(int64_t{kRows} * kIn);
  const auto compute = [&](int first, int rows) {
    const DeviceRows x(rows, kIn, kIn, DType::kBF16,
                       {values.begin() + first * kIn, values.begin() + (first + rows) * kIn});
    auto y = std::make_unique<DeviceRows>(rows, kOut, kOut, DType::kF32);
    cuda::LaunchLinearFp8({.bank = c.bank.get(), .input = x.view(), .output = y->view()},
                          LinearTile::kAuto, nullptr);
    return y;
  };
  const auto all = compute(0, kRows);
  const RowsView expected = all->Fetch();
  for (const auto& [first, rows] : {std::pair{0, 1}, {149, 1}, {3, 20}, {20, 64}}) {
    const auto some = compute(first, rows);
    const RowsView actual = some->Fetch();
    for (int r = 0; r < rows; ++r) EXPECT_TRUE(SameBits(actual, expected, r, first + r, kOut)) << r;
  }
}

// Only LaunchLinearFp8() computes with such a bank, so nothing chooses another kernel for it.
TEST(LinearFp8Test, OtherKernelsDoNotTakeTheBank) {
  Random random(7);
  const Fp8Case c({64}, {64}, false, false, random);
  const DeviceRows x(8, 64, 64, DType::kBF16, random.Normals(8 * 64)), y(8, 64, 64, DType::kF32);
  const LinearArgs args{.bank = c.bank.get(), .input = x.view(), .output = y.view()};
  EXPECT_TRUE(cuda::LinearTilesThatFit(args).empty());
  EXPECT_EQ(cuda::Fp8TilesThatFit(args).size(), std::size(kFp8Tiles) - 1);
  const BankCase plain({64}, {64}, false, false, DType::kBF16, random);
  EXPECT_TRUE(
      cuda::Fp8TilesThatFit({.bank = plain.bank.get(), .input = x.view(), .output = y.view()})
          .empty());
}

}  // namespace
}  // namespace moeserve::testing
