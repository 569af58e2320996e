"""Writes the models of make_gguf_goldens.py: keys and tensors as llama.cpp's converter writes them.

The names of keys and tensors are those of the Python package `gguf`; what the converter does to the
tensors is written down here:

- Experts are stacks [E, ...]; Granite's joined projections are split, gpt-oss's rows of gate and up
  projections, which alternate, are separated and transposed.
- The rows of query and key projections of Llama and Granite are permuted. Those of DeepSeek and
  ERNIE are not: their rotary pairs are adjacent in the original.
- DeepSeek's projection of keys and values becomes a stack of each, [H, rank, keys] and
  [H, values, rank]; older converters keep it (`legacy`).
- Norms of Gemma, which are offsets from 1, become factors.
- Hybrid models: see gguf_hybrids.py; models whose layers differ: gguf_variants.py.
- MXFP4 blocks get the order of GGUF: byte i has the elements i and i + 16.
"""

import json
import math
import pathlib

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from gguf_hybrids import add_hybrid, convert_hybrid, layer_kinds
from gguf_variants import (VARIANTS, add_mistral4, add_variant, convert_variant, stack_value_experts,
                           variant_tensors)

FAMILIES = pathlib.Path(__file__).parents[2] / "golden" / "families"
ARCH = gguf.MODEL_ARCH
ARCHITECTURES = {"llama": ARCH.LLAMA, "mixtral": ARCH.LLAMA, "qwen2": ARCH.QWEN2,
                 "qwen2_moe": ARCH.QWEN2MOE, "qwen3": ARCH.QWEN3, "qwen3_moe": ARCH.QWEN3MOE,
                 "olmoe": ARCH.OLMOE, "deepseek_v2": ARCH.DEEPSEEK2, "deepseek_v3": ARCH.DEEPSEEK2,
                 "kimi_k2": ARCH.DEEPSEEK2, "gpt_oss": ARCH.GPT_OSS, "gemma2": ARCH.GEMMA2,
                 "gemma3_text": ARCH.GEMMA3, "phi3": ARCH.PHI3, "glm4_moe": ARCH.GLM4_MOE,
                 "granitemoe": ARCH.GRANITE_MOE, "granitemoeshared": ARCH.GRANITE_MOE,
                 "hunyuan_v1_moe": ARCH.HUNYUAN_MOE, "ernie4_5_moe": ARCH.ERNIE4_5_MOE,
                 "bailing_moe_v2": ARCH.BAILINGMOE2, "dots1": ARCH.DOTS1,
                 "afmoe": ARCH.AFMOE, "bailing_hybrid": ARCH.KIMI_LINEAR, "phimoe": ARCH.PHIMOE, "deepseek_v32": ARCH.GLM_DSA, "exaone_moe": ARCH.EXAONE_MOE,
                 "glm4_moe_lite": ARCH.DEEPSEEK2, "glm4v_moe_text": ARCH.GLM4_MOE,
                 "glm_moe_dsa": ARCH.GLM_DSA, "granite": ARCH.GRANITE,
                 "granitemoehybrid": ARCH.GRANITE_HYBRID, "hy_v3": ARCH.EXAONE_MOE,
                 "kimi_linear": ARCH.KIMI_LINEAR, "lfm2": ARCH.LFM2, "lfm2_moe": ARCH.LFM2MOE,
                 "cohere2_moe": ARCH.DOTS1, "k2_horizon_mova": ARCH.DOTS1,
                 "gemma4_text": ARCH.GEMMA4, "llama4_text": ARCH.LLAMA4,
                 "mimo_v2_flash": ARCH.MIMO2, "mistral4": ARCH.MISTRAL4, "step3p5": ARCH.STEP35,
                 "mellum": ARCH.QWEN3MOE, "minimax_m2": ARCH.MINIMAXM2,
                 "nemotron_h": ARCH.NEMOTRON_H_MOE, "qwen3_next": ARCH.QWEN3NEXT,
                 "qwen3_5_text": ARCH.QWEN35, "qwen3_5_moe_text": ARCH.QWEN35MOE,
                 "qwen3_vl_moe_text": ARCH.QWEN3VLMOE, "solar_open": ARCH.GLM4_MOE}
