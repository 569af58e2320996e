// A second, smaller model that proposes tokens.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/model/model.h"
#include "engine/sample/sampler.h"
#include "engine/sequence/sequence.h"
#include "kernels/kv_cache_storage.h"

namespace moeserve {

// Proposes the most probable tokens, one after the other. The keys and values of a sequence are in
// the pages that have the same ids as those of the verifying model, so pages are managed once.
// Pages that sequences share may be computed by each of them: the results are the same bits.
// Nothing is counted in expert statistics. Engine thread only.
class DraftModel {
 public:
  // `cache` has as many pages as the cache of the verifying model. A step has at most `max_rows`
  // rows. `textless` outlives the object.
  DraftModel(std::unique_ptr<Model> model, std::unique_ptr<KvCacheStorage> cache, int max_rows,
             const TextlessIds& textless)
      : model_(std::move(model)),
        cache_(std::move(cache)),
        max_rows_(max_rows),
        textless_(textless) {}

  // InvalidArgument if the model cannot take sequences of `max_model_len` tokens, has another
  // vocabulary than `verifier`, has an encoder, or if its device draws tokens itself.
  static absl::Status Check(const Model& model, const ModelSpec& verifier, int max_model_len);

  // A sequence, and how many tokens to propose for it, at least one. The sequence must hold pages
  // for that many tokens behind its last one.
  struct Wanted {
    Sequence* sequence = nullptr;
    int tokens = 0;
  };
  // Sets the proposals of the sequences. First computes the known tokens that the model has not
  // seen. If that takes more than one step for all sequences together, computes one step of them
  // and changes no proposal.
  void Propose(std::span<const Wanted> wanted);

  // Returns the mean time of one step that proposes a token; 0 before the first.
  double seconds_per_token() const { return seconds_per_token_; }
  absl::Status CheckFiles() { return model_->CheckFiles(); }

 private:
  // Computes the known tokens behind SequenceMemory::drafted_until, at most max_rows_ of all
  // sequences. Returns whether all known tokens were computed; then, each proposal has one token.
  bool CatchUp(std::span<Sequence* const> sequences);
  // Adds a token to each proposal.
  void Extend(std::span<Sequence* const> sequences);
  void Add(Batch& batch, Sequence& sequence, int begin, int end) const;
  // Runs a step whose rows with logits belong to `sequences` and appends the most probable tokens
  // to the proposals.
  void Run(const Batch& batch, std::span<Sequence* const> sequences);

  const std::unique_ptr<Model> model_;
  const std::unique_ptr<KvCacheStorage> cache_;
  const int max_rows_;
  const TextlessIds& textless_;
  std::vector<float> logits_;
  double seconds_per_token_ = 0.0;
};

}  // namespace moeserve
