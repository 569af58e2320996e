"""Reads and writes safetensors files: 8 bytes of header length, a JSON header, raw tensors."""

import json
import pathlib
import struct

import torch

_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def from_bytes(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and the `__metadata__` strings of a file's content."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = bytearray(data[8 + length + begin:8 + length + end])
        dtype = _DTYPES[entry["dtype"]]
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(entry["shape"])
    return tensors, metadata


def load(path: pathlib.Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    return from_bytes(path.read_bytes())


def to_bytes(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The file's bytes; equal input gives equal bytes."""
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    chunks = []
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + len(raw)]}
        chunks.append(raw)
        offset += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(chunks)


def save(path: pathlib.Path, tensors: dict[str, torch.Tensor],
         metadata: dict[str, str] | None = None) -> None:
    path.write_bytes(to_bytes(tensors, metadata))