# Architectures that the package does not know, but whose names of tensors it has under another one.
OTHER_NAMES = {"bailing_hybrid": "bailingmoe3", "cohere2_moe": "cohere2moe", "deepseek_v32": "deepseek32",
               "hy_v3": "hy_v3", "k2_horizon_mova": "k2-horizon", "mellum": "mellum"}
HYBRIDS = (ARCH.GRANITE_HYBRID, ARCH.KIMI_LINEAR, ARCH.LFM2, ARCH.LFM2MOE, ARCH.NEMOTRON_H_MOE,
           ARCH.QWEN3NEXT, ARCH.QWEN35, ARCH.QWEN35MOE)
LATENT = (ARCH.DEEPSEEK2, ARCH.GLM_DSA, ARCH.KIMI_LINEAR, ARCH.MISTRAL4)
PERMUTED = (ARCH.LLAMA, ARCH.GRANITE, ARCH.GRANITE_MOE)
# Their experts' width is that of dense layers, which they do not have.
WITHOUT_EXPERT_WIDTH = (ARCH.PHIMOE, ARCH.LLAMA, ARCH.GRANITE_MOE, ARCH.GRANITE_HYBRID, ARCH.OLMOE)


def permute(weights, heads):
    """Puts the two halves of each head's rows side by side."""
    return (weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
            .swapaxes(1, 2).reshape(weights.shape))


def load(folder):
    tensors = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors.update(load_file(path))
    return {name: tensor if tensor.dtype == torch.uint8 else tensor.float()
            for name, tensor in tensors.items()}


def stack_experts(tensors):
    """Replaces the tensors of single experts by one tensor for all of a layer."""
    out, stacks = {}, {}
    for name, tensor in tensors.items():
        parts = name.split(".experts.")
        if len(parts) == 1 or not parts[1][0].isdigit():
            out[name] = tensor
            continue
        number, rest = parts[1].split(".", 1)
        stacks.setdefault(f"{parts[0]}.experts.{rest}", {})[int(number)] = tensor
    for name, experts in stacks.items():
        out[name] = torch.stack([experts[i] for i in range(len(experts))])
    return out


