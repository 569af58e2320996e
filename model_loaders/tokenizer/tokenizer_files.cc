#include "model_loaders/tokenizer/tokenizer_files.h"

#include <charconv>
#include <string>
#include <string_view>
#include <utility>

#include "base/error_text.h"
#include "base/strict_json.h"
#include "model_loaders/files/mapped_file.h"
#include "model_loaders/files/object_reader.h"
#include "model_loaders/tokenizer/tokenizer_folder.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;

constexpr char kTokenizer[] = "tokenizer.json";
constexpr char kTokenizerConfig[] = "tokenizer_config.json";
constexpr JsonLimits kConfigLimits = {
    .max_bytes = size_t{16} << 20, .max_depth = 32, .max_values = size_t{1} << 20};

// Checks the token ids in tokenizer_config.json. LoadTokenizerConfig() reads the keys that the
// server uses; other keys are for training tools.
absl::Status CheckAddedTokenIds(std::string_view text, int vocab_size) {
  Result<Json> json = ParseStrictJson(text, kConfigLimits);
  if (!json.ok()) return Prefixed(Concat(kTokenizerConfig, ": "), json.status());
  Problems problems;
  const Json* added = ObjectReader(*json, "", &problems).Optional("added_tokens_decoder");
  if (added == nullptr) return problems.ToStatus(kTokenizerConfig);
  ObjectReader(*added, "added_tokens_decoder", &problems);  // reports what is no object
  if (!added->is_object()) return problems.ToStatus(kTokenizerConfig);
  for (const auto& [key, unused] : added->items()) {
    int id = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (error == std::errc() && end == key.data() + key.size() && id >= 0 && id < vocab_size) {
      continue;
    }
    problems.Add(Concat("added_tokens_decoder: expected ids in [0, ", vocab_size - 1, "], found ",
                        Quoted(key), " (vocab_size of config.json is ", vocab_size, ')'));
  }
  return problems.ToStatus(kTokenizerConfig);
}

}  // namespace

Result<std::shared_ptr<const Tokenizer>> LoadTokenizer(const std::filesystem::path& directory,
                                                       int vocab_size, bool required,
                                                       const DictionaryUse& use) {
  if (Exists(directory / kTokenizerConfig)) {
    MOESERVE_ASSIGN_OR_RETURN(const std::string text,
                              ReadTextFile(directory / kTokenizerConfig, kConfigLimits.max_bytes));
    MOESERVE_RETURN_IF_ERROR(CheckAddedTokenIds(text, vocab_size));
  }
  absl::StatusOr<std::unique_ptr<Tokenizer>> loaded =
      LoadTokenizerFolder(directory, vocab_size, use);
  if (absl::IsNotFound(loaded.status())) {
    if (required) {
      return absl::NotFoundError(Concat(
          kTokenizer, ": ",
          std::string_view(loaded.status().message().data(), loaded.status().message().size())));
    }
    return std::shared_ptr<const Tokenizer>();
  }
  if (!loaded.ok()) return loaded.status();
  const std::shared_ptr<const Tokenizer> tokenizer = *std::move(loaded);
  // A model may have more embedding rows than its tokenizer has tokens (padding), but not fewer.
  if (tokenizer->vocab_size() > vocab_size) {
    return absl::InvalidArgumentError(
        Concat(kTokenizer, ": expected token ids in [0, ", vocab_size - 1, "], found ids up to ",
               tokenizer->vocab_size() - 1, " (vocab_size of config.json is ", vocab_size, ')'));
  }
  return tokenizer;
}

}  // namespace moeserve
