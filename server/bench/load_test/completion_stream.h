// The answer to a streaming completion request, as any OpenAI-compatible server gives it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "server/bench/load_test/sse.h"

namespace moeserve::server {

// {"error": {"code"?, "type"?, ...}} in short: the code if it is a string, else the type, else
// "error". Nothing of it is trusted: at most 64 printable characters.
std::string ErrorCode(std::string_view body);

// Follows one stream from its first byte to its last.
class CompletionStream {
 public:
  // Takes the next bytes of the body. `Feed` may be called with any pieces.
  void Feed(std::string_view bytes);

  // Pieces of output in the bytes given to the last Feed.
  int new_arrivals() const { return new_arrivals_; }

  bool done() const { return done_; }  // "[DONE]" was there
  // Of an error event, or of a malformed stream; empty: none.
  const std::string& error() const { return error_; }
  // Something followed what must be last, or a choice finished twice.
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
