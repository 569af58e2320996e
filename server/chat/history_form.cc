#include "server/chat/history_form.h"

#include <string_view>
#include <utility>

namespace moeserve::server {
namespace {

// A key of arguments that no template contains.
constexpr std::string_view kKey = "moeserve_argument";

// Returns whether `word` occurs in `text` as a whole name.
bool HasName(std::string_view text, std::string_view word) {
  const auto is_letter = [&](size_t at) {
    if (at >= text.size()) return false;
    const char c = text[at];
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  };
  for (size_t at = text.find(word); at != std::string_view::npos; at = text.find(word, at + 1)) {
    if (!(at > 0 && is_letter(at - 1)) && !is_letter(at + word.size())) return true;
  }
  return false;
}

// A conversation in which the assistant calls a tool.
OrderedJson Calling(OrderedJson content) {
  OrderedJson call = {{"id", "call00001"}, {"type", "function"}};
  call["function"]["name"] = "lookup";
  call["function"]["arguments"][std::string(kKey)] = "x";
  OrderedJson messages = OrderedJson::array();
  messages.push_back({{"role", "user"}, {"content", "a"}});
  messages.push_back({{"role", "assistant"}, {"content", std::move(content)}});
  messages.back()["tool_calls"] = OrderedJson::array({std::move(call)});
  messages.push_back(
      {{"role", "tool"}, {"content", "1"}, {"name", "lookup"}, {"tool_call_id", "call00001"}});
  return messages;
}

// One in which the assistant calls it twice at once.
OrderedJson CallingTwice() {
  OrderedJson messages = Calling("");
  OrderedJson call = messages[1]["tool_calls"][0];
  call["id"] = "call00002";
  messages[1]["tool_calls"].push_back(std::move(call));
  OrderedJson result = messages[2];
  result["tool_call_id"] = "call00002";
  messages.push_back(std::move(result));
  return messages;
}

class Prober {
 public:
  Prober(const chat::ChatTemplate& compiled, const OrderedJson& variables) : compiled_(compiled) {
    // The conversations are short; what a template that needs more would show is not found out.
    input_.limits.max_steps = 500'000;
    input_.limits.max_bytes = size_t{16} << 20;
    input_.trusted = variables;
    input_.trusted["add_generation_prompt"] = true;
    input_.trusted["documents"] = nullptr;
    // Templates that look for tools before they show calls find one, under another name.
    OrderedJson tool = {{"type", "function"}};
    tool["function"] = {{"name", "other"}, {"description", "b"}};
    tool["function"]["parameters"] = {{"type", "object"}, {"properties", OrderedJson::object()}};
    input_.untrusted["tools"] = OrderedJson::array({std::move(tool)});
  }

  Result<std::string> Render(const HistoryForm& form, OrderedJson messages) {
    ApplyHistoryForm(form, {"{\"" + std::string(kKey) + "\": \"x\"}"}, messages);
    input_.messages = std::move(messages);
    MOESERVE_ASSIGN_OR_RETURN(chat::RenderedPrompt prompt, compiled_.Render(input_));
    return std::move(prompt.text);
  }

  // Returns whether the template shows the arguments of a call, neither as Python writes an object
  // nor as a JSON string within JSON.
  bool ShowsCall(const HistoryForm& form) {
    const auto text = Render(form, Calling(""));
    const auto has = [&](std::string_view before) {
      return text->find(std::string(before) + std::string(kKey)) != std::string::npos;
    };
    return text.ok() && has("") && !has("'") && !has("\\\"");
  }

 private:
  const chat::ChatTemplate& compiled_;
  chat::RenderInput input_;
};

}  // namespace

HistoryForm FindHistoryForm(const chat::ChatTemplate& compiled, const OrderedJson& variables) {
  HistoryForm form;
  for (const char* name : {"reasoning", "thinking"}) {
    if (HasName(compiled.source(), name)) form.reasoning_names.push_back(name);
  }
  if (!HasName(compiled.source(), "tool_calls")) return form;
  Prober prober(compiled, variables);
  const auto find = [&] {
    for (const bool null_content : {false, true}) {
      for (const bool text_arguments : {false, true}) {
        form.null_content = null_content;
        form.text_arguments = text_arguments;
        if (prober.ShowsCall(form)) return true;
      }
    }
    return false;
  };
  if (!find()) form.null_content = form.text_arguments = false;
  form.single_call =
      prober.Render(form, Calling("")).ok() && !prober.Render(form, CallingTwice()).ok();
  OrderedJson messages = Calling("b");
  messages[1]["reasoning_content"] = "c";
  if (prober.Render(form, messages).ok()) return form;
  form.joins_reasoning = true;
  form.joins_reasoning = prober.Render(form, std::move(messages)).ok();
  return form;
}

void ApplyHistoryForm(const HistoryForm& form, const std::vector<std::string>& argument_texts,
                      OrderedJson& messages) {
  size_t next = 0;
  for (OrderedJson& message : messages) {
    const auto calls = message.find("tool_calls");
    const bool has_calls = calls != message.end();
    if (has_calls) {
      for (OrderedJson& call : *calls) {
        const size_t index = next++;
        if (form.text_arguments && index < argument_texts.size()) {
          call["function"]["arguments"] = argument_texts[index];
        }
      }
    }
    const auto reasoning = message.find("reasoning_content");
    if (reasoning != message.end()) {
      OrderedJson& content = message["content"];
      if (form.joins_reasoning && has_calls && content.is_string() && content != "") {
        *reasoning = reasoning->get<std::string>() + "\n\n" + content.get<std::string>();
        content = "";
      }
      const OrderedJson text = message["reasoning_content"];
      for (const char* name : form.reasoning_names) message[name] = text;
    }
    if (form.null_content && has_calls && message["content"] == "") message["content"] = nullptr;
  }
}

}  // namespace moeserve::server
