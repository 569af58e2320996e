// Drafts by the model's own prediction layers (multi-token prediction).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/model/model.h"
#include "engine/run/draft_model.h"
#include "engine/sample/sampler.h"
#include "engine/sequence/sequence.h"
#include "kernels/kv_cache_storage.h"

namespace moeserve {

// Proposes the most probable tokens, one after the other. The row of position j continues the
// model's row of token j with the embedding of token j + 1 and predicts token j + 2. Its keys and
// values are in the page that has the model's of token j, so pages are managed once.
//
// The model's rows are lost at its next step, so the layers compute the row of every known token
// before it. A sequence lacks one row: that of the last token whose keys and values it shares with
// another sequence, as a prefix or as another sample of its prompt, because the token behind it
// differs. A prefix also lacks the rows of the last step of the sequence that left it. In these
// places the cache has another sequence's row, or what an earlier owner of the page left. This
// makes proposals a little worse; no answer depends on it.
//
// Nothing is counted in expert statistics. Engine thread only.
class PredictionDrafts {
 public:
  // The model has prediction layers. `cache` has CacheShapes() of them and as many pages as the
  // first table of the model's cache. A step has at most `max_rows` rows. The references outlive
  // the object.
  PredictionDrafts(Model& model, std::unique_ptr<KvCacheStorage> cache, int max_rows,
                   const TextlessIds& textless)
      : model_(model), cache_(std::move(cache)), max_rows_(max_rows), textless_(textless) {}

  // A step of the model begins; the rows of earlier ones are lost.
  void BeginStep() { ++step_; }
  // Notes that the step computed the tokens [begin, begin + count) of a sequence, from its row
  // `first_row` on.
  void Remember(Sequence& sequence, int first_row, int begin, int count) const {
    sequence.predictable = {.step = step_, .row = first_row, .begin = begin, .count = count};
  }

  // Computes the rows of the last step's tokens for all sequences `running`, and sets the proposals
  // of those that want tokens.
  void Propose(std::span<const SequencePtr> running, std::span<const DraftModel::Wanted> wanted);

  // Returns the mean time of a step that computes a row of each sequence; 0 before the first.
  double seconds_per_token() const { return seconds_per_token_; }

 private:
  // The last row that a sequence with a proposal had in Model::Predict().
  struct Chain {
    DraftModel::Wanted wanted;
    int32_t row = 0;
  };

  // Adds the rows of a sequence that the model has computed and whose next token is known, as far
  // as there is room. Returns whether the last of them predicts the token behind the known ones.
  bool AddKnown(Sequence& sequence, Batch& batch, std::vector<int32_t>& sources) const;
  // Adds the row that follows the last one of each chain. Removes chains that want no more tokens.
  void AddNext(std::vector<Chain>& chains, Batch& batch, std::vector<int32_t>& sources) const;
  static void AddRow(Batch& batch, int sequence, TokenId token, int position);
  // Runs a step, and appends the most probable token of every chain to its proposal. The rows with
  // logits are those of the chains.
  void Run(Batch& batch, const PredictionSources& sources, std::span<const Chain> chains);

  Model& model_;
  const std::unique_ptr<KvCacheStorage> cache_;
  const int max_rows_;
  const TextlessIds& textless_;
  uint64_t step_ = 0;
  std::vector<float> logits_;
  std::vector<SampleResult> drawn_;
  double seconds_per_token_ = 0.0;
};

}  // namespace moeserve
