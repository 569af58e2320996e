"""Writes a checkpoint with as many layers and experts as the largest public models, but a few
numbers per expert. Its weights are random."""

import json
import shutil
import struct

import numpy as np

HIDDEN, WIDTH, HEAD = 16, 2, 8


def write(folder, source, layers=61, experts=256, chosen=8):
    """Writes the model to `folder`, with the tokenizer of the checkpoint `source`."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    config = json.loads((source / "config.json").read_text())
    config |= {"hidden_size": HIDDEN, "num_hidden_layers": layers, "embedding_scale": 1.0,
               "attention": {"kind": "dense", "num_heads": 2, "num_kv_heads": 1, "head_dim": HEAD}}
    routing = config["feed_forward"]["routing"]
    routing |= {"num_experts": experts, "widths": WIDTH, "select": {"kind": "top_k", "k": chosen}}
    (folder / "config.json").write_text(json.dumps(config))

    shapes = {"embed.weight": (config["vocab_size"], HIDDEN), "norm.weight": (HIDDEN,)}
    for layer in range(layers):
        attention, feed_forward = (f"blocks.{layer}.{kind}." for kind in
                                   ("attention", "feed_forward"))
        shapes |= {attention + "q.weight": (2 * HEAD, HIDDEN),
                   attention + "k.weight": (HEAD, HIDDEN),
                   attention + "v.weight": (HEAD, HIDDEN),
                   attention + "o.weight": (HIDDEN, 2 * HEAD),
                   attention + "norm.weight": (HIDDEN,), feed_forward + "norm.weight": (HIDDEN,),
                   feed_forward + "router.weight": (experts, HIDDEN)}
        for expert in range(experts):
            name = f"{feed_forward}experts.{expert}."
            shapes |= {name + "gate.weight": (WIDTH, HIDDEN), name + "up.weight": (WIDTH, HIDDEN),
                       name + "down.weight": (HIDDEN, WIDTH)}
    random = np.random.default_rng(1)
    header, tensors, at = {}, [], 0
    for name, shape in shapes.items():
        values = (np.ones(shape) if name.endswith("norm.weight") else
                  random.normal(0, 0.3, shape)).astype(np.float32)
        tensors.append(values.tobytes())
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(tensors))
