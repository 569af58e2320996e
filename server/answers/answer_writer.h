// The interface of the formats in which HTTP endpoints answer requests that generate tokens.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/request.h"
#include "server/answers/answer.h"
#include "server/base/json.h"
#include "server/base/status_conversion.h"
#include "server/generation/generation_request.h"

namespace moeserve::server {

// Builds the response to one request in the format of its endpoint, either as a stream of events or
// as one JSON object. `sums` are the sums of the usage of all choices so far; each prompt counts
// once. Must be used by one thread at a time.
class AnswerWriter {
 public:
  virtual ~AnswerWriter() = default;

  // Adds a piece of output of choice `index`. With a choice's first piece, also adds the parts
  // about the prompt, such as echo. Returns Internal if a log-probability is NaN or missing.
  virtual absl::Status Add(int index, const PreparedPrompt& prompt, OutputDelta delta) = 0;

  // Tells that the server's limit on the time of a request has cut a choice. Called before the last
  // piece of the choice is added.
  void SetTimedOut() { timed_out_ = true; }

  // Appends the server-sent events with the output that choice `index` got since the last call.
  virtual void AppendEvents(int index, const Usage& sums, std::string& out) = 0;
  // Appends the events after the last output.
  virtual void AppendEnd(const Usage& sums, std::string& out) = 0;
  // Appends the event that ends the stream with an error.
  virtual void AppendError(const HttpError& error, std::string& out);

  // The media type of a stream, and a text without meaning that is sent while it has no output.
  virtual std::string_view stream_type() const { return "text/event-stream; charset=utf-8"; }
  virtual std::string_view keep_alive_text() const { return ": keep-alive\n\n"; }
  // Whether a stream's output is kept until its end, because the last events repeat it.
  virtual bool keeps_streamed_output() const { return false; }
  // Returns the unary response.
  virtual OrderedJson TakeAnswer(const Usage& sums) = 0;
  // Returns the body of a response that reports an error.
  virtual std::string ErrorBody(const HttpError& error) const;

 protected:
  bool timed_out() const { return timed_out_; }

 private:
  bool timed_out_ = false;
};

// The format of completions and chats: a stream consists of chunks of one shape.
class ChunkWriter : public AnswerWriter {
 public:
  void AppendEvents(int index, const Usage& sums, std::string& out) final;
  void AppendEnd(const Usage& sums, std::string& out) final;
  OrderedJson TakeAnswer(const Usage& sums) final;

 protected:
  explicit ChunkWriter(AnswerOptions options) : options_(std::move(options)) {}

  // Returns chunks with the output that choice `index` got since the last call, without usage.
  virtual std::vector<OrderedJson> TakeChunks(int index) = 0;
  // Returns a chunk without choices.
  virtual OrderedJson EmptyChunk() const = 0;
  // Returns the unary response without usage.
  virtual OrderedJson TakeWhole() = 0;

  const AnswerOptions options_;

 private:
  // Whether the stream has reported the request's routing override and the warnings, and whether it
  // has reported that time ran out.
  bool echoed_ = false;
  bool reported_timeout_ = false;
};

}  // namespace moeserve::server
