"""Writes small checkpoints that say what a script tells: which token follows depends on the position
alone. So a test decides every token of an answer, and the length of the prompt chooses the answer."""

import json

import numpy as np

SPECIAL = ["<unk>", "<s>", "</s>"]
END = 2


def byte_characters():
    """Returns the character by which byte-level vocabularies spell each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


CHARACTERS = byte_characters()


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array, np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


class ScriptedModel:
    """`script` maps positions to pieces of text: the token behind position p is script[p]. All others
    are followed by the end. `added` has (text, is_special) of further tokens that pieces may name."""

    def __init__(self, folder, script, positions, template, added=(), ends=("</s>",)):
        tokens = {text: i for i, text in enumerate(SPECIAL)}
        special = [(text, True) for text in SPECIAL] + list(added)
        for text, _ in added:
            tokens[text] = len(tokens)
        named = set(tokens)
        for byte in range(256):
            tokens.setdefault(CHARACTERS[byte], len(tokens))

        def id_of(piece):
            if piece in named:
                return tokens[piece]
            spelled = "".join(CHARACTERS[byte] for byte in piece.encode())
            return tokens.setdefault(spelled, len(tokens))

        self.id_of = id_of
        ids = {position: id_of(piece) for position, piece in script.items()}
        self._write_texts(folder, tokens, special, template, [tokens[end] for end in ends], positions)
        head = np.zeros((len(tokens), positions), np.float32)
        for position in range(positions):
            head[ids.get(position, END), position] = 2.0
        weights = {"embed.weight": np.zeros((len(tokens), positions)),
                   "embed_position.weight": np.eye(positions), "norm.weight": np.ones(positions),
                   "head.weight": head, "blocks.0.attention.o.weight": np.zeros((positions, 8)),
                   "blocks.0.feed_forward.router.weight": np.ones((2, positions))}
        for name in "qkv":
            weights[f"blocks.0.attention.{name}.weight"] = np.zeros((8, positions))
        for block in ("attention", "feed_forward"):
            weights[f"blocks.0.{block}.norm.weight"] = np.ones(positions)
        for expert in range(2):
            for name, shape in (("gate", (8, positions)), ("up", (8, positions)),
                                ("down", (positions, 8))):
                weights[f"blocks.0.feed_forward.experts.{expert}.{name}.weight"] = np.zeros(shape)
        write_safetensors(folder / "model.safetensors", weights)

    @staticmethod
    def _write_texts(folder, tokens, special, template, ends, positions):
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                 "use_regex": True}
        (folder / "tokenizer.json").write_text(json.dumps({
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
            "added_tokens": [{"id": tokens[text], "content": text, "single_word": False,
                              "lstrip": False, "rstrip": False, "normalized": False,
                              "special": is_special} for text, is_special in special],
            "pre_tokenizer": level, "post_processor": None, "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None,
                      "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                      "vocab": tokens, "merges": []}}))
        (folder / "tokenizer_config.json").write_text(json.dumps({
            "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": template}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        (folder / "config.json").write_text(json.dumps({
            "model_type": "routed_decoder", "format_version": 1, "vocab_size": len(tokens),
            "hidden_size": positions, "num_hidden_layers": 1, "max_position_embeddings": positions,
            "bos_token_id": 1, "eos_token_id": END, "norm": {"kind": "rms"},
            "position": {"kind": "learned"},
            "attention": {"kind": "dense", "num_heads": 1, "head_dim": 8},
            "feed_forward": {"kind": "routed", "expert": {"form": "gated", "activation": "silu"},
                             "routing": {"num_experts": 2, "widths": 8, "score": {"kind": "dot"},
                                         "select": {"kind": "top_k", "k": 1}}}}))
