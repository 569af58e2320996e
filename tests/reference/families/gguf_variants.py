"""What llama.cpp's converter does to families whose layers differ (gguf_models.py).

- Gemma 4: norms are stored as they are, the scales of the router and of the experts are tensors
  `ffn_gate_inp.scale` and `ffn_down_exps.scale`. Divisors of rotary frequencies are 1, or 1e30
  where a head is not rotated, and only layers without a window have them.
- Llama 4: stacks of experts are transposed, and gate and up projections separated; queries and keys
  are not permuted.
- Step 3.5: norms become factors; heads and windows are lists; the divisors of Llama 3's rotary
  scaling are those of the whole head, although half of it is rotated.
- MiMo-V2: heads are a list; the key of the window is one less than the number of positions in it.
- Command A: the average with the shared experts is not a key.
- K2-Horizon: the experts of values are stacks, and the biases of routers are choice biases.
- Mistral 4 (add_mistral4): the scale of queries.
"""

import math
from collections.abc import Iterator

import gguf
import numpy as np
import torch

Tensors = Iterator[tuple[str, torch.Tensor]]
VARIANTS = ("cohere2_moe", "gemma4_text", "k2_horizon_mova", "llama4_text", "mimo_v2_flash",
            "step3p5")


def convert_variant(config: dict, name: str, tensor: torch.Tensor) -> Tensors:
    """Yields a tensor of one of VARIANTS."""
    kind = config["model_type"]
    layer = name.split(".")[2] if ".layers." in name else ""
    if kind == "gemma4_text" and name.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", tensor
    elif kind == "gemma4_text" and name.endswith("router.per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", tensor
    elif kind == "k2_horizon_mova" and name.endswith("self_attn.gate_proj.weight"):
        yield f"blk.{layer}.attn_gate.weight", tensor
    elif kind == "k2_horizon_mova" and ".self_attn.v_" in name and ".v_proj." not in name:
        # "v_router.weight", "v_router.bias" or the stack "v_experts" (stack_value_experts)
        name = name.replace("v_router", "attn_v_gate").replace("v_experts", "attn_v_exps")
        yield f"blk.{layer}.{name.split('.self_attn.')[1]}", tensor
    elif name.endswith("mlp.gate.bias"):
        yield f"blk.{layer}.exp_probs_b.bias", tensor
    elif name.endswith(("layer_scalar", "attention_sink_bias")):
        yield name + ".weight", tensor
    elif kind == "gemma4_text" and ".experts." in name:
        yield name + ".weight", tensor
    elif kind == "llama4_text" and name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), tensor.transpose(1, 2).chunk(2, 1)):
            yield name.replace("gate_up", part) + ".weight", half.contiguous()
    elif kind == "llama4_text" and name.endswith("experts.down_proj"):
        yield name + ".weight", tensor.transpose(1, 2).contiguous()
    elif name.endswith("mlp.experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), tensor.chunk(2, 1)):
            yield name.replace("gate_up", part) + ".weight", half.contiguous()
    elif name.endswith("mlp.experts.down_proj"):
        yield name + ".weight", tensor
    elif kind == "step3p5" and name.endswith("norm.weight"):
        yield name, tensor + 1
    else:
        yield name, tensor


def stack_value_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replaces K2-Horizon's single experts of values by one tensor for all of a layer."""
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    out = {}
    for name, tensor in tensors.items():
        parts = name.split(".v_experts.")
        if len(parts) == 1:
            out[name] = tensor
        else:
            number, rest = parts[1].split(".", 1)
            stacks.setdefault(f"{parts[0]}.v_experts.{rest}", {})[int(number)] = tensor
    return out | {name: torch.stack([experts[i] for i in range(len(experts))])
                  for name, experts in stacks.items()}


def windows_of(config: dict) -> list[bool]:
    """Returns which layers have a window."""
    if config["model_type"] == "gemma4_text" and "layer_types" not in config:
        return [(i + 1) % 6 != 0 and i + 1 < config["num_hidden_layers"]
                for i in range(config["num_hidden_layers"])]
    return [kind != "full_attention" for kind in config["layer_types"]]


def of_layers(config: dict, key: str, usual: int) -> list[int]:
    """Returns the number for each layer."""
    own = config.get("per_layer_config") or {}
    return [own.get(str(i), {}).get(key, usual) for i in range(config["num_hidden_layers"])]


def rope_of_layers(config: dict, kind: str, theta: float, fraction: float) -> dict:
    usual = {"rope_theta": theta, "partial_rotary_factor": fraction, "rope_type": "default"}
    return usual | (config.get("rope_parameters") or {}).get(kind, {})


def add_gemma4(writer, config: dict) -> None:
    windows = windows_of(config)
    full = max(of_layers(config, "head_dim", config.get("global_head_dim", 0)))
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base(rope_of_layers(config, "full_attention", 1e6, 0.25)["rope_theta"])
    writer.add_rope_freq_base_swa(rope_of_layers(config, "sliding_attention", 1e4, 1)["rope_theta"])
    heads = of_layers(config, "num_key_value_heads", config["num_key_value_heads"])
    others = config.get("num_global_key_value_heads")
    writer.add_head_count_kv([heads[i] if window or others is None else others
                              for i, window in enumerate(windows)])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_llama4(writer, config: dict) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])


