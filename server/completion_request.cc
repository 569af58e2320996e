#include "server/completion_request.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>

#include "model_loaders/message.h"
#include "server/api_error.h"
#include "server/json_fields.h"
#include "server/request_id.h"
#include "server/unsupported_fields.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

Result<PromptInput> TextPrompt(const Json& value, const RequestLimits& limits) {
  PromptInput prompt;
  prompt.is_text = true;
  prompt.text = value.get<std::string>();
  if (prompt.text.empty()) return InvalidValue("prompt", "'prompt' must not be empty");
  if (prompt.text.size() > limits.max_prompt_bytes) {
    return InvalidValue("prompt",
                        Concat("'prompt': at most ", limits.max_prompt_bytes,
                               " bytes of text are accepted, found ", prompt.text.size()));
  }
  return prompt;
}

Result<PromptInput> IdPrompt(const Json& value, int vocab_size) {
  PromptInput prompt;
  MOESERVE_ASSIGN_OR_RETURN(prompt.ids, TokenIdList(value, "prompt", vocab_size));
  if (prompt.ids.empty()) return InvalidValue("prompt", "'prompt' must not be empty");
  return prompt;
}

// A string, a list of strings, a list of ids, or a list of lists of ids.
Result<std::vector<PromptInput>> ParsePrompts(const Json& body, const CompletionRules& rules) {
  const Json* field = FindField(body, "prompt");
  if (field == nullptr) return MissingField("prompt");
  std::vector<PromptInput> prompts;
  if (field->is_string()) {
    MOESERVE_ASSIGN_OR_RETURN(PromptInput prompt, TextPrompt(*field, rules.limits));
    prompts.push_back(std::move(prompt));
    return prompts;
  }
  if (!field->is_array()) {
    return InvalidValue("prompt",
                        "'prompt' must be a string, a list of strings, a list of token ids or a "
                        "list of lists of token ids");
  }
  if (field->empty()) return InvalidValue("prompt", "'prompt' must not be empty");
  if (field->front().is_number()) {
    MOESERVE_ASSIGN_OR_RETURN(PromptInput prompt, IdPrompt(*field, rules.vocab_size));
    prompts.push_back(std::move(prompt));
    return prompts;
  }
  if (static_cast<int64_t>(field->size()) > rules.limits.max_prompts) {
    return InvalidValue("prompt",
                        Concat("at most ", rules.limits.max_prompts,
                               " prompts are accepted in one request, found ", field->size()));
  }
  const bool texts = field->front().is_string();
  for (const Json& item : *field) {
    if (texts ? !item.is_string() : !item.is_array()) {
      return InvalidValue("prompt",
                          "'prompt': a list must hold only strings, only token ids or "
                          "only lists of token ids");
    }
    Result<PromptInput> prompt =
        texts ? TextPrompt(item, rules.limits) : IdPrompt(item, rules.vocab_size);
    if (!prompt.ok()) return prompt.status();
    prompts.push_back(*std::move(prompt));
  }
  return prompts;
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

// Fields that shape the distribution and the end of the text.
absl::Status ParseSampling(const Json& body, const CompletionRules& rules, SamplingParams& out) {
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
  return absl::OkStatus();
}

absl::Status ParseStreaming(const Json& body, CompletionParams& out) {
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

absl::Status ParseCounts(const Json& body, const CompletionRules& rules, CompletionParams& out) {
  MOESERVE_ASSIGN_OR_RETURN(auto n, IntField(body, "n", 1, rules.limits.max_n));
  out.n = static_cast<int>(n.value_or(1));
  MOESERVE_ASSIGN_OR_RETURN(auto best_of, IntField(body, "best_of", 1, rules.limits.max_n));
  if (best_of && *best_of != out.n) {
    return MakeError(absl::StatusCode::kInvalidArgument, "unsupported_parameter",
                     "'best_of' is supported only where it equals 'n'", "best_of");
  }
  const int64_t choices = static_cast<int64_t>(out.prompts.size()) * out.n;
  if (choices > rules.limits.max_choices) {
    return InvalidValue("n", Concat("prompts times 'n' is at most ", rules.limits.max_choices,
                                    ", found ", choices));
  }
  MOESERVE_ASSIGN_OR_RETURN(auto echo, BoolField(body, "echo"));
  out.echo = echo.value_or(false);
  MOESERVE_ASSIGN_OR_RETURN(auto max_tokens, IntField(body, "max_tokens", 0, kMaxInt));
  if (max_tokens) out.max_tokens = static_cast<int>(*max_tokens);
  if (out.max_tokens == 0 && !out.echo) {
    return InvalidValue("max_tokens", "'max_tokens' may be 0 only together with 'echo': true");
  }
  MOESERVE_ASSIGN_OR_RETURN(auto logprobs,
                            IntField(body, "logprobs", 0, rules.limits.max_logprobs));
  if (logprobs) out.logprobs = static_cast<int>(*logprobs);
  MOESERVE_ASSIGN_OR_RETURN(auto truncate, IntField(body, "truncate_prompt_tokens", -1, kMaxInt));
  if (truncate == 0) {
    return InvalidValue("truncate_prompt_tokens", "'truncate_prompt_tokens' must not be 0");
  }
  if (truncate) out.truncate_prompt_tokens = static_cast<int>(*truncate);
  return absl::OkStatus();
}

absl::Status ParseIdentity(const Json& body, CompletionParams& out) {
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
  MOESERVE_ASSIGN_OR_RETURN(auto special, BoolField(body, "add_special_tokens"));
  out.add_special_tokens = special.value_or(true);
  MOESERVE_ASSIGN_OR_RETURN(auto ids, BoolField(body, "return_token_ids"));
  out.return_token_ids = ids.value_or(false);
  MOESERVE_ASSIGN_OR_RETURN(auto as_ids, BoolField(body, "return_tokens_as_token_ids"));
  out.return_tokens_as_token_ids = as_ids.value_or(false);
  return absl::OkStatus();
}

constexpr std::string_view kUsedFields[] = {
    "model", "prompt", "max_tokens", "temperature", "top_p", "n", "best_of", "stream",
    "stream_options", "logprobs", "echo", "stop", "seed", "top_k", "min_p", "ignore_eos",
    "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens",
    "truncate_prompt_tokens", "return_token_ids", "return_tokens_as_token_ids", "request_id",
    "cache_salt",
    // Accepted and without effect.
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "parallel_tool_calls"};

absl::Status CheckUnknownFields(const Json& body, bool strict, int& ignored) {
  for (const auto& [name, value] : body.items()) {
    const bool used =
        std::find(std::begin(kUsedFields), std::end(kUsedFields), name) != std::end(kUsedFields);
    if (used || IsKnownUnsupportedField(name)) continue;
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

Result<CompletionParams> ParseCompletion(const Json& body, const CompletionRules& rules) {
  if (!body.is_object()) return InvalidValue("", "the body must be a JSON object");
  CompletionParams out;
  MOESERVE_ASSIGN_OR_RETURN(auto model, StringField(body, "model"));
  MOESERVE_ASSIGN_OR_RETURN(out.model, ResolveModel(model.value_or(""), rules.served_names));
  MOESERVE_ASSIGN_OR_RETURN(out.prompts, ParsePrompts(body, rules));
  MOESERVE_RETURN_IF_ERROR(ParseCounts(body, rules, out));
  MOESERVE_RETURN_IF_ERROR(ParseSampling(body, rules, out.sampling));
  MOESERVE_RETURN_IF_ERROR(ParseStreaming(body, out));
  MOESERVE_RETURN_IF_ERROR(ParseIdentity(body, out));
  MOESERVE_RETURN_IF_ERROR(CheckUnsupportedFields(body));
  MOESERVE_RETURN_IF_ERROR(CheckUnknownFields(body, rules.strict_fields, out.ignored_fields));
  return out;
}

Result<int> FitIntoContext(size_t prompt_tokens, std::optional<int> max_tokens, int max_model_len) {
  const int64_t prompt = static_cast<int64_t>(prompt_tokens);
  const int64_t room = max_model_len - prompt;
  const auto too_long = [&](int64_t wanted) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "context_length_exceeded",
        Concat("the context length of this model is ", max_model_len, " tokens; the prompt has ",
               prompt, " and ", wanted, " are to be generated"),
        "prompt");
  };
  if (!max_tokens) {
    if (room < 1) return too_long(1);
    return static_cast<int>(std::min<int64_t>(kDefaultMaxTokens, room));
  }
  if (*max_tokens > room) return too_long(*max_tokens);
  return *max_tokens;
}

Result<std::vector<PreparedPrompt>> PreparePrompts(const CompletionParams& params,
                                                   const Tokenizer* tokenizer, int max_model_len) {
  std::vector<PreparedPrompt> prepared;
  prepared.reserve(params.prompts.size());
  for (const PromptInput& input : params.prompts) {
    PreparedPrompt prompt;
    if (input.is_text) {
      if (tokenizer == nullptr) {
        return InvalidValue("prompt", "this model has no tokenizer: send token ids");
      }
      auto ids = tokenizer->Encode(input.text, params.add_special_tokens);
      if (!ids.ok()) return WithApiCode(ids.status(), "invalid_value");
      prompt.ids = *std::move(ids);
      if (prompt.ids.empty()) return InvalidValue("prompt", "'prompt' has no tokens");
    } else {
      prompt.ids = input.ids;
    }
    bool truncated = false;
    if (params.truncate_prompt_tokens) {
      const int64_t room = max_model_len - params.max_tokens.value_or(kDefaultMaxTokens);
      const int64_t keep = *params.truncate_prompt_tokens == -1 ? std::max<int64_t>(1, room)
                                                                : *params.truncate_prompt_tokens;
      if (static_cast<int64_t>(prompt.ids.size()) > keep) {
        prompt.ids.erase(prompt.ids.begin(), prompt.ids.end() - keep);
        truncated = true;
      }
    }
    MOESERVE_ASSIGN_OR_RETURN(prompt.max_tokens,
                              FitIntoContext(prompt.ids.size(), params.max_tokens, max_model_len));
    if (params.echo) {
      if (input.is_text && !truncated) {
        prompt.echo_text = input.text;
      } else if (tokenizer != nullptr) {
        MOESERVE_ASSIGN_OR_RETURN(prompt.echo_text, tokenizer->Decode(prompt.ids, false));
      }
    }
    prepared.push_back(std::move(prompt));
  }
  return prepared;
}

std::vector<Request> MakeEngineRequests(const CompletionParams& params,
                                        const std::vector<PreparedPrompt>& prompts,
                                        const std::string& id, absl::Time deadline) {
  std::vector<Request> requests;
  for (size_t p = 0; p < prompts.size(); ++p) {
    for (int sample = 0; sample < params.n; ++sample) {
      Request request;
      request.id = Concat(id, '-', p * params.n + sample);
      request.prompt = prompts[p].ids;
      request.sampling = params.sampling;
      request.sampling.sample_index = sample;
      request.sampling.max_tokens = prompts[p].max_tokens;
      request.sampling.logprobs = params.logprobs;
      if (params.echo) request.sampling.prompt_logprobs = params.logprobs;
      request.deadline = deadline;
      requests.push_back(std::move(request));
    }
  }
  return requests;
}

}  // namespace moeserve::server
