"""Writes a moeserve model folder from a PyTorch module and a configuration, and compares the two.

    from export_native import export, verify
    export(module, config, "my-model", dtype=torch.bfloat16)
    print(verify(module, "my-model"))

    python export_native.py propose config.json weights.pt --output mapping.json
    python export_native.py export config.json weights.pt my-model --mapping mapping.json
    python export_native.py verify my-model --module my_model.py:build --mapping mapping.json

Needs only PyTorch. README.md lists the names of the tensors; a mapping says which tensors of the
module these are, where it has other names. Every name and shape is compared with the configuration
before anything is written. `moeserve check my-model` verifies the rest of the configuration, and
verify() that the server computes what the module computes.
"""

import argparse
import importlib.util
import json
import pathlib
import shutil
import struct
import sys

import torch

from pytorch_export import comparison, mapping as mappings
from pytorch_export.mapping import ExportError

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32"}
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4}


def _key(node, path, name, *default):
    if name in node:
        return node[name]
    if default:
        return default[0]
    raise ExportError(f"config: {path}{name}: expected a value, found no such key")


def _layers(config, prefix, block):
    """Returns (path, object) for every layer, from one object for all layers or from a list."""
    count, value = _key(config, prefix, "num_hidden_layers"), _key(config, prefix, block)
    if isinstance(value, list):
        if len(value) != count:
            raise ExportError(f"config: {prefix}{block}: expected a list of {count} "
                              f"(num_hidden_layers), found {len(value)}")
        return [(f"{prefix}{block}[{i}].", item) for i, item in enumerate(value)]
    return [(f"{prefix}{block}.", value)] * count


def _router(add, name, path, routing, row):
    null_experts = routing.get("null_experts", {})
    experts = (_key(routing, path, "num_experts") + len(null_experts.get("replaced", []))
               + sum(null_experts.get(kind, 0) for kind in ("zero", "copy", "constant")))
    score = routing.get("score", {"kind": "dot"})
    kind, bias = _key(score, path + "score.", "kind"), score.get("bias", False)
    if routing.get("select", {}).get("bias", False):
        add(name + ".choice_bias", (experts,), path + "select.bias", whole_name=True)
    select = routing.get("select", {})
    if select.get("kind") == "table":
        add(name + ".table", (None, _key(select, path + "select.", "k")),
            "vocab_size and " + path + "select.k", whole_name=True)
    if score.get("norm", "none") == "rms_weight":
        add(name + ".norm", (row,), path + "score.norm")
    if routing.get("expert_scale", False):
        add(name + ".expert_scale", (experts,), path + "expert_scale", whole_name=True)
    if kind == "dot":
        add(name, (experts, row), path + "num_experts", bias)
        return
    dim = score.get("dim", 16)
    add(name + ".projection", (dim, row), path + "score.dim", bias)
    add(name + ".experts", (experts, dim), path + "num_experts and score.dim")
    if score.get("temperature", "none") != "none":
        add(name + ".temperature", (1,), path + "score.temperature", whole_name=True)


def _expert(add, norm, name, path, expert, row, width, width_key):
    if expert.get("sublayer", "plain") == "plain":
        _network(add, norm, name, path, expert, row, width, width_key)
        return
    for i in range(expert.get("depth", 1)):
        norm(f"{name}layers.{i}.norm", row)
        _network(add, norm, f"{name}layers.{i}.", path, expert, row, width, width_key)


def _network(add, norm, name, path, expert, row, width, width_key):
    bias = expert.get("bias", False)
    if _key(expert, path + "expert.", "form") == "gated":
        add(name + "gate", (width, row), width_key, bias)
    add(name + "up", (width, row), width_key, bias)
    add(name + "down", (row, width), width_key, bias)
    if expert.get("inner_norm", False):
        norm(name + "inner_norm", width)


def _gate(add, name, path, block, heads, head_dim, d):
    if block.get("gate", False):
        width = heads if block.get("gate_per_head", False) else heads * head_dim
        add(name + "gate", (width, d), path + "gate", block.get("gate_bias", False))


