#!/usr/bin/env python3
"""Writes small valid inputs for every fuzz target to a folder: make_seeds.py FOLDER"""

import base64
import collections
import io
import json
import pathlib
import pickle
import shutil
import struct
import sys
import types
import zipfile

import make_model_seeds
import make_server_seeds

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def varint(number):
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def field(number, value):
    """A field of a Protobuf message: bytes, an integer or a float."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def sentence_piece(kind):
    """A SentencePiece model with 256 byte tokens and a few pieces; kind 1 is Unigram, 2 is BPE."""
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3)]
    pieces += [(f"<0x{b:02X}>", 6) for b in range(256)]
    pieces += [(p, 1) for p in ("\u2581", "e", "t", "\u2581te", "te", "xt", "\u2581text", "12")]
    out = b"".join(field(1, field(1, p.encode()) + field(2, -float(i)) + field(3, k))
                   for i, (p, k) in enumerate(pieces))
    out += field(2, field(3, kind) + field(35, 1))
    out += field(3, field(1, b"identity") + field(3, 1) + field(4, 1) + field(5, 0))
    return out


def tokenizers():
    vocabulary = {chr(c): c - 33 for c in range(33, 127)}
    vocabulary.update({"\u0120": 94, "te": 95, "xt": 96, "text": 97, "<s>": 98, "[UNK]": 99})
    model = {"type": "BPE", "vocab": vocabulary, "merges": ["t e", "x t", "te xt"],
             "byte_fallback": False, "ignore_merges": True}
    added = [{"id": 98, "content": "<s>", "special": True, "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False}]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    template = {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                           {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [98],
                                                         "tokens": ["<s>"]}}}
    yield {"version": "1.0", "added_tokens": added, "normalizer": {"type": "NFC"},
           "pre_tokenizer": byte_level, "post_processor": template, "decoder": byte_level,
           "model": model}
    split = {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|\\s+"}, "behavior": "Isolated",
             "invert": False}
    yield {"version": "1.0", "added_tokens": added,
           "normalizer": {"type": "Sequence", "normalizers": [
               {"type": "Prepend", "prepend": "\u2581"},
               {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
           "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
               split, {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}]},
           "decoder": {"type": "Sequence", "decoders": [
               {"type": "ByteFallback"}, {"type": "Fuse"},
               {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
           "model": {**model, "unk_token": "[UNK]", "fuse_unk": True}}
    pieces = [["<unk>", 0.0], ["\u2581", -2.0], ["t", -3.0], ["te", -3.5], ["\u2581text", -4.0]]
    yield {"version": "1.0", "added_tokens": [],
           "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581",
                             "prepend_scheme": "always", "split": True},
           "decoder": {"type": "Metaspace", "replacement": "\u2581"},
           "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}}
    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "text": 3, "te": 4, "##xt": 5, "12": 6}
    yield {"version": "1.0", "added_tokens": [],
           "normalizer": {"type": "BertNormalizer", "clean_text": True, "lowercase": True,
                          "handle_chinese_chars": True, "strip_accents": None},
           "pre_tokenizer": {"type": "BertPreTokenizer"},
           "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]},
           "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
           "model": {"type": "WordPiece", "vocab": words, "unk_token": "[UNK]",
                     "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}}


class Storage:
    def __init__(self, kind, key, elements):
        self.kind, self.key, self.elements = kind, key, elements


class Tensor:
    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return sys.modules["torch._utils"]._rebuild_tensor_v2, self.arguments


def state_dict():
    """The pickle of a state dict with two storages of 24 and 16 bytes, as PyTorch writes it."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in ("FloatStorage", "HalfStorage"):
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    def _rebuild_tensor_v2():
        pass

    _rebuild_tensor_v2.__module__ = "torch._utils"
    _rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2
    sys.modules.update({"torch": torch, "torch._utils": utils})

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            if isinstance(value, Storage):
                return "storage", getattr(torch, value.kind), value.key, "cpu", value.elements
            return None

    floats, halves = Storage("FloatStorage", "0", 6), Storage("HalfStorage", "1", 8)
    none = collections.OrderedDict()
    out = io.BytesIO()
    Pickler(out, 2).dump(collections.OrderedDict(
        a=Tensor(floats, 0, (2, 3), (3, 1), False, none),
        b=Tensor(halves, 1, (3, 2), (1, 3), False, none),
        c=Tensor(floats, 2, (4, 1), (0, 7), False, none)))
    return out.getvalue()


