// Rounding of weights to integers, and of scales to f16.

#include "kernels/base/quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/base/rounding/select_kernels.h"
#include "tests/support/integer_weights.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

constexpr Quantization kTypes[] = {Quantization::kInt8, Quantization::kInt8Channel,
                                   Quantization::kInt4, Quantization::kInt4K};

struct Rounded {
  Quantization type;
  int64_t columns;
  std::vector<int8_t> values;
  std::vector<F16> scales;

  // The first scale of the column's group.
  F16 scale_bits(size_t column) const {
    const auto in_group = static_cast<size_t>(QuantScales(type, 1));
    return scales[column / static_cast<size_t>(QuantGroup(type)) * in_group];
  }
  float scale(size_t column) const { return F32FromF16(scale_bits(column)); }
  double element(size_t column) const {
    return ElementOf(type, columns, values.data(), scales.data(), static_cast<int64_t>(column));
  }
};

Rounded Round(Quantization type, const std::vector<float>& row,
              const rounding::RoundingKernels& kernels = rounding::SelectedKernels()) {
  const auto columns = static_cast<int64_t>(row.size());
  Rounded r{type, columns, {}, {}};
  // Initialised with impossible values, so that missing writes are detected.
  r.values.assign(static_cast<size_t>(QuantRowValues(type, columns)), -128);
  r.scales.assign(static_cast<size_t>(QuantScales(type, columns)), 0xffff);
  QuantizeRow(kernels, type, row, r.values.data(), r.scales.data());
  return r;
}

bool IsNan(F16 v) { return (v & 0x7c00) == 0x7c00 && (v & 0x3ff) != 0; }

TEST(F16, EveryValueComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto v = static_cast<F16>(bits);
    const F16 back = F16FromF32(F32FromF16(v));
    if (IsNan(v)) {
      EXPECT_TRUE(IsNan(back)) << bits;
    } else {
      ASSERT_EQ(back, v);
    }
  }
}

TEST(F16, BetweenTwoValuesTheNearerAndOfEqualsTheEven) {
  constexpr F16 kInfinity = 0x7c00;
  for (F16 low = 0; low < kInfinity; ++low) {
    const F16 high = static_cast<F16>(low + 1);
    const float a = F32FromF16(low);
    // The boundary of infinity is half way to the value, 65536, that would follow the largest
    // finite one, 65504.
    const float b = high == kInfinity ? 65536.0f : F32FromF16(high);
    const float middle = (a + b) / 2;
    for (const uint16_t sign : {0x0000, 0x8000}) {
      const float s = sign == 0 ? 1.0f : -1.0f;
      ASSERT_EQ(F16FromF32(s * middle), (low % 2 == 0 ? low : high) | sign) << low;
      ASSERT_EQ(F16FromF32(s * std::nextafter(middle, 0.0f)), low | sign) << low;
      ASSERT_EQ(F16FromF32(s * std::nextafter(middle, 1e9f)), high | sign) << low;
    }
  }
  EXPECT_EQ(F16FromF32(std::numeric_limits<float>::max()), kInfinity);
  EXPECT_EQ(F16FromF32(std::numeric_limits<float>::denorm_min()), 0);
}

// Returns rows of many lengths, distributions and magnitudes whose scales are normal f16 numbers.
std::vector<std::vector<float>> Rows(Random& random) {
  std::vector<std::vector<float>> rows;
  for (const int n : {1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 100, 128, 257}) {
    for (const double magnitude : {0.05, 1.0, 300.0}) {
      std::vector<float> normal = random.Normals(n, magnitude), uniform, sparse;
      for (int i = 0; i < n; ++i) {
        uniform.push_back(static_cast<float>((2 * random.Uniform() - 1) * magnitude));
        sparse.push_back(random.Below(8) == 0 ? uniform.back() : 0.0f);
      }
      std::vector<float> outlier = normal;
      outlier[static_cast<size_t>(random.Below(n))] *= 20.0f;
      for (auto* row : {&normal, &uniform, &sparse, &outlier}) rows.push_back(*row);
    }
  }
  return rows;
}

