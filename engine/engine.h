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

struct EngineOptions {
  int max_model_len = 0;  // 0: max_position_embeddings of the model
  int max_num_seqs = 64;  // sequences that run at a time
  // Rows of one step, prefill and decode together. 0: the device's preferred number.
  int max_step_tokens = 0;
  int64_t kv_cache_bytes = 0;  // 0: room for max_num_seqs sequences of min(max_model_len, 2048)
  std::optional<KvCacheType> kv_cache_type = std::nullopt;  // nullopt: that of the model's products
  int max_queued_seqs = 1024;
  int64_t max_queued_tokens = 1'000'000;
  absl::Duration max_queue_wait = absl::Seconds(60);
  // Prompt rows beside decoding rows in a step. 0: as many as about double the step's time.
  int max_prompt_rows = 0;
  bool prefix_cache = true;
  // False: nothing is counted, ExpertSnapshot() stays at 0.
  bool expert_stats = true;
  // Requests may ask for their routes (routing_record, expert_counts), which are kept beside the KV
  // cache. Requires expert_stats.
  bool routing_records = false;
  RecorderOptions recorder = {};
  RoutingControlLimits routing_control = {};  // what requests may change
};

// A snapshot for metrics; counters since start.
struct EngineStats {
  int running = 0;
  int waiting = 0;
  int64_t kv_blocks_total = 0;
  int64_t kv_blocks_used = 0;       // held by a sequence
  int64_t kv_blocks_evictable = 0;  // free, but still findable in the prefix cache
  uint64_t preemptions = 0;
  uint64_t prefix_queried_tokens = 0;  // prompt tokens looked up in the prefix cache
  uint64_t prefix_hit_tokens = 0;
  double step_seconds = 0.0;     // time spent in steps
  double forward_seconds = 0.0;  // the part spent in Model::Forward
  int kv_block_tokens = 0;
  uint64_t prompt_tokens = 0;
  uint64_t generation_tokens = 0;
  uint64_t finished_stop = 0;
  uint64_t finished_length = 0;
  uint64_t finished_abort = 0;  // cancelled or past the deadline
  uint64_t finished_error = 0;
  uint64_t rejected_queue_full = 0;
  uint64_t rejected_queue_timeout = 0;
  uint64_t steps = 0;
  absl::Time last_step = absl::InfinitePast();
  bool healthy = true;
  bool prefix_cache = false;
  EngineHistograms histograms;
};

class Engine {
 public:
  // Allocates the KV cache and starts the engine thread. `eos_token_ids` end a generation unless
  // ignore_eos. InvalidArgument: an option out of range; ResourceExhausted: the cache cannot hold
  // one sequence of max_model_len.
  static Result<std::unique_ptr<Engine>> Create(const EngineOptions& options,
                                                std::unique_ptr<Model> model,
                                                std::shared_ptr<const Tokenizer> tokenizer,
                                                std::vector<TokenId> eos_token_ids);
  ~Engine();  // Shutdown()

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Queues a request; thread-safe. On success the sink gets the answer; on failure it is never
  // called. InvalidArgument: parameters or prompt out of range (prompt + max_tokens over
  // max_model_len included); AlreadyExists: the id is running; ResourceExhausted: the queue is
  // full; Unavailable: draining or shut down.
  absl::Status Submit(Request request, std::shared_ptr<TokenSink> sink);

  // The same for samples of one prompt, which is run once: `requests` have equal prompts, salts,
  // priorities and routing controls, and the samples share the prompt's cache blocks until they
  // part. All or none.
  absl::Status Submit(std::vector<Request> requests, std::vector<std::shared_ptr<TokenSink>> sinks);

  // Asks for the end of a request; thread-safe, idempotent, unknown ids are ignored. The sink gets
  // OnError(Cancelled) within one step unless it was finished before; its blocks are free then.
  void Cancel(const std::string& id);

  // Stops admission, lets running and queued requests finish until `deadline`, cancels the rest.
  void Drain(absl::Time deadline);
  // Cancels everything and joins the engine thread.
  void Shutdown();

  EngineStats Stats() const;
  // Includes every step finished before the call: an answered request is always in it. On a device
  // that counts, up to a second later while other requests run.
  ExpertStats ExpertSnapshot() const;

  // Any thread; valid as long as the engine.
  const RouteLayout& route_layout() const;
  // Empty where they are not kept (RecorderOptions::token_counts_bytes, expert_stats). Valid as
  // long as the engine.
  std::optional<TokenExpertCounts> token_expert_counts() const;
  // By routed block; empty unless asked for (RecorderOptions::hidden_samples).
  std::vector<HiddenSample> HiddenSamples() const;

  const EngineOptions& options() const;  // with all defaults resolved
  int max_model_len() const;
  const ModelSpec& spec() const;
  const Tokenizer& tokenizer() const;  // null deref forbidden: see has_tokenizer()
  bool has_tokenizer() const;          // false for models loaded without one (ids only)

 private:
  class Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moeserve
