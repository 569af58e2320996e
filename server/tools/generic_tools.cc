#include "server/tools/generic_tools.h"

#include <string>
#include <utility>

#include "base/error_text.h"
#include "server/base/json_fields.h"

namespace moeserve::server {
namespace {

std::string Description(const OrderedJson& definitions, const CallSyntax& syntax) {
  std::string text =
      "You can call functions. Each line describes one, with a JSON schema of its arguments:\n";
  for (const OrderedJson& tool : definitions) text += DumpOrdered(tool["function"]) + "\n";
  text += Concat("To call a function, answer with ", syntax.opening, syntax.before_name, "NAME",
                 syntax.before_arguments, "{...}", syntax.after_arguments, syntax.closing,
                 " and nothing else.");
  return text;
}

std::string CallText(const OrderedJson& calls, const CallSyntax& syntax) {
  std::string text(syntax.opening);
  for (const OrderedJson& call : calls) {
    if (text.size() > syntax.opening.size()) text += syntax.separator;
    const OrderedJson& function = call["function"];
    text += Concat(syntax.before_name, function["name"].get<std::string>(), syntax.before_arguments,
                   DumpOrdered(function["arguments"]), syntax.after_arguments);
  }
  text += syntax.closing;
  return text;
}

std::string ContentOf(const OrderedJson& message) {
  const auto content = message.find("content");
  return content != message.end() && content->is_string() ? content->get<std::string>() : "";
}

std::string Joined(std::string first, std::string_view second, std::string_view between) {
  if (!first.empty() && !second.empty()) first += between;
  first += second;
  return first;
}

// Returns the message as the template gets it.
OrderedJson Plain(const OrderedJson& message, const CallSyntax& syntax) {
  const std::string role = message["role"].get<std::string>();
  std::string content = ContentOf(message);
  if (role == "tool") {
    const OrderedJson name = message.value("name", OrderedJson(nullptr));
    OrderedJson result = OrderedJson::object();
    if (name.is_string()) result["name"] = name;
    result["result"] = std::move(content);
    return {{"role", "user"}, {"content", DumpOrdered(result)}};
  }
  OrderedJson plain = message;
  if (message.contains("tool_calls")) {
    plain["content"] = Joined(std::move(content), CallText(message["tool_calls"], syntax), "\n");
    plain.erase("tool_calls");
  }
  return plain;
}

}  // namespace

bool RendersTools(std::string_view template_source) {
  return template_source.find("tools") != std::string_view::npos;
}

OrderedJson DescribeTools(const OrderedJson& definitions, const OrderedJson& messages,
                          const CallSyntax& syntax, ToolText place) {
  const std::string description = Description(definitions, syntax);
  OrderedJson out = OrderedJson::array();
  // Many templates demand that user and assistant alternate, so results of several tools, and what
  // the user says after them, are one message.
  bool after_result = false;
  for (const OrderedJson& message : messages) {
    OrderedJson plain = Plain(message, syntax);
    if (after_result && plain["role"] == "user") {
      out.back()["content"] = Joined(ContentOf(out.back()), ContentOf(plain), "\n");
    } else {
      out.push_back(std::move(plain));
      after_result = message["role"] == "tool";
    }
  }
  const std::string_view role = place == ToolText::kInSystemMessage ? "system" : "user";
  for (OrderedJson& message : out) {
    const bool here =
        message["role"] == role || (role == "system" && message["role"] == "developer");
    if (!here) continue;
    message["content"] = role == "system" ? Joined(ContentOf(message), description, "\n\n")
                                          : Joined(description, ContentOf(message), "\n\n");
    return out;
  }
  out.insert(out.begin(), OrderedJson{{"role", role}, {"content", description}});
  return out;
}

}  // namespace moeserve::server
