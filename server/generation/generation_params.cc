#include "server/generation/generation_params.h"

#include <algorithm>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"

namespace moeserve::server {

SamplingParams DefaultSampling(const GenerationDefaults& model) {
  SamplingParams out;
  out.temperature = model.temperature.value_or(out.temperature);
  out.top_p = model.top_p.value_or(out.top_p);
  out.top_k = model.top_k.value_or(out.top_k);
  out.min_p = model.min_p.value_or(out.min_p);
  out.repetition_penalty = model.repetition_penalty.value_or(out.repetition_penalty);
  out.no_repeat_ngram_size = model.no_repeat_ngram_size.value_or(out.no_repeat_ngram_size);
  out.bad_words = model.bad_words_ids;
  out.forced_bos_token_id = model.forced_bos_token_id;
  out.forced_eos_token_id = model.forced_eos_token_id;
  return out;
}

void SetDefaultLengths(const GenerationDefaults& model, GenerationParams& params) {
  params.default_min_tokens = model.min_new_tokens.value_or(0);
  params.default_min_length = model.min_length.value_or(0);
}

Result<std::string> ResolveModel(const std::string& requested,
                                 const std::vector<std::string>& served_names) {
  if (served_names.empty()) {
    return MakeError(absl::StatusCode::kPermissionDenied, "permission_denied",
                     "this API key may use none of the models served here", "model");
  }
  if (requested.empty()) return served_names.front();
  for (const std::string& name : served_names) {
    if (name == requested) return name;
  }
  constexpr size_t kMostNames = 16;
  std::string names;
  for (size_t i = 0; i < std::min(served_names.size(), kMostNames); ++i) {
    names += Concat(i > 0 ? ", " : "", Printable(served_names[i], 64));
  }
  if (served_names.size() > kMostNames) names += ", ...";
  return MakeError(
      absl::StatusCode::kNotFound, "model_not_found",
      Concat("the model ", Quoted(requested, 64), " is not served here; served: ", names), "model");
}

int DefaultPriority(const RequestRules& rules) { return std::max(0, rules.min_priority); }

absl::Status CheckConstraint(const GenerationParams& params) {
  if (!params.constraint || !params.sampling.ignore_eos) return absl::OkStatus();
  return InvalidValue("ignore_eos",
                      Concat("'ignore_eos' cannot be combined with '", params.constraint->param,
                             "', which decides where the text ends"));
}

Result<std::vector<std::vector<TokenId>>> EncodeBadWords(const std::vector<std::string>& words,
                                                         const RequestRules& rules) {
  std::vector<std::vector<TokenId>> out;
  if (words.empty()) return out;
  if (rules.tokenizer == nullptr) {
    return InvalidValue("bad_words", "'bad_words': this model has no tokenizer");
  }
  if (words.size() > rules.limits.max_bad_words) {
    return InvalidValue("bad_words", Concat("'bad_words' has at most ", rules.limits.max_bad_words,
                                            " strings, found ", words.size()));
  }
  size_t tokens = 0;
  for (const std::string& word : words) {
    if (word.empty()) return InvalidValue("bad_words", "'bad_words' must not hold an empty string");
    for (const std::string& text : {word, " " + word}) {
      auto ids = rules.tokenizer->Encode(text, false, false);
      if (!ids.ok()) return WithApiCode(ids.status(), "invalid_value");
      if (ids->empty() || (!out.empty() && out.back() == *ids)) continue;
      tokens += ids->size();
      out.push_back(*std::move(ids));
    }
  }
  if (tokens > rules.limits.max_bad_word_tokens) {
    return InvalidValue("bad_words",
                        Concat("'bad_words' has at most ", rules.limits.max_bad_word_tokens,
                               " tokens in all, found ", tokens));
  }
  return out;
}

}  // namespace moeserve::server