TEST(QuantizeRow, IntegersStayInRange) {
  Random random(1);
  for (const Quantization type : kTypes) {
    for (const std::vector<float>& row : Rows(random)) {
      const Rounded r = Round(type, row);
      for (size_t i = 0; i < row.size(); ++i) {
        ASSERT_GE(r.values[i], QuantMin(type));
        ASSERT_LE(r.values[i], QuantMax(type));
      }
      for (const F16 s : r.scales) ASSERT_NE(s & 0x7c00, 0x7c00);
      if (type != Quantization::kInt4K) continue;
      const float unit = F32FromF16(r.scales[1]);
      ASSERT_EQ(unit, std::floor(unit));
      ASSERT_GE(unit, 0.0f);
      ASSERT_LE(unit, kMaxMinimumUnit);
    }
  }
}

TEST(QuantizeRow, AnInt8IsWithinHalfAStep) {
  Random random(2);
  for (const std::vector<float>& row : Rows(random)) {
    const Rounded r = Round(Quantization::kInt8, row);
    for (size_t begin = 0; begin < row.size(); begin += 64) {
      const size_t end = std::min(row.size(), begin + 64);
      double largest = 0.0;
      for (size_t i = begin; i < end; ++i) largest = std::max<double>(largest, std::fabs(row[i]));
      const double scale = r.scale(begin);
      EXPECT_NEAR(scale, largest / 127, largest / 127 * 0x1p-11 + 1e-30);
      // A scale that was rounded down limits values to 127 times the scale.
      const double bound = scale / 2 * (1 + 1e-5) + std::max(0.0, largest - 127 * scale);
      for (size_t i = begin; i < end; ++i) {
        ASSERT_LE(std::fabs(r.values[i] * scale - row[i]), bound) << "column " << i;
      }
    }
  }
}

// Returns the squared error of a group's integers with their scale.
double SquaredError(const std::vector<float>& w, const int8_t* q, double scale) {
  double sum = 0.0;
  for (size_t i = 0; i < w.size(); ++i) sum += (q[i] * scale - w[i]) * (q[i] * scale - w[i]);
  return sum;
}

// Returns the squared error of a group if the value of largest magnitude simply becomes -8.
double PlainError(const std::vector<float>& w) {
  float extreme = 0.0f;
  for (const float v : w) {
    if (std::fabs(v) > std::fabs(extreme)) extreme = v;
  }
  const float scale = F32FromF16(F16FromF32(extreme / -8.0f));
  std::vector<int8_t> q;
  for (const float v : w) {
    const double level = scale == 0.0f ? 0.0 : std::round(v / scale);
    q.push_back(static_cast<int8_t>(std::clamp(level, -8.0, 7.0)));
  }
  return SquaredError(w, q.data(), scale);
}

TEST(QuantizeRow, AnInt4GroupIsNoWorseThanThePlainScale) {
  Random random(3);
  for (const std::vector<float>& row : Rows(random)) {
    const Rounded r = Round(Quantization::kInt4, row);
    for (size_t begin = 0; begin < row.size(); begin += 32) {
      const size_t end = std::min(row.size(), begin + 32);
      const std::vector<float> group(row.begin() + static_cast<int64_t>(begin),
                                     row.begin() + static_cast<int64_t>(end));
      double power = 0.0;
      for (const float v : group) power += double{v} * v;
      const double error = SquaredError(group, r.values.data() + begin, r.scale(begin));
      // The best scale is rounded to f16, with a relative error of at most 2^-11.
      EXPECT_LE(error, PlainError(group) * (1 + 1e-5) + power * 0x1p-22) << row.size();
    }
  }
}

TEST(QuantizeRow, TheSearchForAnInt4ScalePays) {
  Random random(4);
  double error = 0.0, plain = 0.0;
  for (int i = 0; i < 2000; ++i) {
    const std::vector<float> group = random.Normals(32, 0.1);
    const Rounded r = Round(Quantization::kInt4, group);
    error += SquaredError(group, r.values.data(), r.scale(0));
    plain += PlainError(group);
  }
  EXPECT_LT(error, 0.9 * plain);
}

