"""The tiny models of make_family_goldens.py with recurrent layers. Each case has a seed of its own, so
that new cases change no other one."""

import zlib

import cases

CASES = []


def add(name, family, save=None, **config):
    before = len(cases.CASES)
    cases.add(name, family, save, seed=zlib.crc32(name.encode()) % 10000, **config)
    CASES.append(cases.CASES.pop(before))


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
add("nemotron-h-latent-groups-tied", "nemotron_h", **{**NEMOTRON, "n_groups": 1},
    layers_block_type=["linear_attention", "moe", "full_attention", "moe"], moe_latent_size=12,
    n_group=2, topk_group=1, routed_scaling_factor=2.5, use_conv_bias=False, use_bias=True,
    num_key_value_heads=1, tie_word_embeddings=True)
add("nemotron-h-pattern-biases", "nemotron_h", **NEMOTRON, mlp_bias=True, norm_topk_prob=False,
    layers_block_type=["linear_attention", "full_attention", "mlp"],
    file_config={"hybrid_override_pattern": "M*-"}, drop=("layers_block_type", "layer_types"))
