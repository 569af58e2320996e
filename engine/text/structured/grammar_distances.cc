#include "engine/text/structured/grammar_distances.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

namespace moeserve::structured {
namespace {

struct Size {
  int64_t distance;
  int64_t height;
  bool operator<(const Size& other) const {
    return std::pair(distance, height) < std::pair(other.distance, other.height);
  }
};

// Returns how many of `more` further items of an array with `contained` contained ones are
// contained ones, too, if the items are as short as possible.
int64_t FurtherContained(const Grammar& grammar, const ArrayNode& array, int64_t contained,
                         int64_t more) {
  const auto distance = [&](NodeId id) {
    return id == kNoNode ? kUnreachable : grammar.nodes[id].distance;
  };
  if (distance(array.contained) >= distance(array.items)) return 0;
  return std::clamp<int64_t>(array.max_contained - contained, 0, more);
}

class Measurer {
 public:
  // If `any_key`, the distances of objects allow for the longest value that a key of a KeySet can
  // have, instead of the shortest one.
  Measurer(const Grammar& grammar, const ByteSet& spellable, bool any_key = false)
      : grammar_(grammar), spellable_(spellable), any_key_(any_key) {}

  Size Of(const Node& node) const {
    return std::visit([&](const auto& value) { return Measure(value); }, node.value);
  }

 private:
  const Node& At(NodeId id) const { return grammar_.nodes[id]; }

  Size Measure(const ScalarNode& scalar) const {
    const ByteDfa& dfa = *grammar_.dfas[scalar.dfa];
    const int64_t distance = dfa.distance[ByteDfa::kStart];
    if (!scalar.counted || scalar.min_chars == 0 || distance >= kUnreachable) return {distance, 0};
    if (scalar.min_chars > scalar.max_chars || !spellable_[' ']) return {kUnreachable, 0};
    return {AddDistances(distance, scalar.min_chars), 0};
  }

  Size Measure(const ArrayNode& array) const {
    Size size{Brackets('[', ']'), 1};
    if (array.min_items > array.max_items) size.distance = kUnreachable;
    if (array.contained != kNoNode || !array.distinct.empty()) return MeasureSpecial(array, size);
    const int64_t prefix = static_cast<int64_t>(array.prefix.size());
    for (int64_t i = 0; i < std::min(array.min_items, prefix); ++i) Add(array.ItemAt(i), 1, &size);
    if (array.min_items > prefix) Add(array.ItemAt(prefix), array.min_items - prefix, &size);
    if (array.min_items > 0) size.distance -= size.distance < kUnreachable;
    if (array.min_items > 1 && !spellable_[',']) size.distance = kUnreachable;
    return size;
  }

  // Measures an array with ArrayNode::contained or ArrayNode::distinct.
  Size MeasureSpecial(const ArrayNode& array, Size size) const {
    int64_t count = array.min_items;
    if (!array.distinct.empty()) {
      std::vector<int64_t> costs;
      for (const NodeId id : array.distinct) costs.push_back(At(id).distance);
      std::sort(costs.begin(), costs.end());
      if (count > std::ssize(costs)) return {kUnreachable, 0};
      for (int64_t i = 0; i < count; ++i) size.distance = AddDistances(size.distance, costs[i] + 1);
    } else {
      const int64_t contained = array.min_contained;
      if (contained > array.max_items || contained > array.max_contained) return {kUnreachable, 0};
      if (contained > 0) Add(array.contained, contained, &size);
      const int64_t more = std::max<int64_t>(count - contained, 0);
      const int64_t further = FurtherContained(grammar_, array, contained, more);
      if (further > 0) Add(array.contained, further, &size);
      if (more > further) Add(array.items, more - further, &size);
      count = std::max(count, contained);
    }
    if (count > 0) size.distance -= size.distance < kUnreachable;
    if (count > 1 && !spellable_[',']) size.distance = kUnreachable;
    return size;
  }

