#include "server/ollama/ollama_request.h"

#include <absl/algorithm/container.h>

#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/fields/request_fields.h"
#include "server/ollama/ollama_options.h"

namespace moeserve::server {
namespace {

constexpr std::string_view kLatest = ":latest";

bool IsEmpty(const OrderedJson& value) {
  return value.is_null() || value == "" || (value.is_structured() && value.empty());
}

// Gives calls of tools and their results the ids by which chats connect them. Ollama's messages
// name the tool, or rely on the order.
class CallIds {
 public:
  void AddCalls(OrderedJson& calls) {
    if (!calls.is_array()) return;
    for (OrderedJson& call : calls) {
      if (!call.is_object()) continue;
      if (!call.contains("type")) call["type"] = "function";
      if (!call.contains("id")) call["id"] = Concat("call_", next_++);
      const auto function = call.find("function");
      const bool named = function != call.end() && function->is_object() &&
                         function->contains("name") && (*function)["name"].is_string();
      if (!call["id"].is_string() || open_.size() >= kMaxOpen) continue;
      open_.emplace_back(named ? (*function)["name"].get<std::string>() : std::string(),
                         call["id"].get<std::string>());
    }
  }

  void AddResult(OrderedJson& message) {
    const OrderedJson tool = Take(message, "tool_name");
    if (tool.is_string() && !message.contains("name")) message["name"] = tool;
    if (message.contains("tool_call_id")) return;
    auto call = absl::c_find_if(
        open_, [&](const auto& open) { return tool.is_string() && tool == open.first; });
    if (call == open_.end()) call = open_.begin();
    if (call == open_.end()) {
      message["tool_call_id"] = Concat("call_", next_++);
      return;
    }
    message["tool_call_id"] = call->second;
    open_.erase(call);
  }

  static OrderedJson Take(OrderedJson& object, const char* name) {
    const auto found = object.find(name);
    if (found == object.end()) return nullptr;
    OrderedJson value = std::move(*found);
    object.erase(found);
    return value;
  }

 private:
  // Bounds the time of a search. A message has fewer calls (kMaxTools).
  static constexpr size_t kMaxOpen = 1024;

