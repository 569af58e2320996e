"""Writes the files of this folder with PyTorch. See README.md.

    python3 tests/data/torch_files/make.py tests/data/torch_files

The names of the files contain PyTorch's version, because versions write different files. Beside
each state dict NAME.pt, NAME.safetensors has the same tensors, contiguous and each with its own
data; the tests compare the two.
"""

import argparse
import collections
import datetime
import json
import pathlib
import struct
import sys

import torch

NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint16": "U16", "uint32": "U32",
    "uint64": "U64",
}


def write_safetensors(state, path):
    header, data = {}, b""
    for name, tensor in state.items():
        dtype = NAMES[str(tensor.dtype).removeprefix("torch.")]
        flat = torch.empty(tensor.shape, dtype=tensor.dtype)
        flat.copy_(tensor.detach())
        raw = bytes(flat.untyped_storage() if hasattr(flat, "untyped_storage") else flat.storage().untyped())
        header[name] = {"dtype": dtype, "shape": list(tensor.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def state_dict():
    state = collections.OrderedDict()
    for number, name in enumerate(NAMES):
        if hasattr(torch, name):
            values = (torch.arange(7) * 5 + number) % 11
            state[f"types.{name}"] = values.to(getattr(torch, name))
    base = torch.arange(120, dtype=torch.float32).reshape(2, 3, 4, 5) / 8
    state["views.base"] = base
    state["views.tied"] = base
    state["views.transposed"] = base.transpose(1, 3)
    state["views.matrix"] = base.reshape(24, 5).t()
    state["views.slice"] = base[1, 1:, ::2, 3]
    state["views.row"] = base[1, 2]
    state["views.expanded"] = base[0, :1, :, :].expand(3, 4, 5)
    state["views.half"] = base.half().permute(3, 0, 1, 2)
    state["views.bfloat16"] = base.bfloat16()[:, :, 1]
    state["scalar"] = torch.tensor(-2.5)
    state["empty"] = torch.empty(4, 0, 2)
    state["one"] = base[:1, :1, :1, 2:3].transpose(0, 3)
    layer = torch.nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6).reshape(2, 3))
        layer.bias.copy_(torch.tensor([0.5, -0.5]))
    for name, tensor in layer.state_dict(prefix="layer.").items():
        state[name] = tensor
    state["parameter"] = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    state["parameter.expert"] = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    state["parameter.expert"].expert = True
    state["attribute"] = torch.tensor([5.0, 6.0])
    state["attribute"].note = "kept in the file"
    state._metadata = collections.OrderedDict(layer={"version": 1})
    return state


def checkpoint():
    """A dict like that of a fairseq checkpoint."""
    model = collections.OrderedDict()
    model["decoder.embed_tokens.weight"] = torch.arange(8, dtype=torch.float16).reshape(4, 2)
    model["decoder.output_projection.weight"] = model["decoder.embed_tokens.weight"]
    args = argparse.Namespace(
        arch="lm", decoder_embed_dim=2, dropout=0.1, moe_top1_expert=False, save_dir=None,
        adam_betas=(0.9, 0.98), lr=[0.0005], text="Kuchen mit Ü\n")
    return {
        "args": args, "cfg": None, "model": model,
        "extra_state": {
            "epoch": 3, "negative": -5, "wide": 1 << 40, "huge": 1 << 80, "bytes": b"\xff\x00",
            "set": {7}, "frozen": frozenset([8]), "device": torch.device("cpu"),
            "dtype": torch.float16, "size": torch.Size([1, 2]),
            "when": datetime.timedelta(seconds=5), "array": collections.Counter("aab"),
            "path": pathlib.PurePosixPath("a/b"),
        },
    }


def main():
    folder = pathlib.Path(sys.argv[1])
    version = ".".join(torch.__version__.split(".")[:2])
    state = state_dict()
    torch.save(state, folder / f"state-{version}.pt")
    write_safetensors(state, folder / f"state-{version}.safetensors")
    for protocol in (1, 2, 3, 4, 5):
        torch.save(checkpoint(), folder / f"checkpoint-{version}-p{protocol}.pt",
                   pickle_protocol=protocol)
    torch.save({"a": torch.ones(2)}, folder / f"legacy-{version}.pt",
               _use_new_zipfile_serialization=False)
    if hasattr(torch.serialization, "set_crc32_options"):
        torch.serialization.set_crc32_options(False)
        torch.save({"a": torch.ones(2)}, folder / f"no-crc-{version}.pt")


if __name__ == "__main__":
    main()
