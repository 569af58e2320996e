#include "model_loaders/tokenizer/tokenizer_folder.h"

#include <algorithm>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "base/error_text.h"
#include "base/status.h"
#include "engine/text/tokenizer/pair_tokenizer.h"
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
constexpr char kBertVocabulary[] = "vocab.txt";
constexpr char kVocab[] = "vocab.json";
constexpr char kMerges[] = "merges.txt";
// Of Marian's translators. The model of the other language has no ids of its own.
constexpr char kMarianModel[] = "source.spm";
constexpr char kMarianTarget[] = "target.spm";
constexpr char kTargetVocab[] = "target_vocab.json";

// Vocabulary files of SentencePiece and tiktoken, in the order of preference.
constexpr const char* kVocabularies[] = {"tokenizer.model", "spiece.model", kFairseqModel,
                                         "tiktoken.model"};

bool HasFile(const std::filesystem::path& folder, const std::string& name) {
  std::error_code error;
  return std::filesystem::exists(folder / name, error);
}

// Returns the names of the folder's files *.tiktoken in alphabetical order.
std::vector<std::string> TiktokenFiles(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    std::string name = it->path().filename().string();
    if (name.ends_with(".tiktoken")) names.push_back(std::move(name));
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Returns the name of the vocabulary file for SentencePiece or tiktoken; "" if there is none.
std::string VocabularyFile(const std::filesystem::path& folder) {
  for (const char* name : kVocabularies) {
    if (HasFile(folder, name)) return name;
  }
  const std::vector<std::string> names = TiktokenFiles(folder);
  return names.empty() ? "" : names[0];
}

// Older folders of RoBERTa's relatives name their family in config.json only.
absl::Status AddFamily(const std::filesystem::path& folder, TokenizerConfig* config) {
  const bool pieces = HasFile(folder, kFairseqModel);
  if (config->tokenizer_class.has_value() || !(pieces || HasFile(folder, kMerges))) {
    return absl::OkStatus();
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> text,
                            ReadTokenizerFile(folder / "config.json"));
  if (!text.has_value()) return absl::OkStatus();
  JsonReader reader("config.json");
  const nlohmann::json root = reader.Parse(*text);
  const nlohmann::json& family = reader.Get(root, "model_type");
  constexpr std::pair<const char*, const char*> kPieceClasses[] = {
      {"xlm-roberta", "XLMRobertaTokenizer"}, {"camembert", "CamembertTokenizer"}};
  constexpr std::pair<const char*, const char*> kMergeClasses[] = {{"roberta", "RobertaTokenizer"},
                                                                   {"bart", "BartTokenizer"}};
  for (const auto& [name, tokenizer] : pieces ? kPieceClasses : kMergeClasses) {
    if (family == name) config->tokenizer_class = tokenizer;
  }
  return reader.status();
}

absl::StatusOr<TokenizerDetails> DetailsBelow(TokenId id_limit,
                                              const std::filesystem::path& folder) {
  absl::StatusOr<TokenizerDetails> details = LoadTokenizerDetails(folder);
  if (details.ok()) {
    MOESERVE_RETURN_IF_ERROR(AddFamily(folder, &details->config));
    std::erase_if(details->added_tokens,
                  [&](const AddedToken& token) { return token.id >= id_limit; });
  }
  return details;
}

// Reads a folder with source.spm.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadMarian(const std::filesystem::path& folder,
                                                      TokenId id_limit) {
  if (HasFile(folder, kTargetVocab)) {
    return absl::InvalidArgumentError(
        Concat(kTargetVocab,
               ": expected one vocabulary for both languages, found one for each, which is "
               "not supported"));
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> data,
                            ReadTokenizerFile(folder / kMarianModel));
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> vocab,
                            ReadTokenizerFile(folder / kVocab));
  if (!data.has_value() || !vocab.has_value()) {
    return absl::NotFoundError(
        Concat("expected ", kVocab, " beside ", kMarianModel, ", found none"));
  }
  MOESERVE_ASSIGN_OR_RETURN(const TokenizerDetails details, DetailsBelow(id_limit, folder));
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<std::string> symbols, ParseVocabJson(*vocab, kVocab));
  return ParseMarianModel(*data, kMarianModel, symbols, details);
}

// Reads the file `name` of SentencePiece or tiktoken; `dictionary` is "" if there is none.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadVocabulary(const std::filesystem::path& folder,
                                                          const std::string& name,
                                                          const std::string& dictionary,
                                                          TokenId id_limit,
                                                          const DictionaryUse& use) {
  MOESERVE_ASSIGN_OR_RETURN(TokenizerDetails details, DetailsBelow(id_limit, folder));
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> data,
                            ReadTokenizerFile(folder / name));
  if (!data.has_value()) return absl::NotFoundError(Concat(name, ": no such file"));
  if (LooksLikeTiktoken(*data) || name.ends_with(".tiktoken")) {
    if (dictionary.empty()) return ParseTiktoken(*data, name, details);
    return absl::InvalidArgumentError(Concat(name, ": a fairseq dictionary (", dictionary,
                                             ") with a tiktoken vocabulary is not supported"));
  }
  if (!dictionary.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> symbols,
                              ReadTokenizerFile(folder / dictionary));
    SetTexts(use.texts, &details.config);
    return ParseFairseqModel(*data, name, symbols, details, dictionary);
  }
  if (name == kFairseqModel) return ParseFairseqModel(*data, name, std::nullopt, details);
  return ParseSentencePieceModel(*data, name, details);
}

