#include "engine/step/row_division.h"

#include <vector>

#include "base/check.h"
#include "kernels/rank_ops.h"

namespace moeserve {

RowsView RowDivision::Own(const RowsView& rows) const {
  if (!divided() || tokens_ == 0) return rows;
  const int64_t of_token = rows.rows / tokens_;
  MOESERVE_CHECK(of_token * tokens_ == rows.rows, "as many rows of each token");
  const int64_t first = first_token();
  return rows.Rows(first * of_token, (FirstOf(exchange_->rank() + 1) - first) * of_token);
}

void RowDivision::Gather(Backend& backend, const RowsView& rows) const {
  if (!divided() || tokens_ == 0) return;
  MOESERVE_CHECK(rows.stride == rows.cols, "rows without padding");
  const int64_t of_token = rows.rows / tokens_;
  std::vector<int64_t> rows_of_rank;
  for (int r = 0; r < exchange_->ranks(); ++r) {
    rows_of_rank.push_back((FirstOf(r + 1) - FirstOf(r)) * of_token);
  }
  RankOps& ranks = *backend.rank_ops();
  ranks.StartGather(rows, rows_of_rank, *exchange_);
  ranks.FinishGather(*exchange_);
}

}  // namespace moeserve
