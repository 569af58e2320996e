"""Bailing MoE V2 (Ling 2.0), which is not a part of transformers.

Its arithmetic is that of GLM-4.5 in transformers, so that model computes the answers; keys and
tensors are stored under Bailing's names, with queries, keys and values joined.
"""

import torch
import transformers

KEYS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts",
        "attention_bias": "use_qkv_bias"}


def build(config):
    """Returns the model and its config.json."""
    glm = transformers.AutoConfig.for_model("glm4_moe", **config, use_qk_norm=True,
                                            norm_topk_prob=True)
    glm._attn_implementation = "eager"
    stored = {KEYS.get(key, key): value for key, value in config.items()
              if key not in ("rope_parameters", "pad_token_id")}
    rope = config.get("rope_parameters", {})
    stored.update(model_type="bailing_moe_v2", architectures=["BailingMoeV2ForCausalLM"],
                  use_qk_norm=True, moe_router_enable_expert_bias=True, score_function="sigmoid",
                  hidden_act="silu", rms_norm_eps=glm.rms_norm_eps,
                  tie_word_embeddings=config.get("tie_word_embeddings", False),
                  rope_theta=rope.get("rope_theta", 10000.0),
                  partial_rotary_factor=rope.get("partial_rotary_factor", 0.5))
    return transformers.AutoModelForCausalLM.from_config(glm), stored


def state_dict(model):
    """Returns the tensors under Bailing's names."""
    source, out = dict(model.state_dict()), {}
    for name, value in source.items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if ".self_attn.q_proj." in name:
            parts = [source[name.replace("q_proj", p)] for p in ("q_proj", "k_proj", "v_proj")]
            name = name.replace("self_attn.q_proj", "attention.query_key_value")
            value = torch.cat(parts)
        elif ".k_proj." in name or ".v_proj." in name:
            continue
        elif name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(value):
                gate, up = both.chunk(2)
                prefix = name.replace("gate_up_proj", str(e))
                out[f"{prefix}.gate_proj.weight"] = gate.contiguous()
                out[f"{prefix}.up_proj.weight"] = up.contiguous()
            continue
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(value):
                out[f"{name.replace('down_proj', str(e))}.down_proj.weight"] = down.contiguous()
            continue
        for old, new in (("embed_tokens", "word_embeddings"), ("self_attn.o_proj", "attention.dense"),
                         ("self_attn.q_norm", "attention.query_layernorm"),
                         ("self_attn.k_norm", "attention.key_layernorm"),
                         ("e_score_correction_bias", "expert_bias")):
            name = name.replace(old, new)
        out[name] = value.contiguous()
    return out
