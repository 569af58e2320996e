// The JSON of completion answers, unary and streamed.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/request.h"
#include "nlohmann/json.hpp"
#include "server/openai/answer.h"

namespace moeserve::server {

// Builds the four parallel arrays of the completions API. Offsets continue after Take(), so the
// pieces of a stream concatenate to the arrays of the unary answer.
class LogprobArrays {
 public:
  // `tokenizer` may be null and must outlive this.
  LogprobArrays(const Tokenizer* tokenizer, bool tokens_as_ids)
      : tokenizer_(tokenizer), tokens_as_ids_(tokens_as_ids) {}

  // Adds the first token of a prompt: its entries are null.
  void AddUnscored(TokenId token);
  // Internal if a value is NaN.
  absl::Status Add(const TokenLogprob& logprob);

  bool empty() const { return tokens_.empty(); }
  // Returns the arrays collected since the last call.
  nlohmann::ordered_json Take();

 private:
  void AddToken(const std::string& text);

  const Tokenizer* const tokenizer_;
  const bool tokens_as_ids_;
  size_t offset_ = 0;
  nlohmann::ordered_json tokens_ = nlohmann::ordered_json::array();
  nlohmann::ordered_json token_logprobs_ = nlohmann::ordered_json::array();
  nlohmann::ordered_json top_logprobs_ = nlohmann::ordered_json::array();
  nlohmann::ordered_json text_offset_ = nlohmann::ordered_json::array();
};

nlohmann::ordered_json ChoiceJson(const ChoicePart& part, const RoutingParams& routing = {});

// Answers of POST /v1/completions.
class CompletionWriter final : public AnswerWriter {
 public:
  // `tokenizer` may be null and must outlive this.
  CompletionWriter(AnswerIdentity identity, const AnswerOptions& options,
                   const Tokenizer* tokenizer, int choices);

  absl::Status Add(int index, const PreparedPrompt& prompt, OutputDelta delta) override;
  std::vector<nlohmann::ordered_json> TakeChunks(int index) override;
  nlohmann::ordered_json EmptyChunk() const override;
  nlohmann::ordered_json TakeAnswer() override;

 private:
  struct Choice {
    explicit Choice(LogprobArrays arrays) : logprobs(std::move(arrays)) {}
    LogprobArrays logprobs;
    ChoicePart part;       // not yet sent
    bool started = false;  // the prompt's part was added
  };

  absl::Status AddPrompt(Choice& choice, const PreparedPrompt& prompt, const OutputDelta& delta);

  const AnswerIdentity identity_;
  const AnswerOptions options_;
  const Tokenizer* const tokenizer_;
  std::vector<Choice> choices_;
};

}  // namespace moeserve::server
