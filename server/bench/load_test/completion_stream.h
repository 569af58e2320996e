// Parser of the response to a streaming completion request. Works with any OpenAI-compatible
// server.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "server/bench/load_test/sse.h"

namespace moeserve::server {

// Returns a short name of the error in an error body {"error": {"code"?, "type"?, ...}}: the code
// if it is a string, else the type, else "error". Returns at most 64 printable characters, because
// the body is untrusted.
std::string ErrorCode(std::string_view body);

// Parses the stream of one response. An output piece is a choice in a chunk that contains generated
// output: usually one token, or several if the server sent them together.
class CompletionStream {
 public:
  // Parses the next bytes of the body. The body may be split at any byte.
  void Feed(std::string_view bytes);

  // Returns the number of output pieces in the bytes of the last Feed().
  int new_arrivals() const { return new_arrivals_; }

  bool done() const { return done_; }  // true once "[DONE]" has arrived
  // Returns the error of an error event or of a malformed stream; empty if there is none.
  const std::string& error() const { return error_; }
  // Returns whether data followed "[DONE]", or a choice finished twice.
  bool duplicate() const { return duplicate_; }
  int64_t arrivals() const { return arrivals_; }
  std::optional<int64_t> prompt_tokens() const { return prompt_tokens_; }  // from `usage`
  std::optional<int64_t> output_tokens() const { return output_tokens_; }

 private:
  void OnEvent(std::string_view data);

  SseReader sse_;
  int new_arrivals_ = 0;
  int64_t arrivals_ = 0;
  bool done_ = false;
  bool finished_ = false;
  bool duplicate_ = false;
  std::string error_;
  std::optional<int64_t> prompt_tokens_;
  std::optional<int64_t> output_tokens_;
};

}  // namespace moeserve::server
