// The keys of properties that a schema does not name.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/text/structured/automata/byte_dfa.h"

namespace moeserve::structured {

// The keys that `patterns` tell apart: automaton i accepts the quoted keys of LabeledDfa::labels
// bit i. `names`, if not null, accepts the quoted keys that are allowed at all; otherwise all are.
// ByteDfa::Finish() was called on the result.
Result<LabeledDfa> KeysByPatterns(const ByteDfa& any_string, const ByteDfa* names,
                                  const std::set<std::string>& patterns, const ByteSet& spellable,
                                  CompileBudget* budget);

// Returns the characters of a name, which is UTF-8.
std::u32string CodePoints(const std::string& text);

// Returns the keys that `dfa` accepts, without quotes and decoded, if there are at most `most`;
// otherwise nullopt. ByteDfa::Finish() was called on `dfa`.
Result<std::optional<std::set<std::string>>> FewKeys(const ByteDfa& dfa, size_t most,
                                                     CompileBudget* budget);

}  // namespace moeserve::structured
