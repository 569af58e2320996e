// The engine: one thread owns every sequence, the scheduler and the KV cache; all other threads
// only submit, cancel and read snapshots. engine/README.md is the contract.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/status.h"
#include "engine/engine_histograms.h"
#include "engine/model/model.h"
#include "engine/request.h"
#include "engine/statistics/expert_recorder.h"
#include "engine/statistics/expert_stats.h"
#include "engine/text/tokenizer/tokenizer.h"

namespace moeserve {

inline constexpr int kMostDraftTokens = 64;
inline constexpr int kMostSnapshots = 1 << 20;
// Stands for 8 on a device whose tokens the host draws, and for 0 on other devices: they replay
// recorded steps of one row per sequence.
inline constexpr int kDefaultDraftTokens = -1;

// Speculative decoding (engine/draft).
struct DraftOptions {
  int max_tokens = 0;         // largest number of drafted tokens of a sequence in a step; 0: none
  bool prompt_lookup = true;  // false: only a draft model proposes tokens
  // Computes all that is proposed, whether or not that is expected to be faster.
  bool always = false;
};

struct EngineOptions {
  int max_model_len = 0;  // 0: max_position_embeddings of the model
  // Why max_position_embeddings is less than the model's files say, for error messages; "" if it is
  // not. Create() removes it if max_model_len is less, which then is the reason.
  std::string context_reason = {};
  int max_num_seqs = 64;  // largest number of sequences that run at a time
  // Largest number of rows in one step, prefill and decode together. 0: the device's preferred
  // number of rows. A value below max_num_seqs is raised to max_num_seqs.
  int max_step_tokens = 0;
  // Bytes of the KV cache, without states. 0: enough for max_num_seqs sequences of
  // min(max_model_len, 2048) tokens.
  int64_t kv_cache_bytes = 0;
  // Create() fails if the cache would have more bytes. 0: no limit.
  int64_t max_kv_cache_bytes = 0;
  // Element type of the cache. nullopt: the type of the inputs of the model's matrix products.
  std::optional<KvCacheType> kv_cache_type = std::nullopt;
  int max_queued_seqs = 1024;
  int64_t max_queued_tokens = 1'000'000;
  absl::Duration max_queue_wait = absl::Seconds(60);
  // Largest number of prompt rows in a step that also has decoding rows. 0: as many rows as take
  // about the time of a step in which all running sequences decode.
  int max_prompt_rows = 0;
  bool prefix_cache = true;
  // Whether attention with windows releases pages that no later position sees. If false, it keeps
  // all: texts can then be continued from every cached prefix, not only where the windows behind
  // it are cached, too.
  bool window_pages = true;
  // For models with states, such as convolutions, the prefix cache also needs snapshots of states.
  // How many are kept; -1: as many as max_num_seqs. They also need prefix_cache.
  int snapshots = -1;
  int snapshot_interval = 1024;  // SnapshotUse::interval
  // Outputs depend on neither of these two.
  DraftOptions draft = {};
  // Whether tokens to which the masks of a request leave no alternative are taken without computing
  // the row before them first; the next step computes several of them.
  bool forced_tokens = true;
  // Whether Create() runs a step of a few tokens and fails if its results are not finite.
  bool try_model = false;
  // If false, no expert statistic is counted and ExpertSnapshot() stays at 0.
  bool expert_stats = true;
  // Whether requests may ask for the routes of their tokens (routing_record, expert_counts). The
  // routes are kept for each page of the KV cache. Requires expert_stats.
  bool routing_records = false;
  RecorderOptions recorder = {};
  RoutingControlLimits routing_control = {};  // what requests may change about the routing
};

// A snapshot for metrics. Counters count from the engine's start.
struct EngineStats {
  int running = 0;
  int waiting = 0;
  // Of the layers that see all positions; without them, of all layers. Layers with windows beside
  // them have pages of their own, which suffice for as many sequences.
  int64_t kv_blocks_total = 0;
  int64_t kv_blocks_used = 0;       // pages that a sequence holds
  int64_t kv_blocks_evictable = 0;  // free pages that still hold a cached prefix
  uint64_t preemptions = 0;
  uint64_t prefix_queried_tokens = 0;  // prompt tokens looked up in the prefix cache
  uint64_t prefix_hit_tokens = 0;
  uint64_t drafted_tokens = 0;   // tokens that were computed before they were drawn
  uint64_t accepted_tokens = 0;  // those of them that were then drawn
  uint64_t beam_rows = 0;        // rows that were computed for beams, without what they share
  double step_seconds = 0.0;     // sum of the times of all steps
  double forward_seconds = 0.0;  // the part of step_seconds spent in Model::Forward
  int kv_block_tokens = 0;
  int64_t kv_cache_bytes = 0;  // with the states of models that have them
  int64_t weight_bytes = 0;    // as laid out for the device
  TierCounts tiers;            // of the model, without the draft model
  uint64_t prompt_tokens = 0;
  uint64_t generation_tokens = 0;
  uint64_t finished_stop = 0;
  uint64_t finished_length = 0;
  uint64_t finished_abort = 0;  // requests cancelled, past their deadline or ended by a shutdown
  uint64_t finished_error = 0;
  uint64_t rejected_queue_full = 0;
  uint64_t rejected_queue_timeout = 0;
  uint64_t steps = 0;
  absl::Time last_step = absl::InfinitePast();  // wall clock
  bool healthy = true;
  bool prefix_cache = false;
  EngineHistograms histograms;

