"""More tiny models of make_family_goldens.py, whose layers have settings of their own.

The name of a case decides its weights, so cases can be added anywhere.
"""

import zlib

import torch

import cases


def add(name, family, save=None, **config):
    cases.add(name, family, save, seed=zlib.crc32(name.encode()) % 10000, **config)


# Gemma 4.
GEMMA4 = dict(head_dim=8, global_head_dim=16, hidden_size_per_layer_input=0, intermediate_size=40,
              num_hidden_layers=3, sliding_window=6)
GEMMA4_EXPERTS = dict(enable_moe_block=True, num_experts=6, top_k_experts=2,
                      moe_intermediate_size=12)
add("gemma4-moe", "gemma4_text", **GEMMA4, **GEMMA4_EXPERTS,
    layer_types=["sliding_attention", "full_attention", "full_attention"])
add("gemma4-moe-keys-as-values", "gemma4_text", **{**GEMMA4, "num_hidden_layers": 7},
    **{**GEMMA4_EXPERTS, "num_experts": 4, "top_k_experts": 4}, attention_k_eq_v=True,
    num_global_key_value_heads=1, final_logit_softcapping=20.0, tie_word_embeddings=False)
add("gemma4", "gemma4_text", **GEMMA4,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
    rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                     "full_attention": {"rope_type": "proportional", "rope_theta": 10000.0,
                                        "partial_rotary_factor": 0.5, "factor": 2.0}})
add("gemma4-old-keys", "gemma4_text", **GEMMA4, attention_k_eq_v=True,
    num_global_key_value_heads=4, drop=("per_layer_config", "layer_types", "rope_parameters"),
    file_config={"global_head_dim": 16, "num_global_key_value_heads": 4})

# Gemma 4 E2B and E4B.
GEMMA4_INPUTS = {**GEMMA4, "intermediate_size": 24, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 96}
add("gemma4-inputs", "gemma4_text", **{**GEMMA4_INPUTS, "num_hidden_layers": 5},
    num_kv_shared_layers=2, use_double_wide_mlp=True,
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
                 "full_attention"])

# Llama 4: chunks that are shorter than the prompts, and queries that grow early.
LLAMA4 = dict(intermediate_size=16, intermediate_size_mlp=40, head_dim=8, num_local_experts=4,
              attention_chunk_size=7, floor_scale=5, attn_scale=0.4)
add("llama4", "llama4_text", **LLAMA4, num_hidden_layers=4)
add("llama4-dense-between", "llama4_text", **LLAMA4, num_hidden_layers=4, num_experts_per_tok=3,
    interleave_moe_layer_step=2, attention_bias=True, use_qk_norm=False, no_rope_layer_interval=2,
    num_key_value_heads=1, tie_word_embeddings=True, **cases.rope(cases.LLAMA3))
add("llama4-lists", "llama4_text", **LLAMA4, num_hidden_layers=3, moe_layers=[0, 2],
    no_rope_layers=[0, 1, 1], attn_temperature_tuning=False, num_experts_per_tok=2,
    layer_types=["full_attention", "chunked_attention", "full_attention"])

# Command A with experts.
COHERE = dict(intermediate_size=16, num_experts=5, num_experts_per_tok=2, head_dim=8,
              sliding_window=6, logit_scale=0.5, num_hidden_layers=4)
add("cohere2-moe", "cohere2_moe", **COHERE, num_shared_experts=2)
add("cohere2-moe-sigmoid-sum", "cohere2_moe", **COHERE, num_shared_experts=1, tie_word_embeddings=False,
    shared_expert_combination_strategy="sum", expert_selection_fn="sigmoid", attention_bias=True,
    rms_norm_eps=1e-4, sliding_window_pattern=2, num_key_value_heads=1)
add("cohere2-moe-dense-first", "cohere2_moe", **COHERE, prefix_dense_intermediate_size=40,
    expert_selection_fn="sigmoid", norm_topk_prob=False, prefix_dense_sliding_window_pattern=1,
    mlp_layer_types=["dense", "dense", "sparse", "sparse"])

