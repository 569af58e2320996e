// A compiled constraint: a graph whose nodes describe JSON values and other texts. A text that
// matches a node is an instance of the node.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "engine/text/structured/automata/byte_dfa.h"

namespace moeserve::structured {

using NodeId = int32_t;
inline constexpr NodeId kNoNode = -1;

// Largest nesting of containers in a JSON text; limits the memory of a state.
inline constexpr int kMaxDepth = 96;

struct ScalarNode {
  int32_t dfa = 0;  // index into Grammar::dfas
  // If true, the node is a string that only its length restricts: dfa is any_string, and the
  // matcher counts min_chars to max_chars characters.
  bool counted = false;
  int64_t min_chars = 0;
  int64_t max_chars = kNoLimit;
  // If true, special tokens may spell the node's bytes.
  bool marker = false;
  // If true, the node is free text, in which the text may be cut off.
  bool free = false;
  // If not -1: the node is free text up to and including this trigger (index into
  // Grammar::triggers).
  int32_t trigger = -1;
};

struct ArrayNode {
  std::vector<NodeId> prefix;
  NodeId items = kNoNode;  // node of all items after the prefix; kNoNode: none are allowed
  int64_t min_items = 0;
  int64_t max_items = kNoLimit;

  // If not kNoNode: `min_contained` to `max_contained` items must be instances of `contained`. All
  // other items are as above. Only if `prefix` is empty.
  NodeId contained = kNoNode;
  int64_t min_contained = 0;
  int64_t max_contained = kNoLimit;
  // If not empty: the items are instances of these nodes, of each at most one. There are at most 64
  // nodes, which are scalars without a common instance; `prefix` is empty.
  std::vector<NodeId> distinct;

  NodeId ItemAt(int64_t i) const {
    if (i >= max_items) return kNoNode;
    return i < static_cast<int64_t>(prefix.size()) ? prefix[static_cast<size_t>(i)] : items;
  }
};

// Property::order of a property that comes after all that have a place, in any order.
inline constexpr int32_t kUnordered = std::numeric_limits<int32_t>::max();

struct Property {
  std::u32string name;
  int32_t order = kUnordered;  // the property's place among those of its object, from 0 on
  NodeId value = kNoNode;      // kNoNode: the property must not appear
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
  // If not -1, index into Grammar::key_sets, which decides about the other properties instead of
  // `additional`.
  int32_t keys = -1;
  int64_t min_properties = 0;
  int64_t max_properties = kNoLimit;
  // If true, the node is an array of different strings, which are matched as the keys of an object
  // without values; the nodes of the values have only an empty instance.
  bool is_set = false;
  // The following fields are set by Grammar::Finish().
  // next_required[i]: the smallest `order` from i on of a required property; kUnordered: none. The
  // last element is that of all larger places.
  std::vector<int32_t> next_required;
  int num_required = 0;
  int64_t required_cost = 0;
  // Indices of the optional properties that may appear, cheapest first.
  std::vector<int32_t> optional_by_cost;
};

// The keys of the properties that an object does not name, and the nodes of their values.
struct KeySet {
  int32_t dfa = 0;            // accepts the keys, with their quotes
  std::vector<NodeId> value;  // [states of dfa] node of the value if the key ends here; or kNoNode
  // The following fields are set by Grammar::Finish().
  // Whether every unfinished key can be finished in infinitely many ways.
  bool endless = true;
  int64_t min_value = kUnreachable;  // smallest and largest distance of a value
  int64_t max_value = 0;
  int64_t height = 0;  // largest height of a value

  // Returns an upper bound on the number of characters of the shortest key that is not among
  // `taken` keys.
  int64_t FreeKeyLength(const ByteDfa& automaton, int64_t taken) const;
};

// A value that matches any of the options. No option is a ChoiceNode itself.
struct ChoiceNode {
  std::vector<NodeId> options;
};

// Instances of other nodes one after another, in an order that a finite automaton describes. Rules
// may refer to each other, and so describe context-free languages.
struct RuleNode {
  struct Edge {
    NodeId node;
    int32_t target;
    auto operator<=>(const Edge&) const = default;
  };
  struct State {
    std::vector<Edge> edges;
    bool accepting = false;
    // `distance` is the number of bytes of a shortest text from here to the end of an instance,
    // `height` the largest Node::height of the nodes on that way. Set by Grammar::Finish(), which
    // also adds the edges that can be reached over nodes with an empty instance, and sorts edges by
    // the distance of the way through them.
    int64_t distance = kUnreachable;
    int64_t height = 0;
  };
  std::vector<State> states;  // state 0 is the start
};

struct Node {
  std::variant<ScalarNode, ArrayNode, ObjectNode, ChoiceNode, RuleNode> value;
  // `distance` is the number of bytes of a shortest instance that the vocabulary can spell,
  // `height` the nesting depth of that instance. A node has an empty instance if and only if
  // `distance` is 0.
  int64_t distance = kUnreachable;
  int64_t height = 0;
  ByteSet first{};           // bytes with which instances begin; set by Grammar::Finish()
  bool begins_free = false;  // whether an instance can begin in free text; set by Grammar::Finish()
};

// A text that ends free text.
struct Trigger {
  std::string text;
  NodeId literal = kNoNode;  // a marker node whose only instance is `text`
  // For each state of the free text's automaton: the length of the longest prefix of `text` with
  // which the text so far ends.
  std::vector<int32_t> matched;
  // border[n]: the length of the longest proper prefix of the first n bytes of `text` with which
  // they also end.
  std::vector<int32_t> border;
};

struct Grammar {
  std::vector<Node> nodes;
  std::vector<DfaPtr> dfas;
  int32_t any_string = 0;  // index into dfas of the automaton for every JSON string
  NodeId root = kNoNode;
  std::vector<Trigger> triggers;
  std::vector<KeySet> key_sets;
  // Texts inside of which special tokens are allowed (see text_format.h).
  std::vector<std::string> marker_texts;
  int max_depth = kMaxDepth;  // largest nesting of containers and rules
  // Number of tokens to be kept for the end of a text. Rules keep one for an end-of-sequence token,
  // because a text that is complete may often continue.
  int64_t end_cost = 0;
  ByteSet spellable;  // bytes that are tokens by themselves; set by Finish()

  // Computes distances and removes options, items and properties that have no instance which the
  // vocabulary can spell. `spellable_bytes` are the bytes that are tokens by themselves.
  // May be called again after nodes were added.
  Status Finish(const ByteSet& spellable_bytes, CompileBudget* budget);

  // Adds the nodes of `part`, whose any_string is the same automaton, and returns its root.
  NodeId Append(Grammar part);
};

// Returns a number n of characters that suffices for an unused key: whichever `taken` keys are in
// use, some key of n characters is not, and every key can be extended by n characters to one that
// is not.
int64_t FreeNameLength(int64_t taken);

// Returns the number of bytes of the shortest spelling of `c` inside a JSON string; kUnreachable if
// the vocabulary cannot spell `c`.
int64_t SpelledBytes(char32_t c, const ByteSet& spellable);

}  // namespace moeserve::structured
