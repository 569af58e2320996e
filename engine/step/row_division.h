// Which rows of a step a rank computes.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kernels/exchange/exchange.h"

namespace moeserve {

// What treats rows alone may be divided between the ranks of a step: rank r of P computes the rows
// of the tokens [T r / P, T (r + 1) / P), and then gets the rows of the others. Results of a row do
// not depend on other rows, so the division does not change their bits. All ranks must divide the
// same steps. Cheap to copy.
class RowDivision {
 public:
  // Nothing is divided: every row is an own row.
  RowDivision() = default;
  // Divides the rows of `tokens` tokens. `exchange` must outlive the object.
  RowDivision(int64_t tokens, Exchange& exchange) : exchange_(&exchange), tokens_(tokens) {}

  bool divided() const { return exchange_ != nullptr; }
  // Returns [ranks + 1] the first row of each rank, and the number of rows, of `rows` rows in which
  // every token has the same number of adjacent ones. Rows must be divided.
  std::vector<int64_t> FirstRows(int64_t rows) const;
  // Returns the token of the first own row.
  int64_t first_token() const { return divided() ? FirstOf(exchange_->rank()) : 0; }
  // Returns the own rows of `rows`, in which every token has the same number of adjacent rows.
  RowsView Own(const RowsView& rows) const;
  // Fills the rows that other ranks have computed. `rows` have no padding.
  void Gather(Backend& backend, const RowsView& rows) const;

 private:
  int64_t FirstOf(int rank) const { return tokens_ * rank / exchange_->ranks(); }

  Exchange* exchange_ = nullptr;  // null: nothing is divided
  int64_t tokens_ = 0;
};

}  // namespace moeserve