# MiMo-V2-Flash.
MIMO = dict(intermediate_size=40, moe_intermediate_size=16, n_routed_experts=6, head_dim=12,
            v_head_dim=8, num_experts_per_tok=2, sliding_window=6)
MIMO_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 1000.0,
                                "partial_rotary_factor": 0.334},
             "sliding_attention": {"rope_type": "default", "rope_theta": 100.0,
                                   "partial_rotary_factor": 0.51}}
add("mimo-v2-flash", "mimo_v2_flash", **MIMO, num_hidden_layers=3, rope_parameters=MIMO_ROPE)
add("mimo-v2-flash-groups-biases", "mimo_v2_flash", **{**MIMO, "v_head_dim": 20},
    num_hidden_layers=7, n_group=3, topk_group=2, attention_bias=True, num_key_value_heads=1,
    attention_value_scale=0.5, routed_scaling_factor=1.5, tie_word_embeddings=True,
    rope_parameters=MIMO_ROPE)
add("mimo-v2-flash-old-keys", "mimo_v2_flash", **MIMO, num_hidden_layers=3,
    attention_value_scale=None, rope_parameters={
        key: {**value, "partial_rotary_factor": 0.334} for key, value in MIMO_ROPE.items()},
    drop=("rope_parameters", "rms_norm_eps", "layer_types", "mlp_layer_types", "sliding_window",
          "routed_scaling_factor"),
    file_config={"rope_theta": 1000.0, "swa_rope_theta": 100.0, "partial_rotary_factor": 0.334,
                 "layernorm_epsilon": 1e-5, "hybrid_layer_pattern": [0, 1, 1],
                 "moe_layer_freq": [0, 1, 1], "sliding_window_size": 5,
                 "swa_num_key_value_heads": 4, "add_swa_attention_sink_bias": True})

# Mistral 4.
MISTRAL4 = dict(intermediate_size=40, moe_intermediate_size=16, n_routed_experts=8, kv_lora_rank=10,
                q_lora_rank=14, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
                num_experts_per_tok=2, num_key_value_heads=4)


def mistral4_rope(**changes):
    return cases.rope({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
                       "original_max_position_embeddings": 6, "mscale_all_dim": 1.0, "mscale": 1.0,
                       "llama_4_scaling_beta": 0.3, "partial_rotary_factor": 1 / 3, **changes})


add("mistral4", "mistral4", **MISTRAL4, **mistral4_rope())
add("mistral4-groups-half", "mistral4", **{**MISTRAL4, "q_lora_rank": None}, n_group=4,
    topk_group=2, first_k_dense_replace=1, rope_interleave=False, routed_scaling_factor=2.0,
    n_shared_experts=2, tie_word_embeddings=True,
    **mistral4_rope(mscale=0.5, llama_4_scaling_beta=0.1))

# Step 3.5; the second one has the names of the hub.
STEP3 = dict(intermediate_size=40, moe_intermediate_size=16, n_routed_experts=6, head_dim=8,
             num_experts_per_tok=2, share_expert_dim=12, sliding_window=6, num_hidden_layers=4,
             num_sliding_attention_heads=6)
