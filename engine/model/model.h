// The model: embeddings, layers and head. Weights are immutable; activations are those of one
// step at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/model/loaded_experts.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"
#include "engine/step/batch.h"
#include "engine/step/step_listener.h"
#include "engine/step/step_report.h"
#include "engine/tiers/tier_options.h"
#include "engine/weights/expert_placement.h"
#include "engine/weights/packed_cache.h"
#include "kernels/backend.h"

namespace moeserve {

struct ModelOptions {
  DType compute = DType::kF32;  // kF32 or kBF16: the type of the inputs of matrix products
  // If not kNone, the matrices of experts and projections are stored as integers of this type, an
  // untied LM head as int8 (QuantizationOf()), and `compute` must be kBF16.
  Quantization quantization = Quantization::kNone;
  // Whether matrices of attention, feed-forward layers and experts that the files store as FP8 are
  // computed from these numbers and their scales, if `compute` is kBF16 and the backend
  // stores_fp8(). Otherwise they are rounded to bf16.
  bool keep_fp8 = false;
  // The ranks that compute the model together, and the experts that each of them has; both must
  // outlive the model. Null: this process computes everything. With ranks, all of them must call
  // the functions of their models in the same order with the same arguments.
  Exchange* exchange = nullptr;
  const ExpertPlacement* placement = nullptr;
  // Counts what the experts of this rank's model do; must outlive the model. Null: nobody does.
  LoadWatch* load_watch = nullptr;
  // Whether the ranks divide the rows of a step (RowDivision); kAuto: in steps of at least
  // kRowsToDivide rows for each rank.
  SplitChoice split_rows = SplitChoice::kAuto;
  static constexpr int kRowsToDivide = 8;
  // Whether each rank computes a range of the vocabulary; then only the leader writes logits.
  // kAuto: if there are several ranks and the head has a matrix of its own. With kOn and tied
  // embeddings, a rank has both the whole matrix and its range.
  SplitChoice split_head = SplitChoice::kAuto;
  // Whether a rank gets the results of the experts for its rows only, adds them, and gathers the
  // sums, instead of getting and adding all results. kAuto: where OwnersAdd()
  // (layers/routed/owner_sums.h) says so. Equal on all ranks.
  SplitChoice owner_sums = SplitChoice::kAuto;
  // Whether the ranks compare checksums of their residual streams after each step. Equal on all.
  bool rank_checksums = true;
  // Of experts that are read from the files of a packed cache.
  TierOptions tiers = {};
  // Takes part in all steps; must outlive the model. Null: nobody does.
  StepListener* listener = nullptr;
};

// Where a step writes its results, f32 in host memory.
struct StepResults {
  // [batch.logit_rows.size(), RowOutputs()], but not for rows that the device samples.
  std::span<float> logits = {};
  std::span<SampleResult> samples = {};  // [batch.samples.size()] the drawn tokens
  std::span<float> texts = {};           // [batch.num_texts(), TextOutputs()]
};

class Model {
 public:
  // Validates the spec, takes every weight from `source` and lays it out for `backend`, which must
  // outlive the model. Linear layers that `packed_cache` (null, or one for this backend) holds are
  // taken from there instead. Errors: InvalidArgument, ResourceExhausted (memory) or the source's
  // error.
  static Result<std::unique_ptr<Model>> Create(const ModelSpec& spec, const ModelOptions& options,
                                               WeightSource& source, Backend& backend,
                                               PackedCache* packed_cache = nullptr);
  ~Model();

  // Writes what the cache has deferred (PackedCacheOptions::defer) on a thread of the lowest
  // priority. The cache must be the one with which the model was created. Stops early if the model
  // is destroyed. Must be called at most once.
  void WriteInBackground(std::unique_ptr<PackedCache> packed_cache);

  // Runs one ragged step: appends keys and values to `cache` and writes `results`. Only one thread
  // may call at a time.
  StepReport Forward(const Batch& batch, KvCacheStorage& cache, const StepOptions& options,
                     const StepResults& results);

