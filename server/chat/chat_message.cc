#include "server/chat/chat_message.h"

#include <absl/algorithm/container.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "base/error_text.h"
#include "base/strict_json.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/base/json_text.h"

namespace moeserve::server {
namespace {

constexpr std::string_view kMessageFields[] = {"role",       "content",          "name",
                                               "tool_calls", "tool_call_id",     "reasoning",
                                               "thinking",   "reasoning_content"};
// The names that servers give the reasoning of the model.
constexpr const char* kReasoningFields[] = {"reasoning_content", "reasoning", "thinking"};
// Message fields that are accepted only with a value that means nothing, such as null. Clients send
// back what the server has sent, such as a refusal of null.
constexpr std::string_view kUnsupportedMessageFields[] = {"function_call", "audio", "refusal"};

class MessageParser {
 public:
  MessageParser(const ConversationRules& rules, size_t index, MessageTotals& totals)
      : rules_(rules),
        where_(Concat("messages[", index, "]")),
        text_(index < totals.texts.size() ? totals.texts[index] : std::string_view()),
        totals_(totals) {}

  Result<OrderedJson> Parse(const Json& message) {
    if (!message.is_object()) {
      return InvalidValue(where_, Concat("'", where_, "' must be an object"));
    }
    OrderedJson out;
    MOESERVE_ASSIGN_OR_RETURN(const std::string role, Role(message));
    out["role"] = role;
    MOESERVE_ASSIGN_OR_RETURN(OrderedJson calls, Calls(message, role));
    MOESERVE_ASSIGN_OR_RETURN(std::string content, Content(message, role == "assistant"));
    bytes_ += content.size();
    out["content"] = std::move(content);
    MOESERVE_RETURN_IF_ERROR(CopyText(message, "name", out));
    MOESERVE_RETURN_IF_ERROR(Reasoning(message, role, out));
    if (!calls.empty()) out["tool_calls"] = std::move(calls);
    MOESERVE_RETURN_IF_ERROR(CallId(message, role, out));
    if (bytes_ > rules_.limits.max_message_bytes) {
      return InvalidValue(
          where_, Concat("'", where_, "': a message has at most ", rules_.limits.max_message_bytes,
                         " bytes, found ", bytes_));
    }
    MOESERVE_RETURN_IF_ERROR(CheckOthers(message));
    return out;
  }

 private:
  std::string At(std::string_view field) const { return Concat(where_, '.', field); }

  absl::Status NotText(const std::string& where) const {
    return InvalidValue(where, Concat("'", where, "' must be a string"));
  }

