// The JSON of chat responses, unary and streamed.
#pragma once

#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "engine/request.h"
#include "nlohmann/json.hpp"
#include "server/openai/answer.h"

namespace moeserve::server {

// Returns an entry of `logprobs.content`: {"token", "logprob", "bytes", "top_logprobs"}. Internal
// if a value is NaN. `tokenizer` may be null.
Result<nlohmann::ordered_json> ChatLogprobJson(const Tokenizer* tokenizer,
                                               const TokenLogprob& logprob, bool token_as_id);

// Builds the responses of POST /v1/chat/completions.
class ChatWriter final : public AnswerWriter {
 public:
  // `tokenizer` may be null and must outlive this object.
  ChatWriter(AnswerIdentity identity, const AnswerOptions& options, const Tokenizer* tokenizer,
             int choices);

  absl::Status Add(int index, const PreparedPrompt& prompt, OutputDelta delta) override;
  std::vector<nlohmann::ordered_json> TakeChunks(int index) override;
  nlohmann::ordered_json EmptyChunk() const override;
  nlohmann::ordered_json TakeAnswer() override;

 private:
  struct Choice {
    ChoicePart part;  // output that is not sent yet
    nlohmann::ordered_json logprobs = nlohmann::ordered_json::array();
    bool started = false;  // whether the choice has got its first piece
    bool opened = false;   // whether the chunk with the role was sent
  };

  // Returns {"content": [...], "refusal": null} with the entries added since the last call, or null
  // if there are none.
  nlohmann::ordered_json TakeLogprobs(Choice& choice);

  const AnswerIdentity identity_;
  const AnswerOptions options_;
  const Tokenizer* const tokenizer_;
  std::vector<Choice> choices_;
};

}  // namespace moeserve::server
