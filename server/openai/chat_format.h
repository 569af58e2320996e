// From a conversation to the tokens of a prompt, by the model's chat template.
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

// Immutable: any number of threads may use one object.
class ChatFormat {
 public:
  // Of a model without a chat template: refuses every conversation, unless it brings a template.
  ChatFormat();
  // The template and the tokens that templates name. A template that is absent or does not compile
  // leaves a format that refuses, as above, with the reason.
  explicit ChatFormat(const TokenizerConfig& config);

  // OK, or why there is no template: NotFound where the model has none, else what is wrong with it.
  const absl::Status& status() const { return status_; }

  // Writes the conversation out. InvalidArgument with code "invalid_value" where the template
  // refuses the conversation or its text is too long, "invalid_template" where the fault is the
  // template's. Takes up to about a second; `now` is what templates see.
  Result<chat::RenderedPrompt> Render(const Conversation& conversation, const RequestLimits& limits,
                                      std::time_t now) const;

  // Render() and its tokens, of which there is at least one. What messages contain is ordinary text
  // even where it spells a special token.
  Result<std::vector<TokenId>> Encode(const Conversation& conversation, const Tokenizer& tokenizer,
                                      const RequestLimits& limits, std::time_t now) const;

 private:
  absl::Status status_;
  std::unique_ptr<const chat::ChatTemplate> template_;  // null if status_ is not OK
  nlohmann::ordered_json special_tokens_ = nlohmann::ordered_json::object();
};

// Cuts the end of `prompt` off, from the last place where `mark` stands. The mark was put behind
// the client's text together with a space; where that is missing the template trims, and then white
// space of the client before the mark goes too. NotFound: the mark is nowhere.
absl::Status CutAtMark(std::string_view mark, chat::RenderedPrompt& prompt);

}  // namespace moeserve::server
