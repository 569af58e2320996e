#include "server/tools/generic_tools.h"

#include <string>
#include <utility>

#include "base/message.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::ordered_json;

std::string Dump(const Json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

std::string Description(const Json& definitions, const CallSyntax& syntax) {
  std::string text =
      "You can call functions. Each line describes one, with a JSON schema of its arguments:\n";
  for (const Json& tool : definitions) text += Dump(tool["function"]) + "\n";
  text += Concat("To call a function, answer with ", syntax.opening, syntax.before_name, "NAME",
                 syntax.before_arguments, "{...}", syntax.after_arguments, syntax.closing,
                 " and nothing else.");
  return text;
}

std::string CallText(const Json& calls, const CallSyntax& syntax) {
  std::string text(syntax.opening);
  for (const Json& call : calls) {
    if (text.size() > syntax.opening.size()) text += syntax.separator;
    const Json& function = call["function"];
    text += Concat(syntax.before_name, function["name"].get<std::string>(), syntax.before_arguments,
                   Dump(function["arguments"]), syntax.after_arguments);
  }
  text += syntax.closing;
  return text;
}

std::string ContentOf(const Json& message) {
  const auto content = message.find("content");
  return content != message.end() && content->is_string() ? content->get<std::string>() : "";
}

std::string Joined(std::string first, std::string_view second, std::string_view between) {
  if (!first.empty() && !second.empty()) first += between;
  first += second;
  return first;
}

// Returns the message as the template gets it.
Json Plain(const Json& message, const CallSyntax& syntax) {
  const std::string role = message["role"].get<std::string>();
  std::string content = ContentOf(message);
  if (role == "tool") {
    const Json name = message.value("name", Json(nullptr));
    Json result = Json::object();
    if (name.is_string()) result["name"] = name;
    result["result"] = std::move(content);
    return {{"role", "user"}, {"content", Dump(result)}};
  }
  if (message.contains("tool_calls")) {
    content = Joined(std::move(content), CallText(message["tool_calls"], syntax), "\n");
    return {{"role", role}, {"content", std::move(content)}};
  }
  return message;
}

}  // namespace

bool RendersTools(std::string_view template_source) {
  return template_source.find("tools") != std::string_view::npos;
}

Json DescribeTools(const Json& definitions, const Json& messages, const CallSyntax& syntax,
                   ToolText place) {
  const std::string description = Description(definitions, syntax);
  Json out = Json::array();
  // Many templates demand that user and assistant alternate, so results of several tools, and what
  // the user says after them, are one message.
  bool after_result = false;
  for (const Json& message : messages) {
    Json plain = Plain(message, syntax);
    if (after_result && plain["role"] == "user") {
      out.back()["content"] = Joined(ContentOf(out.back()), ContentOf(plain), "\n");
    } else {
      out.push_back(std::move(plain));
      after_result = message["role"] == "tool";
    }
  }
  const std::string_view role = place == ToolText::kInSystemMessage ? "system" : "user";
  for (Json& message : out) {
    const bool here =
        message["role"] == role || (role == "system" && message["role"] == "developer");
    if (!here) continue;
    message["content"] = role == "system" ? Joined(ContentOf(message), description, "\n\n")
                                          : Joined(description, ContentOf(message), "\n\n");
    return out;
  }
  out.insert(out.begin(), Json{{"role", role}, {"content", description}});
  return out;
}

}  // namespace moeserve::server
