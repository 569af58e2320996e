// What the answers of all generating endpoints share, unary and streamed.
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

// What all parts of one answer share.
struct AnswerIdentity {
  std::string id;  // "cmpl-..."
  int64_t created = 0;
  std::string model;
};

// What an answer is to contain.
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

// A choice, or the piece of one that a chunk carries.
struct ChoicePart {
  int index = 0;
  std::string text;
  nlohmann::ordered_json logprobs;  // null where not asked for
  std::optional<FinishReason> finish_reason;
  std::optional<std::string> stop_string;
  std::optional<TokenId> stop_token;
  std::optional<std::vector<TokenId>> prompt_token_ids;
  nlohmann::ordered_json prompt_logprobs;  // null where not asked for
  std::optional<std::vector<TokenId>> token_ids;
  std::optional<RoutingRecord> routing;  // where asked for, what is known

  // Text, end and, if wanted, ids.
  void Add(OutputDelta delta, bool return_token_ids);
  bool HasIds() const { return prompt_token_ids || (token_ids && !token_ids->empty()); }
  bool HasRoutes() const { return routing && routing->tokens > 0; }
};

// Writes the answer of one request as its endpoint does. One thread at a time.
class AnswerWriter {
 public:
  virtual ~AnswerWriter() = default;

  // A piece of choice `index`. The first one of a choice brings in what the answer has of the
  // prompt. Internal if the piece cannot be shown.
  virtual absl::Status Add(int index, const PreparedPrompt& prompt, OutputDelta delta) = 0;
  // Chunks with what choice `index` has got since the last call; they lack the usage.
  virtual std::vector<nlohmann::ordered_json> TakeChunks(int index) = 0;
  // A chunk of no choice.
  virtual nlohmann::ordered_json EmptyChunk() const = 0;
  // The unary answer without the usage.
  virtual nlohmann::ordered_json TakeAnswer() = 0;
};

// A log-probability as JSON can say it.
double LogprobValue(float logprob);
// Internal if a value is NaN.
absl::Status CheckLogprob(const TokenLogprob& logprob);

// Internal unless the first piece of a choice has one entry, without NaN, for each prompt token.
absl::Status CheckPromptLogprobs(const PreparedPrompt& prompt, const OutputDelta& first);

// By token of the prompt, null for the first: an object of {"logprob", "rank", "decoded_token"} by
// id, of the `count` most probable tokens and the prompt's own.
nlohmann::ordered_json PromptLogprobsJson(const Tokenizer* tokenizer,
                                          const std::vector<std::optional<TokenLogprob>>& logprobs,
                                          int count);

// Puts the routes of a choice, if there are any, into its JSON.
void PutRouting(const ChoicePart& part, const RoutingParams& params,
                nlohmann::ordered_json& choice);

// "stop", "length" or null.
nlohmann::ordered_json FinishReasonJson(const ChoicePart& part);
// The stop string, the stop token's id or null.
nlohmann::ordered_json StopReasonJson(const ChoicePart& part);

// An answer or a chunk with no more than its identity and choices.
nlohmann::ordered_json EnvelopeJson(const AnswerIdentity& identity, std::string_view object,
                                    nlohmann::ordered_json choices);

// Sums over the choices of an answer, prompts counted once. The experts appear once known.
nlohmann::ordered_json UsageJson(const Usage& sums);

// One line of valid UTF-8.
std::string DumpJson(const nlohmann::ordered_json& value);

// "data: <json>\n\n"
std::string SseEvent(const nlohmann::ordered_json& value);
inline constexpr std::string_view kSseDone = "data: [DONE]\n\n";

}  // namespace moeserve::server
