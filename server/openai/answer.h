// The parts of answers that all generating endpoints share, unary and streamed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/request.h"
#include "nlohmann/json.hpp"
#include "server/generation/generation_request.h"

namespace moeserve::server {

// Identifies an answer; repeated in every chunk.
struct AnswerIdentity {
  std::string id;  // "cmpl-..."
  int64_t created = 0;
  std::string model;
};

// The optional parts of an answer.
struct AnswerOptions {
  bool echo = false;
  bool logprobs = false;
  int echo_logprobs = 0;               // alternatives beside each echoed token
  std::optional<int> prompt_logprobs;  // alternatives
  bool return_token_ids = false;
  bool tokens_as_ids = false;
  RoutingParams routing;
};

AnswerOptions MakeAnswerOptions(const GenerationParams& params);

// A choice, or the part of one that a chunk contains.
struct ChoicePart {
  int index = 0;
  std::string text;
  nlohmann::ordered_json logprobs;  // null unless asked for
  std::optional<FinishReason> finish_reason;
  std::optional<std::string> stop_string;
  std::optional<TokenId> stop_token;
  std::optional<std::vector<TokenId>> prompt_token_ids;
  nlohmann::ordered_json prompt_logprobs;  // null unless asked for
  std::optional<std::vector<TokenId>> token_ids;
  std::optional<RoutingRecord> routing;  // if asked for: the routes so far

  // Adds text, routes, the end and, if asked for, ids.
  void Add(OutputDelta delta, bool return_token_ids);
  bool HasIds() const { return prompt_token_ids || (token_ids && !token_ids->empty()); }
  bool HasRoutes() const { return routing && routing->tokens > 0; }
};

// Writes the answer of one request in the format of its endpoint. Used by one thread at a time.
class AnswerWriter {
 public:
  virtual ~AnswerWriter() = default;

  // Adds a piece of choice `index`. With the first piece of a choice it also adds the prompt's
  // part, such as echo. Internal: a log-probability is NaN or missing.
  virtual absl::Status Add(int index, const PreparedPrompt& prompt, OutputDelta delta) = 0;
  // Returns chunks with the output of choice `index` since the last call, without usage.
  virtual std::vector<nlohmann::ordered_json> TakeChunks(int index) = 0;
  // Returns a chunk without choices.
  virtual nlohmann::ordered_json EmptyChunk() const = 0;
  // Returns the unary answer without usage.
  virtual nlohmann::ordered_json TakeAnswer() = 0;
};

// Returns a log-probability that JSON can represent: -9999 for minus infinity.
double LogprobValue(float logprob);
// Internal if a value is NaN.
absl::Status CheckLogprob(const TokenLogprob& logprob);

// Internal unless the first piece of a choice has one entry, without NaN, for each prompt token.
absl::Status CheckPromptLogprobs(const PreparedPrompt& prompt, const OutputDelta& first);

// Returns a list with one entry per prompt token, null for the first: an object from token ids to
// {"logprob", "rank", "decoded_token"}, for the `count` most probable tokens and the prompt's own.
nlohmann::ordered_json PromptLogprobsJson(const Tokenizer* tokenizer,
                                          const std::vector<std::optional<TokenLogprob>>& logprobs,
                                          int count);

// Adds the routes of a choice, if there are any, to its JSON.
void PutRouting(const ChoicePart& part, const RoutingParams& params,
                nlohmann::ordered_json& choice);

// "stop", "length" or null.
nlohmann::ordered_json FinishReasonJson(const ChoicePart& part);
// The stop string, the stop token's id or null.
nlohmann::ordered_json StopReasonJson(const ChoicePart& part);

// Returns an answer or a chunk with its identity and choices only.
nlohmann::ordered_json EnvelopeJson(const AnswerIdentity& identity, std::string_view object,
                                    nlohmann::ordered_json choices);

// `sums` are over the choices of an answer, prompts counted once. The experts' part is absent until
// it is known.
nlohmann::ordered_json UsageJson(const Usage& sums);

// Returns one line of valid UTF-8.
std::string DumpJson(const nlohmann::ordered_json& value);

// "data: <json>\n\n"
std::string SseEvent(const nlohmann::ordered_json& value);
inline constexpr std::string_view kSseDone = "data: [DONE]\n\n";

}  // namespace moeserve::server
