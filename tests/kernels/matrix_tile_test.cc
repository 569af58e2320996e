// Products on a matrix unit, which is emulated where the processor has none: integer weights give
// the same bits as on the other units, and the bits of a row of bf16 depend neither on the other
// rows nor on what is prefetched. The tests of linear layers compare both with products in double
// precision.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/cpu/isa/isa.h"
#include "tests/support/devices.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

constexpr int kWidths[] = {1, 31, 64, 66, 330, 512};
constexpr const char* kNoUnit = "this processor has neither AMX nor AVX-512 with BF16";
constexpr int kRowCounts[] = {1, 2, 6, 15, 16, 17, 31, 32};

// Memory aligned to 64 bytes.
class Aligned {
 public:
  explicit Aligned(int64_t bytes) : lines_(static_cast<size_t>((bytes + 63) / 64)) {}
  char* data() { return lines_.data()->bytes; }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines_;
};

std::vector<const cpu::KernelTable*> TablesWithMatrixUnit() {
  std::vector<const cpu::KernelTable*> tables;
  for (const cpu::KernelTable* table : cpu::SupportedTables()) {
    if (table->matrix_rows > 0) tables.push_back(table);
  }
  if (const cpu::KernelTable* emulated = RegisterEmulatedMatrixUnit()) tables.push_back(emulated);
  return tables;
}

// A block of weights of random bytes, with scales that are numbers.
std::vector<char> RandomWeights(Quantization type, int panels, int k, Random& random) {
  const int64_t groups = QuantGroups(type, k);
  std::vector<char> weights;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t columns = std::min<int64_t>(QuantGroup(type), k - g * QuantGroup(type));
    const int64_t factors = HasSubGroups(type) ? (columns + cpu::kFactorColumns - 1) /
                                                     cpu::kFactorColumns * cpu::kFactorBytes
                                               : 0;
    const int64_t lines =
        (columns + cpu::QuantStep(type) - 1) / cpu::QuantStep(type) * 64 + factors;
    for (int64_t i = 0; i < panels * lines; ++i) {
      weights.push_back(static_cast<char>(random.Below(256)));
    }
    for (int i = 0; i < panels * cpu::kPanel; ++i) {
      const uint16_t scale = static_cast<uint16_t>(0x1000 + random.Below(0x1000));
      const char* bytes = reinterpret_cast<const char*>(&scale);
      weights.insert(weights.end(), bytes, bytes + 2);
    }
    // The units of minimums, which are integers.
    for (int i = 0; HasSubGroups(type) && i < panels * cpu::kPanel; ++i) {
      weights.push_back(static_cast<char>(random.Below(8)));
      weights.push_back(0);
    }
  }
  if (!HasSubGroups(type)) return weights;
  // The scales and units of a panel are adjacent; as all are valid as either, order them.
  char* const end = weights.data() + weights.size() - static_cast<int64_t>(panels) * 64;
  std::vector<char> tail(end, end + static_cast<int64_t>(panels) * 64);
  for (int p = 0; p < panels; ++p) {
    std::memcpy(end + p * 64, tail.data() + p * 32, 32);
    std::memcpy(end + p * 64 + 32, tail.data() + panels * 32 + p * 32, 32);
  }
  return weights;
}

struct Records {
  std::vector<char> bytes;
  std::vector<const char*> rows;
};
Records RandomRecords(const cpu::KernelTable& table, Quantization type, int rows, int k,
                      Random& random) {
  const int64_t stride = cpu::QuantRecordBytes(type, k);
  Records records{std::vector<char>(static_cast<size_t>(rows * stride)), {}};
  for (int r = 0; r < rows; ++r) {
    std::vector<float> x(static_cast<size_t>(k));
    for (float& v : x) v = static_cast<float>(random.Normal());
    char* const at = records.bytes.data() + r * stride;
    table.quantize_row({.x = x.data(), .bf16 = false, .n = k, .quantization = type, .records = at});
    records.rows.push_back(at);
  }
  return records;
}