  uint64_t finished() const {
    return finished_stop + finished_length + finished_abort + finished_error;
  }
  // Adds the counters of another engine and its running and waiting sequences, but not the state of
  // its cache.
  void AddCounters(const EngineStats& other);
};

// What the engine thread does. A round is bounded work: it takes new requests and runs at most one
// step.
struct EngineProgress {
  uint64_t rounds = 0;  // grows with each round that begins
  bool idle = true;     // whether the thread waits for work
};

// Requests end with this when the engine drains or is shut down. Another Unavailable means that the
// engine is broken.
inline absl::Status ShutDownStatus() {
  return absl::UnavailableError("the server is shutting down");
}

// The interface of the engine. Thread-safe, except Shutdown().
class Engine {
 public:
  // Allocates the KV cache and starts the engine thread. Each of `eos_token_ids` ends a generation
  // unless the request sets ignore_eos. `draft_model`, which may be null, proposes tokens where
  // prompt lookup finds none (DraftOptions); its backend must outlive the engine. Errors:
  // InvalidArgument if an option is out of range, ResourceExhausted if the cache cannot hold one
  // sequence of max_model_len tokens or would exceed max_kv_cache_bytes.
  static Result<std::unique_ptr<Engine>> Create(const EngineOptions& options,
                                                std::unique_ptr<Model> model,
                                                std::shared_ptr<const Tokenizer> tokenizer,
                                                std::vector<TokenId> eos_token_ids,
                                                std::unique_ptr<Model> draft_model = nullptr);
  virtual ~Engine() = default;  // ends all requests as Shutdown() does

  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Queues a request. If Submit succeeds, `sink` receives the response; if Submit fails, `sink` is
  // never called. Errors: InvalidArgument if a parameter or the prompt is out of range (this
  // includes prompt + max_tokens over max_model_len), AlreadyExists if a request with this id is
  // queued or running, ResourceExhausted if the queue is full, Unavailable if the engine is
  // draining or shut down.
  absl::Status Submit(Request request, std::shared_ptr<TokenSink> sink);

  // Queues several samples of one prompt, which is computed once; the errors are those of the
  // overload above. `requests` have equal prompts, salts, priorities and routing controls. The
  // samples share the prompt's pages; a sample copies a shared page before it writes to it. Either
  // all requests are queued or none.
  //
  // With beam search (SamplingParams::beam, the same in all of them), the requests are the n best
  // hypotheses of one search, best first, and end together: each with one piece, or all with the
  // same error, also if one of them is cancelled. InvalidArgument also if these are more than
  // num_beams, or num_beams is more than max_num_seqs.
  virtual absl::Status Submit(std::vector<Request> requests,
                              std::vector<std::shared_ptr<TokenSink>> sinks) = 0;

  // Asks the engine to end the request that was submitted with `sink`; idempotent, no effect if
  // that request has ended. The sink receives OnError(Cancelled) within one step unless
  // the request has finished before. The request's pages are free when the sink is called.
  //
  // The caller must own a share of the sink, so that no other request can have a sink at the same
  // address. Ids are chosen by clients and may be used again, so they do not name a request here.
  virtual void Cancel(const TokenSink* sink) = 0;

  // Refuses new requests, lets running and queued requests finish until `deadline` (a SteadyNow()
  // time) and ends those that are left with Unavailable. Returns whether all have ended: false if
  // the engine thread did not end its step within 10 s of the deadline.
  virtual bool Drain(absl::Time deadline) = 0;
  // Ends all requests with Unavailable and joins the engine thread.
  virtual void Shutdown() = 0;
  // Ends all requests with this error, after the step that runs, and refuses new ones: something
  // that the engine needs has failed. The first reason counts.
  virtual void Break(absl::Status reason) = 0;

  virtual EngineStats Stats() const = 0;
  // Says whether the engine thread makes progress. Takes no lock.
  virtual EngineProgress Progress() const = 0;
  // Returns the expert statistics since the start. The snapshot includes every step that ended
  // before the call, so a request whose response is complete is always counted. If the device does
  // the counting, the snapshot can be up to a second old while requests run.
  virtual ExpertStats ExpertSnapshot() const = 0;
  // The reference is valid as long as the engine.
  virtual const RouteLayout& route_layout() const = 0;
  // Returns the counts per token id and expert; nullopt if expert_stats is false or the table would
  // be larger than RecorderOptions::token_counts_bytes. The result is valid as long as the engine.
  virtual std::optional<TokenExpertCounts> token_expert_counts() const = 0;
  // Returns the sampled router inputs, one entry per routed block; empty unless
  // RecorderOptions::hidden_samples asks for them.
  virtual std::vector<HiddenSample> HiddenSamples() const = 0;
  // The functions above are about the decoder of an encoder-decoder. Returns what counts the
  // encoder, whose tokens are those of sources; null for other models. Valid as long as the engine.
  virtual const ExpertRecorder* encoder_experts() const { return nullptr; }

  virtual const EngineOptions& options() const = 0;  // with all defaults resolved
  int max_model_len() const { return options().max_model_len; }
  const std::string& context_reason() const { return options().context_reason; }
  virtual const ModelSpec& spec() const = 0;
  // Returns null if the model has no tokenizer. Prompts can then be token ids only.
  virtual const Tokenizer* tokenizer() const = 0;
};

}  // namespace moeserve
