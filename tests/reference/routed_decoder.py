"""Reference implementation of the native checkpoint format, in plain PyTorch.

Written from the equations of the papers and from the format's description, not from the server:
the tests compare the two. It favours being obviously right over being fast; one sequence at a
time, one expert at a time.

  "On the Representation Collapse of Sparse Mixture of Experts" (X-MoE): cosine scores
  "Multi-Head Mixture-of-Experts" (MH-MoE): split, sub-tokens, merge
  "Mixture of Attention Heads" (MoA): routed attention
  "HMoE: Heterogeneous Mixture of Experts for Language Modeling": unequal experts, top-p

Shapes: T tokens of this call, S positions visible, d hidden size, H query and G kv heads of size
d_h, E experts, R routed rows (T, or T*h with a split of h heads) of width c.
"""

import copy
import json
import math
import pathlib
from typing import Any

import torch
from torch.nn import functional

import safetensors_io
import recurrences
from positions import relative_buckets, rope, sinusoidal
from selection import Routes, select

Tensor = torch.Tensor
Json = dict[str, Any]

# Deliberate errors: a test that compares against goldens made with one of them must fail.
FAULTS = ("renormalize_off", "split_reversed", "gt_for_ge", "tile_for_interleave",
          "temperature_ignored")

_DEFAULT_NORM = {"kind": "rms"}
_DEFAULT_POSITION = {"kind": "rope"}


def complete_config(config: Json) -> Json:
    """Fills in every default of the format; attention and feed_forward become lists of L."""
    out = copy.deepcopy(config)
    norm = out.setdefault("norm", dict(_DEFAULT_NORM))
    norm.setdefault("eps", 1e-5)
    for key in ("final_eps", "outer_eps"):
        norm.setdefault(key, norm["eps"])
    norm.setdefault("placement", "pre")
    norm.setdefault("final", norm["placement"] != "post")
    norm.setdefault("bias", norm["kind"] == "layer")
    norm.setdefault("groups", 1)
    causal = out["model_type"] != "routed_encoder"
    out.setdefault("token_types", 0)
    _complete_position(out.setdefault("position", dict(_DEFAULT_POSITION)))
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        out.setdefault(key, 1.0)
    out.setdefault("logit_soft_cap", 0.0)
    if "layer_input" in out:
        for key in ("token_scale", "projection_scale", "scale"):
            out["layer_input"].setdefault(key, 1.0)
    for key in ("tie_word_embeddings", "embedding_norm", "head_bias", "layer_scale"):
        out.setdefault(key, False)
    out.setdefault("output_scale", 1.0)
    parts = [("attention", _complete_attention), ("feed_forward", _complete_ffn)]
    if "cross_attention" in out:
        parts.insert(1, ("cross_attention", _complete_cross))
    for key, complete in parts:
        layers = out[key] if isinstance(out[key], list) else [out[key]] * out["num_hidden_layers"]
        out[key] = [complete(copy.deepcopy(layer)) for layer in layers]
        for layer in out[key]:
            layer.setdefault("norm_placement", norm["placement"])
            layer.setdefault("residual_scale", out["residual_scale"])
            layer.setdefault("parallel", False)
            layer.setdefault("causal", causal)
    return out


def _complete_position(position: Json) -> None:
    if position["kind"] == "rope":
        position.setdefault("theta", 10000)
        position.setdefault("pairing", "half")
        position.setdefault("fraction", 1.0)
        position.setdefault("scaling", {"kind": "none"})
        position.setdefault("xpos_base", 0)
        position.setdefault("span", "rotated")
        position.setdefault("frequencies", "rotated")
    elif position["kind"] == "sinusoidal":
        position.setdefault("first", 0)
        position.setdefault("spacing", "fairseq")


def _complete_attention(attention: Json) -> Json:
    if attention["kind"] == "none":
        return attention
    if attention["kind"] == "short_conv":
        attention.setdefault("conv", 3)
        attention.setdefault("bias", False)
        return attention
    if attention["kind"] in ("delta", "ssm"):
        return recurrences.complete(attention)
    routed = attention["kind"] == "routed"
    attention.setdefault("num_kv_heads", 1 if routed else attention["num_heads"])
    attention.setdefault("bias", False)
    attention.setdefault("out_bias", False)
    attention.setdefault("scale", attention["head_dim"] ** -0.5)
    attention.setdefault("soft_cap", 0.0)
    attention.setdefault("window", None)
    attention.setdefault("window_kind", "sliding")
    attention.setdefault("value_dim", attention["head_dim"])
    attention.setdefault("value_scale", 1.0)
    for key in ("value_norm", "value_from_key"):
        attention.setdefault(key, False)
    if "query_scale" in attention:
        attention["query_scale"].setdefault("first", 0)
    if "value_routing" in attention:
        _complete_routing(attention["value_routing"])
    if "position" in attention:
        _complete_position(attention["position"])
    if "latent" in attention:
        attention["latent"].setdefault("query_rank", 0)
        attention["latent"].setdefault("norm_eps", 1e-6)
        attention["latent"].setdefault("scale", 1.0)
    if routed:
        _complete_routing(attention["routing"])
    else:
        attention.setdefault("qk_norm", "none")
        attention.setdefault("group_order", "interleave")
        attention.setdefault("qkv_clip", 0.0)
        for key in ("qk_norm_after_rope", "sinks", "gate", "gate_per_head", "gate_bias",
                    "inner_norm"):
            attention.setdefault(key, False)
        attention.setdefault("gate_activation", "sigmoid")
    return attention


