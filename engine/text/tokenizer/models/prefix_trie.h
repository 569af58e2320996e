// A trie over the tokens of a vocabulary that finds the tokens with which a text starts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/text/token_id.h"

namespace moeserve {

// Immutable after construction; any number of threads may use one object.
class PrefixTrie {
 public:
  PrefixTrie() : PrefixTrie(std::vector<std::pair<std::string_view, TokenId>>()) {}
  // Tokens must differ from each other; empty ones are ignored. The views are not kept.
  explicit PrefixTrie(std::vector<std::pair<std::string_view, TokenId>> tokens);

  // A node stands for the bytes on the path from the root.
  using Node = uint32_t;
  static constexpr Node kRoot = 0;
  static constexpr Node kNone = UINT32_MAX;

  // Returns the node that follows on `byte`, or kNone.
  Node Next(Node node, uint8_t byte) const;
  // Returns the node that follows on `bytes`, or kNone.
  Node Follow(Node node, std::string_view bytes) const;
  // Returns the token that ends at the node, or -1.
  TokenId TokenAt(Node node) const { return nodes_[node].token; }

  // Calls visit(size, id) for each token that `text` starts with, the shortest first.
  template <typename Visit>
  void ForEachPrefix(std::string_view text, const Visit& visit) const {
    Node node = kRoot;
    for (size_t i = 0; i < text.size(); ++i) {
      node = Next(node, static_cast<uint8_t>(text[i]));
      if (node == kNone) return;
      if (nodes_[node].token >= 0) visit(i + 1, nodes_[node].token);
    }
  }

 private:
  struct NodeData {
    uint32_t first_child;  // the children of a node are adjacent and ascend by byte
    uint16_t child_count;
    uint8_t byte;  // on the edge from the parent
    TokenId token;
  };

  std::vector<NodeData> nodes_;
  uint32_t root_children_[256];  // by byte; most searches fail or end at the root
};

}  // namespace moeserve
