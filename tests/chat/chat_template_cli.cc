// Renders chat templates for tests/chat/test_differential.py. Reads one JSON object per line and
// writes one per line.
//
// Input: {"template", "messages", "trusted", "untrusted", "now"}. Output: {"text", "trusted":
// [[begin, end], ...]} or {"error"}.
#include <iostream>
#include <map>
#include <string>

#include "engine/text/chat/chat_template.h"

int main() {
  using OrderedJson = nlohmann::ordered_json;
  namespace chat = moeserve::chat;
  std::map<std::string, moeserve::Result<std::unique_ptr<const chat::ChatTemplate>>> compiled;
  for (std::string line; std::getline(std::cin, line);) {
    const OrderedJson request = OrderedJson::parse(line);
    const std::string source = request["template"];
    auto it = compiled.find(source);
    if (it == compiled.end()) {
      it = compiled.emplace(source, chat::ChatTemplate::Compile(source)).first;
    }
    chat::RenderInput input;
    input.messages = request["messages"];
    input.trusted = request["trusted"];
    input.untrusted = request["untrusted"];
    input.now = request["now"];
    OrderedJson answer;
    const auto prompt = it->second.ok()
                            ? (*it->second)->Render(input)
                            : moeserve::Result<chat::RenderedPrompt>(it->second.status());
    if (prompt.ok()) {
      answer["text"] = prompt->text;
      answer["trusted"] = OrderedJson::array();
      for (const moeserve::TextSpan& span : prompt->trusted) {
        answer["trusted"].push_back({span.begin, span.end});
      }
    } else {
      answer["error"] = std::string(prompt.status().message());
    }
    std::cout << answer.dump() << "\n";
  }
}