  Size Measure(const ObjectNode& object) const {
    Size size{object.is_set ? Brackets('[', ']') : Brackets('{', '}'), 1};
    int64_t count = 0;
    int64_t inner = 0;
    std::vector<Size> optional;
    for (const Property& property : object.properties) {
      if (property.value == kNoNode) {
        if (property.required) return {kUnreachable, 0};
        continue;
      }
      const Node& value = At(property.value);
      const int64_t cost = AddDistances(property.suffix_bytes[0] + 4, value.distance);
      if (property.required) {
        ++count;
        size.distance = AddDistances(size.distance, cost);
        inner = std::max(inner, value.height);
      } else if (cost < kUnreachable) {
        optional.push_back({cost, value.height});
      }
    }
    if (count > object.max_properties || object.min_properties > object.max_properties) {
      return {kUnreachable, 0};
    }
    const int64_t more = object.min_properties - count;
    if (more > 0) {
      // Takes the cheapest optional properties, as Matcher does for an object that needs more
      // properties.
      std::stable_sort(optional.begin(), optional.end(),
                       [](const Size& a, const Size& b) { return a.distance < b.distance; });
      Size other{kUnreachable, 0};
      const int64_t taken = static_cast<int64_t>(object.properties.size()) + more;
      if (object.keys >= 0) {
        const KeySet& keys = grammar_.key_sets[object.keys];
        Size value{kUnreachable, kUnreachable};
        int64_t longest = 0;
        for (const NodeId id : keys.value) {
          if (id == kNoNode || At(id).distance >= kUnreachable) continue;
          value = std::min(value, Size{At(id).distance, At(id).height});
          longest = std::max(longest, At(id).distance);
        }
        if (any_key_) value.distance = std::max(value.distance, longest);
        other.height = value.height;
        other.distance =
            AddDistances(value.distance, 4 + keys.FreeKeyLength(*grammar_.dfas[keys.dfa], taken));
      } else if (object.additional != kNoNode && spellable_['a']) {
        other.distance = AddDistances(At(object.additional).distance, 4 + FreeNameLength(taken));
        other.height = At(object.additional).height;
      }
      int64_t left = more;
      for (size_t i = 0; i < optional.size() && left > 0; ++i, --left) {
        if (other.distance <= optional[i].distance) break;
        size.distance = AddDistances(size.distance, optional[i].distance);
        inner = std::max(inner, optional[i].height);
      }
      if (left > 0) {
        if (left > kMaxFillers) return {kUnreachable, 0};
        size.distance = AddDistances(size.distance, MultiplyDistance(left, other.distance));
        inner = std::max(inner, other.height);
      }
    }
    const bool any = count > 0 || more > 0;
    if (any && (!spellable_['"'] || !spellable_[':'] || !spellable_[','])) return {kUnreachable, 0};
    size.distance -= any && size.distance < kUnreachable;
    size.height += inner;
    return size;
  }

  Size Measure(const RuleNode& rule) const {
    return {rule.states[0].distance, 1 + rule.states[0].height};
  }

  Size Measure(const ChoiceNode& choice) const {
    Size size{kUnreachable, 0};
    for (const NodeId option : choice.options) {
      size = std::min(size, Size{At(option).distance, At(option).height});
    }
    return size;
  }

  int64_t Brackets(char open, char close) const {
    return spellable_[open] && spellable_[close] ? 2 : kUnreachable;
  }
  // Extends `size` by `count` items and their commas.
  void Add(NodeId item, int64_t count, Size* size) const {
    if (item == kNoNode) {
      size->distance = kUnreachable;
      return;
    }
    size->distance =
        AddDistances(size->distance, MultiplyDistance(count, AddDistances(At(item).distance, 1)));
    size->height = std::max(size->height, 1 + At(item).height);
  }

  const Grammar& grammar_;
  const ByteSet& spellable_;
  const bool any_key_;
};

// Sets Property::suffix_bytes of all properties.
Status MeasureNames(Grammar* grammar, CompileBudget* budget) {
  for (Node& node : grammar->nodes) {
    auto* object = std::get_if<ObjectNode>(&node.value);
    if (object == nullptr) continue;
    for (Property& property : object->properties) {
      property.suffix_bytes.assign(property.name.size() + 1, 0);
      for (size_t i = property.name.size(); i-- > 0;) {
        property.suffix_bytes[i] = AddDistances(property.suffix_bytes[i + 1],
                                                SpelledBytes(property.name[i], grammar->spellable));
      }
      MOESERVE_RETURN_IF_ERROR(budget->Tick(static_cast<int64_t>(property.name.size())));
    }
  }
  return absl::OkStatus();
}

// Returns the number of nodes that the size of `node` depends on, `node` included.
int64_t WorkOf(const Node& node) {
  size_t others = 0;
  if (const auto* object = std::get_if<ObjectNode>(&node.value)) {
    others = object->properties.size();
  } else if (const auto* array = std::get_if<ArrayNode>(&node.value)) {
    others = array->prefix.size() + array->distinct.size();
  } else if (const auto* choice = std::get_if<ChoiceNode>(&node.value)) {
    others = choice->options.size();
  } else if (const auto* rule = std::get_if<RuleNode>(&node.value)) {
    others = rule->states.size();
    for (const RuleNode::State& state : rule->states) others += state.edges.size();
  }
  return 1 + static_cast<int64_t>(others);
}

// Lowers the distances and heights of the states of `rule` as far as those of the nodes allow.
Status RelaxStates(const Grammar& grammar, RuleNode* rule, CompileBudget* budget) {
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = rule->states.size(); i-- > 0;) {
      RuleNode::State& state = rule->states[i];
      Size best{state.distance, state.height};
      if (state.accepting) best = std::min(best, Size{0, 0});
      for (const RuleNode::Edge& edge : state.edges) {
        const Node& node = grammar.nodes[edge.node];
        const RuleNode::State& target = rule->states[edge.target];
        best = std::min(best, Size{AddDistances(node.distance, target.distance),
                                   std::max(node.height, target.height)});
      }
      if (best.distance >= kUnreachable || !(best < Size{state.distance, state.height})) continue;
      state.distance = best.distance;
      state.height = best.height;
      changed = true;
      MOESERVE_RETURN_IF_ERROR(budget->Tick(1 + static_cast<int64_t>(state.edges.size())));
    }
  }
  return absl::OkStatus();
}

