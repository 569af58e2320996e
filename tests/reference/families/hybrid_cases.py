"""More tiny models of make_family_goldens.py: models with recurrent layers.

The name of a case decides its weights, so cases can be added anywhere.
"""

import zlib

import cases
from wrapped_cases import MLA, VISION, wrapper


def add(name, family, save=None, **config):
    cases.add(name, family, save, seed=zlib.crc32(name.encode()) % 10000, **config)


# Qwen3-Next and Qwen3.5.
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
             linear_value_head_dim=12, linear_conv_kernel_dim=4, head_dim=16, num_hidden_layers=4)
QWEN_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                    shared_expert_intermediate_size=24)
add("qwen3-next", "qwen3_next", **DELTA, **QWEN_EXPERTS, intermediate_size=48)
add("qwen3-next-dense-first-biases", "qwen3_next", **{**DELTA, "linear_num_value_heads": 2},
    **QWEN_EXPERTS, intermediate_size=40, mlp_only_layers=[0], attention_bias=True,
    num_key_value_heads=1, norm_topk_prob=False, tie_word_embeddings=True,
    layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"])
add("qwen3-5-moe", "qwen3_5_moe_text", **DELTA, **QWEN_EXPERTS)
add("qwen3-5-moe-all-tied", "qwen3_5_moe_text", **{**DELTA, "num_hidden_layers": 3},
    **{**QWEN_EXPERTS, "num_experts_per_tok": 4}, tie_word_embeddings=True,
    layer_types=["linear_attention", "full_attention", "linear_attention"])
add("qwen3-5", "qwen3_5_text", **DELTA, intermediate_size=48)
add("qwen3-5-one-head-tied", "qwen3_5_text", **{**DELTA, "linear_conv_kernel_dim": 3},
    intermediate_size=40, num_key_value_heads=1, tie_word_embeddings=True)

QWEN_VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, in_channels=1,
                   patch_size=4, spatial_merge_size=1, temporal_patch_size=1, out_hidden_size=32,
                   num_position_embeddings=4)
wrapper("qwen3-5-wrapped", "qwen3_5", {**DELTA, "intermediate_size": 40}, QWEN_VISION)
wrapper("qwen3-5-moe-wrapped-tied", "qwen3_5_moe",
        {**DELTA, **QWEN_EXPERTS, "tie_word_embeddings": True,
         "layer_types": ["linear_attention", "full_attention"] * 2}, QWEN_VISION,
        tie_word_embeddings=True)

# Granite 4 with state spaces.
GRANITE = dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4,
               logits_scaling=2.0, shared_intermediate_size=24, intermediate_size=16,
               num_hidden_layers=3, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=12,
               mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2)
add("granitemoehybrid-mamba", "granitemoehybrid", **GRANITE, num_local_experts=4,
    num_experts_per_tok=2, layer_types=["mamba", "attention", "mamba"])
add("granitemoehybrid-mamba-groups-biases", "granitemoehybrid",
    **{**GRANITE, "mamba_n_groups": 2, "mamba_d_head": "auto"}, num_local_experts=0,
    num_experts_per_tok=0, mamba_conv_bias=False, mamba_proj_bias=True, tie_word_embeddings=True,
    position_embedding_type="rope", time_step_limit=(0.2, 0.9),
    layer_types=["linear_attention", "full_attention", "linear_attention"])

# Nemotron-H.
NEMOTRON = dict(num_hidden_layers=None, mamba_num_heads=4, mamba_head_dim=12, ssm_state_size=10,
                n_groups=2, conv_kernel=4, head_dim=8, intermediate_size=40, n_routed_experts=4,
                num_experts_per_tok=2, moe_intermediate_size=16,
                moe_shared_expert_intermediate_size=24)
add("nemotron-h", "nemotron_h", **NEMOTRON,
    layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"])
add("nemotron-h-latent-groups", "nemotron_h", **{**NEMOTRON, "n_groups": 1},
    layers_block_type=["linear_attention", "moe", "full_attention", "moe"], moe_latent_size=12,
    n_group=2, topk_group=1, routed_scaling_factor=2.5, use_conv_bias=False, use_bias=True,
    num_key_value_heads=1)
add("nemotron-h-pattern-biases", "nemotron_h", **NEMOTRON, mlp_bias=True, norm_topk_prob=False,
    layers_block_type=["linear_attention", "full_attention", "mlp"],
    file_config={"hybrid_override_pattern": "M*-"}, drop=("layers_block_type", "layer_types"))

# Kimi Linear and Ling 3.
KIMI = {**MLA, "q_lora_rank": None, "n_routed_experts": ..., "num_local_experts": 8,
        "linear_head_dim": 10, "linear_num_heads": 3, "linear_conv_kernel_dim": 4}
add("kimi-linear", "kimi_linear", **KIMI,
    layer_types=["linear_attention", "full_attention", "linear_attention"])
add("kimi-linear-groups-old-keys", "kimi_linear",
    **{**KIMI, "num_attention_heads": 2, "num_key_value_heads": 2, "linear_conv_kernel_dim": 3},
    n_group=4, topk_group=2, norm_topk_prob=False, mlp_layer_types=["dense", "dense", "sparse"],
    layer_types=["linear_attention", "linear_attention", "full_attention"],
    file_config={"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3],
                                        "head_dim": 10, "num_heads": 3,
                                        "short_conv_kernel_size": 3},
                 "first_k_dense_replace": 2, "mla_use_nope": True, "head_dim": 72,
                 "moe_router_activation_func": "sigmoid"},
    drop=("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads",
          "linear_conv_kernel_dim"))
LING = {**MLA, "q_lora_rank": None, "n_routed_experts": ..., "num_local_experts": 8,
        "head_dim": 10, "n_group": 4, "topk_group": 2}
add("bailing-hybrid", "bailing_hybrid", **LING, first_k_dense_replace=1,
    layer_types=["linear_attention", "full_attention", "linear_attention"])
add("bailing-hybrid-softplus-query-rank", "bailing_hybrid",
    **{**LING, "q_lora_rank": 12, "num_attention_heads": 2, "num_key_value_heads": 2},
    kda_safe_gate=False, short_conv_kernel_size=2, layer_group_size=3,
    mlp_layer_types=["sparse", "dense", "sparse"], drop=("layer_types",))
