// Automata for texts that contain no trigger, or end with the first one.
#pragma once

#include <string>
#include <vector>

#include "engine/text/structured/grammar.h"

namespace moeserve::structured {

// Automata for UTF-8 texts and a list of triggers, each UTF-8 and not empty. A text that must not
// occur at all is a trigger with which nothing goes on. ByteDfa::Finish() is
// still to be called on them.
class FreeText {
 public:
  static Result<FreeText> Build(std::vector<std::string> triggers, CompileBudget* budget);

  // Accepts the texts that contain no trigger.
  Result<ByteDfa> Without() const { return Accepting(kNone); }
  // Accepts the texts that contain triggers at their end only and end with trigger `i`.
  Result<ByteDfa> UpTo(int i) const { return Accepting(i); }

 private:
  static constexpr int kNone = -1;

  explicit FreeText(CompileBudget* budget) : budget_(budget) {}
  Result<ByteDfa> Accepting(int trigger) const;

  CompileBudget* budget_;
  std::vector<std::string> triggers_;
  ByteDfa any_text_;
  // Follows the triggers: state 0 has matched nothing; every other state is a prefix of a trigger.
  ByteDfa prefixes_;
  // For each state: the triggers with which its prefix ends.
  std::vector<std::vector<int>> ends_with_;
};

// Returns the trigger `text` with Trigger::border, and Trigger::matched for the states of `dfa`.
Trigger FollowTrigger(const std::string& text, const ByteDfa& dfa);

}  // namespace moeserve::structured
