#include "server/chat/chat_conversation.h"

#include <algorithm>
#include <utility>

#include "base/message.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kFields[] = {
    "messages",           "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "chat_template",         "chat_template_kwargs"};

constexpr std::string_view kMessageFields[] = {"role", "content", "name"};
// Message fields that are accepted only with a value that means nothing, such as null.
constexpr std::string_view kUnsupportedMessageFields[] = {"tool_calls", "function_call", "audio",
                                                          "refusal", "tool_call_id"};

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

template <size_t kCount>
bool Contains(const std::string_view (&names)[kCount], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

class MessageParser {
 public:
  MessageParser(const ConversationRules& rules, size_t index)
      : rules_(rules), where_(Concat("messages[", index, "]")) {}

  // Returns one message in the form that chat templates receive.
  Result<nlohmann::ordered_json> Parse(const Json& message, int& ignored_fields) {
    if (!message.is_object()) {
      return InvalidValue(where_, Concat("'", where_, "' must be an object"));
    }
    nlohmann::ordered_json out;
    MOESERVE_ASSIGN_OR_RETURN(out["role"], Role(message));
    MOESERVE_ASSIGN_OR_RETURN(std::string content, Content(message, out["role"] == "assistant"));
    size_t bytes = content.size();
    out["content"] = std::move(content);
    if (const Json* name = FindField(message, "name")) {
      if (!name->is_string()) {
        return InvalidValue(At("name"), Concat("'", At("name"), "' must be a string"));
      }
      out["name"] = name->get<std::string>();
      bytes += name->get_ref<const std::string&>().size();
    }
    if (bytes > rules_.limits.max_message_bytes) {
      return InvalidValue(where_, Concat("'", where_, "': a message has at most ",
                                         rules_.limits.max_message_bytes, " bytes, found ", bytes));
    }
    MOESERVE_RETURN_IF_ERROR(CheckOthers(message, ignored_fields));
    return out;
  }

 private:
  std::string At(std::string_view field) const { return Concat(where_, '.', field); }

  Result<std::string> Role(const Json& message) const {
    const Json* role = FindField(message, "role");
    if (role == nullptr) return MissingField(At("role"));
    if (role->is_string()) {
      const auto& name = role->get_ref<const std::string&>();
      if (name == "system" || name == "developer" || name == "user" || name == "assistant") {
        return name;
      }
      if (name == "tool" || name == "function") {
        return MakeError(absl::StatusCode::kInvalidArgument, "unsupported_parameter",
                         Concat("'", At("role"), "': ", name, " messages are not supported"),
                         At("role"));
      }
    }
    return InvalidValue(At("role"),
                        Concat("'", At("role"), "' must be system, developer, user or assistant"));
  }

  Result<std::string> Content(const Json& message, bool optional) const {
    const std::string where = At("content");
    const Json* content = FindField(message, "content");
    if (content == nullptr) {
      if (optional) return std::string();
      if (!message.contains("content")) return MissingField(where);
      return InvalidValue(where, Concat("'", where, "' may be null in assistant messages only"));
    }
    if (content->is_string()) return content->get<std::string>();
    if (!content->is_array()) {
      return InvalidValue(where, Concat("'", where, "' must be a string or a list of text parts"));
    }
    std::string text;
    for (size_t i = 0; i < content->size(); ++i) {
      const Json& part = (*content)[i];
      const std::string part_where = Concat(where, '[', i, ']');
      const Json* type = part.is_object() ? FindField(part, "type") : nullptr;
      const Json* part_text = part.is_object() ? FindField(part, "text") : nullptr;
      if (type == nullptr || !type->is_string()) {
        return InvalidValue(
            part_where, Concat("'", part_where, "' must be {\"type\": \"text\", \"text\": ...}"));
      }
      if (*type != "text") {
        return MakeError(absl::StatusCode::kInvalidArgument, "unsupported_parameter",
                         Concat("'", part_where, "': parts of type ",
                                Quoted(type->get_ref<const std::string&>(), 64),
                                " are not supported, only \"text\""),
                         part_where);
      }
      if (part_text == nullptr || !part_text->is_string()) {
        return InvalidValue(part_where, Concat("'", part_where, "': 'text' must be a string"));
      }
      text += part_text->get_ref<const std::string&>();
    }
    return text;
  }

  absl::Status CheckOthers(const Json& message, int& ignored_fields) const {
    for (const auto& [name, value] : message.items()) {
      if (Contains(kMessageFields, name)) continue;
      if (Contains(kUnsupportedMessageFields, name)) {
        if (value.is_null() || (value.is_array() && value.empty())) continue;
        return UnsupportedParameter(At(name));
      }
      if (rules_.strict_fields) {
        const std::string shown = At(Printable(name, 64));
        return InvalidValue(shown, Concat("unknown field '", shown, "'"));
      }
      ++ignored_fields;
    }
    return absl::OkStatus();
  }

  const ConversationRules& rules_;
  const std::string where_;
};

absl::Status ParseMessages(const Json& body, const ConversationRules& rules, Conversation& out) {
  const Json* messages = FindField(body, "messages");
  if (messages == nullptr) return MissingField("messages");
  if (!messages->is_array() || messages->empty()) {
    return InvalidValue("messages", "'messages' must be a list of at least one message");
  }
  if (messages->size() > rules.limits.max_messages) {
    return InvalidValue("messages", Concat("at most ", rules.limits.max_messages,
                                           " messages are accepted, found ", messages->size()));
  }
  for (size_t i = 0; i < messages->size(); ++i) {
    MOESERVE_ASSIGN_OR_RETURN(auto message,
                              MessageParser(rules, i).Parse((*messages)[i], out.ignored_fields));
    out.messages.push_back(std::move(message));
  }
  return absl::OkStatus();
}

absl::Status NotAllowed(std::string_view field) {
  return MakeError(absl::StatusCode::kInvalidArgument, "unsupported_parameter",
                   Concat("'", field,
                          "' is not accepted by this server; its operator may allow it "
                          "with --allow-request-chat-template"),
                   field);
}

absl::Status ParseTemplate(const Json& body, const ConversationRules& rules, Conversation& out) {
  MOESERVE_ASSIGN_OR_RETURN(out.chat_template, StringField(body, "chat_template"));
  if (out.chat_template && !rules.allow_template) return NotAllowed("chat_template");
  const Json* variables = FindField(body, "chat_template_kwargs");
  if (variables == nullptr) return absl::OkStatus();
  if (!variables->is_object()) {
    return InvalidValue("chat_template_kwargs", "'chat_template_kwargs' must be an object");
  }
  if (!variables->empty() && !rules.allow_template) return NotAllowed("chat_template_kwargs");
  if (variables->size() > rules.limits.max_template_variables) {
    return InvalidValue("chat_template_kwargs", Concat("'chat_template_kwargs' has at most ",
                                                       rules.limits.max_template_variables,
                                                       " entries, found ", variables->size()));
  }
  for (const auto& [name, value] : variables->items()) {
    if (Contains(kReservedVariables, name)) {
      return InvalidValue("chat_template_kwargs", Concat("'chat_template_kwargs' must not set '",
                                                         name, "', which the server sets"));
    }
    out.template_variables[name] = value;
  }
  return absl::OkStatus();
}

}  // namespace

std::span<const std::string_view> ConversationFields() { return kFields; }

Result<Conversation> ParseConversation(const Json& body, const ConversationRules& rules) {
  Conversation out;
  MOESERVE_RETURN_IF_ERROR(ParseMessages(body, rules, out));
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
  MOESERVE_RETURN_IF_ERROR(ParseTemplate(body, rules, out));
  return out;
}

}  // namespace moeserve::server
