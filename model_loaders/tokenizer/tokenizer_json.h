// Reads tokenizer.json of Hugging Face's library. The file is untrusted: sizes, depth, types and
// ids are checked. An unknown key, or a setting that is not implemented exactly as in Hugging
// Face's library, is refused by name. Nothing throws.
#pragma once

#include <filesystem>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/tokenizer/added_tokens.h"
#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {

// Tokens that other files of the folder add to a tokenizer.json.
struct MoreTokens {
  // Added tokens with their ids. One whose text tokenizer.json has keeps the id that it has there;
  // one whose id tokenizer.json gives to another token is left out, and so is one whose id is not
  // below `id_limit`.
  std::vector<AddedToken> added;
  std::set<std::string> special;  // tokens of the vocabulary that are special ones
  TokenId id_limit = std::numeric_limits<TokenId>::max();
};

// Reads `model_dir`/tokenizer.json, with the tokens that only tokenizer_config.json,
// special_tokens_map.json and added_tokens.json name. NotFound if there is no such file;
// InvalidArgument with a message such as "where: expected ..., found ...". Ignores the sections
// `truncation` and `padding`, because the server neither truncates nor pads prompts by them.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizerJson(
    const std::filesystem::path& model_dir, TokenId id_limit = std::numeric_limits<TokenId>::max());

// Reads a tokenizer from the text of a tokenizer.json. Error messages begin with `file_name`.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseTokenizerJson(std::string_view json,
                                                              std::string_view file_name,
                                                              const MoreTokens& more = {});

}  // namespace moeserve