  // Runs one step of the encoder beside a decoder: computes whole sources and writes the keys and
  // values of attention to them to `cache`. The batch has the pages of the tables kSourceTable and
  // kEncoderTable, and their lengths; it asks for no outputs.
  StepReport EncodeSources(const Batch& batch, KvCacheStorage& cache, const StepOptions& options);

  // Runs one step of the prediction layers (ModelSpec::prediction) and writes logits. The row of a
  // token predicts what follows it: its source is the row of the token before it, its position is
  // that of the token before it too. `cache` has the shapes of CacheShapes(*spec().prediction).
  // Nothing is counted or reported.
  void Predict(const Batch& batch, const PredictionSources& sources, KvCacheStorage& cache,
               const StepResults& results);

  // Counts the plans of the last step, which ran with StepOptions::count_later, for the phases [T]
  // that its tokens turned out to have. Returns what StepReport::routes would be otherwise. Must be
  // called once, by the thread that called Forward(), before the next Forward().
  std::span<const TokenRoutes> CountStep(std::span<const Phase> phase);

  // Returns Internal with the file's name if a mapped file that the model reads in place (packed
  // weights, an embedding table) has lost bytes, or if an expert that was used for the first time
  // differs from its checksum. Then the results of the last step may be wrong.
  // Also returns what ModelOptions::listener has returned after the last step. To be called after
  // each Forward(), also after one that has thrown, by the same thread. The system is asked for the
  // size of files at most every 20 ms, unless `now`. With ranks, an error of the files ends the
  // exchange: this rank is lost.
  absl::Status CheckFiles(bool now = false);

  // Returns what has been read from files since the model was loaded. Called by the thread that
  // calls Forward().
  TierCounts tier_counts() const;

  // Returns the number of floats per token that a step must store for its report: the router scores
  // and router inputs that `contents` requests.
  int64_t ReportFloatsPerToken(ReportContents contents) const;

  // Allocates the device memory for a step with `tokens` tokens and `logit_rows` rows of logits
  // over a cache of this type, so that no request can fail for lack of it later. `widest` is the
  // largest routing override that requests may have (null: none are allowed), `contents` the most
  // that a step reports. Returns ResourceExhausted if there is no memory for a cache of one block.
  // If the activations do not fit, the process stops with a message that names the sizes.
  absl::Status Reserve(int tokens, int logit_rows, KvCacheType cache_type,
                       const RoutingControl* widest = nullptr, ReportContents contents = {});

  // With ranks, experts can move between steps; the functions below are called by the thread that
  // runs the model. Returns where they are.
  std::shared_ptr<const ExpertPlacement> placement() const;
  // Returns what this rank holds in `placement`, and has not loaded: the blocks, with this rank as
  // the holder of these experts.
  ExpertPlacement::Blocks MissingExperts(const ExpertPlacement& placement) const;
  // Returns whether the blocks of `missing` can take experts at all. FailedPrecondition: not if a
  // block's experts are read from mapped files, or the device cannot.
  absl::Status CheckTaking(const ExpertPlacement::Blocks& missing) const;
  // Returns whether UsePlacement() can take these experts. FailedPrecondition: not if their weights
  // have another type than those of the block's other experts, or the device cannot.
  absl::Status CheckExperts(const LoadedExperts& experts) const;
  // From the next step on, the experts are where `placement` says. `loaded` has what this rank was
  // missing.
  void UsePlacement(std::shared_ptr<const ExpertPlacement> placement, LoadedExperts loaded);
  // Takes away the experts that this rank does not hold any more. Their memory is freed with the
  // result, which any thread may destroy.
  std::vector<std::shared_ptr<const void>> DropExperts();

  const ModelSpec& spec() const;
  const ModelOptions& options() const;
  // Whether the ranks divide the vocabulary.
  bool divides_head() const;
  Backend& backend() const;
  int64_t weight_bytes() const;  // bytes as laid out for the backend

 private:
  class Impl;
  explicit Model(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moeserve
