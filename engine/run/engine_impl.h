// The implementation of the engine. engine.cc has what other threads call and the life of a
// request, engine_step.cc has the steps, engine_beams.cc what is different with beam search.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/draft/constraint_memory.h"
#include "engine/draft/draft_depth.h"
#include "engine/engine.h"
#include "engine/memory/memory_pool.h"
#include "engine/routes/route_log.h"
#include "engine/run/draft_model.h"
#include "engine/run/engine_options.h"
#include "engine/run/prediction_drafts.h"
#include "engine/run/token_step.h"
#include "engine/schedule/drawing_share.h"
#include "engine/schedule/scheduler.h"
#include "engine/schedule/step_time.h"
#include "engine/sequence/sequence.h"

namespace moeserve {

inline double SecondsBetween(std::chrono::steady_clock::time_point begin,
                             std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

inline absl::Status NumericFailure() {
  return absl::InternalError("numeric failure: router scores or logits are not finite");
}

inline int64_t HeadParameters(const ModelSpec& spec) {
  return int64_t{spec.vocab_size} * spec.hidden_size;
}

// Returns what counts the work of the encoder beside a decoder; null if there is none.
inline std::unique_ptr<ExpertRecorder> NewEncoderRecorder(const ModelSpec& spec,
                                                          const EngineOptions& options,
                                                          RouteLog* log,
                                                          std::unique_ptr<RouteCounters> counters) {
  if (spec.encoder == nullptr) return nullptr;
  return std::make_unique<ExpertRecorder>(*spec.encoder, RecorderSettings(options), log,
                                          std::move(counters));
}

class EngineImpl final : public Engine {
 public:
  EngineImpl(const EngineOptions& options, std::unique_ptr<Model> model,
             std::shared_ptr<const Tokenizer> tokenizer, std::vector<TokenId> eos,
             std::unique_ptr<KvCacheStorage> cache, int64_t cache_bytes,
             std::unique_ptr<StateStorage> states, std::unique_ptr<RouteCounters> counters,
             std::unique_ptr<RouteCounters> source_counters, std::unique_ptr<Model> draft_model,
             std::unique_ptr<KvCacheStorage> draft_cache)
      : options_(options),
        page_use_(PageUseOf(options, model->spec(), draft_cache != nullptr)),
        model_(std::move(model)),
        tokenizer_(std::move(tokenizer)),
        eos_(std::move(eos)),
        cache_(std::move(cache)),
        states_(std::move(states)),
        recorder_(model_->spec(), RecorderSettings(options_), &routes_, std::move(counters)),
        source_layout_(model_->spec().encoder == nullptr
                           ? nullptr
                           : std::make_unique<RouteLayout>(*model_->spec().encoder)),
        source_routes_(source_layout_ == nullptr
                           ? nullptr
                           : std::make_unique<RouteLog>(*source_layout_,
                                                        cache_->num_pages(kSourceTable),
                                                        options_.routing_records)),
        encoder_recorder_(NewEncoderRecorder(model_->spec(), options_, source_routes_.get(),
                                             std::move(source_counters))),
        source_active_(encoder_recorder_ == nullptr
                           ? 0
                           : encoder_recorder_->Snapshot().always_active_parameters),
        always_active_(recorder_.Snapshot().always_active_parameters),
        routes_(recorder_.layout(), cache_->num_pages(), options_.routing_records),
        state_pool_(states_ == nullptr
                        ? nullptr
                        : std::make_unique<StatePool>(*states_, options_.max_num_seqs)),
        memory_(*cache_, routes_, state_pool_.get(), options_.prefix_cache, page_use_,
                {.interval = options_.snapshot_interval}, source_routes_.get(),
                draft_model == nullptr ? draft_cache.get() : nullptr),
        scheduler_(memory_, options_.max_num_seqs),
        textless_(tokenizer_.get(), eos_, model_->spec().vocab_size),
        token_step_(eos_, textless_, model_->spec().vocab_size, options_.max_model_len),
        draft_depth_(ReadShare(recorder_.Snapshot(), HeadParameters(model_->spec()))) {
    stats_.kv_blocks_total = cache_->num_pages();
    stats_.kv_block_tokens = kPageTokens;
    stats_.kv_cache_bytes = cache_bytes;
    stats_.weight_bytes = model_->weight_bytes();
    stats_.prefix_cache = options_.prefix_cache;
    if (draft_model == nullptr && draft_cache != nullptr) {
      predictions_ = std::make_unique<PredictionDrafts>(*model_, std::move(draft_cache),
                                                        options_.max_step_tokens, textless_);
    }
    if (draft_model != nullptr) {
      draft_model_ = std::make_unique<DraftModel>(std::move(draft_model), std::move(draft_cache),
                                                  options_.max_step_tokens, textless_);
    }
    thread_ = std::thread([this] { Loop(); });
  }

  ~EngineImpl() override { Shutdown(); }

  absl::Status Submit(std::vector<Request> requests,
                      std::vector<std::shared_ptr<TokenSink>> sinks) override;
  void Cancel(const TokenSink* sink) override;
  bool Drain(absl::Time deadline) override;
  void Shutdown() override;
  void Break(absl::Status reason) override;
  EngineStats Stats() const override {
    const MutexLock lock(mutex_);
    return stats_;
  }
  EngineProgress Progress() const override { return {rounds_.load(), idle_now_.load()}; }
  ExpertStats ExpertSnapshot() const override { return recorder_.Snapshot(); }
  const RouteLayout& route_layout() const override { return recorder_.layout(); }
  std::optional<TokenExpertCounts> token_expert_counts() const override {
    return recorder_.token_counts();
  }
  std::vector<HiddenSample> HiddenSamples() const override { return recorder_.HiddenSamples(); }
  const ExpertRecorder* encoder_experts() const override { return encoder_recorder_.get(); }
  const EngineOptions& options() const override { return options_; }
  const ModelSpec& spec() const override { return model_->spec(); }
  const Tokenizer* tokenizer() const override { return tokenizer_.get(); }

 private:
  // What was drawn for a sequence in a step.
  struct Drawn {
    std::vector<OutputDelta> deltas;
    absl::Status status;  // the error that ends the sequence after these pieces
    int accepted = 0;     // leading drafted rows that are rows of the sequence
  };
  // What a step computed for a sequence.
  struct SequenceOutput {
    ScheduledRows rows;
    int first_row = 0;  // of the step
    RowLogits logits;
    std::span<const float> texts;     // [texts, TextOutputs()], for Request::encode
    std::span<const uint8_t> failed;  // [rows.count] StepReport::failed
    std::optional<Drawn> drawn;       // set by Verify()
  };

  void Loop();
  // Takes submitted requests and cancellations; waits while there is no work. Returns false when
  // the engine was stopped and no request is left.
  bool TakeWork();
  void AbortExpired();
  void Admit();
  void Step();
  // Ends all requests because of broken_.
  void StopBroken();
  // Computes sources that sequences need next. Returns whether there were some.
  bool EncodeSources();
  // Proposes what may follow each decoding sequence and chooses how much of it the next step
  // computes.
  void ProposeDrafts();
  // Returns how many tokens may be drafted for a sequence.
  int DraftRoom(const Sequence& sequence) const;
  // Lets the draft model or the prediction layers propose tokens for these sequences, of a step
  // with `rows` decoding rows.
  void ProposeByModel(int rows, const std::vector<Sequence*>& sequences);
  // Notes which rows of the step prediction layers can continue.
  void RememberRows(const std::vector<SequenceOutput>& outputs);
  // Splits a step's results by sequence. `positions` [logit rows] is referred to by the result.
  std::vector<SequenceOutput> Outputs(const std::vector<ScheduledRows>& scheduled,
                                      const Batch& batch, const StepReport& report,
                                      std::vector<int32_t>& positions);
  // Draws the tokens of the sequences with drafted rows, removes the rejected rows from
  // `outputs`, and sets their phases in `batch`.
  void Verify(std::vector<SequenceOutput>& outputs, Batch& batch);
  // Whether all rows and logits of a sequence are finite.
  static bool Computed(const SequenceOutput& output);
  // Draws the tokens that follow the last known token, as many as the drafted rows allow. The
  // results of the other rows must be finite.
  Drawn Draw(Sequence& sequence, const SequenceOutput& output);
  Drawn DrawTokens(Sequence& sequence, const SequenceOutput& output);
  // Learns from the tokens [first, length) which the sequence drew, whether proposals are right.
  void LearnAcceptance(Sequence& sequence, int first);
  void ObserveStep(const std::vector<ScheduledRows>& scheduled, double forward_seconds);
  // Updates a sequence after its rows were computed: collects log-probabilities and marks the rows
  // as computed. If no known token is left to compute, draws and delivers the next tokens.
  void Advance(SequenceOutput& output);
  // Calls Advance(), and ends the sequence if there is no memory for that.
  void AdvanceOrFail(SequenceOutput& output);
  // Ends a request that generates nothing, after its last token was computed.
  void FinishEncoded(Sequence& sequence);
  // Starts the other samples of this sequence's prompt after the prompt was computed; each sample
  // draws its own first token.
  void ForkSamples(Sequence& sequence, const SequenceOutput& output);
  // Sends what was drawn to the sink. `first` is the position of the first drawn token.
  void Deliver(Sequence& sequence, Drawn drawn, int first);
  // Returns the work for a source of `tokens` tokens in these pages; 0 if there is none.
  ExpertWork SourceWork(std::span<const int32_t> pages, int tokens) const;
  // Returns its routes, if there is one. Requires RouteLog::keeps_routes().
  std::optional<RoutingRecord> SourceRoutes(std::span<const int32_t> pages, int tokens) const;
  // Sets the work for the source, and adds it to the work for the other tokens.
  static void AddSourceWork(const ExpertWork& work, Usage& usage);
  // Adds the routes of the tokens before `end` to the piece.
  void DeliverRoutes(Sequence& sequence, int end, OutputDelta& delta);
  // Finish() ends a request with its last piece, Fail() with an error. The request's pages
  // and its id are free before the sink is called.
  void Finish(Sequence* sequence, OutputDelta delta);
  void Fail(Sequence* sequence, const absl::Status& status);
  // Also ends the samples that wait for the sequence's prompt to be computed.
  void FailWithSamples(Sequence* sequence, const absl::Status& status);
  void FailForMemory(Sequence* sequence);
  // The following are about requests with beam search; `leader`: see BeamGroup.
  // Whether samples of one prompt agree about beam search, and the engine has place for the beams.
  absl::Status CheckBeams(const std::vector<SequencePtr>& samples) const;
  // Returns how many pages of a table a request holds at most, with all its beams.
  static int64_t MostPages(const Sequence& sequence, const PageUse& use);
  // Returns a beam without tokens behind the prompt and without memory.
  SequencePtr NewBeam(Sequence& leader);
  SequencePtr ForkBeam(Sequence& leader, const Sequence& parent);
  // Continues after the leader has computed the prompt or, after a preemption, what its beams
  // share.
  void StartBeams(Sequence& leader, const SequenceOutput& output);
  // Advances the beams of one leader, whose rows come first in `outputs`. Returns how many rows
  // these are.
  size_t AdvanceBeams(std::span<SequenceOutput> outputs);
  // Does a step of the search. `logits` [beams][V].
  void StepBeams(Sequence& leader, const std::vector<std::span<const float>>& logits);
  absl::Status ExtendBeams(BeamGroup& group, const std::vector<std::span<const float>>& logits);
  // Makes the beams that run on, which hold memory, from those that they continue.
  void ContinueBeams(Sequence& leader, const std::vector<BeamCandidate>& running,
                     const std::vector<std::span<const float>>& logits);
  // Adds the log-probability of a token that follows a beam, if the request wants it. Returns its
  // index in BeamGroup::scored.
  int AddScored(BeamGroup& group, const Beam& before, std::span<const float> logits, TokenId token);
  Hypothesis MakeHypothesis(const Sequence& leader, const Beam& beam, int number);
  OutputDelta BeamDelta(const Sequence& leader, const Hypothesis& made,
                        const FinishedBeam& finished);
  // Ends the requests of the search with the best hypotheses. `cut`: although beams run on, because
  // the time is up.
  void FinishBeams(Sequence* leader, bool cut);
  void FailBeams(Sequence* leader, const absl::Status& status);
  // Removes the leader and returns the sequences of all its requests.
  std::vector<SequencePtr> TakeBeams(Sequence* leader);
  // Whether a client has cancelled the request, or one of those that share its beams.
  bool Cancelled(const Sequence& sequence) const;

  // If no request is left, reads the expert counters from the device, so that an idle engine's
  // statistics are complete.
  void RefreshIfIdle() {
    if (!scheduler_.running().empty() || !scheduler_.waiting().empty()) return;
    recorder_.Refresh();
    if (encoder_recorder_ != nullptr) encoder_recorder_->Refresh();
  }
  void LeaveQueue(int sequences, int64_t tokens);
  // Makes the sequences of a request known, all or none. AlreadyExists if an id is.
  absl::Status Register(const std::vector<SequencePtr>& sequences)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets an ended request.
  void Forget(const Sequence& ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // After an exception: forgets the requests whose sequences were destroyed by it while they were
  // ended, and which have told their sinks. Counts the queue anew.
  void ForgetLost();
  void UpdateGauges();
  void CopySchedulerStats() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const EngineOptions options_;
  const std::vector<PageUse> page_use_;  // of each table of the cache
  const std::unique_ptr<Model> model_;
  const std::shared_ptr<const Tokenizer> tokenizer_;
  const std::vector<TokenId> eos_;
  const std::unique_ptr<KvCacheStorage> cache_;
  const std::unique_ptr<StateStorage> states_;  // null if the model has none

  // The following members are used by the engine thread only.
  ExpertRecorder recorder_;
  // The following are null or 0 without an encoder beside the decoder.
  const std::unique_ptr<RouteLayout> source_layout_;
  const std::unique_ptr<RouteLog> source_routes_;
  const std::unique_ptr<ExpertRecorder> encoder_recorder_;
  const int64_t source_active_;  // parameters that every token of a source uses
  const int64_t always_active_;  // parameters that every token uses, whatever its routes
  RouteLog routes_;
  const std::unique_ptr<StatePool> state_pool_;  // null if the model has no states
  MemoryPool memory_;
  Scheduler scheduler_;
  const TextlessIds textless_;
  TokenStep token_step_;
  StepTime step_time_;
  DrawingShare drawing_share_;
  DraftDepth draft_depth_;
  ConstraintMemory constraint_memory_;
  // At most one of these is not null.
  std::unique_ptr<DraftModel> draft_model_;
  std::unique_ptr<PredictionDrafts> predictions_;
  uint64_t model_drafts_ = 0;  // steps in which the draft model was not worth it
  uint64_t drafted_tokens_ = 0;
  uint64_t accepted_tokens_ = 0;
  std::vector<float> logits_;
  std::vector<float> texts_;          // outputs of the texts of the last step
  std::vector<float> beam_logprobs_;  // [V] scratch
  uint64_t beam_rows_ = 0;
  std::vector<SampleResult> samples_;  // tokens that the device drew in the last step
  std::unordered_set<const TokenSink*> cancelled_;
  bool shutting_down_ = false;  // cancelled_ has all requests, because the engine stops
  EngineHistograms histograms_;
  // Not OK once no request can be computed any more: a file that the model reads in place was
  // damaged, a rank was lost, or Break() was called.
  absl::Status broken_;

  // Written by the engine thread; read without a lock, because a thread that is stuck could hold
  // it.
  std::atomic<uint64_t> rounds_{0};
  std::atomic<bool> idle_now_{false};

  mutable Mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::vector<SequencePtr> submitted_ ABSL_GUARDED_BY(mutex_);
  absl::Status break_reason_ ABSL_GUARDED_BY(mutex_);  // of Break()
  // Only of requests that have not ended.
  std::vector<const TokenSink*> cancel_requests_ ABSL_GUARDED_BY(mutex_);
  // Of the requests that have not ended.
  std::unordered_set<std::string> ids_ ABSL_GUARDED_BY(mutex_);
  std::unordered_set<const TokenSink*> sinks_ ABSL_GUARDED_BY(mutex_);
  int queued_seqs_ ABSL_GUARDED_BY(mutex_) = 0;  // sequences that were submitted and never admitted
  // Prompt tokens of these sequences; samples of one prompt count once.
  int64_t queued_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t submissions_ ABSL_GUARDED_BY(mutex_) = 0;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancel_all_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  EngineStats stats_ ABSL_GUARDED_BY(mutex_);
  std::random_device random_ ABSL_GUARDED_BY(mutex_);

  std::thread thread_;
};

}  // namespace moeserve
