"""Replaces experts of a model of transformers by vectors, as pruning with MoNE does.

The matrices of a replaced expert become zeros, and what its vector times its weight adds to the
experts' sum is added behind them. Files have the vectors in the place of the matrices.
"""

import re

import torch


def replace(model, replaced, seed):
    """Replaces the experts {layer: [id]}. Returns their vectors {(layer, id): [d]}."""
    generator = torch.Generator().manual_seed(seed)
    vectors = {}
    for layer, ids in replaced.items():
        block = model.model.layers[layer].mlp
        values = {}
        for expert in ids:
            value = torch.randn(model.config.hidden_size, generator=generator)
            values[expert] = value.bfloat16().float()
            vectors[layer, expert] = values[expert]
            block.experts.down_proj.data[expert] = 0.0
        block.experts.register_forward_hook(_adder(values))
    return vectors


def _adder(values):
    def add(_, inputs, output):
        _, selected, weights = inputs
        for expert, value in values.items():
            weight = (weights * (selected == expert)).sum(-1, keepdim=True)
            output = output + weight * value.to(output.dtype)
        return output
    return add


def config_keys(vectors, experts, named):
    """Returns the keys of config.json. `named`: the vectors have names of their own."""
    layers = {}
    for layer, expert in vectors:
        layers.setdefault(str(layer), []).append(expert)
    if not named:
        return {"approximate_experts": layers}
    targets = {
        f"model.layers.{layer}.mlp.experts": {
            "num_logical_experts": experts, "weight_layout": "compact_retained_experts",
            "replacements": {
                str(e): {"format": "constant-v1", "tensors": {"value": _own_name(layer, e)}}
                for e in ids}}
        for layer, ids in layers.items()}
    semantics = {"preserve_logical_expert_ids": True, "preserve_router_weights": True,
                 "renormalize_after_substitution": False}
    return {"compression_config": {
        "producer": {"name": "made-up"},
        "transform_config": {"expert_substitution": {
            "version": 1, "router_semantics": semantics, "targets": targets}}}}


def _own_name(layer, expert):
    return f"model.layers.{layer}.mlp.expert_replacements.{expert}.value"


def edit(state, vectors, named):
    """Returns the tensors of the file, given those of transformers."""
    out = {}
    for name, value in state.items():
        found = re.fullmatch(r"(model\.layers\.(\d+)\..*experts\.(\d+))\..*", name)
        key = (int(found[2]), int(found[3])) if found else None
        if key not in vectors:
            out[name] = value
            continue
        vector = _own_name(*key) if named else found[1] + ".approx_value"
        out[vector] = vectors[key].bfloat16()
    return out