def _complete_cross(attention: Json) -> Json:
    """Attention to a source: all of it is visible, and there are no positions."""
    return {**_complete_attention(attention), "causal": False, "cross": True,
            "position": {"kind": "none"}}


def _complete_ffn(feed_forward: Json) -> Json:
    if feed_forward["kind"] == "none":
        return feed_forward
    feed_forward["expert"].setdefault("bias", False)
    feed_forward["expert"].setdefault("inner_norm", False)
    feed_forward["expert"].setdefault("sublayer", "plain")
    feed_forward["expert"].setdefault("depth", 1)
    for key, value in (("activation_limit", 0.0), ("activation_slope", 1.0), ("up_offset", 0.0),
                       ("limit_after", False)):
        feed_forward["expert"].setdefault(key, value)
    feed_forward.setdefault("out_bias", False)
    if feed_forward["kind"] == "routed":
        feed_forward.setdefault("shared_width", 0)
        feed_forward.setdefault("shared_gate", False)
        feed_forward.setdefault("shared_norms", False)
        feed_forward.setdefault("late_experts", False)
        feed_forward.setdefault("shared_limit", feed_forward["expert"]["activation_limit"])
        routing = feed_forward["routing"]
        _complete_routing(routing)
        split = routing.setdefault("split", {"heads": 1})
        for key, value in (("projection", split["heads"] > 1), ("bias", True),
                           ("residual", False), ("depth", 1)):
            split.setdefault(key, value)
        split.setdefault("merge_projection", split["projection"])
        routing.setdefault("latent_width", 0)
        if isinstance(routing["widths"], int):
            routing["widths"] = [routing["widths"]] * routing["num_experts"]
    return feed_forward


def all_experts(routing: Json) -> int:
    """Number of experts that a row can select, those without matrices included."""
    null_experts = routing["null_experts"]
    return places(routing) + sum(null_experts[kind] for kind in ("zero", "copy", "constant"))


def places(routing: Json) -> int:
    """Number of experts with matrices and of those that constants replaced; they have the first ids."""
    return routing["num_experts"] + len(routing["null_experts"]["replaced"])


def _complete_routing(routing: Json) -> None:
    null_experts = routing.setdefault("null_experts", {})
    for key in ("zero", "copy", "constant"):
        null_experts.setdefault(key, 0)
    null_experts.setdefault("replaced", [])
    score = routing.setdefault("score", {"kind": "dot"})
    score.setdefault("stream", False)
    score.setdefault("norm", "none")
    score.setdefault("row_scale", 1.0)
    score.setdefault("bias", False)
    if score["kind"] == "cosine":
        for key, value in (("dim", 16), ("normalize_row", True), ("normalize_expert", True),
                           ("eps", 1e-12), ("temperature", "none")):
            score.setdefault(key, value)
    routing.setdefault("gate", "softmax")
    routing.setdefault("mixer_limit", 0.0)
    chooser = routing["select"]
    chooser.setdefault("bias", False)
    chooser.setdefault("groups", 1)
    chooser.setdefault("best_groups", chooser["groups"])
    chooser.setdefault("group_score", "max")
    chooser.setdefault("group_mask", "minus_infinity")
    if routing["select"]["kind"] == "top_p":
        routing["select"].setdefault("compare", "ge")
        routing["select"].setdefault("max", all_experts(routing))
    routing.setdefault("renormalize", False)
    routing.setdefault("scale", 1.0)
    routing.setdefault("expert_scale", False)
    routing.setdefault("weight_input", False)


def load_folder(folder: pathlib.Path) -> tuple[Json, dict[str, Tensor]]:
    """config.json and all tensors of a checkpoint folder, sharded or not."""
    config = json.loads((folder / "config.json").read_text())
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for name in files:
        tensors.update(safetensors_io.load(folder / name)[0])
    return config, tensors


def activate(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return functional.silu(x)
    if name in ("relu", "tanh"):
        return getattr(torch, name)(x)
    if name == "relu2":
        return torch.relu(x).square()
    if name == "none":
        return x
    return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap) if cap > 0 else x


def clip(x: Tensor, settings: Json) -> Tensor:
    """Queries, keys or values within the limits of dense attention."""
    limit = settings.get("qkv_clip", 0.0)
    return x.clamp(-limit, limit) if limit > 0 else x


class Cache:
    """Keys (rotated) and values of every layer, each [S, G, d_h]. Of latent attention, the latent
    vectors [S, rank] and the rotated parts of the keys [S, 1, rope_dim]. Of a short convolution,
    all its inputs [S, d], twice."""

    def __init__(self, layers: int) -> None:
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.length = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys[layer] is not None:
            keys = torch.cat([self.keys[layer], keys])
            values = torch.cat([self.values[layer], values])
        self.keys[layer], self.values[layer] = keys, values
        return keys, values


