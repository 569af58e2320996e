#include "server/tools/call_syntax.h"

#include "base/message.h"

namespace moeserve::server {
namespace {

// A template can contain the texts of several rows: the special cases come first.
constexpr CallSyntax kSyntaxes[] = {
    // gpt-oss. A call ends the turn.
    {.name = "harmony",
     .template_text = "<|channel|>",
     .opening = "",
     .before_name = "<|channel|>commentary to=functions.",
     .before_arguments = " <|constrain|>json<|message|>",
     .after_arguments = "",
     .separator = "",
     .closing = "",
     .trigger = "<|channel|>commentary to=functions.",
     .single_call = true,
     .has_channels = true},
    // Mistral since version 11 of its tokenizers.
    {.name = "mistral-args",
     .template_text = "[ARGS]",
     .opening = "",
     .before_name = "[TOOL_CALLS]",
     .before_arguments = "[ARGS]",
     .after_arguments = "",
     .separator = "",
     .closing = "",
     .trigger = "[TOOL_CALLS]",
     .id_length = 9},
    {.name = "mistral-space",
     .template_text = "[TOOL_CALLS] [",
     .opening = "[TOOL_CALLS] [",
     .before_name = "{\"name\": \"",
     .before_arguments = "\", \"arguments\": ",
     .after_arguments = "}",
     .separator = ", ",
     .closing = "]",
     .trigger = "[TOOL_CALLS]",
     .id_length = 9},
    {.name = "mistral",
     .template_text = "[TOOL_CALLS]",
     .opening = "[TOOL_CALLS][",
     .before_name = "{\"name\": \"",
     .before_arguments = "\", \"arguments\": ",
     .after_arguments = "}",
     .separator = ", ",
     .closing = "]",
     .trigger = "[TOOL_CALLS]",
     .id_length = 9},
    // DeepSeek V3 and R1 write the arguments as a block of Markdown, V3.1 does not.
    {.name = "deepseek-v3",
     .template_text = "```json",
     .opening = "<｜tool▁calls▁begin｜>",
     .before_name = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
     .before_arguments = "\n```json\n",
     .after_arguments = "\n```<｜tool▁call▁end｜>",
     .separator = "\n",
     .closing = "<｜tool▁calls▁end｜>",
     .trigger = "<｜tool▁calls▁begin｜>"},
    {.name = "deepseek-v3.1",
     .template_text = "<｜tool▁calls▁begin｜>",
     .opening = "<｜tool▁calls▁begin｜>",
     .before_name = "<｜tool▁call▁begin｜>",
     .before_arguments = "<｜tool▁sep｜>",
     .after_arguments = "<｜tool▁call▁end｜>",
     .separator = "",
     .closing = "<｜tool▁calls▁end｜>",
     .trigger = "<｜tool▁calls▁begin｜>"},
    // Hermes, Qwen and many others.
    {.name = "hermes",
     .template_text = "<tool_call>",
     .opening = "",
     .before_name = "<tool_call>\n{\"name\": \"",
     .before_arguments = "\", \"arguments\": ",
     .after_arguments = "}\n</tool_call>",
     .separator = "\n",
     .closing = "",
     .trigger = "<tool_call>"},
    {.name = "llama3",
     .template_text = "<|start_header_id|>",
     .opening = "",
     .before_name = "{\"name\": \"",
     .before_arguments = "\", \"parameters\": ",
     .after_arguments = "}",
     .separator = "; ",
     .closing = "",
     .trigger = "{\"name\": \""},
    {.name = "json",
     .template_text = "",
     .opening = "[",
     .before_name = "{\"name\": \"",
     .before_arguments = "\", \"arguments\": ",
     .after_arguments = "}",
     .separator = ", ",
     .closing = "]",
     .trigger = "[{\"name\": \""},
};

const CallSyntax& Generic() { return kSyntaxes[std::size(kSyntaxes) - 1]; }

bool Matches(const CallSyntax& syntax, std::string_view source) {
  if (syntax.template_text.empty() || source.find(syntax.template_text) == std::string_view::npos)
    return false;
  // "```json" alone does not name a family.
  return syntax.name != "deepseek-v3" || source.find(syntax.opening) != std::string_view::npos;
}

// FNV-1a, whose values are the same everywhere.
uint64_t Hash(std::string_view text) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

}  // namespace

std::span<const CallSyntax> CallSyntaxes() { return kSyntaxes; }

const CallSyntax* FindCallSyntax(std::string_view name) {
  for (const CallSyntax& syntax : kSyntaxes) {
    if (syntax.name == name) return &syntax;
  }
  return nullptr;
}

const CallSyntax& ChooseCallSyntax(std::string_view template_source) {
  for (const CallSyntax& syntax : kSyntaxes) {
    if (Matches(syntax, template_source)) return syntax;
  }
  return Generic();
}

bool HasThinkTags(std::string_view template_source) {
  return template_source.find(kThinkTags.begin) != std::string_view::npos ||
         template_source.find(kThinkTags.end) != std::string_view::npos;
}

std::string ToolCallId(const CallSyntax& syntax, std::string_view response_id, int choice,
                       int call) {
  const std::string whole = Concat(response_id, '-', choice, '-', call);
  if (syntax.id_length == 0) return Concat("call_", whole);
  constexpr std::string_view kDigits =
      "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  uint64_t hash = Hash(whole);
  std::string id;
  for (int i = 0; i < syntax.id_length; ++i, hash /= kDigits.size()) {
    id += kDigits[hash % kDigits.size()];
  }
  return id;
}

}  // namespace moeserve::server
