#include "server/chat/chat_request.h"

#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/fields/beam_fields.h"
#include "server/fields/shared_fields.h"
#include "server/tools/tool_constraint.h"

namespace moeserve::server {
namespace {

constexpr int kMaxInt = std::numeric_limits<int32_t>::max();

absl::Status ParseLimits(const Json& body, ChatParams& out) {
  out.default_max_tokens = kMaxInt;  // FitIntoContext() reduces it
  for (const char* name : {"max_tokens", "max_completion_tokens"}) {
    MOESERVE_ASSIGN_OR_RETURN(auto max_tokens, IntField(body, name, 1, kMaxInt));
    if (max_tokens) out.max_tokens = static_cast<int>(*max_tokens);
  }
  return absl::OkStatus();
}

absl::Status ParseLogprobs(const Json& body, const RequestRules& rules, ChatParams& out) {
  MOESERVE_ASSIGN_OR_RETURN(auto logprobs, BoolField(body, "logprobs"));
  MOESERVE_ASSIGN_OR_RETURN(auto top, IntField(body, "top_logprobs", 0, rules.limits.max_logprobs));
  if (logprobs.value_or(false)) {
    out.logprobs = static_cast<int>(top.value_or(0));
  } else if (top.value_or(0) > 0) {
    return InvalidValue("top_logprobs", "'top_logprobs' needs 'logprobs': true");
  }
  return ParsePromptLogprobs(body, rules, out);
}

// Makes the constraint describe the whole answer as it is going to be split: the client's format
// applies to the content, and calls are valid.
absl::Status ConstrainAnswer(ChatParams& params) {
  const SplitRules& split = params.split;
  // An answer that continues a message has only content.
  const bool continues = params.conversation.continue_final_message;
  const bool has_parts = split.needed() && !continues;
  if (!split.has_tools && !(params.constraint && has_parts)) return absl::OkStatus();
  std::optional<ConstraintSpec> text;
  if (params.constraint) text = std::move(params.constraint->spec);
  ToolSettings tools = params.conversation.tools;
  tools.parallel = tools.parallel && !split.single_call;
  ConstraintSpec spec = AnswerConstraint(tools, split, text);
  if (split.has_tools) {
    params.constraint = ConstraintField{.spec = {}, .param = "tools", .relaxes_schemas = true};
  }
  params.constraint->spec = std::move(spec);
  return CheckConstraint(params);
}

}  // namespace

Result<ChatParams> ParseChat(const Json& body, std::string_view text, const RequestRules& rules,
                             bool allow_request_template) {
  if (!body.is_object()) return InvalidValue("", "the body must be a JSON object");
  ChatParams out;
  out.prompt_field = "messages";
  MOESERVE_RETURN_IF_ERROR(ParseSharedFields(body, rules, FieldRoute::kChat, out, text));
  MOESERVE_RETURN_IF_ERROR(ParseLimits(body, out));
  MOESERVE_RETURN_IF_ERROR(ParseLogprobs(body, rules, out));
  MOESERVE_RETURN_IF_ERROR(ParseBeamFields(body, rules, out));
  const ConversationRules conversation_rules = {.limits = rules.limits,
                                                .allow_template = allow_request_template,
                                                .strict_fields = rules.strict_fields};
  MOESERVE_ASSIGN_OR_RETURN(out.conversation, ParseConversation(body, text, conversation_rules));
  out.add_special_tokens = out.conversation.add_special_tokens;
  out.ignored_fields += out.conversation.ignored_fields;
  MOESERVE_ASSIGN_OR_RETURN(const auto reasoning, BoolField(body, "include_reasoning"));
  out.include_reasoning = reasoning.value_or(true);
  return out;
}

Result<PreparedPrompt> PrepareChat(ChatParams& params, const ChatFormat& format,
                                   const Tokenizer* tokenizer, const RequestLimits& limits,
                                   int max_model_len, std::time_t now,
                                   std::string_view context_reason) {
  if (tokenizer == nullptr) {
    return InvalidValue("messages", "this model has no tokenizer: use /v1/completions with ids");
  }
  PreparedPrompt prompt;
  MOESERVE_ASSIGN_OR_RETURN(ChatPrompt encoded,
                            format.Encode(params.conversation, *tokenizer, limits, now));
  prompt.ids = std::move(encoded.ids);
  if (std::string warning = format.EffortWarning(params.conversation); !warning.empty()) {
    params.warnings.push_back(std::move(warning));
  }
  params.split = encoded.split;
  // The tokens that separate channels are special.
  if (params.split.syntax->has_channels) params.sampling.skip_special_tokens = false;
  MOESERVE_RETURN_IF_ERROR(ConstrainAnswer(params));
  TruncatePrompt(params, max_model_len, prompt.ids);
  MOESERVE_ASSIGN_OR_RETURN(
      prompt.max_tokens, FitIntoContext(params, prompt.ids.size(), max_model_len, context_reason));
  return prompt;
}

}  // namespace moeserve::server
