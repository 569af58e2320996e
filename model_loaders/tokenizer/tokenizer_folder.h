// Chooses the reader of a folder's tokenizer files.
#pragma once

#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "model_loaders/tokenizer/fairseq_dictionary.h"

namespace moeserve {

// Reads the first of these that the folder has: tokenizer.json; source.spm with vocab.json
// (Marian); tokenizer.model or spiece.model (SentencePiece or tiktoken); sentencepiece.bpe.model;
// tiktoken.model or another file *.tiktoken; vocab.json with merges.txt; vocab.txt (BERT); dict.txt
// (fairseq). A SentencePiece model has the ids of fairseq if it is called sentencepiece.bpe.model
// or if there is a dictionary, which `use` concerns. With dictionaries of two languages, the
// tokenizer has a source() of its own. NotFound if the folder has none of these files;
// InvalidArgument if the file is invalid or has something that is not supported. Tokens of
// tokenizer_config.json and added_tokens.json whose ids are not below `id_limit` are left out.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizerFolder(
    const std::filesystem::path& folder, TokenId id_limit = std::numeric_limits<TokenId>::max(),
    const DictionaryUse& use = {});

// Returns the names of the files in the folder that LoadTokenizerFolder() may read, without
// tokenizer_config.json.
std::vector<std::string> TokenizerFiles(const std::filesystem::path& folder);

}  // namespace moeserve
