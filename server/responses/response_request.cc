#include "server/responses/response_request.h"

#include <absl/algorithm/container.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/fields/request_fields.h"
#include "server/tools/tool_definitions.h"

namespace moeserve::server {
namespace {

// Fields that ParseResponseRequest() converts. The others that this API obeys have the same name
// and meaning in a chat request.
constexpr std::string_view kResponseConverted[] = {
    "input",     "instructions", "max_output_tokens", "tools",          "tool_choice",       "text",
    "reasoning", "include",      "truncation",        "stream_options", "context_management"};

// Fields that need state of earlier requests, or work that goes on without the client, and why they
// are refused.
constexpr std::pair<const char*, std::string_view> kStateful[] = {
    {"previous_response_id", "this server keeps no responses"},
    {"conversation", "this server keeps no conversations"},
    {"prompt", "this server keeps no prompts"},
    {"background", "this server keeps no responses"},
    {"max_tool_calls", "this server runs no tools"}};

// Returns the text of a content, which is a string or a list of parts.
Result<std::string> ContentText(const Json& content, const std::string& where) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) {
    return InvalidValue(where, Concat("'", where, "' must be a string or a list of text parts"));
  }
  std::string text;
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string part_where = Concat(where, '[', i, ']');
    const std::string* type = FindText(content[i], "type");
    if (type == nullptr) {
      return InvalidValue(part_where,
                          Concat("'", part_where, "' must be an object with a string 'type'"));
    }
    const bool refusal = *type == "refusal";
    if (*type != "input_text" && *type != "output_text" && *type != "text" &&
        *type != "reasoning_text" && *type != "summary_text" && !refusal) {
      return UnsupportedParameter(part_where,
                                  Concat("'", part_where, "': parts of type ", Quoted(*type, 64),
                                         " are not supported, only text"));
    }
    const std::string* part = FindText(content[i], refusal ? "refusal" : "text");
    if (part == nullptr) {
      return InvalidValue(part_where, Concat("'", part_where, "': 'text' must be a string"));
    }
    text += *part;
  }
  return text;
}

// Collects the messages of the chat.
class InputConverter {
 public:
  absl::Status Add(const Json& item, const std::string& where) {
    if (!item.is_object()) return InvalidValue(where, Concat("'", where, "' must be an object"));
    const std::string* type = FindText(item, "type");
    if (type == nullptr || *type == "message") return AddMessage(item, where);
    if (*type == "function_call") return AddCall(item, where);
    if (*type == "function_call_output") return AddResult(item, where);
    if (*type == "custom_tool_call") return AddCustomCall(item, where);
    if (*type == "custom_tool_call_output") return AddResult(item, where);
    if (*type == "reasoning") return AddReasoning(item, where);
    if (*type == "item_reference") {
      return UnsupportedParameter(where + ".type",
                                  Concat("'", where, "': this server keeps no items"));
    }
    return UnsupportedParameter(where + ".type", Concat("'", where, "': items of type ",
                                                        Quoted(*type, 64), " are not supported"));
  }

  OrderedJson Take() {
    FlushReasoning();
    return std::move(messages_);
  }
  void AddText(std::string_view role, std::string text) {
    messages_.push_back({{"role", role}, {"content", std::move(text)}});
  }

 private:
  absl::Status AddMessage(const Json& item, const std::string& where) {
    const Json* role = FindField(item, "role");
    if (role == nullptr) return MissingField(where + ".role");
    const Json* content = FindField(item, "content");
    if (content == nullptr) return MissingField(where + ".content");
    MOESERVE_ASSIGN_OR_RETURN(std::string text, ContentText(*content, where + ".content"));
    if (*role != "assistant") {
      FlushReasoning();
      messages_.push_back({{"role", *role}, {"content", std::move(text)}});
      return absl::OkStatus();
    }
    OrderedJson& message = Assistant(false);
    message["content"] = std::move(text);
    return absl::OkStatus();
  }

  // The chat template gets the call as a part of the assistant's turn.
  absl::Status AddCall(const Json& item, const std::string& where) {
    const std::string* id = FindText(item, "call_id");
    const std::string* name = FindText(item, "name");
    const std::string* arguments = FindText(item, "arguments");
    if (id == nullptr || name == nullptr || arguments == nullptr) {
      return InvalidValue(where, Concat("'", where,
                                        "' must have 'call_id', 'name' and 'arguments', "
                                        "which are strings"));
    }
    PushCall(*id, *name, *arguments);
    return absl::OkStatus();
  }

