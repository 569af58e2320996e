// Added tokens: special ones (<s>, <|im_end|>) and others that were added to a finished vocabulary.
// They are searched in the text before it is cut into pieces.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/text/tokenizer/model.h"
#include "engine/text/tokenizer/normalizer.h"
#include "engine/text/tokenizer/regex.h"
#include "engine/text/tokenizer/string_map.h"
#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {

struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool single_word = false;  // only where no word character touches it
  bool lstrip = false;       // the match includes white space before it
  bool rstrip = false;       // the match includes white space after it
  bool normalized = false;   // its normalised form is searched in the normalised text
  bool special = false;      // decoding can skip it, encoding can read it as ordinary text
};

// A part of a text: an added token, or text without one.
struct TextPart {
  std::string_view text;
  std::optional<TokenId> id;
};

// The parts of a text in which special tokens are recognised.
class SpecialRule {
 public:
  static SpecialRule All(bool everywhere) {
    SpecialRule rule;
    rule.everywhere_ = everywhere;
    return rule;
  }
  // Where a token lies inside one of `spans`, which are ascending and disjoint.
  static SpecialRule Within(std::span<const TextSpan> spans);

  // The rule of bytes [begin, begin + size) of the text.
  SpecialRule Part(size_t begin, size_t size) const;
  // This is the rule of `text`; returns the rule of `normalized`, its normal form. Where positions
  // of the two cannot be related, allows nothing.
  SpecialRule Normalized(std::string_view text, std::string_view normalized,
                         const Normalizer& normalizer) const;

  // Whether the rule differs between positions.
  bool by_place() const { return by_place_; }
  bool everywhere() const { return everywhere_; }
  bool Allows(size_t begin, size_t end) const;

 private:
  bool everywhere_ = false;
  bool by_place_ = false;
  std::vector<TextSpan> spans_;
};

// Immutable after construction, for any number of threads.
class AddedTokens {
 public:
  // Hugging Face's library ignores the ids in the file and assigns its own: a token of the model
  // keeps its id, the others follow the model's tokens. The given ids must be the same.
  // InvalidArgument, with the token: another id, an id that the model uses for something else, a
  // token listed twice or empty. `normalizer` may be null and need not outlive the call.
  static absl::StatusOr<std::unique_ptr<AddedTokens>> Create(std::vector<AddedToken> tokens,
                                                             const TokenModel& model,
                                                             const Normalizer* normalizer);

  // SplitRaw() splits raw text at the tokens without `normalized`, SplitNormalized() normalised
  // text at the others. Special tokens are found where `special` allows. Both append to `parts`
  // views into `text`.
  void SplitRaw(std::string_view text, const SpecialRule& special,
                std::vector<TextPart>* parts) const;
  void SplitNormalized(std::string_view text, const SpecialRule& special,
                       std::vector<TextPart>* parts) const;

  // Null if `id` is no added token.
  const AddedToken* Find(TokenId id) const;
  std::optional<TokenId> TokenToId(std::string_view content) const;

  // The spelling that decoding works on: the normalised form of a `normalized` token.
  std::string_view DecodedForm(const AddedToken& token) const;

  // Whether decoding skips a token with this decoded form when it skips special tokens.
  bool IsSkipped(std::string_view decoded_form) const { return special_.contains(decoded_form); }

  TokenId id_bound() const { return id_bound_; }

 private:
  // Finds, from left to right, the longest token at the first place where one starts.
  class Matcher {
   public:
    // False if `text` has been added before.
    bool Add(std::string_view text, TokenId id);
    // Finds the first match at or after `*begin` for which `accepts(begin, end, id)` is true, and
    // sets `*begin`, `*end` and `*id` to it. False if there is none.
    template <typename Accepts>
    bool Next(std::string_view text, const Accepts& accepts, size_t* begin, size_t* end,
              TokenId* id) const;
    bool empty() const { return ids_.size() == 1; }

   private:
    // A trie: children by node * 256 + byte, and by node the token that ends there, -1 if none.
    absl::flat_hash_map<uint64_t, uint32_t> children_;
    std::vector<TokenId> ids_ = {-1};
    bool starts_[256] = {};
  };

  AddedTokens() = default;
  void Split(const Matcher& matcher, std::string_view text, const SpecialRule& special,
             std::vector<TextPart>* parts) const;
  bool EndsWithWord(std::string_view text) const;
  bool StartsWithWord(std::string_view text) const;

  // Constant after Create.
  std::vector<std::unique_ptr<AddedToken>> tokens_;
  absl::flat_hash_map<TokenId, const AddedToken*> by_id_;
  StringMap<TokenId> by_content_;                                  // keys point into tokens_
  absl::flat_hash_map<TokenId, std::string> normalized_forms_;     // where they differ from content
  absl::flat_hash_set<std::string_view, StringViewHash> special_;  // contents of special tokens
  Matcher raw_;
  Matcher normalized_;
  std::optional<Regex> word_;  // matches one word character; present if a token is single_word
  TokenId id_bound_ = 0;
};

}  // namespace moeserve
