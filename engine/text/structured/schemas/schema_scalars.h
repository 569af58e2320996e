// Automata for the numbers and strings that a branch allows.
#pragma once

#include <string>

#include "engine/text/structured/automata/byte_dfa.h"
#include "engine/text/structured/schemas/schema_branch.h"

namespace moeserve::structured {

// Returns a text that tells apart the conditions on numbers, or on strings, of two branches.
std::string NumberKey(const Branch& branch);
std::string StringKey(const Branch& branch);

// Whether anything but its length restricts a string.
bool HasStringConditions(const Branch& branch);

// Returns an automaton for the numbers, or for the strings with their quotes, that `branch` allows;
// its listed values are ignored. `any_string` accepts all strings. ByteDfa::Finish() is still to be
// called on the automaton. The error of a pattern does not name the place.
Result<ByteDfa> NumbersOf(const Branch& branch, CompileBudget* budget);
Result<ByteDfa> StringsOf(const Branch& branch, const ByteDfa& any_string, CompileBudget* budget);

// Whether the branch's conditions on numbers hold for `number`.
bool AllowsNumber(const Branch& branch, const Decimal& number);

}  // namespace moeserve::structured