def server_options(out):
    """Configuration files, and texts of the options and headers about traces."""
    files = ["text: a\ninteger: 3\nnumber: 2.5\nword: off\nlist: [a, 'b', \"c\\n\"]\n",
             "# comment\n---\nlist:\n- x\n- |\n  block\nparts: [p, q]\nflag: true\nno-flag: false\n",
             "text: >-\n  folded\n  text\n? \"integer\"\n: 1\n...\n"]
    for i, text in enumerate(files):
        (out / f"serve_config/{i}.yaml").write_text(text)
    texts = ["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
             "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00-more",
             "http://collector:4318/path", "http://[::1]:80", "Authorization=Bearer a,b=c"]
    for i, text in enumerate(texts):
        (out / f"trace/{i}").write_text(text)


def test_files(out):
    """Valid files of the tests."""
    golden = ROOT / "tests/golden"
    model = ROOT / "deploy/models/mh-moe"
    files = {"gguf": [p for p in (golden / "gguf").rglob("*.gguf") if p.stat().st_size <= 24 << 10],
             "settings": [model / "generation_config.json", model / "tokenizer_config.json"],
             "zip": (ROOT / "tests/data/torch_files").glob("state-*.pt")}
    for target, paths in files.items():
        for path in paths:
            shutil.copyfile(path, out / target / "-".join(path.relative_to(ROOT).parts))


def rank_step():
    """A step of two tokens, whose page table replaces an empty one (engine/ranks/step_message.cc)."""
    array = lambda kind, *values: struct.pack(f"<Q{len(values)}{kind}", len(values), *values)
    table = struct.pack("<ii", -1, 2) + struct.pack("<Qii", 1, 0, 2) + array("i", 3, 4)
    return (struct.pack("<QBQQQ", 1, 0, 0, 5, 0) + array("i", 7, 8) + array("i", 0, 1) +
            array("i", 0, 0) + array("B") + array("B") + struct.pack("<iQ", 1, 1) + table +
            6 * array("i") + struct.pack("<BB", 0, 0) + array("i", 1) + struct.pack("<QIIQ", 0, 1, 0, 0))


def write(out):
    for target in (HERE / "targets").glob("*_fuzz.cc"):
        (out / target.stem.removesuffix("_fuzz")).mkdir(parents=True, exist_ok=True)
    test_files(out)
    server_options(out)
    make_model_seeds.write(ROOT / "tests/golden", out)
    make_server_seeds.write(out)
    for i, tokenizer in enumerate(tokenizers()):
        (out / f"tokenizer_json/{i}.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    for kind in (1, 2):
        model = sentence_piece(kind)
        (out / f"sentence_piece/{kind}.model").write_bytes(model)
        dictionary = "\u2581 5\ne 4\nt 3\n\u2581text 2\n"
        (out / f"sentence_piece/{kind}-fairseq").write_bytes(
            model + b"\n\n\n" + dictionary.encode())
    ranks = [bytes([b]) for b in range(256)] + [b"te", b"xt", b"text"]
    (out / "vocabulary/tiktoken").write_bytes(
        b"".join(base64.b64encode(r) + f" {i}\n".encode() for i, r in enumerate(ranks)))
    (out / "dictionary/words").write_bytes("te@@ 5\nxt 4\nü 1\n".encode())
    (out / "dictionary/codes").write_bytes(
        "te@@ 5\nxt 4\n".encode() + b"\n\n\n#version: 0.2\nt e\nx t</w>\n")
    letters = {chr(c): c - 33 for c in range(33, 127)}
    letters.update({"\u0120": 94, "te": 95, "xt": 96})
    (out / "vocabulary/merges").write_bytes(
        json.dumps(letters).encode() + b"\n\n\n#version: 0.2\nt e\nx t\n")
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
                         "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
                         "__metadata__": {"format": "pt"}})
    (out / "safetensors/header").write_bytes(struct.pack("<H", 32) + header.encode())
    for path in sorted((ROOT / "tests/data/torch_files").glob("*.pt")):
        if not zipfile.is_zipfile(path) or path.stem.startswith("no-crc"):
            continue
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith("data.pkl"):
                    (out / "pickle" / path.stem).write_bytes(archive.read(name))
    text = lambda t: struct.pack("<I", len(t)) + t
    (out / "rank_messages/report").write_bytes(
        b"\1" + struct.pack("<I", 0) + text(b"") + text(b"host") + struct.pack("<I", 1) +
        text(b"version") + text(b"1"))
    (out / "rank_messages/step").write_bytes(b"\0" + rank_step())
    (out / "rank_messages/greeting").write_bytes(b"\2" + bytes(4 * 4 + 64 + 32 + 32))
    (out / "rank_messages/addresses").write_bytes(b"\2" + b"10.0.0.1 5\n")
    for target in ("pickle", "torch"):
        (out / target / "state").write_bytes(state_dict())


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
