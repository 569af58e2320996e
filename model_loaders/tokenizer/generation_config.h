// generation_config.json: sampling defaults, and additional token ids that end a generation.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/text/token_id.h"

namespace moeserve {

// Sampling defaults from generation_config.json, which replace the API's defaults. Those without
// another range have that of the request's fields of these names.
struct GenerationDefaults {
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<int> top_k;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
  std::optional<int> no_repeat_ngram_size;
  std::optional<int> min_new_tokens;
  std::vector<std::vector<TokenId>> bad_words_ids;  // at most kMaxBadWordsIds, none empty
  // For the decoder beside an encoder: the least length with the start token, and the tokens that
  // follow the start token and end a text of max_tokens.
  std::optional<int> min_length;
  std::optional<TokenId> forced_bos_token_id;
  std::optional<TokenId> forced_eos_token_id;
};

inline constexpr size_t kMaxBadWordsIds = 4096;

struct GenerationConfig {
  GenerationDefaults defaults;
  std::vector<TokenId> eos_token_ids;
};

// Keys that are not listed in model_loaders/README.md are ignored: they are defaults of other
// programs' generation, not properties of the model. Returns InvalidArgument with a message that
// begins with "generation_config.json: ".
Result<GenerationConfig> ParseGenerationConfig(std::string_view text, int vocab_size);

}  // namespace moeserve
