#include "kernels/cpu/rank_ops.h"

#include <algorithm>

#include "base/check.h"

namespace moeserve::cpu {

void CpuRankOps::StartGather(const RowsView& results, std::span<const int64_t> rows_of_rank,
                             Exchange& exchange) {
  // Whole rows, with the columns that pad them: so a part is one piece of memory.
  const auto row = results.stride * static_cast<int64_t>(SizeOf(results.dtype));
  bytes_.clear();
  for (const int64_t rows : rows_of_rank) bytes_.push_back(rows * row);
  exchange.StartGather(results.data, bytes_);
}

void CpuRankOps::GatherColumns(const RowsView& own, const RowsView& output, Exchange& exchange) {
  MOESERVE_CHECK(own.dtype == DType::kF32 && own.stride == own.cols, "f32 rows without padding");
  const int64_t floats = own.rows * own.cols;
  const bool leader = exchange.rank() == 0;
  columns_.resize(leader ? static_cast<size_t>(floats * exchange.ranks()) : 0);
  exchange.GatherAtLeader(
      {static_cast<const char*>(own.data), floats * sizeof(float)},
      {reinterpret_cast<char*>(columns_.data()), columns_.size() * sizeof(float)});
  if (!leader) return;
  for (int r = 0; r < exchange.ranks(); ++r) {
    const int64_t first = r * own.cols;
    const int64_t columns = std::clamp<int64_t>(output.cols - first, 0, own.cols);
    for (int64_t row = 0; row < own.rows; ++row) {
      std::copy_n(columns_.data() + (r * own.rows + row) * own.cols, columns,
                  reinterpret_cast<float*>(output.row(row)) + first);
    }
  }
}

uint64_t CpuRankOps::Checksum(const RowsView& rows) {
  MOESERVE_CHECK(rows.dtype == DType::kF32 && rows.stride == rows.cols, "f32 rows without padding");
  // Four sums of products with odd numbers; the powers of the factor make the positions matter.
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15u;
  uint64_t sums[4] = {1, 2, 3, 4};
  const auto* values = static_cast<const uint32_t*>(rows.data);
  const int64_t count = rows.rows * rows.cols;
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int j = 0; j < 4; ++j) sums[j] = (sums[j] ^ values[i + j]) * kFactor;
  }
  for (; i < count; ++i) sums[0] = (sums[0] ^ values[i]) * kFactor;
  return ((sums[0] * kFactor + sums[1]) * kFactor + sums[2]) * kFactor + sums[3];
}

}  // namespace moeserve::cpu