def _latent_attention(add, name, path, block, d):
    latent, at = _key(block, path, "latent"), path + "latent."
    heads, head_dim = _key(block, path, "num_heads"), _key(block, path, "head_dim")
    rank, rope, value = (_key(latent, at, key) for key in ("rank", "rope_dim", "value_dim"))
    query_rank, bias = latent.get("query_rank", 0), block.get("bias", False)
    if query_rank:
        add(name + "q_down", (query_rank, d), at + "query_rank", bias)
        add(name + "q_norm", (query_rank,), at + "query_rank")
    add(name + "q", (heads * head_dim, query_rank or d), path + "num_heads * head_dim")
    add(name + "latent", (rank + rope, d), f"{at}rank + {at}rope_dim", bias)
    add(name + "latent_norm", (rank,), at + "rank")
    for j in range(heads):
        add(f"{name}heads.{j}.k", (rank, head_dim - rope), f"{at}rank, head_dim - {at}rope_dim")
        add(f"{name}heads.{j}.v", (value, rank), f"{at}value_dim, {at}rank")
    _gate(add, name, path, block, heads, value, d)
    add(name + "o", (d, heads * value), f"num_heads * {at}value_dim")


def _delta(add, name, path, block, d):
    heads, key_dim, value_dim = (_key(block, path, key)
                                 for key in ("num_heads", "key_dim", "value_dim"))
    keys, values = block.get("num_key_heads", heads) * key_dim, heads * value_dim
    decays = heads * (key_dim if block.get("decay", "head") == "channel" else 1)
    for part in ("q", "k"):
        add(name + part, (keys, d), path + "num_key_heads * key_dim")
    add(name + "v", (values, d), path + "num_heads * value_dim")
    for part, width in (("gate", values), ("decay", decays)):
        rank = block.get(part + "_rank", 0)
        if rank:
            add(f"{name}{part}_down", (rank, d), f"{path}{part}_rank")
        add(name + part, (width, rank or d), path + "num_heads")
    add(name + "beta", (heads, d), path + "num_heads")
    for part, width in (("q", keys), ("k", keys), ("v", values)):
        add(f"{name}{part}_conv", (width, block.get("conv", 4)), path + "conv")
    add(name + "decay_log", (heads,), path + "num_heads", whole_name=True)
    add(name + "decay_bias", (decays,), path + "decay", whole_name=True)
    add(name + "out_norm", (value_dim,), path + "value_dim")
    add(name + "o", (d, values), path + "num_heads * value_dim")


def _state_space(add, name, path, block, d):
    heads, head_dim, state = (_key(block, path, key)
                              for key in ("num_heads", "head_dim", "state_dim"))
    values, keys, bias = heads * head_dim, block.get("groups", 1) * state, block.get("bias", False)
    for part in ("gate", "x"):
        add(name + part, (values, d), path + "num_heads * head_dim", bias)
    for part in ("b", "c"):
        add(name + part, (keys, d), path + "groups * state_dim", bias)
    add(name + "step", (heads, d), path + "num_heads", bias)
    add(name + "conv", (values + 2 * keys, block.get("conv", 4)), path + "conv",
        block.get("conv_bias", True))
    for part in ("decay_log", "step_bias", "skip"):
        add(name + part, (heads,), path + "num_heads", whole_name=True)
    add(name + "out_norm", (values,), path + "num_heads * head_dim")
    add(name + "o", (d, values), path + "num_heads * head_dim", bias)


