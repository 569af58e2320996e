#include "engine/text/structured/automata/nfa.h"

#include <algorithm>
#include <set>

#include "absl/container/flat_hash_map.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::structured {

Result<Nfa::NodeId> Nfa::Add(Node node) {
  MOESERVE_RETURN_IF_ERROR(budget_->Tick());
  // The budget limits states; nodes are limited relative to the states left.
  if (static_cast<int64_t>(nodes_.size()) > 4 * budget_->states_left()) {
    return absl::InvalidArgumentError(
        "the pattern is too large when its repetitions are written out");
  }
  nodes_.push_back(node);
  return static_cast<NodeId>(nodes_.size() - 1);
}

Result<Nfa::NodeId> Nfa::Character(const CharSet& set, Encoding encoding, NodeId next) {
  const auto [it, added] =
      automaton_ids_.try_emplace({set, encoding}, static_cast<int32_t>(automata_.size()));
  if (added) {
    automata_.push_back(BuildCharAutomaton(set, encoding));
    MOESERVE_RETURN_IF_ERROR(budget_->Tick(4 * automata_.back().states.size()));
  }
  return Add({Kind::kCharacter, next, 0, it->second});
}

Result<Nfa::NodeId> Nfa::Split(NodeId a, NodeId b) { return Add({Kind::kSplit, a, b, 0}); }
Result<Nfa::NodeId> Nfa::AtStart(NodeId next) { return Add({Kind::kAtStart, next, 0, 0}); }
Result<Nfa::NodeId> Nfa::AtEnd(NodeId next) { return Add({Kind::kAtEnd, next, 0, 0}); }

Result<Nfa::NodeId> Nfa::Literal(std::string_view text, Encoding encoding, NodeId next) {
  std::u32string characters;
  for (size_t pos = 0; pos < text.size();) characters.push_back(NextCodePoint(text, &pos));
  for (auto it = characters.rbegin(); it != characters.rend(); ++it) {
    MOESERVE_ASSIGN_OR_RETURN(next, Character({{*it, *it}}, encoding, next));
  }
  return next;
}

Result<Nfa::NodeId> Nfa::Any(const std::vector<NodeId>& starts) {
  NodeId node = starts.back();
  for (size_t i = starts.size() - 1; i-- > 0;) {
    MOESERVE_ASSIGN_OR_RETURN(node, Split(starts[i], node));
  }
  return node;
}

// Subset construction. A position is a pair of a node and, inside a character, a state of that
// character's automaton.
class Nfa::Determinizer {
 public:
  explicit Determinizer(const Nfa& nfa) : nfa_(nfa), seen_(nfa.nodes_.size(), 0) {
    std::set<int> starts = {0};
    for (const CharAutomaton& automaton : nfa.automata_) {
      for (const auto& edges : automaton.states) {
        for (const CharAutomaton::Edge& edge : edges) {
          starts.insert(edge.first);
          starts.insert(edge.last + 1);
        }
      }
    }
    starts.insert(256);
    int first = 0;
    for (const int next : starts) {
      if (next == 0) continue;
      for (int b = first; b < next; ++b) dfa_.class_of[b] = static_cast<uint8_t>(dfa_.num_classes);
      ++dfa_.num_classes;
      first = next;
    }
  }

  Result<ByteDfa> Run(NodeId start) {
    Set first;
    ++mark_;
    MOESERVE_RETURN_IF_ERROR(Reach(start, /*at_start=*/true, /*at_end=*/false, &first));
    // The start set is not entered into the table ids_: if the same set is reached again later, ^
    // no longer matches there, so the two need different states.
    MOESERVE_RETURN_IF_ERROR(AddState(first, /*at_start=*/true));
    for (size_t s = 0; s < sets_.size(); ++s) {
      std::vector<Set> targets(dfa_.num_classes);
      // Makes a copy, because states that are added below move the elements of sets_.
      const Set positions = sets_[s];
      for (const Position& position : positions) {
        const Node& node = nfa_.nodes_[position.first];
        if (node.kind != Kind::kCharacter) continue;
        const CharAutomaton& automaton = nfa_.automata_[node.automaton];
        for (const CharAutomaton::Edge& edge : automaton.states[position.second]) {
          for (int c = dfa_.class_of[edge.first]; c <= dfa_.class_of[edge.last]; ++c) {
            if (edge.target == CharAutomaton::kDone) {
              targets[c].push_back({node.a, -1});
            } else {
              targets[c].push_back({position.first, edge.target});
            }
          }
        }
        MOESERVE_RETURN_IF_ERROR(
            nfa_.budget_->Tick(4 * automaton.states[position.second].size() + 1));
      }
      for (int c = 0; c < dfa_.num_classes; ++c) {
        if (targets[c].empty()) continue;
        MOESERVE_ASSIGN_OR_RETURN(const int32_t t, StateOf(targets[c]));
        dfa_.SetNext(static_cast<int32_t>(s), c, t);
      }
    }
    return std::move(dfa_);
  }

