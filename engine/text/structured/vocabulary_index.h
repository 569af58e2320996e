// The vocabulary as a trie of bytes.
#pragma once

#include <bitset>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {
namespace structured {
struct StringMasks;
}

// Immutable: any number of threads may use one object. Built once per tokenizer.
class VocabularyIndex {
 public:
  // Nodes in depth-first order; children in order of their bytes. Node 0 is the root.
  struct Node {
    uint8_t byte;
    uint16_t depth;  // bytes from the root
    int32_t parent;
    int32_t end;          // the first node behind this one's subtree
    int32_t first_token;  // into tokens_; the node's tokens end where those of the next node begin
  };

  // `vocab_size`: the number of logits; tokens beyond it are never allowed. Special tokens are
  // never allowed except `eos_ids`, which end a complete text. Tokens without text are left out.
  // InvalidArgument: no EOS id, an id outside the vocabulary, no token with text.
  static Result<std::shared_ptr<const VocabularyIndex>> Build(const Tokenizer& tokenizer,
                                                              std::vector<TokenId> eos_ids,
                                                              int vocab_size);

  int vocab_size() const { return vocab_size_; }
  size_t mask_words() const { return (static_cast<size_t>(vocab_size_) + 31) / 32; }
  const std::vector<TokenId>& eos_ids() const { return eos_ids_; }
  bool IsEos(TokenId id) const;
  // "" for tokens that are never allowed and for ids outside the vocabulary.
  std::string_view Bytes(TokenId id) const;
  // The bytes that are tokens by themselves.
  const std::bitset<256>& spellable() const { return spellable_; }

  const structured::StringMasks& string_masks() const { return *string_masks_; }

  const std::vector<Node>& nodes() const { return nodes_; }
  int max_depth() const { return max_depth_; }
  // Tokens that end at node `i`.
  std::span<const TokenId> TokensAt(int32_t i) const {
    const int32_t last = static_cast<size_t>(i) + 1 < nodes_.size()
                             ? nodes_[i + 1].first_token
                             : static_cast<int32_t>(tokens_.size());
    return std::span(tokens_).subspan(nodes_[i].first_token, last - nodes_[i].first_token);
  }

 private:
  VocabularyIndex() = default;

  int vocab_size_ = 0;
  int max_depth_ = 0;
  std::vector<TokenId> eos_ids_;
  std::vector<std::string> bytes_;
  std::bitset<256> spellable_;
  std::vector<Node> nodes_;
  std::vector<TokenId> tokens_;
  std::shared_ptr<const structured::StringMasks> string_masks_;
};

}  // namespace moeserve
