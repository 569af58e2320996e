// The state of one sample of a request in the engine. Used by the engine thread only.
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

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/draft/acceptance_record.h"
#include "engine/draft/prompt_lookup.h"
#include "engine/memory/sequence_memory.h"
#include "engine/request.h"
#include "engine/sample/output_text.h"
#include "engine/sample/sampler.h"
#include "engine/sequence/beam_group.h"
#include "engine/spec/head.h"

namespace moeserve {

// Returns a status that takes no memory to copy.
inline const absl::Status& OutOfMemory() {
  static const absl::Status status =
      absl::ResourceExhaustedError("the server has not enough memory to compute this request");
  return status;
}

// Whether the logits of token i are among the outputs of a text.
inline bool EncodesLogits(const EncodeParams& encode, int i) {
  return encode.output == EncodeOutput::kLogits ||
         (encode.output == EncodeOutput::kTokens && std::ranges::binary_search(encode.rows, i));
}

// The tokens [begin, begin + count) of a sequence that the model's step `step` computed as the rows
// from `row` on. PredictionDrafts continues them.
struct PredictableRows {
  uint64_t step = 0;
  int row = 0;
  int begin = 0;
  int count = 0;
};

struct Sequence {
  // `eos` outlives the sequence. A sequence that is planned to have more than `long_from` tokens is
  // long (LongSequencesFrom()).
  Sequence(Request r, std::shared_ptr<TokenSink> s, const Tokenizer* tokenizer,
           std::span<const TokenId> eos, std::optional<double> long_from = std::nullopt)
      : request(std::move(r)),
        sink(std::move(s)),
        text(tokenizer, request.sampling.skip_special_tokens, request.sampling.stop,
             request.sampling.include_stop, request.sampling.min_tokens,
             request.sampling.constraint != nullptr ? request.sampling.constraint->text_tokens()
                                                    : std::span<const TokenId>()),
        sampling(request.sampling, request.prompt, eos),
        tokens(request.prompt) {
    const auto& salt = request.cache_salt;
    if (!salt.empty()) cache_key = "s" + salt;
    if (request.routing_control != nullptr) {
      cache_key = "r" + request.routing_control->key() + "|" + salt;
    }
    const double planned =
        static_cast<double>(prompt_length()) + std::max(request.sampling.max_tokens, 0);
    is_long = long_from.has_value() && planned > *long_from;
    // Keys in the cache depend on the source.
    if (!request.source.empty()) {
      cache_key += "e" + std::string(reinterpret_cast<const char*>(request.source.data()),
                                     request.source.size() * sizeof(TokenId));
    }
    // Keys in the cache depend on whether the sequence is long.
    if (is_long) cache_key = "l" + cache_key;
  }
  // Tells the sink of a submitted sequence that is lost before its end: an allocation failed while
  // it was moved or ended.
  ~Sequence() {
    if (owes_end) sink->OnError(OutOfMemory());
  }
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  int prompt_length() const { return static_cast<int>(request.prompt.size()); }
  int length() const { return static_cast<int>(tokens.size()); }
  int generated() const { return length() - prompt_length(); }
  int computed() const { return memory.computed; }
  int remaining() const {
    return length() - computed();
  }  // known tokens that were not computed yet
  int source_length() const { return static_cast<int>(request.source.size()); }
  // Whether the source must be computed first.
  bool needs_source() const { return source_length() > 0 && !source_ready; }
  // Whether only tokens behind the prompt remain that were never computed: the last one, whose row
  // yields a new token, and before it tokens that had no alternative.
  bool decoding() const {
    if (forked()) return true;
    return computed() >= prompt_length() && (remaining() == 1 || computed() >= high_water);
  }
  // Whether the sequence consists of beams, which have its memory.
  bool forked() const { return beams != nullptr && beams->forked; }
  // Returns how many of the sequences that may run at a time this one stands for.
  int seats() const { return beams == nullptr ? 1 : beams->params.num_beams; }
  // Returns the number of tokens whose keys and values the cache must hold at the end. The last
  // sampled token is never computed.
  int64_t cache_tokens() const {
    return prompt_length() + std::max(request.sampling.max_tokens - 1, 0);
  }
  // Whether entries of prompt_logprobs are missing.
  bool wants_prompt_logprobs() const {
    return request.sampling.prompt_logprobs.has_value() &&
           static_cast<int>(prompt_logprobs.size()) < prompt_length();
  }
  // Whether the logits of token i's row are needed: token i is the last one, or its row predicts a
  // prompt token whose log-probability is missing.
  bool WantsLogits(int i) const {
    if (request.encode.has_value()) return EncodesLogits(*request.encode, i);
    if (i + 1 == length()) return true;
    return wants_prompt_logprobs() && i + 1 < prompt_length() &&
           i + 1 >= static_cast<int>(prompt_logprobs.size());
  }

