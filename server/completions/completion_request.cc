#include "server/completions/completion_request.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/fields/beam_fields.h"
#include "server/fields/shared_fields.h"

namespace moeserve::server {
namespace {

constexpr int64_t kMaxTokenCount = std::numeric_limits<int32_t>::max();

Result<PromptInput> TextPrompt(const Json& value, const RequestLimits& limits) {
  PromptInput prompt;
  prompt.is_text = true;
  prompt.text = value.get<std::string>();
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

// Parses `prompt`: a string, a list of strings, a list of token ids, or a list of lists of token
// ids.
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
    MOESERVE_ASSIGN_OR_RETURN(PromptInput prompt, IdPrompt(*field, rules.prompt_vocab_size()));
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
        texts ? TextPrompt(item, rules.limits) : IdPrompt(item, rules.prompt_vocab_size());
    if (!prompt.ok()) return prompt.status();
    prompts.push_back(*std::move(prompt));
  }
  return prompts;
}

// Parses `decoder_prompt`: a string or a list of token ids, which may be empty.
Result<std::optional<PromptInput>> ParseDecoderPrompt(const Json& body, const RequestRules& rules) {
  constexpr char kField[] = "decoder_prompt";
  const Json* field = FindField(body, kField);
  if (field == nullptr) return std::nullopt;
  PromptInput prompt;
  prompt.is_text = field->is_string();
  if (prompt.is_text) {
    prompt.text = field->get<std::string>();
    if (prompt.text.size() > rules.limits.max_prompt_bytes) {
      return InvalidValue(kField,
                          Concat("'", kField, "': at most ", rules.limits.max_prompt_bytes,
                                 " bytes of text are accepted, found ", prompt.text.size()));
    }
  } else {
    MOESERVE_ASSIGN_OR_RETURN(prompt.ids, TokenIdList(*field, kField, rules.vocab_size));
  }
  return prompt;
}

// Reads best_of: so many samples of each prompt are generated, and the best n of them returned.
absl::Status ParseBestOf(const Json& body, const RequestRules& rules, CompletionParams& out) {
  MOESERVE_ASSIGN_OR_RETURN(auto best_of, IntField(body, "best_of", out.n, rules.limits.max_n));
  if (!best_of || *best_of == out.n) return absl::OkStatus();
  if (out.stream) return InvalidValue("best_of", "'best_of' above 'n' cannot be streamed");
  out.best = std::exchange(out.n, static_cast<int>(*best_of));
  return absl::OkStatus();
}

absl::Status ParseCounts(const Json& body, const RequestRules& rules, CompletionParams& out) {
  MOESERVE_RETURN_IF_ERROR(ParseBestOf(body, rules, out));
  const int64_t choices = static_cast<int64_t>(out.prompts.size()) * out.n;
  if (choices > rules.limits.max_choices) {
    const char* const field = out.best > 0 ? "best_of" : "n";
    return InvalidValue(field, Concat("prompts times '", field, "' is at most ",
                                      rules.limits.max_choices, ", found ", choices));
  }
  MOESERVE_ASSIGN_OR_RETURN(auto echo, BoolField(body, "echo"));
  out.echo = echo.value_or(false);
  MOESERVE_ASSIGN_OR_RETURN(auto special, BoolField(body, "add_special_tokens"));
  out.add_special_tokens = special.value_or(true);
  // The newer name is that of chats, and counts if both are there.
  for (const char* name : {"max_tokens", "max_completion_tokens"}) {
    MOESERVE_ASSIGN_OR_RETURN(auto max_tokens, IntField(body, name, 0, kMaxTokenCount));
    if (!max_tokens) continue;
    out.max_tokens = static_cast<int>(*max_tokens);
    if (out.max_tokens == 0 && !out.echo) {
      return InvalidValue(name, Concat("'", name, "' may be 0 only together with 'echo': true"));
    }
  }
  MOESERVE_ASSIGN_OR_RETURN(auto logprobs,
                            IntField(body, "logprobs", 0, rules.limits.max_logprobs));
  if (logprobs) out.logprobs = static_cast<int>(*logprobs);
  return ParsePromptLogprobs(body, rules, out);
}

}  // namespace

Result<CompletionParams> ParseCompletion(const Json& body, const RequestRules& rules,
                                         std::string_view text) {
  if (!body.is_object()) return InvalidValue("", "the body must be a JSON object");
  CompletionParams out;
  MOESERVE_RETURN_IF_ERROR(ParseSharedFields(body, rules, FieldRoute::kCompletions, out, text));
  MOESERVE_ASSIGN_OR_RETURN(out.prompts, ParsePrompts(body, rules));
  MOESERVE_ASSIGN_OR_RETURN(out.decoder_prompt, ParseDecoderPrompt(body, rules));
  MOESERVE_ASSIGN_OR_RETURN(auto forced,
                            IntField(body, "forced_bos_token_id", 0, rules.vocab_size - 1));
  if (forced) out.forced_bos_token_id = static_cast<TokenId>(*forced);
  MOESERVE_ASSIGN_OR_RETURN(auto language, StringField(body, "target_language"));
  out.target_language = language.value_or("");
  MOESERVE_RETURN_IF_ERROR(ParseCounts(body, rules, out));
  MOESERVE_RETURN_IF_ERROR(ParseBeamFields(body, rules, out));
  return out;
}

}  // namespace moeserve::server
