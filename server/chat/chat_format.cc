#include "server/chat/chat_format.h"

#include <algorithm>
#include <utility>

#include "base/message.h"
#include "engine/text/chat/text.h"
#include "server/base/api_error.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::ordered_json;

absl::Status TemplateError(const absl::Status& status, std::string_view param) {
  return MakeError(absl::StatusCode::kInvalidArgument, "invalid_template",
                   Printable(std::string(status.message()), 300), param);
}

// Returns a text that occurs in none of the messages nor in the template: a number between two
// Unicode noncharacters.
std::string ChooseMark(const Json& messages, std::string_view source) {
  for (int number = 0;; ++number) {
    std::string mark = Concat("\xEF\xB7\x90", number, "\xEF\xB7\x91");
    bool taken = source.find(mark) != std::string_view::npos;
    for (const Json& message : messages) {
      for (const auto& [key, value] : message.items()) {
        taken = taken || value.get_ref<const std::string&>().find(mark) != std::string::npos;
      }
    }
    if (!taken) return mark;
  }
}

// Changes the role "developer" to "system" if the template does not mention developers.
void RenameDevelopers(std::string_view source, Json& messages) {
  if (source.find("developer") != std::string_view::npos) return;
  for (Json& message : messages) {
    if (message["role"] == "developer") message["role"] = "system";
  }
}

}  // namespace

ChatFormat::ChatFormat() : ChatFormat(TokenizerConfig()) {}

ChatFormat::ChatFormat(const TokenizerConfig& config) {
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
    template_ = *std::move(compiled);
  } else {
    status_ = compiled.status();
  }
}

Result<chat::RenderedPrompt> ChatFormat::Render(const Conversation& conversation,
                                                const RequestLimits& limits,
                                                std::time_t now) const {
  const chat::ChatTemplate* compiled = template_.get();
  std::unique_ptr<const chat::ChatTemplate> own;
  const char* template_field = "messages";
  if (conversation.chat_template) {
    template_field = "chat_template";
    auto result = chat::ChatTemplate::Compile(*conversation.chat_template);
    if (!result.ok()) return TemplateError(result.status(), template_field);
    own = *std::move(result);
    compiled = own.get();
  } else if (absl::IsNotFound(status_)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "invalid_template",
                     "the model has no chat template; use /v1/completions, or have the server "
                     "started with --chat-template",
                     template_field);
  } else if (!status_.ok()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "invalid_template",
                     Concat("the model's chat template cannot be used: ",
                            Printable(std::string(status_.message()), 300)),
                     template_field);
  }

  chat::RenderInput input;
  input.messages = conversation.messages;
  RenameDevelopers(compiled->source(), input.messages);
  input.untrusted = conversation.template_variables;
  input.trusted = special_tokens_;
  input.trusted["add_generation_prompt"] = conversation.add_generation_prompt;
  // Templates of models with tools or documents check whether these variables are none.
  input.trusted["tools"] = nullptr;
  input.trusted["documents"] = nullptr;
  input.now = now;
  input.limits.max_output_bytes = limits.max_rendered_bytes;
  std::string mark;
  if (conversation.continue_final_message) {
    mark = ChooseMark(conversation.messages, compiled->source());
    Json& content = input.messages.back()["content"];
    content = Concat(content.get_ref<const std::string&>(), mark, ' ');
  }
  auto prompt = compiled->Render(input);
  if (absl::IsFailedPrecondition(prompt.status())) {
    return TemplateError(prompt.status(), template_field);
  }
  if (absl::IsInvalidArgument(prompt.status())) {
    return InvalidValue("messages", Printable(std::string(prompt.status().message()), 300));
  }
  if (!prompt.ok()) return prompt.status();
  if (conversation.continue_final_message) {
    if (!CutAtMark(mark, *prompt).ok()) {
      return InvalidValue("continue_final_message",
                          "'continue_final_message': the chat template does not write the final "
                          "message as it is");
    }
  }
  return prompt;
}

Result<std::vector<TokenId>> ChatFormat::Encode(const Conversation& conversation,
                                                const Tokenizer& tokenizer,
                                                const RequestLimits& limits,
                                                std::time_t now) const {
  MOESERVE_ASSIGN_OR_RETURN(const chat::RenderedPrompt prompt, Render(conversation, limits, now));
  auto ids = tokenizer.EncodeTrusted(prompt.text, prompt.trusted, conversation.add_special_tokens);
  if (!ids.ok()) return WithApiCode(ids.status(), "invalid_value");
  if (ids->empty()) return InvalidValue("messages", "the conversation has no tokens");
  return *std::move(ids);
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
