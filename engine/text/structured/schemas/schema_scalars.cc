#include "engine/text/structured/schemas/schema_scalars.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "engine/text/structured/automata/formats.h"
#include "engine/text/structured/automata/multiple_dfa.h"
#include "engine/text/structured/automata/nfa.h"
#include "engine/text/structured/automata/pattern.h"

namespace moeserve::structured {
namespace {

using nlohmann::json;

// Returns whether `number` is a multiple of `step`, whose digits are a number of at most
// kMaxMultiple.
bool IsMultiple(const Decimal& number, const Decimal& step) {
  if (number.is_zero()) return true;
  const auto exponent = [](const Decimal& d) { return d.point - std::ssize(d.digits); };
  // The quotient is that of the digits times 10^shift. Digits do not end with 0, so with a negative
  // shift it is no integer.
  const int64_t shift = exponent(number) - exponent(step);
  if (shift < 0) return false;
  const int64_t divisor = std::stoll(step.digits);
  int64_t rest = 0;
  for (const char digit : number.digits) rest = (10 * rest + (digit - '0')) % divisor;
  // Each 10 can cancel factors of the divisor, which has fewer than 64 of them.
  for (int64_t i = 0; i < std::min<int64_t>(shift, 64); ++i) rest = 10 * rest % divisor;
  return rest == 0;
}

bool Excludes(const Branch& branch, uint32_t types) {
  return std::any_of(branch.excluded.begin(), branch.excluded.end(),
                     [&](const json* value) { return (TypeOf(*value) & types) != 0; });
}

}  // namespace

std::string NumberKey(const Branch& branch) {
  std::string key = Concat("number ", branch.types & kNumberTypes);
  for (const auto& bound : {branch.number.min, branch.number.max}) {
    key += ' ';
    if (bound) key += bound->value.Plain() + (bound->exclusive ? "x" : "");
  }
  key += Concat(' ', branch.number.multiple_of);
  for (const Decimal& multiple : branch.multiples) key += " m" + multiple.Plain();
  for (const Decimal& multiple : branch.not_multiples) key += " n" + multiple.Plain();
  for (const json* value : branch.excluded) {
    if (value->is_number()) key += " e" + value->dump();
  }
  return key;
}

std::string StringKey(const Branch& branch) {
  std::string key = Concat("string ", branch.min_chars, ' ', branch.max_chars);
  // With lengths, because patterns may contain anything.
  const auto add = [&](char kind, const std::string& text) {
    key += Concat(' ', kind, text.size(), ':', text);
  };
  for (const std::string& format : branch.formats) add('f', format);
  for (const std::string& pattern : branch.patterns) add('p', pattern);
  for (const std::string& pattern : branch.not_patterns) add('n', pattern);
  for (const json* value : branch.excluded) {
    if (value->is_string()) add('e', value->dump());
  }
  return key;
}

bool HasStringConditions(const Branch& branch) {
  return !branch.patterns.empty() || !branch.formats.empty() || !branch.not_patterns.empty() ||
         Excludes(branch, kStringType);
}

Result<ByteDfa> NumbersOf(const Branch& branch, CompileBudget* budget) {
  NumberRange range = branch.number;
  const uint32_t types = branch.types & kNumberTypes;
  range.integer = types == kIntegerType;
  // A multiple of an integer is an integer.
  if (!range.integer) range.multiple_of = 1;
  MOESERVE_ASSIGN_OR_RETURN(ByteDfa dfa, NumberDfa(range, budget));
  if (types == kFractionType) {
    MOESERVE_ASSIGN_OR_RETURN(const ByteDfa fractions, FractionDfa(budget));
    MOESERVE_ASSIGN_OR_RETURN(dfa, Intersection(dfa, fractions, budget));
  }
  for (const Decimal& multiple : branch.multiples) {
    MOESERVE_ASSIGN_OR_RETURN(const ByteDfa multiples, MultipleDfa(multiple, budget));
    MOESERVE_ASSIGN_OR_RETURN(dfa, Intersection(dfa, multiples, budget));
  }
  if (!branch.not_multiples.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(const ByteDfa plain, PlainNumberDfa(budget));
    MOESERVE_ASSIGN_OR_RETURN(dfa, Intersection(dfa, plain, budget));
  }
  for (const Decimal& multiple : branch.not_multiples) {
    MOESERVE_ASSIGN_OR_RETURN(const ByteDfa multiples, MultipleDfa(multiple, budget));
    MOESERVE_ASSIGN_OR_RETURN(dfa, Difference(dfa, multiples, budget));
  }
  for (const json* value : branch.excluded) {
    if (!value->is_number()) continue;
    NumberRange one;
    one.min = one.max = NumberBound{DecimalOf(*value), false};
    MOESERVE_ASSIGN_OR_RETURN(const ByteDfa spellings, NumberDfa(one, budget));
    MOESERVE_ASSIGN_OR_RETURN(dfa, Difference(dfa, spellings, budget));
  }
  return dfa;
}

Result<ByteDfa> StringsOf(const Branch& branch, const ByteDfa& any_string, CompileBudget* budget) {
  std::optional<ByteDfa> all;
  const auto match = [&](const std::string& pattern, MatchMode mode) -> Result<ByteDfa> {
    MOESERVE_ASSIGN_OR_RETURN(const ByteDfa content,
                              PatternDfa(pattern, mode, Encoding::kJsonString, budget));
    MOESERVE_ASSIGN_OR_RETURN(ByteDfa dfa, Quoted(content, budget));
    // Removes useless transitions before the automaton is combined with others.
    MOESERVE_RETURN_IF_ERROR(dfa.Finish(ByteSet().set(), budget));
    return dfa;
  };
  const auto add = [&](const std::string& pattern, MatchMode mode) -> Status {
    MOESERVE_ASSIGN_OR_RETURN(ByteDfa dfa, match(pattern, mode));
    if (all) {
      MOESERVE_ASSIGN_OR_RETURN(dfa, Intersection(*all, dfa, budget));
    }
    all = std::move(dfa);
    return absl::OkStatus();
  };
  for (const std::string& format : branch.formats) {
    MOESERVE_RETURN_IF_ERROR(add(*FormatPattern(format), MatchMode::kWholeText));
  }
  for (const std::string& pattern : branch.patterns) {
    MOESERVE_RETURN_IF_ERROR(add(pattern, MatchMode::kSearch));
  }
  if (!all) all = any_string;
  for (const std::string& pattern : branch.not_patterns) {
    MOESERVE_ASSIGN_OR_RETURN(const ByteDfa dfa, match(pattern, MatchMode::kSearch));
    MOESERVE_ASSIGN_OR_RETURN(all, Difference(*all, dfa, budget));
  }
  if (Excludes(branch, kStringType)) {
    Nfa nfa(budget);
    std::vector<Nfa::NodeId> starts;
    for (const json* value : branch.excluded) {
      if (!value->is_string()) continue;
      MOESERVE_ASSIGN_OR_RETURN(Nfa::NodeId node, nfa.Literal("\"", Encoding::kUtf8, nfa.match()));
      MOESERVE_ASSIGN_OR_RETURN(
          node, nfa.Literal(value->get_ref<const std::string&>(), Encoding::kJsonString, node));
      MOESERVE_ASSIGN_OR_RETURN(starts.emplace_back(), nfa.Literal("\"", Encoding::kUtf8, node));
    }
    MOESERVE_ASSIGN_OR_RETURN(const Nfa::NodeId start, nfa.Any(starts));
    MOESERVE_ASSIGN_OR_RETURN(const ByteDfa dfa, nfa.Determinize(start));
    MOESERVE_ASSIGN_OR_RETURN(all, Difference(*all, dfa, budget));
  }
  if (branch.min_chars > 0 || branch.max_chars < kNoLimit) {
    MOESERVE_ASSIGN_OR_RETURN(all, WithLength(*all, branch.min_chars, branch.max_chars, budget));
  }
  return *std::move(all);
}

bool AllowsNumber(const Branch& branch, const Decimal& number) {
  NumberRange range = branch.number;
  range.integer = range.multiple_of > 1;
  if (!range.Contains(number)) return false;
  for (const json* value : branch.excluded) {
    if (value->is_number() && DecimalOf(*value) == number) return false;
  }
  const auto multiple_of = [&](const Decimal& step) { return IsMultiple(number, step); };
  return std::all_of(branch.multiples.begin(), branch.multiples.end(), multiple_of) &&
         std::none_of(branch.not_multiples.begin(), branch.not_multiples.end(), multiple_of);
}

}  // namespace moeserve::structured
