#include "engine/text/structured/grammar.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "engine/text/structured/automata/char_set.h"
#include "engine/text/structured/grammar_distances.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::structured {
namespace {

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
      return AddDistances(grammar.nodes[edge.node].distance, states[edge.target].distance);
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

// Computes Node::first and Node::begins_free of all nodes.
Status FindFirstBytes(Grammar* grammar, CompileBudget* budget) {
  std::vector<Node>& nodes = grammar->nodes;
  for (Node& node : nodes) {
    node.first.reset();
    const auto* text = std::get_if<ScalarNode>(&node.value);
    node.begins_free = text != nullptr && text->free;
    if (node.distance >= kUnreachable) continue;
    if (const auto* scalar = std::get_if<ScalarNode>(&node.value)) {
      const ByteDfa& dfa = *grammar->dfas[scalar->dfa];
      for (int b = 0; b < 256; ++b) {
        node.first[b] = dfa.Next(ByteDfa::kStart, static_cast<uint8_t>(b)) != kDead;
      }
    } else if (std::holds_alternative<ArrayNode>(node.value)) {
      node.first.set('[');
    } else if (const auto* object = std::get_if<ObjectNode>(&node.value)) {
      node.first.set(object->is_set ? '[' : '{');
    }
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = nodes.size(); i-- > 0;) {
      Node& node = nodes[i];
      ByteSet first = node.first;
      bool begins_free = node.begins_free;
      if (const auto* choice = std::get_if<ChoiceNode>(&node.value)) {
        MOESERVE_RETURN_IF_ERROR(budget->Tick(static_cast<int64_t>(choice->options.size())));
        for (const NodeId option : choice->options) {
          first |= nodes[option].first;
          begins_free |= nodes[option].begins_free;
        }
      } else if (const auto* rule = std::get_if<RuleNode>(&node.value)) {
        const auto& edges = rule->states[0].edges;
        MOESERVE_RETURN_IF_ERROR(budget->Tick(static_cast<int64_t>(edges.size())));
        for (const RuleNode::Edge& edge : edges) {
          first |= nodes[edge.node].first;
          begins_free |= nodes[edge.node].begins_free;
        }
      }
      changed |= first != node.first || begins_free != node.begins_free;
      node.first = first;
      node.begins_free = begins_free;
    }
  }
  return absl::OkStatus();
}

// Sets ObjectNode::next_required.
void LinkRequired(ObjectNode* object) {
  int32_t places = 0;
  for (const Property& property : object->properties) {
    if (property.order != kUnordered) places = std::max(places, property.order + 1);
  }
  object->next_required.assign(static_cast<size_t>(places) + 1, kUnordered);
  for (const Property& property : object->properties) {
    if (property.required && property.order != kUnordered) {
      object->next_required[property.order] = property.order;
    }
  }
  for (int32_t i = places - 1; i >= 0; --i) {
    object->next_required[i] = std::min(object->next_required[i], object->next_required[i + 1]);
  }
}

// Sets the costs of the properties that may appear, and the order of the optional ones.
void RankProperties(const Grammar& grammar, ObjectNode* object) {
  object->num_required = 0;
  object->required_cost = 0;
  object->optional_by_cost.clear();
  LinkRequired(object);
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
  return AddDistances(first, MultiplyDistance(2 * taken + 1, automaton.max_distance + 1));
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
  MOESERVE_RETURN_IF_ERROR(MeasureGrammar(this, budget));
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