def gguf_mxfp4(blocks, scales):
    """Returns blocks of 17 bytes [..., blocks, 17] from OCP's elements and scales."""
    blocks = blocks.numpy()
    elements = np.stack([blocks & 0xF, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    packed = elements[..., :16] | elements[..., 16:] << 4
    return np.concatenate([scales.numpy()[..., None], packed], -1)


def convert_gpt_oss(tensors):
    for name, tensor in tensors.items():
        stem = name.removesuffix("_blocks").removesuffix("_bias")
        kind = ".bias" if name.endswith("_bias") else ".weight"
        if name.endswith("_scales"):
            continue
        if name.endswith("_blocks"):
            tensor = gguf_mxfp4(tensor, tensors[stem + "_scales"])
            tensor = torch.from_numpy(tensor.reshape(*tensor.shape[:-2], -1))
        elif ".experts." in name and kind == ".weight":
            tensor = tensor.transpose(1, 2)
        if stem.endswith("gate_up_proj"):
            stem = stem.removesuffix("gate_up_proj")
            yield stem + "gate_proj" + kind, tensor[:, ::2].contiguous()
            yield stem + "up_proj" + kind, tensor[:, 1::2].contiguous()
        elif stem.endswith(".down_proj"):
            yield stem + kind, tensor.contiguous()
        elif name.endswith(".sinks"):
            yield name + ".weight", tensor
        else:
            yield name, tensor


def convert(config, tensors, legacy):
    """Yields the tensors as the converter changes them, under names that it passes to gguf."""
    arch = ARCHITECTURES[config["model_type"]]
    if arch == ARCH.GPT_OSS:
        yield from convert_gpt_oss(tensors)
        return
    heads = config["num_attention_heads"]
    for name, tensor in tensors.items():
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace(".expert_bias", ".expert_bias.bias")
        if arch in PERMUTED and ".q_proj." in name:
            tensor = permute(tensor, heads)
        if arch in PERMUTED and ".k_proj." in name:
            tensor = permute(tensor, config["num_key_value_heads"])
        if arch in (ARCH.GEMMA2, ARCH.GEMMA3) and name.endswith("norm.weight"):
            tensor = tensor + 1
        layer = name.split(".")[2] if ".layers." in name else ""
        if config["model_type"] in VARIANTS:
            yield from convert_variant(config, name, tensor)
        elif name.endswith("mlp.experts.gate_up_proj") and arch == ARCH.MISTRAL4:
            yield name + ".weight", tensor
        elif name.endswith("mlp.expert_bias.bias") and arch == ARCH.EXAONE_MOE:
            yield f"blk.{layer}.exp_probs_b", tensor  # Hy3
        elif ".mlp.router.gate." in name or ".mlp.shared_mlp." in name:
            yield name.replace("router.gate", "gate").replace("shared_mlp", "shared_experts"), tensor
        elif name.endswith("mlp.experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, 1)):
                yield name.replace("gate_up", part) + ".weight", half.contiguous()
        elif name.endswith("mlp.experts.down_proj"):
            yield name + ".weight", tensor
        elif name.endswith("kv_b_proj.weight") and not legacy:
            keys = config["qk_nope_head_dim"]
            tensor = tensor.reshape(heads, keys + config["v_head_dim"], -1)
            name = name.replace(".attention.", ".self_attn.")
            yield name.replace("kv_b_proj", "k_b_proj"), tensor[:, :keys].transpose(1, 2).contiguous()
            yield name.replace("kv_b_proj", "v_b_proj"), tensor[:, keys:].contiguous()
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            gate, up = tensor.chunk(2, 1)
            yield f"blk.{layer}.ffn_gate_exps.weight", gate.contiguous()
            yield f"blk.{layer}.ffn_up_exps.weight", up.contiguous()
        elif name.endswith("shared_mlp.input_linear.weight"):
            gate, up = tensor.chunk(2, 0)
            yield f"blk.{layer}.ffn_gate_shexp.weight", gate.contiguous()
            yield f"blk.{layer}.ffn_up_shexp.weight", up.contiguous()
        elif arch in HYBRIDS:
            yield from convert_hybrid(config, name, tensor, permute)
        else:
            yield name, tensor


def llama3_factors(rope, dimensions):
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, dimensions, 2, dtype=torch.float32) / dimensions)
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for frequency in frequencies:
        length = 2 * math.pi / frequency
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(rope["factor"])
        else:
            smooth = ((rope["original_max_position_embeddings"] / length - rope["low_freq_factor"])
                      / (rope["high_freq_factor"] - rope["low_freq_factor"]))
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def rope_of(config):
    """Returns the rotary parameters, also those of configurations with the older keys."""
    if "full_attention" in (config.get("rope_parameters") or {}):
        return config["rope_parameters"]["full_attention"] | {"partial_rotary_factor": 1.0}
    rope = {"rope_type": "default", "rope_theta": config.get("rope_theta"),
            "partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}
    rope.update(config.get("rope_scaling") or {})
    rope.update(config.get("rope_parameters") or {})
    return rope


def add_rope_scaling(writer, config, arch):
    rope = rope_of(config)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("longrope", "yarn"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        # Phi-3.5-MoE's own factors are dropped, and one follows from the lengths.
        original = rope["original_max_position_embeddings"]
        longer = math.log(config["max_position_embeddings"] / original) / math.log(original)
        writer.add_rope_scaling_attn_factors(rope.get("attention_factor", math.sqrt(1 + longer)))
    if rope["rope_type"] == "yarn":
        for key, add in (("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
                         ("beta_slow", writer.add_rope_scaling_yarn_beta_slow)):
            if key in rope:
                add(rope[key])
    if rope["rope_type"] == "yarn" and arch in LATENT:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if "rope_local_base_freq" in config:
        writer.add_rope_freq_base_swa(config["rope_local_base_freq"])
    sliding = (config.get("rope_parameters") or {}).get("sliding_attention")
    if sliding:
        writer.add_rope_freq_base_swa(sliding["rope_theta"])


def head_dim_of(config):
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def add_latent(writer, config, legacy):
    keys = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    if legacy:
        writer.add_key_length(keys)
        writer.add_value_length(config["v_head_dim"])
        return
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(keys)
    writer.add_value_length_mla(config["v_head_dim"])


def add_experts(writer, config, arch):
    def first(*keys):
        return next((config[key] for key in keys if config.get(key) is not None), None)

    experts = first("n_routed_experts", "moe_num_experts", "num_experts", "num_local_experts")
    if not experts or ("hybrid_override_pattern" in config and "experts" not in layer_kinds(config)):
        return
    writer.add_expert_count(experts)
    writer.add_expert_used_count(first("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"))
    width = first("moe_intermediate_size", "intermediate_size")
    if arch not in WITHOUT_EXPERT_WIDTH:
        writer.add_expert_feed_forward_length(width)
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size",
                "moe_shared_expert_intermediate_size"):
        if key in config:
            writer.add_expert_shared_feed_forward_length(config[key])
    shared = first("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
    if shared is not None:
        writer.add_expert_shared_count(shared)
    if arch in (ARCH.ERNIE4_5_MOE, ARCH.BAILINGMOE2):
        writer.add_expert_shared_feed_forward_length(shared * width)
    if arch == ARCH.HUNYUAN_MOE:
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(width)
    if arch == ARCH.ERNIE4_5_MOE:
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    kind = config["model_type"]
    dense = first("first_k_dense_replace", "num_dense_layers")
    if dense is None and "mlp_layer_types" in config:
        dense = config["mlp_layer_types"].count("dense")
    if dense is not None and kind not in ("hy_v3", "mellum"):
        writer.add_leading_dense_block_count(dense)
    scale = first("routed_scaling_factor", "router_scaling_factor", "route_scale")
    if scale is not None and kind != "lfm2_moe":
        writer.add_expert_weights_scale(scale)
    if (dense is not None and kind != "mellum") or kind in ("nemotron_h", "solar_open"):
        if kind != "kimi_linear":
            writer.add_expert_weights_norm(config.get("norm_topk_prob", True))
        functions = gguf.ExpertGatingFuncType
        # The configurations of GLM-4.7 Flash and Mistral 4 do not name the gate.
        if kind not in ("glm4_moe_lite", "mistral4"):
            softmax = kind == "deepseek_v2"
            writer.add_expert_gating_func(functions.SOFTMAX if softmax else functions.SIGMOID)
        groups = config.get("num_expert_group" if kind == "bailing_hybrid" else "n_group")
        if groups is not None:
            writer.add_expert_group_count(groups)
            writer.add_expert_group_used_count(config["topk_group"])
    if arch in (ARCH.GLM4_MOE, ARCH.BAILINGMOE2, ARCH.EXAONE_MOE, ARCH.GLM_DSA):
        writer.add_nextn_predict_layers(config.get("prediction_layers", 0))


def add_config(writer, config, legacy):
    arch = ARCHITECTURES[config["model_type"]]
    latent = arch in LATENT
    hybrid = arch in HYBRIDS
    writer.add_name("a tiny test model")
    writer.add_block_count(layers_of(config) + config.get("prediction_layers", 0))
    writer.add_context_length(config.get("max_position_embeddings") or config["model_max_length"])
    writer.add_embedding_length(config["hidden_size"])
    if config["model_type"] in VARIANTS:
        add_variant(writer, config)
        add_ends(writer, config)
        return
    if "intermediate_size" in config and config["model_type"] != "nemotron_h":
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if hybrid:
        add_hybrid(writer, config)
    if not hybrid or arch in (ARCH.QWEN3NEXT, ARCH.QWEN35, ARCH.QWEN35MOE):
        writer.add_head_count_kv(1 if latent and not legacy else config["num_key_value_heads"])
    eps = next(config[key] for key in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if key in config)
    writer.add_layer_norm_rms_eps(eps)
    if rope_of(config)["rope_theta"] is not None:
        writer.add_rope_freq_base(rope_of(config)["rope_theta"])
    head_dim = head_dim_of(config)
    if latent:
        add_latent(writer, config, legacy)
    elif config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch in PERMUTED or latent:
        writer.add_vocab_size(config["vocab_size"])
    rotated = config["qk_rope_head_dim"] if latent else int(head_dim * rope_of(config)["partial_rotary_factor"])
    if arch in PERMUTED + LATENT or hybrid or arch in (ARCH.GLM4_MOE, ARCH.BAILINGMOE2, ARCH.PHI3,
                                                       ARCH.MINIMAXM2):
        writer.add_rope_dimension_count(rotated)
    add_rope_scaling(writer, config, arch)
    add_experts(writer, config, arch)
    if arch in (ARCH.GPT_OSS, ARCH.GEMMA2, ARCH.GEMMA3, ARCH.PHI3, ARCH.PHIMOE):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if config["model_type"] in ("afmoe", "exaone_moe", "mellum"):
        writer.add_sliding_window(config["sliding_window"])
        # That of AFMoE follows from the architecture.
        if arch != ARCH.AFMOE:
            writer.add_sliding_window_pattern([t == "sliding_attention" for t in config["layer_types"]])
    if arch == ARCH.GLM_DSA:
        writer.add_indexer_head_count(config["index_n_heads"])
        writer.add_indexer_key_length(config["index_head_dim"])
        writer.add_indexer_top_k(config["index_topk"])
    if "mrope_section" in rope_of(config):
        writer.add_rope_dimension_sections((rope_of(config)["mrope_section"] + [0])[:4])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if "attention_multiplier" in config:
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config["model_type"] == "mistral4":
        add_mistral4(writer, config)
    add_ends(writer, config)


def add_ends(writer, config):
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def encode(name, tensor, kind):
    """Returns the data and the type of a tensor, as the converter chooses it."""
    array = tensor.numpy()
    if array.dtype == np.uint8:
        return array, Type.MXFP4
    small = ("ffn_gate_inp", "exp_probs_b", "ssm_a", "ssm_conv1d", "ssm_d", "ssm_norm", "shortconv.conv")
    plain = array.ndim == 1 or name.endswith(".bias") or any(part in name for part in small)
    if plain and "ssm_alpha" not in name or kind == Type.F32:
        return array, None
    if kind not in (Type.F16, Type.BF16) and array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] != 0:
        kind = Type.BF16
    return gguf.quantize(array, kind), kind


def extra_tensors(config):
    if config["model_type"] in VARIANTS:
        yield from variant_tensors(config, llama3_factors)
        return
    rope = rope_of(config)
    if rope["rope_type"] == "llama3":
        yield "rope_freqs.weight", llama3_factors(rope, config["head_dim"])
    if rope["rope_type"] == "longrope":
        yield "rope_factors_long.weight", np.array(rope["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.array(rope["short_factor"], np.float32)


def layers_of(config):
    """The configurations of Nemotron-H have no number of layers."""
    return config.get("num_hidden_layers") or len(layer_kinds(config))


def architecture_name(config, arch):
    if arch == ARCH.NEMOTRON_H_MOE and "experts" not in layer_kinds(config):
        return gguf.MODEL_ARCH_NAMES[ARCH.NEMOTRON_H]
    return OTHER_NAMES.get(config["model_type"], gguf.MODEL_ARCH_NAMES[arch])


def text_model(config, tensors):
    """Returns the decoder of a model with further parts."""
    if "text_config" in config:
        config = config["text_config"]
        tensors = {name.replace("model.language_model.", "model."): tensor
                   for name, tensor in tensors.items() if not name.startswith("model.visual.")}
    return config, tensors


def write_model(case, kind, out, finish, legacy=False, families=FAMILIES):
    folder = families / case
    config, tensors = text_model(json.loads((folder / "config.json").read_text()), load(folder))
    arch = ARCHITECTURES[config["model_type"]]
    config["prediction_layers"] = sum(name.endswith("eh_proj.weight") for name in tensors)
    names = gguf.get_tensor_name_map(arch, layers_of(config) + config["prediction_layers"])
    stored = {}
    for name, tensor in convert(config, stack_value_experts(stack_experts(tensors)), legacy):
        new_name = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
        assert new_name is not None, name
        assert new_name not in stored, new_name
        stored[new_name] = tensor if arch in HYBRIDS or tensor.numel() == 1 else tensor.squeeze()
    stem = f"{case}-{'legacy-' if legacy else ''}{kind}"
    outputs = [(out / f"{stem}.gguf", False)]
    if kind.startswith("q"):
        outputs.append((out / f"{stem}-widened.gguf", True))
    for path, widened in outputs:
        writer = gguf.GGUFWriter(path, architecture_name(config, arch))
        add_config(writer, config, legacy)
        for name, array in extra_tensors(config):
            writer.add_tensor(name, array)
        for name, tensor in stored.items():
            data, encoded = encode(name, tensor, Type[kind.upper()])
            if widened and encoded is not None:
                data, encoded = gguf.dequantize(data, encoded).astype(np.float32), None
            writer.add_tensor(name, data, raw_dtype=encoded)
        finish(writer)
