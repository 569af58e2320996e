"""More tiny models of make_family_goldens.py: relatives of families in cases.py, and wrappers.

A wrapper's folder has a decoder of text and a tiny part for images, which is not computed. The name of
a case decides its weights, so cases can be added anywhere.
"""

import re
import zlib
from typing import Any

from cases import BASE, FUSED, SHARDS, YARN, YARN_ALL, add, rope


def case(name: str, family: str, save: dict | None = None, **config) -> None:
    add(name, family, save, seed=zlib.crc32(name.encode()), **config)


def wrapper(name: str, family: str, text: dict, vision: dict, save: dict | None = None,
            **config) -> None:
    """Adds a case of a wrapper; `config` has keys of the whole file, "..." drops one."""
    text = {key: value for key, value in {**BASE, **text}.items() if value is not ...}
    outer = {key: ... for key in BASE}
    case(name, family, save, **{**outer, "text_config": text, "vision_config": vision, **config})


State = dict[str, Any]  # the tensors of a file


def published_kimi(state: State) -> State:
    """Has the names of the published files, which transformers 5.24 does not write."""
    def name(stored: str) -> str:
        stored = re.sub(r"^model\.language_model\.", "language_model.model.", stored)
        stored = re.sub(r"^lm_head\.", "language_model.lm_head.", stored)
        return re.sub(r"^model\.(vision_tower|mm_projector)", r"\1", stored)

    return {name(stored): value for stored, value in state.items()}


def published_qwen(state: State) -> State:
    """Has transposed stacks of experts, as the published files."""
    return {name: value.transpose(1, 2) if ".mlp.experts." in name else value
            for name, value in state.items()}


def published_axk1(state: State) -> State:
    """Has no choice bias, and the output's norm in each layer."""
    state = {name: value for name, value in state.items()
             if not name.endswith("e_score_correction_bias")}
    norms = [value for name, value in state.items() if name.endswith("post_mlp_layernorm.weight")]
    for name in [name for name in state if name.endswith(".mlp.gate_proj.weight")]:
        state[name.replace("mlp.gate_proj", "post_mlp_layernorm")] = norms[0].clone()
    return state


# Latent attention.
MLA = dict(intermediate_size=48, moe_intermediate_size=16, n_routed_experts=8,
           num_experts_per_tok=3, n_shared_experts=1, kv_lora_rank=20, q_lora_rank=24,
           qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, num_key_value_heads=4,
           num_hidden_layers=3, routed_scaling_factor=1.5)
case("glm4-moe-lite", "glm4_moe_lite", **MLA)
case("glm4-moe-lite-groups-tied-half", "glm4_moe_lite", FUSED, **{**MLA, "q_lora_rank": None},
     n_group=4, topk_group=2, rope_interleave=False, tie_word_embeddings=True,
     mlp_layer_types=["sparse", "dense", "sparse"], norm_topk_prob=False,
     file_config={"num_nextn_predict_layers": 1})
SARVAM_MLA = {**MLA, "q_lora_rank": None, "num_key_value_heads": ...}
case("sarvam-mla", "sarvam_mla", **SARVAM_MLA, **rope(YARN_ALL))
case("sarvam-mla-old-keys", "sarvam_mla", SHARDS,
     **{**SARVAM_MLA, "n_shared_experts": 2, "num_attention_heads": 2}, first_k_dense_replace=2,
     **rope(YARN_ALL), drop=("rope_parameters", "dtype", "n_routed_experts", "n_shared_experts"),
     file_config={"rope_theta": 10000.0, "num_experts": 8, "num_shared_experts": 2,
                  "head_dim": 28, "q_head_dim": 20,
                  "rope_scaling": {**{key: value for key, value in YARN_ALL.items()
                                      if key not in ("rope_type", "rope_theta")},
                                   "type": "deepseek_yarn"}})
