#include "server/generation/sampling_fields.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/message.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/base/request_id.h"
#include "server/generation/logit_fields.h"
#include "server/generation/unsupported_fields.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

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

// Fields that shape the distribution and the end of the text.
absl::Status ParseSampling(const Json& body, const RequestRules& rules, SamplingParams& out) {
  const GenerationDefaults& defaults = rules.defaults;
  MOESERVE_ASSIGN_OR_RETURN(auto temperature, NumberField(body, "temperature", 0.0, 2.0));
  out.temperature = temperature.value_or(defaults.temperature.value_or(1.0));
  MOESERVE_ASSIGN_OR_RETURN(auto top_p, NumberField(body, "top_p", 0.0, 1.0, true));
  out.top_p = top_p.value_or(defaults.top_p.value_or(1.0));
  MOESERVE_ASSIGN_OR_RETURN(auto min_p, NumberField(body, "min_p", 0.0, 1.0));
  out.min_p = min_p.value_or(defaults.min_p.value_or(0.0));
  MOESERVE_ASSIGN_OR_RETURN(auto top_k, IntField(body, "top_k", -1, kMaxInt));
  out.top_k = std::max(0, static_cast<int>(top_k.value_or(defaults.top_k.value_or(0))));
  MOESERVE_ASSIGN_OR_RETURN(out.seed, IntField(body, "seed", std::numeric_limits<int64_t>::min(),
                                               std::numeric_limits<int64_t>::max()));
  MOESERVE_ASSIGN_OR_RETURN(out.stop, ParseStop(body, rules.limits));
  MOESERVE_ASSIGN_OR_RETURN(auto include_stop, BoolField(body, "include_stop_str_in_output"));
  out.include_stop = include_stop.value_or(false);
  MOESERVE_ASSIGN_OR_RETURN(auto ignore_eos, BoolField(body, "ignore_eos"));
  out.ignore_eos = ignore_eos.value_or(false);
  MOESERVE_ASSIGN_OR_RETURN(auto skip_special, BoolField(body, "skip_special_tokens"));
  out.skip_special_tokens = skip_special.value_or(true);
  if (const Json* ids = FindField(body, "stop_token_ids")) {
    if (static_cast<int64_t>(ids->size()) > rules.limits.max_stop_token_ids) {
      return InvalidValue("stop_token_ids",
                          Concat("'stop_token_ids' has at most ", rules.limits.max_stop_token_ids,
                                 " ids, found ", ids->size()));
    }
    MOESERVE_ASSIGN_OR_RETURN(out.stop_token_ids,
                              TokenIdList(*ids, "stop_token_ids", rules.vocab_size));
  }
  return ParseLogitFields(body,
                          {.limits = rules.limits,
                           .defaults = defaults,
                           .tokenizer = rules.tokenizer,
                           .vocab_size = rules.vocab_size},
                          out);
}

absl::Status ParseStreaming(const Json& body, SharedParams& out) {
  MOESERVE_ASSIGN_OR_RETURN(auto stream, BoolField(body, "stream"));
  out.stream = stream.value_or(false);
  const Json* options = FindField(body, "stream_options");
  if (options == nullptr) return absl::OkStatus();
  if (!out.stream) {
    return InvalidValue("stream_options", "'stream_options' needs 'stream': true");
  }
  if (!options->is_object()) {
    return InvalidValue("stream_options", "'stream_options' must be an object");
  }
  MOESERVE_ASSIGN_OR_RETURN(auto include_usage, BoolField(*options, "include_usage"));
  out.include_usage = include_usage.value_or(false);
  MOESERVE_ASSIGN_OR_RETURN(auto continuous, BoolField(*options, "continuous_usage_stats"));
  // As in vLLM, the continuous numbers are an addition to include_usage.
  out.continuous_usage = out.include_usage && continuous.value_or(false);
  return absl::OkStatus();
}

absl::Status ParseCounts(const Json& body, const RequestRules& rules, SharedParams& out) {
  MOESERVE_ASSIGN_OR_RETURN(auto n, IntField(body, "n", 1, rules.limits.max_n));
  out.n = static_cast<int>(n.value_or(1));
  MOESERVE_ASSIGN_OR_RETURN(auto best_of, IntField(body, "best_of", 1, rules.limits.max_n));
  if (best_of && *best_of != out.n) {
    return MakeError(absl::StatusCode::kInvalidArgument, "unsupported_parameter",
                     "'best_of' is supported only where it equals 'n'", "best_of");
  }
  MOESERVE_ASSIGN_OR_RETURN(auto truncate, IntField(body, "truncate_prompt_tokens", -1, kMaxInt));
  if (truncate == 0) {
    return InvalidValue("truncate_prompt_tokens", "'truncate_prompt_tokens' must not be 0");
  }
  if (truncate) out.truncate_prompt_tokens = static_cast<int>(*truncate);
  return absl::OkStatus();
}