def _attention(add, norm, block_norms, name, path, block, d):
    block_norms(name, block)
    if block.get("out_bias", False):
        add(name + "out_bias", (d,), path + "out_bias", whole_name=True)
    if "latent" in block:
        _latent_attention(add, name, path, block, d)
        return
    if _key(block, path, "kind") == "short_conv":
        bias = block.get("bias", False)
        for part in ("b", "c", "x", "o"):
            add(name + part, (d, d), "hidden_size", bias)
        add(name + "conv", (d, block.get("conv", 3)), path + "conv", bias)
        return
    if block["kind"] == "delta":
        _delta(add, name, path, block, d)
        return
    if block["kind"] == "ssm":
        _state_space(add, name, path, block, d)
        return
    routed = block["kind"] == "routed"
    heads = None if routed else _key(block, path, "num_heads")
    head_dim = _key(block, path, "head_dim")
    kv_heads = block.get("num_kv_heads", 1 if routed else heads)
    keys, value_dim = kv_heads * head_dim, block.get("value_dim", head_dim)
    bias = block.get("bias", False)
    own_keys = block.get("kv_layer") is None
    if own_keys:
        add(name + "k", (keys, d), path + "num_kv_heads * head_dim", bias)
    values, value_key = kv_heads * value_dim, path + "num_kv_heads * value_dim"
    if "value_routing" in block:
        routing, at = block["value_routing"], path + "value_routing."
        _router(add, name + "router", at, routing, d)
        for j in range(_key(routing, at, "num_experts")):
            add(f"{name}experts.{j}.v", (values, d), value_key)
    elif own_keys and not block.get("value_from_key", False):
        add(name + "v", (values, d), value_key, bias)
    if routed:
        routing = _key(block, path, "routing")
        _router(add, name + "router", path + "routing.", routing, d)
        for j in range(_key(routing, path + "routing.", "num_experts")):
            add(f"{name}experts.{j}.q", (keys, d), path + "num_kv_heads * head_dim")
            add(f"{name}experts.{j}.o", (d, keys), path + "num_kv_heads * head_dim")
    else:
        add(name + "q", (heads * head_dim, d), path + "num_heads * head_dim", bias)
        add(name + "o", (d, heads * value_dim), path + "num_heads * value_dim")
        full = (heads * head_dim, keys)
        qk = {"head": (head_dim, head_dim), "full": full, "heads": full}.get(block.get("qk_norm"))
        if qk is not None:
            add(name + "q_norm", (qk[0],), path + "qk_norm")
            if own_keys:
                add(name + "k_norm", (qk[1],), path + "qk_norm")
        _gate(add, name, path, block, heads, value_dim, d)
        if block.get("inner_norm", False):
            norm(name + "inner_norm", heads * value_dim)
        if block.get("sinks", False):
            add(name + "sinks", (heads,), path + "sinks", whole_name=True)


