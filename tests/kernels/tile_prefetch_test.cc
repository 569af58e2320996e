// Tiles of linear layers that read weights from memory give the same bits whether they prefetch
// them or leave that to the processor. The CPU backend does only one of the two on each processor.

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/cpu/isa/isa.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

constexpr int64_t kColumns =
    330;  // more than one group of each type but the whole row's, and a rest
constexpr size_t kBytes = size_t{128} << 10;  // more than any block or row of that many columns

// Bytes that are small positive numbers as int8, f16, bf16 and f32.
std::vector<char> SmallNumbers(uint64_t seed) {
  Random random(seed);
  std::vector<char> bytes(kBytes);
  for (char& b : bytes) b = static_cast<char>(random.Below(0x3c));
  return bytes;
}

class Tiles {
 public:
  Tiles() : weights_(SmallNumbers(1)), inputs_(SmallNumbers(2)) {}

  // Calls run(weights, rows, out) with the pointers of a tile and returns the results.
  template <typename Run>
  std::vector<float> Results(int rows, const Run& run) {
    std::vector<float> out(static_cast<size_t>(cpu::kMaxRowTile * cpu::kBlock), 0.0f);
    std::vector<const char*> x;
    for (int m = 0; m < rows; ++m) x.push_back(inputs_.data() + m * 2048);
    run(weights_.data(), x.data(), out.data());
    return out;
  }

 private:
  std::vector<char> weights_, inputs_;
};

void ExpectSame(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
  EXPECT_NE(a.front(), 0.0f) << "the tile computed nothing";
}

TEST(TilePrefetchTest, IntegerWeights) {
  Tiles tiles;
  for (const cpu::KernelTable* table : cpu::SupportedTables()) {
    for (Quantization type : {Quantization::kInt8, Quantization::kInt8Channel, Quantization::kInt4,
                              Quantization::kInt4K}) {
      for (int rows = 1; rows <= table->quant_row_tile; ++rows) {
        for (int panels = 1; panels <= cpu::kPanelsPerBlock; ++panels) {
          SCOPED_TRACE(::testing::Message() << table->name << ", type " << static_cast<int>(type)
                                            << ", " << rows << " rows, " << panels << " panels");
          std::vector<char> wide(static_cast<size_t>(rows * cpu::WideRecordBytes(kColumns)));
          const auto results = [&](bool fetch_l1) {
            return tiles.Results(rows, [&](const char* weights, const char** x, float* out) {
              table->linear_quantized({.weights = weights,
                                       .quantization = type,
                                       .panels = panels,
                                       .rows = rows,
                                       .k = kColumns,
                                       .x = x,
                                       .ahead = nullptr,
                                       .ahead_stride = 0,
                                       .fetch_l1 = fetch_l1,
                                       .widened = false,
                                       .wide = table->wide_inputs ? wide.data() : nullptr,
                                       .packed = nullptr,
                                       .out = out});
            });
          };
          ExpectSame(results(true), results(false));
        }
      }
    }
  }
}

TEST(TilePrefetchTest, FloatingPointWeights) {
  Tiles tiles;
  for (const cpu::KernelTable* table : cpu::SupportedTables()) {
    for (DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (int rows = 1; rows <= table->row_tile; ++rows) {
        for (int panels = 1; panels <= cpu::kPanelsPerBlock; ++panels) {
          SCOPED_TRACE(::testing::Message()
                       << table->name << ", " << rows << " rows, " << panels << " panels");
          const auto results = [&](bool fetch_l1, bool bf16_rows) {
            return tiles.Results(rows, [&](const char* weights, const char** x, float* out) {
              (bf16_rows ? table->linear_bf16
                         : table->linear_f32)({.weights = weights,
                                               .weight_dtype = type,
                                               .panels = panels,
                                               .rows = rows,
                                               .k = kColumns,
                                               .x = reinterpret_cast<const void* const*>(x),
                                               .ahead = nullptr,
                                               .ahead_stride = 0,
                                               .fetch_l1 = fetch_l1,
                                               .packed = nullptr,
                                               .out = out});
            });
          };
          ExpectSame(results(true, false), results(false, false));
          // A matrix unit prefetches in the same way on every processor.
          if (table->bf16_dot && table->matrix_rows == 0 && type == DType::kBF16) {
            ExpectSame(results(true, true), results(false, true));
          }
        }
      }
    }
  }
}

TEST(TilePrefetchTest, Int4KFactors) {
  Tiles tiles;
  for (const cpu::KernelTable* table : cpu::SupportedTables()) {
    if (table->widen_block == nullptr) continue;
    SCOPED_TRACE(table->name);
    for (int panels = 1; panels <= cpu::kPanelsPerBlock; ++panels) {
      const auto bytes = static_cast<size_t>(cpu::WidenedBytes(panels, kColumns));
      const auto widened = [&](bool fetch_l1) {
        std::vector<char> out(bytes + 64);
        char* const aligned = out.data() + (64 - reinterpret_cast<uintptr_t>(out.data()) % 64);
        tiles.Results(1, [&](const char* weights, const char**, float*) {
          table->widen_block({.weights = weights,
                              .panels = panels,
                              .k = kColumns,
                              .fetch_l1 = fetch_l1,
                              .out = aligned});
        });
        return std::vector<char>(aligned, aligned + bytes);
      };
      EXPECT_EQ(widened(true), widened(false));
    }
  }
}

}  // namespace
}  // namespace moeserve::testing
