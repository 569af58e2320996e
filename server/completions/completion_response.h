// The JSON of completion responses, unary and streamed.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/request.h"
#include "server/answers/answer.h"
#include "server/answers/answer_writer.h"
#include "server/base/json.h"

namespace moeserve::server {

// Builds the four parallel arrays of `logprobs` in the completions API. Text offsets continue after
// Take(), so that the arrays of a stream's chunks concatenate to the arrays of the unary response.
class LogprobArrays {
 public:
  // `tokenizer` may be null and must outlive this object.
  LogprobArrays(const Tokenizer* tokenizer, bool tokens_as_ids)
      : tokenizer_(tokenizer), tokens_as_ids_(tokens_as_ids) {}

  // Adds the first token of a prompt, whose log-probability entries are null.
  void AddUnscored(TokenId token);
  // Adds a token. Returns Internal if a value is NaN.
  absl::Status Add(const TokenLogprob& logprob);

  bool empty() const { return tokens_.empty(); }
  // Returns the arrays of the tokens added since the last call.
  OrderedJson Take();

 private:
  void AddToken(const std::string& text);

  const Tokenizer* const tokenizer_;
  const bool tokens_as_ids_;
  size_t offset_ = 0;
  OrderedJson tokens_ = OrderedJson::array();
  OrderedJson token_logprobs_ = OrderedJson::array();
  OrderedJson top_logprobs_ = OrderedJson::array();
  OrderedJson text_offset_ = OrderedJson::array();
};

OrderedJson ChoiceJson(const ChoicePart& part, const RoutingParams& routing = {});

// Builds the responses of POST /v1/completions.
class CompletionWriter final : public ChunkWriter {
 public:
  // `tokenizer` may be null and must outlive this object.
  CompletionWriter(AnswerIdentity identity, const AnswerOptions& options,
                   const Tokenizer* tokenizer, int choices);

  absl::Status Add(int index, const PreparedPrompt& prompt, OutputDelta delta) override;

 private:
  std::vector<OrderedJson> TakeChunks(int index) override;
  OrderedJson EmptyChunk() const override;
  OrderedJson TakeWhole() override;

  struct Choice {
    explicit Choice(LogprobArrays arrays) : logprobs(std::move(arrays)) {}
    LogprobArrays logprobs;
    ChoicePart part;       // output that is not sent yet
    bool started = false;  // whether the part about the prompt was added
    // With AnswerOptions::best, the sum over the generated tokens of their log-probabilities, and
    // how many tokens these are.
    double logprob_sum = 0.0;
    int tokens = 0;
    std::vector<TokenId>
        ids;  // of the prompt and the output, if RoutingParams::words asks for them
  };

  // Returns the indices of the choices of a unary response: for each prompt the best samples,
  // starting with the best; of equal ones, the first.
  std::vector<size_t> BestChoices() const;

  absl::Status AddPrompt(Choice& choice, const PreparedPrompt& prompt, const OutputDelta& delta);

  const AnswerIdentity identity_;
  const Tokenizer* const tokenizer_;
  std::vector<Choice> choices_;
};

}  // namespace moeserve::server
