// Automata of the JSON texts of the numbers in an interval.
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
  // With `integer`: only multiples of this.
  int64_t multiple_of = 1;

  bool Contains(const Decimal& value) const;
};

// Accepts plain decimals of any length, compared exactly, and exponents in the form of
// shortest-digits writers: one non-zero digit, an optional fraction, and a signed exponent of two
// or three digits that is at most -5 or at least 16, within +-307. Not finished.
Result<ByteDfa> NumberDfa(const NumberRange& range, CompileBudget* budget);

}  // namespace moeserve::structured