  Result<std::string> Role(const Json& message) const {
    const Json* role = FindField(message, "role");
    if (role == nullptr) return MissingField(At("role"));
    if (role->is_string()) {
      const auto& name = role->get_ref<const std::string&>();
      if (name == "system" || name == "developer" || name == "user" || name == "assistant" ||
          name == "tool") {
        return name;
      }
      if (name == "function") {
        return MakeError(absl::StatusCode::kInvalidArgument, "unsupported_parameter",
                         Concat("'", At("role"),
                                "': function messages are not supported; results "
                                "of tools have the role tool"),
                         At("role"));
      }
    }
    return InvalidValue(At("role"), Concat("'", At("role"),
                                           "' must be system, developer, user, assistant or tool"));
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

  // Copies a field that is a string, if the message has it.
  absl::Status CopyText(const Json& message, const char* field, OrderedJson& out) {
    const Json* value = FindField(message, field);
    if (value == nullptr) return absl::OkStatus();
    if (!value->is_string()) return NotText(At(field));
    bytes_ += value->get_ref<const std::string&>().size();
    out[field] = value->get<std::string>();
    return absl::OkStatus();
  }

  absl::Status Reasoning(const Json& message, std::string_view role, OrderedJson& out) {
    for (const char* field : kReasoningFields) {
      const Json* value = FindField(message, field);
      if (value == nullptr) continue;
      if (!value->is_string()) return NotText(At(field));
      if (value->get_ref<const std::string&>().empty()) continue;
      if (role != "assistant") {
        return InvalidValue(At(field),
                            Concat("'", At(field), "' is a field of assistant messages only"));
      }
      if (out.contains("reasoning_content")) continue;
      bytes_ += value->get_ref<const std::string&>().size();
      out["reasoning_content"] = value->get<std::string>();
    }
    return absl::OkStatus();
  }

  absl::Status CallId(const Json& message, std::string_view role, OrderedJson& out) {
    const std::string where = At("tool_call_id");
    if (role == "tool") {
      if (FindField(message, "tool_call_id") == nullptr) return MissingField(where);
      return CopyText(message, "tool_call_id", out);
    }
    if (FindField(message, "tool_call_id") == nullptr) return absl::OkStatus();
    return InvalidValue(where, Concat("'", where, "' is a field of tool messages only"));
  }

  Result<OrderedJson> Calls(const Json& message, std::string_view role) {
    OrderedJson out = OrderedJson::array();
    const Json* calls = FindField(message, "tool_calls");
    if (calls == nullptr) return out;
    const std::string where = At("tool_calls");
    if (!calls->is_array()) return InvalidValue(where, Concat("'", where, "' must be a list"));
    if (calls->empty()) return out;
    if (role != "assistant") {
      return InvalidValue(where, Concat("'", where, "' is a field of assistant messages only"));
    }
    if (calls->size() > kMaxTools) {
      return InvalidValue(where, Concat("'", where, "': at most ", kMaxTools,
                                        " calls are accepted, found ", calls->size()));
    }
    const std::vector<std::string_view> texts =
        ElementTexts(MemberText(text_, "tool_calls").value_or(""));
    for (size_t i = 0; i < calls->size(); ++i) {
      MOESERVE_ASSIGN_OR_RETURN(OrderedJson call,
                                Call((*calls)[i], i < texts.size() ? texts[i] : std::string_view(),
                                     Concat(where, '[', i, ']')));
      out.push_back(std::move(call));
    }
    return out;
  }

  // `text` is the JSON of the call; empty if it is not known.
  Result<OrderedJson> Call(const Json& call, std::string_view text, const std::string& where) {
    const Json* function = call.is_object() ? FindField(call, "function") : nullptr;
    if (function == nullptr || !function->is_object()) {
      return InvalidValue(where, Concat("'", where,
                                        "' must be {\"id\": ..., \"type\": \"function\", "
                                        "\"function\": {\"name\": ..., \"arguments\": ...}}"));
    }
    const Json* type = FindField(call, "type");
    if (type != nullptr && *type != "function") {
      return InvalidValue(where + ".type", Concat("'", where, ".type' must be function"));
    }
    OrderedJson out;
    if (const Json* id = FindField(call, "id")) {
      if (!id->is_string()) return NotText(where + ".id");
      bytes_ += id->get_ref<const std::string&>().size();
      out["id"] = id->get<std::string>();
    }
    out["type"] = "function";
    const Json* name = FindField(*function, "name");
    const std::string inner = where + ".function";
    if (name == nullptr) return MissingField(inner + ".name");
    if (!name->is_string() || !IsToolName(name->get_ref<const std::string&>())) {
      return InvalidValue(inner + ".name", Concat("'", inner, ".name' must be a tool's name"));
    }
    out["function"]["name"] = name->get<std::string>();
    const std::string_view function_text = MemberText(text, "function").value_or("");
    MOESERVE_ASSIGN_OR_RETURN(
        out["function"]["arguments"],
        Arguments(*function, MemberText(function_text, "arguments"), inner + ".arguments"));
    return out;
  }

  // Returns the arguments as an object. Clients send them as the text of the JSON, some as JSON, of
  // which `source` is the text, if it is known.
  Result<OrderedJson> Arguments(const Json& function, std::optional<std::string_view> source,
                                const std::string& where) {
    const Json* arguments = FindField(function, "arguments");
    std::string text;
    if (arguments == nullptr) {
      text = "{}";
    } else if (arguments->is_string()) {
      text = arguments->get<std::string>();
      if (text.empty()) text = "{}";
    } else if (arguments->is_object()) {
      text = source ? std::string(*source) : arguments->dump();
    } else {
      return NotText(where);
    }
    bytes_ += text.size();
    JsonLimits limits;
    limits.max_bytes = rules_.limits.max_message_bytes;
    limits.max_depth = rules_.limits.json_depth;
    const TakeMemory take_memory = [&](size_t bytes) {
      totals_.argument_memory += bytes;
      return totals_.argument_memory <= kMaxArgumentMemory;
    };
    const auto checked = ParseStrictJson(text, limits, take_memory);
    if (totals_.argument_memory > kMaxArgumentMemory) {
      return InvalidValue(where, Concat("'", where,
                                        "': the arguments of all calls together take "
                                        "more than ",
                                        kMaxArgumentMemory >> 20, " MiB of memory"));
    }
    if (!checked.ok() || !checked->is_object()) {
      return InvalidValue(where, Concat("'", where, "' must be the text of a JSON object"));
    }
    OrderedJson parsed = ParseOrdered(text);
    totals_.argument_texts.push_back(std::move(text));
    return parsed.is_object() ? std::move(parsed) : OrderedJson(*checked);
  }

  absl::Status CheckOthers(const Json& message) {
    for (const auto& [name, value] : message.items()) {
      if (absl::c_linear_search(kMessageFields, name)) continue;
      if (absl::c_linear_search(kUnsupportedMessageFields, name)) {
        if (value.is_null() || (value.is_array() && value.empty())) continue;
        return UnsupportedParameter(At(name));
      }
      if (rules_.strict_fields) {
        const std::string shown = At(Printable(name, 64));
        return InvalidValue(shown, Concat("unknown field '", shown, "'"));
      }
      ++totals_.ignored_fields;
    }
    return absl::OkStatus();
  }

  const ConversationRules& rules_;
  const std::string where_;
  const std::string_view text_;  // of the message
  MessageTotals& totals_;
  size_t bytes_ = 0;  // of the texts read so far
};

}  // namespace

Result<OrderedJson> ParseMessage(const Json& message, size_t index, const ConversationRules& rules,
                                 MessageTotals& totals) {
  return MessageParser(rules, index, totals).Parse(message);
}

}  // namespace moeserve::server
