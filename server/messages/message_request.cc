#include "server/messages/message_request.h"

#include <absl/algorithm/container.h>

#include <algorithm>
#include <utility>

#include "base/message.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/openai/unsupported_fields.h"
#include "server/tools/tool_definitions.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

// Fields that have the same name and meaning in a chat request.
constexpr std::string_view kMessageSameFields[] = {"model",
                                                   "max_tokens",
                                                   "temperature",
                                                   "top_p",
                                                   "top_k",
                                                   "stream",
                                                   "seed",
                                                   "min_p",
                                                   "stop_token_ids",
                                                   "repetition_penalty",
                                                   "priority",
                                                   "cache_salt",
                                                   "request_id",
                                                   "service_tier",
                                                   "routing_control",
                                                   "chat_template",
                                                   "chat_template_kwargs",
                                                   "ignore_eos",
                                                   "min_tokens"};

// Fields that ParseMessageRequest() converts.
constexpr std::string_view kMessageConverted[] = {
    "messages", "system", "stop_sequences", "tools", "metadata", "tool_choice", "thinking"};

constexpr std::string_view kMessageUnsupported[] = {
    "mcp_servers", "container", "context_management", "output_format", "output_config"};

// Returns the text of a content that is a string or a list of text blocks.
Result<std::string> BlocksText(const Json& content, const std::string& where) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) {
    return InvalidValue(where, Concat("'", where, "' must be a string or a list of blocks"));
  }
  std::string text;
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string block_where = Concat(where, '[', i, ']');
    const std::string* type = FindText(content[i], "type");
    const std::string* block = FindText(content[i], "text");
    if (type == nullptr || *type != "text" || block == nullptr) {
      return UnsupportedParameter(
          block_where, Concat("'", block_where, "': only blocks of type \"text\" are supported"));
    }
    text += *block;
  }
  return text;
}

// Converts one message, which can become several: results of tools are messages of their own.
class MessageConverter {
 public:
  explicit MessageConverter(OrderedJson& out) : out_(out) {}

