#include "engine/text/tokenizer/models/prefix_trie.h"

#include <algorithm>

namespace moeserve {

PrefixTrie::PrefixTrie(std::vector<std::pair<std::string_view, TokenId>> tokens) {
  std::sort(tokens.begin(), tokens.end());
  // The tokens of each node's subtree are a range of the sorted tokens. Nodes are made in order of
  // their depth, so that the children of a node are adjacent.
  struct Range {
    size_t begin;
    size_t end;
    size_t depth;
  };
  std::vector<Range> ranges = {{0, tokens.size(), 0}};
  nodes_.push_back({0, 0, 0, -1});
  for (size_t node = 0; node < nodes_.size(); ++node) {
    auto [begin, end, depth] = ranges[node];
    while (begin < end && tokens[begin].first.size() == depth) {
      if (depth > 0) nodes_[node].token = tokens[begin].second;
      ++begin;
    }
    nodes_[node].first_child = static_cast<uint32_t>(nodes_.size());
    while (begin < end) {
      const char byte = tokens[begin].first[depth];
      size_t next = begin + 1;
      while (next < end && tokens[next].first[depth] == byte) ++next;
      nodes_.push_back({0, 0, static_cast<uint8_t>(byte), -1});
      ranges.push_back({begin, next, depth + 1});
      ++nodes_[node].child_count;
      begin = next;
    }
  }
  std::fill(std::begin(root_children_), std::end(root_children_), kNone);
  for (uint32_t i = 0; i < nodes_[kRoot].child_count; ++i) {
    const uint32_t child = nodes_[kRoot].first_child + i;
    root_children_[nodes_[child].byte] = child;
  }
}

PrefixTrie::Node PrefixTrie::Next(Node node, uint8_t byte) const {
  if (node == kRoot) return root_children_[byte];
  uint32_t low = nodes_[node].first_child;
  uint32_t high = low + nodes_[node].child_count;
  // std::string_view compares bytes as unsigned, so the children ascend.
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (nodes_[middle].byte == byte) return middle;
    if (nodes_[middle].byte < byte) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return kNone;
}

PrefixTrie::Node PrefixTrie::Follow(Node node, std::string_view bytes) const {
  for (const char byte : bytes) {
    node = Next(node, static_cast<uint8_t>(byte));
    if (node == kNone) break;
  }
  return node;
}

}  // namespace moeserve
