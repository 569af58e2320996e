// A grammar with the vocabulary that it was compiled for and a cache of token masks.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "engine/text/structured/constraint.h"
#include "engine/text/structured/dfa_mask.h"
#include "engine/text/structured/grammar.h"
#include "engine/text/structured/matcher.h"

namespace moeserve::structured {

class Compiled : public CompiledConstraint, public std::enable_shared_from_this<Compiled> {
 public:
  // Grammar::Finish() must have been called on `grammar`, and some text must match its root.
  Compiled(Grammar grammar, std::shared_ptr<const VocabularyIndex> vocabulary);

  std::unique_ptr<ConstraintState> NewState() const override;
  size_t memory_bytes() const override;
  std::span<const TokenId> text_tokens() const override { return text_tokens_; }

  const VocabularyIndex& vocabulary() const { return *vocabulary_; }
  const Matcher& matcher() const { return matcher_; }
  // Returns the mask of automaton `dfa` in `state` from the cache that holds it, computing it if
  // necessary. `room` is the number of characters that may follow.
  std::shared_ptr<const DfaMask> MaskOf(int32_t dfa, int32_t state, bool at_root,
                                        int64_t room) const;
  // Returns what NodesAfterEnds() returns, from the same cache.
  std::shared_ptr<const structured::NodesAfter> NodesAfter(int32_t dfa, int32_t state,
                                                           const ByteSet& bytes) const;
  // Returns the text of one of text_tokens(); "" for other tokens.
  std::string_view TextOf(TokenId token) const;

 private:
  const Grammar grammar_;
  const std::shared_ptr<const VocabularyIndex> vocabulary_;
  const Matcher matcher_;
  std::vector<TokenId> text_tokens_;
  mutable DfaMaskCache masks_;
};

// The automaton of all JSON strings, finished (ByteDfa::Finish()) for one vocabulary, and its
// cached masks. There is one object per vocabulary.
struct StringMasks {
  DfaPtr dfa;
  mutable DfaMaskCache cache;

  explicit StringMasks(DfaPtr any_string);
};

}  // namespace moeserve::structured
