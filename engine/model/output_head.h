// What a model computes from the last block's rows: logits of tokens or labels, and vectors of
// texts.
#pragma once

#include <memory>
#include <vector>

#include "engine/spec/spec.h"
#include "engine/step/step_times.h"
#include "engine/step/workspace.h"
#include "engine/weights/load_weights.h"
#include "kernels/exchange/exchange.h"

namespace moeserve {

// Return the number of outputs of a row: logits of the vocabulary or of labels (0 if the head has
// none of single rows), and elements of a vector or logits of a text (0 without a pooling).
int RowOutputs(const ModelSpec& spec);
int TextOutputs(const ModelSpec& spec);

// Immutable after loading.
class OutputHead {
 public:
  static Result<std::unique_ptr<OutputHead>> Load(LoadContext& load, const ModelSpec& spec);

  // Returns the matrix [V, d] of the vocabulary; null if the head has none, or only a range of it.
  const LinearBank* vocabulary() const {
    return HasVocabulary(spec_.head.kind) ? matrix_.get() : nullptr;
  }
  // Computes the outputs [n, RowOutputs()] of single rows, f32. `rows` [n, d] f32 are outputs of
  // the last block. If ranks divide the vocabulary (RankShare), only the leader writes `outputs`.
  // `times`: StepOptions::times.
  void RunRows(Backend& backend, Workspace& workspace, const RowsView& rows,
               const RowsView& outputs, StepTimes* times = nullptr) const;
  // Writes the rows [n, d] after the final norm, or the rows as they are if there is none.
  void Normalize(Backend& backend, const RowsView& rows, const RowsView& to) const;
  // As RunRows(), for rows that are normalized.
  void RunHead(Backend& backend, Workspace& workspace, const RowsView& rows,
               const RowsView& outputs, StepTimes* times = nullptr) const;
  // Computes the outputs [n, TextOutputs()] of texts, f32: those of the first rows from `rows`
  // [m, d], which need no pooling, then those of the step's pool_ranges from the rows of `all`.
  // Both are outputs of the last block in f32.
  void RunTexts(Backend& backend, Workspace& workspace, const RowsView& rows, const RowsView& all,
                const RowsView& outputs) const;

 private:
  // The range of the vocabulary that this rank computes.
  struct Range {
    Exchange* exchange = nullptr;  // null: the ranks do not divide the vocabulary
    int width = 0;                 // columns of a rank; the last ranks may have fewer
    int columns = 0;
    std::unique_ptr<LinearBank> matrix;  // null without columns
  };
  static Result<Range> LoadRange(LoadContext& load, const LinearPart& part, int d);
  // Scales and limits logits, in place.
  void Finish(Backend& backend, const RowsView& logits) const;

  struct Layer {
    std::unique_ptr<LinearBank> matrix;
    ActivationKind activation = ActivationKind::kNone;
    int width = 0;
  };

  ModelSpec spec_;  // without blocks
  // The input of the vocabulary's matrix stays f32 unless Backend::rounds_head_input(): few rows
  // reach the head, and rounding them costs as much accuracy as rounding in a whole layer.
  DType input_ = DType::kF32;
  std::unique_ptr<NormBank> final_norm_;  // null if there is none
  Layer layer_;                           // without a matrix if there is none
  std::unique_ptr<NormBank> layer_norm_;  // null if there is none
  // Null if the head has none, or if ranks divide it and the embeddings are not tied to it.
  std::unique_ptr<LinearBank> matrix_;
  Range range_;
  std::vector<Layer> dense_;  // behind the pooling
};

}  // namespace moeserve
