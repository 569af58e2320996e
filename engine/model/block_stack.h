// A stack of blocks with its embeddings: all of a model, the encoder or decoder of one, or its
// prediction layers.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/guarded_mapping.h"
#include "engine/layers/branch.h"
#include "engine/layers/cross_attention.h"
#include "engine/layers/layer_input.h"
#include "engine/spec/spec.h"
#include "engine/step/report_buffer.h"
#include "engine/step/step_context.h"
#include "engine/weights/load_weights.h"

namespace moeserve {

// Loads the branch of a block. Every type of mixer has a branch that computes it.
Result<std::unique_ptr<Branch>> LoadBranch(LoadContext& load, const ModelSpec& spec, int block);

// Immutable after loading, except for the report of a step.
class BlockStack {
 public:
  // `spec` outlives the stack.
  BlockStack(const ModelSpec& spec, DType compute);
  BlockStack(const BlockStack&) = delete;
  BlockStack& operator=(const BlockStack&) = delete;

  // `vocabulary` is the matrix of tied embeddings, and `tokens` the table that another stack has
  // loaded; at most one of them is not null.
  absl::Status Load(LoadContext load, const LinearBank* vocabulary, const EmbeddingTable* tokens);

  // Runs all blocks on the step's tokens and writes the residual stream after the last one to `x`
  // [T, d] f32.
  void Run(StepContext& ctx, const RowsView& x) {
    Embed(ctx, x);
    RunBlocks(ctx, x);
  }
  // The two parts of Run(): the first writes the embeddings of the step's tokens to `x`, the second
  // begins with a stream `x`.
  void Embed(StepContext& ctx, const RowsView& x) const;
  void RunBlocks(StepContext& ctx, const RowsView& x);

  // Writes the outputs of an encoder beside a decoder or of prediction layers, `x` after the final
  // norm, to `to` [T, d].
  void Finish(Backend& backend, const RowsView& x, const RowsView& to) const;

  // Writes the keys and values of all attention to a source to the cache. `source` [T, d] are the
  // outputs of the encoder, in the activation type; T are the tokens of the step.
  void RememberSource(StepContext& ctx, const RowsView& source) const;

  // Returns the routed layer of a block; null if it has none.
  const RoutedLayer* routed(int block) const {
    return blocks_[static_cast<size_t>(block)].branch->routed();
  }

  const ModelSpec& spec() const { return spec_; }
  const EmbeddingTable& tokens() const { return *tokens_; }
  ReportBuffer& reported() { return reported_; }

 private:
  // One block: a norm, a branch, and the addition of the branch's output to the residual stream.
  struct Block {
    // Applied to the branch's input, or to the sum; null if the placement says so.
    std::unique_ptr<NormBank> norm;
    std::unique_ptr<NormBank> output_norm;  // applied to the branch's output; null if there is none
    std::unique_ptr<Branch> branch;
    bool post = false;      // `norm` is applied to the sum
    bool parallel = false;  // ResidualSpec::parallel
    float scale = 1.0f;     // factor of the branch's output
    // Of the last block of a layer. StepContext::late times this factor joins the stream; 0: no.
    float late_scale = 0.0f;
    const LayerInputs* layer_inputs = nullptr;        // then join the stream; null: there are none
    std::optional<float> layer_scale = std::nullopt;  // then multiplies the stream
    int layer = 0;

    bool ends_layer() const {
      return late_scale != 0.0f || layer_inputs != nullptr || layer_scale.has_value();
    }
    // Returns the norm of the branch's input; null if there is none.
    const NormBank* input_norm() const { return post ? nullptr : norm.get(); }
  };

  absl::Status LoadEmbeddings(LoadContext& load, const LinearBank* vocabulary,
                              const EmbeddingTable* tokens);
  absl::Status LoadBlock(LoadContext& load, int index);
  // Loads the norms of a block, and how it joins the residual stream.
  absl::Status LoadResidual(LoadContext& load, const BlockSpec& block_spec, Block& block) const;
  // Loads what happens to the stream at the end of the block's layer, if the block is its last.
  absl::Status LoadEnd(LoadContext& load, int index, Block& block) const;
  // Writes the input of the block to `input`: the residual stream `x`, normalized if the block
  // normalizes its input.
  static void ReadStream(Backend& backend, const RowsView& x, const RowsView& input,
                         const Block& block);
  // Runs the branch of `block` on `input`, adds the branch's output to the residual stream `x` and
  // writes the next block's input to `input`. `next` is null after the last block.
  static void RunBlock(StepContext& ctx, const RowsView& x, const RowsView& input,
                       const Block& block, const Block* next);

  const ModelSpec& spec_;
  const DType compute_;
  std::unique_ptr<EmbeddingTable> own_tokens_;  // null if another stack has the table
  const EmbeddingTable* tokens_ = nullptr;
  std::unique_ptr<EmbeddingTable> positions_, types_;  // null if there are none
  std::unique_ptr<NormBank> embedding_norm_;           // null if there is none
  std::unique_ptr<LayerInputs> layer_inputs_;          // null if there are none
  std::unique_ptr<NormBank> final_norm_;               // null without Finish(), or if there is none
  RelativeBiases relative_biases_;                     // empty if there are none
  std::vector<Block> blocks_;                          // in execution order
  std::vector<const CrossAttention*> sources_;         // of blocks_
  ReportBuffer reported_;
};

}  // namespace moeserve