  int next_ = 0;
  std::vector<std::pair<std::string, std::string>> open_;  // (name, id) of calls without a result
};

absl::Status ConvertMessages(const Json& body, std::string_view text, OllamaRequest& out) {
  OrderedJson messages = OrderedMember(body, text, "messages");
  if (IsEmpty(messages)) {
    out.only_loads = true;
    return absl::OkStatus();
  }
  if (!messages.is_array()) return InvalidValue("messages", "'messages' must be a list");
  CallIds ids;
  for (size_t i = 0; i < messages.size(); ++i) {
    OrderedJson& message = messages[i];
    if (!message.is_object()) continue;  // the chat's parser refuses it
    if (!IsEmpty(CallIds::Take(message, "images"))) {
      const std::string where = Concat("messages[", i, "].images");
      return UnsupportedParameter(where,
                                  Concat("'", where, "' is not supported: models read text"));
    }
    if (!message.contains("content") || message["content"].is_null()) message["content"] = "";
    if (const auto calls = message.find("tool_calls"); calls != message.end()) ids.AddCalls(*calls);
    if (message.value("role", OrderedJson()) == "tool") ids.AddResult(message);
  }
  // A last message of the assistant is the start of the answer.
  const OrderedJson& last = messages.back();
  if (last.is_object() && last.value("role", OrderedJson()) == "assistant" &&
      IsEmpty(last.value("tool_calls", OrderedJson()))) {
    out.body["continue_final_message"] = true;
    out.body["add_generation_prompt"] = false;
  }
  out.body["messages"] = std::move(messages);
  return absl::OkStatus();
}

absl::Status ConvertFormat(const Json& body, std::string_view text, OllamaRequest& out) {
  const OrderedJson format = OrderedMember(body, text, "format");
  if (format.is_null() || format == "") return absl::OkStatus();
  if (format == "json") {
    out.body["response_format"] = {{"type", "json_object"}};
  } else if (format.is_object()) {
    out.body["response_format"] = {{"type", "json_schema"},
                                   {"json_schema", {{"name", "output"}, {"schema", format}}}};
  } else {
    return InvalidValue("format", "'format' must be \"json\" or a JSON schema");
  }
  return absl::OkStatus();
}

absl::Status ConvertThink(const Json& body, OllamaRequest& out) {
  const Json* think = FindField(body, "think");
  if (think == nullptr) return absl::OkStatus();
  const bool is_level = think->is_string() && (*think == "low" || *think == "medium" ||
                                               *think == "high" || *think == "max");
  if (!think->is_boolean() && !is_level) {
    return InvalidValue("think", "'think' must be true, false, low, medium, high or max");
  }
  if (out.completes) {
    if (*think == false) return absl::OkStatus();
    return InvalidValue("think", "'think' needs a chat template");
  }
  if (is_level) {
    // "max" is this API's name for the most.
    out.body["reasoning_effort"] = *think == "max" ? OrderedJson("xhigh") : OrderedJson(*think);
  } else if (*think == true) {
    out.body["chat_template_kwargs"] = {{"enable_thinking", true}, {"thinking", true}};
  } else {
    out.body["reasoning_effort"] = "none";
    out.body["include_reasoning"] = false;
  }
  return absl::OkStatus();
}

absl::Status ConvertLogprobs(const Json& body, OllamaRequest& out) {
  MOESERVE_ASSIGN_OR_RETURN(const auto wanted, BoolField(body, "logprobs"));
  const Json* top = FindField(body, "top_logprobs");
  if (!wanted.value_or(false)) {
    if (top == nullptr || *top == 0) return absl::OkStatus();
    return InvalidValue("top_logprobs", "'top_logprobs' needs 'logprobs': true");
  }
  if (out.completes) {
    MOESERVE_ASSIGN_OR_RETURN(const auto count, IntField(body, "top_logprobs", 0, 20));
    out.body["logprobs"] = count.value_or(0);
    return absl::OkStatus();
  }
  out.body["logprobs"] = true;
  if (top != nullptr) out.body["top_logprobs"] = *top;
  return absl::OkStatus();
}

// Converts what both routes have.
absl::Status ConvertShared(const Json& body, std::string_view text, FieldRoute route,
                           const std::string& model, bool strict, OllamaRequest& out) {
  FieldFindings findings;
  MOESERVE_RETURN_IF_ERROR(CheckRequestFields(body, route, strict, findings));
  out.ignored_fields += findings.ignored;
  absl::c_move(findings.warnings, std::back_inserter(out.warnings));
  if (!model.empty()) out.body["model"] = model;
  const Json* stream = FindField(body, "stream");
  out.body["stream"] = stream == nullptr ? OrderedJson(true) : OrderedJson(*stream);
  if (const Json* options = FindField(body, "options")) {
    MOESERVE_RETURN_IF_ERROR(ConvertOllamaOptions(*options, strict, out));
  }
  MOESERVE_RETURN_IF_ERROR(ConvertFormat(body, text, out));
  MOESERVE_RETURN_IF_ERROR(ConvertThink(body, out));
  return ConvertLogprobs(body, out);
}

}  // namespace

std::string ResolveOllamaName(const std::string& name, const std::vector<std::string>& served) {
  if (!name.ends_with(kLatest) || absl::c_linear_search(served, name)) return name;
  return name.substr(0, name.size() - kLatest.size());
}

Result<OllamaRequest> ParseOllamaChat(const Json& body, std::string_view text,
                                      const std::string& model, bool strict_fields) {
  OllamaRequest out;
  MOESERVE_RETURN_IF_ERROR(
      ConvertShared(body, text, FieldRoute::kOllamaChat, model, strict_fields, out));
  MOESERVE_RETURN_IF_ERROR(ConvertMessages(body, text, out));
  OrderedJson tools = OrderedMember(body, text, "tools");
  if (!IsEmpty(tools)) out.body["tools"] = std::move(tools);
  return out;
}

Result<OllamaRequest> ParseOllamaGenerate(const Json& body, std::string_view text,
                                          const std::string& model, bool has_template,
                                          bool strict_fields) {
  OllamaRequest out;
  MOESERVE_ASSIGN_OR_RETURN(const auto raw, BoolField(body, "raw"));
  out.completes = raw.value_or(false) || !has_template;
  MOESERVE_RETURN_IF_ERROR(
      ConvertShared(body, text, FieldRoute::kOllamaGenerate, model, strict_fields, out));
  MOESERVE_ASSIGN_OR_RETURN(auto prompt, StringField(body, "prompt"));
  MOESERVE_ASSIGN_OR_RETURN(auto system, StringField(body, "system"));
  if (!prompt || prompt->empty()) {
    out.only_loads = true;
    return out;
  }
  const bool has_system = system && !system->empty();
  if (out.completes) {
    if (has_system) return InvalidValue("system", "'system' needs a chat template, and no 'raw'");
    out.body["prompt"] = *std::move(prompt);
    return out;
  }
  OrderedJson& messages = out.body["messages"] = OrderedJson::array();
  if (has_system) messages.push_back({{"role", "system"}, {"content", *std::move(system)}});
  messages.push_back({{"role", "user"}, {"content", *std::move(prompt)}});
  return out;
}

}  // namespace moeserve::server
