#include "engine/text/structured/grammar.h"

#include <algorithm>
#include <string_view>
#include <tuple>
#include <utility>

#include "engine/text/structured/automata/char_set.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::structured {
namespace {

int64_t Sum(int64_t a, int64_t b) { return std::min(a + b, kUnreachable); }
int64_t Product(int64_t a, int64_t b) {
  if (a == 0 || b == 0) return 0;
  return a > kUnreachable / b ? kUnreachable : std::min(a * b, kUnreachable);
}

// Largest number of unnamed properties that an object may need to reach minProperties.
constexpr int64_t kMaxFillers = 1000;

struct Size {
  int64_t distance;
  int64_t height;
  bool operator<(const Size& other) const {
    return std::pair(distance, height) < std::pair(other.distance, other.height);
  }
};

// Returns the cheaper of the nodes of items that may follow in any number.
NodeId CheapestItem(const Grammar& grammar, const ArrayNode& array) {
  const auto distance = [&](NodeId id) {
    return id == kNoNode ? kUnreachable : grammar.nodes[id].distance;
  };
  if (array.max_contained < kNoLimit) return array.items;
  return distance(array.contained) < distance(array.items) ? array.contained : array.items;
}

class Measurer {
 public:
  Measurer(const Grammar& grammar, const ByteSet& spellable)
      : grammar_(grammar), spellable_(spellable) {}

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
    return {Sum(distance, scalar.min_chars), 0};
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
      for (int64_t i = 0; i < count; ++i) size.distance = Sum(size.distance, costs[i] + 1);
    } else {
      const int64_t contained = array.min_contained;
      if (contained > array.max_items || contained > array.max_contained) return {kUnreachable, 0};
      if (contained > 0) Add(array.contained, contained, &size);
      const int64_t more = std::max<int64_t>(count - contained, 0);
      if (more > 0) Add(CheapestItem(grammar_, array), more, &size);
      count = std::max(count, contained);
    }
    if (count > 0) size.distance -= size.distance < kUnreachable;
    if (count > 1 && !spellable_[',']) size.distance = kUnreachable;
    return size;
  }

  Size Measure(const ObjectNode& object) const {
    Size size{Brackets('{', '}'), 1};
    int64_t count = 0;
    int64_t inner = 0;
    std::vector<Size> optional;
    for (const Property& property : object.properties) {
      if (property.value == kNoNode) {
        if (property.required) return {kUnreachable, 0};
        continue;
      }
      const Node& value = At(property.value);
      const int64_t cost = Sum(property.suffix_bytes[0] + 4, value.distance);
      if (property.required) {
        ++count;
        size.distance = Sum(size.distance, cost);
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
        int64_t value = kUnreachable;
        for (const NodeId id : keys.value) {
          if (id == kNoNode || At(id).distance >= kUnreachable) continue;
          value = std::min(value, At(id).distance);
          other.height = std::max(other.height, At(id).height);
        }
        other.distance = Sum(value, 4 + keys.FreeKeyLength(*grammar_.dfas[keys.dfa], taken));
      } else if (object.additional != kNoNode && spellable_['a']) {
        other.distance = Sum(At(object.additional).distance, 4 + FreeNameLength(taken));
        other.height = At(object.additional).height;
      }
      int64_t left = more;
      for (size_t i = 0; i < optional.size() && left > 0; ++i, --left) {
        if (other.distance <= optional[i].distance) break;
        size.distance = Sum(size.distance, optional[i].distance);
        inner = std::max(inner, optional[i].height);
      }
      if (left > 0) {
        if (left > kMaxFillers) return {kUnreachable, 0};
        size.distance = Sum(size.distance, Product(left, other.distance));
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
    size->distance = Sum(size->distance, Product(count, Sum(At(item).distance, 1)));
    size->height = std::max(size->height, 1 + At(item).height);
  }

  const Grammar& grammar_;
  const ByteSet& spellable_;
};

// Sets Property::suffix_bytes of all properties.
Status MeasureNames(Grammar* grammar, CompileBudget* budget) {
  for (Node& node : grammar->nodes) {
    auto* object = std::get_if<ObjectNode>(&node.value);
    if (object == nullptr) continue;
    for (Property& property : object->properties) {
      property.suffix_bytes.assign(property.name.size() + 1, 0);
      for (size_t i = property.name.size(); i-- > 0;) {
        property.suffix_bytes[i] =
            Sum(property.suffix_bytes[i + 1], SpelledBytes(property.name[i], grammar->spellable));
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
        best = std::min(
            best, Size{Sum(node.distance, target.distance), std::max(node.height, target.height)});
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

// Removes from `node` the options, items and properties that have no instance which the vocabulary
// can spell.
void RemoveEndless(const Grammar& grammar, Node* node) {
  const auto finite = [&](NodeId id) {
    return id != kNoNode && grammar.nodes[id].distance < kUnreachable ? id : kNoNode;
  };
  if (auto* choice = std::get_if<ChoiceNode>(&node->value)) {
    std::erase_if(choice->options, [&](NodeId id) { return finite(id) == kNoNode; });
  } else if (auto* array = std::get_if<ArrayNode>(&node->value)) {
    for (NodeId& id : array->prefix) id = finite(id);
    array->items = finite(array->items);
    array->contained = finite(array->contained);
    std::erase_if(array->distinct, [&](NodeId id) { return finite(id) == kNoNode; });
  } else if (auto* object = std::get_if<ObjectNode>(&node->value)) {
    object->additional = finite(object->additional);
    for (Property& property : object->properties) {
      property.value = finite(property.value);
      if (property.suffix_bytes[0] >= kUnreachable) property.value = kNoNode;
    }
  } else if (auto* rule = std::get_if<RuleNode>(&node->value)) {
    for (RuleNode::State& state : rule->states) {
      std::erase_if(state.edges, [&](const RuleNode::Edge& edge) {
        return finite(edge.node) == kNoNode || rule->states[edge.target].distance >= kUnreachable;
      });
    }
  }
}

// Adds to each state of `rule` the edges of the states that it reaches over nodes with an empty
// instance, and sorts the edges by the distance of the way through them.
Status CloseStates(const Grammar& grammar, RuleNode* rule, CompileBudget* budget) {
  std::vector<RuleNode::State>& states = rule->states;
  std::vector<std::vector<RuleNode::Edge>> closed(states.size());
  std::vector<size_t> seen_from(states.size(), states.size());
  for (size_t s = 0; s < states.size(); ++s) {
    std::vector<int32_t> reached = {static_cast<int32_t>(s)};
    seen_from[s] = s;
    for (size_t i = 0; i < reached.size(); ++i) {
      const RuleNode::State& state = states[reached[i]];
      MOESERVE_RETURN_IF_ERROR(budget->Tick(4 + static_cast<int64_t>(state.edges.size())));
      for (const RuleNode::Edge& edge : state.edges) {
        closed[s].push_back(edge);
        if (grammar.nodes[edge.node].distance > 0 || seen_from[edge.target] == s) continue;
        seen_from[edge.target] = s;
        reached.push_back(edge.target);
      }
    }
    const auto distance = [&](const RuleNode::Edge& edge) {
      return Sum(grammar.nodes[edge.node].distance, states[edge.target].distance);
    };
    std::sort(closed[s].begin(), closed[s].end(),
              [&](const RuleNode::Edge& a, const RuleNode::Edge& b) {
                return std::pair(distance(a), a) < std::pair(distance(b), b);
              });
    closed[s].erase(std::unique(closed[s].begin(), closed[s].end()), closed[s].end());
    if (reached.size() > 1) {
      MOESERVE_RETURN_IF_ERROR(budget->AddStates(static_cast<int64_t>(closed[s].size())));
    }
  }
  for (size_t s = 0; s < states.size(); ++s) {
    states[s].edges = std::move(closed[s]);
    states[s].accepting = states[s].distance == 0;
  }
  return absl::OkStatus();
}

// Removes the keys whose values have no instance that the vocabulary can spell, and computes the
// other fields.
Status FinishKeys(Grammar* grammar, KeySet* keys, CompileBudget* budget) {
  ByteDfa dfa = *grammar->dfas[keys->dfa];
  keys->max_value = 0;
  keys->min_value = kUnreachable;
  keys->height = 0;
  for (int32_t s = 0; s < dfa.num_states(); ++s) {
    NodeId& value = keys->value[s];
    if (value != kNoNode && grammar->nodes[value].distance >= kUnreachable) value = kNoNode;
    dfa.accepting[s] = value != kNoNode;
    if (value == kNoNode) continue;
    const Node& node = grammar->nodes[value];
    keys->min_value = std::min(keys->min_value, node.distance);
    keys->max_value = std::max(keys->max_value, node.distance);
    keys->height = std::max(keys->height, node.height);
  }
  MOESERVE_RETURN_IF_ERROR(dfa.Finish(grammar->spellable, budget));
  // Repeatedly removes states without successors that are not yet removed. The states from which no
  // loop can be reached are removed in the end.
  const int32_t n = dfa.num_states();
  std::vector<int32_t> successors(n, 0);
  std::vector<std::vector<int32_t>> before(n);
  for (int32_t s = 0; s < n; ++s) {
    MOESERVE_RETURN_IF_ERROR(budget->Tick(dfa.num_classes));
    for (int c = 0; c < dfa.num_classes; ++c) {
      const int32_t t = dfa.next[static_cast<size_t>(s) * dfa.num_classes + c];
      if (t == kDead) continue;
      ++successors[s];
      before[t].push_back(s);
    }
  }
  std::vector<int32_t> removed;
  for (int32_t s = 0; s < n; ++s) {
    if (successors[s] == 0) removed.push_back(s);
  }
  for (size_t i = 0; i < removed.size(); ++i) {
    for (const int32_t s : before[removed[i]]) {
      if (--successors[s] == 0) removed.push_back(s);
    }
  }
  keys->endless = true;
  for (const int32_t s : removed) {
    // The state after the closing quote has no successor.
    keys->endless &= !dfa.has_next[s] || dfa.distance[s] >= kUnreachable;
  }
  grammar->dfas[keys->dfa] = std::make_shared<const ByteDfa>(std::move(dfa));
  return absl::OkStatus();
}

// Computes Node::first of all nodes.
Status FindFirstBytes(Grammar* grammar, CompileBudget* budget) {
  std::vector<Node>& nodes = grammar->nodes;
  for (Node& node : nodes) {
    node.first.reset();
    if (node.distance >= kUnreachable) continue;
    if (const auto* scalar = std::get_if<ScalarNode>(&node.value)) {
      const ByteDfa& dfa = *grammar->dfas[scalar->dfa];
      for (int b = 0; b < 256; ++b) {
        node.first[b] = dfa.Next(ByteDfa::kStart, static_cast<uint8_t>(b)) != kDead;
      }
    } else if (std::holds_alternative<ArrayNode>(node.value)) {
      node.first.set('[');
    } else if (std::holds_alternative<ObjectNode>(node.value)) {
      node.first.set('{');
    }
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = nodes.size(); i-- > 0;) {
      Node& node = nodes[i];
      ByteSet first = node.first;
      if (const auto* choice = std::get_if<ChoiceNode>(&node.value)) {
        MOESERVE_RETURN_IF_ERROR(budget->Tick(static_cast<int64_t>(choice->options.size())));
        for (const NodeId option : choice->options) first |= nodes[option].first;
      } else if (const auto* rule = std::get_if<RuleNode>(&node.value)) {
        const auto& edges = rule->states[0].edges;
        MOESERVE_RETURN_IF_ERROR(budget->Tick(static_cast<int64_t>(edges.size())));
        for (const RuleNode::Edge& edge : edges) first |= nodes[edge.node].first;
      }
      changed |= first != node.first;
      node.first = first;
    }
  }
  return absl::OkStatus();
}

// Sets the costs of the properties that may appear, and the order of the optional ones.
void RankProperties(const Grammar& grammar, ObjectNode* object) {
  object->num_required = 0;
  object->required_cost = 0;
  object->optional_by_cost.clear();
  for (size_t i = 0; i < object->properties.size(); ++i) {
    Property& property = object->properties[i];
    if (property.value == kNoNode) continue;
    property.cost = property.suffix_bytes[0] + 4 + grammar.nodes[property.value].distance;
    if (property.required) {
      ++object->num_required;
      object->required_cost += property.cost;
    } else {
      object->optional_by_cost.push_back(static_cast<int32_t>(i));
    }
  }
  std::stable_sort(object->optional_by_cost.begin(), object->optional_by_cost.end(),
                   [&](int32_t a, int32_t b) {
                     return object->properties[a].cost < object->properties[b].cost;
                   });
  for (size_t rank = 0; rank < object->optional_by_cost.size(); ++rank) {
    object->properties[object->optional_by_cost[rank]].rank = static_cast<int32_t>(rank);
  }
}

}  // namespace

int64_t KeySet::FreeKeyLength(const ByteDfa& automaton, int64_t taken) const {
  // A search that goes on where a taken key ends, or from where it turned off towards it, finds the
  // next key within max_distance + 1 bytes. A character has two spellings, so it may find each
  // taken key twice.
  const int64_t first = automaton.distance[ByteDfa::kStart];
  return Sum(first, Product(2 * taken + 1, automaton.max_distance + 1));
}

int64_t FreeNameLength(int64_t taken) { return taken < 90 ? 1 : 2; }

int64_t SpelledBytes(char32_t c, const ByteSet& spellable) {
  if (ShortEscape(c) != 0) {
    return spellable['\\'] && spellable[static_cast<uint8_t>(ShortEscape(c))] ? 2 : kUnreachable;
  }
  std::string utf8;
  AppendUtf8(c, &utf8);
  const bool direct = c >= 0x20 && std::all_of(utf8.begin(), utf8.end(), [&](char b) {
                        return spellable[static_cast<uint8_t>(b)];
                      });
  if (direct) return static_cast<int64_t>(utf8.size());
  if (c >= 0x20 && c < 0x7F) return kUnreachable;
  for (const char b : std::string_view("\\u0123456789abcdef")) {
    if (!spellable[static_cast<uint8_t>(b)]) return kUnreachable;
  }
  return c > 0xFFFF ? 12 : 6;
}

Status Grammar::Finish(const ByteSet& spellable_bytes, CompileBudget* budget) {
  spellable = spellable_bytes;
  MOESERVE_RETURN_IF_ERROR(MeasureNames(this, budget));
  MOESERVE_RETURN_IF_ERROR(MeasureDistances(this, budget));
  MOESERVE_RETURN_IF_ERROR(MeasureHeights(this, budget));
  for (Node& node : nodes) {
    RemoveEndless(*this, &node);
    if (auto* object = std::get_if<ObjectNode>(&node.value)) RankProperties(*this, object);
    if (auto* rule = std::get_if<RuleNode>(&node.value)) {
      MOESERVE_RETURN_IF_ERROR(CloseStates(*this, rule, budget));
    }
  }
  for (KeySet& keys : key_sets) MOESERVE_RETURN_IF_ERROR(FinishKeys(this, &keys, budget));
  return FindFirstBytes(this, budget);
}

NodeId Grammar::Append(Grammar part) {
  const NodeId nodes_before = static_cast<NodeId>(nodes.size());
  const int32_t dfas_before = static_cast<int32_t>(dfas.size());
  const int32_t triggers_before = static_cast<int32_t>(triggers.size());
  const int32_t key_sets_before = static_cast<int32_t>(key_sets.size());
  const auto move = [&](NodeId* id) {
    if (*id != kNoNode) *id += nodes_before;
  };
  for (Node& node : part.nodes) {
    if (auto* scalar = std::get_if<ScalarNode>(&node.value)) {
      scalar->dfa = scalar->dfa == part.any_string ? any_string : scalar->dfa + dfas_before;
      if (scalar->trigger >= 0) scalar->trigger += triggers_before;
    } else if (auto* array = std::get_if<ArrayNode>(&node.value)) {
      for (NodeId& id : array->prefix) move(&id);
      move(&array->items);
      move(&array->contained);
      for (NodeId& id : array->distinct) move(&id);
    } else if (auto* object = std::get_if<ObjectNode>(&node.value)) {
      for (Property& property : object->properties) move(&property.value);
      move(&object->additional);
      if (object->keys >= 0) object->keys += key_sets_before;
    } else if (auto* choice = std::get_if<ChoiceNode>(&node.value)) {
      for (NodeId& id : choice->options) move(&id);
    } else if (auto* rule = std::get_if<RuleNode>(&node.value)) {
      for (RuleNode::State& state : rule->states) {
        for (RuleNode::Edge& edge : state.edges) move(&edge.node);
      }
    }
    nodes.push_back(std::move(node));
  }
  for (Trigger& trigger : part.triggers) {
    move(&trigger.literal);
    triggers.push_back(std::move(trigger));
  }
  for (KeySet& keys : part.key_sets) {
    keys.dfa += dfas_before;
    for (NodeId& id : keys.value) move(&id);
    key_sets.push_back(std::move(keys));
  }
  dfas.insert(dfas.end(), part.dfas.begin(), part.dfas.end());
  move(&part.root);
  return part.root;
}

}  // namespace moeserve::structured
