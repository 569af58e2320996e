// Names of tensors that several families share.

#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve::huggingface {
namespace {

constexpr TensorRule kEmbeddingTensors[] = {
    {"embed.weight", "model.embed_tokens.weight"},
    {"norm.weight", "model.norm.weight"},
    {"head.weight", "lm_head.weight"},
};

constexpr TensorRule kPreNorm[] = {
    {"blocks.*.attention.norm.weight", "model.layers.*.input_layernorm.weight"},
    {"blocks.*.feed_forward.norm.weight", "model.layers.*.post_attention_layernorm.weight"},
};

constexpr TensorRule kOutputNorm[] = {
    {"blocks.*.attention.output_norm.weight", "model.layers.*.post_attention_layernorm.weight"},
    {"blocks.*.feed_forward.output_norm.weight",
     "model.layers.*.post_feedforward_layernorm.weight"},
};

constexpr TensorRule kAttentionTensors[] = {
    {"blocks.*.attention.q.weight", "model.layers.*.self_attn.q_proj.weight"},
    {"blocks.*.attention.k.weight", "model.layers.*.self_attn.k_proj.weight"},
    {"blocks.*.attention.v.weight", "model.layers.*.self_attn.v_proj.weight"},
    {"blocks.*.attention.o.weight", "model.layers.*.self_attn.o_proj.weight"},
    {"blocks.*.attention.q.bias", "model.layers.*.self_attn.q_proj.bias"},
    {"blocks.*.attention.k.bias", "model.layers.*.self_attn.k_proj.bias"},
    {"blocks.*.attention.v.bias", "model.layers.*.self_attn.v_proj.bias"},
    {"blocks.*.attention.out_bias", "model.layers.*.self_attn.o_proj.bias"},
};

constexpr TensorRule kQkNorm[] = {
    {"blocks.*.attention.q_norm.weight", "model.layers.*.self_attn.q_norm.weight"},
    {"blocks.*.attention.k_norm.weight", "model.layers.*.self_attn.k_norm.weight"},
};

constexpr TensorRule kDense[] = {
    {"blocks.*.feed_forward.gate.weight", "model.layers.*.mlp.gate_proj.weight"},
    {"blocks.*.feed_forward.up.weight", "model.layers.*.mlp.up_proj.weight"},
    {"blocks.*.feed_forward.down.weight", "model.layers.*.mlp.down_proj.weight"},
    {"blocks.*.feed_forward.gate.bias", "model.layers.*.mlp.gate_proj.bias"},
    {"blocks.*.feed_forward.up.bias", "model.layers.*.mlp.up_proj.bias"},
    {"blocks.*.feed_forward.down.bias", "model.layers.*.mlp.down_proj.bias"},
};

// One tensor per expert, or all experts stacked with gate and up joined.
constexpr TensorRule kExpertTensors[] = {
    {"blocks.*.feed_forward.router.weight", "model.layers.*.mlp.gate.weight"},
    {"blocks.*.feed_forward.experts.*.gate.weight",
     "model.layers.*.mlp.experts.*.gate_proj.weight"},
    {"blocks.*.feed_forward.experts.*.up.weight", "model.layers.*.mlp.experts.*.up_proj.weight"},
    {"blocks.*.feed_forward.experts.*.down.weight",
     "model.layers.*.mlp.experts.*.down_proj.weight"},
    {"blocks.*.feed_forward.experts.*.gate.weight", "model.layers.*.mlp.experts.gate_up_proj", 0,
     2},
    {"blocks.*.feed_forward.experts.*.up.weight", "model.layers.*.mlp.experts.gate_up_proj", 1, 2},
    {"blocks.*.feed_forward.experts.*.down.weight", "model.layers.*.mlp.experts.down_proj"},
};

// The names of some families' experts on the hub; newer versions of `transformers` call them as
// kExpertTensors does in memory.
constexpr TensorRule kBlockSparse[] = {
    {"blocks.*.feed_forward.router.weight", "model.layers.*.block_sparse_moe.gate.weight"},
    {"blocks.*.feed_forward.experts.*.gate.weight",
     "model.layers.*.block_sparse_moe.experts.*.w1.weight"},
    {"blocks.*.feed_forward.experts.*.up.weight",
     "model.layers.*.block_sparse_moe.experts.*.w3.weight"},
    {"blocks.*.feed_forward.experts.*.down.weight",
     "model.layers.*.block_sparse_moe.experts.*.w2.weight"},
};

constexpr TensorRule kSharedExperts[] = {
    {"blocks.*.feed_forward.router.choice_bias", "model.layers.*.mlp.gate.e_score_correction_bias"},
    {"blocks.*.feed_forward.shared.gate.weight",
     "model.layers.*.mlp.shared_experts.gate_proj.weight"},
    {"blocks.*.feed_forward.shared.up.weight", "model.layers.*.mlp.shared_experts.up_proj.weight"},
    {"blocks.*.feed_forward.shared.down.weight",
     "model.layers.*.mlp.shared_experts.down_proj.weight"},
};

constexpr TensorRule kOneSharedExpert[] = {
    {"blocks.*.feed_forward.shared.gate.weight",
     "model.layers.*.mlp.shared_expert.gate_proj.weight"},
    {"blocks.*.feed_forward.shared.up.weight", "model.layers.*.mlp.shared_expert.up_proj.weight"},
    {"blocks.*.feed_forward.shared.down.weight",
     "model.layers.*.mlp.shared_expert.down_proj.weight"},
    {"blocks.*.feed_forward.shared_gate.weight", "model.layers.*.mlp.shared_expert_gate.weight"},
};

constexpr TensorRule Offset(std::string_view model, std::string_view file) {
  return {.model = model, .file = file, .add = 1.0f};
}
constexpr TensorRule kOffsetNorms[] = {
    Offset("norm.weight", "model.norm.weight"),
    Offset("blocks.*.attention.norm.weight", "model.layers.*.input_layernorm.weight"),
    Offset("blocks.*.feed_forward.norm.weight", "model.layers.*.post_attention_layernorm.weight"),
    Offset("blocks.*.attention.q_norm.weight", "model.layers.*.self_attn.q_norm.weight"),
    Offset("blocks.*.attention.k_norm.weight", "model.layers.*.self_attn.k_norm.weight"),
};

constexpr TensorRule Qkv(std::string_view model, std::string_view file, int part) {
  return {.model = model, .file = file, .part = part, .parts = 3, .order = RowOrder::kQkv};
}

constexpr std::string_view kQkvWeight = "model.layers.*.attention.query_key_value.weight";
constexpr std::string_view kQkvBias = "model.layers.*.attention.query_key_value.bias";

constexpr TensorRule kFusedAttention[] = {
    {"embed.weight", "model.word_embeddings.weight"},
    Qkv("blocks.*.attention.q.weight", kQkvWeight, 0),
    Qkv("blocks.*.attention.k.weight", kQkvWeight, 1),
    Qkv("blocks.*.attention.v.weight", kQkvWeight, 2),
    Qkv("blocks.*.attention.q.bias", kQkvBias, 0),
    Qkv("blocks.*.attention.k.bias", kQkvBias, 1),
    Qkv("blocks.*.attention.v.bias", kQkvBias, 2),
    {"blocks.*.attention.o.weight", "model.layers.*.attention.dense.weight"},
    {"blocks.*.attention.q_norm.weight", "model.layers.*.attention.query_layernorm.weight"},
    {"blocks.*.attention.k_norm.weight", "model.layers.*.attention.key_layernorm.weight"},
    {"blocks.*.feed_forward.router.choice_bias", "model.layers.*.mlp.gate.expert_bias"},
};

}  // namespace

std::span<const TensorRule> EmbeddingTensors() { return kEmbeddingTensors; }
std::span<const TensorRule> PreNormTensors() { return kPreNorm; }
std::span<const TensorRule> OutputNormTensors() { return kOutputNorm; }
std::span<const TensorRule> AttentionTensors() { return kAttentionTensors; }
std::span<const TensorRule> QkNormTensors() { return kQkNorm; }
std::span<const TensorRule> DenseTensors() { return kDense; }
std::span<const TensorRule> ExpertTensors() { return kExpertTensors; }
std::span<const TensorRule> BlockSparseTensors() { return kBlockSparse; }
std::span<const TensorRule> SharedExpertTensors() { return kSharedExperts; }
std::span<const TensorRule> OneSharedExpertTensors() { return kOneSharedExpert; }
std::span<const TensorRule> OffsetNormTensors() { return kOffsetNorms; }
std::span<const TensorRule> FusedAttentionTensors() { return kFusedAttention; }

}  // namespace moeserve::huggingface
