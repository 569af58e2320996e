// Rows rounded to int8 by kernels/base/int8_rows.h have the bits of every instruction set of the
// CPU.

#include "kernels/base/int8_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cpu/isa/isa.h"
#include "tests/support/devices.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

std::vector<const cpu::KernelTable*> AllTables() {
  std::vector<const cpu::KernelTable*> tables = cpu::SupportedTables();
  if (const cpu::KernelTable* emulated = RegisterEmulatedMatrixUnit()) tables.push_back(emulated);
  return tables;
}

// Rows of n values: of usual sizes, with ties, tiny, huge, zero, and not finite.
std::vector<std::vector<float>> RowsToRound(int n, Random& random) {
  std::vector<std::vector<float>> rows;
  for (const double size : {1e-44, 3e-39, 1e-36, 1e-35, 1.1e-35, 1e-20, 1e-3, 1.0, 1e3, 1e30}) {
    rows.push_back(random.Normals(n, size));
  }
  // With these largest magnitudes the inverse is a power of two, so all halves are ties.
  for (const float largest : {127.0f, 254.0f, 63.5f}) {
    std::vector<float> row;
    for (int i = 0; i < n; ++i) {
      row.push_back(largest / 127.0f * (static_cast<float>(random.Below(254) - 127) + 0.5f));
    }
    row[static_cast<size_t>(random.Below(n))] = -largest;
    rows.push_back(row);
  }
  const float largest_float = std::numeric_limits<float>::max();
  const float infinity = std::numeric_limits<float>::infinity();
  const float quiet = std::numeric_limits<float>::quiet_NaN();
  const float payload = F32FromBits(0xffc0a5a5u);
  rows.emplace_back(n, 0.0f);
  rows.emplace_back(n, -0.0f);
  rows.emplace_back(n, 1e-35f);
  for (const float value : {largest_float, -largest_float, infinity, -infinity, quiet, payload}) {
    std::vector<float> row = random.Normals(n);
    row[static_cast<size_t>(random.Below(n))] = value;
    rows.push_back(row);
  }
  std::vector<float> both = random.Normals(n);
  both[0] = infinity;
  both[static_cast<size_t>(n - 1)] = -infinity;
  rows.push_back(both);
  return rows;
}

TEST(Int8RowsTest, EveryInstructionSetHasTheseBits) {
  constexpr Quantization kType = Quantization::kInt8Channel;
  Random random(1);
  int64_t largest_integers = 0;
  for (const int n : {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 1000, 4096}) {
    const auto size = static_cast<size_t>(n);
    for (const std::vector<float>& values : RowsToRound(n, random)) {
      for (const bool bf16 : {false, true}) {
        std::vector<Bf16> narrow;
        for (const float v : values) narrow.push_back(Bf16FromF32(v));
        std::vector<int8_t> integers(size);
        const float scale = RoundRowToInt8(
            n,
            [&](int64_t i) {
              const auto at = static_cast<size_t>(i);
              return bf16 ? F32FromBf16(narrow[at]) : values[at];
            },
            integers.data());
        for (const int8_t q : integers) largest_integers += q == 127 || q == -127;
        for (const cpu::KernelTable* table : AllTables()) {
          SCOPED_TRACE(::testing::Message()
                       << table->name << (bf16 ? ", bf16, " : ", f32, ") << n << " values");
          std::vector<char> record(static_cast<size_t>(cpu::QuantRecordBytes(kType, n)), 99);
          const void* const x = bf16 ? static_cast<const void*>(narrow.data()) : values.data();
          table->quantize_row(
              {.x = x, .bf16 = bf16, .n = n, .quantization = kType, .records = record.data()});
          ASSERT_EQ(std::memcmp(record.data(), integers.data(), size), 0);
          ASSERT_EQ(std::memcmp(record.data() + cpu::QuantRecordColumns(kType, n), &scale, 4), 0)
              << scale;
        }
      }
    }
  }
  EXPECT_GT(largest_integers, 1000);
}

TEST(Int8RowsTest, ValuesThatAreNotFiniteShowInTheScale) {
  const std::vector<float> row = {1.0f, std::numeric_limits<float>::infinity(), 2.0f};
  std::vector<int8_t> integers(3, 1);
  EXPECT_TRUE(std::isnan(RoundRowToInt8(
      3, [&](int64_t i) { return row[static_cast<size_t>(i)]; }, integers.data())));
  EXPECT_EQ(integers, (std::vector<int8_t>{0, 0, 0}));
}

}  // namespace
}  // namespace moeserve::testing