  absl::Status AddCustomCall(const Json& item, const std::string& where) {
    const std::string* id = FindText(item, "call_id");
    const std::string* name = FindText(item, "name");
    const std::string* input = FindText(item, "input");
    if (id == nullptr || name == nullptr || input == nullptr) {
      return InvalidValue(
          where,
          Concat("'", where, "' must have 'call_id', 'name' and 'input', which are strings"));
    }
    PushCall(*id, *name, DumpOrdered({{kCustomInput, *input}}));
    return absl::OkStatus();
  }

  void PushCall(const std::string& id, const std::string& name, const std::string& arguments) {
    Assistant(true)["tool_calls"].push_back(
        {{"id", id},
         {"type", "function"},
         {"function", {{"name", name}, {"arguments", arguments}}}});
  }

  absl::Status AddResult(const Json& item, const std::string& where) {
    const std::string* id = FindText(item, "call_id");
    if (id == nullptr) return MissingField(where + ".call_id");
    const Json* output = FindField(item, "output");
    if (output == nullptr) return MissingField(where + ".output");
    MOESERVE_ASSIGN_OR_RETURN(std::string text, ContentText(*output, where + ".output"));
    messages_.push_back({{"role", "tool"}, {"content", std::move(text)}, {"tool_call_id", *id}});
    return absl::OkStatus();
  }

  // Belongs to what the assistant says or calls next.
  absl::Status AddReasoning(const Json& item, const std::string& where) {
    for (const char* field : {"content", "summary"}) {
      const Json* content = FindField(item, field);
      if (content == nullptr || !reasoning_.empty()) continue;
      MOESERVE_ASSIGN_OR_RETURN(reasoning_, ContentText(*content, Concat(where, ".", field)));
    }
    return absl::OkStatus();
  }

  // Returns the assistant's turn to which an item is added: the last message if it is the
  // assistant's and `joins`, else a new one.
  OrderedJson& Assistant(bool joins) {
    const bool last = !messages_.empty() && messages_.back()["role"] == "assistant";
    if (!(joins && last && reasoning_.empty())) {
      messages_.push_back({{"role", "assistant"}, {"content", nullptr}});
      if (!reasoning_.empty()) {
        messages_.back()["reasoning_content"] = std::exchange(reasoning_, {});
      }
    }
    return messages_.back();
  }

  void FlushReasoning() {
    if (!reasoning_.empty()) Assistant(false)["content"] = "";
  }

  OrderedJson messages_ = OrderedJson::array();
  std::string reasoning_;
};

absl::Status ConvertInput(const Json& body, OrderedJson& chat) {
  InputConverter input;
  if (const Json* instructions = FindField(body, "instructions")) {
    if (!instructions->is_string()) {
      return InvalidValue("instructions", "'instructions' must be a string");
    }
    input.AddText("system", instructions->get<std::string>());
  }
  const Json* items = FindField(body, "input");
  if (items == nullptr) return MissingField("input");
  if (items->is_string()) {
    input.AddText("user", items->get<std::string>());
  } else if (items->is_array() && !items->empty()) {
    for (size_t i = 0; i < items->size(); ++i) {
      MOESERVE_RETURN_IF_ERROR(input.Add((*items)[i], Concat("input[", i, "]")));
    }
  } else {
    return InvalidValue("input", "'input' must be a string or a list of at least one item");
  }
  chat["messages"] = input.Take();
  return absl::OkStatus();
}

// Refuses a field of more than `most` bytes of JSON, because responses repeat it.
absl::Status CheckEcho(const Json& value, const char* name, size_t most) {
  if (value.is_string() && value.get_ref<const std::string&>().size() <= most / 8) {
    return absl::OkStatus();  // without spelling it out
  }
  const size_t bytes = value.dump().size();
  if (bytes <= most) return absl::OkStatus();
  return InvalidValue(
      name, Concat("the JSON of '", name, "' has at most ", most, " bytes, found ", bytes));
}