TEST(QuantizeRow, APowerOfTwoOnlyChangesTheScales) {
  Random random(5);
  for (const Quantization type : kTypes) {
    std::vector<float> row = random.Normals(130);
    const Rounded one = Round(type, row);
    for (float& v : row) v *= 8.0f;
    const Rounded eight = Round(type, row);
    EXPECT_EQ(one.values, eight.values);
    for (size_t i = 0; i < row.size(); ++i) {
      EXPECT_EQ(eight.scale(i), 8.0f * one.scale(i));
      EXPECT_EQ(eight.element(i), 8.0 * one.element(i));
    }
  }
}

TEST(QuantizeRow, GroupsDoNotInfluenceEachOther) {
  Random random(6);
  for (const Quantization type : kTypes) {
    const int group = QuantGroup(type);
    std::vector<float> row = random.Normals(3 * group + 5);
    const Rounded before = Round(type, row);
    for (int i = 0; i < group; ++i) row[static_cast<size_t>(group + i)] *= 100.0f;
    const Rounded after = Round(type, row);
    for (size_t i = 0; i < row.size(); ++i) {
      if (static_cast<int>(i) / group == 1) continue;
      ASSERT_EQ(before.values[i], after.values[i]);
      ASSERT_EQ(before.element(i), after.element(i));
    }
    EXPECT_NE(before.scale(static_cast<size_t>(group)), after.scale(static_cast<size_t>(group)));
  }
}

TEST(QuantizeRow, ZerosAndSingleElements) {
  for (const Quantization type : kTypes) {
    for (const size_t n : {1, 32, 64, 70}) {
      const Rounded r = Round(type, std::vector<float>(n, 0.0f));
      EXPECT_EQ(r.values, std::vector<int8_t>(r.values.size(), 0));
      for (const F16 scale : r.scales) EXPECT_EQ(scale, 0);
    }
    for (const float v : {1.0f, -1.0f, 0.37f, -123.4f, 65504.0f, -65504.0f}) {
      const Rounded r = Round(type, {v});
      if (type != Quantization::kInt4K) {
        EXPECT_GE(std::abs(r.values[0]), QuantMax(type)) << v;
      }
      EXPECT_NEAR(r.element(0), v, std::fabs(v) * 0x1p-10) << Name(type);
    }
  }
}

// Scales below 2^-14 have fewer bits, and scales below 2^-25 are 0: with them, values become coarse
// and then 0, but never large or NaN.
TEST(QuantizeRow, TinyValuesFade) {
  Random random(7);
  for (const Quantization type : kTypes) {
    for (int exponent = -149; exponent <= -10; ++exponent) {
      std::vector<float> row = random.Normals(64);
      for (float& v : row) v = std::ldexp(v, exponent);
      const Rounded r = Round(type, row);
      float largest = 0.0f;
      for (const float v : row) largest = std::max(largest, std::fabs(v));
      for (size_t i = 0; i < row.size(); ++i) {
        ASSERT_TRUE(std::isfinite(r.scale(i)));
        ASSERT_LE(std::fabs(r.element(i) - row[i]), largest * 1.01f)
            << Name(type) << ", 2^" << exponent;
      }
    }
  }
}

TEST(QuantizeRow, WhatNoScaleCanHoldShowsAsNan) {
  Random random(8);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const Quantization type : kTypes) {
    const auto group = static_cast<size_t>(QuantGroup(type));
    for (const float bad : {kInfinity, -kInfinity, std::nanf(""), 65505.0f, -1e30f}) {
      std::vector<float> row = random.Normals(static_cast<int64_t>(3 * group - 1));
      const Rounded good = Round(type, row);
      for (const size_t at : {group, 2 * group - 1}) {
        std::vector<float> damaged = row;
        damaged[at] = bad;
        const Rounded r = Round(type, damaged);
        EXPECT_TRUE(IsNan(r.scale_bits(at))) << bad;
        EXPECT_TRUE(std::isnan(r.element(at)));
        // The NaN scale makes every product with an integer NaN, and so every sum.
        for (size_t i = 0; i < row.size(); ++i) {
          if (i / group == 1) continue;
          ASSERT_EQ(r.values[i], good.values[i]);
          ASSERT_EQ(r.element(i), good.element(i));
        }
      }
    }
  }
}

