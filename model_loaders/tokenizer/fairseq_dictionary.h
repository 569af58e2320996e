// The dictionaries of fairseq and the tokenizers that they make. The files are untrusted.
#pragma once

#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "model_loaders/tokenizer/tokenizer_config.h"

namespace moeserve {

// How a model uses the dictionaries of its folder.
struct DictionaryUse {
  // kContinued: a text begins with <s>. kMasked: it is enclosed in <s> and </s>, and the token
  // <mask> follows the dictionary. kTranslated: a source ends with </s>.
  enum class Texts { kContinued, kMasked, kTranslated } texts = Texts::kContinued;
  // The languages of a translator, after which its dictionaries are called; empty if unknown.
  std::string source = {}, target = {};
  TokenId source_limit = std::numeric_limits<TokenId>::max();  // above the ids of a source
};

// The dictionaries of a folder: dict.txt, or dict.LANGUAGE.txt of each language.
struct Dictionaries {
  std::string name = {};  // of the only dictionary, or of the target's; empty if there is none
  std::string source_name = {};  // of the source's dictionary; empty if there is one for both
};

// InvalidArgument if there are dictionaries of languages and `use` does not say which is which.
absl::StatusOr<Dictionaries> FindDictionaries(const std::filesystem::path& folder,
                                              const DictionaryUse& use);

// Returns the names of the folder's dictionaries dict.LANGUAGE.txt and of its codes of subword-nmt.
std::vector<std::string> LanguageFiles(const std::filesystem::path& folder);

// Returns the symbols of a dictionary in the order of their ids: <s>, <pad>, </s>, <unk>, then one
// of each line, which also has its count. InvalidArgument names the line that is none.
absl::StatusOr<std::vector<std::string>> ReadDictionarySymbols(std::string_view text,
                                                               std::string_view file_name);

// Sets what the texts of a model begin and end with where the configuration says nothing.
void SetTexts(DictionaryUse::Texts texts, TokenizerConfig* config);

// Makes a tokenizer of a dictionary alone. Texts must have been cut into words before, as by
// Moses' tokenizer. `codes` are those of subword-nmt, which cuts words into symbols; without them,
// each word of a text is one symbol. Symbols ending with "@@" are joined with the next one when
// ids are decoded.
absl::StatusOr<std::unique_ptr<Tokenizer>> MakeDictionaryTokenizer(
    std::string_view dictionary, std::string_view file_name,
    const std::optional<std::string>& codes, std::string_view codes_name,
    DictionaryUse::Texts texts);

}  // namespace moeserve
