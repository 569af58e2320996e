// The parts of responses that completions and chats share, unary and streamed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/request.h"
#include "server/base/json.h"
#include "server/generation/generation_request.h"

namespace moeserve::server {

// Identifies a response. Every chunk repeats these members.
struct AnswerIdentity {
  std::string id;  // such as "cmpl-..."; the client can choose it
  // Random. The ids of parts of the response derive from it.
  std::string unique_id;
  int64_t created = 0;
  std::string model;
};

// Selects the optional parts of a response.
struct AnswerOptions {
  bool echo = false;
  bool logprobs = false;
  int echo_logprobs = 0;               // alternatives per echoed token
  std::optional<int> prompt_logprobs;  // alternatives per prompt token
  bool return_token_ids = false;
  bool tokens_as_ids = false;
  RoutingParams routing;
  int samples = 1;                    // per prompt
  int best = 0;                       // GenerationParams::best
  bool include_usage = false;         // whether a stream ends with a chunk that has the usage
  bool continuous_usage = false;      // whether every chunk has the usage so far
  std::vector<std::string> warnings;  // about fields of the request that have no effect
};

AnswerOptions MakeAnswerOptions(const GenerationParams& params);

// A choice of a unary response, or the part of a choice that a chunk contains.
struct ChoicePart {
  int index = 0;
  std::string text;
  OrderedJson logprobs;  // null unless requested
  std::optional<FinishReason> finish_reason;
  std::optional<std::string> stop_string;
  std::optional<TokenId> stop_token;
  std::optional<std::vector<TokenId>> prompt_token_ids;
  OrderedJson prompt_logprobs;  // null unless requested
  std::optional<std::vector<TokenId>> token_ids;
  std::optional<RoutingRecord> routing;         // if requested, the routes collected so far
  std::optional<RoutingRecord> source_routing;  // if requested, those of the source
  std::optional<BeamScore> beam;
  bool absent = false;  // OutputDelta::absent: the answer leaves the choice out

  // Adds the text, the routes, the end of the choice and, if requested, the token ids of `delta`.
  void Add(OutputDelta delta, bool return_token_ids);
  bool HasIds() const { return prompt_token_ids || (token_ids && !token_ids->empty()); }
  bool HasRoutes() const { return routing && routing->tokens > 0; }
};

// Returns a log-probability that JSON can represent: -9999 for minus infinity.
double LogprobValue(float logprob);
// Returns Internal if a value is NaN.
absl::Status CheckLogprob(const TokenLogprob& logprob);

// `first` is the first piece of a choice. Returns Internal unless it has one entry per prompt token
// in its prompt log-probabilities, none of them NaN.
absl::Status CheckPromptLogprobs(const PreparedPrompt& prompt, const OutputDelta& first);

// Returns a list with one entry per prompt token. The first entry is null. Every other entry is an
// object that maps token ids to {"logprob", "rank", "decoded_token"}, for the `count` most probable
// tokens and the prompt's own token.
OrderedJson PromptLogprobsJson(const Tokenizer* tokenizer,
                               std::span<const std::optional<TokenLogprob>> logprobs, int count);

// Adds the routes of a choice, if there are any, to the choice's JSON.
void PutRouting(const ChoicePart& part, const RoutingParams& params, OrderedJson& choice);

// Adds the scores of a hypothesis of beam search, if the choice is one.
void PutBeam(const ChoicePart& part, OrderedJson& choice);

// Returns "stop", "length" or null.
OrderedJson FinishReasonJson(const ChoicePart& part);
// Returns the stop string, the id of the stop token, or null.
OrderedJson StopReasonJson(const ChoicePart& part);

// Returns a response or a chunk that has its identity and `choices`, and nothing else.
OrderedJson EnvelopeJson(const AnswerIdentity& identity, std::string_view object,
                         OrderedJson choices);

// `sums` are sums over the choices of a response; each prompt counts once. The members about
// experts are absent if they are not known yet.
OrderedJson UsageJson(const Usage& sums);

// What the response says if the server's time limit cut it.
inline constexpr std::string_view kTimeoutWarning =
    "the answer was cut by the server's limit on the time of a request (--request-timeout)";
// Adds the list `warnings` to a response or its first chunk, unless there are none.
void PutWarnings(const std::vector<std::string>& warnings, bool timed_out, OrderedJson& answer);

// Returns JSON in one line of valid UTF-8.
std::string DumpJson(const OrderedJson& value);

// Returns the server-sent event "data: <json>\n\n".
std::string SseEvent(const OrderedJson& value);
inline constexpr std::string_view kSseDone = "data: [DONE]\n\n";

}  // namespace moeserve::server
