#include "model_loaders/tokenizer/fairseq_dictionary.h"

#include <algorithm>
#include <iterator>
#include <system_error>
#include <utility>

#include "base/error_text.h"
#include "base/status.h"
#include "engine/text/tokenizer/decoders/decoder_stages.h"
#include "engine/text/tokenizer/models/subword_nmt_model.h"
#include "engine/text/tokenizer/models/word_models.h"
#include "engine/text/tokenizer/pipeline_tokenizer.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFirstSymbols[] = {"<s>", "<pad>", "</s>", "<unk>"};
constexpr TokenId kBegin = 0, kEnd = 2;
constexpr std::string_view kUnknownSymbol = "<unk>";
constexpr std::string_view kMaskSymbol = "<mask>";
constexpr std::string_view kCodesVersion = "#version: 0.2";
constexpr char kJoined[] = "dict.txt";
constexpr std::string_view kLanguagePrefix = "dict.", kLanguageSuffix = ".txt";
// Marks the end of a word inside of the decoder; no dictionary has it.
constexpr char kWordMark[] = "\x01";

absl::Status DictionaryFault(std::string message) {
  return absl::InvalidArgumentError(std::move(message));
}

// Removes the next line from `text` and returns it without its end.
std::string_view NextLine(std::string_view* text) {
  std::string_view line = text->substr(0, text->find('\n'));
  text->remove_prefix(std::min(line.size() + 1, text->size()));
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

// Returns the merges of a file of subword-nmt.
absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ReadCodes(
    std::string_view text, std::string_view file_name) {
  if (NextLine(&text) != kCodesVersion) {
    return DictionaryFault(Concat(file_name, ": line 1: expected ", Quoted(kCodesVersion),
                                  " (codes of subword-nmt), found another line"));
  }
  std::vector<std::pair<std::string, std::string>> merges;
  while (!text.empty()) {
    const std::string_view line = NextLine(&text);
    const size_t space = line.find(' ');
    if (space == 0 || space == std::string_view::npos || space + 1 == line.size() ||
        line.find(' ', space + 1) != std::string_view::npos) {
      return DictionaryFault(Concat(file_name, ": line ", merges.size() + 2,
                                    ": expected two symbols with a space in between, found ",
                                    Quoted(line)));
    }
    merges.emplace_back(line.substr(0, space), line.substr(space + 1));
  }
  return merges;
}

// Makes words of symbols.
class JoinStage : public DecoderStage {
 public:
  std::unique_ptr<DecoderState> Start(std::unique_ptr<DecoderState> next) const override {
    return std::make_unique<State>(std::move(next));
  }
  std::string TokenBytes(std::string token) const override { return Marked(token); }

 private:
  // Returns the symbol without the mark of a word that goes on, or else with that of its end.
  static std::string Marked(std::string_view token) {
    if (token.ends_with(kSubwordMark)) {
      return std::string(token.substr(0, token.size() - kSubwordMark.size()));
    }
    return std::string(token) + kWordMark;
  }

  class State : public DecoderState {
   public:
    explicit State(std::unique_ptr<DecoderState> next) : next_(std::move(next)) {}
    void Push(std::string_view token, std::string* out) override {
      next_->Push(Marked(token), out);
    }
    void Finish(std::string* out) override { next_->Finish(out); }
    std::unique_ptr<DecoderState> Clone() const override { return std::make_unique<State>(*this); }

   private:
    NextState next_;
  };
};

AddedToken Control(TokenId id, std::string_view content) {
  AddedToken token;
  token.id = id;
  token.content = content;
  token.special = true;
  token.trusted_only = true;
  return token;
}

bool HasEntry(const fs::path& folder, const std::string& name) {
  std::error_code error;
  return fs::exists(folder / name, error);
}

// Whether a name of a language can be a part of a file's name.
bool IsLanguage(std::string_view name) {
  return !name.empty() && name.size() <= 64 && std::ranges::all_of(name, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '@';
  });
}

std::string DictionaryOf(const std::string& language) {
  return Concat(kLanguagePrefix, language, kLanguageSuffix);
}

}  // namespace