// Returns the sums [rows][kBlock] of a block, for all rows at once on the matrix unit or for a few
// rows at a time on the other units.
std::vector<float> IntegerSums(const cpu::KernelTable& table, Quantization type, int panels, int k,
                               const std::vector<char>& weights, const Records& records,
                               bool matrix) {
  const int rows = static_cast<int>(records.rows.size());
  std::vector<float> out(static_cast<size_t>(rows) * cpu::kBlock, 0.0f);
  const bool widened = matrix && HasSubGroups(type);
  Aligned wide(cpu::WidenedBytes(panels, k));
  if (widened) {
    table.widen_block({.weights = weights.data(),
                       .panels = panels,
                       .k = k,
                       .fetch_l1 = true,
                       .out = wide.data()});
  }
  const int64_t bytes = (k + 63) / 64 * 64;
  Aligned packed(cpu::PackedRowsBytes(rows, bytes));
  if (matrix) {
    const bool groups = QuantGroup(type) < bytes;
    table.pack_rows({.x = records.rows.data(),
                     .rows = rows,
                     .bytes = bytes,
                     .group_bytes = groups ? QuantGroup(type) : bytes,
                     .group_stride = groups ? cpu::QuantRecordBytes(type, QuantGroup(type)) : 0,
                     .out = packed.data()});
  }
  const int step = matrix ? rows : table.quant_row_tile;
  for (int r = 0; r < rows; r += step) {
    table.linear_quantized({.weights = widened ? wide.data() : weights.data(),
                            .quantization = type,
                            .panels = panels,
                            .rows = std::min(step, rows - r),
                            .k = k,
                            .x = records.rows.data() + r,
                            .ahead = weights.data(),
                            .ahead_stride = 64,
                            .fetch_l1 = true,
                            .widened = widened,
                            .wide = nullptr,
                            .packed = matrix ? packed.data() : nullptr,
                            .out = out.data() + r * cpu::kBlock});
  }
  return out;
}

TEST(MatrixTileTest, IntegersHaveTheBitsOfTheOtherUnits) {
  if (TablesWithMatrixUnit().empty()) GTEST_SKIP() << kNoUnit;
  Random random(1);
  for (const cpu::KernelTable* table : TablesWithMatrixUnit()) {
    for (Quantization type :
         {Quantization::kInt8, Quantization::kInt8Channel, Quantization::kInt4K}) {
      for (int k : kWidths) {
        for (int rows : kRowCounts) {
          for (int panels = 1; panels <= cpu::kPanelsPerBlock; ++panels) {
            const std::vector<char> weights = RandomWeights(type, panels, k, random);
            const Records records = RandomRecords(*table, type, rows, k, random);
            const auto sums = [&](bool matrix) {
              return IntegerSums(*table, type, panels, k, weights, records, matrix);
            };
            const std::vector<float> actual = sums(true), expected = sums(false);
            EXPECT_EQ(std::memcmp(actual.data(), expected.data(), actual.size() * sizeof(float)), 0)
                << "type " << static_cast<int>(type) << ", " << k << " columns, " << rows
                << " rows, " << panels << " panels";
            EXPECT_TRUE(std::any_of(expected.begin(), expected.end(), [](float v) {
              return v != 0.0f;
            })) << "the tile computed nothing";
          }
        }
      }
    }
  }
}

// Weights and inputs of random bf16 numbers.
class Bf16Block {
 public:
  Bf16Block(int panels, int k, uint64_t seed) : panels_(panels), k_(k) {
    Random random(seed);
    const auto fill = [&](std::vector<Bf16>& values, int64_t n) {
      for (int64_t i = 0; i < n; ++i) {
        values.push_back(Bf16FromF32(static_cast<float>(random.Normal())));
      }
    };
    fill(weights_, int64_t{(k + 1) / 2} * 32 * panels);
    fill(x_, int64_t{cpu::kMatrixRows} * k);
  }

  double weight(int output, int i) const {
    const int64_t line = int64_t{i / 2} * panels_ + output / cpu::kPanel;
    return F32FromBf16(weights_[line * 32 + output % cpu::kPanel * 2 + i % 2]);
  }
  double x(int row, int i) const { return F32FromBf16(x_[int64_t{row} * k_ + i]); }

