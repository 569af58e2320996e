"""Small random checkpoints that cross the settings of the native format.

Weights are spread so that routing differs from row to row and logits are far from flat.
"""

import json
import pathlib
from typing import Any

import torch

import routed_decoder
import safetensors_io

Json = dict[str, Any]

VOCAB = 320
GATED = {"form": "gated", "activation": "silu"}


def _model(hidden: int, layers: int, attention: Any, feed_forward: Any, **more: Any) -> Json:
    return {"model_type": "routed_decoder", "format_version": 1, "vocab_size": VOCAB,
            "hidden_size": hidden, "num_hidden_layers": layers, "max_position_embeddings": 160,
            "bos_token_id": None, "eos_token_id": 0, "attention": attention,
            "feed_forward": feed_forward, **more}


def _dense_attention(heads: int, head_dim: int, **more: Any) -> Json:
    return {"kind": "dense", "num_heads": heads, "head_dim": head_dim, **more}


def _moa(experts: int, head_dim: int, select: Json, **more: Any) -> Json:
    routing = {"num_experts": experts, "select": select, **more.pop("routing", {})}
    return {"kind": "routed", "head_dim": head_dim, "routing": routing, **more}


def _moe(experts: int, widths: Any, select: Json, expert: Json | None = None,
         **more: Any) -> Json:
    outer = {key: more.pop(key) for key in (
        "shared_width", "shared_gate", "shared_norms", "shared_limit", "late_experts",
        "norm_placement", "residual_scale", "parallel") if key in more}
    return {"kind": "routed", "expert": expert or GATED, **outer,
            "routing": {"num_experts": experts, "widths": widths, "select": select, **more}}


def _top_k(k: int) -> Json:
    return {"kind": "top_k", "k": k}


def _top_p(p: float, **more: Any) -> Json:
    return {"kind": "top_p", "p": p, **more}


def _plain(activation: str, **more: Any) -> Json:
    return {"form": "plain", "activation": activation, **more}


