"""Small random encoders, and decoders with a pooling, that cross the settings of the format."""

import json
from typing import Any

import torch

import safetensors_io
import tiny_models
from routed_decoder import Json
from tiny_models import GATED, VOCAB, _dense_attention, _moa, _moe, _plain, _top_k, _top_p


def _model(hidden: int, layers: int, attention: Any, feed_forward: Any, **more: Any) -> Json:
    return {"model_type": "routed_encoder", "format_version": 2, "vocab_size": VOCAB,
            "hidden_size": hidden, "num_hidden_layers": layers, "max_position_embeddings": 160,
            "bos_token_id": None, "eos_token_id": 0, "attention": attention,
            "feed_forward": feed_forward, **more}


def _dense(width: int, expert: Json | None = None) -> Json:
    return {"kind": "dense", "expert": expert or GATED, "width": width}


_LAYER_POST = {"kind": "layer", "placement": "post"}
_MASKED_LM = {"kind": "masked_lm", "layer": {"activation": "gelu", "norm": True}}

ENCODERS: dict[str, Json] = {
    # X-MoE's masked language model: a layer of residual experts without attention in the middle.
    "tiny-encoder-xmoe": _model(
        32, 3, [_dense_attention(4, 8, bias=True, out_bias=True), {"kind": "none"},
                _dense_attention(4, 8, bias=True, out_bias=True)],
        [_dense(48, _plain("gelu", bias=True)),
         _moe(6, 16, _top_k(1), expert=_plain("relu", bias=True, sublayer="residual", depth=3),
              norm_placement="none", score={"kind": "cosine", "dim": 4, "temperature": "divide"}),
         _dense(48, _plain("gelu", bias=True))],
        norm=_LAYER_POST, position={"kind": "learned"}, embedding_norm=True,
        tie_word_embeddings=True, head_bias=True, head=_MASKED_LM),
    # MoA's masked language model.
    "tiny-encoder-moa": _model(
        48, 2, _moa(6, 16, _top_k(3), routing={"renormalize": True}),
        _dense(64, _plain("relu", bias=True)), norm=_LAYER_POST, position={"kind": "learned"},
        head={"kind": "masked_lm", "layer": {"activation": "tanh", "bias": False}}),
    # nomic-embed-text-v2-moe: every second layer routed, raw weights, one bias of all experts.
    "tiny-encoder-nomic": _model(
        32, 3, _dense_attention(4, 8, bias=True, out_bias=True),
        [_dense(48, _plain("gelu", bias=True)),
         {**_moe(4, 24, _top_k(2), expert=_plain("gelu")), "out_bias": True},
         _dense(48, _plain("gelu", bias=True))],
        norm=_LAYER_POST, token_types=2, embedding_norm=True, head={"kind": "none"},
        pooling={"kind": "mean", "normalize": True}),
    # ModernBERT: windows of both sides, norms without bias, no norm before the first block.
    "tiny-encoder-windows": _model(
        32, 4, [_dense_attention(4, 8, **more) for more in (
            {"norm_placement": "none"},
            {"window": 5, "position": {"kind": "rope", "theta": 300}},
            {"window": 1, "position": {"kind": "rope", "theta": 300}}, {"causal": True})],
        _dense(40, {"form": "gated", "activation": "gelu"}),
        norm={"kind": "layer", "bias": False, "outer_eps": 0.03}, embedding_norm=True,
        position={"kind": "rope", "theta": 4000},
        head={"kind": "sequence_classification", "labels": ["no", "perhaps", "yes"],
              "layer": {"activation": "gelu", "norm": True, "bias": False}},
        pooling={"kind": "cls"}),
    # T5's encoder, with dense modules behind the pooling.
    "tiny-encoder-relative-bias": _model(
        32, 2, _dense_attention(4, 8, scale=1.0),
        _dense(48, {"form": "gated", "activation": "gelu_tanh"}), position={"kind": "none"},
        relative_bias={"buckets": 8, "max_distance": 20, "bidirectional": True},
        head={"kind": "none"},
        pooling={"kind": "max", "normalize": True, "dense": [
            {"width": 40, "activation": "tanh"}, {"width": 24, "bias": False}]}),
    # MH-MoE and HMoE in an encoder, with sinks as in privacy-filter.
    "tiny-encoder-split": _model(
        48, 2, _dense_attention(4, 12, num_kv_heads=2, sinks=True, window=9),
        _moe(6, [8, 24, 16, 40, 12, 20], _top_p(0.6), split={"heads": 4}),
        position={"kind": "rope", "theta": 500, "pairing": "interleaved"},
        head={"kind": "token_classification", "labels": ["O", "B-a", "I-a", "E-a", "S-a"]}),
    "tiny-encoder-spans": _model(
        32, 2, _moa(4, 8, _top_p(0.7), routing={"score": {"kind": "cosine", "dim": 4}}, window=12),
        _moe(4, 16, _top_k(2), gate="sigmoid"),
        position={"kind": "sinusoidal", "spacing": "half"}, embedding_scale=5.0,
        head={"kind": "spans", "labels": ["start", "end"], "bias": False}),
    # A decoder that also makes vectors of texts.
    "tiny-decoder-pooling": {**_model(
        32, 2, _dense_attention(4, 8, num_kv_heads=2), _moe(5, 24, _top_k(2)),
        head={"kind": "language_model"}, pooling={"kind": "last", "normalize": True}),
        "model_type": "routed_decoder"},
}

