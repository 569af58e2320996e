// A compiled constraint: a graph of values.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "engine/text/structured/automata/byte_dfa.h"

namespace moeserve::structured {

using NodeId = int32_t;
inline constexpr NodeId kNoNode = -1;

// Nesting of containers in an answer; bounds the memory of a state.
inline constexpr int kMaxDepth = 96;

struct ScalarNode {
  int32_t dfa = 0;  // into Grammar::dfas
  // A string that only its length restricts: dfa is any_string, and the matcher counts min_chars to
  // max_chars characters.
  bool counted = false;
  int64_t min_chars = 0;
  int64_t max_chars = kNoLimit;
};

struct ArrayNode {
  std::vector<NodeId> prefix;
  NodeId items = kNoNode;  // after the prefix; kNoNode: none
  int64_t min_items = 0;
  int64_t max_items = kNoLimit;

  NodeId ItemAt(int64_t i) const {
    if (i >= max_items) return kNoNode;
    return i < static_cast<int64_t>(prefix.size()) ? prefix[static_cast<size_t>(i)] : items;
  }
};

struct Property {
  std::u32string name;
  NodeId value = kNoNode;  // kNoNode: must not appear
  bool required = false;
  // Filled in by Grammar::Finish(). suffix_bytes[i]: bytes of the shortest spelling of the name
  // from its i-th character on.
  std::vector<int64_t> suffix_bytes;
  int64_t cost = 0;   // key, shortest value and a comma
  int32_t rank = -1;  // in optional_by_cost; -1: not there
};

struct ObjectNode {
  std::vector<Property> properties;  // by name
  NodeId additional = kNoNode;       // values of all other properties; kNoNode: none
  int64_t min_properties = 0;
  int64_t max_properties = kNoLimit;
  // Filled in by Grammar::Finish.
  int num_required = 0;
  int64_t required_cost = 0;
  std::vector<int32_t> optional_by_cost;  // optional properties that may appear, cheapest first
};

// Any of the options. Options are never choices.
struct ChoiceNode {
  std::vector<NodeId> options;
};

struct Node {
  std::variant<ScalarNode, ArrayNode, ObjectNode, ChoiceNode> value;
  // Bytes of a shortest instance that the vocabulary can spell, and its nesting depth.
  int64_t distance = kUnreachable;
  int64_t height = 0;
};

struct Grammar {
  std::vector<Node> nodes;
  std::vector<DfaPtr> dfas;
  int32_t any_string = 0;  // in dfas: every JSON string
  NodeId root = kNoNode;
  ByteSet spellable;  // filled in by Finish

  // Computes distances and removes what has no finite instance. `spellable_bytes`: bytes that are
  // tokens by themselves.
  Status Finish(const ByteSet& spellable_bytes, CompileBudget* budget);
};

// A number of characters with which some key, or any given key extended by as many, is not among
// `taken` names.
int64_t FreeNameLength(int64_t taken);

// Bytes of the shortest spelling of `c` inside a JSON string.
int64_t SpelledBytes(char32_t c, const ByteSet& spellable);

}  // namespace moeserve::structured
