// Readers of Hugging Face's tokenizer files. The files are taken for hostile: sizes, depth, types
// and ids are checked, an unknown key or a setting that we do not run exactly as Hugging Face does
// is refused by name, and nothing throws.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {

// Reads `model_dir`/tokenizer.json. NotFound: no such file; InvalidArgument: "where: expected ...,
// found ...". The sections `truncation` and `padding` are left out of account: the server neither
// cuts nor pads prompts.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizerJson(
    const std::filesystem::path& model_dir);

// The same from text; `file_name` starts the messages.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseTokenizerJson(std::string_view json,
                                                              std::string_view file_name);

// What the server uses of tokenizer_config.json. A token written as an object gives its content.
struct TokenizerConfig {
  // The template, or the one named "default" where the file has a list.
  std::optional<std::string> chat_template;
  // The whole list, (name, template).
  std::vector<std::pair<std::string, std::string>> named_chat_templates;
  std::optional<std::string> bos_token;
  std::optional<std::string> eos_token;
  std::optional<std::string> pad_token;
  std::optional<std::string> unk_token;
  std::optional<std::string> tokenizer_class;
  std::optional<bool> add_bos_token;
  std::optional<bool> add_eos_token;
};

// Reads `model_dir`/tokenizer_config.json, where present, and chat_template.jinja, where present,
// whose template then counts. Other keys are ignored. InvalidArgument as above.
absl::StatusOr<TokenizerConfig> LoadTokenizerConfig(const std::filesystem::path& model_dir);

absl::StatusOr<TokenizerConfig> ParseTokenizerConfig(std::string_view json,
                                                     std::string_view file_name);

}  // namespace moeserve
