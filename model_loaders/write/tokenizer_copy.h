// Copies tokenizers and generation defaults into a new model folder.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "base/status.h"
#include "model_loaders/checkpoint/loader.h"

namespace moeserve {

// Each function returns the names of the files that it wrote into the folder `to`.
using FileNames = std::vector<std::string>;

// Copies the vocabulary files of the folder `from` (TokenizerFiles()).
Result<FileNames> CopyTokenizer(const std::filesystem::path& from, const std::filesystem::path& to);

// Copies the other text files that describe a tokenizer or its use, such as tokenizer_config.json,
// and generation_config.json.
Result<FileNames> CopyTextSettings(const std::filesystem::path& from,
                                   const std::filesystem::path& to);

// Writes the languages of a translator as tokenizer_config.json, if `folder` has a dictionary of
// the source and no such file.
Result<FileNames> WriteLanguages(const TokenizerConfig& config,
                                 const std::filesystem::path& folder);

// A tokenizer that the user names. Empty paths stand for none.
struct GivenTokenizer {
  std::filesystem::path tokenizer = {};   // *.json (tokenizer.json) or *.model (SentencePiece)
  std::filesystem::path dictionary = {};  // fairseq's dict.txt of a SentencePiece model
};

// Copies the files of `given` under the names by which LoadTokenizerFolder() finds them. A
// SentencePiece model has fairseq's ids if there is a dictionary or if it is called
// sentencepiece.bpe.model. InvalidArgument for another kind of file, and for a dictionary without a
// SentencePiece model.
Result<FileNames> CopyGivenTokenizer(const GivenTokenizer& given, const std::filesystem::path& to);

// Writes what a checkpoint says that is not in files: its chat template and the names of its tokens
// as chat_template.jinja and tokenizer_config.json, its generation defaults as
// generation_config.json. Writes no file for what the checkpoint does not say. LoadCheckpoint()
// reads the same TokenizerConfig, GenerationDefaults and end-of-text ids from the new folder, whose
// config.json has the ids of checkpoint.spec.
Result<FileNames> WriteTextSettings(const Checkpoint& checkpoint, const std::filesystem::path& to);

}  // namespace moeserve