// Computes Node::distance of all nodes; repeats until no distance changes. This ends, because
// distances only decrease and each has finitely many possible values.
Status MeasureDistances(Grammar* grammar, CompileBudget* budget) {
  const Measurer measurer(*grammar, grammar->spellable);
  for (bool changed = true; changed;) {
    changed = false;
    // Iterates backwards, because most values refer to later nodes.
    for (size_t i = grammar->nodes.size(); i-- > 0;) {
      Node& node = grammar->nodes[i];
      MOESERVE_RETURN_IF_ERROR(budget->Tick(8 * WorkOf(node)));
      if (auto* rule = std::get_if<RuleNode>(&node.value)) {
        MOESERVE_RETURN_IF_ERROR(RelaxStates(*grammar, rule, budget));
      }
      const int64_t distance = measurer.Of(node).distance;
      if (distance < node.distance) {
        node.distance = distance;
        changed = true;
      }
    }
  }
  return absl::OkStatus();
}

// Raises the distances of objects that need properties of a KeySet, and of what contains them: the
// matcher chooses the shortest key, whatever its value is. Objects in each other may raise each
// other without end; after some rounds, their distances are too small.
Status RaiseDistances(Grammar* grammar, CompileBudget* budget) {
  if (grammar->key_sets.empty()) return absl::OkStatus();
  constexpr int kMaxRounds = 50;
  const Measurer measurer(*grammar, grammar->spellable, /*any_key=*/true);
  bool changed = true;
  for (int round = 0; changed && round < kMaxRounds; ++round) {
    changed = false;
    for (size_t i = grammar->nodes.size(); i-- > 0;) {
      Node& node = grammar->nodes[i];
      MOESERVE_RETURN_IF_ERROR(budget->Tick(8 * WorkOf(node)));
      if (auto* rule = std::get_if<RuleNode>(&node.value)) {
        for (RuleNode::State& state : rule->states) state.distance = kUnreachable;
        MOESERVE_RETURN_IF_ERROR(RelaxStates(*grammar, rule, budget));
      }
      const int64_t distance = measurer.Of(node).distance;
      if (distance >= kUnreachable || distance <= node.distance) continue;
      node.distance = distance;
      changed = true;
    }
  }
  return absl::OkStatus();
}

// Computes Node::height of all nodes in ascending order of Node::distance. The height of a node
// depends on the nodes from which its shortest instance is built, and most of these come earlier in
// the order, because their distances are smaller. Choices and rules can have the same distance as a
// node that they consist of; so among equal distances they come last, and the computation is
// repeated until no height changes. This ends, because heights only decrease.
Status MeasureHeights(Grammar* grammar, CompileBudget* budget) {
  std::vector<Node>& nodes = grammar->nodes;
  std::vector<NodeId> order;
  bool rules = false;
  for (size_t i = 0; i < nodes.size(); ++i) {
    nodes[i].height = 0;
    if (nodes[i].distance >= kUnreachable) continue;
    order.push_back(static_cast<NodeId>(i));
    if (auto* rule = std::get_if<RuleNode>(&nodes[i].value)) {
      rules = true;
      for (RuleNode::State& state : rule->states) state.height = kUnreachable;
    }
    nodes[i].height = kUnreachable;
  }
  const auto is_made_of_one = [&](NodeId id) {
    return std::holds_alternative<ChoiceNode>(nodes[id].value) ||
           std::holds_alternative<RuleNode>(nodes[id].value);
  };
  std::sort(order.begin(), order.end(), [&](NodeId a, NodeId b) {
    return std::tuple(nodes[a].distance, is_made_of_one(a), a) <
           std::tuple(nodes[b].distance, is_made_of_one(b), b);
  });
  const Measurer measurer(*grammar, grammar->spellable);
  for (bool changed = true; changed;) {
    changed = false;
    for (const NodeId id : order) {
      MOESERVE_RETURN_IF_ERROR(budget->Tick(WorkOf(nodes[id])));
      if (auto* rule = std::get_if<RuleNode>(&nodes[id].value)) {
        MOESERVE_RETURN_IF_ERROR(RelaxStates(*grammar, rule, budget));
      }
      const int64_t height = measurer.Of(nodes[id]).height;
      changed |= rules && height != nodes[id].height;
      nodes[id].height = height;
    }
  }
  return absl::OkStatus();
}

}  // namespace

Status MeasureGrammar(Grammar* grammar, CompileBudget* budget) {
  MOESERVE_RETURN_IF_ERROR(MeasureNames(grammar, budget));
  MOESERVE_RETURN_IF_ERROR(MeasureDistances(grammar, budget));
  MOESERVE_RETURN_IF_ERROR(RaiseDistances(grammar, budget));
  return MeasureHeights(grammar, budget);
}

}  // namespace moeserve::structured
