#include "server/fields/shared_fields.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/base/request_id.h"
#include "server/fields/routing_fields.h"
#include "server/fields/sampling_fields.h"
#include "server/fields/structured_fields.h"

namespace moeserve::server {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

absl::Status ParseStreaming(const Json& body, GenerationParams& out) {
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
  // As in vLLM, continuous_usage_stats has no effect without include_usage.
  out.continuous_usage = out.include_usage && continuous.value_or(false);
  return absl::OkStatus();
}

absl::Status ParseCounts(const Json& body, const RequestRules& rules, GenerationParams& out) {
  MOESERVE_ASSIGN_OR_RETURN(auto n, IntField(body, "n", 1, rules.limits.max_n));
  out.n = static_cast<int>(n.value_or(1));
  MOESERVE_ASSIGN_OR_RETURN(auto truncate, IntField(body, "truncate_prompt_tokens", -1, kMaxInt));
  if (truncate == 0) {
    return InvalidValue("truncate_prompt_tokens", "'truncate_prompt_tokens' must not be 0");
  }
  if (truncate) out.truncate_prompt_tokens = static_cast<int>(*truncate);
  return absl::OkStatus();
}

// Chats have no best_of, but some clients send it all the same.
absl::Status RefuseBestOf(const Json& body, const RequestRules& rules,
                          const GenerationParams& params) {
  MOESERVE_ASSIGN_OR_RETURN(auto best_of, IntField(body, "best_of", 1, rules.limits.max_n));
  if (!best_of || *best_of == params.n) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "unsupported_parameter",
                   "'best_of' is supported here only where it equals 'n'", "best_of");
}

// Returns the text of a content, which is a string or a list of text parts.
Result<std::string> PredictedText(const Json& content) {
  const std::string where = "prediction.content";
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) {
    return InvalidValue(where, Concat("'", where, "' must be a string or a list of text parts"));
  }
  std::string text;
  for (const Json& part : content) {
    const std::string* type = FindText(part, "type");
    const std::string* piece = FindText(part, "text");
    if (type == nullptr || *type != "text" || piece == nullptr) {
      return InvalidValue(
          where, Concat("'", where, "': parts must be {\"type\": \"text\", \"text\": ...}"));
    }
    text += *piece;
  }
  return text;
}

// Reads `prediction`: {"type": "content", "content": ...}, a text that the answer will resemble.
absl::Status ParsePrediction(const Json& body, const RequestRules& rules, GenerationParams& out) {
  const Json* field = FindField(body, "prediction");
  if (field == nullptr) return absl::OkStatus();
  const std::string* type = FindText(*field, "type");
  const Json* content = field->is_object() ? FindField(*field, "content") : nullptr;
  if (type == nullptr || *type != "content" || content == nullptr) {
    return InvalidValue("prediction",
                        "'prediction' must be {\"type\": \"content\", \"content\": ...}");
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::string text, PredictedText(*content));
  if (text.size() > rules.limits.max_prompt_bytes) {
    return InvalidValue("prediction",
                        Concat("'prediction': at most ", rules.limits.max_prompt_bytes,
                               " bytes of text are accepted, found ", text.size()));
  }
  if (rules.tokenizer == nullptr) return absl::OkStatus();
  auto ids = rules.tokenizer->Encode(text, /*add_special_tokens=*/false);
  if (!ids.ok()) return WithApiCode(ids.status(), "invalid_value");
  out.prediction = *std::move(ids);
  return absl::OkStatus();
}

// Reads how tokens are shown.
absl::Status ParseTokenForms(const Json& body, GenerationParams& out) {
  MOESERVE_ASSIGN_OR_RETURN(auto ids, BoolField(body, "return_token_ids"));
  out.return_token_ids = ids.value_or(false);
  MOESERVE_ASSIGN_OR_RETURN(auto as_ids, BoolField(body, "return_tokens_as_token_ids"));
  out.return_tokens_as_token_ids = as_ids.value_or(false);
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseIdentity(const Json& body, const RequestRules& rules, GenerationParams& out) {
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
  MOESERVE_ASSIGN_OR_RETURN(auto priority,
                            IntField(body, "priority", rules.min_priority, kMaxPriority));
  out.priority = static_cast<int>(priority.value_or(DefaultPriority(rules)));
  return absl::OkStatus();
}

absl::Status ParsePromptLogprobs(const Json& body, const RequestRules& rules,
                                 GenerationParams& out) {
  MOESERVE_ASSIGN_OR_RETURN(auto count,
                            IntField(body, "prompt_logprobs", 0, rules.limits.max_logprobs));
  if (!count) return absl::OkStatus();
  if (out.stream) {
    return InvalidValue("prompt_logprobs", "'prompt_logprobs' cannot be streamed");
  }
  out.prompt_logprobs = static_cast<int>(*count);
  return absl::OkStatus();
}

absl::Status ParseSharedFields(const Json& body, const RequestRules& rules, FieldRoute route,
                               GenerationParams& out, std::string_view text) {
  MOESERVE_ASSIGN_OR_RETURN(auto model, StringField(body, "model"));
  MOESERVE_ASSIGN_OR_RETURN(out.model, ResolveModel(model.value_or(""), rules.served_names));
  MOESERVE_RETURN_IF_ERROR(ParseCounts(body, rules, out));
  if (route != FieldRoute::kCompletions) {
    MOESERVE_RETURN_IF_ERROR(RefuseBestOf(body, rules, out));
  }
  MOESERVE_RETURN_IF_ERROR(ParseSamplingFields(body, rules, out.sampling));
  if (FindField(body, "min_tokens") == nullptr) SetDefaultLengths(rules.defaults, out);
  MOESERVE_ASSIGN_OR_RETURN(out.constraint, ParseConstraint(body, text));
  MOESERVE_RETURN_IF_ERROR(CheckConstraint(out));
  MOESERVE_RETURN_IF_ERROR(ParseStreaming(body, out));
  MOESERVE_RETURN_IF_ERROR(ParseRoutingFields(body, rules.routing, out.stream, out.routing));
  MOESERVE_RETURN_IF_ERROR(ParseIdentity(body, rules, out));
  MOESERVE_RETURN_IF_ERROR(ParseTokenForms(body, out));
  MOESERVE_RETURN_IF_ERROR(ParsePrediction(body, rules, out));
  FieldFindings findings;
  MOESERVE_RETURN_IF_ERROR(CheckRequestFields(body, route, rules.strict_fields, findings));
  out.ignored_fields = findings.ignored;
  out.warnings = std::move(findings.warnings);
  return absl::OkStatus();
}

}  // namespace moeserve::server
