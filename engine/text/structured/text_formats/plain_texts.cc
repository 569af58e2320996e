#include "engine/text/structured/text_formats/plain_texts.h"

#include "base/error_text.h"
#include "engine/text/structured/automata/nfa.h"
#include "engine/text/structured/automata/pattern.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::structured {

Result<ByteDfa> RegexDfa(const std::string& pattern, const ConstraintLimits& limits,
                         CompileBudget* budget) {
  if (pattern.size() > limits.pattern_bytes) {
    return absl::InvalidArgumentError(
        Concat("the pattern has ", pattern.size(), " bytes, more than ", limits.pattern_bytes));
  }
  return PatternDfa(pattern, MatchMode::kWholeText, Encoding::kUtf8, budget);
}

Result<ByteDfa> ChoiceDfa(const std::vector<std::string>& choices, const ConstraintLimits& limits,
                          CompileBudget* budget) {
  if (choices.empty()) return absl::InvalidArgumentError("choices: empty");
  if (choices.size() > static_cast<size_t>(limits.enum_entries)) {
    return absl::InvalidArgumentError(
        Concat("choices: ", choices.size(), ", more than ", limits.enum_entries));
  }
  size_t bytes = 0;
  Nfa nfa(budget);
  std::vector<Nfa::NodeId> starts;
  for (size_t i = 0; i < choices.size(); ++i) {
    bytes += choices[i].size();
    if (bytes > limits.schema_bytes) {
      return absl::InvalidArgumentError(
          Concat("choices: more than ", limits.schema_bytes, " bytes together"));
    }
    if (!IsValidUtf8(choices[i])) {
      return absl::InvalidArgumentError(Concat("choices: entry ", i, " is not UTF-8"));
    }
    MOESERVE_ASSIGN_OR_RETURN(starts.emplace_back(),
                              nfa.Literal(choices[i], Encoding::kUtf8, nfa.match()));
  }
  MOESERVE_ASSIGN_OR_RETURN(const Nfa::NodeId start, nfa.Any(starts));
  return nfa.Determinize(start);
}

}  // namespace moeserve::structured