TINY: dict[str, Json] = {
    "tiny-moa-cosine-top-p": _model(
        48, 2, _moa(6, 16, _top_p(0.55), routing={
            "score": {"kind": "cosine", "dim": 4, "temperature": "divide"}, "renormalize": True}),
        {"kind": "dense", "expert": GATED, "width": 64}),
    "tiny-split-unequal-sigmoid": _model(
        48, 2, _dense_attention(4, 12),
        _moe(6, [8, 24, 16, 40, 12, 20], _top_k(2), split={"heads": 4}, gate="sigmoid",
             score={"kind": "dot", "bias": True})),
    "tiny-post-norm-sinusoidal": _model(
        32, 3, _dense_attention(2, 16, bias=True),
        _moe(4, 32, _top_k(1), expert=_plain("relu", bias=True)),
        norm={"kind": "layer", "eps": 1e-6, "placement": "post"}, position={"kind": "sinusoidal"},
        embedding_scale=5.656854249492381),
    "tiny-shared-gate": _model(
        32, 2, _dense_attention(4, 8, num_kv_heads=2),
        _moe(5, 24, _top_k(2), shared_width=40, shared_gate=True, renormalize=True)),
    "tiny-tile-order": _model(
        32, 2, _dense_attention(6, 8, num_kv_heads=3, group_order="tile"),
        _moe(4, 16, _top_k(2), expert={"form": "gated", "activation": "gelu"})),
    "tiny-window-interleaved-rope": _model(
        64, 2, _dense_attention(4, 16, num_kv_heads=2, window=11, out_bias=True),
        _moe(8, 32, _top_k(3), renormalize=True),
        position={"kind": "rope", "theta": 500, "pairing": "interleaved", "fraction": 0.5}),
    "tiny-learned-layer-norm": _model(
        32, 3, _dense_attention(4, 8, bias=True, out_bias=True),
        {"kind": "dense", "expert": _plain("gelu", bias=True), "width": 48},
        norm={"kind": "layer", "eps": 1e-5, "placement": "pre"}, position={"kind": "learned"}),
    "tiny-softmax-selected": _model(
        32, 2, _dense_attention(2, 16, scale=0.4),
        _moe(7, 20, _top_k(3), gate="softmax_selected", scale=1.75,
             expert={"form": "gated", "activation": "gelu_tanh", "bias": True})),
    "tiny-sigmoid-top-p": _model(
        32, 2, _dense_attention(4, 8),
        _moe(6, 24, _top_p(1.3, compare="gt", max=4), gate="sigmoid", renormalize=True),
        position={"kind": "none"}),
    "tiny-split-columns-residual": _model(
        48, 2, _dense_attention(3, 16),
        _moe(9, 12, _top_k(2), split={"heads": 3, "projection": False, "residual": True}),
        embedding_scale=0.3, tie_word_embeddings=True),
    "tiny-residual-log-scale": _model(
        32, 2, _dense_attention(4, 8),
        _moe(5, [6, 10, 14, 18, 30], _top_k(2), split={"heads": 1, "residual": True},
             score={"kind": "cosine", "dim": 6, "bias": True, "normalize_row": False,
                    "temperature": "log_scale"})),
    "tiny-qk-norm-head": _model(
        32, 2, _dense_attention(4, 12, num_kv_heads=2, qk_norm="head"),
        _moe(4, 20, _top_k(2), expert={**GATED, "inner_norm": True})),
    "tiny-qk-norm-full": _model(
        32, 2, _dense_attention(4, 8, num_kv_heads=1, qk_norm="full", window=1),
        _moe(4, 20, _top_k(2), expert=_plain("gelu_tanh", inner_norm=True, bias=True),
             shared_width=12),
        norm={"kind": "layer"}),
    "tiny-moa-groups-split-cosine": _model(
        64, 2, _moa(5, 8, _top_k(2), num_kv_heads=2, bias=True, out_bias=True, window=40,
                    routing={"renormalize": True, "score": {"kind": "dot", "bias": True}}),
        _moe(10, [8, 16, 8, 24, 12, 8, 20, 16, 8, 40], _top_p(0.45, compare="gt"),
             split={"heads": 2, "bias": False, "residual": True},
             score={"kind": "cosine", "dim": 8, "normalize_expert": False,
                    "temperature": "divide"})),
    "tiny-scales": _model(
        32, 3, _moa(4, 16, _top_k(2), scale=0.2, routing={"gate": "sigmoid", "scale": 0.7}),
        _moe(4, 24, _top_p(0.6, max=3), renormalize=True, scale=0.8),
        embedding_scale=0.25, residual_scale=0.6, logit_scale=0.25, tie_word_embeddings=True),
    "tiny-layer-lists": _model(
        32, 3,
        [_dense_attention(4, 8, num_kv_heads=2), _moa(6, 8, _top_k(3)),
         _dense_attention(2, 20, window=7, qk_norm="head")],
        [{"kind": "dense", "expert": _plain("relu"), "width": 40},
         _moe(6, 16, _top_k(2), score={"kind": "cosine", "dim": 3}),
         _moe(12, [4 * (i + 1) for i in range(12)], _top_p(0.5), split={"heads": 2})]),
    # Router weights of 0 give equal scores: the running sum meets p exactly, ties go by index.
    "tiny-exact-tie": _model(
        32, 2, _dense_attention(4, 8), _moe(8, 16, _top_p(0.5), renormalize=False)),
    # More experts than one vector of the router's sum, and widths that are no multiple of 8.
    "tiny-many-experts": _model(
        32, 2, _dense_attention(2, 16),
        _moe(300, [1 + i % 5 for i in range(300)], _top_k(6), renormalize=True)),
    # The first layer takes its experts from a table, the second one from groups, by biased values.
    "tiny-sqrt-softplus": _model(
        32, 2, _dense_attention(4, 8, num_kv_heads=2),
        [_moe(8, 16, {"kind": "table", "k": 3}, gate="sqrt_softplus", renormalize=True, scale=1.5),
         _moe(8, 16, {"kind": "top_k", "k": 2, "bias": True, "groups": 4, "best_groups": 2,
                      "group_score": "sum_of_two"}, gate="sqrt_softplus", scale=0.5)]),
    "tiny-router-norm": _model(
        32, 2, _moa(5, 8, _top_k(2), num_kv_heads=2, routing={
            "score": {"kind": "dot", "norm": "rms_weight", "row_scale": 0.7, "bias": True},
            "renormalize": True, "expert_scale": True}),
        [_moe(6, 12, {"kind": "table", "k": 2}, split={"heads": 2}, expert_scale=True,
              score={"kind": "cosine", "dim": 4, "norm": "rms", "temperature": "divide"}),
         _moe(6, 12, _top_p(0.6), split={"heads": 4}, expert_scale=True, renormalize=True,
              score={"kind": "dot", "norm": "rms", "row_scale": 1.5})]),
    "tiny-deep-experts": _model(
        32, 2, _dense_attention(4, 8),
        _moe(5, [20, 8, 24, 12, 16], _top_k(2), shared_width=12, renormalize=True,
             expert=_plain("relu", bias=True, sublayer="residual", depth=3),
             score={"kind": "cosine", "dim": 4, "temperature": "divide"}),
        norm={"kind": "layer"}),
    "tiny-null-experts": _model(
        48, 2, _dense_attention(4, 12),
        _moe(5, [8, 24, 16, 12, 20], _top_p(0.6, max=4), split={"heads": 3},
             null_experts={"zero": 2, "copy": 1, "constant": 2, "replaced": [1, 4]})),
    "tiny-latent-experts": _model(
        48, 2, _dense_attention(4, 12),
        [_moe(6, 20, _top_k(2), latent_width=20, null_experts={"copy": 2}, renormalize=True,
              shared_width=16, score={"kind": "dot", "bias": True}),
         _moe(4, [12, 8, 16, 24], _top_k(2), split={"heads": 2, "depth": 2,
                                                    "merge_projection": False},
              latent_width=36, expert={**GATED, "sublayer": "residual"})]),
    # A base so small that the factors of a text's tokens differ by orders of magnitude.
    "tiny-xpos": _model(
        32, 2, [_dense_attention(4, 8, num_kv_heads=2, qk_norm="head"), _moa(4, 8, _top_k(2))],
        _moe(4, 16, _top_k(2), renormalize=True),
        position={"kind": "rope", "pairing": "interleaved", "xpos_base": 16}),
    "tiny-relative-bias": _model(
        32, 2, [_dense_attention(4, 8, num_kv_heads=2, window=60),
                _dense_attention(4, 16, bias=True)],
        _moe(5, 16, _top_k(2), renormalize=True), position={"kind": "none"},
        relative_bias={"buckets": 32, "max_distance": 50, "bidirectional": True}),
    "tiny-post-norm-final": _model(
        32, 3, _dense_attention(4, 8), _moe(4, 16, _top_k(2), expert=_plain("gelu", bias=True)),
        norm={"kind": "layer", "eps": 1e-6, "final_eps": 1e-4, "placement": "post", "final": True},
        residual_scale=0.64),
    "tiny-qkv-clip": _model(
        32, 2, [_dense_attention(4, 8, num_kv_heads=2, bias=True, qkv_clip=0.7),
                _dense_attention(4, 8, num_kv_heads=1, qk_norm="full", qkv_clip=0.9)],
        _moe(4, 16, _top_k(2))),
    "tiny-short-convolution": _model(
        48, 4,
        [{"kind": "short_conv"}, _moa(4, 12, _top_k(2), routing={"renormalize": True}),
         {"kind": "short_conv", "conv": 4, "bias": True},
         _dense_attention(4, 12, num_kv_heads=2, qk_norm="head")],
        _moe(6, [8, 24, 16, 40, 12, 20], _top_k(2), split={"heads": 2}, gate="sigmoid")),
    # Every placement of norms, parallel blocks, and a dense branch beside the experts (Gemma 4).
    "tiny-residual-forms": _model(
        32, 3,
        [_dense_attention(4, 8, num_kv_heads=2, norm_placement="output"),
         _moa(4, 16, _top_k(2), norm_placement="both", residual_scale=0.8,
              routing={"score": {"kind": "dot", "stream": True}}),
         _dense_attention(4, 8, norm_placement="output")],
        [_moe(5, [20, 8, 24, 12, 16], _top_k(2), norm_placement="both", shared_width=24,
              shared_gate=True, shared_norms=True, expert_scale=True, renormalize=True,
              score={"kind": "dot", "stream": True, "norm": "rms_weight", "row_scale": 0.6}),
         _moe(4, 16, _top_p(0.6), parallel=True, residual_scale=1.25, split={"heads": 2},
              norm_placement="pre"),
         _moe(4, 16, _top_k(2), parallel=True, norm_placement="output", shared_width=12)]),
    # The projections of MH-MoE around tokens that are not split: table 6 of the paper.
    "tiny-projections": _model(
        32, 4, _dense_attention(4, 8, num_kv_heads=2),
        [_moe(4, 16, _top_k(2), split={"heads": 1, "projection": True}, renormalize=True),
         _moe(4, 12, _top_p(0.6), split={"heads": 1, "projection": True, "bias": False,
                                         "merge_projection": False, "residual": True}),
         _moe(5, [8, 20, 12, 16, 24], _top_k(2),
              split={"heads": 1, "merge_projection": True, "depth": 2}),
         _moe(4, 16, _top_k(2), split={"heads": 1, "projection": True}, latent_width=20,
              shared_width=12, score={"kind": "dot", "stream": True})]),
    "tiny-delta": _model(
        48, 4,
        [{"kind": "delta", "num_heads": 4, "num_key_heads": 2, "key_dim": 12, "value_dim": 20},
         _moa(4, 12, _top_k(2), routing={"renormalize": True}),
         {"kind": "delta", "num_heads": 3, "key_dim": 16, "value_dim": 8, "decay": "channel",
          "decay_form": "bounded", "decay_bound": -3.0, "gate_activation": "sigmoid", "conv": 2},
         {"kind": "delta", "num_heads": 2, "key_dim": 20, "value_dim": 36, "decay": "channel",
          "decay_rank": 10, "gate_rank": 14}],
        _moe(6, [8, 24, 16, 40, 12, 20], _top_k(2), split={"heads": 2}, gate="sigmoid")),
    # Layers of one block, as in Nemotron-H, beside ordinary ones.
    "tiny-state-space": _model(
        32, 5,
        [{"kind": "ssm", "num_heads": 4, "head_dim": 12, "state_dim": 20, "groups": 2},
         {"kind": "none"},
         _dense_attention(4, 8, num_kv_heads=2, gate=True, gate_per_head=True, gate_bias=True,
                          gate_activation="softplus2"),
         {"kind": "ssm", "num_heads": 3, "head_dim": 16, "state_dim": 8, "conv": 3,
          "conv_bias": False, "bias": True, "step_low": 0.1, "step_high": 1.5},
         {"kind": "ssm", "num_heads": 2, "head_dim": 40, "state_dim": 24}],
        [{"kind": "none"},
         _moe(5, 16, _top_k(2), renormalize=True, expert=_plain("relu2"), shared_width=12),
         {"kind": "none"},
         _moe(4, 12, _top_p(0.6)), _moe(5, [8, 20, 12, 16, 24], _top_k(2))]),
    # What is special in Gemma 4: values and rotation of whole heads, widths of each layer, factors.
    "tiny-value-forms": _model(
        32, 3,
        [_dense_attention(4, 8, num_kv_heads=2, value_norm=True, qk_norm="head", scale=1.0),
         _dense_attention(4, 16, num_kv_heads=1, value_norm=True, value_from_key=True, gate=True,
                          qk_norm="head", position={"kind": "rope", "fraction": 0.25, "theta": 100,
                                                    "span": "head", "frequencies": "head"}),
         _dense_attention(4, 12, num_kv_heads=2, value_dim=20, value_scale=0.7, sinks=True,
                          window=9, gate=True, position={"kind": "rope", "fraction": 0.5,
                                                         "span": "head"})],
        _moe(5, [20, 8, 24, 12, 16], _top_k(2), shared_width=24, renormalize=True),
        layer_scale=True),
    # Chunks, growing queries, weights of the experts' inputs, limits after the activation, and
    # experts that join a layer later.
    "tiny-chunks": _model(
        32, 4,
        [_dense_attention(4, 8, num_kv_heads=2, window=10, window_kind="chunk", qk_norm="l2",
                          qk_norm_after_rope=True),
         _dense_attention(4, 8, num_kv_heads=2, position={"kind": "none"},
                          query_scale={"kind": "log", "step": 6, "factor": 0.3, "first": 1}),
         {"kind": "dense", "num_heads": 3, "head_dim": 12, "window": 16, "window_kind": "chunk",
          "query_scale": {"kind": "log", "step": 9, "factor": 0.2},
          "latent": {"rank": 10, "rope_dim": 4, "value_dim": 8, "query_rank": 14, "scale": 1.4}},
         _moa(4, 16, _top_k(2), window=7, window_kind="chunk")],
        [_moe(4, 16, _top_k(2), gate="sigmoid", shared_width=12, weight_input=True),
         _moe(5, 16, _top_k(2), shared_width=20, shared_limit=0.4, late_experts=True,
              residual_scale=0.8, null_experts={"copy": 2},
              expert={**GATED, "activation_limit": 0.3, "limit_after": True}),
         _moe(4, 16, _top_k(2), weight_input=True, split={"heads": 2},
              expert={**GATED, "sublayer": "residual", "depth": 2}),
         _moe(4, 12, _top_p(0.6))],
        position={"kind": "rope", "pairing": "interleaved"}),
    # K2-Horizon: routed values, norms of groups and of heads with weights of their own.
    "tiny-routed-values": _model(
        48, 3,
        [_dense_attention(4, 12, num_kv_heads=2, qk_norm="heads", gate=True,
                          gate_activation="softplus2",
                          value_routing={"num_experts": 6, "gate": "sigmoid", "renormalize": True,
                                         "scale": 1.5,
                                         "select": {"kind": "top_k", "k": 2, "bias": True}}),
         _dense_attention(4, 12, num_kv_heads=1, qk_norm="heads", qk_norm_after_rope=True,
                          value_norm=True, value_dim=8,
                          value_routing={"num_experts": 4, "select": _top_p(0.5)}),
         _dense_attention(4, 12, num_kv_heads=2, qk_norm="heads")],
        _moe(5, 16, _top_k(2), shared_width=16, gate="sigmoid", renormalize=True),
        norm={"kind": "rms", "groups": 4}),
    # Gemma 4 E2B: inputs of each layer, and layers that read the keys and values of others.
    "tiny-layer-inputs": _model(
        32, 4,
        [_dense_attention(4, 8, num_kv_heads=2, qk_norm="head", value_norm=True, window=9,
                          scale=0.15),
         _dense_attention(4, 12, num_kv_heads=1, qk_norm="full", bias=True, scale=0.1),
         _dense_attention(2, 8, num_kv_heads=2, qk_norm="head", window=9, kv_layer=0, gate=True, scale=0.2,
                          qkv_clip=0.8, query_scale={"kind": "log", "step": 6, "factor": 0.3}),
         _dense_attention(3, 12, num_kv_heads=1, qk_norm="full", bias=True, kv_layer=1, scale=0.1,
                          qk_norm_after_rope=True, sinks=True,
                          position={"kind": "rope", "fraction": 0.5, "theta": 500.0})],
        [_moe(4, 12, _top_k(2), renormalize=True),
         *3 * [{"kind": "dense", "width": 24, "expert": {**GATED, "activation": "gelu_tanh"}}]],
        norm={"kind": "rms", "placement": "both"}, layer_scale=True,
        layer_input={"width": 6, "activation": "gelu_tanh", "token_scale": 1.5,
                     "projection_scale": 0.4, "scale": 0.7}),
}

