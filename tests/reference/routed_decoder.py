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
import dataclasses
import json
import math
import pathlib
from typing import Any

import torch
from torch.nn import functional

import safetensors_io

Tensor = torch.Tensor
Json = dict[str, Any]

# Deliberate errors: a test that compares against goldens made with one of them must fail.
FAULTS = ("renormalize_off", "split_reversed", "gt_for_ge", "tile_for_interleave",
          "temperature_ignored")

_DEFAULT_NORM = {"kind": "rms"}
_DEFAULT_POSITION = {"kind": "rope"}


@dataclasses.dataclass
class Routes:
    """Selected experts of a routed block as compressed rows.

    Row r owns entries offsets[r] to offsets[r + 1]; experts ascend within a row.
    """

    offsets: Tensor  # int32 [R + 1]
    experts: Tensor  # int32 [A]
    weights: Tensor  # float32 [A]

    def rows_of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Rows that selected the expert, and its weight in each of them."""
        entries = (self.experts == expert).nonzero().flatten()
        rows = torch.searchsorted(self.offsets, entries.to(torch.int32), right=True) - 1
        return rows, self.weights[entries]

    def used(self) -> list[int]:
        return sorted(set(self.experts.tolist()))


def concatenate_routes(parts: list[Routes]) -> Routes:
    offsets = [torch.zeros(1, dtype=torch.int32)]
    total = 0
    for part in parts:
        offsets.append(part.offsets[1:] + total)
        total += int(part.offsets[-1])
    return Routes(torch.cat(offsets), torch.cat([p.experts for p in parts]),
                  torch.cat([p.weights for p in parts]))


def complete_config(config: Json) -> Json:
    """Fills in every default of the format; attention and feed_forward become lists of L."""
    out = copy.deepcopy(config)
    norm = out.setdefault("norm", dict(_DEFAULT_NORM))
    norm.setdefault("eps", 1e-5)
    norm.setdefault("placement", "pre")
    position = out.setdefault("position", dict(_DEFAULT_POSITION))
    if position["kind"] == "rope":
        position.setdefault("theta", 10000)
        position.setdefault("pairing", "half")
        position.setdefault("fraction", 1.0)
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        out.setdefault(key, 1.0)
    out.setdefault("tie_word_embeddings", False)
    for key, complete in (("attention", _complete_attention), ("feed_forward", _complete_ffn)):
        layers = out[key] if isinstance(out[key], list) else [out[key]] * out["num_hidden_layers"]
        out[key] = [complete(copy.deepcopy(layer)) for layer in layers]
    return out


def _complete_attention(attention: Json) -> Json:
    routed = attention["kind"] == "routed"
    attention.setdefault("num_kv_heads", 1 if routed else attention["num_heads"])
    attention.setdefault("bias", False)
    attention.setdefault("out_bias", False)
    attention.setdefault("scale", attention["head_dim"] ** -0.5)
    attention.setdefault("window", None)
    if routed:
        _complete_routing(attention["routing"])
    else:
        attention.setdefault("qk_norm", "none")
        attention.setdefault("group_order", "interleave")
    return attention


def _complete_ffn(feed_forward: Json) -> Json:
    feed_forward["expert"].setdefault("bias", False)
    feed_forward["expert"].setdefault("inner_norm", False)
    if feed_forward["kind"] == "routed":
        feed_forward.setdefault("shared_width", 0)
        feed_forward.setdefault("shared_gate", False)
        routing = feed_forward["routing"]
        _complete_routing(routing)
        split = routing.setdefault("split", {"heads": 1})
        for key, value in (("projection", True), ("bias", True), ("residual", False)):
            split.setdefault(key, value)
        if isinstance(routing["widths"], int):
            routing["widths"] = [routing["widths"]] * routing["num_experts"]
    return feed_forward


def _complete_routing(routing: Json) -> None:
    score = routing.setdefault("score", {"kind": "dot"})
    score.setdefault("bias", False)
    if score["kind"] == "cosine":
        for key, value in (("dim", 16), ("normalize_row", True), ("normalize_expert", True),
                           ("eps", 1e-12), ("temperature", "none")):
            score.setdefault(key, value)
    routing.setdefault("gate", "softmax")
    if routing["select"]["kind"] == "top_p":
        routing["select"].setdefault("compare", "ge")
        routing["select"].setdefault("max", routing["num_experts"])
    routing.setdefault("renormalize", False)
    routing.setdefault("scale", 1.0)


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


def lane_sum(values: Tensor) -> Tensor:
    """fp32 sum over the last axis in the order of the router's numerics contract.

    Lane l of 32 adds the 8-element groups l, l+32, ... in ascending order; the lanes are then
    added as a tree of distances 16, 8, 4, 2, 1.
    """
    lanes = [torch.zeros(values.shape[:-1]) for _ in range(32)]
    for index in range(values.shape[-1]):
        lane = index // 8 % 32
        lanes[lane] = lanes[lane] + values[..., index]
    for distance in (16, 8, 4, 2, 1):
        lanes = [lanes[i] + lanes[i + distance] for i in range(distance)]
    return lanes[0]


def rank_experts(scores: Tensor) -> Tensor:
    """Expert ids [R, E] by descending score; ties to the lower id; NaN last, after -inf."""
    missing = scores.isnan()
    order = scores.masked_fill(missing, -math.inf).sort(dim=1, descending=True, stable=True).indices
    last = missing.gather(1, order).to(torch.uint8).sort(dim=1, stable=True).indices
    return order.gather(1, last)


def select(scores: Tensor, routing: Json) -> Routes:
    """Gate and selection of fp32 scores [R, E].

    softmax gates:  X-MoE eq. 8, HMoE eq. 9 to 11;  top-p: HMoE eq. 10.
    """
    rows, num_experts = scores.shape
    order = rank_experts(scores)
    finite = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    highest = finite.amax(1, keepdim=True)
    usable = highest.isfinite()
    if routing["gate"] == "sigmoid":
        mass = 1.0 / (1.0 + torch.exp(-finite))
        total = torch.ones(rows)
    else:
        mass = torch.exp(finite - torch.where(usable, highest, torch.zeros_like(highest)))
        total = lane_sum(mass)
    ranked = mass.gather(1, order)

    chooser = routing["select"]
    if chooser["kind"] == "top_k":
        count = torch.full((rows,), chooser["k"])
    else:
        count = _top_p_count(ranked, total, chooser)
    kept = torch.arange(num_experts)[None] < count[:, None]

    # The selected sum runs in rank order, in fp32; cumsum would accumulate in double precision.
    selected_sum = torch.zeros(rows)
    for rank in range(num_experts):
        selected_sum = selected_sum + torch.where(kept[:, rank], ranked[:, rank], 0.0)
    if routing["gate"] == "softmax_selected" or routing["renormalize"]:
        denominator = selected_sum
    else:
        denominator = total
    gates = torch.where(denominator[:, None] == 0, 0.0, mass / denominator[:, None])
    gates = torch.where(usable, gates * routing["scale"], 0.0)

    chosen = torch.zeros(rows, num_experts, dtype=torch.bool).scatter(1, order, kept)
    offsets = functional.pad(chosen.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    experts = chosen.nonzero()[:, 1].to(torch.int32)  # row-major, so ascending within a row
    return Routes(offsets, experts, gates[chosen].float())


def _top_p_count(ranked: Tensor, total: Tensor, chooser: Json) -> Tensor:
    """Number of experts per row: first n whose sequential fp32 sum reaches p * Z."""
    threshold = torch.tensor(chooser["p"], dtype=torch.float32) * total
    count = torch.full((len(ranked),), chooser["max"])
    running = torch.zeros(len(ranked))
    open_rows = torch.ones(len(ranked), dtype=torch.bool)
    for rank in range(chooser["max"]):
        running = running + ranked[:, rank]
        reached = running >= threshold if chooser["compare"] == "ge" else running > threshold
        count[open_rows & reached] = rank + 1
        open_rows &= ~reached
    return count


def rope(x: Tensor, positions: Tensor, position: Json) -> Tensor:
    """Rotates the first fraction * d_h dimensions of x [n, heads, d_h] by the row's position."""
    size = round(position["fraction"] * x.shape[-1])
    frequency = float(position["theta"]) ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = positions.double()[:, None] * frequency[None]
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    rotated = x.clone()
    if position["pairing"] == "half":
        first, second = slice(0, size // 2), slice(size // 2, size)
    else:
        first, second = slice(0, size, 2), slice(1, size, 2)
    a, b = x[..., first], x[..., second]
    rotated[..., first] = a * cos - b * sin
    rotated[..., second] = b * cos + a * sin
    return rotated


def sinusoidal(positions: Tensor, d: int) -> Tensor:
    """[T, d]: all sines, then all cosines; f_j = 10000^(-j / (d/2 - 1))."""
    half = d // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / (half - 1))
    angle = positions.double()[:, None] * frequency[None]
    return torch.cat([angle.sin(), angle.cos()], 1)


def activate(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return functional.silu(x)
    if name == "relu":
        return functional.relu(x)
    return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


class Cache:
    """Keys (rotated) and values of every layer, each [S, G, d_h]."""

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
                        for name, value in tensors.items()}
        self.wide = torch.promote_types(dtype, torch.float32)
        self.bf16_products = bf16_products
        if bf16_products:
            tied = self.config["tie_word_embeddings"]
            for name, value in self.tensors.items():
                lookup = name.startswith("embed_position") or (name == "embed.weight" and not tied)
                if value.dim() == 2 and ".router." not in name and not lookup:
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
        cache = cache or self.new_cache()
        self.recorded = {}
        config = self.config
        positions = torch.arange(cache.length, cache.length + len(tokens))
        x = self._embed(tokens, positions)
        for layer in range(config["num_hidden_layers"]):
            x = self._block(x, layer, "attention", positions, cache)
            x = self._block(x, layer, "feed_forward", positions, cache)
        cache.length += len(tokens)
        if config["norm"]["placement"] == "pre":
            x = self._norm(x, "norm")
        head = "embed" if config["tie_word_embeddings"] else "head"
        return (x @ self.tensors[f"{head}.weight"].t()).to(self.wide) * config["logit_scale"]

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tensors["embed.weight"][tokens] * self.config["embedding_scale"]
        kind = self.config["position"]["kind"]
        if kind == "learned":
            x = x + self.tensors["embed_position.weight"][positions]
        elif kind == "sinusoidal":
            x = x + sinusoidal(positions, x.shape[1]).to(x.dtype)
        return x

    def _block(self, x: Tensor, layer: int, part: str, positions: Tensor, cache: Cache) -> Tensor:
        """One residual branch; models.md section 1 gives both placements of the norm."""
        name = f"blocks.{layer}.{part}"
        before = self.config["norm"]["placement"] == "pre"
        inner = self._round(self._norm(x, f"{name}.norm") if before else x)
        if part == "attention":
            branch = self._attention(inner, layer, positions, cache)
        else:
            branch = self._feed_forward(inner, layer)
        x = x + self.config["residual_scale"] * branch
        return x if before else self._norm(x, f"{name}.norm")

    def _norm(self, x: Tensor, name: str, kind: str | None = None) -> Tensor:
        """RMS or layer norm over the last axis, statistics at least in fp32."""
        weight = self.tensors[f"{name}.weight"].to(self.wide)
        eps = self.config["norm"]["eps"]
        wide = x.to(self.wide)
        if (kind or self.config["norm"]["kind"]) == "rms":
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
        else:
            wide = wide - wide.mean(-1, keepdim=True)
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
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
        shape = (len(x), settings["num_kv_heads"], settings["head_dim"])
        keys, values = self._linear(x, f"{name}.k"), self._linear(x, f"{name}.v").view(shape)
        keys = self._qk_norm(keys.view(shape), f"{name}.k_norm", settings)
        keys = self._round(self._rotate(keys, positions))
        keys, values = cache.extend(layer, keys, self._round(values))
        if settings["kind"] == "dense":
            out = self._dense_heads(x, name, settings, positions, keys, values)
        else:
            out = self._expert_heads(x, name, settings, positions, keys, values)
        if settings["out_bias"]:
            out = out + self.tensors[f"{name}.out_bias"]
        return out

    def _dense_heads(self, x: Tensor, name: str, settings: Json, positions: Tensor, keys: Tensor,
                     values: Tensor) -> Tensor:
        heads, groups = settings["num_heads"], settings["num_kv_heads"]
        q = self._linear(x, f"{name}.q").view(len(x), heads, settings["head_dim"])
        q = self._rotate(self._qk_norm(q, f"{name}.q_norm", settings), positions)
        if settings["group_order"] == "tile" or self.fault == "tile_for_interleave":
            kv_head = torch.arange(heads) % groups
        else:
            kv_head = torch.arange(heads) // (heads // groups)
        out = self._attend(q, positions, keys[:, kv_head], values[:, kv_head], settings)
        return self._linear(self._round(out.flatten(1)), f"{name}.o")

    def _expert_heads(self, x: Tensor, name: str, settings: Json, positions: Tensor, keys: Tensor,
                      values: Tensor) -> Tensor:
        """MoA eq. 6 to 9: expert e projects q, attends over the shared k and v, projects back."""
        routes = self._route(x, f"{name}.router", settings["routing"])
        out = torch.zeros(x.shape, dtype=self.wide)
        for expert in routes.used():
            rows, weights = routes.rows_of(expert)
            q = self._linear(x[rows], f"{name}.experts.{expert}.q")
            q = q.view(len(rows), settings["num_kv_heads"], settings["head_dim"])
            q = self._rotate(q, positions[rows])
            heads = self._attend(q, positions[rows], keys, values, settings)
            result = self._linear(self._round(heads.flatten(1)), f"{name}.experts.{expert}.o")
            out[rows] += weights[:, None] * self._round(result).to(self.wide)
        return out.to(self.dtype)

    def _qk_norm(self, x: Tensor, name: str, settings: Json) -> Tensor:
        """x [T, heads, d_h]: RMS over each head, or over all heads together."""
        kind = settings.get("qk_norm", "none")
        if kind == "head":
            return self._norm(x, name, "rms")
        if kind == "full":
            return self._norm(x.flatten(1), name, "rms").view(x.shape)
        return x

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        position = self.config["position"]
        return rope(x, positions, position) if position["kind"] == "rope" else x

    def _attend(self, q: Tensor, positions: Tensor, keys: Tensor, values: Tensor,
                settings: Json) -> Tensor:
        """Causal softmax attention. q [n, heads, d_h], keys and values [S, heads, d_h]."""
        scores = torch.einsum("nhc,shc->hns", q, keys).to(self.wide) * settings["scale"]
        visible = torch.arange(len(keys))[None] <= positions[:, None]
        if settings["window"] is not None:
            visible &= torch.arange(len(keys))[None] > positions[:, None] - settings["window"]
        scores = scores.masked_fill(~visible[None], -math.inf)
        return torch.einsum("hns,shc->nhc", scores.softmax(-1).to(self.dtype), values)

    # Routing.

    def _scores(self, rows: Tensor, name: str, score: Json) -> Tensor:
        """fp32 scores [R, E]. Cosine: X-MoE eq. 7 and 8."""
        rows = rows.float()
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
        _, layer, part, _ = name.split(".")
        key = f"{layer}.{part}"
        if self.replay is not None:
            routes = self.replay[key]
        else:
            if self.fault == "renormalize_off":
                routing = {**routing, "renormalize": False}
            if self.fault == "gt_for_ge" and routing["select"]["kind"] == "top_p":
                routing = {**routing, "select": {**routing["select"], "compare": "gt"}}
            routes = select(self._scores(rows, name, routing["score"]), routing)
        self.recorded[key] = routes
        return routes

    # Feed-forward.

    def _feed_forward(self, x: Tensor, layer: int) -> Tensor:
        settings = self.config["feed_forward"][layer]
        name = f"blocks.{layer}.feed_forward"
        if settings["kind"] == "dense":
            return self._expert(x, name, settings["expert"])
        routing = settings["routing"]
        rows = self._split(x, name, routing["split"])
        y = self._mixture(rows, name, settings)
        if routing["split"]["residual"]:
            y = y + rows  # MH-MoE eq. 6
        y = self._merge(y, name, routing["split"])
        if settings["shared_width"] > 0:
            shared = self._expert(x, f"{name}.shared", settings["expert"])
            if settings["shared_gate"]:
                shared = shared * torch.sigmoid(self._linear(x, f"{name}.shared_gate"))
            y = y + shared
        return y

    def _split(self, x: Tensor, name: str, split: Json) -> Tensor:
        """MH-MoE eq. 3 and 4: tokens [T, d] -> sub-tokens [T*h, d/h], those of a token adjacent."""
        heads = split["heads"]
        if heads == 1:
            return x
        if split["projection"]:
            x = self._round(self._linear(x, f"{name}.split"))
        parts = x.view(len(x), heads, -1)
        if self.fault == "split_reversed":
            parts = parts.flip(1)
        return parts.reshape(len(x) * heads, -1)

    def _merge(self, y: Tensor, name: str, split: Json) -> Tensor:
        """MH-MoE eq. 8 and 9: sub-tokens in order side by side, then the merge layer."""
        if split["heads"] == 1:
            return y
        y = y.reshape(len(y) // split["heads"], -1)
        return self._linear(self._round(y), f"{name}.merge") if split["projection"] else y

    def _mixture(self, rows: Tensor, name: str, settings: Json) -> Tensor:
        """Weighted sum of the selected experts in ascending id, accumulated at least in fp32."""
        routes = self._route(rows, f"{name}.router", settings["routing"])
        out = torch.zeros(rows.shape, dtype=self.wide)
        for expert in routes.used():
            chosen, weights = routes.rows_of(expert)
            result = self._expert(rows[chosen], f"{name}.experts.{expert}", settings["expert"])
            out[chosen] += weights[:, None] * self._round(result).to(self.wide)
        return out.to(self.dtype)

    def _expert(self, x: Tensor, name: str, form: Json) -> Tensor:
        """plain: down(act(up x)); gated: down(act(gate x) * up x); HMoE section 2 is gated silu."""
        up = self._linear(x, f"{name}.up")
        if form["form"] == "gated":
            hidden = activate(self._linear(x, f"{name}.gate"), form["activation"]) * up
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