 private:
  // A node and a state of its character automaton; state 0 is at the node itself.
  using Position = std::pair<NodeId, int32_t>;
  using Set = std::vector<Position>;

  // Adds the positions that are reachable from `node` without reading a character.
  Status Reach(NodeId node, bool at_start, bool at_end, Set* out) {
    stack_.push_back(node);
    while (!stack_.empty()) {
      const NodeId id = stack_.back();
      stack_.pop_back();
      if (seen_[id] == mark_) continue;
      seen_[id] = mark_;
      const Node& n = nfa_.nodes_[id];
      switch (n.kind) {
        case Kind::kSplit:
          stack_.push_back(n.b);
          stack_.push_back(n.a);
          break;
        case Kind::kAtStart:
          if (at_start) stack_.push_back(n.a);
          break;
        case Kind::kAtEnd:
          if (at_end) stack_.push_back(n.a);
          if (!at_end) out->push_back({id, 0});
          break;
        default:
          out->push_back({id, 0});
      }
    }
    return nfa_.budget_->Tick(4);
  }

  Result<int32_t> StateOf(const Set& targets) {
    Set set;
    ++mark_;
    for (const Position& target : targets) {
      if (target.second >= 0) {
        set.push_back(target);
      } else {
        MOESERVE_RETURN_IF_ERROR(Reach(target.first, false, false, &set));
      }
    }
    std::sort(set.begin(), set.end());
    set.erase(std::unique(set.begin(), set.end()), set.end());
    MOESERVE_RETURN_IF_ERROR(nfa_.budget_->Tick(static_cast<int64_t>(set.size()) * 4));
    const auto it = ids_.find(set);
    if (it != ids_.end()) return it->second;
    const int32_t id = static_cast<int32_t>(sets_.size());
    ids_.emplace(set, id);
    MOESERVE_RETURN_IF_ERROR(AddState(set, /*at_start=*/false));
    return id;
  }

  Status AddState(const Set& set, bool at_start) {
    MOESERVE_RETURN_IF_ERROR(nfa_.budget_->AddStates(1, dfa_.num_classes));
    positions_ += set.size();
    if (positions_ > kMaxPositions) {
      return absl::InvalidArgumentError("the pattern needs too large an automaton");
    }
    bool accepting = false;
    bool boundary = true;
    Set ends;
    ++mark_;
    for (const Position& position : set) {
      if (position.second != 0) {
        boundary = false;
        continue;
      }
      const Kind kind = nfa_.nodes_[position.first].kind;
      if (kind == Kind::kMatch) accepting = true;
      if (kind == Kind::kAtEnd) {
        MOESERVE_RETURN_IF_ERROR(Reach(position.first, at_start, /*at_end=*/true, &ends));
      }
    }
    for (const Position& end : ends) {
      accepting |= nfa_.nodes_[end.first].kind == Kind::kMatch;
    }
    dfa_.AddState(accepting, boundary);
    sets_.push_back(set);
    return absl::OkStatus();
  }

  // Limits the memory of the sets: each position takes 8 bytes and is stored twice.
  static constexpr size_t kMaxPositions = 4 << 20;

  const Nfa& nfa_;
  ByteDfa dfa_;
  std::vector<Set> sets_;
  absl::flat_hash_map<Set, int32_t> ids_;
  size_t positions_ = 0;
  std::vector<int32_t> seen_;
  int32_t mark_ = 0;
  std::vector<NodeId> stack_;
};

Result<ByteDfa> Nfa::Determinize(NodeId start) const { return Determinizer(*this).Run(start); }

}  // namespace moeserve::structured