// Returns the function that a tool of the type custom becomes: its argument is a text. A regular
// expression as format becomes the text's pattern.
Result<OrderedJson> CustomFunction(const OrderedJson& tool, const std::string& where) {
  OrderedJson input = {{"type", "string"}};
  const OrderedJson format = tool.value("format", OrderedJson());
  if (!format.is_null()) {
    const OrderedJson type = format.is_object() ? format.value("type", OrderedJson()) : format;
    const bool regex = type == "grammar" && format.value("syntax", OrderedJson()) == "regex" &&
                       format.value("definition", OrderedJson()).is_string();
    if (regex) {
      input["pattern"] = Concat("^(?:", format["definition"].get<std::string>(), ")$");
    } else if (type != "text") {
      return UnsupportedParameter(
          where + ".format",
          Concat("'", where,
                 ".format': only the type text, and a grammar of the syntax regex with "
                 "a 'definition', are supported"));
    }
  }
  OrderedJson function = OrderedJson::object();
  for (const char* name : {"name", "description"}) {
    if (const auto value = tool.find(name); value != tool.end()) function[name] = *value;
  }
  function["parameters"] = {{"type", "object"}};
  const bool input_has_pattern = input.contains("pattern");
  function["parameters"]["properties"][kCustomInput] = std::move(input);
  function["parameters"]["required"] = OrderedJson::array({kCustomInput});
  function["parameters"]["additionalProperties"] = false;
  // A format that cannot be enforced is refused.
  if (input_has_pattern) function["strict"] = true;
  return OrderedJson{{"type", "function"}, {"function", std::move(function)}};
}

// {"type": "function", "name": ...} becomes {"type": "function", "function": {"name": ...}}; so
// does a choice of a custom tool.
OrderedJson ChatTool(const OrderedJson& tool) {
  if (!tool.is_object() || tool.contains("function")) return tool;
  if (tool.value("type", OrderedJson(nullptr)) == "custom") {
    return {{"type", "function"}, {"function", {{"name", tool.value("name", OrderedJson())}}}};
  }
  OrderedJson out = OrderedJson::object();
  OrderedJson function = OrderedJson::object();
  for (const auto& [name, value] : tool.items()) {
    AppendMember(name == "type" ? out : function, name, value);
  }
  if (tool.value("type", OrderedJson(nullptr)) == "function") out["function"] = std::move(function);
  return out;
}

absl::Status AddTool(const OrderedJson& tool, const std::string& where, ResponseRequest& out) {
  const OrderedJson type = tool.is_object() ? tool.value("type", OrderedJson()) : OrderedJson();
  if (type == "custom") {
    MOESERVE_ASSIGN_OR_RETURN(OrderedJson function, CustomFunction(tool, where));
    const OrderedJson name = tool.value("name", OrderedJson());
    if (name.is_string()) out.custom_tools.push_back(name.get<std::string>());
    out.chat["tools"].push_back(std::move(function));
    return absl::OkStatus();
  }
  if (type.is_string() && type != "function") {
    return UnsupportedParameter(
        where + ".type",
        Concat("'", where, ".type': expected function or custom, found ",
               Quoted(type.get<std::string>(), 64), "; this server runs no tools of its own"));
  }
  out.chat["tools"].push_back(ChatTool(tool));
  return absl::OkStatus();
}

absl::Status ConvertTools(const Json& body, std::string_view text, ResponseRequest& out) {
  const Json* tools = FindField(body, "tools");
  out.echo["tools"] = OrderedJson::array();
  if (tools != nullptr) {
    if (!tools->is_array()) return InvalidValue("tools", "'tools' must be a list");
    MOESERVE_ASSIGN_OR_RETURN(const auto part, CheckToolBytes(*tools, text));
    OrderedJson ordered = part ? ParseOrdered(*part) : OrderedJson(*tools);
    out.chat["tools"] = OrderedJson::array();
    for (size_t i = 0; i < ordered.size(); ++i) {
      MOESERVE_RETURN_IF_ERROR(AddTool(ordered[i], Concat("tools[", i, "]"), out));
    }
    out.echo["tools"] = std::move(ordered);
  }
  out.echo["tool_choice"] = "auto";
  const Json* choice = FindField(body, "tool_choice");
  if (choice == nullptr) return absl::OkStatus();
  MOESERVE_RETURN_IF_ERROR(CheckEcho(*choice, "tool_choice", kMaxToolBytes));
  out.echo["tool_choice"] = *choice;
  const std::string* type = FindText(*choice, "type");
  if (type != nullptr && *type == "allowed_tools") {
    OrderedJson allowed = OrderedJson::object();
    for (const char* field : {"mode", "tools"}) {
      if (const Json* value = FindField(*choice, field)) allowed[field] = *value;
    }
    if (allowed.contains("tools") && allowed["tools"].is_array()) {
      for (OrderedJson& tool : allowed["tools"]) tool = ChatTool(tool);
    }
    out.chat["tool_choice"] = {{"type", *type}, {"allowed_tools", std::move(allowed)}};
  } else {
    out.chat["tool_choice"] = ChatTool(OrderedJson(*choice));
  }
  return absl::OkStatus();
}

