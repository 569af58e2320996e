"""What llama.cpp's converter does to the tensors and keys of hybrid models (gguf_models.py).

- `A_log` becomes -exp(A_log), convolutions lose their middle dimension, and `dt_bias` is a bias.
- Norms that are offsets from 1 become factors, except those of the delta rule's outputs.
- Qwen3-Next's joined rows of each key head are separated. The value heads of Qwen3.5 are tiled: the
  first ones of all key heads, then the second ones, and so on.
- State spaces have vectors of heads as matrices [H, 1] and their norm as a matrix of groups; the
  rows of query and key projections are permuted, although those layers have no positions.
- Kimi Linear's convolutions are [1, d, 1, taps], and its rates [1, 1, H, 1].
- Ling 3 has positive rates [H, 1]; the gates of linear and latent attention have different names.
- Layers without attention have 0 kv heads.
"""

from collections.abc import Callable, Iterator

import torch

Tensors = Iterator[tuple[str, torch.Tensor]]


def grouped_to_tiled(tensor: torch.Tensor, dim: int, config: dict, width: int) -> torch.Tensor:
    """Puts blocks of `width` rows or columns, one for each value head, into the order of files."""
    keys = config["linear_num_key_heads"]
    shared = config["linear_num_value_heads"] // keys
    parts = tensor.unflatten(dim, (keys, shared, width)).transpose(dim, dim + 1)
    return parts.flatten(dim, dim + 2).contiguous()


