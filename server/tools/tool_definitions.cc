#include "server/tools/tool_definitions.h"

#include <algorithm>
#include <utility>

#include "base/error_text.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/base/json_text.h"

namespace moeserve::server {
namespace {

// Returns the function's object of {"type": "function", "function": {...}}.
Result<const Json*> FunctionOf(const Json& entry, const std::string& where) {
  const Json* type = entry.is_object() ? FindField(entry, "type") : nullptr;
  if (type == nullptr || !type->is_string()) {
    return InvalidValue(
        where, Concat("'", where, "' must be {\"type\": \"function\", \"function\": {...}}"));
  }
  if (*type != "function") {
    return UnsupportedParameter(where + ".type",
                                Concat("'", where, ".type' must be function, found ",
                                       Quoted(type->get_ref<const std::string&>(), 64)));
  }
  const Json* function = FindField(entry, "function");
  if (function == nullptr) return MissingField(where + ".function");
  if (!function->is_object()) {
    return InvalidValue(where + ".function", Concat("'", where, ".function' must be an object"));
  }
  return function;
}

Result<std::string> NameOf(const Json& function, const std::string& where) {
  const Json* name = FindField(function, "name");
  const std::string param = where + ".name";
  if (name == nullptr) return MissingField(param);
  if (!name->is_string() || !IsToolName(name->get_ref<const std::string&>())) {
    return InvalidValue(param,
                        Concat("'", param, "' must be 1 to 64 letters, digits, '_', '-' and '.'"));
  }
  return name->get<std::string>();
}

Result<Tool> ParseTool(const Json& entry, const std::string& where) {
  MOESERVE_ASSIGN_OR_RETURN(const Json* const function, FunctionOf(entry, where));
  const std::string inner = where + ".function";
  Tool tool;
  MOESERVE_ASSIGN_OR_RETURN(tool.name, NameOf(*function, inner));
  const Json* description = FindField(*function, "description");
  if (description != nullptr && !description->is_string()) {
    return InvalidValue(inner + ".description",
                        Concat("'", inner, ".description' must be a string"));
  }
  if (const Json* parameters = FindField(*function, "parameters")) {
    if (!parameters->is_object()) {
      return InvalidValue(inner + ".parameters",
                          Concat("'", inner, ".parameters' must be a JSON schema"));
    }
    if (!parameters->empty()) tool.parameters = parameters->dump();
  }
  const auto strict = BoolField(*function, "strict");
  if (!strict.ok()) {
    return InvalidValue(inner + ".strict", Concat("'", inner, ".strict' must be a boolean"));
  }
  tool.strict = strict->value_or(false);
  return tool;
}

Result<std::vector<Tool>> ParseList(const Json& list) {
  if (!list.is_array()) return InvalidValue("tools", "'tools' must be a list");
  if (list.size() > kMaxTools) {
    return InvalidValue("tools",
                        Concat("at most ", kMaxTools, " tools are accepted, found ", list.size()));
  }
  std::vector<Tool> tools;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string where = Concat("tools[", i, "]");
    MOESERVE_ASSIGN_OR_RETURN(Tool tool, ParseTool(list[i], where));
    for (const Tool& other : tools) {
      if (other.name == tool.name) {
        return InvalidValue(where + ".function.name",
                            Concat("two tools have the name '", tool.name, "'"));
      }
    }
    tools.push_back(std::move(tool));
  }
  return tools;
}

// Restricts `settings.callable` to the tools that `names` lists, each of the form
// {"type": "function", "function": {"name": ...}}.
absl::Status Restrict(const Json& names, const std::string& where, ToolSettings& settings) {
  if (!names.is_array() || names.empty() || names.size() > kMaxTools) {
    return InvalidValue(where,
                        Concat("'", where, "' must be a list of 1 to ", kMaxTools, " tools"));
  }
  std::vector<Tool> kept;
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string entry = names.size() > 1 ? Concat(where, "[", i, "]") : where;
    MOESERVE_ASSIGN_OR_RETURN(const Json* const function, FunctionOf(names[i], entry));
    MOESERVE_ASSIGN_OR_RETURN(const std::string name, NameOf(*function, entry + ".function"));
    const auto named = [&](const Tool& tool) { return tool.name == name; };
    const auto found = std::find_if(settings.callable.begin(), settings.callable.end(), named);
    if (found == settings.callable.end()) {
      return InvalidValue(entry, Concat("'", entry, "': there is no tool ", Quoted(name, 64)));
    }
    if (std::none_of(kept.begin(), kept.end(), named)) kept.push_back(*found);
  }
  settings.callable = std::move(kept);
  return absl::OkStatus();
}

