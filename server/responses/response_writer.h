// The JSON of responses of the Responses API, unary and streamed.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/base/json.h"
#include "server/chat/block_writer.h"

namespace moeserve::server {

// Builds the responses of POST /v1/responses. Every block of the answer is an item of the output.
class ResponseWriter final : public BlockWriter {
 public:
  // `echo` are the members of the response that repeat the request (ResponseRequest::echo).
  // `custom_tools` are ResponseRequest::custom_tools.
  ResponseWriter(AnswerIdentity identity, const AnswerOptions& options,
                 const ChatAnswerRules& rules, OrderedJson echo,
                 std::vector<std::string> custom_tools, const Tokenizer* tokenizer, bool stream);

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

  // Clients take output[0], or send another request when a response has neither text nor calls.
  bool AddsEmptyText() const override { return true; }

  void WriteEvent(OrderedJson event, std::string& out);
  OrderedJson Item(const Block& block, bool complete) const;
  std::string ItemId(const Block& block) const;
  // Returns the response with the output so far; `sums` is null while the answer is generated.
  OrderedJson Response(const Usage* sums) const;

  bool IsCustom(const Block& block) const;

  const OrderedJson echo_;
  const std::vector<std::string> custom_tools_;
  int events_written_ = 0;
};

}  // namespace moeserve::server
