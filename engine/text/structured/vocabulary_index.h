// The vocabulary as a trie over bytes.
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

// Immutable; any number of threads may use one object. Built once per tokenizer.
class VocabularyIndex {
 public:
  // Nodes are in depth-first order, siblings in order of their bytes. Node 0 is the root.
  struct Node {
    uint8_t byte;
    uint16_t depth;  // number of bytes from the root
    int32_t parent;
    int32_t end;  // index of the first node after this node's subtree
    // Index into tokens_; the node's tokens end where the next node's tokens begin.
    int32_t first_token;
  };

  struct Special {
    TokenId id;
    std::string text;
  };

  // `vocab_size` is the number of logits; tokens with larger ids are never allowed. `eos_ids` end a
  // complete text and are never text. Other special tokens are not in the trie but in specials().
  // Tokens without text are left out. InvalidArgument if there is no EOS id, an EOS id is outside
  // the vocabulary, or no token has text.
  static Result<std::shared_ptr<const VocabularyIndex>> Build(const Tokenizer& tokenizer,
                                                              std::vector<TokenId> eos_ids,
                                                              int vocab_size);

  int vocab_size() const { return vocab_size_; }
  size_t mask_words() const { return (static_cast<size_t>(vocab_size_) + 31) / 32; }
  const std::vector<TokenId>& eos_ids() const { return eos_ids_; }
  bool IsEos(TokenId id) const;
  // Returns the token's bytes; "" for special tokens, tokens that are never allowed and ids outside
  // the vocabulary.
  std::string_view Bytes(TokenId id) const;
  // Returns the set of bytes that are tokens by themselves.
  const std::bitset<256>& spellable() const { return spellable_; }

  // Returns the special tokens that have a text and do not end the sequence, in order of their ids.
  const std::vector<Special>& specials() const { return specials_; }

  const structured::StringMasks& string_masks() const { return *string_masks_; }

  const std::vector<Node>& nodes() const { return nodes_; }
  int max_depth() const { return max_depth_; }
  // Returns the tokens whose bytes end at node `i`.
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
  std::vector<Special> specials_;
  std::bitset<256> spellable_;
  std::vector<Node> nodes_;
  std::vector<TokenId> tokens_;
  std::shared_ptr<const structured::StringMasks> string_masks_;
};

}  // namespace moeserve
