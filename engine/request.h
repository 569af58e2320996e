// Requests to the engine and the pieces of their answers. Plain data; no wire types.
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

// One unit of priority is worth this much waiting: a request of priority p is served as if it had
// come p units later, so that nobody waits for ever.
inline constexpr absl::Duration kPriorityUnit = absl::Seconds(10);
inline constexpr int kMaxPriority = 1000;

struct Request {
  std::string id;               // unique among the running ones
  std::vector<TokenId> prompt;  // 1..max_model_len ids, each in [0, vocab_size)
  SamplingParams sampling;
  absl::Time deadline = absl::InfiniteFuture();
  int priority = 0;             // -kMaxPriority to kMaxPriority, lower first
  std::string cache_salt;       // prompts share cached prefixes only under the same salt
  bool expert_counts = false;   // count the experts of this request's tokens
  bool routing_record = false;  // deliver the routes of this request's tokens
  std::shared_ptr<const RoutingControl> routing_control;  // null: the model's own routing
};

enum class FinishReason : uint8_t { kStop, kLength };

struct TokenLogprob {
  TokenId token = 0;
  float logprob = 0.0f;  // natural log of the model's own softmax, before temperature and filters
  int rank = 0;          // 0 = the most probable
  std::vector<std::pair<TokenId, float>>
      top;  // the most probable, descending; ties: lower id first
};

struct Usage {
  int prompt_tokens = 0;
  int completion_tokens = 0;  // a hidden EOS or stop token is counted
  int cached_tokens = 0;      // prompt tokens that came from the prefix cache
  // When finished, unless expert statistics are off: of the tokens that the model has seen for this
  // request (the last sampled one is not among them), whoever computed them.
  int routed_tokens = 0;
  uint64_t expert_routes = 0;  // (row, expert) pairs
  // Parameters that they used, embeddings and head excluded; every pair counts.
  uint64_t activated_parameters = 0;
};

// One piece of an answer. Pieces of a request arrive in order; joining `text` gives the whole text.
struct OutputDelta {
  std::string text;             // valid UTF-8; never a part of a character or of a stop string
  std::vector<TokenId> tokens;  // the tokens whose text is in here or that have none
  std::vector<TokenLogprob> logprobs;  // one per entry of `tokens` if asked for
  // First piece only, if prompt_logprobs was asked for: one per prompt token, none for the first
  // token (nothing precedes it).
  std::vector<std::optional<TokenLogprob>> prompt_logprobs;
  bool finished = false;
  FinishReason finish_reason = FinishReason::kStop;  // when finished
  std::optional<std::string> stop_string;            // the stop string that matched
  std::optional<TokenId> stop_token;                 // the stop_token_ids entry that matched
  Usage usage;                                       // so far
  // When finished and asked for: how often each expert ran for the tokens of this request that the
  // model has seen, prompt included, whoever computed them (cached ones count). Blocks in order of
  // ExpertStats, E entries each.
  std::vector<uint64_t> expert_counts;
  // If asked for: the routes of the tokens run since the piece before, so the pieces of an answer
  // follow each other without gaps. Routes of a token that is generated come with the next piece,
  // when the model has seen it; those of the last one never.
  std::optional<RoutingRecord> routing;
};

// Where the answer goes. All calls come from the engine thread, in order, and end with exactly one
// of OnDelta(finished) or OnError. An implementation must not block and must not call the engine.
class TokenSink {
 public:
  virtual ~TokenSink() = default;
  virtual void OnDelta(OutputDelta delta) = 0;
  // Cancelled, DeadlineExceeded, ResourceExhausted (server full), Unavailable (shutting down),
  // InvalidArgument (masks that together allow no token) or Internal (numeric failure). Nothing
  // follows.
  virtual void OnError(const absl::Status& status) = 0;
};

}  // namespace moeserve