absl::Status ParseIdentity(const Json& body, SharedParams& out) {
  MOESERVE_ASSIGN_OR_RETURN(auto request_id, StringField(body, "request_id"));
  if (request_id && !IsValidRequestId(*request_id)) {
    return InvalidValue("request_id",
                        "'request_id' must be 1 to 128 letters, digits, '.', '_', '-'");
  }
  out.request_id = request_id.value_or("");
  MOESERVE_ASSIGN_OR_RETURN(auto salt, StringField(body, "cache_salt"));
  if (salt && (salt->empty() || salt->size() > 128)) {
    return InvalidValue("cache_salt", "'cache_salt' must have 1 to 128 characters");
  }
  out.cache_salt = salt.value_or("");
  MOESERVE_ASSIGN_OR_RETURN(auto priority, IntField(body, "priority", -kMaxPriority, kMaxPriority));
  out.priority = static_cast<int>(priority.value_or(0));
  MOESERVE_ASSIGN_OR_RETURN(auto ids, BoolField(body, "return_token_ids"));
  out.return_token_ids = ids.value_or(false);
  MOESERVE_ASSIGN_OR_RETURN(auto as_ids, BoolField(body, "return_tokens_as_token_ids"));
  out.return_tokens_as_token_ids = as_ids.value_or(false);
  return absl::OkStatus();
}

constexpr std::string_view kSharedFields[] = {
    "model", "temperature", "top_p", "n", "best_of", "stream", "stream_options", "stop", "seed",
    "top_k", "min_p", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "truncate_prompt_tokens", "return_token_ids",
    "return_tokens_as_token_ids", "request_id", "cache_salt", "priority", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    "min_tokens", "response_format", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "return_routing", "return_routed_experts", "routing_control",
    // Accepted and without effect.
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "parallel_tool_calls"};

bool Contains(std::span<const std::string_view> names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

absl::Status CheckUnknownFields(const Json& body, std::span<const std::string_view> own_fields,
                                bool strict, int& ignored) {
  for (const auto& [name, value] : body.items()) {
    if (Contains(kSharedFields, name) || Contains(own_fields, name)) continue;
    if (IsKnownUnsupportedField(name)) continue;
    if (strict) {
      const std::string shown = Printable(name, 64);
      return InvalidValue(shown, Concat("unknown field '", shown, "'"));
    }
    ++ignored;
  }
  return absl::OkStatus();
}

}  // namespace

Result<std::string> ResolveModel(const std::string& requested,
                                 const std::vector<std::string>& served_names) {
  if (requested.empty()) return served_names.front();
  for (const std::string& name : served_names) {
    if (name == requested) return name;
  }
  return MakeError(absl::StatusCode::kNotFound, "model_not_found",
                   Concat("the model ", Quoted(requested, 64), " is not served here"), "model");
}

absl::Status CheckConstraint(const SharedParams& params) {
  if (!params.constraint || !params.sampling.ignore_eos) return absl::OkStatus();
  return InvalidValue("ignore_eos",
                      Concat("'ignore_eos' cannot be combined with '", params.constraint->param,
                             "', which decides where the text ends"));
}

absl::Status ParseSharedFields(const Json& body, const RequestRules& rules,
                               std::span<const std::string_view> own_fields, SharedParams& out) {
  MOESERVE_ASSIGN_OR_RETURN(auto model, StringField(body, "model"));
  MOESERVE_ASSIGN_OR_RETURN(out.model, ResolveModel(model.value_or(""), rules.served_names));
  MOESERVE_RETURN_IF_ERROR(ParseCounts(body, rules, out));
  MOESERVE_RETURN_IF_ERROR(ParseSampling(body, rules, out.sampling));
  MOESERVE_ASSIGN_OR_RETURN(out.constraint, ParseConstraint(body));
  MOESERVE_RETURN_IF_ERROR(CheckConstraint(out));
  MOESERVE_RETURN_IF_ERROR(ParseStreaming(body, out));
  MOESERVE_RETURN_IF_ERROR(ParseRoutingFields(body, rules.routing, out.stream, out.routing));
  MOESERVE_RETURN_IF_ERROR(ParseIdentity(body, out));
  MOESERVE_RETURN_IF_ERROR(CheckUnsupportedFields(body));
  return CheckUnknownFields(body, own_fields, rules.strict_fields, out.ignored_fields);
}

}  // namespace moeserve::server
