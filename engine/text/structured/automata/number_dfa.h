// The JSON texts of the numbers in an interval.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/text/structured/automata/byte_dfa.h"
#include "engine/text/structured/automata/decimal.h"

namespace moeserve::structured {

struct NumberBound {
  Decimal value;
  bool exclusive = false;
  bool operator==(const NumberBound&) const = default;
};

struct NumberRange {
  std::optional<NumberBound> min;
  std::optional<NumberBound> max;
  // Only integers, spelt without fraction and exponent.
  bool integer = false;
  // Integers only: multiples of this.
  int64_t multiple_of = 1;

  bool Contains(const Decimal& value) const;
};

// Plain decimals of any length are compared exactly. An exponent is allowed in the form in which
// shortest-digits writers use it: one non-zero digit, maybe a fraction, and a signed exponent of
// two or three digits that is at most -5 or at least 16, within +-307. Not finished.
Result<ByteDfa> NumberDfa(const NumberRange& range, CompileBudget* budget);

}  // namespace moeserve::structured
