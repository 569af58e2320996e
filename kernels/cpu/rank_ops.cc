#include "kernels/cpu/rank_ops.h"

namespace moeserve::cpu {

void CpuRankOps::StartGather(const RowsView& results, std::span<const int64_t> rows_of_rank,
                             Exchange& exchange) {
  // Whole rows, with the columns that pad them: so a part is one piece of memory.
  const auto row = results.stride * static_cast<int64_t>(SizeOf(results.dtype));
  bytes_.clear();
  for (const int64_t rows : rows_of_rank) bytes_.push_back(rows * row);
  exchange.StartGather(results.data, bytes_);
}

}  // namespace moeserve::cpu
