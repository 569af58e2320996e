#include "engine/text/structured/automata/pattern.h"

#include "engine/text/structured/automata/nfa.h"
#include "engine/text/structured/automata/pattern_syntax.h"

namespace moeserve::structured {
namespace {

using PatternKind = PatternNode::Kind;

class Translator {
 public:
  Translator(Encoding encoding, Nfa* nfa, CompileBudget* budget)
      : encoding_(encoding), nfa_(nfa), budget_(budget) {}

  // Adds nodes that match `node` and then continue at `next`; returns their start.
  Result<Nfa::NodeId> Translate(const PatternNode& node, Nfa::NodeId next) {
    // The tick bounds the time for repetitions of nothing, which add no nodes.
    MOESERVE_RETURN_IF_ERROR(budget_->Tick());
    switch (node.kind) {
      case PatternKind::kSet:
        return nfa_->Character(node.set, encoding_, next);
      case PatternKind::kAtStart:
        return nfa_->AtStart(next);
      case PatternKind::kAtEnd:
        return nfa_->AtEnd(next);
      case PatternKind::kSequence:
        for (auto it = node.children.rbegin(); it != node.children.rend(); ++it) {
          MOESERVE_ASSIGN_OR_RETURN(next, Translate(**it, next));
        }
        return next;
      case PatternKind::kAlternatives: {
        std::vector<Nfa::NodeId> starts;
        for (const auto& child : node.children) {
          MOESERVE_ASSIGN_OR_RETURN(const Nfa::NodeId start, Translate(*child, next));
          starts.push_back(start);
        }
        return nfa_->Any(starts);
      }
      case PatternKind::kRepeat:
        return Repeat(node, next);
    }
    return next;
  }

 private:
  Result<Nfa::NodeId> Repeat(const PatternNode& node, Nfa::NodeId next) {
    const PatternNode& child = *node.children[0];
    if (node.max == PatternNode::kUnbounded) {
      MOESERVE_ASSIGN_OR_RETURN(const Nfa::NodeId loop, nfa_->Split(next, next));
      MOESERVE_ASSIGN_OR_RETURN(const Nfa::NodeId again, Translate(child, loop));
      nfa_->SetBranch(loop, again);
      next = loop;
    } else {
      const Nfa::NodeId end = next;
      for (int i = node.min; i < node.max; ++i) {
        MOESERVE_ASSIGN_OR_RETURN(next, Translate(child, next));
        MOESERVE_ASSIGN_OR_RETURN(next, nfa_->Split(end, next));
      }
    }
    for (int i = 0; i < node.min; ++i) {
      MOESERVE_ASSIGN_OR_RETURN(next, Translate(child, next));
    }
    return next;
  }

  const Encoding encoding_;
  Nfa* nfa_;
  CompileBudget* budget_;
};

// Adds nodes that read any characters and then continue at `next`; returns their start.
Result<Nfa::NodeId> Anything(Encoding encoding, Nfa* nfa, Nfa::NodeId next) {
  MOESERVE_ASSIGN_OR_RETURN(const Nfa::NodeId loop, nfa->Split(next, next));
  MOESERVE_ASSIGN_OR_RETURN(const Nfa::NodeId again,
                            nfa->Character(AllCharacters(), encoding, loop));
  nfa->SetBranch(loop, again);
  return loop;
}

}  // namespace

Result<ByteDfa> TreeDfa(const PatternNode& tree, Encoding encoding, CompileBudget* budget) {
  Nfa nfa(budget);
  MOESERVE_ASSIGN_OR_RETURN(const Nfa::NodeId start,
                            Translator(encoding, &nfa, budget).Translate(tree, nfa.match()));
  return nfa.Determinize(start);
}

Result<ByteDfa> PatternDfa(std::string_view pattern, MatchMode mode, Encoding encoding,
                           CompileBudget* budget) {
  MOESERVE_ASSIGN_OR_RETURN(const auto tree, ParsePattern(pattern));
  Nfa nfa(budget);
  Nfa::NodeId node = nfa.match();
  if (mode == MatchMode::kSearch) {
    MOESERVE_ASSIGN_OR_RETURN(node, Anything(encoding, &nfa, node));
  }
  MOESERVE_ASSIGN_OR_RETURN(node, Translator(encoding, &nfa, budget).Translate(*tree, node));
  if (mode == MatchMode::kSearch) {
    MOESERVE_ASSIGN_OR_RETURN(node, Anything(encoding, &nfa, node));
  }
  return nfa.Determinize(node);
}

}  // namespace moeserve::structured
