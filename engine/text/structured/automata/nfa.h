// Nondeterministic automata over characters, and their determinization over bytes.
#pragma once

#include <cstdint>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/text/structured/automata/byte_dfa.h"
#include "engine/text/structured/automata/char_set.h"

namespace moeserve::structured {

// Built from the end: every node refers to the nodes after it.
class Nfa {
 public:
  using NodeId = int32_t;

  explicit Nfa(CompileBudget* budget) : budget_(budget) {}

  // The only node in which a match ends.
  NodeId match() const { return 0; }
  // One character of `set`, spelt in `encoding`, then `next`. An empty set never matches.
  Result<NodeId> Character(const CharSet& set, Encoding encoding, NodeId next);
  // Continues with `a` or `b`. SetBranch() may set `b` later.
  Result<NodeId> Split(NodeId a, NodeId b);
  void SetBranch(NodeId split, NodeId b) { nodes_[split].b = b; }
  // Continues to `next` only before the first character / only after the last one.
  Result<NodeId> AtStart(NodeId next);
  Result<NodeId> AtEnd(NodeId next);
  // The text (valid UTF-8), then `next`.
  Result<NodeId> Literal(std::string_view text, Encoding encoding, NodeId next);
  // Continues with any of `starts`, which is not empty.
  Result<NodeId> Any(const std::vector<NodeId>& starts);

  // The deterministic automaton that starts at `start`. Not finished. Its boundaries are the states
  // between two characters.
  Result<ByteDfa> Determinize(NodeId start) const;

 private:
  enum class Kind : uint8_t { kMatch, kCharacter, kSplit, kAtStart, kAtEnd };
  struct Node {
    Kind kind;
    NodeId a;           // the next node
    NodeId b;           // kSplit: the other one
    int32_t automaton;  // kCharacter
  };
  class Determinizer;

  Result<NodeId> Add(Node node);

  CompileBudget* budget_;
  std::vector<Node> nodes_ = {{Kind::kMatch, 0, 0, 0}};
  std::vector<CharAutomaton> automata_;
  std::map<std::pair<CharSet, Encoding>, int32_t> automaton_ids_;
};

}  // namespace moeserve::structured
