#include "server/completion_request.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>

#include "model_loaders/message.h"
#include "server/api_error.h"
#include "server/json_fields.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

constexpr std::string_view kOwnFields[] = {"prompt", "max_tokens", "logprobs", "echo",
                                           "add_special_tokens"};

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
Result<std::vector<PromptInput>> ParsePrompts(const Json& body, const RequestRules& rules) {
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

absl::Status ParseCounts(const Json& body, const RequestRules& rules, CompletionParams& out) {
  const int64_t choices = static_cast<int64_t>(out.prompts.size()) * out.n;
  if (choices > rules.limits.max_choices) {
    return InvalidValue("n", Concat("prompts times 'n' is at most ", rules.limits.max_choices,
                                    ", found ", choices));
  }
  MOESERVE_ASSIGN_OR_RETURN(auto echo, BoolField(body, "echo"));
  out.echo = echo.value_or(false);
  MOESERVE_ASSIGN_OR_RETURN(auto special, BoolField(body, "add_special_tokens"));
  out.add_special_tokens = special.value_or(true);
  MOESERVE_ASSIGN_OR_RETURN(auto max_tokens, IntField(body, "max_tokens", 0, kMaxInt));
  if (max_tokens) out.max_tokens = static_cast<int>(*max_tokens);
  if (out.max_tokens == 0 && !out.echo) {
    return InvalidValue("max_tokens", "'max_tokens' may be 0 only together with 'echo': true");
  }
  MOESERVE_ASSIGN_OR_RETURN(auto logprobs,
                            IntField(body, "logprobs", 0, rules.limits.max_logprobs));
  if (logprobs) out.logprobs = static_cast<int>(*logprobs);
  return absl::OkStatus();
}

}  // namespace

Result<CompletionParams> ParseCompletion(const Json& body, const RequestRules& rules) {
  if (!body.is_object()) return InvalidValue("", "the body must be a JSON object");
  CompletionParams out;
  MOESERVE_RETURN_IF_ERROR(ParseSharedFields(body, rules, kOwnFields, out));
  MOESERVE_ASSIGN_OR_RETURN(out.prompts, ParsePrompts(body, rules));
  MOESERVE_RETURN_IF_ERROR(ParseCounts(body, rules, out));
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
      request.priority = params.priority;
      request.cache_salt = params.cache_salt;
      requests.push_back(std::move(request));
    }
  }
  return requests;
}

}  // namespace moeserve::server
