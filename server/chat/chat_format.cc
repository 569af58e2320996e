#include "server/chat/chat_format.h"

#include <algorithm>
#include <utility>

#include "base/error_text.h"
#include "engine/text/chat/text.h"
#include "server/base/api_error.h"
#include "server/base/request_id.h"
#include "server/tools/generic_tools.h"

namespace moeserve::server {
namespace {

absl::Status TemplateError(const absl::Status& status, std::string_view param) {
  return MakeError(absl::StatusCode::kInvalidArgument, "invalid_template",
                   Printable(std::string(status.message()), 300), param);
}

// Returns a text that nobody can know in advance, so that it occurs neither in the messages nor in
// the template: random digits between two Unicode noncharacters. Templates may change letters.
std::string ChooseMark() {
  std::string mark = "\xEF\xB7\x90";
  for (const char c : NewRequestId()) mark += c <= '9' ? c : static_cast<char>('0' + (c - 'a'));
  return mark + "\xEF\xB7\x91";
}

// Changes the role "developer" to "system" if the template does not mention developers.
void RenameDevelopers(std::string_view source, OrderedJson& messages) {
  if (source.find("developer") != std::string_view::npos) return;
  for (OrderedJson& message : messages) {
    if (message["role"] == "developer") message["role"] = "system";
  }
}

// Whether templates can choose how much the model reasons, and by which variables.
struct EffortVariables {
  explicit EffortVariables(std::string_view source)
      : effort(source.find("reasoning_effort") != std::string_view::npos),
        on_off(source.find("enable_thinking") != std::string_view::npos) {}
  bool effort;
  bool on_off;
};

void SetEffort(const Conversation& conversation, std::string_view source, OrderedJson& variables) {
  if (!conversation.reasoning_effort) return;
  const EffortVariables has(source);
  if (has.effort) variables["reasoning_effort"] = *conversation.reasoning_effort;
  if (has.on_off) variables["enable_thinking"] = *conversation.reasoning_effort != "none";
}

// Returns whether the conversation has messages whose form depends on the template.
bool DependsOnForm(const Conversation& conversation) {
  return std::any_of(
      conversation.messages.begin(), conversation.messages.end(), [](const OrderedJson& message) {
        return message.contains("tool_calls") || message.contains("reasoning_content");
      });
}

// Returns whether the template has written the start of the reasoning at the end of the prompt.
bool EndsInReasoning(const chat::RenderedPrompt& prompt) {
  const size_t end = prompt.text.find_last_not_of(" \t\r\n");
  if (end == std::string::npos || prompt.trusted.empty()) return false;
  const std::string_view text = std::string_view(prompt.text).substr(0, end + 1);
  return text.ends_with(kThinkTags.begin) &&
         prompt.trusted.back().begin <= text.size() - kThinkTags.begin.size() &&
         prompt.trusted.back().end >= text.size();
}

}  // namespace

ChatFormat::ChatFormat() : ChatFormat(TokenizerConfig()) {}

ChatFormat::ChatFormat(const TokenizerConfig& config, const CallSyntax* call_syntax)
    : call_syntax_(call_syntax) {
  const auto add = [&](const char* name, const std::optional<std::string>& token) {
    if (token) special_tokens_[name] = *token;
  };
  add("bos_token", config.bos_token);
  add("eos_token", config.eos_token);
  add("unk_token", config.unk_token);
  add("pad_token", config.pad_token);
  if (!config.chat_template) {
    status_ = absl::NotFoundError("the model has no chat template");
    return;
  }
  auto compiled = chat::ChatTemplate::Compile(*config.chat_template);
  if (compiled.ok()) {
    template_.compiled = *std::move(compiled);
    template_.history = FindHistoryForm(*template_.compiled, special_tokens_);
  } else {
    status_ = compiled.status();
  }
}

Result<const ChatTemplateInfo*> ChatFormat::TemplateFor(const Conversation& conversation,
                                                        ChatTemplateInfo& own) const {
  if (conversation.chat_template) {
    auto result = chat::ChatTemplate::Compile(*conversation.chat_template);
    if (!result.ok()) return TemplateError(result.status(), "chat_template");
    own.compiled = *std::move(result);
    if (DependsOnForm(conversation) || conversation.tools.enabled()) {
      own.history = FindHistoryForm(*own.compiled, special_tokens_);
    }
    return &own;
  }
  if (absl::IsNotFound(status_)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "invalid_template",
                     "the model has no chat template; use /v1/completions, or have the server "
                     "started with --chat-template",
                     "messages");
  }
  if (!status_.ok()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "invalid_template",
                     Concat("the model's chat template cannot be used: ",
                            Printable(std::string(status_.message()), 300)),
                     "messages");
  }
  return &template_;
}

