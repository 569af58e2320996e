"""A fast implementation of the bundled models for training.

It computes the same function as routed_decoder.py, for only those settings that the bundled models
use. Parameters have the names of the native format, except that the gate and up projections of an
expert are one matrix `gate_up`, which is split at export.
"""

import math

import torch
from torch.nn import functional

import grouped_ops as ops
from bundled_configs import Config, expert_widths

Tensor = torch.Tensor
# X-MoE: the initial value of the learned temperature, and the constant temperature in the balance
# loss (eq. 9).
TAU_0 = {"softmax": 0.3, "sigmoid": 0.07}
# X-MoE section 3.1: the norm of the expert embeddings, which training does not change.
EMBEDDING_NORM = 0.1


class Statistics:
    """Routing statistics of one forward pass. Each list has one value per routed block."""

    def __init__(self) -> None:
        self.balance: list[Tensor] = []
        self.z_loss: list[Tensor] = []
        self.penalty: list[Tensor] = []
        self.entropy: list[Tensor] = []
        self.selected_width: list[float] = []
        self.loads: list[Tensor] = []


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rope_tables(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns the cosines and signed sines [length, head_dim] of RoPE with half pairing."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency[None]
    return torch.cat([angle.cos()] * 2, 1), torch.cat([-angle.sin(), angle.sin()], 1)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Applies RoPE to x [..., T, d_h]; dimension i is paired with dimension i + d_h/2."""
    cos, sin = tables
    half = x.shape[-1] // 2
    return x * cos + torch.cat([x[..., half:], x[..., :half]], -1) * sin


class FastModel:
    """Holds the parameters in a flat dict and computes the forward pass over tokens [B, T]."""

    def __init__(self, config: Config, seed: int = 0) -> None:
        self.config = config
        self.parameters: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)
        self._rope: dict[int, tuple[Tensor, Tensor]] = {}
        d, depth = config["hidden_size"], config["num_hidden_layers"]
        self._normal("embed.weight", (config["vocab_size"], d), 0.04)
        self._ones("norm.weight", d)
        for layer in range(depth):
            self._init_attention(f"blocks.{layer}.attention", d, depth)
            self._init_feed_forward(f"blocks.{layer}.feed_forward", d, depth)

    def _normal(self, name: str, shape: tuple[int, ...], std: float) -> None:
        self.parameters[name] = torch.randn(shape, generator=self._generator) * std

    def _ones(self, name: str, size: int) -> None:
        self.parameters[name] = torch.ones(size)

    def _init_router(self, base: str, routing: Config, width: int) -> None:
        score, experts = routing["score"], routing["num_experts"]
        if score["kind"] == "cosine":
            self._normal(f"{base}.projection.weight", (score["dim"], width), width ** -0.5)
            self._normal(f"{base}.experts.weight", (experts, score["dim"]), 1.0)
            self._restore_norm(f"{base}.experts.weight")
            self.parameters[f"{base}.temperature"] = torch.full((1,), TAU_0[routing["gate"]])
        else:
            self._normal(f"{base}.weight", (experts, width), width ** -0.5)

    @torch.no_grad()
    def _restore_norm(self, name: str) -> None:
        rows = self.parameters[name]
        rows.mul_(EMBEDDING_NORM / rows.norm(dim=1, keepdim=True).clamp(min=1e-12))

    def restore_embedding_norms(self) -> None:
        """Sets the norms of the expert embeddings of all cosine routers to EMBEDDING_NORM."""
        for name in self.parameters:
            if name.endswith(".router.experts.weight"):
                self._restore_norm(name)

    def _init_attention(self, base: str, d: int, depth: int) -> None:
        attention = self.config["attention"]
        head, kv = attention["head_dim"], attention.get("num_kv_heads", 1)
        self._ones(f"{base}.norm.weight", d)
        for name in ("k", "v"):
            self._normal(f"{base}.{name}.weight", (kv * head, d), ops.init_std(d))
        if attention["kind"] == "dense":
            width = attention["num_heads"] * head
            self._normal(f"{base}.q.weight", (width, d), ops.init_std(d))
            self._normal(f"{base}.o.weight", (d, width), ops.init_std(width, depth))
            return
        routing = attention["routing"]
        self._init_router(f"{base}.router", routing, d)
        for j in range(routing["num_experts"]):
            self._normal(f"{base}.experts.{j}.q.weight", (kv * head, d), ops.init_std(d))
            self._normal(f"{base}.experts.{j}.o.weight", (d, kv * head), ops.init_std(head, depth))

    def _init_expert(self, base: str, width: int, c: int, depth: int) -> None:
        self._normal(f"{base}.gate_up.weight", (2 * width, c), ops.init_std(c))
        self._normal(f"{base}.down.weight", (c, width), ops.init_std(width, depth))

    def _init_feed_forward(self, base: str, d: int, depth: int) -> None:
        feed_forward = self.config["feed_forward"]
        self._ones(f"{base}.norm.weight", d)
        if feed_forward["kind"] == "dense":
            self._init_expert(base, feed_forward["width"], d, depth)
            return
        routing = feed_forward["routing"]
        heads = routing.get("split", {}).get("heads", 1)
        if heads > 1:
            self._normal(f"{base}.split.weight", (d, d), ops.init_std(d))
            self._normal(f"{base}.merge.weight", (d, d), ops.init_std(d))
            self.parameters[f"{base}.split.bias"] = torch.zeros(d)
            self.parameters[f"{base}.merge.bias"] = torch.zeros(d)
        self._init_router(f"{base}.router", routing, d // heads)
        for j, width in enumerate(expert_widths(routing)):
            self._init_expert(f"{base}.experts.{j}", width, d // heads, depth)

    def _get(self, name: str) -> Tensor:
        return self.parameters[name]

    def _rope_for(self, length: int) -> tuple[Tensor, Tensor]:
        if length not in self._rope:
            cos, sin = rope_tables(length, self.config["attention"]["head_dim"],
                                   self.config["position"]["theta"])
            self._rope[length] = cos.to(ops.low_dtype), sin.to(ops.low_dtype)
        return self._rope[length]

    def _scores(self, base: str, routing: Config, x: Tensor) -> Tensor:
        """Returns fp32 scores [rows, E]; cosine scores follow X-MoE eq. 7, without temperature."""
        if routing["score"]["kind"] == "dot":
            return x @ self._get(f"{base}.weight").t()
        u = functional.normalize(x @ self._get(f"{base}.projection.weight").t(), dim=1, eps=1e-12)
        experts = functional.normalize(self._get(f"{base}.experts.weight"), dim=1, eps=1e-12)
        return u @ experts.t()

    def _route(self, base: str, routing: Config, x: Tensor, widths: Tensor | None,
               stats: Statistics, stop_denominator: bool) -> tuple[ops.Plan, Tensor]:
        """Selects experts for the fp32 rows x [rows, c].

        Returns the dispatch plan and the gates [A], one per assignment, in row order.
        `stop_denominator` keeps gradients from flowing through the renormalizing sum. `widths` are
        the experts' widths, or None for attention.
        """
        raw = self._scores(base, routing, x)
        cosine = routing["score"]["kind"] == "cosine"
        scores = raw / self._get(f"{base}.temperature").clamp(min=1e-4) if cosine else raw
        probabilities = scores.sigmoid() if routing["gate"] == "sigmoid" else scores.softmax(1)
        select = routing["select"]
        if select["kind"] == "top_k":
            experts = torch.topk(scores.detach(), select["k"], dim=1).indices
            gates = probabilities.gather(1, experts)
            sums = gates.sum(1, keepdim=True)
            if routing["renormalize"]:
                gates = gates / (sums.detach() if stop_denominator else sums)
            rows = torch.arange(len(x)).repeat_interleave(select["k"])
            experts, gates, fixed = experts.reshape(-1), gates.reshape(-1), select["k"]
        else:
            ordered, indices = probabilities.detach().sort(dim=1, descending=True, stable=True)
            before = ordered.cumsum(1) - ordered
            chosen = torch.zeros_like(ordered, dtype=torch.bool)
            chosen.scatter_(1, indices, before < select["p"])
            masked = probabilities * chosen
            normal = masked / masked.sum(1, keepdim=True)
            rows, experts = chosen.nonzero(as_tuple=True)
            gates, fixed = normal[rows, experts], None
        gates = gates * routing.get("scale", 1.0)
        plan = ops.Plan(rows, experts, routing["num_experts"], len(x), fixed)
        self._collect(stats, routing, raw, probabilities, plan, widths, cosine)
        return plan, gates

    def _collect(self, stats: Statistics, routing: Config, raw: Tensor, probabilities: Tensor,
                 plan: ops.Plan, widths: Tensor | None, cosine: bool) -> None:
        """Adds the losses of one block to `stats`: the balance loss E * sum(f * P) (X-MoE eq. 9,
        MH-MoE eq. 10; MoA eq. 13 with f normalized to the sum 1), MoA's z-loss (eq. 16), and HMoE's
        parameter penalty (eq. 4) and entropy (eq. 5)."""
        experts = routing["num_experts"]
        load = torch.tensor(plan.counts, dtype=torch.float32) / plan.num_rows
        tau = TAU_0[routing["gate"]]
        mean = (raw / tau).softmax(1).mean(0) if cosine else probabilities.mean(0)
        share = load if widths is not None else load / load.sum()
        stats.balance.append(experts * (share * mean).sum())
        stats.loads.append(load)
        stats.z_loss.append(raw.logsumexp(1).square().mean())
        log = (probabilities + 1e-9).log()
        stats.entropy.append(-(probabilities * log).sum(1).mean())
        if widths is not None:
            relative = widths / widths.mean()
            stats.penalty.append(experts * (load * relative * mean).sum())
            stats.selected_width.append(float((load * widths).sum()))

    def _attention(self, base: str, x: Tensor, shape: tuple[int, int],
                   stats: Statistics) -> Tensor:
        """Returns the attention output [B*T, d] for normalized fp32 inputs x [B*T, d]."""
        attention = self.config["attention"]
        batch, length = shape
        head, kv = attention["head_dim"], attention.get("num_kv_heads", 1)
        low = x.to(ops.low_dtype)
        tables = self._rope_for(length)

        def heads(values: Tensor) -> Tensor:
            return values.view(batch, length, -1, head).transpose(1, 2)

        k = rotate(heads(ops.low_linear(low, self._get(f"{base}.k.weight"))), tables)
        v = heads(ops.low_linear(low, self._get(f"{base}.v.weight")))
        if attention["kind"] == "dense":
            q = rotate(heads(ops.low_linear(low, self._get(f"{base}.q.weight"))), tables)
            repeat = attention["num_heads"] // kv
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            out = out.transpose(1, 2).reshape(batch * length, -1)
            return ops.low_linear(out, self._get(f"{base}.o.weight")).float()
        # MoA (eq. 6 to 9): every selected expert is one query head over the shared keys and values.
        routing = attention["routing"]
        plan, gates = self._route(f"{base}.router", routing, x, None, stats, True)
        names = [f"{base}.experts.{j}" for j in range(routing["num_experts"])]
        count = routing["select"]["k"]
        q = ops.GroupedLinear.apply(ops.Gather.apply(low, plan), plan.blocks,
                                    *[self._get(f"{n}.q.weight") for n in names])
        q = rotate(heads(ops.FromSorted.apply(q, plan).view(-1, count * head)), tables)
        k, v = k.expand(-1, count, -1, -1), v.expand(-1, count, -1, -1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).reshape(-1, head)
        out = ops.GroupedLinear.apply(ops.ToSorted.apply(out, plan), plan.blocks,
                                      *[self._get(f"{n}.o.weight") for n in names])
        return ops.Combine.apply(out, gates, plan)

    def _feed_forward(self, base: str, x: Tensor, stats: Statistics) -> Tensor:
        feed_forward = self.config["feed_forward"]
        low = x.to(ops.low_dtype)
        if feed_forward["kind"] == "dense":
            return ops.GatedExperts.apply(low, [len(x)], self._get(f"{base}.gate_up.weight"),
                                          self._get(f"{base}.down.weight")).float()
        routing = feed_forward["routing"]
        heads = routing.get("split", {}).get("heads", 1)
        if heads > 1:
            x = ops.low_linear(low, self._get(f"{base}.split.weight"),
                               self._get(f"{base}.split.bias")).view(-1, x.shape[1] // heads)
            low, x = x, x.float()
        widths = expert_widths(routing)
        plan, gates = self._route(f"{base}.router", routing, x,
                                  torch.tensor(widths, dtype=torch.float32), stats, False)
        names = [f"{base}.experts.{j}" for j in range(len(widths))]
        y = ops.GatedExperts.apply(ops.Gather.apply(low, plan), plan.blocks,
                                   *[self._get(f"{n}.gate_up.weight") for n in names],
                                   *[self._get(f"{n}.down.weight") for n in names])
        y = ops.Combine.apply(y, gates, plan)
        if routing.get("split", {}).get("residual", False):
            y = y + x  # MH-MoE, eq. 6
        if heads > 1:
            merged = y.reshape(-1, y.shape[1] * heads).to(ops.low_dtype)
            y = ops.low_linear(merged, self._get(f"{base}.merge.weight"),
                               self._get(f"{base}.merge.bias")).float()
        return y

    def hidden(self, tokens: Tensor, stats: Statistics) -> Tensor:
        """Returns the final normalized fp32 states [B*T, d] for tokens [B, T]."""
        eps = self.config["norm"]["eps"]
        x = functional.embedding(tokens, self._get("embed.weight")).flatten(0, 1)
        x = x * self.config["embedding_scale"]
        for layer in range(self.config["num_hidden_layers"]):
            base = f"blocks.{layer}.attention"
            normal = rms_norm(x, self._get(f"{base}.norm.weight"), eps)
            x = x + self._attention(base, normal, tuple(tokens.shape), stats)
            base = f"blocks.{layer}.feed_forward"
            normal = rms_norm(x, self._get(f"{base}.norm.weight"), eps)
            x = x + self._feed_forward(base, normal, stats)
        return rms_norm(x, self._get("norm.weight"), eps)

    def loss(self, tokens: Tensor, stats: Statistics) -> Tensor:
        """Returns the mean cross entropy of the next tokens in `tokens` [B, T+1]."""
        states = self.hidden(tokens[:, :-1], stats)
        return ops.TiedCrossEntropy.apply(states, self._get("embed.weight"),
                                          tokens[:, 1:].reshape(-1))

    def native_tensors(self) -> dict[str, Tensor]:
        """Returns the parameters under the names of the native format, with gate and up split."""
        out = {}
        for name, value in self.parameters.items():
            value = value.detach()
            if name.endswith("gate_up.weight"):
                gate, up = value.chunk(2, 0)
                out[name.replace("gate_up", "gate")] = gate.contiguous()
                out[name.replace("gate_up", "up")] = up.contiguous()
            else:
                out[name] = value
        return out

    def parameter_count(self) -> int:
        return sum(math.prod(value.shape) for value in self.parameters.values())

