// tokenizer_config.json and chat_template.jinja. The files are untrusted.
#pragma once

#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/tokenizer/added_tokens.h"
#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {

// The keys of tokenizer_config.json that the server uses. If the file has an object for a token,
// the member is the `content` of that object.
struct TokenizerConfig {
  // The chat template. If the file has a list of templates, the one named "default".
  std::optional<std::string> chat_template;
  // The whole list of templates as (name, template) pairs.
  std::vector<std::pair<std::string, std::string>> named_chat_templates;
  std::optional<std::string> bos_token;
  std::optional<std::string> eos_token;
  std::optional<std::string> pad_token;
  std::optional<std::string> unk_token;
  std::optional<std::string> cls_token;
  std::optional<std::string> sep_token;
  std::optional<std::string> mask_token;
  std::optional<std::string> tokenizer_class;
  std::optional<bool> add_bos_token;
  std::optional<bool> add_eos_token;
  // The languages of a translator, which tell its dictionaries apart.
  std::optional<std::string> src_lang = std::nullopt;
  std::optional<std::string> tgt_lang = std::nullopt;
};

// Reads `model_dir`/tokenizer_config.json, special_tokens_map.json and chat_template.jinja, if
// present. The template of chat_template.jinja takes precedence. The names of tokens in
// special_tokens_map.json count where tokenizer_config.json has none and, as in Hugging Face's
// library, where it has no `added_tokens_decoder`. Ignores other keys. InvalidArgument for an
// invalid file.
absl::StatusOr<TokenizerConfig> LoadTokenizerConfig(const std::filesystem::path& model_dir);

// Returns the token that stands for a masked word: the `mask_token` of `config`, otherwise a
// special token <mask> or [MASK]. nullopt if the tokenizer has none of them.
std::optional<TokenId> MaskToken(const TokenizerConfig& config, const Tokenizer& tokenizer);

// The keys that complete a tokenizer's vocabulary file.
struct TokenizerDetails {
  TokenizerConfig config;
  // `added_tokens_decoder`, or else the tokens of added_tokens.json, by ascending id.
  std::vector<AddedToken> added_tokens;
  // The tokens that the files name as special ones (`eos_token`, `additional_special_tokens`, ...).
  std::set<std::string> special_tokens = {};
  std::optional<std::string> pattern;  // `pat_str`, tiktoken's name for the pattern of pieces
  bool add_prefix_space = false;
  // How BERT's tokenizer prepares a text; without `strip_accents`, that is as `do_lower_case`.
  bool do_lower_case = true;
  bool tokenize_chinese_chars = true;
  std::optional<bool> strip_accents = std::nullopt;
};

// Reads `model_dir`/tokenizer_config.json, special_tokens_map.json and added_tokens.json, if
// present. InvalidArgument for an invalid file.
absl::StatusOr<TokenizerDetails> LoadTokenizerDetails(const std::filesystem::path& model_dir);

absl::StatusOr<TokenizerConfig> ParseTokenizerConfig(std::string_view json,
                                                     std::string_view file_name);

}  // namespace moeserve