case("axk1", "axk1", **MLA, n_group=4, topk_group=2)
case("axk1-all-dense-last-tied", "axk1", FUSED, **{**MLA, "num_experts_per_tok": 8}, n_group=1,
     topk_group=1, attention_bias=True, tie_word_embeddings=True,
     mlp_layer_types=["sparse", "sparse", "dense"], **rope(YARN_ALL))
case("axk1-no-choice-bias", "axk1", **{**MLA, "num_attention_heads": 2, "num_key_value_heads": 2},
     n_group=2, topk_group=1, edit=published_axk1,
     set={f"model.layers.{layer}.mlp.gate.e_score_correction_bias": 0.0 for layer in (1, 2)})

# Sparse attention, which is dense up to the number of keys that the indexer chooses.
DSA = {**MLA, "index_topk": 128, "index_head_dim": 16, "index_n_heads": 2}
case("deepseek-v32", "deepseek_v32", **DSA, n_group=4, topk_group=2, first_k_dense_replace=1,
     **rope(YARN_ALL))
case("deepseek-v32-fp8-whole-context", "deepseek_v32", fp8=(8, 8),
     **{**DSA, "index_topk": 1024, "num_attention_heads": 2, "num_key_value_heads": 2},
     n_group=1, topk_group=1, mlp_layer_types=["sparse", "dense", "sparse"],
     file_config={"num_nextn_predict_layers": 1})
case("glm-moe-dsa", "glm_moe_dsa", **DSA, first_k_dense_replace=1,
     indexer_types=["full", "shared", "full"])
case("glm-moe-dsa-tied-frequency", "glm_moe_dsa", FUSED, **DSA, tie_word_embeddings=True,
     first_k_dense_replace=0, index_topk_freq=2, index_skip_topk_offset=1, n_group=2,
     topk_group=1, attention_bias=True)

# The router of DeepSeek-V3 beside other attention.
SIGMOID = dict(intermediate_size=48, moe_intermediate_size=16, num_experts_per_tok=3,
               num_hidden_layers=3, head_dim=12)
HY = dict(**SIGMOID, num_experts=8, num_shared_experts=1)
case("hy-v3", "hy_v3", **HY)
case("hy-v3-two-shared-tied", "hy_v3", FUSED, **{**HY, "num_shared_experts": 2},
     attention_bias=True, num_key_value_heads=1, tie_word_embeddings=True,
     router_scaling_factor=1.5, mlp_layer_types=["sparse", "dense", "sparse"], **rope(YARN))
EXAONE = dict(**SIGMOID, num_experts=8, num_shared_experts=1, sliding_window=6)
case("exaone-moe", "exaone_moe", **{**EXAONE, "num_hidden_layers": 4}, sliding_window_pattern=2)
case("exaone-moe-groups-tied", "exaone_moe", SHARDS, **{**EXAONE, "num_shared_experts": 2},
     n_group=4, topk_group=2, num_key_value_heads=1, tie_word_embeddings=True,
     first_k_dense_replace=0, layer_types=["full_attention"] * 2 + ["sliding_attention"],
     **rope(YARN))
case("exaone-moe-letters-old-bias", "exaone_moe", FUSED, **EXAONE, num_attention_heads=2,
     layer_types=["sliding_attention", "full_attention", "full_attention"],
     drop=("layer_types", "mlp_layer_types"),
     file_config={"sliding_window_pattern": "LGL", "first_k_dense_replace": 1})