// `text`: {"format": {"type": ..., ...}}.
absl::Status ConvertText(const Json& body, std::string_view source, ResponseRequest& out) {
  out.echo["text"] = {{"format", {{"type", "text"}}}};
  const Json* field = FindField(body, "text");
  if (field == nullptr) return absl::OkStatus();
  if (!field->is_object()) return InvalidValue("text", "'text' must be an object");
  MOESERVE_RETURN_IF_ERROR(CheckEcho(*field, "text", kMaxToolBytes));
  const OrderedJson text = OrderedMember(body, source, "text");
  out.echo["text"] = text;
  if (const Json* verbosity = FindField(*field, "verbosity"); verbosity != nullptr) {
    if (!verbosity->is_string()) {
      return InvalidValue("text.verbosity", "'text.verbosity' must be a string");
    }
    if (*verbosity != "medium") {
      out.warnings.push_back("'text.verbosity' has no effect: the model cannot be told");
    }
  }
  const OrderedJson format = text.value("format", OrderedJson());
  if (format.is_null()) return absl::OkStatus();
  if (out.chat.contains("response_format")) {
    return InvalidValue("response_format",
                        "'response_format' and 'text.format' are the same: send one of them");
  }
  if (format.is_object() && format.value("type", OrderedJson()) == "json_schema") {
    OrderedJson schema = OrderedJson::object();
    for (const auto& [name, value] : format.items()) {
      if (name != "type") AppendMember(schema, name, value);
    }
    out.chat["response_format"] = {{"type", "json_schema"}, {"json_schema", std::move(schema)}};
  } else {
    out.chat["response_format"] = format;
  }
  return absl::OkStatus();
}

absl::Status ConvertReasoning(const Json& body, ResponseRequest& out) {
  out.echo["reasoning"] = {{"effort", nullptr}, {"summary", nullptr}};
  const Json* reasoning = FindField(body, "reasoning");
  if (reasoning == nullptr) return absl::OkStatus();
  if (!reasoning->is_object()) return InvalidValue("reasoning", "'reasoning' must be an object");
  for (const auto& [name, value] : reasoning->items()) {
    if (value.is_null()) continue;
    if (name == "effort") {
      if (out.chat.contains("reasoning_effort")) {
        return InvalidValue("reasoning_effort",
                            "'reasoning_effort' and 'reasoning.effort' are the same: send one");
      }
      out.chat["reasoning_effort"] = value;
      out.echo["reasoning"]["effort"] = value;
    } else if (name != "summary" && name != "generate_summary") {
      const std::string where = "reasoning." + Printable(name, 64);
      return InvalidValue(where, Concat("unknown field '", where, "'"));
    }
    // The reasoning itself is returned, so no summary of it is needed.
  }
  return absl::OkStatus();
}

absl::Status ConvertOptions(const Json& body, ResponseRequest& out) {
  // A list of what may be left out of a long conversation. Nothing is.
  if (const Json* management = FindField(body, "context_management")) {
    if (!management->is_array()) {
      return InvalidValue("context_management", "'context_management' must be a list");
    }
    if (!management->empty()) {
      out.warnings.push_back("'context_management' has no effect: the whole conversation is kept");
    }
  }
  // Streams have the usage in any case, and no obfuscation.
  if (const Json* options = FindField(body, "stream_options");
      options != nullptr && !options->is_object()) {
    return InvalidValue("stream_options", "'stream_options' must be an object");
  }
  if (const Json* limit = FindField(body, "max_output_tokens")) {
    out.chat["max_completion_tokens"] = *limit;
  }
  if (const Json* include = FindField(body, "include")) {
    if (!include->is_array()) return InvalidValue("include", "'include' must be a list");
    for (const Json& item : *include) {
      if (item == "message.output_text.logprobs") {
        out.chat["logprobs"] = true;
      } else if (item != "reasoning.encrypted_content") {
        return UnsupportedParameter(
            "include", Concat("'include': expected message.output_text.logprobs, found ",
                              item.is_string() ? Quoted(item.get<std::string>(), 64)
                                               : std::string("another value")));
      }
    }
  }
  if (FindField(body, "top_logprobs") != nullptr) out.chat["logprobs"] = true;
  const Json* truncation = FindField(body, "truncation");
  if (truncation != nullptr && *truncation != "disabled") {
    if (*truncation != "auto") {
      return InvalidValue("truncation", "'truncation' must be auto or disabled");
    }
    out.chat["truncate_prompt_tokens"] = -1;
  }
  out.echo["truncation"] = truncation != nullptr ? OrderedJson(*truncation) : "disabled";
  return absl::OkStatus();
}