  // Whether token i's row is an output of a text by itself (Batch::text_rows), or one of the rows
  // that are pooled.
  bool IsTextRow(int i, PoolingKind pooling) const {
    if (!request.encode.has_value()) return false;
    if (request.encode->output == EncodeOutput::kVectors) return true;
    if (request.encode->output != EncodeOutput::kText) return false;
    return pooling == PoolingKind::kFirst ? i == 0
                                          : pooling == PoolingKind::kLast && i + 1 == length();
  }
  bool IsPooled(PoolingKind pooling) const {
    return request.encode.has_value() && request.encode->output == EncodeOutput::kText &&
           PoolsAll(pooling);
  }

  // Returns the text whose end is the end of `tokens`, and in which prompt lookup searches. A
  // prediction stands before the prompt, behind a copy of the prompt's end, so that it is found as
  // soon as the response begins like it.
  std::span<const TokenId> LookupText() {
    if (request.prediction.empty()) return tokens;
    if (lookup.empty()) {
      const auto before = std::min<int64_t>(kLongestMatch, std::ssize(request.prompt));
      lookup.assign(request.prompt.end() - before, request.prompt.end());
      lookup.insert(lookup.end(), request.prediction.begin(), request.prediction.end());
      before_tokens = lookup.size();
    }
    const size_t known = lookup.size() - before_tokens;
    lookup.insert(lookup.end(), tokens.begin() + static_cast<int64_t>(known), tokens.end());
    return lookup;
  }

  Request request;
  std::shared_ptr<TokenSink> sink;
  bool owes_end = false;  // was submitted, and the sink has not been told of an end
  OutputText text;
  SamplingState sampling;
  std::vector<TokenId> tokens;  // prompt tokens, then generated tokens
  Proposal proposal;            // tokens that may follow
  Alignment alignment;          // of LookupText(), for prompt lookup
  std::vector<TokenId> lookup;  // LookupText() if the request has a prediction
  size_t before_tokens = 0;     // number of leading ids of `lookup` that are not from `tokens`
  std::vector<TokenId> draft;   // the leading tokens of `proposal` that the next step computes
  AcceptanceRecord acceptance;  // how often earlier proposals were right
  SequenceMemory memory;
  PredictableRows predictable;
  bool is_long = false;  // decides between two sets of rope factors
  // Combines is_long, cache_salt and RoutingControl::key(); only sequences with equal keys share
  // cached prefixes. PagedPool calls this key the salt.
  std::string cache_key;
  // Largest computed() so far. After a preemption, tokens below it are computed a second time.
  int high_water = 0;
  std::vector<std::pair<int, int>> reused;  // positions [begin, end) not computed for this request
  int routes_delivered = 0;                 // leading tokens whose routes the sink has received
  int cached_tokens = 0;  // prompt tokens that the first admission found in the cache
  uint64_t seed = 0;
  absl::Time queued_at;  // SteadyNow() at the submission
  // Timestamps for latency metrics.
  std::chrono::steady_clock::time_point submitted_at;
  // First admission; later ones after preemptions do not change it.
  std::chrono::steady_clock::time_point admitted_at;
  std::optional<std::chrono::steady_clock::time_point> first_token_at;
  absl::Time rank;     // arrival plus priority; sequences are served in ascending order
  uint64_t order = 0;  // order of submission; decides between equal ranks
  // Was admitted before: the sequence runs, or it waits after a preemption, or it is a forked
  // sample that waits because max_running sequences ran already.
  bool admitted = false;
  std::vector<std::optional<TokenLogprob>> prompt_logprobs;
  bool prompt_delivered = false;
  // How long choosing its tokens took in its last step, if it has structured output (DrawingShare).
  double draw_seconds = 0.0;
  bool resting = false;  // leaves out the next step, to the advantage of others
  int rested = 0;        // steps that it has left out since its last one
  // Whether the cache has the keys and values of the source, if there is one.
  bool source_ready = false;
  bool source_encoded = false;  // whether it had them before
  // Whether one step must compute all of its tokens.
  bool whole = false;
  EncodeResult encoded;  // what was computed so far for Request::encode
  // Further samples of the same prompt. They start when this sequence has computed the prompt, and
  // share the prompt's blocks.
  std::vector<std::unique_ptr<Sequence>> samples;
  std::unique_ptr<BeamGroup> beams;  // of a request with beam search; else null
  Sequence* leader = nullptr;        // of a beam: the sequence whose beam it is; else null
};

using SequencePtr = std::unique_ptr<Sequence>;

// Returns whether `a` is served before `b`: lower rank first, then earlier submission.
inline bool ServedBefore(const Sequence& a, const Sequence& b) {
  return a.rank != b.rank ? a.rank < b.rank : a.order < b.order;
}

}  // namespace moeserve
