// Reads tokenizer.json of Hugging Face's library. The file is untrusted: sizes, depth, types and
// ids are checked. An unknown key, or a setting that is not implemented exactly as in Hugging
// Face's library, is refused by name. Nothing throws.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {

// Reads `model_dir`/tokenizer.json. NotFound if there is no such file; InvalidArgument with a
// message such as "where: expected ..., found ...". Ignores the sections `truncation` and
// `padding`, because the server neither truncates nor pads prompts by them.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizerJson(
    const std::filesystem::path& model_dir);

// Reads a tokenizer from the text of a tokenizer.json. Error messages begin with `file_name`.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseTokenizerJson(std::string_view json,
                                                              std::string_view file_name);

}  // namespace moeserve