def convert_delta(config: dict, name: str, tensor: torch.Tensor) -> Tensors:
    """Yields a tensor of Qwen3-Next or Qwen3.5."""
    key_heads, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_value_head_dim"]
    shared = config["linear_num_value_heads"] // key_heads
    queries = 2 * key_heads * key
    tiled = config["model_type"] != "qwen3_next"

    def tile(part: torch.Tensor, dim: int, width: int) -> torch.Tensor:
        return grouped_to_tiled(part, dim, config, width) if tiled else part

    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("in_proj_qkvz.weight"):
        groups = tensor.view(key_heads, -1, tensor.shape[1])
        q, k, v, z = groups.split([key, key, shared * value, shared * value], 1)
        yield f"blk.{layer}.attn_qkv.weight", torch.cat([p.flatten(0, 1) for p in (q, k, v)])
        yield f"blk.{layer}.attn_gate.weight", z.flatten(0, 1).contiguous()
    elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        rows = tensor.squeeze()
        yield name, torch.cat([rows[:queries], tile(rows[queries:], 0, value)])
    elif name.endswith("in_proj_z.weight"):
        yield name, tile(tensor, 0, value)
    elif name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
        yield name, tile(tensor, 0, 1)
    elif name.endswith("linear_attn.out_proj.weight"):
        yield name, tile(tensor, 1, value)
    elif name.endswith(".A_log"):
        yield name, tile(-torch.exp(tensor), 0, 1)
    elif name.endswith(".dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), tile(tensor, 0, 1)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield name, tensor + 1
    else:
        yield name, tensor


def convert_state_space(groups: int, name: str, tensor: torch.Tensor) -> Tensors:
    """Yields a tensor of a state space."""
    if name.endswith(".A_log"):
        yield name, -torch.exp(tensor)[:, None]
    elif name.endswith(".D"):
        yield name, tensor[:, None]
    elif name.endswith(".dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), tensor
    elif name.endswith("conv1d.weight"):
        yield name, tensor.squeeze(1)
    else:
        yield name, tensor.reshape(groups, -1)


def convert_channel_delta(name: str, tensor: torch.Tensor) -> Tensors:
    """Yields a tensor of Kimi Linear."""
    if name.endswith("_conv1d.weight"):
        yield name, tensor.reshape(1, tensor.shape[0], 1, -1)
    elif name.endswith(".A_log"):
        yield name, -torch.exp(tensor)
    elif name.endswith(".dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), tensor
    else:
        yield name, tensor


def convert_ling(name: str, tensor: torch.Tensor, recurrent: bool) -> Tensors:
    """Yields a tensor of Ling 3, whose names are not all in the tables of the package."""
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith(".A_log"):
        yield f"blk.{layer}.ssm_a", torch.exp(tensor).reshape(-1, 1)
    elif name.endswith("f_proj.weight"):
        yield f"blk.{layer}.ssm_f_a.weight", tensor
    elif name.endswith("g_proj.weight") and ".attention." in name:
        yield f"blk.{layer}.{'ssm_g_a' if recurrent else 'attn_gate'}.weight", tensor
    elif name.endswith(".expert_bias.bias"):
        yield f"blk.{layer}.exp_probs_b.bias", tensor
    else:
        name = name.replace(".attention.dense.", ".self_attn.o_proj.").replace(".attention.", ".self_attn.")
        yield from convert_channel_delta(name.replace("word_embeddings", "embed_tokens"), tensor)


def convert_hybrid(config: dict, name: str, tensor: torch.Tensor,
                   permute: Callable[[torch.Tensor, int], torch.Tensor]) -> Tensors:
    """Yields a tensor of a hybrid model; `permute` puts the halves of heads side by side."""
    kind = config["model_type"]
    state_space = (".A_log", ".D", ".dt_bias", "conv1d.weight", ".mamba.norm.weight",
                   ".mixer.norm.weight")
    if kind.startswith("qwen3_"):
        yield from convert_delta(config, name, tensor)
    elif kind == "bailing_hybrid":
        layer = name.split(".")[2] if ".layers." in name else "0"
        yield from convert_ling(name, tensor, layer_kinds(config)[int(layer)] == "recurrent")
    elif kind == "kimi_linear":
        name = name.replace("block_sparse_moe.gate_proj", "mlp.gate_proj")
        name = name.replace("block_sparse_moe.up_proj", "mlp.up_proj")
        name = name.replace("block_sparse_moe.down_proj", "mlp.down_proj")
        yield from convert_channel_delta(name, tensor)
    elif kind in ("lfm2", "lfm2_moe"):
        if ".conv.conv." in name:
            tensor = tensor.squeeze(1)
        name = name.replace("model.layers", "layers") if ".experts." in name else name
        yield name, tensor
    elif name.endswith(".q_proj.weight"):
        yield name, permute(tensor, config["num_attention_heads"])
    elif name.endswith(".k_proj.weight"):
        yield name, permute(tensor, config["num_key_value_heads"])
    elif name.endswith(state_space):
        groups = config["n_groups" if kind == "nemotron_h" else "mamba_n_groups"]
        yield from convert_state_space(groups, name, tensor)
    elif ".mixer.experts." in name:
        yield name.replace("backbone", "model").replace("mixer", "mlp"), tensor
    else:
        yield name, tensor


def layer_kinds(config: dict) -> list[str]:
    """Returns what each layer has: "attention", "feed_forward", "experts" or "recurrent"."""
    kinds = {"*": "attention", "-": "feed_forward", "E": "experts", "full_attention": "attention",
             "attention": "attention", "mlp": "feed_forward", "moe": "experts"}
    types = (config.get("layer_types") or config.get("layers_block_type")
             or config.get("hybrid_override_pattern"))
    return [kinds.get(kind, "recurrent") for kind in types]


def add_delta(writer, config: dict) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    if config["model_type"] != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def add_state_space(writer, config: dict) -> None:
    nemotron = config["model_type"] == "nemotron_h"
    heads = config["mamba_num_heads" if nemotron else "mamba_n_heads"]
    writer.add_ssm_conv_kernel(config["conv_kernel" if nemotron else "mamba_d_conv"])
    writer.add_ssm_state_size(config["ssm_state_size" if nemotron else "mamba_d_state"])
    writer.add_ssm_group_count(config["n_groups" if nemotron else "mamba_n_groups"])
    writer.add_ssm_inner_size(heads * config["mamba_head_dim" if nemotron else "mamba_d_head"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_rope_scaling_finetuned(False)


def add_hybrid(writer, config: dict) -> None:
    """Adds the keys of the recurrent layers, and those that only some layers have."""
    kind = config["model_type"]
    layers = layer_kinds(config)
    if kind.startswith("qwen3_"):
        add_delta(writer, config)
        return
    heads = 1 if kind in ("kimi_linear", "bailing_hybrid") else config["num_key_value_heads"]
    writer.add_head_count_kv([heads if layer == "attention" else 0 for layer in layers])
    if kind in ("lfm2", "lfm2_moe"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    elif kind in ("kimi_linear", "bailing_hybrid"):
        if kind == "bailing_hybrid":
            writer.add_bool("bailingmoe3.kda.safe_gate", True)
            writer.add_float32("bailingmoe3.kda.gate_lower_bound", config["kda_lower_bound"])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_kda_head_dim(config["linear_head_dim"])
    else:
        add_state_space(writer, config)
    if kind == "nemotron_h":
        widths = {"experts": config["moe_intermediate_size"],
                  "feed_forward": config["intermediate_size"]}
        writer.add_feed_forward_length([widths.get(layer, 0) for layer in layers])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        if config.get("moe_latent_size"):
            writer.add_moe_latent_size(config["moe_latent_size"])
