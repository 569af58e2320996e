// The growing text of one response: it contains whole characters only and is cut at stop strings.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {

// Joins the text of tokens, holds back bytes that may still become a stop string or complete a
// character, and cuts the text at the first stop string. If several stop strings begin at the same
// byte, the one that is first in the list counts.
class OutputText {
 public:
  // `tokenizer` outlives the object; if null, all text is empty. A stop string counts only if it
  // ends in the text of a token after the first `min_tokens` tokens. `kept` are the special tokens
  // (in ascending order) whose text is never omitted; they outlive the object.
  OutputText(const Tokenizer* tokenizer, bool skip_special_tokens, std::vector<std::string> stop,
             bool include_stop, int min_tokens = 0, std::span<const TokenId> kept = {});

  // Returns the text that became final with this token; empty after a stop string matched.
  std::string Push(TokenId token);
  // Returns the remaining text, with U+FFFD for an unfinished character.
  std::string Finish();

  const std::optional<std::string>& matched_stop() const { return matched_; }

 private:
  std::string Release(bool all);

  std::optional<IncrementalDecoder> decoder_;
  std::vector<std::string> stop_;
  bool include_stop_;
  int before_stop_;         // number of coming tokens whose text cannot end a stop string
  size_t unstoppable_ = 0;  // leading bytes of held_ in which no stop string may end
  std::string held_;
  std::optional<std::string> matched_;
};

}  // namespace moeserve
