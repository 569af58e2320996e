// How a token is shown to clients.
#pragma once

#include <string>

#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve::server {

// Returns the text of a token with U+FFFD for bytes that are no whole character; "token_id:7" if
// `as_id` or without a tokenizer.
std::string TokenText(const Tokenizer* tokenizer, TokenId token, bool as_id);

}  // namespace moeserve::server
