// Nondeterministic automata (NFAs) over characters, and their conversion to DFAs over bytes.
#pragma once

#include <cstdint>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/text/structured/automata/byte_dfa.h"
#include "engine/text/structured/automata/char_set.h"

namespace moeserve::structured {

// Nodes are added from the end of the pattern to its start, so that every node refers to nodes that
// exist.
class Nfa {
 public:
  using NodeId = int32_t;

  explicit Nfa(CompileBudget* budget) : budget_(budget) {}

  // Returns the only node in which a match ends.
  NodeId match() const { return 0; }
  // Adds a node that reads one character of `set`, spelt in `encoding`, and continues at `next`. An
  // empty set never matches.
  Result<NodeId> Character(const CharSet& set, Encoding encoding, NodeId next);
  // Adds a node that continues at `a` or `b`. SetBranch() may set `b` later.
  Result<NodeId> Split(NodeId a, NodeId b);
  void SetBranch(NodeId split, NodeId b) { nodes_[split].b = b; }
  // Adds a node that continues at `next` only before the first character (AtStart) or after the
  // last one (AtEnd).
  Result<NodeId> AtStart(NodeId next);
  Result<NodeId> AtEnd(NodeId next);
  // Adds nodes that read `text` (valid UTF-8) and continue at `next`.
  Result<NodeId> Literal(std::string_view text, Encoding encoding, NodeId next);
  // Adds nodes that continue at any of `starts`, which must not be empty.
  Result<NodeId> Any(const std::vector<NodeId>& starts);

  // Returns the DFA that starts at node `start`; ByteDfa::Finish() is still to be called on it.
  // ByteDfa::boundary marks the states between two characters.
  Result<ByteDfa> Determinize(NodeId start) const;

 private:
  enum class Kind : uint8_t { kMatch, kCharacter, kSplit, kAtStart, kAtEnd };
  struct Node {
    Kind kind;
    NodeId a;           // the next node
    NodeId b;           // kSplit: the second next node
    int32_t automaton;  // kCharacter: index into automata_
  };
  class Determinizer;

  Result<NodeId> Add(Node node);

  CompileBudget* budget_;
  std::vector<Node> nodes_ = {{Kind::kMatch, 0, 0, 0}};
  std::vector<CharAutomaton> automata_;
  std::map<std::pair<CharSet, Encoding>, int32_t> automaton_ids_;
};

}  // namespace moeserve::structured