absl::Status ParseMode(const std::string& mode, const std::string& param, ToolSettings& settings) {
  if (mode == "auto") {
    settings.choice = ToolChoice::kAuto;
  } else if (mode == "required") {
    settings.choice = ToolChoice::kRequired;
  } else if (mode == "none" && param == "tool_choice") {
    settings.choice = ToolChoice::kNone;
  } else {
    return InvalidValue(param,
                        Concat("'", param, "' must be none, auto, required or an object, found ",
                               Quoted(mode, 64)));
  }
  return absl::OkStatus();
}

absl::Status ParseChoice(const Json& choice, ToolSettings& settings) {
  if (choice.is_string()) return ParseMode(choice.get<std::string>(), "tool_choice", settings);
  const Json* type = choice.is_object() ? FindField(choice, "type") : nullptr;
  if (type == nullptr || !type->is_string()) {
    return InvalidValue("tool_choice",
                        "'tool_choice' must be none, auto, required or {\"type\": \"function\", "
                        "\"function\": {\"name\": ...}}");
  }
  if (*type == "allowed_tools") {
    const Json* allowed = FindField(choice, "allowed_tools");
    const std::string where = "tool_choice.allowed_tools";
    if (allowed == nullptr) return MissingField(where);
    if (!allowed->is_object())
      return InvalidValue(where, Concat("'", where, "' must be an object"));
    MOESERVE_ASSIGN_OR_RETURN(const auto mode, StringField(*allowed, "mode"));
    MOESERVE_RETURN_IF_ERROR(ParseMode(mode.value_or("auto"), where + ".mode", settings));
    const Json* tools = FindField(*allowed, "tools");
    if (tools == nullptr) return MissingField(where + ".tools");
    return Restrict(*tools, where + ".tools", settings);
  }
  settings.choice = ToolChoice::kNamed;
  return Restrict(Json::array({choice}), "tool_choice", settings);
}

// Returns `list` as the client wrote it. Falls back to `list` itself, whose members are sorted, if
// the text spells the key "tools" with escapes.
OrderedJson InClientsOrder(const Json& list, std::string_view text) {
  const auto part = MemberText(text, "tools");
  if (part) {
    OrderedJson parsed = ParseOrdered(*part);
    if (parsed.is_array() && parsed.size() == list.size()) return parsed;
  }
  return OrderedJson(list);
}

}  // namespace

Result<std::optional<std::string_view>> CheckToolBytes(const Json& tools, std::string_view text) {
  const auto part = MemberText(text, "tools");
  const size_t bytes = part ? part->size() : tools.dump().size();
  if (bytes <= kMaxToolBytes) return part;
  return InvalidValue(
      "tools", Concat("the JSON of 'tools' has at most ", kMaxToolBytes, " bytes, found ", bytes));
}

bool IsToolName(std::string_view name) {
  return !name.empty() && name.size() <= 64 && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  });
}

std::vector<std::string_view> ToolFields() {
  return {"tools", "tool_choice", "parallel_tool_calls"};
}

Result<ToolSettings> ParseTools(const Json& body, std::string_view text) {
  ToolSettings settings;
  MOESERVE_ASSIGN_OR_RETURN(const auto parallel, BoolField(body, "parallel_tool_calls"));
  settings.parallel = parallel.value_or(true);
  const Json* tools = FindField(body, "tools");
  const Json* choice = FindField(body, "tool_choice");
  if (tools != nullptr) {
    MOESERVE_RETURN_IF_ERROR(CheckToolBytes(*tools, text).status());
    MOESERVE_ASSIGN_OR_RETURN(settings.callable, ParseList(*tools));
    settings.definitions = InClientsOrder(*tools, text);
    for (size_t i = 0; i < settings.callable.size(); ++i) {
      Tool& tool = settings.callable[i];
      if (tool.parameters.empty()) continue;
      tool.parameters = DumpOrdered(settings.definitions[i]["function"]["parameters"]);
    }
  }
  if (!settings.callable.empty()) settings.choice = ToolChoice::kAuto;
  if (choice != nullptr && *choice != "none") {
    // Some clients send "auto" without any tool.
    if (settings.callable.empty() && *choice == "auto") return settings;
    if (settings.callable.empty()) {
      return InvalidValue("tool_choice", "'tool_choice' needs 'tools', which are missing");
    }
    MOESERVE_RETURN_IF_ERROR(ParseChoice(*choice, settings));
  } else if (choice != nullptr) {
    settings.choice = ToolChoice::kNone;
  }
  if (settings.choice == ToolChoice::kNamed) settings.parallel = false;
  if (!settings.enabled()) {
    settings.callable.clear();
    settings.definitions.clear();
  }
  return settings;
}

}  // namespace moeserve::server
