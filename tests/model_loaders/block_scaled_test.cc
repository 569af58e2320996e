// Weights in blocks with scales, widened and compared with the definitions of the OCP formats.

#include "model_loaders/checkpoint/block_scaled.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace moeserve {
namespace {

// The value of a sign, an exponent and a mantissa, in double precision.
double Minifloat(int bits, int exponent_bits, int mantissa_bits, int bias) {
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const bool negative = (bits >> (mantissa_bits + exponent_bits) & 1) != 0;
  const double fraction = static_cast<double>(mantissa) / (1 << mantissa_bits);
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, exponent - bias);
  return negative ? -magnitude : magnitude;
}

StoredPart WholeOf(const std::vector<int64_t>& shape, const BlockFormat& format) {
  StoredPart part;
  part.stored.shape = shape;
  part.format = format;
  part.row_stride = shape[1];
  part.column_stride = 1;
  part.contiguous = false;
  return part;
}

TEST(BlockScaledTest, Mxfp4IsExact) {
  // One row per scale, one block per row; the elements are all codes, twice.
  std::string values, scales;
  for (int scale = 0; scale < 256; ++scale) {
    for (int i = 0; i < 16; ++i) {
      values.push_back(static_cast<char>((2 * i % 16) | ((2 * i + 1) % 16) << 4));
    }
    scales.push_back(static_cast<char>(scale));
  }
  const std::vector<int64_t> shape = {256, 32};
  const auto widened =
      WidenBlockScaled(WholeOf(shape, {.kind = BlockFormatKind::kMxfp4}),
                       {.values = values, .scales = scales, .scale_type = ElementType::kU8}, shape);
  ASSERT_TRUE(widened.ok()) << widened.status();
  EXPECT_EQ(widened->dtype, DType::kBF16);
  for (int scale = 0; scale < 255; ++scale) {
    for (int i = 0; i < 32; ++i) {
      const double expected = std::ldexp(Minifloat(i % 16, 2, 1, 1), scale - 127);
      // The largest scales exceed the range of floats.
      const auto clipped = static_cast<float>(expected);
      EXPECT_EQ(ElementAsF32(*widened, scale * 32 + i), clipped) << scale << ' ' << i;
    }
  }
  for (int i = 0; i < 32; ++i) EXPECT_TRUE(std::isnan(ElementAsF32(*widened, 255 * 32 + i)));
}

TEST(BlockScaledTest, Fp8UsesTheScaleOfItsRectangle) {
  // All 256 codes in 13 x 20 elements, with smaller rectangles at two edges.
  constexpr int kRows = 13, kColumns = 20;
  const BlockFormat format{.kind = BlockFormatKind::kFp8, .rows = 5, .columns = 8};
  std::string values;
  for (int i = 0; i < kRows * kColumns; ++i) values.push_back(static_cast<char>(i));
  std::vector<float> scales;
  for (int i = 0; i < 3 * 3; ++i) scales.push_back(0.37f * static_cast<float>(i + 1));
  const std::vector<int64_t> shape = {kRows, kColumns};
  const auto widened = WidenBlockScaled(
      WholeOf(shape, format),
      {.values = values,
       .scales = {reinterpret_cast<const char*>(scales.data()), scales.size() * sizeof(float)},
       .scale_type = ElementType::kF32},
      shape);
  ASSERT_TRUE(widened.ok()) << widened.status();
  EXPECT_EQ(widened->dtype, DType::kF32);
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) {
      const int code = (r * kColumns + c) % 256;
      const float value = ElementAsF32(*widened, r * kColumns + c);
      if ((code & 0x7f) == 0x7f) {
        EXPECT_TRUE(std::isnan(value)) << code;
        continue;
      }
      const float scale = scales[static_cast<size_t>(r / 5 * 3 + c / 8)];
      EXPECT_EQ(value, static_cast<float>(Minifloat(code, 4, 3, 7)) * scale) << r << ' ' << c;
    }
  }
}

