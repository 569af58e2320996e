// Automata that accept the multiples of a number.
#pragma once

#include "engine/text/structured/automata/byte_dfa.h"
#include "engine/text/structured/automata/decimal.h"

namespace moeserve::structured {

// Returns an automaton for decimals without an exponent, of any length, that are multiples of
// `number`, which is positive and has few digits. It accepts some texts that are no JSON numbers,
// such as those with leading zeros. ByteDfa::Finish() is still to be called on it.
Result<ByteDfa> MultipleDfa(const Decimal& number, CompileBudget* budget);

// Returns automata, on which ByteDfa::Finish() is still to be called, for numbers without an
// exponent, and for those of them that are no integers. A number with a fraction has at most 15
// digits, so that it remains one when a program reads it as a double.
Result<ByteDfa> PlainNumberDfa(CompileBudget* budget);
Result<ByteDfa> FractionDfa(CompileBudget* budget);

}  // namespace moeserve::structured