// Weights that are all of the same sign or equal, where a line through two different levels does
// not exist.
TEST(QuantizeRow, RowsOfOneSign) {
  Random random(11);
  for (const Quantization type : kTypes) {
    for (const float sign : {-1.0f, 1.0f}) {
      for (const size_t n : {1, 2, 31, 32, 33, 100}) {
        const Rounded equal = Round(type, std::vector<float>(n, 0.7f * sign));
        for (size_t i = 0; i < n; ++i) ASSERT_NEAR(equal.element(i), 0.7 * sign, 0.7 * 0x1p-10);
        std::vector<float> row = random.Normals(static_cast<int64_t>(n));
        float largest = 0.0f;
        for (float& v : row) {
          v = std::fabs(v) * sign;
          largest = std::max(largest, std::fabs(v));
        }
        const Rounded r = Round(type, row);
        for (size_t i = 0; i < n; ++i) ASSERT_NEAR(r.element(i), row[i], 0.15f * largest);
      }
    }
  }
}

// int4-k has fewer bits for scales than int4, and must still be at least as exact.
TEST(QuantizeRow, Int4KIsAtLeastAsExactAsInt4) {
  Random random(12);
  double error[2] = {};
  for (int i = 0; i < 50; ++i) {
    const std::vector<float> row = random.Normals(512, 0.1);
    const Rounded rounded[2] = {Round(Quantization::kInt4, row), Round(Quantization::kInt4K, row)};
    for (size_t c = 0; c < row.size(); ++c) {
      for (const int k : {0, 1}) error[k] += std::pow(rounded[k].element(c) - row[c], 2);
    }
  }
  EXPECT_LT(error[1], error[0]);
}

// Folders and packed caches hold rounded weights, so every build and instruction set must round
// alike.
TEST(QuantizeRow, TheBitsStay) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  const auto add = [&](uint64_t v) { hash = (hash ^ v) * 0x100000001b3ULL; };
  Random random(13);
  for (const Quantization type : kTypes) {
    for (int n = 1; n < 700; n += 23) {
      std::vector<float> row(static_cast<size_t>(n));
      // Sums of integers are near to normal and the same on every platform.
      for (float& v : row) {
        for (int i = 0; i < 4; ++i) v += static_cast<float>(random.Below(2001) - 1000) * 0x1p-12f;
      }
      const Rounded r = Round(type, row);
      for (const int8_t v : r.values) add(static_cast<uint8_t>(v));
      for (const F16 v : r.scales) add(v);
    }
  }
  EXPECT_EQ(hash, 0x769d490737754a0dULL);
}

// Every instruction set computes the same bits, for rows that fill the last group of lanes, its
// last subgroup, or neither, with groups of zeros and values that are not finite.
TEST(QuantizeRow, EveryInstructionSetComputesTheSameBits) {
  Random random(11);
  for (const Quantization type : kTypes) {
    for (const int64_t n : {1, 31, 32, 40, 256, 257, 288, 500, 512, 544, 1000, 1536}) {
      std::vector<float> row = random.Normals(n, 0.02);
      if (n == 288) std::fill(row.begin(), row.begin() + 64, 0.0f);
      if (n == 500) row[300] = std::numeric_limits<float>::infinity();
      if (n == 544) row[1] = 1e-42f;
      if (n == 1000) std::fill(row.begin() + 32, row.begin() + 96, 0.25f);
      const Rounded expected = Round(type, row, rounding::kPlainKernels);
      for (const rounding::RoundingKernels* kernels : rounding::SupportedKernels()) {
        const Rounded found = Round(type, row, *kernels);
        EXPECT_EQ(found.values, expected.values) << kernels->name << ", " << n << " columns";
        EXPECT_EQ(found.scales, expected.scales) << kernels->name << ", " << n << " columns";
      }
    }
  }
}