class RoutedDecoder:
    """A decoder of the native format.

    `forward` handles one sequence. `recorded` holds the routes of the latest forward pass, keyed
    "<layer>.attention" or "<layer>.feed_forward"; `replay` forces routes under the same keys.

    `bf16_products` is the server's bf16 run in fp32 arithmetic: the weights and the inputs of every
    product, cached keys and values, and the results of routed experts are rounded to bf16; the
    residual stream, norms, scores, gates, softmax, sums and the head's input are not.
    """

    def __init__(self, config: Json, tensors: dict[str, Tensor],
                 dtype: torch.dtype = torch.float32, fault: str | None = None,
                 bf16_products: bool = False) -> None:
        if fault is not None and fault not in FAULTS:
            raise ValueError(f"unknown fault {fault}")
        self.config = complete_config(config)
        self.dtype = dtype
        self.fault = fault
        # Router tensors stay fp32 in every run: rounding them would change the selection.
        self.tensors = {name: value.to(torch.float32 if ".router." in name else dtype)
                        if value.is_floating_point() else value.long()
                        for name, value in tensors.items()}
        self.tokens = torch.zeros(0, dtype=torch.long)  # of the current forward pass
        self.source = torch.zeros(0)  # what the encoder computed
        self.stream = torch.zeros(0)  # the residual stream that the current block reads
        self.late: Tensor | None = None  # what joins the stream at the end of the next layer
        self.wide = torch.promote_types(dtype, torch.float32)
        self.bf16_products = bf16_products
        self.is_long = False  # whether `forward` treats the sequence as long
        if bf16_products:
            tied = self.config["tie_word_embeddings"]
            for name, value in self.tensors.items():
                lookup = (name.startswith(("embed_position", "embed_type", "embed_layers",
                                            "relative_bias"))
                          or (name == "embed.weight" and not tied))
                taps = name.endswith(".conv.weight")
                if value.dim() == 2 and ".router." not in name and not lookup and not taps:
                    self.tensors[name] = self._round(value)
        self.recorded: dict[str, Routes] = {}
        self.replay: dict[str, Routes] | None = None

    @classmethod
    def from_folder(cls, folder: pathlib.Path, dtype: torch.dtype = torch.float32,
                    fault: str | None = None, bf16_products: bool = False) -> "RoutedDecoder":
        return cls(*load_folder(folder), dtype=dtype, fault=fault, bf16_products=bf16_products)

    def _round(self, x: Tensor) -> Tensor:
        """To bf16 and back, in a run with bf16 products."""
        return x.to(torch.bfloat16).to(x.dtype) if self.bf16_products else x

    def new_cache(self) -> Cache:
        return Cache(self.config["num_hidden_layers"])

    @torch.no_grad()
    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits [T, V] of tokens [T]; with a cache they continue its sequence."""
        x = self.hidden(tokens, cache or self.new_cache()) * self.config["output_scale"]
        head = "embed" if self.config["tie_word_embeddings"] else "head"
        logits = (x @ self.tensors[f"{head}.weight"].t()).to(self.wide)
        if self.config["head_bias"]:
            logits = logits + self.tensors["head.bias"].to(self.wide)
        return soft_cap(logits * self.config["logit_scale"], self.config["logit_soft_cap"])

    def hidden(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Rows [T, d] behind the final norm."""
        self.recorded = {}
        self.tokens = tokens
        config = self.config
        positions = torch.arange(cache.length, cache.length + len(tokens))
        x = before = self._embed(tokens, positions)
        inputs = self._layer_inputs(tokens, x) if "layer_input" in config else None
        for layer in range(config["num_hidden_layers"]):
            late, self.late = self.late, None
            for part in ("attention", "cross_attention", "feed_forward"):
                if part not in config:
                    continue
                if config[part][layer]["kind"] == "none":
                    continue
                # A parallel block reads what the block before it has read.
                read = before if config[part][layer]["parallel"] else x
                before = x
                x = self._block(x, read, layer, part, positions, cache)
            if late is not None:
                x = x + late
            if "layer_input" in config:
                x = x + self._layer_input(x, inputs[:, layer], f"blocks.{layer}.input")
            if config["layer_scale"]:
                x = x * self.tensors[f"blocks.{layer}.scale"]
        cache.length += len(tokens)
        if config["norm"]["final"]:
            x = self._row_norm(x, "norm", eps=config["norm"]["final_eps"])
        return x

    def _row_norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        """The norm of rows of d elements: each group of them by itself."""
        groups = self.config["norm"]["groups"]
        if groups == 1:
            return self._norm(x, name, eps=eps)
        return self._norm(x.view(len(x), groups, -1), name, eps=eps).flatten(1)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tensors["embed.weight"][tokens] * self.config["embedding_scale"]
        kind = self.config["position"]["kind"]
        if kind == "learned":
            x = x + self.tensors["embed_position.weight"][positions]
        elif kind == "sinusoidal":
            first = self.config["position"]["first"]
            spacing = self.config["position"]["spacing"]
            x = x + sinusoidal(positions + first, x.shape[1], spacing).to(x.dtype)
        return self._outer_norm(x, "embed_norm") if self.config["embedding_norm"] else x

    def _layer_inputs(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Inputs [T, L, p] of all layers; x [T, d] are the embeddings."""
        settings, layers = self.config["layer_input"], self.config["num_hidden_layers"]
        shape = (len(x), layers, settings["width"])
        projected = self._linear(self._round(x), "layer_input").view(shape)
        projected = projected * settings["projection_scale"]
        rows = self.tensors["embed_layers.weight"][tokens].view(shape) * settings["token_scale"]
        return (self._norm(projected, "layer_input.norm", "rms") + rows) * settings["scale"]

    def _layer_input(self, x: Tensor, own: Tensor, name: str) -> Tensor:
        """What a layer makes of its input `own` [T, p] and the stream x."""
        gate = self._linear(self._round(x), f"{name}.gate")
        hidden = activate(gate, self.config["layer_input"]["activation"]) * own
        return self._norm(self._linear(self._round(hidden), f"{name}.down"), f"{name}.norm", "rms")

    def _outer_norm(self, x: Tensor, name: str) -> Tensor:
        return self._row_norm(x, name, eps=self.config["norm"]["outer_eps"])

    def _block(self, x: Tensor, read: Tensor, layer: int, part: str, positions: Tensor,
               cache: Cache) -> Tensor:
        """x plus a residual branch of `read`, with the norms where the placement says."""
        name = f"blocks.{layer}.{part}"
        settings = self.config[part][layer]
        placement = settings["norm_placement"]
        inner = self._row_norm(read, f"{name}.norm") if placement in ("pre", "both") else read
        inner = self._round(inner)
        self.stream = read
        if part == "attention":
            branch = self._attention(inner, layer, positions, cache)
        elif part == "cross_attention":
            branch = self._cross(inner, layer, positions)
        else:
            branch = self._feed_forward(inner, layer)
        if placement in ("output", "both"):
            branch = self._row_norm(branch, f"{name}.output_norm")
        x = x + settings["residual_scale"] * branch
        if self.late is not None:
            self.late = settings["residual_scale"] * self.late
        return self._row_norm(x, f"{name}.norm") if placement == "post" else x

    def _norm(self, x: Tensor, name: str, kind: str | None = None,
              eps: float | None = None) -> Tensor:
        """RMS or layer norm over the last axis, statistics at least in fp32."""
        # Adjacent groups or heads of a row may have weights of their own.
        weight = self.tensors[f"{name}.weight"].to(self.wide).view(-1, x.shape[-1]).squeeze(0)
        eps = self.config["norm"]["eps"] if eps is None else eps
        wide = x.to(self.wide)
        if (kind or self.config["norm"]["kind"]) == "rms":
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
        else:
            wide = wide - wide.mean(-1, keepdim=True)
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
            if self.config["norm"]["bias"]:
                wide = wide + self.tensors[f"{name}.bias"].to(self.wide)
        return wide.to(self.dtype)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        """x W^T, plus the bias where the checkpoint has one (its presence follows the config)."""
        return functional.linear(x, self.tensors[f"{name}.weight"],
                                 self.tensors.get(f"{name}.bias"))

    # Attention.

    def _attention(self, x: Tensor, layer: int, positions: Tensor, cache: Cache) -> Tensor:
        settings = self.config["attention"][layer]
        name = f"blocks.{layer}.attention"
        if settings["kind"] == "short_conv":
            return self._short_convolution(x, layer, name, settings, cache)
        if settings["kind"] in ("delta", "ssm"):
            return self._recurrence(x, layer, name, settings, cache)
        if "latent" in settings:
            return self._latent(x, layer, name, settings, positions, cache)
        if settings.get("kv_layer") is not None:
            keys, values = cache.keys[settings["kv_layer"]], cache.values[settings["kv_layer"]]
        else:
            shape = (len(x), settings["num_kv_heads"], settings["head_dim"])
            keys = self._linear(x, f"{name}.k")
            values = self._values(x, keys, name, settings)
            keys = self._round(self._place(keys.view(shape), f"{name}.k_norm", positions, settings))
            keys, values = cache.extend(layer, keys, self._round(clip(values, settings)))
        if settings["kind"] == "dense":
            out = self._dense_heads(x, name, settings, positions, keys, values)
        else:
            out = self._expert_heads(x, name, settings, positions, keys, values)
        if settings["out_bias"]:
            out = out + self.tensors[f"{name}.out_bias"]
        return out

    def _values(self, x: Tensor, keys: Tensor, name: str, settings: Json) -> Tensor:
        """Values [T, G, value_dim]; `keys` are those before their norm and rotation."""
        if settings["value_from_key"]:
            values = keys
        elif "value_routing" in settings:
            routes = self._route(x, f"{name}.router", settings["value_routing"])
            width = settings["num_kv_heads"] * settings["value_dim"]
            values = torch.zeros(len(x), width, dtype=self.wide)
            for expert in routes.used():
                rows, weights = routes.rows_of(expert)
                result = functional.silu(self._linear(x[rows], f"{name}.experts.{expert}.v"))
                values[rows] += weights[:, None] * self._round(result).to(self.wide)
            values = values.to(self.dtype)
        else:
            values = self._linear(x, f"{name}.v")
        values = values.view(len(x), settings["num_kv_heads"], settings["value_dim"])
        if settings["value_norm"]:
            values = self._plain_norm(values)
        return values * settings["value_scale"]

    def _plain_norm(self, x: Tensor) -> Tensor:
        """RMS norm over the last axis, without a weight."""
        wide, eps = x.to(self.wide), self.config["norm"]["eps"]
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(self.dtype)

    @staticmethod
    def _scaled(q: Tensor, positions: Tensor, settings: Json) -> Tensor:
        """Queries [T, heads, d_h] times a factor that grows with the position."""
        if "query_scale" not in settings:
            return q
        scale = settings["query_scale"]
        steps = torch.floor((positions.double() + scale["first"]) / scale["step"])
        factor = 1 + scale["factor"] * torch.log(1 + steps)
        return q * factor.to(q.dtype)[:, None, None]

    def _cross(self, x: Tensor, layer: int, positions: Tensor) -> Tensor:
        """Attention to the encoder's rows `self.source` [S, d]."""
        settings = self.config["cross_attention"][layer]
        name = f"blocks.{layer}.cross_attention"
        shape = (len(self.source), settings["num_kv_heads"], settings["head_dim"])
        keys = self._linear(self.source, f"{name}.k").view(shape)
        keys = self._round(self._qk_norm(keys, f"{name}.k_norm", settings))
        values = self._round(self._linear(self.source, f"{name}.v").view(shape))
        heads = self._dense_heads if settings["kind"] == "dense" else self._expert_heads
        out = heads(x, name, settings, positions, keys, values)
        return out + self.tensors[f"{name}.out_bias"] if settings["out_bias"] else out

    def _dense_heads(self, x: Tensor, name: str, settings: Json, positions: Tensor, keys: Tensor,
                     values: Tensor) -> Tensor:
        heads, groups = settings["num_heads"], settings["num_kv_heads"]
        q = self._linear(x, f"{name}.q").view(len(x), heads, settings["head_dim"])
        q = self._scaled(self._place(q, f"{name}.q_norm", positions, settings), positions, settings)
        if settings["group_order"] == "tile" or self.fault == "tile_for_interleave":
            kv_head = torch.arange(heads) % groups
        else:
            kv_head = torch.arange(heads) // (heads // groups)
        sinks = self.tensors[f"{name}.sinks"] if settings["sinks"] else None
        out = self._attend(q, positions, keys[:, kv_head], values[:, kv_head], settings, sinks)
        out = out.flatten(1)
        if settings["gate"]:
            out = self._gated(out, x, name, settings)
        if settings["inner_norm"]:
            out = self._norm(out, f"{name}.inner_norm")
        return self._linear(self._round(out), f"{name}.o")

    def _latent(self, x: Tensor, layer: int, name: str, settings: Json, positions: Tensor,
                cache: Cache) -> Tensor:
        """Multi-head latent attention: DeepSeek-V2, section 2.1.2 and 2.1.3, without absorption."""
        latent, heads = settings["latent"], settings["num_heads"]
        plain = settings["head_dim"] - latent["rope_dim"]
        inner = x
        if latent["query_rank"] > 0:
            inner = self._norm(self._linear(x, f"{name}.q_down"), f"{name}.q_norm", "rms",
                               latent["norm_eps"])
            inner = self._round(inner)
        q = self._linear(inner, f"{name}.q").view(len(x), heads, settings["head_dim"])
        q = torch.cat([q[..., :plain], self._rotate(q[..., plain:], positions, settings)], -1)
        q = self._scaled(q, positions, settings)
        both = self._linear(x, f"{name}.latent")
        vector = self._norm(both[:, :latent["rank"]], f"{name}.latent_norm", "rms",
                            latent["norm_eps"]) * latent["scale"]
        rotated = self._rotate(both[:, None, latent["rank"]:], positions, settings, keys=True)
        vector, rotated = cache.extend(layer, self._round(vector), self._round(rotated))
        keys, values = [], []
        for head in range(heads):
            key = self.tensors[f"{name}.heads.{head}.k.weight"]
            keys.append(torch.cat([vector @ key, rotated[:, 0]], 1))
            values.append(vector @ self.tensors[f"{name}.heads.{head}.v.weight"].t())
        out = self._attend(q, positions, torch.stack(keys, 1), torch.stack(values, 1), settings)
        out = out.flatten(1)
        if settings["gate"]:
            out = self._gated(out, x, name, settings)
        out = self._linear(self._round(out), f"{name}.o")
        return out + self.tensors[f"{name}.out_bias"] if settings["out_bias"] else out

    def _gated(self, out: Tensor, x: Tensor, name: str, settings: Json) -> Tensor:
        """out [T, H * d_h] times the gate of each element, or of each head."""
        gate = self._linear(x, f"{name}.gate")
        kind = settings["gate_activation"]
        if kind == "sigmoid":
            factor = torch.sigmoid(gate)
        elif kind == "silu":
            factor = functional.silu(gate)
        else:
            factor = torch.log2(1 + torch.exp2(gate))
        return out * factor.repeat_interleave(out.shape[1] // factor.shape[1], 1)

    def _short_convolution(self, x: Tensor, layer: int, name: str, settings: Json,
                           cache: Cache) -> Tensor:
        """LFM2's gated short convolution: out(c * conv(b * x)), causal and separate per column."""
        b, c, inner = (self._linear(x, f"{name}.{part}") for part in ("b", "c", "x"))
        taps = settings["conv"]
        inputs, _ = cache.extend(layer, b * inner, b * inner)
        # As if zeros stood before the text.
        padded = functional.pad(inputs, (0, 0, taps - 1, 0))[-(len(x) + taps - 1):]
        weight = self.tensors[f"{name}.conv.weight"]
        mixed = sum(weight[:, tap] * padded[tap:tap + len(x)] for tap in range(taps))
        if settings["bias"]:
            mixed = mixed + self.tensors[f"{name}.conv.bias"]
        return self._linear(self._round(c * mixed), f"{name}.o")

    def _recurrence(self, x: Tensor, layer: int, name: str, settings: Json,
                    cache: Cache) -> Tensor:
        """Computes the whole text so far, and returns the last rows."""
        rows, _ = cache.extend(layer, x, x)
        mixer = recurrences.delta if settings["kind"] == "delta" else recurrences.state_space
        out = mixer(rows, name, settings, self.tensors, self._linear, self._round,
                    self.config["norm"]["eps"])
        return self._linear(self._round(out[-len(x):]), f"{name}.o")

    def _expert_heads(self, x: Tensor, name: str, settings: Json, positions: Tensor, keys: Tensor,
                      values: Tensor) -> Tensor:
        """MoA eq. 6 to 9: expert e projects q, attends over the shared k and v, projects back."""
        routes = self._route(x, f"{name}.router", settings["routing"])
        out = torch.zeros(x.shape, dtype=self.wide)
        for expert in routes.used():
            rows, weights = routes.rows_of(expert)
            q = self._linear(x[rows], f"{name}.experts.{expert}.q")
            q = q.view(len(rows), settings["num_kv_heads"], settings["head_dim"])
            q = self._rotate(q, positions[rows], settings)
            heads = self._attend(q, positions[rows], keys, values, settings)
            result = self._linear(self._round(heads.flatten(1)), f"{name}.experts.{expert}.o")
            out[rows] += weights[:, None] * self._round(result).to(self.wide)
        return out.to(self.dtype)

    def _qk_norm(self, x: Tensor, name: str, settings: Json) -> Tensor:
        """x [T, heads, d_h]: RMS over each head, or over all heads together."""
        kind = settings.get("qk_norm", "none")
        if kind == "l2":
            return self._plain_norm(x)
        if kind in ("head", "heads"):
            return self._norm(x, name, "rms")
        if kind == "full":
            return self._norm(x.flatten(1), name, "rms").view(x.shape)
        return x

    def _rotate(self, x: Tensor, positions: Tensor, settings: Json, keys: bool = False) -> Tensor:
        position = settings.get("position", self.config["position"])
        if position["kind"] != "rope":
            return x
        return rope(x, positions, position, self.is_long, keys)

    def _place(self, x: Tensor, norm: str, positions: Tensor, settings: Json) -> Tensor:
        """Norm, limits and rotation of queries or keys [T, heads, d_h]."""
        keys = norm.endswith("k_norm")
        if settings.get("qk_norm_after_rope", False):
            x = self._rotate(clip(x, settings), positions, settings, keys)
            return self._qk_norm(x, norm, settings)
        x = clip(self._qk_norm(x, norm, settings), settings)
        return self._rotate(x, positions, settings, keys)

    def _attend(self, q: Tensor, positions: Tensor, keys: Tensor, values: Tensor,
                settings: Json, sinks: Tensor | None = None) -> Tensor:
        """Softmax attention, causal or not. q [n, heads, d_h], keys and values [S, heads, d_h].

        `sinks` [heads] are one more score per head, which takes a share and adds no value.
        """
        scores = torch.einsum("nhc,shc->hns", q, keys).to(self.wide) * settings["scale"]
        scores = soft_cap(scores, settings["soft_cap"])
        if "relative_bias" in self.config and "cross" not in settings:
            distance = positions[:, None] - torch.arange(len(keys))[None]
            buckets = relative_buckets(distance, self.config["relative_bias"])
            table = self.tensors["relative_bias.weight"].to(self.wide)
            scores = scores + table[buckets].permute(2, 0, 1)
        distance = positions[:, None] - torch.arange(len(keys))[None]
        visible = distance >= 0 if settings["causal"] else torch.ones_like(distance, dtype=bool)
        if settings["window_kind"] == "chunk":
            starts = positions - positions % settings["window"]
            visible &= torch.arange(len(keys))[None] >= starts[:, None]
        elif settings["window"] is not None:
            visible &= distance.abs() < settings["window"]
        scores = scores.masked_fill(~visible[None], -math.inf)
        if sinks is not None:
            sink = sinks.to(self.wide)[:, None, None].expand(-1, scores.shape[1], 1)
            shares = torch.cat([scores, sink], 2).softmax(-1)[..., :-1]
            return torch.einsum("hns,shc->nhc", shares.to(self.dtype), values)
        return torch.einsum("hns,shc->nhc", scores.softmax(-1).to(self.dtype), values)

    # Routing.

    def _scores(self, rows: Tensor, name: str, score: Json) -> Tensor:
        """fp32 scores [R, E]. Cosine: X-MoE eq. 7 and 8."""
        rows = rows.float()
        if score["norm"] != "none":
            eps = self.config["norm"]["eps"]
            rows = rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + eps)
        if score["norm"] == "rms_weight":
            rows = rows * self.tensors[f"{name}.norm.weight"]
        rows = rows * score["row_scale"]
        if score["kind"] == "dot":
            return self._linear(rows, name)
        u = self._linear(rows, f"{name}.projection")
        experts = self.tensors[f"{name}.experts.weight"]
        if score["normalize_row"]:
            u = u / u.square().sum(1, keepdim=True).sqrt().clamp(min=score["eps"])
        if score["normalize_expert"]:
            experts = experts / experts.square().sum(1, keepdim=True).sqrt().clamp(min=score["eps"])
        scores = u @ experts.t()
        if score["temperature"] == "none" or self.fault == "temperature_ignored":
            return scores
        temperature = self.tensors[f"{name}.temperature"]
        if score["temperature"] == "divide":
            return scores / temperature.clamp(min=1e-4)
        return scores * temperature.clamp(max=math.log(100.0)).exp()

    def _route(self, rows: Tensor, name: str, routing: Json) -> Routes:
        """Routes of rows [R, c]; `name` is "blocks.<layer>.<part>.router"."""
        if routing["score"]["stream"]:
            rows = self.stream
        _, layer, part, _ = name.split(".")
        key = f"{layer}.{part}"
        if self.replay is not None:
            routes = self.replay[key]
        else:
            if self.fault == "renormalize_off":
                routing = {**routing, "renormalize": False}
            if self.fault == "gt_for_ge" and routing["select"]["kind"] == "top_p":
                routing = {**routing, "select": {**routing["select"], "compare": "gt"}}
            listed = None
            if routing["select"]["kind"] == "table":  # sub-tokens share the id of their token
                listed = self.tensors[f"{name}.table"][self.tokens]
                listed = listed.repeat_interleave(len(rows) // len(self.tokens), 0)
            routes = select(self._scores(rows, name, routing["score"]), routing,
                            self.tensors.get(f"{name}.choice_bias"),
                            self.tensors.get(f"{name}.expert_scale"), listed)
        self.recorded[key] = routes
        return routes

    # Feed-forward.

    def _feed_forward(self, x: Tensor, layer: int) -> Tensor:
        settings = self.config["feed_forward"][layer]
        name = f"blocks.{layer}.feed_forward"
        if settings["kind"] == "dense":
            y = self._expert(x, name, settings["expert"])
        else:
            y = self._routed(x, name, settings)
        return y + self.tensors[f"{name}.out_bias"] if settings["out_bias"] else y

    def _routed(self, x: Tensor, name: str, settings: Json) -> Tensor:
        routing = settings["routing"]
        rows = self._split(x, name, routing["split"])
        y = self._mixture(rows, name, settings)
        if routing["split"]["residual"]:
            y = y + rows  # MH-MoE eq. 6
        y = self._merge(y, name, routing["split"])
        if settings["shared_width"] > 0:
            norms = settings["shared_norms"]
            read = self._round(self._row_norm(self.stream, f"{name}.shared_norm")) if norms else x
            form = {**settings["expert"], "activation_limit": settings["shared_limit"]}
            shared = self._expert(read, f"{name}.shared", form)
            if settings["shared_gate"]:
                shared = shared * torch.sigmoid(self._linear(read, f"{name}.shared_gate"))
            if norms:
                shared = self._row_norm(shared, f"{name}.shared_output_norm")
                y = self._row_norm(y, f"{name}.experts_norm")
            if settings["late_experts"]:
                self.late = y
                return shared
            y = y + shared
        return y

    def _split(self, x: Tensor, name: str, split: Json) -> Tensor:
        """MH-MoE eq. 3 and 4: tokens [T, d] -> sub-tokens [T*h, d/h], those of a token adjacent."""
        heads = split["heads"]
        if split["projection"]:
            x = self._round(self._projection(x, f"{name}.split", split["depth"]))
        if heads == 1:
            return x
        parts = x.view(len(x), heads, -1)
        if self.fault == "split_reversed":
            parts = parts.flip(1)
        return parts.reshape(len(x) * heads, -1)

    def _merge(self, y: Tensor, name: str, split: Json) -> Tensor:
        """MH-MoE eq. 8 and 9: sub-tokens in order side by side, then the merge layer."""
        y = y.reshape(len(y) // split["heads"], -1)
        if not split["merge_projection"]:
            return y
        return self._projection(self._round(y), f"{name}.merge", split["depth"])

    def _projection(self, x: Tensor, name: str, depth: int) -> Tensor:
        """`depth` linear layers with ReLU in between: MH-MoE, table 7."""
        if depth == 1:
            return self._linear(x, name)
        for i in range(depth - 1):
            x = self._round(functional.relu(self._linear(x, f"{name}.{i}")))
        return self._linear(x, f"{name}.{depth - 1}")

    def _mixture(self, rows: Tensor, name: str, settings: Json) -> Tensor:
        """Weighted sum of the selected experts in ascending id, accumulated at least in fp32."""
        routing = settings["routing"]
        routes = self._route(rows, f"{name}.router", routing)
        latent = routing["latent_width"] > 0
        if latent:
            rows = self._round(self._linear(rows, f"{name}.latent_down"))
        out = torch.zeros(rows.shape, dtype=self.wide)
        for expert in routes.used():
            chosen, weights = routes.rows_of(expert)
            inputs = rows[chosen]
            if routing["weight_input"]:
                inputs = self._round(inputs * weights[:, None].to(inputs.dtype))
                weights = torch.ones_like(weights)
            result = self._expert_of(inputs, f"{name}.experts.{expert}", expert, settings)
            out[chosen] += weights[:, None] * self._round(result).to(self.wide)
        out = out.to(self.dtype)
        return self._linear(self._round(out), f"{name}.latent_up") if latent else out

    def _expert_of(self, x: Tensor, name: str, expert: int, settings: Json) -> Tensor:
        """Result of one routed expert; most experts without matrices have the last ids."""
        routing = settings["routing"]
        null_experts, place = routing["null_experts"], expert - places(routing)
        if place < 0 and expert not in null_experts["replaced"]:
            return self._expert(x, name, settings["expert"])
        if place < 0:
            return self.tensors[f"{name}.constant"].expand(x.shape)
        if place < null_experts["zero"]:
            return torch.zeros_like(x)
        if place < null_experts["zero"] + null_experts["copy"]:
            return x
        return self.tensors[f"{name}.constant"].expand(x.shape)

    def _expert(self, x: Tensor, name: str, form: Json) -> Tensor:
        """A network, or a stack of sub-layers x + network(norm(x)): X-MoE section 4."""
        if form["sublayer"] == "plain":
            return self._network(x, name, form)
        for i in range(form["depth"]):
            layer = f"{name}.layers.{i}"
            x = x + self._network(self._round(self._norm(x, f"{layer}.norm")), layer, form)
        return x

    def _network(self, x: Tensor, name: str, form: Json) -> Tensor:
        """plain: down(act(up x)); gated: down(act(gate x) * up x); HMoE section 2 is gated silu."""
        up = self._linear(x, f"{name}.up")
        if form["form"] == "gated":
            gate, limit = self._linear(x, f"{name}.gate"), form["activation_limit"]
            if limit > 0:
                up = up.clamp(-limit, limit)
                if not form["limit_after"]:
                    gate = gate.clamp(max=limit)
            slope = form["activation_slope"]
            if slope != 1.0:
                active = gate * torch.sigmoid(slope * gate)
            else:
                active = activate(gate, form["activation"])
            if limit > 0 and form["limit_after"]:
                active = active.clamp(max=limit)
            hidden = active * (up + form["up_offset"] if form["up_offset"] else up)
        else:
            hidden = activate(up, form["activation"])
        if form["inner_norm"]:
            hidden = self._norm(hidden, f"{name}.inner_norm")
        return self._linear(self._round(hidden), f"{name}.down")

    # Generation.

    def greedy(self, prompt: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Greedy continuation of prompt [T] with a cache.

        Returns the tokens [count] and, for each, by how much its log-probability leads.
        """
        cache = self.new_cache()
        logits = self.forward(prompt, cache)[-1]
        tokens, margins = [], []
        for _ in range(count):
            best = logits.log_softmax(-1).topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            if len(tokens) < count:
                logits = self.forward(torch.tensor(tokens[-1:]), cache)[-1]
        return torch.tensor(tokens, dtype=torch.int32), torch.tensor(margins, dtype=torch.float32)


def perplexity(model: RoutedDecoder, tokens: Tensor, window: int) -> float:
    """exp of the mean negative log-probability over non-overlapping windows.

    Window i holds tokens [i*window, (i+1)*window) and predicts all of them but its first; a last
    window may be shorter.
    """
    total = 0.0
    count = 0
    for start in range(0, len(tokens), window):
        piece = tokens[start:start + window]
        if len(piece) > 1:
            logits = model.forward(piece)[:-1].double()
            total += float(functional.cross_entropy(logits, piece[1:], reduction="sum"))
            count += len(piece) - 1
    return math.exp(total / count)
