// The JSON of responses of POST /v1/messages, the form of Anthropic's API, unary and streamed.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "server/base/json.h"
#include "server/chat/block_writer.h"

namespace moeserve::server {

// Returns {"type": "error", "error": {"type", "message"}} in one line.
std::string MessageErrorJson(const HttpError& error);

// Builds the responses of POST /v1/messages. Every block of the answer is a block of the content.
class MessageWriter final : public BlockWriter {
 public:
  MessageWriter(AnswerIdentity identity, const AnswerOptions& options, const ChatAnswerRules& rules,
                const Tokenizer* tokenizer, bool stream)
      : BlockWriter(std::move(identity), options, rules, tokenizer, stream) {}

  OrderedJson TakeAnswer(const Usage& sums) override;
  void AppendError(const HttpError& error, std::string& out) override;
  std::string ErrorBody(const HttpError& error) const override;

 private:
  void WriteBegin(int prompt_tokens, std::string& out) override;
  void WriteOpen(const Block& block, std::string& out) override;
  void WriteDelta(const Block& block, std::string_view piece, OrderedJson logprobs,
                  std::string& out) override;
  void WriteClose(const Block& block, std::string& out) override;
  void WriteEnd(const Usage& sums, std::string& out) override;

  OrderedJson Envelope() const;
  OrderedJson StopReason() const;
};

}  // namespace moeserve::server
