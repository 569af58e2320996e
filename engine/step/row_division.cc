#include "engine/step/row_division.h"

#include "base/check.h"
#include "kernels/rank_ops.h"

namespace moeserve {

std::vector<int64_t> RowDivision::FirstRows(int64_t rows) const {
  const int64_t of_token = tokens_ == 0 ? 0 : rows / tokens_;
  MOESERVE_CHECK(of_token * tokens_ == rows, "as many rows of each token");
  std::vector<int64_t> first;
  for (int r = 0; r <= exchange_->ranks(); ++r) first.push_back(FirstOf(r) * of_token);
  return first;
}

RowsView RowDivision::Own(const RowsView& rows) const {
  if (!divided() || tokens_ == 0) return rows;
  const std::vector<int64_t> first = FirstRows(rows.rows);
  const auto rank = static_cast<size_t>(exchange_->rank());
  return rows.Rows(first[rank], first[rank + 1] - first[rank]);
}

void RowDivision::Gather(Backend& backend, const RowsView& rows) const {
  if (!divided() || tokens_ == 0) return;
  MOESERVE_CHECK(rows.stride == rows.cols, "rows without padding");
  std::vector<int64_t> rows_of_rank = FirstRows(rows.rows);
  for (size_t r = 0; r + 1 < rows_of_rank.size(); ++r) {
    rows_of_rank[r] = rows_of_rank[r + 1] - rows_of_rank[r];
  }
  rows_of_rank.pop_back();
  RankOps& ranks = *backend.rank_ops();
  ranks.StartGather(rows, rows_of_rank, *exchange_);
  ranks.FinishGather(*exchange_);
}

}  // namespace moeserve
