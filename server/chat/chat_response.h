// The JSON of chat responses, unary and streamed.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "engine/request.h"
#include "server/answers/answer.h"
#include "server/answers/answer_writer.h"
#include "server/base/json.h"
#include "server/tools/answer_splitter.h"

namespace moeserve::server {

// Returns an entry of `logprobs.content`: {"token", "logprob", "bytes", "top_logprobs"}. Internal
// if a value is NaN. `tokenizer` may be null.
Result<OrderedJson> ChatLogprobJson(const Tokenizer* tokenizer, const TokenLogprob& logprob,
                                    bool token_as_id);

// How the text of an answer becomes a message.
struct ChatAnswerRules {
  SplitRules split;
  bool include_reasoning = true;
  // Whether the client chose the tool, so that the call is not the model's reason to stop.
  bool named_tool = false;
};

// Builds the responses of POST /v1/chat/completions.
class ChatWriter final : public ChunkWriter {
 public:
  // `tokenizer` may be null and must outlive this object.
  ChatWriter(AnswerIdentity identity, const AnswerOptions& options, const ChatAnswerRules& rules,
             const Tokenizer* tokenizer, int choices);

  absl::Status Add(int index, const PreparedPrompt& prompt, OutputDelta delta) override;

 private:
  std::vector<OrderedJson> TakeChunks(int index) override;
  OrderedJson EmptyChunk() const override;
  OrderedJson TakeWhole() override;

  struct Choice {
    ChoicePart part;         // output that is not sent yet; its text is in `message` if split
    AssistantDelta message;  // the split text that is not sent yet
    std::unique_ptr<AnswerSplitter> splitter;  // null if answers are not split
    OrderedJson logprobs = OrderedJson::array();
    bool started = false;  // whether the choice has got its first piece
    bool opened = false;   // whether the chunk with the role was sent
  };

  // Returns {"content": [...], "refusal": null} with the entries added since the last call, or null
  // if there are none.
  OrderedJson TakeLogprobs(Choice& choice);
  // Moves the text of `part` to `message`.
  void Split(Choice& choice);
  OrderedJson FinishReason(const Choice& choice) const;
  OrderedJson TakeMessage(Choice& choice) const;

  const AnswerIdentity identity_;
  const ChatAnswerRules rules_;
  const Tokenizer* const tokenizer_;
  std::vector<Choice> choices_;
};

}  // namespace moeserve::server
