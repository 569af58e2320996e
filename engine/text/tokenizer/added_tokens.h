// Added tokens: special tokens (<s>, <|im_end|>) and other tokens that were added to a finished
// vocabulary. The text is searched for them before the pre-tokenizer cuts the text into pieces.
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
#include "engine/text/tokenizer/models/model.h"
#include "engine/text/tokenizer/normalizers/normalizer.h"
#include "engine/text/tokenizer/regex.h"
#include "engine/text/tokenizer/string_map.h"
#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {

struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool single_word = false;  // matches only if no word character is adjacent
  bool lstrip = false;       // the match includes the white space before it
  bool rstrip = false;       // the match includes the white space after it
  bool normalized = false;   // the token's normalised form is searched in the normalised text
  bool special = false;      // decoding can skip the token, encoding can read it as ordinary text
  // Recognised only in trusted parts of a text: a control symbol of SentencePiece, which takes all
  // other text that spells it for ordinary text.
  bool trusted_only = false;
};

// A part of a text: either an added token with its id, or text that contains no added token.
struct TextPart {
  std::string_view text;
  std::optional<TokenId> id;
};

// Determines in which parts of a text special tokens are recognised.
class SpecialRule {
 public:
  static SpecialRule All(bool everywhere) {
    SpecialRule rule;
    rule.everywhere_ = everywhere;
    return rule;
  }
  // Returns the rule that recognises a token only if it lies within one of `spans`, which must be
  // ascending and disjoint.
  static SpecialRule Within(std::span<const TextSpan> spans);

  // Returns the rule for bytes [begin, begin + size) of the text.
  SpecialRule Part(size_t begin, size_t size) const;
  // Converts the rule for `text` to a rule for `normalized`, the normal form of `text`. If the
  // positions in the two texts cannot be related, the returned rule allows no special token.
  SpecialRule Normalized(std::string_view text, std::string_view normalized,
                         const Normalizer& normalizer) const;

  // Whether the rule differs between positions of the text.
  bool by_place() const { return by_place_; }
  bool everywhere() const { return everywhere_; }
  bool Allows(size_t begin, size_t end) const;

 private:
  bool everywhere_ = false;
  bool by_place_ = false;
  std::vector<TextSpan> spans_;
};

// Immutable after construction; any number of threads may use one object.
class AddedTokens {
 public:
  // Checks the tokens' ids. Hugging Face's library ignores the ids in the file and assigns its own:
  // a token that the model has keeps the model's id, and the remaining tokens follow the model's
  // tokens. The given ids must equal those. InvalidArgument names a token with another id or with
  // an id that the model uses for another token, a token listed twice, or an empty token.
  // With `any_new_ids`, for files that assign ids themselves, tokens that the model does not have
  // may have any ids that are not in use. `normalizer` may be null and need not outlive the call.
  static absl::StatusOr<std::unique_ptr<AddedTokens>> Create(std::vector<AddedToken> tokens,
                                                             const TokenModel& model,
                                                             const Normalizer* normalizer,
                                                             bool any_new_ids = false);

  // SplitRaw() splits raw text at the tokens without `normalized`; SplitNormalized() splits
  // normalised text at the tokens with `normalized`. Special tokens are found only where `special`
  // allows. Both functions append views into `text` to `parts`.
  void SplitRaw(std::string_view text, const SpecialRule& special,
                std::vector<TextPart>* parts) const;
  void SplitNormalized(std::string_view text, const SpecialRule& special,
                       std::vector<TextPart>* parts) const;

  // Returns the added token with this id; null if there is none.
  const AddedToken* Find(TokenId id) const;
  std::optional<TokenId> TokenToId(std::string_view content) const;

  // Returns the text that the decoder reads for this token: for a `normalized` token its normalised
  // form, otherwise its content.
  std::string_view DecodedForm(const AddedToken& token) const;

  // Returns whether a token with this decoded form is left out when decoding skips special tokens.
  bool IsSkipped(std::string_view decoded_form) const { return special_.contains(decoded_form); }

  TokenId id_bound() const { return id_bound_; }

 private:
  // Finds tokens from left to right: at the first position where a token starts, the longest one.
  class Matcher {
   public:
    // Returns false if `text` has been added before.
    bool Add(std::string_view text, TokenId id);
    // Finds the first match at or after `*begin` for which `accepts(begin, end, id)` returns true,
    // and stores it in `*begin`, `*end` and `*id`. Returns false if there is no match.
    template <typename Accepts>
    bool Next(std::string_view text, const Accepts& accepts, size_t* begin, size_t* end,
              TokenId* id) const;
    bool empty() const { return ids_.size() == 1; }

   private:
    // A trie: children_ maps node * 256 + byte to the child; ids_ holds for each node the token
    // that ends at the node, or -1.
    absl::flat_hash_map<uint64_t, uint32_t> children_;
    std::vector<TokenId> ids_ = {-1};
    bool starts_[256] = {};
  };

  AddedTokens() = default;
  void Split(const Matcher& matcher, std::string_view text, const SpecialRule& special,
             std::vector<TextPart>* parts) const;
  bool EndsWithWord(std::string_view text) const;
  bool StartsWithWord(std::string_view text) const;

  // The following members are constant after Create().
  std::vector<std::unique_ptr<AddedToken>> tokens_;
  absl::flat_hash_map<TokenId, const AddedToken*> by_id_;
  StringMap<TokenId> by_content_;  // keys point into tokens_
  // Only forms that differ from the content.
  absl::flat_hash_map<TokenId, std::string> normalized_forms_;
  absl::flat_hash_set<std::string_view, StringViewHash> special_;  // contents of special tokens
  Matcher raw_;
  Matcher normalized_;
  std::optional<Regex> word_;  // matches one word character; set if some token is single_word
  TokenId id_bound_ = 0;
};

}  // namespace moeserve
