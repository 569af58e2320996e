// Turns a conversation into the tokens of a prompt with the model's chat template.
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
#include "model_loaders/tokenizer/tokenizer_json.h"
#include "server/base/limits.h"
#include "server/openai/chat_conversation.h"

namespace moeserve::server {

// Immutable and thread-safe.
class ChatFormat {
 public:
  // For a model without a chat template: refuses conversations that bring no template.
  ChatFormat();
  // Takes the template and the special tokens from `config`. If the template is absent or does not
  // compile, refuses as above, with the reason.
  explicit ChatFormat(const TokenizerConfig& config);

  // OK, or why there is no template: NotFound if the model has none, else the fault of its
  // template.
  const absl::Status& status() const { return status_; }

  // Renders the conversation. InvalidArgument, code "invalid_value": the template refuses the
  // conversation, or its text is too long; code "invalid_template": the template is faulty. Takes
  // up to about a second; `now` is the time for templates.
  Result<chat::RenderedPrompt> Render(const Conversation& conversation, const RequestLimits& limits,
                                      std::time_t now) const;

  // Renders the chat template and tokenizes the result, which is never empty. Contents of messages
  // are tokenized as plain text, even where they spell a special token.
  Result<std::vector<TokenId>> Encode(const Conversation& conversation, const Tokenizer& tokenizer,
                                      const RequestLimits& limits, std::time_t now) const;

 private:
  absl::Status status_;
  std::unique_ptr<const chat::ChatTemplate> template_;  // null if status_ is not OK
  nlohmann::ordered_json special_tokens_ = nlohmann::ordered_json::object();
};

// Cuts `prompt` off at the last `mark`. The mark and a space were appended to the client's text; if
// the space is missing, the template trims, and trailing white space of the client is cut too.
// NotFound: the mark does not occur.
absl::Status CutAtMark(std::string_view mark, chat::RenderedPrompt& prompt);

}  // namespace moeserve::server
