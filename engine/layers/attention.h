// An attention block, dense or routed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/layers/branch.h"
#include "engine/layers/routed/routed_layer.h"
#include "engine/weights/load_weights.h"

namespace moeserve {

// Keys and values of the step's tokens are written to the cache first, unless the layer reads those
// of another one; then every token attends to the cache, its own entry included. Immutable after
// loading.
class Attention : public Branch {
 public:
  static Result<std::unique_ptr<Attention>> Load(LoadContext& load, const ModelSpec& model,
                                                 int block);

  void Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const override;

  bool TakesNorm() const override { return !spec_.routed() || routed_->TakesNorm(); }
  const RoutedLayer* routed() const override { return routed_.get(); }

  const float* out_bias() const override {
    return out_bias_ == nullptr ? nullptr : static_cast<const float*>(out_bias_->data());
  }

 private:
  absl::Status LoadQkNorm(LoadContext& load, const std::string& prefix);

  // Projects the rows to the first columns of `all`.
  void ProjectRows(StepContext& ctx, const RowsView& x, const RowsView& all) const;
  // Computes the queries, keys, values and gates of the rows, before norms and rotation.
  void Project(StepContext& ctx, const RowsView& x, const RowsView& all) const;
  // Whether Project() has normalised queries and keys: norms of heads with weights of their own,
  // before the rotation.
  bool ProjectNorms() const { return spec_.qk_norm == QkNorm::kHeads && !spec_.qk_norm_after_rope; }
  // Returns the operation that prepares the queries, keys and values in `rows`, or the keys and
  // values alone, and writes the cache.
  NormRopeAppendArgs AppendOf(StepContext& ctx, const RowsView& rows, bool queries) const;
  // Normalises (unless they are `normed`) and rotates queries, in place; the first one is that of
  // token `first_token`. AppendOf() does so together with the keys.
  void PrepareQueries(Backend& backend, const RowsView& queries, int64_t first_token,
                      bool normed) const;
  // Scales queries by their positions if the layer does so.
  void ScaleQueries(Backend& backend, const RowsView& queries, int64_t first_token) const;
  // Forward() of a layer that reads the keys and values of another one.
  void ForwardWithoutKeys(StepContext& ctx, const RowsView& x, const RowsView& output) const;
  // Forward() of a layer whose queries are not routed.
  void ForwardDense(StepContext& ctx, const RowsView& x, const RowsView& output) const;
  // Writes the division's own rows of `output`, which has all. `query` and `gate` are own rows,
  // too: those of the gate before the sigmoid; unused if there is none. `append`: AttentionArgs.
  void DenseQueries(StepContext& ctx, const RowDivision& division, const RowsView& query,
                    const RowsView& gate, const RowsView& output,
                    const NormRopeAppendArgs* append) const;

  int layer_ = 0;  // of the KV cache; that of the layer whose keys are read
  AttentionSpec spec_;
  RopeSettings rope_;
  StackedLinear projection_;  // output columns; dense: q, k, v, gate; routed: k, v
  // Without a projection of values: projection_ has q and k, and this is the gate's.
  std::unique_ptr<LinearBank> gate_;
  std::unique_ptr<LinearBank> output_;  // dense only
  std::unique_ptr<NormBank> query_norm_, key_norm_;
  std::unique_ptr<NormBank> value_norm_;  // null if there is none
  std::unique_ptr<NormBank> inner_norm_;  // of the heads' outputs together; null if there is none
  // The experts of the attention, or those of its values; null if there are none.
  std::unique_ptr<RoutedLayer> routed_;
  std::unique_ptr<DeviceBuffer> out_bias_;
  std::unique_ptr<DeviceBuffer> sinks_;              // [H]; null if there are none
  RelativeBiases own_biases_;                        // empty unless every layer has its own
  const RelativeBiases* relative_biases_ = nullptr;  // these or the model's; null: there are none
};

}  // namespace moeserve
