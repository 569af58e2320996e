#!/usr/bin/env python3
"""Writes a folder of Qwen3-MoE or Qwen3.5-MoE as int8 or int4 in the format compressed-tensors.

    write_quantized.py SOURCE TARGET --type int8|int4

SOURCE is a folder that `write_synthetic --hugging-face` wrote: one file model.safetensors, all
tensors bf16. All linear layers but routers, the head, and the small ones of linear attention
(strengths, decays) become integers, rounded to nearest:

    int8    one scale per output row; the engine rounds activations to int8, with one scale per row
            ("W8A8")
    int4    one scale per output row and 32 columns; activations stay bf16 ("W4A16")

The script needs NumPy. It keeps one tensor at a time in memory.
"""

import argparse
import json
import pathlib
import shutil
import struct

import numpy as np

GROUP = 32


class Safetensors:
    """Reads bf16 tensors of a safetensors file as f32."""

    def __init__(self, path):
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            self.header = json.loads(file.read(size))
        self.header.pop("__metadata__", None)
        self.data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + size)

    def raw(self, name):
        begin, end = self.header[name]["data_offsets"]
        return self.data[begin:end]

    def f32(self, name):
        entry = self.header[name]
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name}: expected BF16, found {entry['dtype']}")
        bits = self.raw(name).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(entry["shape"])


def bf16(values):
    """Rounds finite f32 values to the nearest bf16, ties to even; returns the bits as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def as_f32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def int8_tensors(base, weight):
    """Returns {name: (type, array)} of one matrix with a scale per row."""
    scales = bf16(np.maximum(np.abs(weight).max(axis=1, keepdims=True) / 127, 1e-8))
    integers = np.clip(np.rint(weight / as_f32(scales)), -127, 127).astype(np.int8)
    return {base + "weight": ("I8", integers), base + "weight_scale": ("BF16", scales)}


def int4_tensors(base, weight):
    """Returns {name: (type, array)} of one matrix with a scale per row and group. An int32 holds
    eight columns, the first one in the lowest four bits, each with 8 added."""
    rows, columns = weight.shape
    if columns % GROUP:
        raise ValueError(f"{base}: expected a multiple of {GROUP} columns, found {columns}")
    groups = weight.reshape(rows, columns // GROUP, GROUP)
    scales = bf16(np.maximum(np.abs(groups).max(axis=2) / 7.5, 1e-8))
    integers = np.clip(np.rint(groups / as_f32(scales)[:, :, None]), -8, 7).astype(np.int32) + 8
    nibbles = integers.astype(np.uint32).reshape(rows, columns // 8, 8)
    packed = np.zeros((rows, columns // 8), dtype=np.uint32)
    for i in range(8):
        packed |= nibbles[:, :, i] << np.uint32(4 * i)
    return {base + "weight_packed": ("I32", packed.view(np.int32)),
            base + "weight_scale": ("BF16", scales),
            base + "weight_shape": ("I64", np.array([rows, columns], dtype=np.int64))}


def shapes(kind, base, shape):
    """Returns {name: (type, shape)} of what int8_tensors() and int4_tensors() return."""
    rows, columns = shape
    if kind == "int8":
        return {base + "weight": ("I8", [rows, columns]),
                base + "weight_scale": ("BF16", [rows, 1])}
    return {base + "weight_packed": ("I32", [rows, columns // 8]),
            base + "weight_scale": ("BF16", [rows, columns // GROUP]),
            base + "weight_shape": ("I64", [2])}


def write_weights(source, target, kind):
    sizes = {"BF16": 2, "I8": 1, "I32": 4, "I64": 8}
    quantize = int8_tensors if kind == "int8" else int4_tensors
    stored = Safetensors(source)
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, entry in stored.header.items():
        parts = ({name: (entry["dtype"], entry["shape"])} if not linear(name)
                 else shapes(kind, name.removesuffix("weight"), entry["shape"]))
        for part, (dtype, shape) in parts.items():
            size = sizes[dtype] * int(np.prod(shape))
            header[part] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(target, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in stored.header:
            if not linear(name):
                file.write(stored.raw(name))
                continue
            for _, array in quantize(name.removesuffix("weight"), stored.f32(name)).values():
                file.write(array.tobytes())
        if file.tell() != 8 + len(text) + offset:
            raise ValueError(f"{target}: the sizes in the header are wrong")


def linear(name):
    """Whether a tensor is quantized: the projections of attention and experts."""
    return name.endswith(("_proj.weight", ".in_proj_qkv.weight", ".in_proj_z.weight"))


def quantization(kind):
    """Returns the config's "quantization_config"."""
    common = {"type": "int", "symmetric": True}
    if kind == "int8":
        form = "int-quantized"
        weights = {**common, "num_bits": 8, "strategy": "channel", "dynamic": False}
        inputs = {**common, "num_bits": 8, "strategy": "token", "dynamic": True}
    else:
        form = "pack-quantized"
        weights = {**common, "num_bits": 4, "strategy": "group", "group_size": GROUP,
                   "dynamic": False}
        inputs = None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs,
             "output_activations": None, "format": form}
    return {"quant_method": "compressed-tensors", "format": form,
            "quantization_status": "compressed", "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$",
                       "re:.*in_proj_[ab]$", "re:.*conv1d$"],
            "config_groups": {"group_0": group}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("target", type=pathlib.Path)
    parser.add_argument("--type", choices=["int8", "int4"], required=True)
    a = parser.parse_args()
    config = json.loads((a.source / "config.json").read_text())
    a.target.mkdir(parents=True, exist_ok=True)
    write_weights(a.source / "model.safetensors", a.target / "model.safetensors", a.type)
    config["quantization_config"] = quantization(a.type)
    (a.target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(a.source / name, a.target)


if __name__ == "__main__":
    main()
