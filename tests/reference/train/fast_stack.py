"""A fast implementation of the bundled encoders and translators for training.

It computes the same function as routed_encoder.py and routed_pair.py, for only those settings that
the bundled models use. Rows of all sequences of a batch lie one after the other, without padding;
only attention sees sequences side by side. Parameters have the names of the native format.
"""

import torch
from torch.nn import functional

import grouped_ops as ops
from bundled_configs import Config
from fast_model import FastModel, Statistics, rope_tables, rotate
from positions import sinusoidal
from routed_decoder import activate, complete_config

Tensor = torch.Tensor


class Sequences:
    """The places of packed rows: sequences of `lengths` tokens one after the other.

    flat:      [N] place of each row in the padded form [B * T], or None if nothing is padded
    positions: [N] position of each row in its sequence
    absent:    [B, 1, 1, T] which places hold no row, or None if nothing is padded
    later:     [T, T] which places a causal row does not see; padding lies behind its sequence
    """

    def __init__(self, lengths: Tensor) -> None:
        self.batch, self.longest = len(lengths), int(lengths.max())
        starts = lengths.cumsum(0) - lengths
        self.positions = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
        self.flat = self.absent = None
        self.later = torch.ones(self.longest, self.longest, dtype=torch.bool).triu(1)
        if int(lengths.min()) < self.longest:
            number = torch.arange(self.batch).repeat_interleave(lengths)
            self.flat = number * self.longest + self.positions
            self.absent = (torch.arange(self.longest)[None] >= lengths[:, None])[:, None, None]

    def heads(self, x: Tensor, head: int) -> Tensor:
        """Brings packed rows [N, heads * head] to [B, heads, T, head]."""
        if self.flat is not None:
            padded = x.new_zeros(self.batch * self.longest, x.shape[1])
            x = padded.index_copy(0, self.flat, x)
        return x.view(self.batch, self.longest, -1, head).transpose(1, 2)

    def rows(self, x: Tensor) -> Tensor:
        """The reverse of heads()."""
        x = x.transpose(1, 2).reshape(self.batch * self.longest, -1)
        return x if self.flat is None else x.index_select(0, self.flat)


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """Softmax attention of q [B, H, T, h] to k and v [B, H or 1, S, h]; `hidden` [.., T or 1, S]
    marks the keys that a row does not see. Sequences are short, so the scores are stored: this is
    several times as fast as torch's fused attention."""
    shape = (*q.shape[:3], k.shape[2])
    if k.shape[1] == 1:  # all heads share keys and values
        q = q.flatten(1, 2)[:, None]
    scores = ((q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)).view(shape)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    shares = scores.softmax(-1)
    if k.shape[1] == 1:
        return (shares.flatten(1, 2)[:, None] @ v).view(*shape[:3], -1)
    return shares @ v