// A transposed part of a matrix, as the key projection of a head in latent attention.
TEST(BlockScaledTest, PartsAreThoseOfTheWidenedMatrix) {
  const std::vector<int64_t> shape = {6, 10};
  const BlockFormat format{.kind = BlockFormatKind::kFp8, .rows = 4, .columns = 4};
  std::string values;
  for (int i = 0; i < 60; ++i) values.push_back(static_cast<char>(i + 20));
  const std::vector<float> scales = {1.0f, 2.0f, 3.0f, 5.0f, 7.0f, 11.0f};
  const BlockScaledData data{
      .values = values,
      .scales = {reinterpret_cast<const char*>(scales.data()), scales.size() * sizeof(float)},
      .scale_type = ElementType::kF32};
  const auto whole = WidenBlockScaled(WholeOf(shape, format), data, shape);
  ASSERT_TRUE(whole.ok());
  StoredPart part = WholeOf(shape, format);
  part.first_element = 2 * 10 + 3;
  part.row_stride = 1;
  part.column_stride = 10;
  const auto some = WidenBlockScaled(part, data, {5, 3});
  ASSERT_TRUE(some.ok());
  for (int r = 0; r < 5; ++r) {
    for (int c = 0; c < 3; ++c) {
      EXPECT_EQ(ElementAsF32(*some, r * 3 + c), ElementAsF32(*whole, (2 + c) * 10 + 3 + r));
    }
  }
}

TEST(BlockScaledTest, Fp8IsKeptIf128ColumnsHaveOneScale) {
  const std::vector<int64_t> shape = {6, 400};
  const std::string values(6 * 400, '\x38');
  std::vector<float> scales;
  for (int i = 0; i < 2 * 4; ++i) scales.push_back(static_cast<float>(i + 1));
  const BlockScaledData data{
      .values = values,
      .scales = {reinterpret_cast<const char*>(scales.data()), scales.size() * sizeof(float)},
      .scale_type = ElementType::kF32};
  const auto kept = [&](int columns, int64_t first, const std::vector<int64_t>& part_shape) {
    StoredPart part =
        WholeOf(shape, {.kind = BlockFormatKind::kFp8, .rows = 4, .columns = columns});
    part.first_element = first;
    return KeptFp8(part, data, part_shape);
  };
  const auto all = kept(128, 0, shape);
  ASSERT_TRUE(all.has_value());
  ASSERT_EQ(all->scales.size(), 6u * 4u);
  for (int r = 0; r < 6; ++r) {
    for (int g = 0; g < 4; ++g) EXPECT_EQ(all->scales[r * 4 + g], scales[r / 4 * 4 + g]);
  }
  // A part that begins within a rectangle of rows, and at one of columns.
  const auto some = kept(128, 3 * 400 + 128, {2, 200});
  ASSERT_TRUE(some.has_value());
  EXPECT_EQ(some->values - all->values, 3 * 400 + 128);
  EXPECT_EQ(some->row_stride, 400);
  EXPECT_EQ(some->scales, (std::vector<float>{2.0f, 3.0f, 6.0f, 7.0f}));
  EXPECT_FALSE(kept(128, 64, {2, 200}).has_value());
  EXPECT_TRUE(kept(128, 64, {2, 64}).has_value());  // within one rectangle
  EXPECT_FALSE(kept(100, 0, shape).has_value());
  EXPECT_TRUE(kept(100, 200, {6, 100}).has_value());
  StoredPart transposed =
      WholeOf(shape, {.kind = BlockFormatKind::kFp8, .rows = 4, .columns = 128});
  std::swap(transposed.row_stride, transposed.column_stride);
  EXPECT_FALSE(KeptFp8(transposed, data, {400, 6}).has_value());
}

TEST(BlockScaledTest, RowsConsistOfWholeBlocks) {
  const TensorPlace place{.name = "w_blocks",
                          .shape = {4, 48},
                          .format = {.kind = BlockFormatKind::kMxfp4, .scales = "w_scales"}};
  const auto tensors = BlockScaledTensors(place, "[a, b]");
  ASSERT_FALSE(tensors.ok());
  EXPECT_NE(tensors.status().message().find(
                "tensor \"w_blocks\": expected rows of a multiple of 32 elements, found 48"),
            std::string::npos)
      << tensors.status();
}

}  // namespace
}  // namespace moeserve
