#include "server/generation/logit_fields.h"

#include <charconv>
#include <limits>
#include <optional>
#include <utility>

#include "base/message.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::json;

// A token id as an object key: decimal digits and nothing else.
std::optional<int> KeyAsToken(const std::string& key, int vocab_size) {
  int id = -1;
  const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
  if (error != std::errc() || end != key.data() + key.size()) return std::nullopt;
  if (id < 0 || id >= vocab_size || std::to_string(id) != key) return std::nullopt;
  return id;
}

absl::Status ParseLogitBias(const Json& body, const LogitFieldRules& rules, SamplingParams& out) {
  const Json* field = FindField(body, "logit_bias");
  if (field == nullptr) return absl::OkStatus();
  if (!field->is_object()) {
    return InvalidValue("logit_bias", "'logit_bias' must be an object of token ids and numbers");
  }
  if (field->size() > rules.limits.max_logit_bias) {
    return InvalidValue("logit_bias",
                        Concat("'logit_bias' has at most ", rules.limits.max_logit_bias,
                               " entries, found ", field->size()));
  }
  for (const auto& [key, value] : field->items()) {
    const std::optional<int> id = KeyAsToken(key, rules.vocab_size);
    if (!id) {
      return InvalidValue("logit_bias", Concat("'logit_bias': expected token ids from 0 to ",
                                               rules.vocab_size - 1, ", found ", Quoted(key, 64)));
    }
    if (!value.is_number() || !(value.get<double>() >= -100.0 && value.get<double>() <= 100.0)) {
      return InvalidValue(
          "logit_bias", Concat("'logit_bias': expected a number from -100 to 100 for token ", key));
    }
    out.logit_bias.emplace_back(*id, value.get<float>());
  }
  return absl::OkStatus();
}

absl::Status ParseBadWords(const Json& body, const LogitFieldRules& rules, SamplingParams& out) {
  const Json* field = FindField(body, "bad_words");
  if (field == nullptr) return absl::OkStatus();
  std::vector<std::string> words;
  const char* expected = "'bad_words' must be a list of strings that are not empty";
  if (!field->is_array()) return InvalidValue("bad_words", expected);
  for (const Json& word : *field) {
    if (!word.is_string()) return InvalidValue("bad_words", expected);
    words.push_back(word.get<std::string>());
  }
  MOESERVE_ASSIGN_OR_RETURN(out.bad_words, EncodeBadWords(words, rules));
  return absl::OkStatus();
}

}  // namespace

Result<std::vector<std::vector<TokenId>>> EncodeBadWords(const std::vector<std::string>& words,
                                                         const LogitFieldRules& rules) {
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

absl::Status ParseLogitFields(const Json& body, const LogitFieldRules& rules, SamplingParams& out) {
  MOESERVE_ASSIGN_OR_RETURN(auto presence, NumberField(body, "presence_penalty", -2.0, 2.0));
  out.presence_penalty = presence.value_or(0.0);
  MOESERVE_ASSIGN_OR_RETURN(auto frequency, NumberField(body, "frequency_penalty", -2.0, 2.0));
  out.frequency_penalty = frequency.value_or(0.0);
  MOESERVE_ASSIGN_OR_RETURN(auto repetition,
                            NumberField(body, "repetition_penalty", 0.0, 100.0, true));
  out.repetition_penalty = repetition.value_or(rules.defaults.repetition_penalty.value_or(1.0));
  MOESERVE_ASSIGN_OR_RETURN(auto min_tokens,
                            IntField(body, "min_tokens", 0, std::numeric_limits<int32_t>::max()));
  out.min_tokens = static_cast<int>(min_tokens.value_or(0));
  if (const Json* ids = FindField(body, "allowed_token_ids")) {
    MOESERVE_ASSIGN_OR_RETURN(out.allowed_token_ids,
                              TokenIdList(*ids, "allowed_token_ids", rules.vocab_size));
    if (out.allowed_token_ids.empty() ||
        static_cast<int64_t>(out.allowed_token_ids.size()) > rules.vocab_size) {
      return InvalidValue("allowed_token_ids",
                          Concat("'allowed_token_ids' must have 1 to ", rules.vocab_size, " ids"));
    }
  }
  MOESERVE_RETURN_IF_ERROR(ParseLogitBias(body, rules, out));
  return ParseBadWords(body, rules, out);
}

}  // namespace moeserve::server
