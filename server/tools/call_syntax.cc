#include "server/tools/call_syntax.h"

#include "base/error_text.h"

namespace moeserve::server {
namespace {

// A template can contain the texts of several rows: the special cases come first.
constexpr CallSyntax kSyntaxes[] = {
    // gpt-oss. A call ends the turn.
    {.name = "harmony",
     .template_text = "<|channel|>",
     .before_name = "<|channel|>commentary to=functions.",
     .before_arguments = " <|constrain|>json<|message|>",
     .trigger = "<|channel|>commentary to=functions.",
     .single_call = true,
     .has_channels = true},
    // Mistral since version 11 of its tokenizers.
    {.name = "mistral-args",
     .template_text = "[ARGS]",
     .before_name = "[TOOL_CALLS]",
     .before_arguments = "[ARGS]",
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
     .closing = "<｜tool▁calls▁end｜>",
     .trigger = "<｜tool▁calls▁begin｜>"},
    {.name = "kimi-k2",
     .template_text = "<|tool_calls_section_begin|>",
     .opening = "<|tool_calls_section_begin|>",
     .before_name = "<|tool_call_begin|>functions.",
     .before_arguments = "<|tool_call_argument_begin|>",
     .after_arguments = "<|tool_call_end|>",
     .closing = "<|tool_calls_section_end|>",
     .trigger = "<|tool_calls_section_begin|>",
     .has_index = true},
    {.name = "minimax-m2",
     .template_text = "<minimax:tool_call>",
     .opening = "<minimax:tool_call>\n",
     .before_name = "<invoke name=\"",
     .before_arguments = "\">\n",
     .after_arguments = "</invoke>",
     .separator = "\n",
     .closing = "\n</minimax:tool_call>",
     .trigger = "<minimax:tool_call>",
     .before_key = "<parameter name=\"",
     .before_value = "\">",
     .after_value = "</parameter>\n"},
    {.name = "glm-4.5",
     .template_text = "<arg_key>",
     .before_name = "<tool_call>",
     .before_arguments = "\n",
     .after_arguments = "</tool_call>",
     .separator = "\n",
     .trigger = "<tool_call>",
     .before_key = "<arg_key>",
     .before_value = "</arg_key>\n<arg_value>",
     .after_value = "</arg_value>\n"},
    {.name = "qwen3-coder",
     .template_text = "<parameter=",
     .before_name = "<tool_call>\n<function=",
     .before_arguments = ">\n",
     .after_arguments = "</function>\n</tool_call>",
     .separator = "\n",
     .trigger = "<tool_call>",
     .before_key = "<parameter=",
     .before_value = ">\n",
     .after_value = "\n</parameter>\n"},
    // Hermes, Qwen and many others.
    {.name = "hermes",
     .template_text = "<tool_call>",
     .before_name = "<tool_call>\n{\"name\": \"",
     .before_arguments = "\", \"arguments\": ",
     .after_arguments = "}\n</tool_call>",
     .separator = "\n",
     .trigger = "<tool_call>"},
    {.name = "llama3",
     .template_text = "<|start_header_id|>",
     .before_name = "{\"name\": \"",
     .before_arguments = "\", \"parameters\": ",
     .after_arguments = "}",
     .separator = "; ",
     .trigger = "{\"name\": \"",
     .plain_json = true},
    {.name = "json",
     .opening = "[",
     .before_name = "{\"name\": \"",
     .before_arguments = "\", \"arguments\": ",
     .after_arguments = "}",
     .separator = ", ",
     .closing = "]",
     .trigger = "[{\"name\": \"",
     .plain_json = true},
};

const CallSyntax& Generic() { return kSyntaxes[std::size(kSyntaxes) - 1]; }

bool IsLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

// Returns whether `text` has a tag whose name consists of letters, with or without attributes.
// (Prompts describe JSON with marks such as "<function-name>".)
bool HasTag(std::string_view text) {
  for (size_t at = text.find('<'); at != std::string_view::npos; at = text.find('<', at + 1)) {
    size_t end = at + 1;
    while (end < text.size() && IsLetter(text[end])) ++end;
    if (end > at + 1 && end < text.size() && (text[end] == '>' || text[end] == '=')) return true;
  }
  return false;
}

// Returns whether what a template writes within the tags of Hermes is something other than a JSON
// object.
bool IsForeignInTags(std::string_view source) {
  constexpr std::string_view kBegin = "<tool_call>";
  constexpr std::string_view kEnd = "</tool_call>";
  for (size_t at = source.find(kBegin); at != std::string_view::npos;) {
    std::string_view inside = source.substr(at + kBegin.size());
    at = source.find(kBegin, at + 1);
    // A name right behind the tag, or a block of Markdown after it.
    if (!inside.empty() && IsLetter(inside[0])) return true;
    const size_t end = inside.find(kEnd);
    if (end == std::string_view::npos) continue;
    inside = inside.substr(0, end);
    if (inside.find("```") != std::string_view::npos || HasTag(inside)) return true;
  }
  return false;
}

bool Matches(const CallSyntax& syntax, std::string_view source) {
  if (syntax.template_text.empty() || source.find(syntax.template_text) == std::string_view::npos)
    return false;
  if (syntax.name == "hermes" && IsForeignInTags(source)) return false;
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