Result<chat::RenderedPrompt> ChatFormat::Render(const Conversation& conversation,
                                                const RequestLimits& limits, std::time_t now,
                                                SplitRules* split) const {
  ChatTemplateInfo own;
  MOESERVE_ASSIGN_OR_RETURN(const ChatTemplateInfo* const info, TemplateFor(conversation, own));
  const chat::ChatTemplate* const compiled = info->compiled.get();
  const CallSyntax& syntax =
      call_syntax_ != nullptr ? *call_syntax_ : ChooseCallSyntax(compiled->source());
  chat::RenderInput input;
  input.untrusted = conversation.template_variables;
  input.trusted = special_tokens_;
  input.trusted["add_generation_prompt"] = conversation.add_generation_prompt;
  // Templates of models with tools or documents check whether these variables are none.
  input.trusted["tools"] = nullptr;
  input.trusted["documents"] = nullptr;
  SetEffort(conversation, compiled->source(), input.trusted);
  input.now = now;
  input.limits.max_output_bytes = limits.max_rendered_bytes;
  std::string mark;
  if (conversation.continue_final_message) {
    mark = ChooseMark();
  }
  const auto render = [&](OrderedJson messages) -> Result<chat::RenderedPrompt> {
    input.messages = std::move(messages);
    RenameDevelopers(compiled->source(), input.messages);
    ApplyHistoryForm(info->history, conversation.argument_texts, input.messages);
    if (!mark.empty()) {
      OrderedJson& content = input.messages.back()["content"];
      content = Concat(content.is_string() ? content.get<std::string>() : std::string(), mark, ' ');
    }
    return compiled->Render(input);
  };
  const auto run = [&]() -> Result<chat::RenderedPrompt> {
    const ToolSettings& tools = conversation.tools;
    if (!tools.enabled()) return render(conversation.messages);
    if (RendersTools(compiled->source())) {
      input.trusted.erase("tools");
      input.untrusted["tools"] = tools.definitions;
      return render(conversation.messages);
    }
    auto prompt = render(DescribeTools(tools.definitions, conversation.messages, syntax,
                                       ToolText::kInSystemMessage));
    // Some templates refuse system messages.
    if (!absl::IsInvalidArgument(prompt.status())) return prompt;
    return render(
        DescribeTools(tools.definitions, conversation.messages, syntax, ToolText::kInUserMessage));
  };
  auto prompt = run();
  if (absl::IsFailedPrecondition(prompt.status())) {
    return TemplateError(prompt.status(),
                         conversation.chat_template ? "chat_template" : "messages");
  }
  if (absl::IsInvalidArgument(prompt.status())) {
    return InvalidValue("messages", Printable(std::string(prompt.status().message()), 300));
  }
  if (!prompt.ok()) return prompt.status();
  if (!mark.empty() && !CutAtMark(mark, *prompt).ok()) {
    return InvalidValue("continue_final_message",
                        "'continue_final_message': the chat template does not write the final "
                        "message as it is");
  }
  if (split != nullptr) {
    *split = {.syntax = &syntax, .has_tools = conversation.tools.enabled()};
    if (split->has_tools) split->tools = Offered(conversation.tools.callable);
    split->reasons = HasThinkTags(compiled->source()) && !syntax.has_channels && mark.empty();
    split->begins_in_reasoning = split->reasons && EndsInReasoning(*prompt);
    split->single_call = info->history.single_call;
  }
  return prompt;
}

std::string ChatFormat::EffortWarning(const Conversation& conversation) const {
  if (!conversation.reasoning_effort) return "";
  const std::string_view source = conversation.chat_template      ? *conversation.chat_template
                                  : template_.compiled != nullptr ? template_.compiled->source()
                                                                  : std::string_view();
  const EffortVariables has(source);
  // A model that does not reason is at the effort "none".
  const std::string& effort = *conversation.reasoning_effort;
  if (has.effort || has.on_off || (effort == "none" && !HasThinkTags(source))) return "";
  return Concat("'reasoning_effort' has no effect: the model's chat template cannot set it to ",
                effort);
}

Result<ChatPrompt> ChatFormat::Encode(const Conversation& conversation, const Tokenizer& tokenizer,
                                      const RequestLimits& limits, std::time_t now) const {
  ChatPrompt out;
  MOESERVE_ASSIGN_OR_RETURN(const chat::RenderedPrompt prompt,
                            Render(conversation, limits, now, &out.split));
  auto ids = tokenizer.EncodeTrusted(prompt.text, prompt.trusted, conversation.add_special_tokens);
  if (!ids.ok()) return WithApiCode(ids.status(), "invalid_value");
  if (ids->empty()) return InvalidValue("messages", "the conversation has no tokens");
  out.ids = *std::move(ids);
  return out;
}

absl::Status CutAtMark(std::string_view mark, chat::RenderedPrompt& prompt) {
  const size_t at = prompt.text.rfind(mark);
  if (at == std::string::npos) return absl::NotFoundError("the mark is not there");
  const size_t after = at + mark.size();
  std::vector<TextSpan>& trusted = prompt.trusted;
  // The content ends with the mark and a space. If this space is still there, the template does not
  // trim the content. A space in trusted text is the template's own and proves nothing.
  const bool kept_space = prompt.text.compare(after, 1, " ") == 0 &&
                          std::none_of(trusted.begin(), trusted.end(), [&](const TextSpan& s) {
                            return s.begin <= after && after < s.end;
                          });
  while (!trusted.empty() && trusted.back().begin >= at) trusted.pop_back();
  if (!trusted.empty()) trusted.back().end = std::min(trusted.back().end, at);
  prompt.text.resize(at);
  if (kept_space) return absl::OkStatus();
  // White space that the template wrote, such as the line break after a role, is kept.
  const size_t written_by_template = trusted.empty() ? 0 : trusted.back().end;
  const size_t stripped = chat::StripBounds(prompt.text, nullptr, false, true).end;
  prompt.text.resize(std::max(written_by_template, stripped));
  return absl::OkStatus();
}

}  // namespace moeserve::server
