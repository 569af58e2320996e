// Windows of texts for masked language models, in which some tokens are hidden and scored.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "base/kinds.h"
#include "base/status.h"
#include "engine/request.h"
#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve::server {

// What stands at the positions that are scored. kAll: the mask token. kBert: the mask token with
// probability 0.8, a random token with 0.1, the token itself otherwise (BERT, section 3.1). kEach:
// the mask token, and each token of a window is scored by a text of its own, in which only this
// token is hidden.
enum class MaskRule : uint8_t { kAll, kBert, kEach };
constexpr NameTraits Traits(MaskRule rule) { return NameIn({"all", "bert", "each"}, rule); }

struct MaskOptions {
  MaskRule rule = MaskRule::kAll;
  double share = 0.15;  // of the tokens that are scored; unused by kEach
  uint64_t seed = 1;
};

// The special tokens around a text.
struct SpecialTokens {
  std::vector<TokenId> before, after;
};

// Returns the special tokens that the tokenizer puts around `text`. Errors: those of the tokenizer.
Result<SpecialTokens> FindSpecialTokens(const Tokenizer& tokenizer, std::string_view text);

// Makes the requests for windows. Draws the scored positions of one window after the other from
// std::mt19937_64 with the seed: a token is scored if a number in [0, 1) is below the share, and
// if no token of a window is, one of them, equally likely, is.
class MaskedWindows {
 public:
  // `mask`: the mask token.
  MaskedWindows(const MaskOptions& options, TokenId mask, int vocab_size)
      : options_(options), mask_(mask), vocab_size_(vocab_size), random_(options.seed) {}

  // Appends the requests for a window of `ids`, which must not be empty, between special tokens.
  void Add(const SpecialTokens& special, std::span<const TokenId> ids,
           std::vector<Request>& requests);

 private:
  double Draw();  // a number in [0, 1)
  Request Make(const SpecialTokens& special, std::span<const TokenId> ids,
               const std::vector<int32_t>& scored);

  const MaskOptions options_;
  const TokenId mask_;
  const int vocab_size_;
  std::mt19937_64 random_;
};

}  // namespace moeserve::server