std::vector<std::string> LanguageFiles(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (!it->is_regular_file(error)) continue;
    std::string name = it->path().filename().string();
    const bool dictionary = name.starts_with(kLanguagePrefix) && name.ends_with(kLanguageSuffix) &&
                            name.size() > kLanguagePrefix.size() + kLanguageSuffix.size();
    if (dictionary || name == "bpe.codes" || name == "bpecodes" || name == "code") {
      names.push_back(std::move(name));
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

absl::StatusOr<Dictionaries> FindDictionaries(const fs::path& folder, const DictionaryUse& use) {
  const bool translated = use.texts == DictionaryUse::Texts::kTranslated;
  if (translated && IsLanguage(use.source) && IsLanguage(use.target)) {
    Dictionaries found{.name = DictionaryOf(use.target), .source_name = DictionaryOf(use.source)};
    const bool source = HasEntry(folder, found.source_name), target = HasEntry(folder, found.name);
    if (source && target) return found;
    if ((source || target) && !HasEntry(folder, kJoined)) {
      return DictionaryFault(Concat("expected the dictionaries ", Printable(found.source_name),
                                    " and ", Printable(found.name), ", or ", kJoined,
                                    ", found one of them"));
    }
  }
  if (HasEntry(folder, kJoined)) return Dictionaries{.name = kJoined};
  if (!translated || (IsLanguage(use.source) && IsLanguage(use.target))) return Dictionaries();
  std::string names;
  for (const std::string& name : LanguageFiles(folder)) {
    if (name.starts_with(kLanguagePrefix)) names += Concat(names.empty() ? "" : ", ", name);
  }
  if (names.empty()) return Dictionaries();
  return DictionaryFault(
      Concat("expected the languages of the dictionaries (", Printable(names, 200),
             ") as source_lang and target_lang in the checkpoint, or as \"src_lang\" and "
             "\"tgt_lang\" in tokenizer_config.json, found none"));
}

absl::StatusOr<std::vector<std::string>> ReadDictionarySymbols(std::string_view text,
                                                               std::string_view file_name) {
  std::vector<std::string> symbols(std::begin(kFirstSymbols), std::end(kFirstSymbols));
  while (!text.empty()) {
    const std::string_view line = NextLine(&text);
    const size_t space = line.rfind(' ');
    const std::string_view count = space == std::string_view::npos ? "" : line.substr(space + 1);
    // A flag such as #fairseq:overwrite in place of the count is refused, too.
    if (space == 0 || count.empty() ||
        count.find_first_not_of("0123456789") != std::string_view::npos) {
      return DictionaryFault(
          Concat(file_name, ": line ", symbols.size() - std::size(kFirstSymbols) + 1,
                 ": expected a symbol, a space and a count, found ", Quoted(line)));
    }
    symbols.emplace_back(line.substr(0, space));
  }
  return symbols;
}

void SetTexts(DictionaryUse::Texts texts, TokenizerConfig* config) {
  if (config->tokenizer_class.has_value()) return;
  if (texts == DictionaryUse::Texts::kMasked) {
    config->tokenizer_class = "XLMRobertaTokenizer";
  } else if (texts == DictionaryUse::Texts::kTranslated) {
    if (!config->add_bos_token.has_value()) config->add_bos_token = false;
    if (!config->add_eos_token.has_value()) config->add_eos_token = true;
  }
}

absl::StatusOr<std::unique_ptr<Tokenizer>> MakeDictionaryTokenizer(
    std::string_view dictionary, std::string_view file_name,
    const std::optional<std::string>& codes, std::string_view codes_name,
    DictionaryUse::Texts texts) {
  MOESERVE_ASSIGN_OR_RETURN(const std::vector<std::string> symbols,
                            ReadDictionarySymbols(dictionary, file_name));
  std::vector<std::pair<std::string, TokenId>> vocab;
  vocab.reserve(symbols.size());
  for (const std::string& symbol : symbols) {
    vocab.emplace_back(symbol, static_cast<TokenId>(vocab.size()));
  }
  std::vector<std::pair<std::string, std::string>> merges;
  if (codes.has_value()) {
    MOESERVE_ASSIGN_OR_RETURN(merges, ReadCodes(*codes, codes_name));
  }
  const auto make = [&]() -> absl::StatusOr<std::unique_ptr<Tokenizer>> {
    PipelineParts parts;
    if (codes.has_value()) {
      MOESERVE_ASSIGN_OR_RETURN(
          parts.model, SubwordNmtModel::Create({.vocab = std::move(vocab),
                                                .merges = std::move(merges),
                                                .unk_token = std::string(kUnknownSymbol)}));
    } else {
      MOESERVE_ASSIGN_OR_RETURN(parts.model,
                                WordLevelModel::Create(std::move(vocab), kUnknownSymbol));
    }
    std::vector<AddedToken> added;
    for (TokenId id = 0; id <= kEnd; ++id) {
      added.push_back(Control(id, kFirstSymbols[static_cast<size_t>(id)]));
    }
    if (texts == DictionaryUse::Texts::kMasked) {
      const auto at = std::find(symbols.begin(), symbols.end(), kMaskSymbol);
      AddedToken mask = Control(static_cast<TokenId>(at - symbols.begin()), kMaskSymbol);
      mask.trusted_only = false;
      mask.lstrip = mask.rstrip = true;
      added.push_back(std::move(mask));
      parts.frames = RobertaFrames(kBegin, kEnd);
    } else if (texts == DictionaryUse::Texts::kTranslated) {
      parts.frames = Enclosed(std::nullopt, kEnd);
    } else {
      parts.frames = Enclosed(kBegin, std::nullopt);
    }
    MOESERVE_ASSIGN_OR_RETURN(
        parts.added_tokens,
        AddedTokens::Create(std::move(added), *parts.model, nullptr, /*any_new_ids=*/true));
    parts.pre_tokenizer =
        std::make_unique<CharacterPreTokenizer>(&WhiteSpaceSet(), SplitBehavior::kRemoved);
    std::vector<std::unique_ptr<DecoderStage>> stages;
    stages.push_back(std::make_unique<JoinStage>());
    stages.push_back(std::make_unique<WordEndStage>(kWordMark));
    parts.decoder = std::make_unique<ChainDecoder>(std::move(stages));
    return PipelineTokenizer::Create(std::move(parts));
  };
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = make();
  if (tokenizer.ok()) return tokenizer;
  return Prefixed(Concat(file_name, ": "), tokenizer.status());
}

}  // namespace moeserve