  absl::Status Add(const Json& message, const std::string& where) {
    const std::string* role = FindText(message, "role");
    if (role == nullptr || (*role != "user" && *role != "assistant")) {
      return InvalidValue(where + ".role", Concat("'", where, ".role' must be user or assistant"));
    }
    const Json* content = FindField(message, "content");
    if (content == nullptr) return MissingField(where + ".content");
    assistant_ = *role == "assistant";
    text_.clear();
    has_text_ = false;
    turn_ = {{"role", *role}, {"content", nullptr}};
    if (content->is_string()) {
      text_ = content->get<std::string>();
      has_text_ = true;
    } else if (content->is_array()) {
      for (size_t i = 0; i < content->size(); ++i) {
        MOESERVE_RETURN_IF_ERROR(AddBlock((*content)[i], Concat(where, ".content[", i, "]")));
      }
    } else {
      return InvalidValue(where + ".content",
                          Concat("'", where, ".content' must be a string or a list of blocks"));
    }
    if (has_text_ || assistant_) {
      if (has_text_ || !turn_.contains("tool_calls")) turn_["content"] = std::move(text_);
      out_.push_back(std::move(turn_));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status AddBlock(const Json& block, const std::string& where) {
    const std::string* type = FindText(block, "type");
    if (type == nullptr) {
      return InvalidValue(where, Concat("'", where, "' must be an object with a string 'type'"));
    }
    if (*type == "text") {
      const std::string* text = FindText(block, "text");
      if (text == nullptr) return MissingField(where + ".text");
      text_ += *text;
      has_text_ = true;
      return absl::OkStatus();
    }
    if (*type == "tool_use" && assistant_) return AddCall(block, where);
    if (*type == "tool_result" && !assistant_) return AddResult(block, where);
    if (*type == "thinking" && assistant_) {
      const std::string* text = FindText(block, "thinking");
      if (text == nullptr) return MissingField(where + ".thinking");
      turn_["reasoning_content"] = *text;
      return absl::OkStatus();
    }
    return UnsupportedParameter(
        where + ".type",
        Concat("'", where, "': blocks of type ", Quoted(*type, 64), " are not ",
               "supported in messages of the ", assistant_ ? "assistant" : "user"));
  }

  absl::Status AddCall(const Json& block, const std::string& where) {
    const std::string* id = FindText(block, "id");
    const std::string* name = FindText(block, "name");
    const Json* input = FindField(block, "input");
    if (id == nullptr || name == nullptr || input == nullptr) {
      return InvalidValue(where, Concat("'", where, "' must have 'id', 'name' and 'input'"));
    }
    turn_["tool_calls"].push_back({{"id", *id},
                                   {"type", "function"},
                                   {"function", {{"name", *name}, {"arguments", *input}}}});
    return absl::OkStatus();
  }

  absl::Status AddResult(const Json& block, const std::string& where) {
    const std::string* id = FindText(block, "tool_use_id");
    if (id == nullptr) return MissingField(where + ".tool_use_id");
    std::string text;
    if (const Json* content = FindField(block, "content")) {
      MOESERVE_ASSIGN_OR_RETURN(text, BlocksText(*content, where + ".content"));
    }
    out_.push_back({{"role", "tool"}, {"content", std::move(text)}, {"tool_call_id", *id}});
    return absl::OkStatus();
  }

  OrderedJson& out_;
  bool assistant_ = false;
  bool has_text_ = false;
  std::string text_;
  OrderedJson turn_;
};

absl::Status ConvertMessages(const Json& body, OrderedJson& chat) {
  OrderedJson messages = OrderedJson::array();
  if (const Json* system = FindField(body, "system")) {
    MOESERVE_ASSIGN_OR_RETURN(std::string text, BlocksText(*system, "system"));
    messages.push_back({{"role", "system"}, {"content", std::move(text)}});
  }
  const Json* list = FindField(body, "messages");
  if (list == nullptr) return MissingField("messages");
  if (!list->is_array() || list->empty()) {
    return InvalidValue("messages", "'messages' must be a list of at least one message");
  }
  MessageConverter converter(messages);
  for (size_t i = 0; i < list->size(); ++i) {
    MOESERVE_RETURN_IF_ERROR(converter.Add((*list)[i], Concat("messages[", i, "]")));
  }
  // A last message of the assistant is the start of the answer.
  if (messages.back()["role"] == "assistant" && !messages.back().contains("tool_calls")) {
    chat["continue_final_message"] = true;
    chat["add_generation_prompt"] = false;
  }
  chat["messages"] = std::move(messages);
  return absl::OkStatus();
}

absl::Status ConvertTools(const Json& body, std::string_view text, OrderedJson& chat) {
  const Json* tools = FindField(body, "tools");
  if (tools == nullptr) return absl::OkStatus();
  if (!tools->is_array()) return InvalidValue("tools", "'tools' must be a list");
  MOESERVE_ASSIGN_OR_RETURN(const auto part, CheckToolBytes(*tools, text));
  const OrderedJson ordered = part ? ParseOrdered(*part) : OrderedJson(*tools);
  chat["tools"] = OrderedJson::array();
  for (size_t i = 0; i < ordered.size(); ++i) {
    const OrderedJson& tool = ordered[i];
    const std::string where = Concat("tools[", i, "]");
    if (!tool.is_object()) return InvalidValue(where, Concat("'", where, "' must be an object"));
    const auto type = tool.find("type");
    if (type != tool.end() && !type->is_null() && *type != "custom") {
      return UnsupportedParameter(where + ".type", Concat("'", where,
                                                          ".type' must be custom: this server "
                                                          "has no tools of its own"));
    }
    OrderedJson function = OrderedJson::object();
    for (const auto& [from, to] : {std::pair("name", "name"),
                                   {"description", "description"},
                                   {"input_schema", "parameters"},
                                   {"strict", "strict"}}) {
      if (const auto value = tool.find(from); value != tool.end()) function[to] = *value;
    }
    chat["tools"].push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return absl::OkStatus();
}

absl::Status ConvertChoice(const Json& body, OrderedJson& chat) {
  const Json* choice = FindField(body, "tool_choice");
  if (choice == nullptr) return absl::OkStatus();
  const std::string* type = FindText(*choice, "type");
  if (type == nullptr) return InvalidValue("tool_choice", "'tool_choice' must have a 'type'");
  if (*type == "auto" || *type == "none") {
    chat["tool_choice"] = *type;
  } else if (*type == "any") {
    chat["tool_choice"] = "required";
  } else if (*type == "tool") {
    const std::string* name = FindText(*choice, "name");
    if (name == nullptr) return MissingField("tool_choice.name");
    chat["tool_choice"] = {{"type", "function"}, {"function", {{"name", *name}}}};
  } else {
    return InvalidValue("tool_choice.type", "'tool_choice.type' must be auto, any, tool or none");
  }
  if (const Json* one = FindField(*choice, "disable_parallel_tool_use")) {
    if (!one->is_boolean()) {
      return InvalidValue("tool_choice.disable_parallel_tool_use",
                          "'tool_choice.disable_parallel_tool_use' must be a boolean");
    }
    chat["parallel_tool_calls"] = !one->get<bool>();
  }
  return absl::OkStatus();
}

absl::Status ConvertOptions(const Json& body, bool strict_fields, MessageRequest& out) {
  if (const Json* stop = FindField(body, "stop_sequences")) out.chat["stop"] = *stop;
  if (const Json* thinking = FindField(body, "thinking")) {
    const std::string* type = FindText(*thinking, "type");
    if (type == nullptr) return InvalidValue("thinking", "'thinking' must have a 'type'");
    // A model reasons as its chat template says.
    if (*type == "disabled") {
      out.chat["include_reasoning"] = false;
    } else if (*type != "enabled" && *type != "adaptive") {
      return InvalidValue("thinking.type", "'thinking.type' must be enabled, adaptive or disabled");
    }
    // Clients must send a budget, so it is refused only where unknown fields are refused.
    if (FindField(*thinking, "budget_tokens") != nullptr) {
      if (strict_fields) return UnsupportedParameter("thinking.budget_tokens");
      ++out.ignored_fields;
    }
  }
  return absl::OkStatus();
}

absl::Status CheckMessageFields(const Json& body, bool strict_fields, int& ignored) {
  for (const auto& [name, value] : body.items()) {
    if (absl::c_linear_search(kMessageSameFields, name) ||
        absl::c_linear_search(kMessageConverted, name) || value.is_null()) {
      continue;
    }
    if (absl::c_linear_search(kMessageUnsupported, name) || IsKnownUnsupportedField(name)) {
      return UnsupportedParameter(name);
    }
    if (strict_fields) {
      const std::string shown = Printable(name, 64);
      return InvalidValue(shown, Concat("unknown field '", shown, "'"));
    }
    ++ignored;
  }
  return absl::OkStatus();
}

}  // namespace

Result<MessageRequest> ParseMessageRequest(const Json& body, std::string_view text,
                                           bool counts_only, bool strict_fields) {
  MessageRequest out;
  MOESERVE_RETURN_IF_ERROR(CheckMessageFields(body, strict_fields, out.ignored_fields));
  for (const auto& [name, value] : body.items()) {
    if (absl::c_linear_search(kMessageSameFields, name)) out.chat[name] = value;
  }
  if (!counts_only && FindField(body, "max_tokens") == nullptr) return MissingField("max_tokens");
  MOESERVE_RETURN_IF_ERROR(ConvertMessages(body, out.chat));
  MOESERVE_RETURN_IF_ERROR(ConvertTools(body, text, out.chat));
  MOESERVE_RETURN_IF_ERROR(ConvertChoice(body, out.chat));
  MOESERVE_RETURN_IF_ERROR(ConvertOptions(body, strict_fields, out));
  return out;
}

std::string MessageParam(std::string_view chat_param) {
  // The numbers of messages differ, because results of tools are messages of the chat.
  if (chat_param.starts_with("messages")) return "messages";
  if (chat_param == "stop") return "stop_sequences";
  return std::string(chat_param);
}

}  // namespace moeserve::server
