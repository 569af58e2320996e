// Splits answers that consist of messages with channels, as gpt-oss writes them (the "harmony"
// format): <|start|>assistant<|channel|>NAME to=RECIPIENT <|constrain|>json<|message|>TEXT<|end|>.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "server/tools/answer_splitter.h"

namespace moeserve::server {

// Messages of the channel "analysis" and messages to unknown recipients are reasoning, messages to
// "functions.NAME" are calls, all others are content. The prompt ends with <|start|>assistant, so
// an answer begins within the head of a message.
class ChannelSplitter final : public AnswerSplitter {
 public:
  ChannelSplitter(bool has_tools, std::function<std::string(int)> call_id);

  AssistantDelta Push(std::string_view text) override;
  AssistantDelta Finish() override;
  int calls() const override { return calls_; }

 private:
  enum class Part { kHead, kReasoning, kContent, kCall };

  AssistantDelta Run(bool last);
  bool ReadHead(AssistantDelta& out);
  bool ReadText(bool last, AssistantDelta& out);

  const bool has_tools_;
  const std::function<std::string(int)> call_id_;
  Part part_ = Part::kHead;
  std::string held_;
  bool any_ = false;  // whether a message has begun
  int calls_ = 0;
};

}  // namespace moeserve::server
