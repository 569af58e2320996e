// Builds the automata of rules.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/text/structured/grammar.h"

namespace moeserve::structured {

// A nondeterministic automaton over nodes. State 0 exists from the start.
class RuleBuilder {
 public:
  static constexpr int32_t kStart = 0;

  explicit RuleBuilder(CompileBudget* budget) : budget_(budget) {}

  int32_t AddState();
  // Adds a transition that reads an instance of `node`.
  void AddEdge(int32_t from, NodeId node, int32_t to);
  // Adds a transition that reads nothing.
  void AddEmpty(int32_t from, int32_t to);
  // If rule `self` may begin with itself, replaces this by a loop at its end, so that the rule
  // matches the same texts; `end` is the state in which the rule ends.
  Status RemoveLeftRecursion(NodeId self, int32_t end);

  // Returns an equivalent deterministic automaton, which ends in the states that contain `end`. So
  // texts that begin with the same nodes are matched once.
  Result<RuleNode> Build(int32_t end) const;

 private:
  using Set = std::vector<int32_t>;
  // Returns the states that can be reached from `from` without reading anything, in order.
  Result<Set> Reach(Set from) const;

  CompileBudget* budget_;
  int32_t start_ = kStart;
  std::vector<std::vector<RuleNode::Edge>> edges_ = {{}};
  std::vector<Set> empty_ = {{}};
};

}  // namespace moeserve::structured
