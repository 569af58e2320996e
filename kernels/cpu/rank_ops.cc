#include "kernels/cpu/rank_ops.h"

#include <algorithm>
#include <cstring>

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

void CpuRankOps::StartScatter(const RowsView& own, const PlanParts& parts, const RowsView& packed,
                              const RowsView& results, Exchange& exchange) {
  MOESERVE_CHECK(own.stride == packed.stride && own.stride == results.stride &&
                     own.dtype == packed.dtype && own.dtype == results.dtype,
                 "rows of one layout");
  const auto rank = static_cast<size_t>(exchange.rank());
  const auto row = own.stride * static_cast<int64_t>(SizeOf(own.dtype));
  // The own results that this rank adds, [kept, kept_end) of those by adder, do not travel.
  int64_t kept = 0;
  for (size_t r = 0; r < rank; ++r) kept += parts.rows_for_rank[r];
  const int64_t kept_end = kept + parts.rows_for_rank[rank];
  MOESERVE_CHECK(parts.rows_for_rank[rank] == parts.rows_of_rank[rank],
                 "as many rows are kept as added");
  MOESERVE_CHECK(packed.rows == own.rows - parts.rows_for_rank[rank], "room for what is sent");
  const auto columns = static_cast<size_t>(own.cols) * SizeOf(own.dtype);
  workers_.ForEachRow(own.rows, own.cols, [&](int64_t i) {
    char* const to = i < kept       ? packed.row(i)
                     : i < kept_end ? results.row(parts.first + i - kept)
                                    : packed.row(i - (kept_end - kept));
    std::memcpy(to, own.row(parts.by_adder[i]), columns);
  });
  bytes_.clear();
  receive_bytes_.clear();
  for (size_t r = 0; r < parts.rows_of_rank.size(); ++r) {
    bytes_.push_back(r == rank ? 0 : parts.rows_for_rank[r] * row);
    receive_bytes_.push_back(parts.rows_of_rank[r] * row);
  }
  exchange.StartAllToAll(packed.data, bytes_, results.data, receive_bytes_);
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
