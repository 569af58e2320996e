// The tensors and options of torchscale's models.
#pragma once

#include <string_view>

#include "model_loaders/architectures/name_table.h"

namespace moeserve::fairseq {

// clang-format off
// Sub-layer N of an expert.
#define MOESERVE_SUB_LAYER(N)                                     \
    {"blocks.*.feed_forward.experts.*.layers." N ".norm.weight",  \
     "decoder.layers.*.moe_layer.experts.*." N ".norm.weight"},   \
    {"blocks.*.feed_forward.experts.*.layers." N ".norm.bias",    \
     "decoder.layers.*.moe_layer.experts.*." N ".norm.bias"},     \
    {"blocks.*.feed_forward.experts.*.layers." N ".up.weight",    \
     "decoder.layers.*.moe_layer.experts.*." N ".ff1.weight"},    \
    {"blocks.*.feed_forward.experts.*.layers." N ".up.bias",      \
     "decoder.layers.*.moe_layer.experts.*." N ".ff1.bias"},      \
    {"blocks.*.feed_forward.experts.*.layers." N ".down.weight",  \
     "decoder.layers.*.moe_layer.experts.*." N ".ff2.weight"},    \
    {"blocks.*.feed_forward.experts.*.layers." N ".down.bias",    \
     "decoder.layers.*.moe_layer.experts.*." N ".ff2.bias"}
// clang-format on

inline constexpr TensorRule kTorchscaleTensors[] = {
    {"relative_bias.weight", "decoder.self_attn_relative_position.relative_attention_bias.weight"},
    {"relative_bias.weight", "decoder.relative_position.relative_attention_bias.weight"},
    {"blocks.*.attention.inner_norm.weight", "decoder.layers.*.self_attn.inner_attn_ln.weight"},
    {"blocks.*.attention.inner_norm.bias", "decoder.layers.*.self_attn.inner_attn_ln.bias"},
    {"blocks.*.feed_forward.gate.weight", "decoder.layers.*.ffn.fc3.weight"},
    {"blocks.*.feed_forward.gate.bias", "decoder.layers.*.ffn.fc3.bias"},
    {"blocks.*.feed_forward.up.weight", "decoder.layers.*.ffn.fc1.weight"},
    {"blocks.*.feed_forward.up.bias", "decoder.layers.*.ffn.fc1.bias"},
    {"blocks.*.feed_forward.down.weight", "decoder.layers.*.ffn.fc2.weight"},
    {"blocks.*.feed_forward.down.bias", "decoder.layers.*.ffn.fc2.bias"},
    {"blocks.*.feed_forward.inner_norm.weight", "decoder.layers.*.ffn.ffn_layernorm.weight"},
    {"blocks.*.feed_forward.inner_norm.bias", "decoder.layers.*.ffn.ffn_layernorm.bias"},
    {"blocks.*.feed_forward.split.weight", "decoder.layers.*.moe_layer.multi_heads.weight"},
    {"blocks.*.feed_forward.split.bias", "decoder.layers.*.moe_layer.multi_heads.bias"},
    {"blocks.*.feed_forward.merge.weight", "decoder.layers.*.moe_layer.out_proj.weight"},
    {"blocks.*.feed_forward.merge.bias", "decoder.layers.*.moe_layer.out_proj.bias"},
    {"blocks.*.feed_forward.router.weight", "decoder.layers.*.moe_layer.gate.wg.weight"},
    // X-MoE: the expert embeddings are a bare parameter.
    {"blocks.*.feed_forward.router.projection.weight",
     "decoder.layers.*.moe_layer.gate.wg_reduction.weight"},
    {"blocks.*.feed_forward.router.experts.weight", "decoder.layers.*.moe_layer.gate.wg"},
    {"blocks.*.feed_forward.router.temperature", "decoder.layers.*.moe_layer.gate.gating_t"},
    {"blocks.*.feed_forward.experts.*.gate.weight",
     "decoder.layers.*.moe_layer.experts.*.fc3.weight"},
    {"blocks.*.feed_forward.experts.*.gate.bias", "decoder.layers.*.moe_layer.experts.*.fc3.bias"},
    {"blocks.*.feed_forward.experts.*.up.weight",
     "decoder.layers.*.moe_layer.experts.*.fc1.weight"},
    {"blocks.*.feed_forward.experts.*.up.bias", "decoder.layers.*.moe_layer.experts.*.fc1.bias"},
    {"blocks.*.feed_forward.experts.*.down.weight",
     "decoder.layers.*.moe_layer.experts.*.fc2.weight"},
    {"blocks.*.feed_forward.experts.*.down.bias", "decoder.layers.*.moe_layer.experts.*.fc2.bias"},
    {"blocks.*.feed_forward.experts.*.inner_norm.weight",
     "decoder.layers.*.moe_layer.experts.*.ffn_layernorm.weight"},
    {"blocks.*.feed_forward.experts.*.inner_norm.bias",
     "decoder.layers.*.moe_layer.experts.*.ffn_layernorm.bias"},
    MOESERVE_SUB_LAYER("0"),
    MOESERVE_SUB_LAYER("1"),
    MOESERVE_SUB_LAYER("2"),
    MOESERVE_SUB_LAYER("3"),
    MOESERVE_SUB_LAYER("4"),
    MOESERVE_SUB_LAYER("5"),
    MOESERVE_SUB_LAYER("6"),
    MOESERVE_SUB_LAYER("7"),
};
#undef MOESERVE_SUB_LAYER

inline constexpr KeyRule kTorchscaleKeys[] = {
    {"norm.eps", "layernorm_eps"},
    {"position.fraction", "partial_rotary_factor"},
    {"position.xpos_base", "xpos_scale_base"},
    {"relative_bias.buckets", "rel_pos_buckets"},
    {"relative_bias.max_distance", "max_rel_pos"},
    {"attention.num_heads", "decoder_attention_heads"},
    {"attention.num_kv_heads", "n_kv_heads"},
    {"attention.head_dim", "(decoder_embed_dim / decoder_attention_heads)"},
    {"attention.inner_norm", "subln"},
    {"num_heads", "decoder_attention_heads"},
    {"num_kv_heads", "n_kv_heads"},
    {"head_dim", "(decoder_embed_dim / decoder_attention_heads)"},
    {"feed_forward.expert.inner_norm", "subln"},
    {"feed_forward.routing.num_experts", "moe_expert_count"},
    {"feed_forward.routing.widths", "(moe_ffn_dim or decoder_ffn_embed_dim)"},
    {"feed_forward.routing.select.k", "moe_top_k"},
    {"feed_forward.routing.split.heads", "mhmoe_heads_number"},
    {"feed_forward.routing.score.dim", "rows of wg_reduction.weight"},
    {"num_experts", "moe_expert_count"},
    {"routing.num_experts", "moe_expert_count"},
};

inline constexpr std::string_view kTorchscaleIgnoredTensors[] = {
    "decoder.layers.*.self_attn.rotary_emb.inv_freq",
    "decoder.layers.*.self_attn.xpos.scale",
};

// Options of training, of quantizers that 32 bits switch off, and options that nothing reads.
inline constexpr std::string_view kTorchscaleIgnoredOptions[] = {
    "absmean_alpha",
    "adaptive_input",
    "adaptive_softmax_cutoff",
    "attn_bits",
    "attn_input_absmean_scale",
    "attn_quant_method",
    "attn_quant_symmetric",
    "base_layers",
    "binary_key",
    "binary_kv",
    "binary_routing",
    "fc2_input_absmean_scale",
    "fc2_sparse_blocksize",
    "fc2_sparse_ratio",
    "ffn_head_proj",
    "ffn_merge_proj",
    "head_ffn_num",
    "kv_quant_group",
    "mhmoe_head_proj",
    "mhmoe_merge_proj",
    "moe_expert_noise_threshold",
    "moe_expert_noise_threshold_init",
    "moe_expert_noise_threshold_warmup",
    "moe_ffn_dim_1",
    "moe_ffn_dim_2",
    "moe_second_expert_threshold",
    "moe_second_expert_threshold_init",
    "moe_second_expert_threshold_warmup",
    "quant_before_rope",
    "quant_ffn_only",
    "scale_length",
    "sope_rel_pos",
};

}  // namespace moeserve::fairseq
