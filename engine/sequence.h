// The state of one request inside the engine. Touched by the engine thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "engine/output_text.h"
#include "engine/request.h"

namespace moeserve {

struct Sequence {
  Sequence(Request r, std::shared_ptr<TokenSink> s, const Tokenizer* tokenizer)
      : request(std::move(r)),
        sink(std::move(s)),
        text(tokenizer, request.sampling.skip_special_tokens, request.sampling.stop,
             request.sampling.include_stop),
        tokens(request.prompt),
        queued_at(absl::Now()) {}

  int prompt_length() const { return static_cast<int>(request.prompt.size()); }
  int generated() const { return static_cast<int>(tokens.size()) - prompt_length(); }
  // Tokens whose keys and values the cache must hold at the end: the last sampled one is never run.
  int64_t cache_tokens() const {
    return prompt_length() + std::max(request.sampling.max_tokens - 1, 0);
  }

  Request request;
  std::shared_ptr<TokenSink> sink;
  OutputText text;
  std::vector<TokenId> tokens;  // prompt, then generated
  int computed = 0;             // leading tokens that were run
  std::vector<int32_t> blocks;  // of the KV cache
  uint64_t seed = 0;
  absl::Time queued_at;
  std::vector<std::optional<TokenLogprob>> prompt_logprobs;
  bool prompt_delivered = false;
};

}  // namespace moeserve
