#include "server/anthropic/message_request.h"

#include <absl/algorithm/container.h>

#include <algorithm>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/base/json_text.h"
#include "server/fields/request_fields.h"
#include "server/tools/tool_definitions.h"

namespace moeserve::server {
namespace {

// Fields that ParseMessageRequest() converts. The others that this API obeys have the same name and
// meaning in a chat request.
constexpr std::string_view kMessageConverted[] = {
    "messages",      "system",        "stop_sequences",    "tools", "tool_choice", "thinking",
    "output_config", "output_format", "context_management"};

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
    if (type == nullptr) {
      return InvalidValue(block_where,
                          Concat("'", block_where, "' must be an object with a string 'type'"));
    }
    if (*type != "text") {
      return UnsupportedParameter(block_where,
                                  Concat("'", block_where, "': blocks of type ", Quoted(*type, 64),
                                         " are not supported here, only \"text\""));
    }
    if (block == nullptr) return MissingField(block_where + ".text");
    text += *block;
  }
  return text;
}

// Converts one message, which can become several: results of tools are messages of their own.
class MessageConverter {
 public:
  explicit MessageConverter(OrderedJson& out) : out_(out) {}

  // `text` is the JSON of the message; empty if it is not known.
  absl::Status Add(const Json& message, std::string_view text, const std::string& where) {
    const std::string* role = FindText(message, "role");
    if (role == nullptr || (*role != "user" && *role != "assistant" && *role != "system")) {
      return InvalidValue(where + ".role",
                          Concat("'", where, ".role' must be user, assistant or system"));
    }
    const Json* content = FindField(message, "content");
    if (content == nullptr) return MissingField(where + ".content");
    if (*role == "system") {
      MOESERVE_ASSIGN_OR_RETURN(std::string instruction, BlocksText(*content, where + ".content"));
      out_.push_back({{"role", "system"}, {"content", std::move(instruction)}});
      return absl::OkStatus();
    }
    assistant_ = *role == "assistant";
    text_.clear();
    has_text_ = false;
    turn_ = {{"role", *role}, {"content", nullptr}};
    if (content->is_string()) {
      text_ = content->get<std::string>();
      has_text_ = true;
    } else if (content->is_array()) {
      const auto texts = ElementTexts(MemberText(text, "content").value_or(""));
      for (size_t i = 0; i < content->size(); ++i) {
        MOESERVE_RETURN_IF_ERROR(AddBlock((*content)[i],
                                          i < texts.size() ? texts[i] : std::string_view(),
                                          Concat(where, ".content[", i, "]")));
      }
    } else {
      return InvalidValue(where + ".content",
                          Concat("'", where, ".content' must be a string or a list of blocks"));
    }
    // A message with results alone has become messages of the role tool.
    if (has_text_ || assistant_ || content->empty()) {
      if (has_text_ || !turn_.contains("tool_calls")) turn_["content"] = std::move(text_);
      out_.push_back(std::move(turn_));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status AddBlock(const Json& block, std::string_view source, const std::string& where) {
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
    if (*type == "tool_use" && assistant_) return AddCall(block, source, where);
    if (*type == "tool_result" && !assistant_) return AddResult(block, where);
    if (*type == "thinking" && assistant_) {
      const std::string* text = FindText(block, "thinking");
      if (text == nullptr) return MissingField(where + ".thinking");
      if (!turn_.contains("reasoning_content")) turn_["reasoning_content"] = "";
      turn_["reasoning_content"].get_ref<std::string&>() += *text;
      return absl::OkStatus();
    }
    // What another service has encrypted; this server never sends such blocks.
    if (*type == "redacted_thinking" && assistant_) return absl::OkStatus();
    return UnsupportedParameter(
        where + ".type",
        Concat("'", where, "': blocks of type ", Quoted(*type, 64), " are not ",
               "supported in messages of the ", assistant_ ? "assistant" : "user"));
  }

  absl::Status AddCall(const Json& block, std::string_view source, const std::string& where) {
    const std::string* id = FindText(block, "id");
    const std::string* name = FindText(block, "name");
    const Json* input = FindField(block, "input");
    if (id == nullptr || name == nullptr || input == nullptr) {
      return InvalidValue(where, Concat("'", where, "' must have 'id', 'name' and 'input'"));
    }
    if (!input->is_object()) {
      return InvalidValue(where + ".input", Concat("'", where, ".input' must be an object"));
    }
    // As the client wrote it, in its order.
    const auto text = MemberText(source, "input");
    turn_["tool_calls"].push_back(
        {{"id", *id},
         {"type", "function"},
         {"function",
          {{"name", *name}, {"arguments", text ? std::string(*text) : input->dump()}}}});
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

absl::Status ConvertMessages(const Json& body, std::string_view text, OrderedJson& chat) {
  OrderedJson messages = OrderedJson::array();
  if (const Json* system = FindField(body, "system")) {
    MOESERVE_ASSIGN_OR_RETURN(std::string instruction, BlocksText(*system, "system"));
    messages.push_back({{"role", "system"}, {"content", std::move(instruction)}});
  }
  const Json* list = FindField(body, "messages");
  if (list == nullptr) return MissingField("messages");
  if (!list->is_array() || list->empty()) {
    return InvalidValue("messages", "'messages' must be a list of at least one message");
  }
  MessageConverter converter(messages);
  const auto texts = ElementTexts(MemberText(text, "messages").value_or(""));
  for (size_t i = 0; i < list->size(); ++i) {
    MOESERVE_RETURN_IF_ERROR(converter.Add(
        (*list)[i], i < texts.size() ? texts[i] : std::string_view(), Concat("messages[", i, "]")));
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
      return UnsupportedParameter(
          where + ".type",
          Concat("'", where, ".type': expected custom, found ",
                 type->is_string() ? Quoted(type->get<std::string>(), 64) : "another value",
                 "; tools that Anthropic defines or runs are not supported"));
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

// {"type": "json_schema", "schema": ...} becomes a response_format.
absl::Status ConvertFormat(const OrderedJson& format, const std::string& where, OrderedJson& chat) {
  if (!format.is_object() || format.value("type", OrderedJson()) != "json_schema" ||
      !format.contains("schema")) {
    return InvalidValue(
        where, Concat("'", where, "' must be {\"type\": \"json_schema\", \"schema\": ...}"));
  }
  if (chat.contains("response_format")) {
    return InvalidValue(where, Concat("'", where, "' and another field both set the format"));
  }
  chat["response_format"] = {{"type", "json_schema"},
                             {"json_schema", {{"name", "output"}, {"schema", format["schema"]}}}};
  return absl::OkStatus();
}

// `output_config`: {"effort": ..., "format": ...}.
absl::Status ConvertOutput(const Json& body, std::string_view text, bool strict_fields,
                           MessageRequest& out) {
  if (FindField(body, "output_format") != nullptr) {
    MOESERVE_RETURN_IF_ERROR(
        ConvertFormat(OrderedMember(body, text, "output_format"), "output_format", out.chat));
  }
  const OrderedJson config = OrderedMember(body, text, "output_config");
  if (config.is_null()) return absl::OkStatus();
  if (!config.is_object()) {
    return InvalidValue("output_config", "'output_config' must be an object");
  }
  for (const auto& [name, value] : config.items()) {
    if (value.is_null()) continue;
    const std::string where = "output_config." + Printable(name, 64);
    if (name == "format") {
      MOESERVE_RETURN_IF_ERROR(ConvertFormat(value, where, out.chat));
    } else if (name == "effort") {
      if (!value.is_string()) return InvalidValue(where, Concat("'", where, "' must be a string"));
      if (out.chat.contains("reasoning_effort")) {
        return InvalidValue(where, Concat("'", where, "' and 'reasoning_effort' are both set"));
      }
      // "max" is this API's name for the most.
      out.chat["reasoning_effort"] = value == "max" ? OrderedJson("xhigh") : value;
    } else if (strict_fields) {
      return InvalidValue(where, Concat("unknown field '", where, "'"));
    } else {
      ++out.ignored_fields;
    }
  }
  return absl::OkStatus();
}

// `context_management` says what may be left out of a long conversation. Nothing is.
absl::Status CheckContextManagement(const Json& body, MessageRequest& out) {
  const Json* management = FindField(body, "context_management");
  if (management == nullptr) return absl::OkStatus();
  const Json* edits = management->is_object() ? FindField(*management, "edits") : nullptr;
  if (!management->is_object() || (edits != nullptr && !edits->is_array())) {
    return InvalidValue("context_management",
                        "'context_management' must be an object with a list 'edits'");
  }
  if (edits != nullptr && !edits->empty()) {
    out.warnings.push_back("'context_management' has no effect: the whole conversation is kept");
  }
  return absl::OkStatus();
}

absl::Status ConvertOptions(const Json& body, std::string_view text, bool strict_fields,
                            MessageRequest& out) {
  if (const Json* stop = FindField(body, "stop_sequences")) {
    if (out.chat.contains("stop")) {
      return InvalidValue("stop", "'stop' and 'stop_sequences' are the same: send one of them");
    }
    out.chat["stop"] = *stop;
  }
  if (const Json* thinking = FindField(body, "thinking")) {
    const std::string* type = FindText(*thinking, "type");
    if (type == nullptr) return InvalidValue("thinking", "'thinking' must have a 'type'");
    const Json* display = FindField(*thinking, "display");
    if (display != nullptr && *display != "summarized" && *display != "omitted") {
      return InvalidValue("thinking.display", "'thinking.display' must be summarized or omitted");
    }
    // A model reasons as its chat template says.
    if (*type == "disabled" || (display != nullptr && *display == "omitted")) {
      out.chat["include_reasoning"] = false;
    }
    if (*type != "disabled" && *type != "enabled" && *type != "adaptive" &&
        *type != "between_tools") {
      return InvalidValue("thinking.type",
                          "'thinking.type' must be enabled, adaptive, between_tools or disabled");
    }
    // Clients must send a budget, so it is refused only where unknown fields are refused.
    if (FindField(*thinking, "budget_tokens") != nullptr) {
      if (strict_fields) return UnsupportedParameter("thinking.budget_tokens");
      ++out.ignored_fields;
    }
  }
  MOESERVE_RETURN_IF_ERROR(CheckContextManagement(body, out));
  return ConvertOutput(body, text, strict_fields, out);
}

}  // namespace

Result<MessageRequest> ParseMessageRequest(const Json& body, std::string_view text,
                                           bool counts_only, bool strict_fields) {
  MessageRequest out;
  if (FindField(body, "thread") != nullptr) {
    return UnsupportedParameter("thread",
                                "'thread' is not supported: this server keeps no conversations; "
                                "send the whole conversation without it");
  }
  FieldFindings findings;
  MOESERVE_RETURN_IF_ERROR(
      CheckRequestFields(body, counts_only ? FieldRoute::kCountTokens : FieldRoute::kMessages,
                         strict_fields, findings));
  out.ignored_fields = findings.ignored;
  out.warnings = std::move(findings.warnings);
  for (const auto& [name, value] : body.items()) {
    if (UseOf(name, FieldRoute::kMessages) == FieldUse::kObeyed && !value.is_null() &&
        !absl::c_linear_search(kMessageConverted, name)) {
      out.chat[name] = OrderedMember(body, text, name);
    }
  }
  if (!counts_only && FindField(body, "max_tokens") == nullptr &&
      FindField(body, "max_completion_tokens") == nullptr) {
    return MissingField("max_tokens");
  }
  MOESERVE_RETURN_IF_ERROR(ConvertMessages(body, text, out.chat));
  MOESERVE_RETURN_IF_ERROR(ConvertTools(body, text, out.chat));
  MOESERVE_RETURN_IF_ERROR(ConvertChoice(body, out.chat));
  MOESERVE_RETURN_IF_ERROR(ConvertOptions(body, text, strict_fields, out));
  return out;
}

std::string MessageParam(std::string_view chat_param) {
  // The numbers of messages differ, because results of tools are messages of the chat.
  if (chat_param.starts_with("messages")) return "messages";
  if (chat_param == "stop") return "stop_sequences";
  if (chat_param.starts_with("response_format")) return "output_config.format";
  if (chat_param == "reasoning_effort") return "output_config.effort";
  return std::string(chat_param);
}

}  // namespace moeserve::server
