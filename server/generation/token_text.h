// Converts a token to the text that clients receive for it.
#pragma once

#include <string>

#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve::server {

// Returns the text of a token, with U+FFFD for bytes that do not form a whole character. Returns
// "token_id:7", for example, if `as_id` or if `tokenizer` is null.
std::string TokenText(const Tokenizer* tokenizer, TokenId token, bool as_id);

}  // namespace moeserve::server