TEST(PackQuantizedRow, UnpacksToTheSame) {
  Random random(9);
  for (const Quantization type : kTypes) {
    for (int n = 1; n <= 67; ++n) {
      std::vector<int8_t> values;
      for (int i = 0; i < n; ++i) {
        values.push_back(static_cast<int8_t>(QuantMin(type) +
                                             random.Below(QuantMax(type) - QuantMin(type) + 1)));
      }
      for (int64_t i = 0; i < QuantSubGroups(type, n); ++i) {
        values.push_back(static_cast<int8_t>(random.Below(256) - 128));
      }
      const auto bytes = static_cast<size_t>(QuantRowBytes(type, n));
      std::vector<uint8_t> packed(bytes + 1, 0xa5);
      PackQuantizedRow(type, n, values.data(), packed.data());
      EXPECT_EQ(packed[bytes], 0xa5) << "beyond the row";
      std::vector<int8_t> unpacked(values.size(), 99);
      UnpackQuantizedRow(type, n, packed.data(), unpacked.data());
      ASSERT_EQ(unpacked, values);
      if (Traits(type).per_byte == 2 && n % 2 != 0) {
        EXPECT_EQ(packed[static_cast<size_t>(n / 2)] >> 4, 0);
      }
    }
  }
}

TEST(PackQuantizedRow, TheEvenColumnIsInTheLowBits) {
  uint8_t bytes[3];
  PackQuantizedRow(Quantization::kInt4, 3, std::vector<int8_t>{-8, 7, -1}.data(), bytes);
  EXPECT_EQ(bytes[0], 0x78);
  EXPECT_EQ(bytes[1], 0x0f);
  PackQuantizedRow(Quantization::kInt4K, 3, std::vector<int8_t>{1, 15, 2, 0x5a}.data(), bytes);
  EXPECT_EQ(bytes[0], 0xf1);
  EXPECT_EQ(bytes[1], 0x02);
  EXPECT_EQ(bytes[2], 0x5a);
}

TEST(QuantizedMatrix, ElementsAreWhatTheRowsHold) {
  Random random(10);
  for (const Quantization type : kTypes) {
    const int64_t rows = 3, columns = 71;
    const int64_t row_bytes = QuantRowBytes(type, columns);
    std::vector<uint8_t> bytes(static_cast<size_t>(rows * row_bytes));
    std::vector<F16> scales;
    std::vector<Rounded> expected;
    for (int64_t r = 0; r < rows; ++r) {
      expected.push_back(Round(type, random.Normals(columns)));
      PackQuantizedRow(type, columns, expected.back().values.data(), bytes.data() + r * row_bytes);
      scales.insert(scales.end(), expected.back().scales.begin(), expected.back().scales.end());
    }
    ASSERT_EQ(static_cast<int64_t>(scales.size()), rows * QuantScales(type, columns));
    const QuantizedMatrix m{type, rows, columns, bytes.data(), scales.data(), nullptr};
    const std::vector<double> elements = ElementsOf(m);
    for (int64_t r = 0; r < rows; ++r) {
      const Rounded& row = expected[static_cast<size_t>(r)];
      std::vector<float> floats(static_cast<size_t>(columns));
      DequantizeRow(type, row.values.data(), row.scales.data(), floats);
      for (int64_t c = 0; c < columns; ++c) {
        const auto column = static_cast<size_t>(c);
        ASSERT_EQ(m.value(r, c), row.values[column]);
        const double element = elements[static_cast<size_t>(r * columns + c)];
        ASSERT_EQ(element, row.element(column));
        ASSERT_NEAR(floats[column], element, std::fabs(element) * 0x1p-23);
      }
    }
  }
}

}  // namespace
}  // namespace moeserve::testing
