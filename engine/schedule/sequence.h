// The state of one request inside the engine. Touched by the engine thread only.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "engine/request.h"
#include "engine/sample/output_text.h"
#include "engine/sample/sampler.h"

namespace moeserve {

struct Sequence {
  // `eos` outlives the sequence.
  Sequence(Request r, std::shared_ptr<TokenSink> s, const Tokenizer* tokenizer,
           std::span<const TokenId> eos)
      : request(std::move(r)),
        sink(std::move(s)),
        text(tokenizer, request.sampling.skip_special_tokens, request.sampling.stop,
             request.sampling.include_stop, request.sampling.min_tokens),
        sampling(request.sampling, request.prompt, eos),
        tokens(request.prompt) {
    const auto& salt = request.cache_salt;
    if (!salt.empty()) cache_key = "s" + salt;
    if (request.routing_control != nullptr) {
      cache_key = "r" + request.routing_control->key() + "|" + salt;
    }
  }

  int prompt_length() const { return static_cast<int>(request.prompt.size()); }
  int length() const { return static_cast<int>(tokens.size()); }
  int generated() const { return length() - prompt_length(); }
  int remaining() const { return length() - computed; }  // known tokens that were not run
  // Only the last token remains to be run, so its row yields a new token.
  bool decoding() const { return remaining() == 1 && computed >= prompt_length(); }
  // Tokens whose keys and values the cache must hold at the end: the last sampled one is never run.
  int64_t cache_tokens() const {
    return prompt_length() + std::max(request.sampling.max_tokens - 1, 0);
  }
  // Whether entries of prompt_logprobs are missing.
  bool wants_prompt_logprobs() const {
    return request.sampling.prompt_logprobs.has_value() &&
           static_cast<int>(prompt_logprobs.size()) < prompt_length();
  }
  // Whether logits of token i's row are read: it is the last one, or it predicts a prompt token
  // whose log-probability is missing.
  bool WantsLogits(int i) const {
    if (i + 1 == length()) return true;
    return wants_prompt_logprobs() && i + 1 < prompt_length() &&
           i + 1 >= static_cast<int>(prompt_logprobs.size());
  }

  Request request;
  std::shared_ptr<TokenSink> sink;
  OutputText text;
  SamplingState sampling;
  std::vector<TokenId> tokens;  // prompt, then generated
  int computed = 0;             // leading tokens that were run or found in the prefix cache
  std::vector<int32_t> blocks;  // of the KV cache
  int published = 0;            // leading blocks that were published (BlockManager)
  std::string cache_key;        // texts share cached prefixes only if it is equal
  int high_water = 0;           // largest `computed` so far: tokens below it are recomputed
  std::vector<std::pair<int, int>> reused;  // positions [begin, end) that this request did not run
  int routes_delivered = 0;                 // leading tokens whose routes the sink has received
  int cached_tokens = 0;  // prompt tokens that the first admission found in the cache
  uint64_t seed = 0;
  absl::Time queued_at;  // when it was submitted
  // Timestamps for latency metrics.
  std::chrono::steady_clock::time_point submitted_at;
  std::chrono::steady_clock::time_point admitted_at;  // first admission, preemptions ignored
  std::optional<std::chrono::steady_clock::time_point> first_token_at;
  absl::Time rank;        // sequences are served in this order: arrival and priority
  uint64_t order = 0;     // of submission; decides between equal ranks
  bool admitted = false;  // was admitted once: now runs, or waits after a preemption or as a sample
  std::vector<std::optional<TokenLogprob>> prompt_logprobs;
  bool prompt_delivered = false;
  // Further samples of the same prompt. They start, sharing its blocks, when it has been run.
  std::vector<std::unique_ptr<Sequence>> samples;
};

using SequencePtr = std::unique_ptr<Sequence>;

// Served earlier: lower rank, then earlier submission.
inline bool ServedBefore(const Sequence& a, const Sequence& b) {
  return a.rank != b.rank ? a.rank < b.rank : a.order < b.order;
}

}  // namespace moeserve