# Lengths of the texts.
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 150)


class _Builder(tiny_models._Builder):
    def build(self) -> dict[str, torch.Tensor]:
        config = self.config
        vocabulary = config["head"]["kind"] in ("masked_lm", "language_model")
        tied = config["tie_word_embeddings"]
        super().build()
        d = config["hidden_size"]
        if not vocabulary:
            del self.tensors["head.weight"]
        if config["head_bias"]:
            self._draw("head.bias", config["vocab_size"], std=0.2)
        if config["token_types"] > 0:
            self._draw("embed_type.weight", config["token_types"], d, std=0.3)
        if config["embedding_norm"]:
            self._norm("embed_norm", d)
        for layer, attention in enumerate(config["attention"]):
            if attention.get("sinks", False):
                self._draw(f"blocks.{layer}.attention.sinks", attention["num_heads"], std=1.0)
        for layer, feed_forward in enumerate(config["feed_forward"]):
            if feed_forward["out_bias"]:
                self._draw(f"blocks.{layer}.feed_forward.out_bias", d, std=0.2)
        self._head(config, d)
        if tied:
            self.tensors["embed.weight"] *= 2.0
        return self.tensors

    def _head(self, config: Json, d: int) -> None:
        layer = config["head"].get("layer")
        if layer is not None:
            self._linear("head.layer", d, d, layer.get("bias", True))
            if layer.get("norm", False):
                self._norm("head.layer_norm", d)
        labels = config["head"].get("labels", [])
        if labels:
            self._linear("classifier", len(labels), d, config["head"].get("bias", True))
        for i, dense in enumerate(config.get("pooling", {}).get("dense", [])):
            self._linear(f"pooling.dense.{i}", dense["width"], d, dense.get("bias", True))
            d = dense["width"]


def encoder_tensors(name: str) -> tuple[Json, dict[str, torch.Tensor]]:
    """Configuration and stored tensors of one encoder."""
    number = list(ENCODERS).index(name)
    tensors = _Builder(ENCODERS[name], seed=4000 + number).build()
    file_type = tiny_models.FILE_TYPES[number % len(tiny_models.FILE_TYPES)]
    return ENCODERS[name], {key: tiny_models._stored(key, value, index, file_type)
                            for index, (key, value) in enumerate(sorted(tensors.items()))}


def folder_files(name: str) -> dict[str, bytes]:
    """Every file of the checkpoint folder."""
    config, tensors = encoder_tensors(name)
    return {"config.json": (json.dumps(config, indent=1) + "\n").encode(),
            "model.safetensors": safetensors_io.to_bytes(tensors, {"format": "pt"})}
