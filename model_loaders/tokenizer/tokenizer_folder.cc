#include "model_loaders/tokenizer/tokenizer_folder.h"

#include <optional>
#include <string>
#include <system_error>

#include "base/message.h"
#include "base/status.h"
#include "model_loaders/tokenizer/json_reader.h"
#include "model_loaders/tokenizer/sentence_piece_file.h"
#include "model_loaders/tokenizer/tokenizer_config.h"
#include "model_loaders/tokenizer/tokenizer_json.h"
#include "model_loaders/tokenizer/vocab_files.h"

namespace moeserve {
namespace {

// The name that fairseq's models give their SentencePiece model.
constexpr char kFairseqModel[] = "sentencepiece.bpe.model";
constexpr char kFairseqDictionary[] = "dict.txt";

// Returns the name of the folder's vocabulary file for SentencePiece or tiktoken; "" if there is
// none. Of several files *.tiktoken, the one with the first name.
std::string VocabularyFile(const std::filesystem::path& folder) {
  std::error_code error;
  for (const char* name : {"tokenizer.model", "spiece.model", kFairseqModel, "tiktoken.model"}) {
    if (std::filesystem::exists(folder / name, error)) return name;
  }
  std::string found;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.ends_with(".tiktoken") && (found.empty() || name < found)) found = name;
  }
  return found;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizerFolder(
    const std::filesystem::path& folder) {
  std::error_code error;
  if (std::filesystem::exists(folder / "tokenizer.json", error)) return LoadTokenizerJson(folder);
  if (const std::string name = VocabularyFile(folder); !name.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(const TokenizerDetails details, LoadTokenizerDetails(folder));
    MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> data,
                              ReadTokenizerFile(folder / name));
    if (!data.has_value()) return absl::NotFoundError(Concat(name, ": no such file"));
    MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> dictionary,
                              ReadTokenizerFile(folder / kFairseqDictionary));
    if (LooksLikeTiktoken(*data) || name.ends_with(".tiktoken")) {
      if (!dictionary.has_value()) return ParseTiktoken(*data, name, details);
      return absl::InvalidArgumentError(Concat(name, ": a fairseq dictionary (", kFairseqDictionary,
                                               ") with a tiktoken vocabulary is not supported"));
    }
    if (dictionary.has_value() || name == kFairseqModel) {
      return ParseFairseqModel(*data, name, dictionary, details);
    }
    return ParseSentencePieceModel(*data, name, details);
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> vocab,
                            ReadTokenizerFile(folder / "vocab.json"));
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> merges,
                            ReadTokenizerFile(folder / "merges.txt"));
  if (!vocab.has_value() || !merges.has_value()) {
    return absl::NotFoundError(
        "expected tokenizer.json, tokenizer.model, a tiktoken vocabulary, or vocab.json and "
        "merges.txt, found none");
  }
  MOESERVE_ASSIGN_OR_RETURN(const TokenizerDetails details, LoadTokenizerDetails(folder));
  return ParseVocabAndMerges(*vocab, *merges, details);
}

}  // namespace moeserve
