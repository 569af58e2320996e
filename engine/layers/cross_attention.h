// A block in which the tokens of a decoder attend to the outputs of an encoder.
#pragma once

#include <memory>

#include "engine/layers/branch.h"
#include "engine/layers/routed/routed_layer.h"
#include "engine/weights/load_weights.h"

namespace moeserve {

// Dense, or routed like the attention of MoA ("Mixture of Attention Heads", section 4): the router
// reads the decoder's rows, and all experts share the keys and values of the source. Immutable
// after loading.
class CrossAttention : public Branch {
 public:
  static Result<std::unique_ptr<CrossAttention>> Load(LoadContext& load, const ModelSpec& model,
                                                      int block);

  // Writes the keys and values of the step's tokens, the source, to the cache. `source` [T, d] are
  // the encoder's outputs for them, in the activation type.
  void Remember(StepContext& ctx, const RowsView& source) const;

  void Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const override;

  const RoutedLayer* routed() const override { return routed_.get(); }

  const float* out_bias() const override {
    return out_bias_ == nullptr ? nullptr : static_cast<const float*>(out_bias_->data());
  }

 private:
  int layer_ = 0;  // of the KV cache
  AttentionSpec spec_;
  StackedLinear keys_values_;
  StackedLinear queries_;               // dense only: q, gate
  std::unique_ptr<LinearBank> output_;  // dense only
  std::unique_ptr<NormBank> query_norm_, key_norm_;
  std::unique_ptr<NormBank> inner_norm_;  // of the heads' outputs together; null if there is none
  std::unique_ptr<RoutedLayer> routed_;   // null if the attention is dense
  std::unique_ptr<DeviceBuffer> out_bias_;
};

}  // namespace moeserve
