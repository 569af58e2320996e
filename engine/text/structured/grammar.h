// A compiled constraint: a graph whose nodes describe JSON values. A text that matches a node is an
// instance of the node.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "engine/text/structured/automata/byte_dfa.h"

namespace moeserve::structured {

using NodeId = int32_t;
inline constexpr NodeId kNoNode = -1;

// Largest nesting of containers in a response; limits the memory of a state.
inline constexpr int kMaxDepth = 96;

struct ScalarNode {
  int32_t dfa = 0;  // index into Grammar::dfas
  // If true, the node is a string that only its length restricts: dfa is any_string, and the
  // matcher counts min_chars to max_chars characters.
  bool counted = false;
  int64_t min_chars = 0;
  int64_t max_chars = kNoLimit;
};

struct ArrayNode {
  std::vector<NodeId> prefix;
  NodeId items = kNoNode;  // node of all items after the prefix; kNoNode: none are allowed
  int64_t min_items = 0;
  int64_t max_items = kNoLimit;

  NodeId ItemAt(int64_t i) const {
    if (i >= max_items) return kNoNode;
    return i < static_cast<int64_t>(prefix.size()) ? prefix[static_cast<size_t>(i)] : items;
  }
};

struct Property {
  std::u32string name;
  NodeId value = kNoNode;  // kNoNode: the property must not appear
  bool required = false;
  // suffix_bytes[i] is the number of bytes of the shortest spelling of the name from its i-th
  // character on. This field and the next two are set by Grammar::Finish().
  std::vector<int64_t> suffix_bytes;
  int64_t cost = 0;   // bytes of the key, the shortest value and a comma
  int32_t rank = -1;  // index in optional_by_cost; -1: not in that list
};

struct ObjectNode {
  std::vector<Property> properties;  // sorted by name
  NodeId additional = kNoNode;  // node of all other properties' values; kNoNode: none are allowed
  int64_t min_properties = 0;
  int64_t max_properties = kNoLimit;
  // The following fields are set by Grammar::Finish().
  int num_required = 0;
  int64_t required_cost = 0;
  // Indices of the optional properties that may appear, cheapest first.
  std::vector<int32_t> optional_by_cost;
};

// A value that matches any of the options. No option is a ChoiceNode itself.
struct ChoiceNode {
  std::vector<NodeId> options;
};

struct Node {
  std::variant<ScalarNode, ArrayNode, ObjectNode, ChoiceNode> value;
  // `distance` is the number of bytes of a shortest instance that the vocabulary can spell,
  // `height` the nesting depth of that instance.
  int64_t distance = kUnreachable;
  int64_t height = 0;
};

struct Grammar {
  std::vector<Node> nodes;
  std::vector<DfaPtr> dfas;
  int32_t any_string = 0;  // index into dfas of the automaton for every JSON string
  NodeId root = kNoNode;
  ByteSet spellable;  // bytes that are tokens by themselves; set by Finish()

  // Computes distances and removes options, items and properties that have no instance which the
  // vocabulary can spell. `spellable_bytes` are the bytes that are tokens by themselves.
  Status Finish(const ByteSet& spellable_bytes, CompileBudget* budget);
};

// Returns a number n of characters that suffices for an unused key: whichever `taken` keys are in
// use, some key of n characters is not, and every key can be extended by n characters to one that
// is not.
int64_t FreeNameLength(int64_t taken);

// Returns the number of bytes of the shortest spelling of `c` inside a JSON string; kUnreachable if
// the vocabulary cannot spell `c`.
int64_t SpelledBytes(char32_t c, const ByteSet& spellable);

}  // namespace moeserve::structured