# Small logits: log-probabilities then differ by the rounding of bf16 runs and not by a multiple of
# it, and 2e-2 is a bound for every model.
HEAD_GAIN = 0.15

# Seeds of the weights where the plain one (1000 + number) leads a greedy continuation through a
# near tie, which would end the comparison early.
SEEDS: dict[str, int] = {
    "tiny-split-unequal-sigmoid": 1601, "tiny-window-interleaved-rope": 1205,
    "tiny-learned-layer-norm": 1206, "tiny-qk-norm-head": 1711,
    "tiny-moa-groups-split-cosine": 1213, "tiny-scales": 1514, "tiny-exact-tie": 1116,
    "tiny-sqrt-softplus": 2347, "tiny-router-norm": 2600,
    "tiny-deep-experts": 2818, "tiny-null-experts": 2719, "tiny-latent-experts": 1420,
    "tiny-xpos": 1123, "tiny-post-norm-final": 1125, "tiny-qkv-clip": 13,
    "tiny-short-convolution": 17, "tiny-residual-forms": 1300, "tiny-delta": 42, "tiny-state-space": 52,
    "tiny-chunks": 3, "tiny-routed-values": 9, "tiny-layer-inputs": 2}

# Types of the files, and whether they come in two shards.
FILE_TYPES = ("F32", "BF16", "F16", "mixed")
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class _Builder:
    """Draws every tensor that a configuration asks for."""

    def __init__(self, config: Json, seed: int) -> None:
        self.config = routed_decoder.complete_config(config)
        self.norm_bias = self.config["norm"]["bias"]
        self.tensors: dict[str, torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)

    def _draw(self, name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        self.tensors[name] = torch.randn(shape, generator=self.generator) * std + mean

    def _linear(self, name: str, out: int, width: int, bias: bool, gain: float = 1.0) -> None:
        self._draw(f"{name}.weight", out, width, std=gain * width ** -0.5)
        if bias:
            self._draw(f"{name}.bias", out, std=0.2)

    def _norm(self, name: str, size: int, bias: bool | None = None) -> None:
        self._draw(f"{name}.weight", size, std=0.2, mean=1.0)
        if self.norm_bias if bias is None else bias:
            self._draw(f"{name}.bias", size, std=0.1)

    def build(self) -> dict[str, torch.Tensor]:
        config = self.config
        d, vocab = config["hidden_size"], config["vocab_size"]
        # A tied head would only echo the input token if the embedding led the residual stream.
        tied = config["tie_word_embeddings"]
        self._draw("embed.weight", vocab, d, std=0.05 if tied else 0.5 / config["embedding_scale"])
        if config["position"]["kind"] == "learned":
            self._draw("embed_position.weight", config["max_position_embeddings"], d, std=0.2)
        if "relative_bias" in config:
            self._draw("relative_bias.weight", config["relative_bias"]["buckets"],
                       config["attention"][0]["num_heads"], std=1.5)
        if config["norm"]["final"]:
            self._norm("norm", d)
        for layer in range(config["num_hidden_layers"] if config["layer_scale"] else 0):
            self._draw(f"blocks.{layer}.scale", 1, std=0.1, mean=0.9)
        if "layer_input" in config:
            self._layer_inputs(config["layer_input"]["width"], config["num_hidden_layers"])
        if not config["tie_word_embeddings"]:
            self._linear("head", vocab, d, False, gain=HEAD_GAIN)
        for layer in range(config["num_hidden_layers"]):
            self._attention(f"blocks.{layer}.attention", config["attention"][layer], d)
            self._feed_forward(f"blocks.{layer}.feed_forward", config["feed_forward"][layer], d)
        return self.tensors

    def _layer_inputs(self, width: int, layers: int) -> None:
        d = self.config["hidden_size"]
        self._draw("embed_layers.weight", self.config["vocab_size"], layers * width, std=0.5)
        self._linear("layer_input", layers * width, d, False)
        self._norm("layer_input.norm", width, False)
        for layer in range(layers):
            name = f"blocks.{layer}.input"
            self._linear(f"{name}.gate", width, d, False)
            self._linear(f"{name}.down", d, width, False)
            self._norm(f"{name}.norm", d, False)

    def _router(self, name: str, routing: Json, width: int) -> None:
        score, experts = routing["score"], routed_decoder.all_experts(routing)
        if routing["select"]["kind"] == "table":
            draws = torch.rand(self.config["vocab_size"], experts, generator=self.generator)
            listed = draws.argsort(1)[:, :routing["select"]["k"]]
            self.tensors[f"{name}.table"] = listed.to(torch.int32).contiguous()
        if routing["select"]["bias"]:
            self._draw(f"{name}.choice_bias", experts, std=0.2)
        if score["norm"] == "rms_weight":
            self._norm(f"{name}.norm", width, False)
        if routing["expert_scale"]:
            self._draw(f"{name}.expert_scale", experts, std=0.3, mean=1.0)
        if score["kind"] == "dot":
            self._linear(name, experts, width, score["bias"], gain=1.5)
            return
        self._linear(f"{name}.projection", score["dim"], width, score["bias"])
        self._draw(f"{name}.experts.weight", experts, score["dim"], std=1.0)
        if score["temperature"] != "none":
            start = 0.3 if score["temperature"] == "divide" else 0.7
            self.tensors[f"{name}.temperature"] = torch.tensor([start])

    def _block_norms(self, name: str, placement: str, d: int) -> None:
        if placement not in ("output", "none"):
            self._norm(f"{name}.norm", d)
        if placement in ("output", "both"):
            self._norm(f"{name}.output_norm", d)

    def _attention(self, name: str, attention: Json, d: int) -> None:
        if attention["kind"] == "none":
            return
        self._block_norms(name, attention["norm_placement"], d)
        if attention["kind"] == "delta":
            self._delta(name, attention, d)
            return
        if attention["kind"] == "ssm":
            self._state_space(name, attention, d)
            return
        if attention["kind"] == "short_conv":
            for part in ("b", "c", "x"):
                self._linear(f"{name}.{part}", d, d, attention["bias"])
            self._linear(f"{name}.conv", d, attention["conv"], attention["bias"])
            self._linear(f"{name}.o", d, d, attention["bias"], gain=2.0)
            return
        if "latent" in attention:
            self._latent(name, attention, d)
            return
        head, groups = attention["head_dim"], attention["num_kv_heads"]
        value = attention["value_dim"]
        own_keys = attention.get("kv_layer") is None
        if own_keys:
            self._linear(f"{name}.k", groups * head, d, attention["bias"])
        if "value_routing" in attention:
            self._router(f"{name}.router", attention["value_routing"], d)
            for j in range(attention["value_routing"]["num_experts"]):
                self._linear(f"{name}.experts.{j}.v", groups * value, d, False, gain=1.5)
        elif own_keys and not attention["value_from_key"]:
            self._linear(f"{name}.v", groups * value, d, attention["bias"])
        if attention["kind"] == "dense":
            heads = attention["num_heads"]
            self._linear(f"{name}.q", heads * head, d, attention["bias"])
            self._linear(f"{name}.o", d, heads * value, False)
            if attention["sinks"]:
                self._draw(f"{name}.sinks", heads, std=1.0)
            if attention["gate"]:
                gates = heads if attention["gate_per_head"] else heads * value
                self._linear(f"{name}.gate", gates, d, attention["gate_bias"])
            if attention["qk_norm"] not in ("none", "l2"):
                full = attention["qk_norm"] in ("full", "heads")
                self._norm(f"{name}.q_norm", heads * head if full else head, False)
                if own_keys:
                    self._norm(f"{name}.k_norm", groups * head if full else head, False)
        else:
            routing = attention["routing"]
            self._router(f"{name}.router", routing, d)
            for j in range(routing["num_experts"]):
                self._linear(f"{name}.experts.{j}.q", groups * head, d, False)
                self._linear(f"{name}.experts.{j}.o", d, groups * head, False)
        if attention["out_bias"]:
            self._draw(f"{name}.out_bias", d, std=0.2)

    def _latent(self, name: str, attention: Json, d: int) -> None:
        latent, heads = attention["latent"], attention["num_heads"]
        rank, rope = latent["rank"], latent["rope_dim"]
        query_rank = latent["query_rank"]
        if query_rank > 0:
            self._linear(f"{name}.q_down", query_rank, d, False)
            self._norm(f"{name}.q_norm", query_rank, False)
        self._linear(f"{name}.q", heads * attention["head_dim"], query_rank or d, False)
        self._linear(f"{name}.latent", rank + rope, d, False)
        self._norm(f"{name}.latent_norm", rank, False)
        for head in range(heads):
            self._linear(f"{name}.heads.{head}.k", rank, attention["head_dim"] - rope, False)
            self._linear(f"{name}.heads.{head}.v", latent["value_dim"], rank, False)
        self._linear(f"{name}.o", d, heads * latent["value_dim"], False)

    def _delta(self, name: str, settings: Json, d: int) -> None:
        heads, key_dim = settings["num_heads"], settings["key_dim"]
        keys, values = settings["num_key_heads"] * key_dim, heads * settings["value_dim"]
        decays = heads * (key_dim if settings["decay"] == "channel" else 1)
        for part, width in (("q", keys), ("k", keys), ("v", values)):
            self._linear(f"{name}.{part}", width, d, False)
        for part, width in (("gate", values), ("decay", decays)):
            rank = settings[f"{part}_rank"]
            if rank > 0:
                self._linear(f"{name}.{part}_down", rank, d, False)
            self._linear(f"{name}.{part}", width, rank or d, False)
        self._linear(f"{name}.beta", heads, d, False)
        for part, width in (("q", keys), ("k", keys), ("v", values)):
            self._linear(f"{name}.{part}_conv", width, settings["conv"], False)
        self._draw(f"{name}.decay_log", heads, std=0.5)
        self._draw(f"{name}.decay_bias", decays, std=1.0)
        self._norm(f"{name}.out_norm", settings["value_dim"], False)
        self._linear(f"{name}.o", d, values, False)

    def _state_space(self, name: str, settings: Json, d: int) -> None:
        heads, bias = settings["num_heads"], settings["bias"]
        values, keys = heads * settings["head_dim"], settings["groups"] * settings["state_dim"]
        for part, width in (("gate", values), ("x", values), ("b", keys), ("c", keys),
                            ("step", heads)):
            self._linear(f"{name}.{part}", width, d, bias)
        self._linear(f"{name}.conv", values + 2 * keys, settings["conv"], settings["conv_bias"])
        for part in ("decay_log", "step_bias", "skip"):
            self._draw(f"{name}.{part}", heads, std=0.7)
        self._norm(f"{name}.out_norm", values, False)
        self._linear(f"{name}.o", d, values, bias)

    def _expert(self, name: str, form: Json, width: int, c: int) -> None:
        if form["sublayer"] == "plain":
            self._network(name, form, width, c)
            return
        for i in range(form["depth"]):
            self._norm(f"{name}.layers.{i}.norm", c)
            self._network(f"{name}.layers.{i}", form, width, c)

    def _network(self, name: str, form: Json, width: int, c: int) -> None:
        for part in ("gate", "up") if form["form"] == "gated" else ("up",):
            self._linear(f"{name}.{part}", width, c, form["bias"], gain=1.4)
        self._linear(f"{name}.down", c, width, form["bias"], gain=1.4)
        if form["inner_norm"]:
            self._norm(f"{name}.inner_norm", width)

    def _feed_forward(self, name: str, settings: Json, d: int) -> None:
        if settings["kind"] == "none":
            return
        self._block_norms(name, settings["norm_placement"], d)
        form = settings["expert"]
        if settings["kind"] == "dense":
            self._expert(name, form, settings["width"], d)
            return
        routing, split = settings["routing"], settings["routing"]["split"]
        c = d // split["heads"]
        for part, key in (("split", "projection"), ("merge", "merge_projection")):
            for i in range(split["depth"] if split[key] else 0):
                layer = f"{name}.{part}" if split["depth"] == 1 else f"{name}.{part}.{i}"
                self._linear(layer, d, d, split["bias"])
        self._router(f"{name}.router", routing, c)
        if routing["latent_width"] > 0:
            self._linear(f"{name}.latent_down", routing["latent_width"], c, False)
            self._linear(f"{name}.latent_up", c, routing["latent_width"], False)
            c = routing["latent_width"]
        experts = routed_decoder.all_experts(routing)
        replaced = routing["null_experts"]["replaced"]
        for j in [*replaced, *range(experts - routing["null_experts"]["constant"], experts)]:
            self._draw(f"{name}.experts.{j}.constant", c, std=0.5)
        bodies = [j for j in range(routed_decoder.places(routing)) if j not in replaced]
        for j, width in zip(bodies, routing["widths"]):
            self._expert(f"{name}.experts.{j}", form, width, c)
        if settings["shared_width"] > 0:
            self._expert(f"{name}.shared", form, settings["shared_width"], d)
            if settings["shared_gate"]:
                self._draw(f"{name}.shared_gate.weight", 1, d, std=0.5)
            if settings["shared_norms"]:
                for norm in ("shared_norm", "shared_output_norm", "experts_norm"):
                    self._norm(f"{name}.{norm}", d)


def _stored(name: str, value: torch.Tensor, index: int, file_type: str) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    if file_type != "mixed":
        return value.to(_DTYPES[file_type])
    if ".router." in name:
        return value
    return value.to((torch.bfloat16, torch.float16, torch.float32)[index % 3])


def tiny_tensors(name: str) -> tuple[Json, dict[str, torch.Tensor]]:
    """Configuration and stored tensors of one tiny model."""
    number = list(TINY).index(name)
    config = TINY[name]
    tensors = _Builder(config, seed=SEEDS.get(name, 1000 + number)).build()
    if name == "tiny-exact-tie":
        for key in tensors:
            if key.endswith("router.weight"):
                tensors[key].zero_()
    file_type = FILE_TYPES[number % len(FILE_TYPES)]
    return config, {key: _stored(key, value, index, file_type)
                    for index, (key, value) in enumerate(sorted(tensors.items()))}


def folder_files(name: str) -> dict[str, bytes]:
    """Every file of the checkpoint folder; each fifth model comes in two shards."""
    config, tensors = tiny_tensors(name)
    files = {"config.json": (json.dumps(config, indent=1) + "\n").encode()}
    if list(TINY).index(name) % 5 != 3:
        files["model.safetensors"] = safetensors_io.to_bytes(tensors, {"format": "pt"})
        return files
    names = sorted(tensors)
    halves = names[:len(names) // 2], names[len(names) // 2:]
    weight_map = {}
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        files[file] = safetensors_io.to_bytes({key: tensors[key] for key in half})
        weight_map.update(dict.fromkeys(half, file))
    total = sum(value.numel() * value.element_size() for value in tensors.values())
    files["model.safetensors.index.json"] = (json.dumps(
        {"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1) + "\n").encode()
    return files


def write_folder(name: str, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in folder_files(name).items():
        (folder / file).write_bytes(content)
