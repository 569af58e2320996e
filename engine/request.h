// Requests to the engine and the pieces of the engine's responses. Plain data; no wire types.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/routes/routing_control.h"
#include "engine/routes/routing_record.h"
#include "engine/sampling_params.h"
#include "engine/text/token_id.h"

namespace moeserve {

// Seconds of waiting that one unit of priority is worth: a request of priority p is served as if it
// had arrived p units later (earlier for negative p). So no request waits for ever.
inline constexpr absl::Duration kPriorityUnit = absl::Seconds(10);
inline constexpr int kMaxPriority = 1000;

// What is computed of a text of which nothing is generated.
enum class EncodeOutput : uint8_t {
  kText,     // the outputs of the text: its vector, or the logits of its labels (TextOutputs())
  kVectors,  // a vector for each token, as kText would return it if the text had no other token
  kLogits,   // the logits of the labels of each token (RowOutputs())
  kTokens    // log-probabilities of tokens at some positions; the head must be kMaskedLm
};
struct EncodeParams {
  EncodeOutput output = EncodeOutput::kText;
  // The following is for kTokens.
  std::vector<int32_t> rows;     // positions, ascending
  std::vector<TokenId> own;      // [rows] a token of each position; or empty
  std::vector<TokenId> targets;  // tokens whose log-probabilities are wanted at every position
  int top = 0;                   // how many of the most probable tokens of each position
};

struct Request {
  std::string id;               // unique among the requests that have not ended
  std::vector<TokenId> prompt;  // 1..max_model_len ids, each in [0, vocab_size)
  SamplingParams sampling;
  // A SteadyNow() time. A response that has tokens by then is cut (OutputDelta::timed_out), any
  // other request fails.
  absl::Time deadline = absl::InfiniteFuture();
  int priority = 0;             // -kMaxPriority to kMaxPriority, lower first
  std::string cache_salt;       // only prompts with equal salts share cached prefixes
  bool expert_counts = false;   // return how often each expert ran for this request's tokens
  bool routing_record = false;  // return the routes of this request's tokens
  std::shared_ptr<const RoutingControl> routing_control;  // null: the router decides alone
  // What the response may consist of, for prompt lookup (engine/draft): at most max_model_len ids
  // in [0, vocab_size). Changes the time that the response takes, never the response.
  std::vector<TokenId> prediction;
  // With an encoder beside the decoder: the text that it reads, 1..max_model_len ids. The prompt is
  // then the beginning of the decoder's text, which the start token begins.
  std::vector<TokenId> source;
  std::vector<uint8_t> token_types;  // [prompt] below ModelSpec::token_types; empty: all 0
  // If set, nothing is generated: the prompt is a text of which this is computed. SamplingParams
  // are then unused.
  std::optional<EncodeParams> encode;
};

enum class FinishReason : uint8_t { kStop, kLength };

struct TokenLogprob {
  TokenId token = 0;
  float logprob = 0.0f;  // natural log of the model's own softmax, before temperature and filters
  int rank = 0;          // rank of `token` by probability; 0: the most probable
  // The most probable tokens with their logprobs, in descending order; of equally probable tokens,
  // the one with the lower id first.
  std::vector<std::pair<TokenId, float>> top;
};

// What was computed for Request::encode.
struct EncodeResult {
  int width = 0;
  std::vector<float> values;  // [rows, width] for all outputs but kTokens
  // kTokens: one for each of EncodeParams::rows, with the most probable tokens in `top`. `token` is
  // EncodeParams::own of the row, if there is one.
  std::vector<TokenLogprob> rows;
  std::vector<float> targets;  // kTokens: [rows, EncodeParams::targets] log-probabilities
};

// What the experts did for some tokens.
struct ExpertWork {
  int tokens = 0;           // that went through the routed blocks
  uint64_t routes = 0;      // selected (row, expert) pairs
  uint64_t parameters = 0;  // Usage::activated_parameters
};

struct Usage {
  int prompt_tokens = 0;
  int completion_tokens = 0;   // a hidden EOS or stop token is counted
  int cached_tokens = 0;       // prompt tokens that came from the prefix cache
  double queue_seconds = 0.0;  // from the submission until the request left the queue
  // The following three fields are set in the last piece, unless expert statistics are off. They
  // cover all tokens of source, prompt and output except the last sampled one, which is never
  // computed.
  // Tokens found in the prefix cache count as if they had been computed for this request.
  // Number of tokens that went through the routed blocks.
  int routed_tokens = 0;
  uint64_t expert_routes = 0;  // number of selected (row, expert) pairs
  // Number of parameters that those tokens used, embeddings and LM head excluded. An expert's
  // parameters count once for each (row, expert) pair.
  uint64_t activated_parameters = 0;
  // The part of these three that is about the source of an encoder-decoder.
  ExpertWork source;
  // The MACs of those tokens (RequestMacs). The engine leaves it unset; server/generation sets it.
  std::optional<double> macs = std::nullopt;
};

// Of a hypothesis of beam search.
struct BeamScore {
  // The sum of the log-probabilities of its tokens, the end token included, after biases, masks and
  // penalties.
  double cumulative_logprob = 0.0;
  double score = 0.0;  // that sum, divided by the number of tokens to the power of length_penalty
};

// One piece of a response. The pieces of a request arrive in order; their `text` fields
// concatenated are the whole text.
struct OutputDelta {
  std::string text;  // valid UTF-8; never ends within a character or a possible stop string
  std::vector<TokenId> tokens;         // tokens whose text is in `text`, and tokens without text
  std::vector<TokenLogprob> logprobs;  // if requested: one per entry of `tokens`
  // Set in the first piece only, if prompt_logprobs was requested: one entry per prompt token. The
  // first token has none, because no token precedes it.
  std::vector<std::optional<TokenLogprob>> prompt_logprobs;
  bool finished = false;
  FinishReason finish_reason = FinishReason::kStop;  // valid if `finished`
  bool timed_out = false;  // whether Request::deadline cut the response; `finish_reason` is kLength
  std::optional<std::string> stop_string;  // the stop string that matched
  std::optional<TokenId> stop_token;       // the stop_token_ids entry that matched
  Usage usage;                             // token counts up to this piece
  // With beam search, whose responses have one piece.
  std::optional<BeamScore> beam;
  // The search has fewer hypotheses than were asked for, and none is left for this request. The
  // piece is empty.
  bool absent = false;
  // [routed blocks][E], if requested and `finished`: how often each expert ran for the tokens that
  // `usage.routed_tokens` counts. Blocks are in the order of ExpertStats.
  std::vector<uint64_t> expert_counts;
  // If requested: the routes of the tokens that were computed since the previous piece, so the
  // pieces cover all computed tokens without gaps. A sampled token's routes come with the next
  // piece, because the model computes the token only then. The last sampled token is never computed
  // and has no routes.
  std::optional<RoutingRecord> routing;
  // In the first piece that has `routing`: the routes of the source, if there is one, in the layout
  // of the encoder.
  std::optional<RoutingRecord> source_routing;
  std::optional<EncodeResult> encoded;  // in the only piece of a request with Request::encode
};

// Receives a response. All calls come from the engine thread, in order; the last call is either
// OnDelta with `finished` set or OnError. An implementation must not block, must not call the
// engine, and must not throw: if it lacks memory, it tells the client so in another way.
class TokenSink {
 public:
  virtual ~TokenSink() = default;
  virtual void OnDelta(OutputDelta delta) = 0;
  // Reports the error that ended the request: Cancelled, DeadlineExceeded (before the first token),
  // ResourceExhausted (server full), Unavailable (shutting down), InvalidArgument (the masks
  // together allow no token) or Internal (numeric failure). No other call follows.
  virtual void OnError(const absl::Status& status) = 0;
};

}  // namespace moeserve