  // Returns the sums [count][kBlock] of rows [first, first + count).
  std::vector<float> Sums(const cpu::KernelTable& table, int first, int count, bool ahead) const {
    std::vector<const char*> rows;
    for (int r = 0; r < count; ++r) {
      rows.push_back(reinterpret_cast<const char*>(x_.data() + int64_t{first + r} * k_));
    }
    const int64_t bytes = int64_t{k_} * 2;
    Aligned packed(cpu::PackedRowsBytes(count, bytes));
    table.pack_rows({.x = rows.data(),
                     .rows = count,
                     .bytes = bytes,
                     .group_bytes = bytes,
                     .group_stride = 0,
                     .out = packed.data()});
    std::vector<float> out(static_cast<size_t>(count) * cpu::kBlock, 0.0f);
    const char* const block = reinterpret_cast<const char*>(weights_.data());
    table.linear_bf16({.weights = block,
                       .weight_dtype = DType::kBF16,
                       .panels = panels_,
                       .rows = count,
                       .k = k_,
                       .x = nullptr,
                       .ahead = ahead ? block : nullptr,
                       .ahead_stride = ahead ? 64 : 0,
                       .fetch_l1 = true,
                       .packed = packed.data(),
                       .out = out.data()});
    return out;
  }

 private:
  int panels_;
  int k_;
  std::vector<Bf16> weights_, x_;
};

// Calls body(table, block, panels, k) for all matrix units and blocks.
template <typename Body>
void ForBf16Blocks(const Body& body) {
  for (const cpu::KernelTable* table : TablesWithMatrixUnit()) {
    for (int k : kWidths) {
      for (int panels = 1; panels <= cpu::kPanelsPerBlock; ++panels) {
        SCOPED_TRACE(std::string(table->name) + ", " + std::to_string(k) + " columns, " +
                     std::to_string(panels) + " panels");
        body(*table, Bf16Block(panels, k, static_cast<uint64_t>(k)), panels, k);
      }
    }
  }
}

TEST(MatrixTileTest, BitsOfARowDependOnNothingElse) {
  if (TablesWithMatrixUnit().empty()) GTEST_SKIP() << kNoUnit;
  ForBf16Blocks([](const cpu::KernelTable& table, const Bf16Block& block, int, int) {
    const std::vector<float> all = block.Sums(table, 0, cpu::kMatrixRows, false);
    for (int rows : kRowCounts) {
      const int first = cpu::kMatrixRows - rows;
      const std::vector<float> some = block.Sums(table, first, rows, true);
      const float* const same = all.data() + int64_t{first} * cpu::kBlock;
      EXPECT_EQ(std::memcmp(some.data(), same, some.size() * sizeof(float)), 0) << rows << " rows";
    }
  });
}

TEST(MatrixTileTest, Bf16MatchesDoubleArithmetic) {
  if (TablesWithMatrixUnit().empty()) GTEST_SKIP() << kNoUnit;
  ForBf16Blocks([](const cpu::KernelTable& table, const Bf16Block& block, int panels, int k) {
    const std::vector<float> all = block.Sums(table, 0, cpu::kMatrixRows, false);
    for (int row : {0, 17, 31}) {
      for (int n = 0; n < panels * cpu::kPanel; ++n) {
        double exact = 0.0, magnitude = 0.0;
        for (int i = 0; i < k; ++i) {
          exact += block.weight(n, i) * block.x(row, i);
          magnitude += std::abs(block.weight(n, i) * block.x(row, i));
        }
        EXPECT_NEAR(all[row * cpu::kBlock + n], exact, 1e-6 * magnitude) << row << ", " << n;
      }
    }
  });
}

// The emulation stands for the unit in the tests of other processors.
TEST(MatrixTileTest, EmulationHasTheBitsOfTheUnit) {
  const std::vector<const cpu::KernelTable*> tables = TablesWithMatrixUnit();
  if (tables.size() < 2) GTEST_SKIP() << "this processor has no AMX";
  ForBf16Blocks([&](const cpu::KernelTable& table, const Bf16Block& block, int, int) {
    EXPECT_EQ(block.Sums(table, 0, cpu::kMatrixRows, false),
              block.Sums(*tables.back(), 0, cpu::kMatrixRows, false));
  });
}

}  // namespace
}  // namespace moeserve::testing
