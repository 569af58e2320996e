#include "server/chat/chat_conversation.h"

#include <absl/algorithm/container.h>

#include <algorithm>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/base/json_text.h"
#include "server/chat/chat_message.h"

namespace moeserve::server {
namespace {

constexpr std::string_view kFields[] = {
    "messages",      "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "chat_template_kwargs",  "reasoning_effort"};

constexpr std::string_view kEfforts[] = {"none", "minimal", "low", "medium", "high", "xhigh"};

// Template variables that requests must not set, because the server or the template language
// defines them.
constexpr std::string_view kReservedVariables[] = {"messages",
                                                   "tokenize",
                                                   "add_generation_prompt",
                                                   "continue_final_message",
                                                   "chat_template",
                                                   "tools",
                                                   "documents",
                                                   "conversation",
                                                   "bos_token",
                                                   "eos_token",
                                                   "pad_token",
                                                   "unk_token",
                                                   "raise_exception",
                                                   "strftime_now",
                                                   "namespace",
                                                   "range",
                                                   "dict",
                                                   "lipsum",
                                                   "cycler",
                                                   "joiner",
                                                   "loop",
                                                   "self",
                                                   "caller",
                                                   "varargs",
                                                   "kwargs",
                                                   "true",
                                                   "false",
                                                   "none",
                                                   "True",
                                                   "False",
                                                   "None"};

absl::Status ParseMessages(const Json& body, std::string_view text, const ConversationRules& rules,
                           Conversation& out) {
  const Json* messages = FindField(body, "messages");
  if (messages == nullptr) return MissingField("messages");
  if (!messages->is_array() || messages->empty()) {
    return InvalidValue("messages", "'messages' must be a list of at least one message");
  }
  if (messages->size() > rules.limits.max_messages) {
    return InvalidValue("messages", Concat("at most ", rules.limits.max_messages,
                                           " messages are accepted, found ", messages->size()));
  }
  MessageTotals totals;
  totals.texts = ElementTexts(MemberText(text, "messages").value_or(""));
  for (size_t i = 0; i < messages->size(); ++i) {
    MOESERVE_ASSIGN_OR_RETURN(auto message, ParseMessage((*messages)[i], i, rules, totals));
    out.messages.push_back(std::move(message));
  }
  out.ignored_fields = totals.ignored_fields;
  out.argument_texts = std::move(totals.argument_texts);
  return absl::OkStatus();
}

absl::Status ParseTemplate(const Json& body, std::string_view text, const ConversationRules& rules,
                           Conversation& out) {
  MOESERVE_ASSIGN_OR_RETURN(out.chat_template, StringField(body, "chat_template"));
  if (out.chat_template && !rules.allow_template) {
    return UnsupportedParameter("chat_template",
                                "'chat_template' is not accepted by this server; its operator may "
                                "allow it with --allow-request-chat-template");
  }
  const Json* variables = FindField(body, "chat_template_kwargs");
  if (variables == nullptr) return absl::OkStatus();
  if (!variables->is_object()) {
    return InvalidValue("chat_template_kwargs", "'chat_template_kwargs' must be an object");
  }
  if (variables->size() > rules.limits.max_template_variables) {
    return InvalidValue("chat_template_kwargs", Concat("'chat_template_kwargs' has at most ",
                                                       rules.limits.max_template_variables,
                                                       " entries, found ", variables->size()));
  }
  const auto source = MemberText(text, "chat_template_kwargs");
  OrderedJson ordered = source ? ParseOrdered(*source) : OrderedJson(*variables);
  for (auto& [name, value] : ordered.get_ref<OrderedJson::object_t&>()) {
    if (absl::c_linear_search(kReservedVariables, name)) {
      return InvalidValue("chat_template_kwargs", Concat("'chat_template_kwargs' must not set '",
                                                         name, "', which the server sets"));
    }
    out.template_variables[name] = std::move(value);
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<std::string_view> ConversationFields() {
  std::vector<std::string_view> fields(std::begin(kFields), std::end(kFields));
  const std::vector<std::string_view> tools = ToolFields();
  fields.insert(fields.end(), tools.begin(), tools.end());
  return fields;
}

Result<Conversation> ParseConversation(const Json& body, std::string_view text,
                                       const ConversationRules& rules) {
  Conversation out;
  MOESERVE_RETURN_IF_ERROR(ParseMessages(body, text, rules, out));
  MOESERVE_ASSIGN_OR_RETURN(out.tools, ParseTools(body, text));
  MOESERVE_ASSIGN_OR_RETURN(auto proceed, BoolField(body, "continue_final_message"));
  out.continue_final_message = proceed.value_or(false);
  MOESERVE_ASSIGN_OR_RETURN(auto prompt, BoolField(body, "add_generation_prompt"));
  out.add_generation_prompt = prompt.value_or(true);
  if (out.continue_final_message && out.add_generation_prompt) {
    return InvalidValue("continue_final_message",
                        "'continue_final_message' needs 'add_generation_prompt': false");
  }
  MOESERVE_ASSIGN_OR_RETURN(auto special, BoolField(body, "add_special_tokens"));
  out.add_special_tokens = special.value_or(false);
  MOESERVE_ASSIGN_OR_RETURN(out.reasoning_effort, StringField(body, "reasoning_effort"));
  if (out.reasoning_effort && !absl::c_linear_search(kEfforts, *out.reasoning_effort)) {
    return InvalidValue("reasoning_effort",
                        Concat("'reasoning_effort' must be none, minimal, low, medium, high or "
                               "xhigh, found ",
                               Quoted(*out.reasoning_effort, 64)));
  }
  MOESERVE_RETURN_IF_ERROR(ParseTemplate(body, text, rules, out));
  return out;
}

}  // namespace moeserve::server