// Reads a dictionary and, if the folder has them, codes of subword-nmt.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadWords(const std::filesystem::path& folder,
                                                     const std::string& name,
                                                     const DictionaryUse& use) {
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> dictionary,
                            ReadTokenizerFile(folder / name));
  if (!dictionary.has_value()) return absl::NotFoundError(Concat(name, ": no such file"));
  std::string codes_name;
  for (const std::string& file : LanguageFiles(folder)) {
    if (codes_name.empty() && !file.starts_with("dict.")) codes_name = file;
  }
  std::optional<std::string> codes;
  if (!codes_name.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(codes, ReadTokenizerFile(folder / codes_name));
  }
  return MakeDictionaryTokenizer(*dictionary, name, codes, codes_name, use.texts);
}

// Reads a dictionary with the model of SentencePiece or the codes that the folder has.
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadDictionary(const std::filesystem::path& folder,
                                                          const std::string& name, TokenId id_limit,
                                                          const DictionaryUse& use) {
  const std::string vocabulary = VocabularyFile(folder);
  if (vocabulary.empty()) return LoadWords(folder, name, use);
  return LoadVocabulary(folder, vocabulary, name, id_limit, use);
}

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadPair(const std::filesystem::path& folder,
                                                    const Dictionaries& names, TokenId id_limit,
                                                    const DictionaryUse& use) {
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<Tokenizer> source,
                            LoadDictionary(folder, names.source_name, use.source_limit, use));
  if (source->vocab_size() > use.source_limit) {
    return absl::InvalidArgumentError(
        Concat(names.source_name, ": expected token ids in [0, ", use.source_limit - 1,
               "] (the encoder's embedding matrix has ", use.source_limit,
               " rows), found ids up to ", source->vocab_size() - 1));
  }
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<Tokenizer> target,
                            LoadDictionary(folder, names.name, id_limit, use));
  return std::make_unique<PairTokenizer>(std::move(source), std::move(target));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizerFolder(const std::filesystem::path& folder,
                                                               TokenId id_limit,
                                                               const DictionaryUse& use) {
  if (HasFile(folder, "tokenizer.json")) return LoadTokenizerJson(folder, id_limit);
  if (HasFile(folder, kMarianModel)) return LoadMarian(folder, id_limit);
  MOESERVE_ASSIGN_OR_RETURN(const Dictionaries dictionaries, FindDictionaries(folder, use));
  if (!dictionaries.source_name.empty()) return LoadPair(folder, dictionaries, id_limit, use);
  if (const std::string name = VocabularyFile(folder); !name.empty()) {
    return LoadVocabulary(folder, name, dictionaries.name, id_limit, use);
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> vocab,
                            ReadTokenizerFile(folder / kVocab));
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> merges,
                            ReadTokenizerFile(folder / kMerges));
  const bool has_merges = vocab.has_value() && merges.has_value();
  MOESERVE_ASSIGN_OR_RETURN(const std::optional<std::string> lines,
                            ReadTokenizerFile(folder / kBertVocabulary));
  if (!has_merges && !lines.has_value()) {
    if (!dictionaries.name.empty()) return LoadDictionary(folder, dictionaries.name, id_limit, use);
    return absl::NotFoundError(
        "expected tokenizer.json, tokenizer.model, a tiktoken vocabulary, vocab.json with "
        "merges.txt or source.spm, vocab.txt, or dict.txt, found none");
  }
  MOESERVE_ASSIGN_OR_RETURN(const TokenizerDetails details, DetailsBelow(id_limit, folder));
  if (!has_merges) return ParseBertVocabulary(*lines, details);
  return ParseVocabAndMerges(*vocab, *merges, details);
}

std::vector<std::string> TokenizerFiles(const std::filesystem::path& folder) {
  std::vector<std::string> names = TiktokenFiles(folder);
  for (const char* name : kVocabularies) names.push_back(name);
  for (std::string& name : LanguageFiles(folder)) names.push_back(std::move(name));
  for (const char* name : {"tokenizer.json", "added_tokens.json", kFairseqDictionary, kVocab,
                           kMerges, kBertVocabulary, kMarianModel, kMarianTarget}) {
    names.push_back(name);
  }
  std::erase_if(names, [&](const std::string& name) { return !HasFile(folder, name); });
  return names;
}

}  // namespace moeserve
