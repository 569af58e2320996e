"""Small random encoder-decoders that cross the settings of the format."""

import json
from typing import Any

import torch

import safetensors_io
import tiny_models
from routed_decoder import Json
from tiny_models import GATED, VOCAB, _dense_attention, _moa, _moe, _plain, _top_k, _top_p


def _stack(layers: int, attention: Any, feed_forward: Any, **more: Any) -> Json:
    return {"num_hidden_layers": layers, "max_position_embeddings": 160, "attention": attention,
            "feed_forward": feed_forward, **more}


def _pair(hidden: int, encoder: Json, decoder: Json, **more: Any) -> Json:
    return {"model_type": "routed_encoder_decoder", "format_version": 2, "vocab_size": VOCAB,
            "hidden_size": hidden, "bos_token_id": None, "eos_token_id": 2,
            "decoder_start_token_id": 3, "encoder": encoder, "decoder": decoder, **more}


def _dense(width: int, expert: Json | None = None) -> Json:
    return {"kind": "dense", "expert": expert or GATED, "width": width}


_POST = {"kind": "layer", "placement": "post"}
_RELU = _plain("relu", bias=True)

PAIRS: dict[str, Json] = {
    # MoA's translator: routed attention of all three kinds, fairseq's positions.
    "tiny-pair-moa": _pair(
        32, _stack(2, _moa(5, 8, _top_k(2), routing={"renormalize": True}), _dense(48, _RELU),
                   norm=_POST, position={"kind": "sinusoidal", "first": 2}, embedding_scale=5.656854),
        _stack(2, _moa(5, 8, _top_k(2), routing={"renormalize": True}), _dense(48, _RELU),
               cross_attention=_moa(4, 8, _top_k(2), routing={"renormalize": True}), norm=_POST,
               position={"kind": "sinusoidal", "first": 2}, embedding_scale=5.656854),
        tie_word_embeddings=True),
    # X-MoE's translator: routed feed-forward with cosine scores in both stacks.
    "tiny-pair-xmoe": _pair(
        32, _stack(2, _dense_attention(4, 8, bias=True, out_bias=True),
                   _moe(5, 16, _top_k(1), expert=_RELU,
                        score={"kind": "cosine", "dim": 4, "temperature": "divide"}),
                   norm={"kind": "layer"}, position={"kind": "learned"}, embedding_norm=True),
        _stack(3, _dense_attention(4, 8, bias=True, out_bias=True),
               [_dense(40, _RELU),
                _moe(5, 16, _top_k(1), expert=_RELU,
                     score={"kind": "cosine", "dim": 4, "temperature": "divide"}),
                _dense(40, _RELU)],
               cross_attention=_dense_attention(4, 8, bias=True, out_bias=True),
               norm={"kind": "layer"}, position={"kind": "learned"}, embedding_norm=True)),
    # T5: biases of relative positions, outputs scaled before the tied head.
    "tiny-pair-t5": _pair(
        32, _stack(2, _dense_attention(4, 8, scale=1.0), _dense(40, _plain("relu")),
                   position={"kind": "none"},
                   relative_bias={"buckets": 8, "max_distance": 20, "bidirectional": True}),
        _stack(2, _dense_attention(4, 8, scale=1.0), _dense(40, _plain("relu")),
               cross_attention=_dense_attention(4, 8, scale=1.0), position={"kind": "none"},
               relative_bias={"buckets": 8, "max_distance": 20}),
        tie_word_embeddings=True, output_scale=32 ** -0.5),
    # A crossing: unequal experts with top-p, sub-tokens, rotary positions, two tables of tokens.
    "tiny-pair-crossing": _pair(
        48, _stack(1, _dense_attention(4, 12, num_kv_heads=2, window=9, sinks=True),
                   _moe(6, [8, 24, 16, 40, 12, 20], _top_p(0.6), split={"heads": 4}),
                   position={"kind": "rope", "theta": 500, "pairing": "interleaved"}),
        _stack(2, _dense_attention(4, 12, num_kv_heads=1, qk_norm="head"),
               _moe(4, [12, 20, 28, 36], _top_p(0.7), gate="sigmoid"),
               cross_attention=[
                   _moa(5, 8, _top_p(0.6), routing={"score": {"kind": "cosine", "dim": 4}},
                        num_kv_heads=2),
                   _dense_attention(6, 8, num_kv_heads=3, group_order="tile", gate=True,
                                    inner_norm=True, qk_norm="full", soft_cap=5.0)],
               position={"kind": "rope", "theta": 800}),
        share_embeddings=False, head_bias=True),
}

# Lengths of the sources, and of the beginnings of the decoder's texts.
LENGTHS = ((1, 1), (5, 1), (16, 3), (40, 1), (120, 30))


class _Stack(tiny_models._Builder):
    """Draws the tensors of one stack, without heads."""

    def build(self) -> dict[str, torch.Tensor]:
        super().build()
        config, d = self.config, self.config["hidden_size"]
        self.tensors.pop("head.weight", None)
        if config["embedding_norm"]:
            self._norm("embed_norm", d)
        for layer, attention in enumerate(config["attention"]):
            if attention.get("sinks", False):
                self._draw(f"blocks.{layer}.attention.sinks", attention["num_heads"], std=1.0)
        for layer, attention in enumerate(config.get("cross_attention", [])):
            name = f"blocks.{layer}.cross_attention"
            self._attention(name, attention, d)
            width = attention.get("num_heads", 0) * attention["head_dim"]
            if attention.get("gate", False):
                self._linear(f"{name}.gate", width, d, False)
            if attention.get("inner_norm", False):
                self._norm(f"{name}.inner_norm", width)
        return self.tensors


def pair_tensors(name: str) -> tuple[Json, dict[str, torch.Tensor]]:
    """Configuration and stored tensors of one encoder-decoder."""
    number = list(PAIRS).index(name)
    config = PAIRS[name]
    common = {key: value for key, value in config.items() if key not in ("encoder", "decoder")}
    tensors: dict[str, torch.Tensor] = {}
    for i, (stack, kind) in enumerate((("encoder", "routed_encoder"),
                                       ("decoder", "routed_decoder"))):
        stack_config = {**common, **config[stack], "model_type": kind}
        built = _Stack(stack_config, seed=5000 + 10 * number + i).build()
        shared = config.get("share_embeddings", True)
        for key, value in built.items():
            own = shared and key == "embed.weight"
            tensors[key if own else f"{stack}.{key}"] = value
    generator = torch.Generator().manual_seed(5500 + number)
    d, vocab = config["hidden_size"], config["vocab_size"]
    if not config.get("tie_word_embeddings", False):
        tensors["head.weight"] = torch.randn(vocab, d, generator=generator) * 0.5 * d ** -0.5
    if config.get("head_bias", False):
        tensors["head.bias"] = torch.randn(vocab, generator=generator) * 0.1
    file_type = tiny_models.FILE_TYPES[number % len(tiny_models.FILE_TYPES)]
    return config, {key: tiny_models._stored(key, value, index, file_type)
                    for index, (key, value) in enumerate(sorted(tensors.items()))}


def folder_files(name: str) -> dict[str, bytes]:
    """Every file of the checkpoint folder."""
    config, tensors = pair_tensors(name)
    return {"config.json": (json.dumps(config, indent=1) + "\n").encode(),
            "model.safetensors": safetensors_io.to_bytes(tensors, {"format": "pt"})}