SOLAR = dict(**SIGMOID, n_routed_experts=8, n_shared_experts=1, num_key_value_heads=2)
case("solar-open", "solar_open", **{**SOLAR, "num_hidden_layers": 2})
case("solar-open-biases-groups-tied", "solar_open", FUSED,
     **{**SOLAR, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
     attention_bias=True, n_group=4, topk_group=2, tie_word_embeddings=True, **rope(YARN))
SARVAM = dict(**SIGMOID, n_routed_experts=6, n_shared_experts=1, first_k_dense_replace=1)
case("sarvam-moe", "sarvam_moe", **SARVAM)
case("sarvam-moe-old-keys-tied", "sarvam_moe", SHARDS,
     **{**SARVAM, "n_shared_experts": 2, "head_dim": 8}, attention_bias=True,
     num_key_value_heads=1, tie_word_embeddings=True,
     drop=("n_routed_experts", "n_shared_experts", "attention_bias"),
     file_config={"num_experts": 6, "num_shared_experts": 2, "use_qkv_bias": True})
case("sarvam-moe-no-head-norms", "sarvam_moe", FUSED, **SARVAM, use_qk_norm=False,
     rope_parameters={**YARN, "partial_rotary_factor": 1.0})

# Relatives of Qwen3-MoE.
MELLUM = dict(intermediate_size=48, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2,
              head_dim=12, sliding_window=6, num_hidden_layers=3)
case("mellum", "mellum", **MELLUM,
     layer_types=["sliding_attention", "full_attention", "sliding_attention"])
case("mellum-dense-first-tied", "mellum", FUSED, **MELLUM, tie_word_embeddings=True,
     num_key_value_heads=1, norm_topk_prob=False, attention_bias=True,
     layer_types=["full_attention", "sliding_attention", "sliding_attention"],
     mlp_layer_types=["dense", "sparse", "sparse"],
     rope_parameters={"full_attention": YARN,
                      "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}})
FLINT = dict(intermediate_size=48, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2,
             head_dim=12, sliding_window=6, num_hidden_layers=4, shared_expert_intermediate_size=24)
case("flint", "flint", **FLINT)
case("flint-all-layers-routed-tied", "flint", FUSED,
     **{**FLINT, "num_hidden_layers": 2, "num_attention_heads": 2}, mlp_only_layers=[],
     tie_word_embeddings=True, norm_topk_prob=False, attention_bias=True,
     layer_types=["sliding_attention", "full_attention"], **rope(YARN))

# Granite with sinks and windows.
GRANITE = dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4,
               logits_scaling=2.0, intermediate_size=16, num_local_experts=6,
               num_experts_per_tok=2, sliding_window=6)
case("granitemoe-swa", "granitemoe_swa", **GRANITE, num_hidden_layers=3,
     layer_rope_theta=[0, 500.0, 10000.0])
case("granitemoe-swa-shared-tied", "granitemoe_swa", FUSED, **GRANITE, num_key_value_heads=1,
     shared_intermediate_size=24, attention_bias=True, tie_word_embeddings=True,
     layer_types=["sliding_attention", "full_attention"], **rope(YARN))

# Wrappers. All have a tiny part for images.
VISION = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, in_channels=1,
              patch_size=4, temporal_patch_size=1, spatial_merge_size=1, out_hidden_size=32)
MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}
QWEN_VISION = {**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
QWEN3_VL = dict(intermediate_size=48, moe_intermediate_size=16, num_experts=6,
                num_experts_per_tok=2, head_dim=8,
                rope_parameters={**MROPE, "mrope_interleaved": True})
wrapper("qwen3-vl-moe", "qwen3_vl_moe", {**QWEN3_VL, "moe_intermediate_size": 12}, QWEN_VISION)
wrapper("qwen3-vl-moe-tied-dense-first", "qwen3_vl_moe",
        {**QWEN3_VL, "num_hidden_layers": 3, "mlp_only_layers": [0], "num_key_value_heads": 1,
         "attention_bias": True, "tie_word_embeddings": True}, QWEN_VISION,
        tie_word_embeddings=True, edit=published_qwen)
GLM4V = dict(intermediate_size=48, moe_intermediate_size=16, n_routed_experts=8,
             num_experts_per_tok=3, n_shared_experts=1, num_hidden_layers=3,
             rope_parameters={**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]})