class FastStack(FastModel):
    """An encoder or a decoder, without the tables and heads that stacks share."""

    def __init__(self, config: Config, prefix: str, parameters: dict[str, Tensor],
                 generator: torch.Generator) -> None:
        self.config = complete_config(config)
        self.parameters = parameters
        self.prefix = prefix
        self._generator = generator
        d, depth = config["hidden_size"], config["num_hidden_layers"]
        if self.config["position"]["kind"] == "sinusoidal":
            places = torch.arange(config["max_position_embeddings"])
            self.sinusoids = sinusoidal(places + self.config["position"]["first"], d).float()
        if self.config["embedding_norm"]:
            self._layer_norm_at("embed_norm", d)
        for part in ("attention", "cross_attention", "feed_forward"):
            for layer, settings in enumerate(self.config.get(part, [])):
                if settings["kind"] == "none":
                    continue
                if settings["norm_placement"] != "none":
                    self._layer_norm_at(f"blocks.{layer}.{part}.norm", d)
                init = self._init_network if part == "feed_forward" else self._init_heads
                init(f"blocks.{layer}.{part}", settings, d, depth)

    # Names of the native format have the stack in front.

    def _normal(self, name: str, shape: tuple[int, ...], std: float) -> None:
        super()._normal(self.prefix + name, shape, std)

    def _get(self, name: str) -> Tensor:
        return self.parameters[self.prefix + name]

    def _layer_norm_at(self, name: str, d: int) -> None:
        self.parameters[f"{self.prefix}{name}.weight"] = torch.ones(d)
        self.parameters[f"{self.prefix}{name}.bias"] = torch.zeros(d)

    def _linear_at(self, name: str, out: int, fan_in: int, bias: bool, depth: int = 0) -> None:
        self._normal(f"{name}.weight", (out, fan_in), ops.init_std(fan_in, depth))
        if bias:
            self.parameters[f"{self.prefix}{name}.bias"] = torch.zeros(out)

    def _init_heads(self, base: str, settings: Config, d: int, depth: int) -> None:
        head, bias = settings["head_dim"], settings["bias"]
        for name in ("k", "v"):
            self._linear_at(f"{base}.{name}", settings["num_kv_heads"] * head, d, bias)
        if settings["kind"] == "dense":
            width = settings["num_heads"] * head
            self._linear_at(f"{base}.q", width, d, bias)
            self._linear_at(f"{base}.o", d, width, False, depth)
            if settings["out_bias"]:
                self.parameters[f"{self.prefix}{base}.out_bias"] = torch.zeros(d)
            return
        self._init_router(f"{base}.router", settings["routing"], d)
        for j in range(settings["routing"]["num_experts"]):
            self._linear_at(f"{base}.experts.{j}.q", head, d, False)
            self._linear_at(f"{base}.experts.{j}.o", d, head, False, depth)

    def _init_network(self, base: str, settings: Config, d: int, depth: int) -> None:
        if settings["kind"] == "dense":
            self._init_one(base, settings["expert"], settings["width"], d, depth)
            return
        routing = settings["routing"]
        self._init_router(f"{base}.router", routing, d)
        for j, width in enumerate(routing["widths"]):
            self._init_one(f"{base}.experts.{j}", settings["expert"], width, d, depth)

    def _init_one(self, base: str, form: Config, width: int, d: int, depth: int) -> None:
        for name in self._networks(base, form):
            if form["sublayer"] == "residual":
                self._layer_norm_at(f"{name}.norm", d)
            self._linear_at(f"{name}.up", width, d, form["bias"])
            self._linear_at(f"{name}.down", d, width, form["bias"], depth)

    @staticmethod
    def _networks(base: str, form: Config) -> list[str]:
        if form["sublayer"] == "plain":
            return [base]
        return [f"{base}.layers.{i}" for i in range(form["depth"])]

    # The forward pass.

    def _layer_norm(self, x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (x.shape[-1],), self._get(f"{name}.weight"),
                                     self._get(f"{name}.bias"), self.config["norm"]["eps"])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return ops.low_linear(x, self._get(f"{name}.weight"),
                              self.parameters.get(f"{self.prefix}{name}.bias"))

    def _heads_of(self, base: str, settings: Config, x: Tensor, places: Sequences, memory: Tensor,
                  memory_places: Sequences, stats: Statistics) -> Tensor:
        """Attention of the fp32 rows x to the rows `memory` in the low type."""
        head = settings["head_dim"]
        low = x.to(ops.low_dtype)
        k = memory_places.heads(self._linear(memory, f"{base}.k"), head)
        v = memory_places.heads(self._linear(memory, f"{base}.v"), head)
        hidden = memory_places.later if settings["causal"] else memory_places.absent
        if settings["kind"] == "dense":
            q = places.heads(self._linear(low, f"{base}.q"), head)
            if self.config["position"]["kind"] == "rope":
                tables = self._tables(places.longest, head, q.dtype)
                q, k = rotate(q, tables), rotate(k, tables)
            out = self._linear(places.rows(attend(q, k, v, hidden)), f"{base}.o").float()
            return out + self._get(f"{base}.out_bias") if settings["out_bias"] else out
        # MoA (eq. 6 to 9): every selected expert is one query head over the shared keys and values.
        routing = settings["routing"]
        count = routing["select"]["k"]
        plan, gates = self._route(f"{base}.router", routing, x, None, stats, True)
        names = [f"{base}.experts.{j}" for j in range(routing["num_experts"])]
        q = ops.GroupedLinear.apply(ops.Gather.apply(low, plan), plan.blocks,
                                    *[self._get(f"{n}.q.weight") for n in names])
        q = places.heads(ops.FromSorted.apply(q, plan).view(-1, count * head), head)
        out = places.rows(attend(q, k, v, hidden)).reshape(-1, head)
        out = ops.GroupedLinear.apply(ops.ToSorted.apply(out, plan), plan.blocks,
                                      *[self._get(f"{n}.o.weight") for n in names])
        return ops.Combine.apply(out, gates, plan)

    def _tables(self, length: int, head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = rope_tables(length, head, self.config["position"]["theta"])
        return cos.to(dtype), sin.to(dtype)

    def _network(self, base: str, form: Config, x: Tensor) -> Tensor:
        """One network, or X-MoE's stack of sub-layers with norms and residuals. x in fp32."""
        for name in self._networks(base, form):
            stacked = form["sublayer"] == "residual"
            inner = self._layer_norm(x, f"{name}.norm") if stacked else x
            inner = activate(self._linear(inner.to(ops.low_dtype), f"{name}.up"),
                             form["activation"])
            out = self._linear(inner, f"{name}.down").float()
            x = x + out if stacked else out
        return x

    def _mixture(self, base: str, settings: Config, x: Tensor, stats: Statistics) -> Tensor:
        if settings["kind"] == "dense":
            return self._network(base, settings["expert"], x)
        routing = settings["routing"]
        widths = torch.tensor(routing["widths"], dtype=torch.float32)
        plan, gates = self._route(f"{base}.router", routing, x, widths, stats, False)
        parts = ops.Gather.apply(x, plan).split(plan.blocks)
        out = [self._network(f"{base}.experts.{j}", settings["expert"], part)
               for j, part in enumerate(parts)]
        return ops.Combine.apply(torch.cat(out), gates, plan)

    def stack(self, tokens: Tensor, places: Sequences, stats: Statistics,
              source: Tensor | None = None, source_places: Sequences | None = None) -> Tensor:
        """The last rows [N, d], fp32, of packed tokens [N]; `source` are an encoder's rows."""
        x = functional.embedding(tokens, self.parameters["embed.weight"])
        x = x * self.config["embedding_scale"]
        if self.config["position"]["kind"] == "sinusoidal":
            x = x + self.sinusoids[places.positions]
        if self.config["embedding_norm"]:
            x = self._layer_norm(x, "embed_norm")
        for layer in range(self.config["num_hidden_layers"]):
            for part in ("attention", "cross_attention", "feed_forward"):
                settings = self.config[part][layer] if part in self.config else {"kind": "none"}
                if settings["kind"] == "none":
                    continue
                base = f"blocks.{layer}.{part}"
                if part == "feed_forward":
                    branch = self._mixture(base, settings, x, stats)
                elif part == "attention":
                    branch = self._heads_of(base, settings, x, places, x.to(ops.low_dtype), places,
                                            stats)
                else:
                    branch = self._heads_of(base, settings, x, places, source, source_places, stats)
                x = x + branch
                if settings["norm_placement"] == "post":
                    x = self._layer_norm(x, f"{base}.norm")
        return x


class FastMaskedLm(FastStack):
    """An encoder with the head of a masked language model."""

    def __init__(self, config: Config, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        super().__init__(config, "", {}, generator)
        d = config["hidden_size"]
        self._normal("embed.weight", (config["vocab_size"], d), 0.04)
        self._linear_at("head.layer", d, d, True)
        self._layer_norm_at("head.layer_norm", d)
        self.parameters["head.bias"] = torch.zeros(config["vocab_size"])

    def logits(self, x: Tensor) -> Tensor:
        """fp32 logits of rows x [n, d]."""
        x = self._linear(x.to(ops.low_dtype), "head.layer").float()
        x = self._layer_norm(functional.gelu(x), "head.layer_norm").to(ops.low_dtype)
        return ops.low_linear(x, self._get("embed.weight")).float() + self._get("head.bias")

    def loss(self, batch: tuple[Tensor, Tensor, Tensor, Tensor], stats: Statistics) -> Tensor:
        """Mean cross entropy of the hidden tokens. batch: packed tokens as the model sees them, the
        sequences' lengths, the rows to be predicted, and their tokens."""
        tokens, lengths, hidden, wanted = batch
        rows = self.stack(tokens, Sequences(lengths), stats)[hidden]
        return functional.cross_entropy(self.logits(rows), wanted)


class FastPair:
    """An encoder and a decoder that share the tied table of tokens."""

    def __init__(self, config: Config, seed: int = 0, smoothing: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.parameters: dict[str, Tensor] = {}
        self.smoothing = smoothing
        common = {key: value for key, value in config.items() if key not in ("encoder", "decoder")}
        shape = (config["vocab_size"], config["hidden_size"])
        self.parameters["embed.weight"] = torch.randn(shape, generator=generator) * shape[1] ** -0.5
        self.encoder, self.decoder = (
            FastStack({**common, **config[name], "model_type": kind}, f"{name}.", self.parameters,
                      generator)
            for name, kind in (("encoder", "routed_encoder"), ("decoder", "routed_decoder")))

    def rows(self, batch: tuple[Tensor, ...], stats: Statistics) -> Tensor:
        """The decoder's last rows. batch: packed sources and their lengths, packed inputs of the
        decoder, their lengths, and the next tokens."""
        source, source_lengths, inputs, lengths = batch[:4]
        places = Sequences(source_lengths)
        memory = self.encoder.stack(source, places, stats).to(ops.low_dtype)
        return self.decoder.stack(inputs, Sequences(lengths), stats, memory, places)

    def loss(self, batch: tuple[Tensor, ...], stats: Statistics,
             smoothing: float | None = None) -> Tensor:
        """Mean cross entropy of the next tokens, with smoothed labels while training."""
        smoothing = self.smoothing if smoothing is None else smoothing
        return ops.TiedCrossEntropy.apply(self.rows(batch, stats), self.parameters["embed.weight"],
                                          batch[4], smoothing)

    def restore_embedding_norms(self) -> None:
        """Translators have no cosine routers."""

    def native_tensors(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.parameters.items()}