def add_step35(writer, config: dict) -> None:
    windows = windows_of(config)
    writer.add_head_count(of_layers(config, "num_attention_heads", config["num_attention_heads"]))
    writer.add_head_count_kv([config["num_key_value_heads"]] * len(windows))
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    for kind, add in (("full_attention", writer.add_rope_freq_base),
                      ("sliding_attention", writer.add_rope_freq_base_swa)):
        add(rope_of_layers(config, kind, 1e4, 1)["rope_theta"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["share_expert_dim"])
    writer.add_expert_weights_scale(config["moe_router_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    writer.add_moe_every_n_layers(1)
    if config["swiglu_limits"] is not None:
        writer.add_swiglu_clamp_exp([float(limit) for limit in config["swiglu_limits"]])
        writer.add_swiglu_clamp_shexp([float(limit) for limit in config["swiglu_limits_shared"]])


def add_mimo2(writer, config: dict) -> None:
    windows = windows_of(config)
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([2 * heads if window else heads for window in windows])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["v_head_dim"])
    writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])
    for kind, add, rotated in (
            ("full_attention", writer.add_rope_freq_base, writer.add_rope_dimension_count),
            ("sliding_attention", writer.add_rope_freq_base_swa,
             writer.add_rope_dimension_count_swa)):
        rope = rope_of_layers(config, kind, 1e4, 0.334)
        add(rope["rope_theta"])
        rotated(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])


def add_cohere2(writer, config: dict) -> None:
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_logit_scale(config["logit_scale"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    width = config["intermediate_size"]
    writer.add_expert_feed_forward_length(width)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType[config["expert_selection_fn"].upper()])
    if config["num_shared_experts"] > 0:
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_expert_shared_feed_forward_length(config["num_shared_experts"] * width)


def add_k2_horizon(writer, config: dict) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_group_norm_groups(config["layernorm_num_groups"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    width, shared = config["moe_intermediate_size"], config["num_shared_experts"]
    writer.add_expert_feed_forward_length(width)
    writer.add_leading_dense_block_count(len(config["mlp_only_layers"]))
    writer.add_moe_every_n_layers(config["decoder_sparse_step"])
    writer.add_expert_shared_count(shared)
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_shared_feed_forward_length(width * shared)
    writer.add_expert_weights_scale(config["router_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType[config["router_score_func"].upper()])
    writer.add_uint32("k2-horizon.attention.value_expert_count", config["mova_num_experts"])
    writer.add_uint32("k2-horizon.attention.value_expert_used_count",
                      config["mova_num_experts_per_tok"])


def add_mistral4(writer, config: dict) -> None:
    rope = config["rope_parameters"]
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    writer.add_attn_temperature_length(rope["original_max_position_embeddings"])


def add_variant(writer, config: dict) -> None:
    """Adds the keys of one of VARIANTS, except those that all files have."""
    kind = config["model_type"]
    width = config.get("intermediate_size_mlp") or config.get("prefix_dense_intermediate_size")
    writer.add_feed_forward_length(width or config["intermediate_size"])
    if kind != "step3p5":
        writer.add_head_count(config["num_attention_heads"])
    if kind != "cohere2_moe":
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if kind not in ("k2_horizon_mova", "llama4_text"):
        writer.add_sliding_window(config["sliding_window"] - (kind == "mimo_v2_flash"))
        windows = windows_of(config)
        writer.add_sliding_window_pattern(
            [int(window) for window in windows] if kind == "mimo_v2_flash" else windows)
    add = {"cohere2_moe": add_cohere2, "gemma4_text": add_gemma4,
           "k2_horizon_mova": add_k2_horizon, "llama4_text": add_llama4,
           "mimo_v2_flash": add_mimo2, "step3p5": add_step35}
    add[kind](writer, config)


def variant_tensors(config: dict, llama3_factors) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the divisors of rotary frequencies of one of VARIANTS."""
    if config["model_type"] == "gemma4_text":
        full = max(of_layers(config, "head_dim", config.get("global_head_dim", 0)))
        rope = rope_of_layers(config, "full_attention", 1e6, 0.25)
        rotated = math.floor(full * rope["partial_rotary_factor"] / 2)
        values = [1.0] * rotated + [1e30] * (full // 2 - rotated)
        yield "rope_freqs.weight", np.array(values, np.float32)
    rope = (config.get("rope_parameters") or {}).get("full_attention", {})
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_factors(rope, config["head_dim"])