SLIDING = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
add("step3p5", "step3p5", **STEP3, layer_types=SLIDING,
    mlp_layer_types=["dense", "sparse", "sparse", "sparse"], moe_router_scaling_factor=2.5,
    swiglu_limits=[0, 0, 0.5, 0.25], swiglu_limits_shared=[0.5, 0, 0.25, 0],
    rope_parameters={"full_attention": {**cases.LLAMA3, "partial_rotary_factor": 0.5},
                     "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}})
add("step3p5-hub", "step3p5", **STEP3, layer_types=SLIDING, num_key_value_heads=1, attention_bias=True,
    mlp_layer_types=["dense", "dense", "sparse", "sparse"], moe_router_scaling_factor=3.0,
    swiglu_limits=[0, 0, 0, 0.5], swiglu_limits_shared=[0, 0, 0, 0.25],
    rope_parameters={"full_attention": {**cases.LLAMA3, "partial_rotary_factor": 0.5},
                     "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    file_config={"tie_word_embeddings": False})

# LongCat-Flash.
LONGCAT = dict(ffn_hidden_size=40, expert_ffn_hidden_size=16, n_routed_experts=5, zero_expert_num=3,
               kv_lora_rank=10, q_lora_rank=14, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
               head_dim=4, moe_topk=3, num_hidden_layers=..., num_key_value_heads=4)
add("longcat-flash", "longcat_flash", **LONGCAT, num_layers=1)
add("longcat-flash-shards", "longcat_flash", cases.SHARDS, **{**LONGCAT, "zero_expert_num": 2},
    num_layers=2, attention_bias=True, routed_scaling_factor=1.5, tie_word_embeddings=True)

# K2-Horizon.
HORIZON = dict(head_dim=12, intermediate_size=40, moe_intermediate_size=16, num_experts=6,
               num_experts_per_tok=2, num_hidden_layers=3, mlp_only_layers=[0])
add("k2-horizon-mova", "k2_horizon", **HORIZON, layernorm_num_groups=2, mova_num_experts=4,
    mova_num_experts_per_tok=2, attention_gate_func="softplus", router_scaling_factor=1.5,
    query_key_norm=True, file_config={"model_type": "k2_horizon_mova"})
add("k2-horizon", "k2_horizon", **HORIZON, rope_head_dim=8, attention_bias=True,
    num_key_value_heads=1, router_score_func="softmax", num_shared_experts=2,
    tie_word_embeddings=True)
add("k2-horizon-one-value", "k2_horizon", **{**HORIZON, "num_experts_per_tok": 1},
    layernorm_num_groups=4, mova_num_experts=4, mova_num_experts_per_tok=1, rope_head_dim=4,
    attention_gate_func="silu", norm_topk_prob=False, num_shared_experts=0, attention_bias=True,
    moe_gate_bias=False)

# Pruned models, whose experts are vectors in part.
add("mixtral-replaced", "mixtral", intermediate_size=24, num_local_experts=5, num_experts_per_tok=2,
    replaced={0: [1, 4], 1: [0]})
add("qwen3-moe-replaced-named", "qwen3_moe", **{**cases.QWEN3_MOE, "num_experts": 6},
    norm_topk_prob=True, mlp_only_layers=[0], replaced={1: [0, 2, 5]}, named_vectors=True)
add("deepseek-v3-replaced", "deepseek_v3", **{**cases.MLA, "num_hidden_layers": 2}, n_group=4,
    topk_group=2, replaced={1: [3, 6]})

def with_shared_keys(state):
    """Adds the keys and values of a layer that does not use them, as published files have them."""
    state["model.layers.2.self_attn.k_proj.weight"] = torch.ones(2, 3, dtype=torch.bfloat16)
    state["model.layers.2.self_attn.v_proj.weight"] = torch.ones(2, 3, dtype=torch.bfloat16)
    state["model.layers.2.self_attn.k_norm.weight"] = torch.ones(4, dtype=torch.bfloat16)
    return state


# Decoders in wrappers that transformers cannot write, or not run without images.
add("gemma4-wrapped", "gemma4_text", **GEMMA4, **GEMMA4_EXPERTS,
    wrap=("gemma4", "model.language_model.", "model.vision_tower."))
add("gemma4-inputs-wrapped", "gemma4_text", **GEMMA4_INPUTS, num_kv_shared_layers=1,
    layer_types=["full_attention", "sliding_attention", "full_attention"], edit=with_shared_keys,
    wrap=("gemma4", "model.language_model.", "model.audio_tower."))
add("llama4-wrapped", "llama4_text", **LLAMA4, num_hidden_layers=4,
    wrap=("llama4", "language_model.model.", "vision_model."))
add("mistral3-wrapped", "mistral4", **MISTRAL4, **mistral4_rope(),
    wrap=("mistral3", "language_model.model.", "multi_modal_projector."))
add("step3p7-wrapped", "step3p5", **STEP3, layer_types=SLIDING,
    wrap=("step3p7", "model.", "vit_large_projector."))
