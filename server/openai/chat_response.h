// The JSON of chat answers, unary and streamed.
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

// Answers of POST /v1/chat/completions.
class ChatWriter final : public AnswerWriter {
 public:
  // `tokenizer` may be null and must outlive this.
  ChatWriter(AnswerIdentity identity, const AnswerOptions& options, const Tokenizer* tokenizer,
             int choices);

  absl::Status Add(int index, const PreparedPrompt& prompt, OutputDelta delta) override;
  std::vector<nlohmann::ordered_json> TakeChunks(int index) override;
  nlohmann::ordered_json EmptyChunk() const override;
  nlohmann::ordered_json TakeAnswer() override;

 private:
  struct Choice {
    ChoicePart part;  // not yet sent
    nlohmann::ordered_json logprobs = nlohmann::ordered_json::array();
    bool started = false;  // has its first piece
    bool opened = false;   // the chunk with its role was sent
  };

  // Returns {"content": [...], "refusal": null} with the entries since the last call, or null.
  nlohmann::ordered_json TakeLogprobs(Choice& choice);

  const AnswerIdentity identity_;
  const AnswerOptions options_;
  const Tokenizer* const tokenizer_;
  std::vector<Choice> choices_;
};

}  // namespace moeserve::server