absl::Status CheckStateful(const Json& body) {
  for (const auto& [name, reason] : kStateful) {
    const Json* value = FindField(body, name);
    if (value == nullptr || *value == false) continue;
    return UnsupportedParameter(name, Concat("'", name, "' is not supported: ", reason));
  }
  return absl::OkStatus();
}

absl::Status Echo(const Json& body, ResponseRequest& out) {
  // OpenAI allows 16 pairs of 64 and 512 characters.
  constexpr std::pair<const char*, size_t> kRepeated[] = {
      {"metadata", 64 << 10},    {"user", 4 << 10}, {"service_tier", 256},
      {"temperature", 256},      {"top_p", 256},    {"parallel_tool_calls", 256},
      {"max_output_tokens", 256}};
  for (const auto& [name, most] : kRepeated) {
    if (const Json* value = FindField(body, name)) {
      MOESERVE_RETURN_IF_ERROR(CheckEcho(*value, name, most));
    }
  }
  const auto echo = [&](const char* name, OrderedJson otherwise) {
    const Json* value = FindField(body, name);
    out.echo[name] = value != nullptr ? OrderedJson(*value) : std::move(otherwise);
  };
  echo("instructions", nullptr);
  echo("max_output_tokens", nullptr);
  echo("temperature", 1.0);
  echo("top_p", 1.0);
  echo("parallel_tool_calls", true);
  echo("metadata", OrderedJson::object());
  echo("user", nullptr);
  echo("service_tier", "default");
  return absl::OkStatus();
}

}  // namespace

Result<ResponseRequest> ParseResponseRequest(const Json& body, std::string_view text,
                                             bool strict_fields) {
  ResponseRequest out;
  MOESERVE_RETURN_IF_ERROR(CheckStateful(body));
  FieldFindings findings;
  MOESERVE_RETURN_IF_ERROR(
      CheckRequestFields(body, FieldRoute::kResponses, strict_fields, findings));
  out.ignored_fields = findings.ignored;
  out.warnings = std::move(findings.warnings);
  for (const auto& [name, value] : body.items()) {
    if (UseOf(name, FieldRoute::kResponses) == FieldUse::kObeyed && !value.is_null() &&
        !absl::c_linear_search(kResponseConverted, name)) {
      out.chat[name] = OrderedMember(body, text, name);
    }
  }
  MOESERVE_RETURN_IF_ERROR(Echo(body, out));
  MOESERVE_RETURN_IF_ERROR(ConvertInput(body, out.chat));
  MOESERVE_RETURN_IF_ERROR(ConvertTools(body, text, out));
  MOESERVE_RETURN_IF_ERROR(ConvertText(body, text, out));
  MOESERVE_RETURN_IF_ERROR(ConvertReasoning(body, out));
  MOESERVE_RETURN_IF_ERROR(ConvertOptions(body, out));
  return out;
}

std::string ResponseParam(std::string_view chat_param) {
  struct Name {
    std::string_view chat;
    std::string_view here;
  };
  constexpr Name kNames[] = {{"messages", "input"},
                             {"max_completion_tokens", "max_output_tokens"},
                             {"response_format", "text.format"},
                             {"reasoning_effort", "reasoning.effort"}};
  for (const Name& name : kNames) {
    // The numbers of messages and items differ, so only the name of the list is told.
    if (chat_param.starts_with(name.chat)) return std::string(name.here);
  }
  return std::string(chat_param);
}

}  // namespace moeserve::server
