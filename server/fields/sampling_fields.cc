#include "server/fields/sampling_fields.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"

namespace moeserve::server {
namespace {

// Reads the numbers listed in `fields`. Absent fields keep their value in `out`.
absl::Status ParseNumbers(const Json& body, std::span<const SamplingField> fields,
                          SamplingParams& out) {
  for (const SamplingField& field : fields) {
    if (field.is_integer()) {
      MOESERVE_ASSIGN_OR_RETURN(const auto value,
                                IntField(body, field.name, static_cast<int64_t>(field.min),
                                         static_cast<int64_t>(field.max)));
      if (value) field.Set(out, static_cast<double>(*value));
    } else {
      MOESERVE_ASSIGN_OR_RETURN(const auto value, NumberField(body, field.name, field.min,
                                                              field.max, field.min_excluded));
      if (value) field.Set(out, *value);
    }
  }
  return absl::OkStatus();
}

absl::Status ParseFlags(const Json& body, SamplingParams& out) {
  for (const SamplingFlag& flag : kSamplingFlags) {
    MOESERVE_ASSIGN_OR_RETURN(const auto value, BoolField(body, flag.name));
    if (value) out.*flag.member = *value;
  }
  return absl::OkStatus();
}

Result<std::vector<std::string>> ParseStop(const Json& body, const RequestLimits& limits) {
  std::vector<std::string> stop;
  const Json* field = FindField(body, "stop");
  if (field == nullptr) return stop;
  const auto add = [&](const Json& item) -> absl::Status {
    if (!item.is_string()) {
      return InvalidValue("stop", "'stop' must be a string or a list of strings");
    }
    std::string text = item.get<std::string>();
    if (text.empty()) return InvalidValue("stop", "'stop' must not hold an empty string");
    if (text.size() > limits.max_stop_bytes) {
      return InvalidValue("stop", Concat("'stop': a string has at most ", limits.max_stop_bytes,
                                         " bytes, found ", text.size()));
    }
    stop.push_back(std::move(text));
    return absl::OkStatus();
  };
  if (!field->is_array()) {
    MOESERVE_RETURN_IF_ERROR(add(*field));
    return stop;
  }
  if (static_cast<int64_t>(field->size()) > limits.max_stop) {
    return InvalidValue(
        "stop", Concat("'stop' has at most ", limits.max_stop, " strings, found ", field->size()));
  }
  for (const Json& item : *field) MOESERVE_RETURN_IF_ERROR(add(item));
  return stop;
}

absl::Status ParseStopTokenIds(const Json& body, const RequestRules& rules, SamplingParams& out) {
  const Json* ids = FindField(body, "stop_token_ids");
  if (ids == nullptr) return absl::OkStatus();
  if (static_cast<int64_t>(ids->size()) > rules.limits.max_stop_token_ids) {
    return InvalidValue("stop_token_ids",
                        Concat("'stop_token_ids' has at most ", rules.limits.max_stop_token_ids,
                               " ids, found ", ids->size()));
  }
  MOESERVE_ASSIGN_OR_RETURN(out.stop_token_ids,
                            TokenIdList(*ids, "stop_token_ids", rules.vocab_size));
  return absl::OkStatus();
}

absl::Status ParseAllowedIds(const Json& body, const RequestRules& rules, SamplingParams& out) {
  const Json* ids = FindField(body, "allowed_token_ids");
  if (ids == nullptr) return absl::OkStatus();
  MOESERVE_ASSIGN_OR_RETURN(out.allowed_token_ids,
                            TokenIdList(*ids, "allowed_token_ids", rules.vocab_size));
  if (out.allowed_token_ids.empty() ||
      static_cast<int64_t>(out.allowed_token_ids.size()) > rules.vocab_size) {
    return InvalidValue("allowed_token_ids",
                        Concat("'allowed_token_ids' must have 1 to ", rules.vocab_size, " ids"));
  }
  return absl::OkStatus();
}

// Parses a token id from an object's key, which may contain decimal digits only.
std::optional<int> KeyAsToken(const std::string& key, int vocab_size) {
  int id = -1;
  const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
  if (error != std::errc() || end != key.data() + key.size()) return std::nullopt;
  if (id < 0 || id >= vocab_size || std::to_string(id) != key) return std::nullopt;
  return id;
}

absl::Status ParseLogitBias(const Json& body, const RequestRules& rules, SamplingParams& out) {
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
    if (!value.is_number() || !(std::abs(value.get<double>()) <= kMaxLogitBias)) {
      return InvalidValue("logit_bias",
                          Concat("'logit_bias': expected a number from ", -kMaxLogitBias, " to ",
                                 kMaxLogitBias, " for token ", key));
    }
    out.logit_bias.emplace_back(*id, value.get<float>());
  }
  return absl::OkStatus();
}

absl::Status ParseBadWords(const Json& body, const RequestRules& rules, SamplingParams& out) {
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

// Sampling fields that are not in the tables of engine/sampling_params.h.
constexpr std::string_view kOtherFields[] = {"seed",       "stop",      "stop_token_ids",
                                             "logit_bias", "bad_words", "allowed_token_ids"};

}  // namespace

std::vector<std::string_view> SamplingFields() {
  std::vector<std::string_view> names(std::begin(kOtherFields), std::end(kOtherFields));
  for (const SamplingField& field : kDrawFields) names.push_back(field.name);
  for (const SamplingField& field : kPenaltyFields) names.push_back(field.name);
  for (const SamplingFlag& flag : kSamplingFlags) names.push_back(flag.name);
  return names;
}

absl::Status ParseSamplingFields(const Json& body, const RequestRules& rules, SamplingParams& out) {
  out = DefaultSampling(rules.defaults);
  MOESERVE_RETURN_IF_ERROR(ParseNumbers(body, kDrawFields, out));
  MOESERVE_ASSIGN_OR_RETURN(out.seed, IntField(body, "seed", std::numeric_limits<int64_t>::min(),
                                               std::numeric_limits<int64_t>::max()));
  MOESERVE_ASSIGN_OR_RETURN(out.stop, ParseStop(body, rules.limits));
  MOESERVE_RETURN_IF_ERROR(ParseFlags(body, out));
  MOESERVE_RETURN_IF_ERROR(ParseStopTokenIds(body, rules, out));
  MOESERVE_RETURN_IF_ERROR(ParseNumbers(body, kPenaltyFields, out));
  MOESERVE_RETURN_IF_ERROR(ParseAllowedIds(body, rules, out));
  MOESERVE_RETURN_IF_ERROR(ParseLogitBias(body, rules, out));
  return ParseBadWords(body, rules, out);
}

}  // namespace moeserve::server
