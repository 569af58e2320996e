// Converts a conversation to the tokens of a prompt by the model's chat template.
#pragma once

#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/text/chat/chat_template.h"
#include "engine/text/tokenizer/tokenizer.h"
#include "model_loaders/tokenizer/tokenizer_config.h"
#include "server/base/limits.h"
#include "server/chat/chat_conversation.h"
#include "server/chat/history_form.h"
#include "server/tools/answer_splitter.h"
#include "server/tools/call_syntax.h"

namespace moeserve::server {

// A conversation as the model reads it.
struct ChatPrompt {
  std::vector<TokenId> ids;
  SplitRules split;  // how the answer is read
};

// A compiled template and what is found out about it.
struct ChatTemplateInfo {
  std::unique_ptr<const chat::ChatTemplate> compiled;
  HistoryForm history;
};

// Immutable and thread-safe.
class ChatFormat {
 public:
  // For a model without a chat template: Render() and Encode() refuse conversations that have no
  // template of their own.
  ChatFormat();
  // Takes the template and the special tokens from `config`. If the template is absent or does not
  // compile, Render() and Encode() refuse, with the reason, conversations that have no template of
  // their own. `call_syntax` is how the model writes calls of tools; null: what the template
  // suggests.
  explicit ChatFormat(const TokenizerConfig& config, const CallSyntax* call_syntax = nullptr);

  // Returns OK if there is a template. Otherwise returns NotFound if the model has none, or the
  // error of a template that does not compile.
  const absl::Status& status() const { return status_; }

  // Renders the conversation to text. InvalidArgument with API error code "invalid_value" if the
  // template refuses the conversation or the text is too long, and with "invalid_template" if the
  // template has an error. Takes up to about a second. `now` is the current time that templates can
  // read.
  // Sets `split`, which may be null.
  Result<chat::RenderedPrompt> Render(const Conversation& conversation, const RequestLimits& limits,
                                      std::time_t now, SplitRules* split = nullptr) const;

  // Returns a warning if the template cannot set the effort that the conversation asks for; else an
  // empty text.
  std::string EffortWarning(const Conversation& conversation) const;

  // Renders the conversation and tokenizes the text. InvalidArgument if the result would be empty.
  // The contents of messages are tokenized as plain text, even if they spell a special token.
  Result<ChatPrompt> Encode(const Conversation& conversation, const Tokenizer& tokenizer,
                            const RequestLimits& limits, std::time_t now) const;

 private:
  // Returns the template that renders `conversation`: its own, which `own` then holds, or the
  // model's.
  Result<const ChatTemplateInfo*> TemplateFor(const Conversation& conversation,
                                              ChatTemplateInfo& own) const;

  const CallSyntax* const call_syntax_;
  absl::Status status_;
  ChatTemplateInfo template_;  // `compiled` is null if status_ is not OK
  OrderedJson special_tokens_ = OrderedJson::object();
};

// Truncates `prompt` at the last `mark`. The caller had appended the mark and a space to the
// client's last message. If the space is missing in `prompt`, the template strips white space, so
// trailing white space of the client's text is removed, too. NotFound if the mark does not occur.
absl::Status CutAtMark(std::string_view mark, chat::RenderedPrompt& prompt);

}  // namespace moeserve::server
