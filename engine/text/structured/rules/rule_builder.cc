#include "engine/text/structured/rules/rule_builder.h"

#include <algorithm>
#include <map>
#include <utility>

namespace moeserve::structured {

int32_t RuleBuilder::AddState() {
  edges_.emplace_back();
  empty_.emplace_back();
  return static_cast<int32_t>(edges_.size() - 1);
}

void RuleBuilder::AddEdge(int32_t from, NodeId node, int32_t to) {
  edges_[from].push_back({node, to});
}

void RuleBuilder::AddEmpty(int32_t from, int32_t to) {
  if (from != to) empty_[from].push_back(to);
}

Result<RuleBuilder::Set> RuleBuilder::Reach(Set from) const {
  std::vector<uint8_t> seen(edges_.size(), 0);
  Set out;
  const auto add = [&](int32_t state) {
    if (!seen[state]) out.push_back(state);
    seen[state] = 1;
  };
  for (const int32_t state : from) add(state);
  for (size_t i = 0; i < out.size(); ++i) {
    const int32_t state = out[i];
    for (const int32_t next : empty_[state]) add(next);
  }
  std::sort(out.begin(), out.end());
  MOESERVE_RETURN_IF_ERROR(
      budget_->Tick(static_cast<int64_t>(4 * out.size() + edges_.size() / 16)));
  return out;
}

Status RuleBuilder::RemoveLeftRecursion(NodeId self, int32_t end) {
  MOESERVE_ASSIGN_OR_RETURN(const Set first, Reach({start_}));
  bool found = false;
  for (const int32_t state : first) {
    found |= std::any_of(edges_[state].begin(), edges_[state].end(),
                         [&](const RuleNode::Edge& edge) { return edge.node == self; });
  }
  if (!found) return absl::OkStatus();
  // The new start has the transitions of the old one without `self`. The states of the old one may
  // also be reached later, where `self` is no left recursion.
  start_ = AddState();
  for (const int32_t state : first) {
    if (state == end) AddEmpty(start_, end);
    for (const RuleNode::Edge& edge : std::vector<RuleNode::Edge>(edges_[state])) {
      if (edge.node == self) {
        // An instance that ends may go on as if it had been the first part of a longer one.
        AddEmpty(end, edge.target);
      } else {
        AddEdge(start_, edge.node, edge.target);
      }
    }
  }
  return absl::OkStatus();
}

Result<RuleNode> RuleBuilder::Build(int32_t end) const {
  RuleNode out;
  std::map<Set, int32_t> ids;
  std::vector<Set> sets;
  const auto id_of = [&](Set set) {
    const auto [it, added] = ids.try_emplace(set, static_cast<int32_t>(sets.size()));
    if (added) {
      out.states.emplace_back();
      out.states.back().accepting = std::binary_search(set.begin(), set.end(), end);
      sets.push_back(std::move(set));
    }
    return it->second;
  };
  MOESERVE_ASSIGN_OR_RETURN(Set start, Reach({start_}));
  id_of(std::move(start));
  for (size_t s = 0; s < sets.size(); ++s) {
    std::map<NodeId, Set> targets;
    int64_t edges = 0;
    for (const int32_t state : sets[s]) {
      for (const RuleNode::Edge& edge : edges_[state]) targets[edge.node].push_back(edge.target);
      edges += static_cast<int64_t>(edges_[state].size());
    }
    MOESERVE_RETURN_IF_ERROR(budget_->Tick(8 * (edges + 1)));
    MOESERVE_RETURN_IF_ERROR(budget_->AddStates(1 + static_cast<int64_t>(targets.size())));
    for (auto& [node, states] : targets) {
      MOESERVE_ASSIGN_OR_RETURN(Set reached, Reach(std::move(states)));
      const int32_t target = id_of(std::move(reached));
      out.states[s].edges.push_back({node, target});
    }
  }
  return out;
}

}  // namespace moeserve::structured
