// Automata that accept the JSON spellings of the numbers in an interval.
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
  // If true, only integers, spelt without fraction and exponent.
  bool integer = false;
  // If `integer`, only multiples of this number.
  int64_t multiple_of = 1;

  bool Contains(const Decimal& value) const;
};

// Returns an automaton for the numbers in `range`, on which ByteDfa::Finish() is still to be
// called. It accepts plain decimals of any length, which are compared exactly. It also accepts
// numbers with an exponent as programs that write the shortest digits spell them: one non-zero
// digit, an optional fraction, and a signed exponent of two or three digits that is at most -5 or
// at least 16, within +-307.
Result<ByteDfa> NumberDfa(const NumberRange& range, CompileBudget* budget);

}  // namespace moeserve::structured
