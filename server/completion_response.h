// The JSON of completion answers, unary and streamed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/request.h"
#include "nlohmann/json.hpp"

namespace moeserve::server {

// How one token is written in `tokens` and as a key of `top_logprobs`: its text, U+FFFD for bytes
// that are no whole character, "token_id:7" if `as_id` or without a tokenizer.
std::string TokenText(const Tokenizer* tokenizer, TokenId token, bool as_id);

// Builds the four parallel arrays of the completions API. Offsets run on from call to call of
// Take(), so the pieces of a stream concatenate to the arrays of the unary answer.
class LogprobArrays {
 public:
  // `tokenizer` may be null and must outlive this.
  LogprobArrays(const Tokenizer* tokenizer, bool tokens_as_ids)
      : tokenizer_(tokenizer), tokens_as_ids_(tokens_as_ids) {}

  // A token that nothing precedes: its entries are null.
  void AddUnscored(TokenId token);
  // Internal if a value is NaN.
  absl::Status Add(const TokenLogprob& logprob);

  bool empty() const { return tokens_.empty(); }
  // The arrays collected since the last call.
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

// What all parts of one answer share.
struct AnswerIdentity {
  std::string id;  // "cmpl-..."
  int64_t created = 0;
  std::string model;
};

// A choice, or the piece of one that a chunk carries.
struct ChoicePart {
  int index = 0;
  std::string text;
  nlohmann::ordered_json logprobs;  // null where not asked for
  std::optional<FinishReason> finish_reason;
  std::optional<std::string> stop_string;
  std::optional<TokenId> stop_token;
  std::optional<std::vector<TokenId>> prompt_token_ids;
  std::optional<std::vector<TokenId>> token_ids;
};

nlohmann::ordered_json UsageJson(int64_t prompt_tokens, int64_t completion_tokens,
                                 int64_t cached_tokens);
nlohmann::ordered_json ChoiceJson(const ChoicePart& part);

// The answer, or with one part a chunk, without "usage".
nlohmann::ordered_json CompletionJson(const AnswerIdentity& identity,
                                      nlohmann::ordered_json choices);

// One line of valid UTF-8.
std::string DumpJson(const nlohmann::ordered_json& value);

// "data: <json>\n\n"
std::string SseEvent(const nlohmann::ordered_json& value);
inline constexpr std::string_view kSseDone = "data: [DONE]\n\n";

}  // namespace moeserve::server
