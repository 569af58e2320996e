#include "engine/model/block_stack.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error_text.h"
#include "engine/layers/attention.h"
#include "engine/layers/feed_forward.h"
#include "engine/layers/latent_attention.h"
#include "engine/layers/recurrent_mixer.h"
#include "engine/layers/short_convolution.h"
#include "engine/routes/route_layout.h"

namespace moeserve {
Result<std::unique_ptr<Branch>> LoadBranch(LoadContext& load, const ModelSpec& spec, int block) {
  struct Loader {
    LoadContext& load;
    const ModelSpec& spec;
    int block;
    Result<std::unique_ptr<Branch>> operator()(const AttentionSpec& attention) const {
      if (attention.latent.has_value()) return LatentAttention::Load(load, spec, block);
      return Attention::Load(load, spec, block);
    }
    Result<std::unique_ptr<Branch>> operator()(const FeedForwardSpec& /*spec*/) const {
      return FeedForward::Load(load, spec, block);
    }
    Result<std::unique_ptr<Branch>> operator()(const ShortConvolutionSpec& /*spec*/) const {
      return ShortConvolution::Load(load, spec, block);
    }
    Result<std::unique_ptr<Branch>> operator()(const DeltaSpec& delta) const {
      return RecurrentMixer::Load(load, spec, block, delta);
    }
    Result<std::unique_ptr<Branch>> operator()(const StateSpaceSpec& ssm) const {
      return RecurrentMixer::Load(load, spec, block, ssm);
    }
    Result<std::unique_ptr<Branch>> operator()(const CrossAttentionSpec& /*spec*/) const {
      return CrossAttention::Load(load, spec, block);
    }
  };
  return std::visit(Loader{load, spec, block}, spec.blocks[static_cast<size_t>(block)].mixer);
}

BlockStack::BlockStack(const ModelSpec& spec, DType compute)
    : spec_(spec), compute_(compute), reported_(RouteLayout(spec), spec.hidden_size) {}

absl::Status BlockStack::Load(LoadContext load, const LinearBank* vocabulary,
                              const EmbeddingTable* tokens) {
  load.norm = spec_.norm;
  MOESERVE_RETURN_IF_ERROR(LoadEmbeddings(load, vocabulary, tokens));
  if (spec_.relative_bias.has_value() && !spec_.relative_bias->per_layer) {
    MOESERVE_ASSIGN_OR_RETURN(relative_biases_, LoadRelativeBiases(load, spec_));
    load.relative_biases = &relative_biases_;
  }
  if (spec_.layer_input.has_value()) {
    MOESERVE_ASSIGN_OR_RETURN(layer_inputs_, LayerInputs::Load(load, spec_));
  }
  for (int b = 0; b < spec_.num_blocks(); ++b) MOESERVE_RETURN_IF_ERROR(LoadBlock(load, b));
  const bool finishes = spec_.stack == Stack::kEncoder || spec_.stack == Stack::kPrediction;
  if (finishes && spec_.norm.HasFinal()) {
    load.norm.eps = spec_.norm.final_eps.value_or(spec_.norm.eps);
    const std::string name = Concat(TensorPrefix(spec_.stack), "norm");
    MOESERVE_ASSIGN_OR_RETURN(final_norm_, LoadRowNorm(load, name, spec_.hidden_size));
  }
  return absl::OkStatus();
}

absl::Status BlockStack::LoadEmbeddings(LoadContext& load, const LinearBank* vocabulary,
                                        const EmbeddingTable* tokens) {
  const std::string prefix = TensorPrefix(spec_.stack);
  const auto load_table = [&](const std::string& name, int rows,
                              std::unique_ptr<EmbeddingTable>& to) -> absl::Status {
    MOESERVE_ASSIGN_OR_RETURN(HostTensor table, load.source.Get(name, {rows, spec_.hidden_size}));
    MOESERVE_ASSIGN_OR_RETURN(to, load.backend.NewEmbeddingTable(table));
    if (load.files_in_use != nullptr) load.files_in_use->Add(to->read_in_place());
    return absl::OkStatus();
  };
  if (vocabulary != nullptr) {
    MOESERVE_ASSIGN_OR_RETURN(own_tokens_, load.backend.NewTiedEmbeddingTable(*vocabulary));
  } else if (tokens == nullptr) {
    const std::string name = (spec_.share_embeddings ? "" : prefix) + "embed.weight";
    MOESERVE_RETURN_IF_ERROR(load_table(name, spec_.vocab_size, own_tokens_));
  }
  tokens_ = tokens != nullptr ? tokens : own_tokens_.get();
  if (spec_.position.kind == PositionKind::kLearned) {
    MOESERVE_RETURN_IF_ERROR(
        load_table(prefix + "embed_position.weight", spec_.max_position_embeddings, positions_));
  }
  if (spec_.token_types > 0) {
    MOESERVE_RETURN_IF_ERROR(load_table(prefix + "embed_type.weight", spec_.token_types, types_));
  }
  if (!spec_.embedding_norm) return absl::OkStatus();
  LoadContext load_norm = load;
  load_norm.norm.eps = spec_.norm.outer_eps.value_or(spec_.norm.eps);
  MOESERVE_ASSIGN_OR_RETURN(embedding_norm_,
                            LoadRowNorm(load_norm, prefix + "embed_norm", spec_.hidden_size));
  return absl::OkStatus();
}

absl::Status BlockStack::LoadBlock(LoadContext& load, int index) {
  Block block;
  const BlockSpec& block_spec = spec_.blocks[static_cast<size_t>(index)];
  MOESERVE_RETURN_IF_ERROR(LoadResidual(load, block_spec, block));
  MOESERVE_RETURN_IF_ERROR(LoadEnd(load, index, block));
  MOESERVE_ASSIGN_OR_RETURN(block.branch, LoadBranch(load, spec_, index));
  if (block_spec.cross_attention() != nullptr) {
    sources_.push_back(static_cast<const CrossAttention*>(block.branch.get()));
  }
  blocks_.push_back(std::move(block));
  return absl::OkStatus();
}

absl::Status BlockStack::LoadResidual(LoadContext& load, const BlockSpec& block_spec,
                                      Block& block) const {
  const std::string prefix = block_spec.name();
  const NormPlacement placement = NormPlacementOf(spec_, block_spec);
  block.post = placement == NormPlacement::kPost;
  block.parallel = block_spec.residual.parallel;
  block.scale = static_cast<float>(ResidualScaleOf(spec_, block_spec));
  if (HasNorm(placement)) {
    MOESERVE_ASSIGN_OR_RETURN(block.norm, LoadRowNorm(load, prefix + ".norm", spec_.hidden_size));
  }
  if (NormsOutput(placement)) {
    MOESERVE_ASSIGN_OR_RETURN(block.output_norm,
                              LoadRowNorm(load, prefix + ".output_norm", spec_.hidden_size));
  }
  return absl::OkStatus();
}

absl::Status BlockStack::LoadEnd(LoadContext& load, int index, Block& block) const {
  const int layer = spec_.blocks[static_cast<size_t>(index)].layer;
  const bool last = index + 1 == spec_.num_blocks() ||
                    spec_.blocks[static_cast<size_t>(index) + 1].layer != layer;
  block.layer = layer;
  if (!last) return absl::OkStatus();
  block.layer_inputs = layer_inputs_.get();
  const BlockSpec* const before = spec_.FindBlock(layer - 1, BlockKind::kFeedForward);
  if (before != nullptr && before->feed_forward()->late_experts) {
    block.late_scale = static_cast<float>(ResidualScaleOf(spec_, *before));
  }
  if (!spec_.layer_scale) return absl::OkStatus();
  const std::string name = Concat(TensorPrefix(spec_.stack), "blocks.", layer, ".scale");
  MOESERVE_ASSIGN_OR_RETURN(const HostTensor scale, load.source.Get(name, {1}));
  block.layer_scale = ElementAsF32(scale, 0);
  return absl::OkStatus();
}

void BlockStack::ReadStream(Backend& backend, const RowsView& x, const RowsView& input,
                            const Block& block) {
  if (block.input_norm() != nullptr) {
    backend.Norm({.bank = block.input_norm(), .input = x, .output = input});
  } else if (input.data != x.data) {
    backend.Convert(x, input);
  }
}

void BlockStack::RunBlock(StepContext& ctx, const RowsView& x, const RowsView& input,
                          const Block& block, const Block* next) {
  Backend& backend = ctx.backend;
  const Workspace::Scope scope(ctx.workspace);
  const RowsView output = ctx.workspace.TakeDense(x.rows, x.cols, DType::kF32);
  const bool parallel = next != nullptr && next->parallel;
  const bool reads_sum = next != nullptr && !parallel && !block.ends_layer();
  const NormBank* const sum_norm = block.post  ? block.norm.get()
                                   : reads_sum ? next->input_norm()
                                               : nullptr;
  std::optional<LeftSum> left;
  const bool may_leave = sum_norm != nullptr && block.output_norm == nullptr && !parallel;
  ctx.left_sum = may_leave ? &left : nullptr;
  ctx.left_rows = output;
  block.branch->Forward(ctx, input, output);
  ctx.left_sum = nullptr;
  if (block.output_norm != nullptr) {
    backend.Norm({.bank = block.output_norm.get(), .input = output, .output = output});
  }
  if (parallel) ReadStream(backend, x, input, *next);
  const float* const bias = block.branch->out_bias();
  if (sum_norm == nullptr) {
    backend.AddScaled(x, output, bias, block.scale);
  } else {
    const LeftNorm norm{.x = x,
                        .branch = output,
                        .sum = left,
                        .bias = bias,
                        .scale = block.scale,
                        .norm = sum_norm,
                        .output = block.post ? x : input};
    if (reads_sum && !block.post && next->branch->TakesNorm()) {
      ctx.left_norm = norm;
    } else {
      norm.Run(backend);
    }
  }
  if (block.late_scale != 0.0f) backend.AddScaled(x, ctx.late, nullptr, block.late_scale);
  if (block.layer_inputs != nullptr) {
    block.layer_inputs->Add(ctx, ctx.layer_inputs, block.layer, x);
  }
  if (block.layer_scale.has_value()) backend.Scale(x, *block.layer_scale);
  const bool read = parallel || (!block.post && sum_norm != nullptr);
  if (next != nullptr && !read) ReadStream(backend, x, input, *next);
}

void BlockStack::Embed(StepContext& ctx, const RowsView& x) const {
  Backend& backend = ctx.backend;
  backend.Embed({.tokens = tokens_,
                 .types = types_.get(),
                 .positions = positions_.get(),
                 .sinusoidal = spec_.position.kind == PositionKind::kSinusoidal,
                 .half_spacing = spec_.position.spacing == SinusoidSpacing::kHalf,
                 .first_position = spec_.position.first,
                 .scale = static_cast<float>(spec_.embedding_scale),
                 .output = x});
  if (embedding_norm_ != nullptr) {
    backend.Norm({.bank = embedding_norm_.get(), .input = x, .output = x});
  }
}

void BlockStack::RunBlocks(StepContext& ctx, const RowsView& x) {
  Backend& backend = ctx.backend;
  ctx.stream = x;
  if (layer_inputs_ != nullptr) ctx.layer_inputs = layer_inputs_->Compute(ctx, x);
  if (std::ranges::any_of(blocks_, [](const Block& b) { return b.late_scale != 0.0f; })) {
    ctx.late = ctx.workspace.TakeDense(x.rows, spec_.hidden_size, DType::kF32);
  }
  // Blocks that neither normalise their input nor run beside another one read the stream itself.
  const bool copies = std::ranges::any_of(
      blocks_, [](const Block& b) { return b.input_norm() != nullptr || b.parallel; });
  const RowsView input = copies || compute_ != DType::kF32
                             ? ctx.workspace.TakeDense(x.rows, spec_.hidden_size, compute_)
                             : x;
  ReadStream(backend, x, input, blocks_.front());
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const Block* const next = b + 1 < blocks_.size() ? &blocks_[b + 1] : nullptr;
    RunBlock(ctx, x, input, blocks_[b], next);
  }
}

void BlockStack::Finish(Backend& backend, const RowsView& x, const RowsView& to) const {
  if (final_norm_ != nullptr) {
    backend.Norm({.bank = final_norm_.get(), .input = x, .output = to});
  } else if (x.data != to.data) {
    backend.Convert(x, to);
  }
}

void BlockStack::RememberSource(StepContext& ctx, const RowsView& source) const {
  for (const CrossAttention* const attention : sources_) attention->Remember(ctx, source);
}

}  // namespace moeserve
