#include "model_loaders/tokenizer/generation_config.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/error_text.h"
#include "base/strict_json.h"
#include "model_loaders/files/object_reader.h"
#include "model_loaders/tokenizer/token_ids.h"

namespace moeserve {
namespace {

constexpr std::string_view kFile = "generation_config.json";
constexpr JsonLimits kGenerationLimits = {
    .max_bytes = size_t{1} << 20, .max_depth = 8, .max_values = size_t{1} << 16};

}  // namespace

Result<GenerationConfig> ParseGenerationConfig(std::string_view text, int vocab_size) {
  Result<nlohmann::json> json = ParseStrictJson(text, kGenerationLimits);
  if (!json.ok()) return Prefixed(Concat(kFile, ": "), json.status());

  if (json->is_object()) {  // a null means that the key has no value
    for (auto it = json->begin(); it != json->end();) it = it->is_null() ? json->erase(it) : ++it;
  }
  Problems problems;
  ObjectReader reader(*json, "", &problems);
  GenerationConfig config;
  // The ranges are the same as for the API fields of these names.
  const auto real = [&](std::string_view key, const char* expected, auto in_range) {
    std::optional<double> value;
    const nlohmann::json* found = reader.Optional(key);
    if (found == nullptr) return value;
    if (found->is_number() && in_range(found->get<double>())) {
      value = found->get<double>();
    } else {
      reader.Fault(key, expected, ShowJson(*found));
    }
    return value;
  };
  config.defaults.temperature =
      real("temperature", "a number in [0, 2]", [](double v) { return v >= 0 && v <= 2; });
  config.defaults.top_p =
      real("top_p", "a number in [0, 1]", [](double v) { return v >= 0 && v <= 1; });
  config.defaults.min_p =
      real("min_p", "a number in [0, 1]", [](double v) { return v >= 0 && v <= 1; });
  config.defaults.repetition_penalty =
      real("repetition_penalty", "a number above 0 that f32 can hold",
           [](double v) { return v > 0 && v <= std::numeric_limits<float>::max(); });
  if (const nlohmann::json* top_k = reader.Optional("top_k")) {
    config.defaults.top_k = IntFrom(*top_k);
    if (config.defaults.top_k.value_or(-2) < -1) {
      reader.Fault("top_k", "an integer >= -1 below 2^31 (-1 and 0 are off)", ShowJson(*top_k));
    }
  }
  const auto count = [&](const char* key) {
    std::optional<int> value;
    const nlohmann::json* found = reader.Optional(key);
    if (found == nullptr) return value;
    value = IntFrom(*found);
    if (value.value_or(-1) < 0) reader.Fault(key, "an integer from 0 below 2^31", ShowJson(*found));
    return value;
  };
  config.defaults.no_repeat_ngram_size = count("no_repeat_ngram_size");
  config.defaults.min_new_tokens = count("min_new_tokens");
  config.defaults.min_length = count("min_length");
  const auto is_id = [&](const nlohmann::json& json) {
    const std::optional<int> id = IntFrom(json);
    return id.has_value() && *id >= 0 && *id < vocab_size;
  };
  const std::string ids = Concat("ids in [0, ", vocab_size - 1, "]");
  for (const auto& [key, member] :
       {std::pair{"forced_bos_token_id", &GenerationDefaults::forced_bos_token_id},
        std::pair{"forced_eos_token_id", &GenerationDefaults::forced_eos_token_id}}) {
    const nlohmann::json* found = reader.Optional(key);
    if (found == nullptr) continue;
    if (is_id(*found)) {
      config.defaults.*member = IntFrom(*found);
    } else {
      reader.Fault(key, ids, ShowJson(*found));
    }
  }
  if (const nlohmann::json* words = reader.Optional("bad_words_ids")) {
    const auto is_word = [&](const nlohmann::json& word) {
      return word.is_array() && !word.empty() && std::ranges::all_of(word, is_id);
    };
    if (words->is_array() && words->size() <= kMaxBadWordsIds &&
        std::ranges::all_of(*words, is_word)) {
      for (const nlohmann::json& word : *words) {
        std::vector<TokenId>& to = config.defaults.bad_words_ids.emplace_back();
        for (const nlohmann::json& id : word) to.push_back(*IntFrom(id));
      }
    } else {
      reader.Fault("bad_words_ids",
                   Concat("at most ", kMaxBadWordsIds, " lists, none of them empty, of ", ids),
                   ShowJson(*words));
    }
  }
  if (const nlohmann::json* eos = reader.Optional("eos_token_id")) {
    config.eos_token_ids = ParseTokenIds(*eos, "eos_token_id", &problems);
    for (const TokenId id : config.eos_token_ids) {
      if (id >= 0 && id < vocab_size) continue;
      reader.Fault("eos_token_id", Concat("ids in [0, ", vocab_size - 1, "]"),
                   Concat(id, " (vocab_size of config.json is ", vocab_size, ')'));
    }
  }
  // These ids are not used. They are checked because common tools write them, and a wrong id
  // indicates a wrong file.
  for (const char* key : {"bos_token_id", "pad_token_id"}) {
    const nlohmann::json* id = reader.Optional(key);
    if (id == nullptr) continue;
    const std::optional<int> value = IntFrom(*id);
    if (!value.has_value() || *value < 0 || *value >= vocab_size) {
      reader.Fault(key, Concat("null or an id in [0, ", vocab_size - 1, "]"), ShowJson(*id));
    }
  }
  MOESERVE_RETURN_IF_ERROR(problems.ToStatus(kFile));
  return config;
}

}  // namespace moeserve