def _feed_forward(add, norm, block_norms, name, path, block, d):
    expert = _key(block, path, "expert")
    block_norms(name, block)
    if block.get("out_bias", False):
        add(name + "out_bias", (d,), path + "out_bias", whole_name=True)
    if _key(block, path, "kind") == "dense":
        _expert(add, norm, name, path, expert, d, _key(block, path, "width"), path + "width")
        return
    routing, at = _key(block, path, "routing"), path + "routing."
    split = routing.get("split", {"heads": 1})
    h = _key(split, at + "split.", "heads")
    if d % h:
        raise ExportError(f"config: {at}split.heads: expected a divisor of {d}, found {h}")
    depth, before = split.get("depth", 1), split.get("projection", h > 1)
    for part, wanted, key in (("split", before, "split.projection"),
                              ("merge", split.get("merge_projection", before),
                               "split.merge_projection")):
        for i in range(depth if wanted else 0):
            layer = name + part if depth == 1 else f"{name}{part}.{i}"
            add(layer, (d, d), at + key, split.get("bias", True))
    _router(add, name + "router", at, routing, d // h)
    count, widths = _key(routing, at, "num_experts"), _key(routing, at, "widths")
    widths = [widths] * count if isinstance(widths, int) else widths
    if len(widths) != count:
        raise ExportError(f"config: {at}widths: expected {count} (num_experts), "
                          f"found {len(widths)}")
    row, latent = d // h, routing.get("latent_width", 0)
    if latent:
        add(name + "latent_down", (latent, row), at + "latent_width")
        add(name + "latent_up", (row, latent), at + "latent_width")
        row = latent
    null_experts = routing.get("null_experts", {})
    replaced = null_experts.get("replaced", [])
    places = count + len(replaced)
    bodies = [j for j in range(places) if j not in set(replaced)]
    for i, (j, width) in enumerate(zip(bodies, widths)):
        _expert(add, norm, f"{name}experts.{j}.", path, expert, row, width, f"{at}widths[{i}]")
    for j in replaced:
        add(f"{name}experts.{j}.constant", (row,), at + "null_experts.replaced", whole_name=True)
    first = places + null_experts.get("zero", 0) + null_experts.get("copy", 0)
    for j in range(first, first + null_experts.get("constant", 0)):
        add(f"{name}experts.{j}.constant", (row,), at + "null_experts.constant", whole_name=True)
    shared = block.get("shared_width", 0)
    if shared:
        _expert(add, norm, name + "shared.", path, expert, d, shared, path + "shared_width")
        if block.get("shared_gate", False):
            add(name + "shared_gate", (1, d), path + "shared_gate")
        if block.get("shared_norms", False):
            for part in ("shared_norm", "shared_output_norm", "experts_norm"):
                norm(name + part, d)


def _kind(config):
    return config.get("model_type", "routed_decoder")


def _format_version(config):
    """Returns the lowest version that has the kind of model and of head."""
    head = config.get("head", {}).get("kind", "language_model")
    old = _kind(config) == "routed_decoder" and head == "language_model"
    return 1 if old and "pooling" not in config else 2


def _head(add, norm, config, d, vocabulary):
    """The tensors behind the last rows: of the decoder, or of an encoder alone."""
    for i, dense in enumerate(config.get("pooling", {}).get("dense", [])):
        path = f"pooling.dense[{i}]."
        width = _key(dense, path, "width")
        add(f"pooling.dense.{i}", (width, d), path + "width", dense.get("bias", True))
        d = width
    head = config.get("head", {"kind": "language_model"})
    kind = _key(head, "head.", "kind")
    if "layer" in head:
        add("head.layer", (d, d), "head.layer", head["layer"].get("bias", True))
        if head["layer"].get("norm", False):
            norm("head.layer_norm", d)
    if kind not in ("language_model", "masked_lm"):
        if kind != "none":
            labels = len(_key(head, "head.", "labels"))
            add("classifier", (labels, d), "head.labels", head.get("bias", True))
        return
    if config.get("head_bias", False):
        add("head.bias", (vocabulary,), "head_bias", whole_name=True)
    if not config.get("tie_word_embeddings", False):
        add("head", (vocabulary, d), "tie_word_embeddings")


def required_tensors(config):
    """Returns {name: (shape, configuration key)} for exactly the tensors of the model."""
    wanted = {}
    d, vocabulary = _key(config, "", "hidden_size"), _key(config, "", "vocab_size")
    if _kind(config) != "routed_encoder_decoder":
        _stack(wanted, config, config, "", "", d, vocabulary)
        return wanted
    shared = config.get("share_embeddings", True)
    for side in ("decoder", "encoder"):
        stack = _key(config, "", side)
        rows = stack.get("vocab_size", vocabulary)
        _stack(wanted, config, stack, side + ".", "" if shared else side + ".", d, rows)
    return wanted


def _stack(wanted, config, stack, prefix, of_tokens, d, vocabulary):
    """Adds the tensors of a stack, whose keys the object `stack` has. The names of its tensors begin
    with `prefix`, that of its table of tokens with `of_tokens`."""

    def add(name, shape, key, bias=False, whole_name=False):
        shape = [vocabulary if size is None else size for size in shape]
        wanted[name if whole_name else name + ".weight"] = (tuple(shape), key)
        if bias:
            wanted[name + ".bias"] = (tuple(shape[:1]), key)

    norm_config = stack.get("norm", {"kind": "rms"})
    layer_norm = _key(norm_config, prefix + "norm.", "kind") == "layer"

    def norm(name, width):
        add(name, (width,), "norm.kind", bias=layer_norm and norm_config.get("bias", True))

    def block_norms(name, block):
        placement = block.get("norm_placement", norm_config.get("placement", "pre"))
        if placement not in ("output", "none"):
            norm(name + "norm", d)
        if placement in ("output", "both"):
            norm(name + "output_norm", d)

    add(of_tokens + "embed", (vocabulary, d), "vocab_size and hidden_size")
    if stack.get("position", {}).get("kind") == "learned":
        rows = _key(stack, prefix, "max_position_embeddings")
        add(prefix + "embed_position", (rows, d), "max_position_embeddings")
    if stack.get("token_types", 0):
        add(prefix + "embed_type", (stack["token_types"], d), "token_types")
    if stack.get("embedding_norm", False):
        norm(prefix + "embed_norm", d)
    if "relative_bias" in stack:
        path, attention = next(item for item in _layers(stack, prefix, "attention")
                               if item[1].get("kind") != "none")
        heads = _key(attention, path, "num_heads")
        buckets = _key(stack["relative_bias"], prefix + "relative_bias.", "buckets")
        tables = [prefix + "relative_bias"]
        if stack["relative_bias"].get("per_layer", False):
            tables = [f"{prefix}blocks.{i}.relative_bias"
                      for i, (_, layer) in enumerate(_layers(stack, prefix, "attention"))
                      if layer.get("kind") != "none"]
        for table in tables:
            add(table, (buckets, heads), "relative_bias.buckets and attention.num_heads")
    if stack.get("layer_scale", False):
        for i in range(_key(stack, prefix, "num_hidden_layers")):
            add(f"{prefix}blocks.{i}.scale", (1,), "layer_scale", whole_name=True)
    if "layer_input" in stack:
        layers = _key(stack, prefix, "num_hidden_layers")
        width = _key(stack["layer_input"], prefix + "layer_input.", "width")
        at = "layer_input.width"
        add(prefix + "embed_layers", (vocabulary, layers * width), at)
        add(prefix + "layer_input", (layers * width, d), at)
        add(prefix + "layer_input.norm", (width,), at)
        for i in range(layers):
            name = f"{prefix}blocks.{i}.input."
            add(name + "gate", (width, d), at)
            add(name + "down", (d, width), at)
            add(name + "norm", (d,), "hidden_size")
    if norm_config.get("final", norm_config.get("placement", "pre") != "post"):
        norm(prefix + "norm", d)
    if prefix != "encoder.":
        _head(add, norm, config, d, vocabulary)
    kinds = [("attention", _attention), ("feed_forward", _feed_forward)]
    if prefix == "decoder.":
        kinds.insert(1, ("cross_attention", _attention))
    for kind, add_block in kinds:
        for i, (path, block) in enumerate(_layers(stack, prefix, kind)):
            if block.get("kind") != "none":
                add_block(add, norm, block_norms, f"{prefix}blocks.{i}.{kind}.", path, block, d)


def propose(module, config):
    """Looks for the tensors of a module, or of a state dict, by their shapes and names.

    Returns a Proposal: print its text(), and pass its mapping() to export() when it is right.
    """
    wanted = {name: shape for name, (shape, _) in required_tensors(config).items()}
    return mappings.propose(wanted, {name: tensor.shape for name, tensor in _tensors(module).items()})


def _tensors(module):
    state_dict = module.state_dict() if isinstance(module, torch.nn.Module) else module
    if not hasattr(state_dict, "items"):
        raise ExportError(f"expected a module or a state dict, found {type(module).__name__}")
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise ExportError(f"{name}: expected a tensor, found {type(value).__name__} (of a "
                              "training checkpoint, pass the state dict in it)")
    return state_dict


def _check(tensors, wanted, proposes):
    problems, missing, extra = [], False, False
    for name, (shape, key) in wanted.items():
        if name not in tensors:
            missing = True
            problems.append(f"{name}: expected shape {list(shape)} (from {key}), found no tensor")
        elif tuple(tensors[name].shape) != shape:
            problems.append(f"{name}: expected shape {list(shape)} (from {key}), "
                            f"found {list(tensors[name].shape)}")
    for name in tensors:
        if name not in wanted:
            extra = True
            problems.append(f"{name}: expected no such tensor (no key of the configuration leads "
                            "to it)")
    if not problems:
        return
    more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
    text = "the state dict does not fit the configuration:\n  " + "\n  ".join(problems[:5]) + more
    if proposes and missing and extra:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        found = mappings.propose({name: shape for name, (shape, _) in wanted.items()}, shapes)
        text += ("\nProposed mapping; if it is right, pass mapping=propose(module, config).mapping():"
                 "\n  " + found.text().replace("\n", "\n  "))
    raise ExportError(text)


def _size(tensor, dtype):
    return tensor.numel() * BYTES[DTYPES[dtype]]


def _write_shard(path, names, state_dict, dtypes):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in names:
        size = _size(state_dict[name], dtypes[name])
        header[name] = {"dtype": DTYPES[dtypes[name]], "shape": list(state_dict[name].shape),
                        "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            tensor = state_dict[name].detach().to("cpu", dtypes[name]).contiguous()
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def export(module, config, out_dir, dtype=None, max_shard_bytes=4 << 30, tokenizer_json=None,
           mapping=None):
    """Writes config.json, the weights and, if given, a copy of the file `tokenizer_json`.

    module: a module or a state dict.
    dtype: torch.float32, float16 or bfloat16 for every tensor but tables of ids, which become int32;
    None keeps each tensor's dtype.
    mapping: a dict, or the path of a JSON file, that says which tensors of the module those of the
    format are; see propose(). Without it, the names must be the same.
    Weights beyond `max_shard_bytes` are split over several files with an index.
    Raises ExportError, before it writes anything, if names, shapes or dtypes do not fit; if only the
    names do not, the message has a proposed mapping.
    """
    wanted = required_tensors(config)
    state_dict = _tensors(module)
    if mapping is not None:
        state_dict = mappings.apply(mapping, state_dict, wanted)
    _check(state_dict, wanted, proposes=mapping is None)
    dtypes = {name: dtype or state_dict[name].dtype for name in wanted}
    for name, found in dtypes.items():
        if name.endswith(".router.table"):
            if state_dict[name].dtype not in (torch.int32, torch.int64):
                raise ExportError(f"{name}: expected dtype int32 or int64, "
                                  f"found {state_dict[name].dtype}")
            dtypes[name] = torch.int32
        elif found not in DTYPES or not state_dict[name].is_floating_point():
            raise ExportError(f"{name}: expected dtype float32, float16 or bfloat16, found {found}")

    shards, used = [[]], 0
    for name in wanted:
        size = _size(state_dict[name], dtypes[name])
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size

    out = pathlib.Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    stale = [p for p in out.iterdir() if p.name.startswith("model") and ".safetensors" in p.name]
    if stale:
        raise ExportError(f"{out}: expected a folder without weights, found {stale[0].name}")
    document = {"model_type": "routed_decoder", "format_version": _format_version(config), **config}
    (out / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if tokenizer_json is not None:
        shutil.copyfile(tokenizer_json, out / "tokenizer.json")
    if len(shards) == 1:
        _write_shard(out / "model.safetensors", shards[0], state_dict, dtypes)
        return
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, names in zip(files, shards):
        _write_shard(out / file, names, state_dict, dtypes)
    total = sum(_size(state_dict[n], dtypes[n]) for n in wanted)
    index = {"metadata": {"total_size": total},
             "weight_map": {name: file for file, names in zip(files, shards) for name in names}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n",
                                                      encoding="utf-8")


def verify(module, folder, token_ids=None, mapping=None, routers=None, moeserve=None,
           tolerance=1e-3):
    """Compares a module with moeserve on an exported folder; see comparison.compare()."""
    return comparison.compare(module, folder, token_ids, mapping, routers, moeserve, tolerance)


def _load_weights(path):
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # PyTorch has no class for damaged files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ExportError(f"{path}: expected a state dict that torch.save() wrote: {reason}") from None
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            return loaded[key]
    return loaded


def _load_module(place):
    """Calls the function of "FILE.py:FUNCTION", which returns a module."""
    file, colon, function = place.rpartition(":")
    if not colon:
        raise ExportError(f"--module: expected FILE.py:FUNCTION, found {place}")
    path = pathlib.Path(file).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or not path.is_file():
        raise ExportError(f"--module: expected a Python file, found {file}")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(loaded)
    if not callable(getattr(loaded, function, None)):
        raise ExportError(f"--module: expected a function {function} in {file}, found none")
    return getattr(loaded, function)()


def _parse(arguments):
    parser = argparse.ArgumentParser(description="Exports PyTorch modules to moeserve's format.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("propose", help="print which tensors of a state dict may be those "
                                  "of the format")
    command.add_argument("config", help="config.json of the format")
    command.add_argument("weights", help="a state dict, saved with torch.save()")
    command.add_argument("--output", help="JSON file to write the mapping to, for --mapping")
    command = commands.add_parser("export", help="write a model folder")
    command.add_argument("config", help="config.json of the format")
    command.add_argument("weights", help="a state dict, saved with torch.save()")
    command.add_argument("folder", help="the folder to write")
    command.add_argument("--mapping", help="JSON file that propose wrote")
    command.add_argument("--dtype", choices=("float32", "float16", "bfloat16"),
                         help="type of the weights (default: as they are)")
    command.add_argument("--tokenizer", help="tokenizer.json to copy into the folder")
    command = commands.add_parser("verify", help="compare log-probabilities and routes of a module "
                                  "with those of moeserve")
    command.add_argument("folder", help="the exported folder")
    command.add_argument("--module", required=True, metavar="FILE.py:FUNCTION",
                         help="function that returns the module with its weights")
    command.add_argument("--mapping", help="the mapping of the export, which also says where the "
                         "routers are")
    command.add_argument("--router", action="append", default=[], metavar="BLOCK=MODULE",
                         help="submodule that computes scores or expert ids of a block, such as "
                         "0.feed_forward=layers.0.moe.gate; can be repeated")
    command.add_argument("--ids", help="token ids, separated by commas (default: 64 random ones)")
    command.add_argument("--tolerance", type=float, default=1e-3,
                         help="largest accepted difference of a log-probability "
                         "(default: %(default)s)")
    command.add_argument("--moeserve", help="the program (default: $MOESERVE_BIN, or moeserve on the "
                         "search path)")
    return parser.parse_args(arguments)


def _run(options):
    if options.command == "verify":
        routers = dict(item.partition("=")[::2] for item in options.router)
        ids = [int(i) for i in options.ids.split(",")] if options.ids else None
        report = verify(_load_module(options.module), options.folder, ids, options.mapping, routers,
                        options.moeserve, options.tolerance)
        print(report)
        return 0 if report.equal else 1
    config = json.loads(pathlib.Path(options.config).read_text(encoding="utf-8"))
    weights = _load_weights(options.weights)
    if options.command == "export":
        export(weights, config, options.folder, options.dtype and getattr(torch, options.dtype),
               tokenizer_json=options.tokenizer, mapping=options.mapping)
        print(f"wrote {options.folder}")
        return 0
    proposal = propose(weights, config)
    print(proposal.text())
    if options.output:
        text = json.dumps(proposal.mapping(), indent=2) + "\n"
        pathlib.Path(options.output).write_text(text, encoding="utf-8")
        print(f"wrote {options.output}" + ("" if proposal.complete else
                                           ": replace its lists by one of their entries, and null"))
    return 0 if proposal.complete else 1


def main(arguments=None):
    """Runs a command. Returns the exit status: 1 if something is open or differs, 2 for errors."""
    try:
        return _run(_parse(arguments))
    except (ExportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
