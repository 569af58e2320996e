// The JSON of responses of POST /api/chat and POST /api/generate, the form of Ollama's API, unary
// and streamed.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "absl/time/time.h"
#include "server/base/json.h"
#include "server/chat/block_writer.h"

namespace moeserve::server {

enum class OllamaForm { kChat, kGenerate };

// Returns {"error": message} in one line.
std::string OllamaErrorJson(const HttpError& error);
// Returns `time` as RFC 3339 with microseconds, in UTC.
std::string OllamaTime(absl::Time time);
// Returns the response to a request that generates nothing.
OrderedJson OllamaLoadedJson(OllamaForm form, const std::string& model);

// Builds the responses. A stream has one line of JSON for each piece; a call of a tool is one
// piece.
class OllamaWriter final : public BlockWriter {
 public:
  // `model` is the name that the client has sent.
  OllamaWriter(OllamaForm form, std::string model, AnswerIdentity identity,
               const AnswerOptions& options, const ChatAnswerRules& rules,
               const Tokenizer* tokenizer, bool stream)
      : BlockWriter(std::move(identity), options, rules, tokenizer, stream),
        form_(form),
        model_(std::move(model)) {}

  OrderedJson TakeAnswer(const Usage& sums) override;
  void AppendError(const HttpError& error, std::string& out) override;
  std::string ErrorBody(const HttpError& error) const override;
  std::string_view stream_type() const override { return "application/x-ndjson"; }
  // White space before a line's JSON.
  std::string_view keep_alive_text() const override { return " "; }

 private:
  void WriteBegin(int /*prompt_tokens*/, std::string& /*out*/) override {}
  void WriteOpen(const Block& /*block*/, std::string& /*out*/) override {}
  void WriteDelta(const Block& block, std::string_view piece, OrderedJson logprobs,
                  std::string& out) override;
  void WriteClose(const Block& block, std::string& out) override;
  void WriteEnd(const Usage& sums, std::string& out) override;

  OrderedJson Envelope() const;
  // Adds a text to the answer, or the answer's reasoning.
  void PutText(std::string_view text, std::string_view reasoning, OrderedJson& out) const;
  // Adds what the last line has.
  void PutEnd(const Usage& sums, OrderedJson& out) const;

  const OllamaForm form_;
  const std::string model_;
  const absl::Time start_ = SteadyNow();
};

}  // namespace moeserve::server