wrapper("glm4v-moe", "glm4v_moe", GLM4V, {**VISION, "image_size": 8})
wrapper("glm4v-moe-groups-tied", "glm4v_moe",
        {**GLM4V, "num_attention_heads": 2, "num_key_value_heads": 1, "n_group": 4,
         "topk_group": 2, "attention_bias": False, "first_k_dense_replace": 0,
         "rope_parameters": {**GLM4V["rope_parameters"], "mrope_section": [2, 1, 1]},
         "tie_word_embeddings": True}, {**VISION, "image_size": 8}, SHARDS,
        tie_word_embeddings=True)
ERNIE_VL = dict(intermediate_size=48, moe_intermediate_size=[16, 8], moe_num_experts=4, moe_k=2,
                moe_num_shared_experts=2, num_hidden_layers=3,
                rope_parameters={**MROPE, "mrope_section": [1, 1, 2]})
ERNIE_VISION = {key: VISION[key] for key in VISION
                if key not in ("out_hidden_size", "temporal_patch_size")}
wrapper("ernie4-5-vl-moe", "ernie4_5_vl_moe", ERNIE_VL, ERNIE_VISION)
wrapper("ernie4-5-vl-moe-untied-one-head", "ernie4_5_vl_moe",
        {**ERNIE_VL, "num_attention_heads": 2, "num_key_value_heads": 1,
         "moe_num_shared_experts": 0, "mlp_layer_types": ["sparse", "dense", "sparse"],
         "rope_parameters": {**MROPE, "mrope_section": [2, 2, 4]},
         "tie_word_embeddings": False}, ERNIE_VISION, tie_word_embeddings=False)
KIMI_VISION = dict(patch_size=4, pos_emb_height=2, pos_emb_width=2, pos_emb_time=2,
                   num_attention_heads=2, num_hidden_layers=1, hidden_size=16,
                   intermediate_size=16, merge_kernel_size=[1, 1])
KIMI = {**MLA, "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1}
wrapper("kimi-k25", "kimi_k25", {**KIMI, "rope_parameters": YARN_ALL}, KIMI_VISION, FUSED,
        projection_hidden_size=16, tie_word_embeddings=False, edit=published_kimi)
wrapper("kimi-k25-tied", "kimi_k25",
        {**KIMI, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": None,
         "tie_word_embeddings": True}, KIMI_VISION, FUSED, projection_hidden_size=16,
        tie_word_embeddings=True, edit=published_kimi)
M3_VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                 num_channels=1, image_size=8, patch_size=4, temporal_patch_size=1,
                 spatial_merge_size=1)
M3 = dict(intermediate_size=16, dense_intermediate_size=48, shared_intermediate_size=24,
          num_local_experts=8, num_experts_per_tok=3, head_dim=12, rotary_dim=6,
          num_hidden_layers=3, swiglu_limit=0.8, index_n_heads=2, index_head_dim=12,
          index_block_size=16, index_topk_blocks=6,
          rope_parameters={"rope_type": "default", "rope_theta": 500.0,
                           "partial_rotary_factor": 0.5},
          layer_types=["full_attention"] + ["minimax_m3_sparse"] * 2,
          mlp_layer_types=["dense", "sparse", "sparse"])
wrapper("minimax-m3", "minimax_m3_vl", M3, M3_VISION, projector_hidden_size=16)
wrapper("minimax-m3-dense-attention-tied", "minimax_m3_vl",
        {**M3, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
         "layer_types": ["full_attention"] * 2, "mlp_layer_types": ["sparse"] * 2,
         "swiglu_alpha": 1.2, "routed_scaling_factor": 1.5, "tie_word_embeddings": True},
        M3_VISION, projector_hidden_size=16, tie_word_embeddings=True)

# Gemma 3, which also reads images.
wrapper("gemma3-wrapped", "gemma3",
        dict(model_type="gemma3_text", intermediate_size=48, head_dim=16, sliding_window=8,
             query_pre_attn_scalar=16, num_hidden_layers=3,
             layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
        dict(model_type="siglip_vision_model", hidden_size=16, intermediate_size=16,
             num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4),
        mm_tokens_per_image=4)
