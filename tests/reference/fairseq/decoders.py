"""Plain implementations of the models that fairseq trains: torchscale's (dense, mixtures of
experts, X-MoE), MH-MoE's, MoA's, and fairseq's own dense ones. They follow the authors' code outside
of training, except that the second expert of a token is always used and that experts have room for
all tokens. Each class is a decoder or, with `side` "encoder", an encoder; Pair joins two of them.

`state` maps names to tensors as fairseq stores them (experts with their numbers in the model),
`options` has the model's options. Everything is computed in f64, one row at a time.
"""

import math

import torch

GELU = {"gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
        "gelu_accurate": lambda x: 0.5 * x * (1 + torch.tanh(
            math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))}
GELU["gelu_fast"] = GELU["gelu_accurate"]
ACTIVATIONS = {"relu": lambda x: torch.clamp(x, min=0), "silu": lambda x: x * torch.sigmoid(x),
               "swish": lambda x: x * torch.sigmoid(x), **GELU}


class Decoder:
    """What all these models share: embeddings, positions, norms, the order of a layer."""

    def __init__(self, state, options, side="decoder"):
        self.side = side
        self.pair = "encoder" in {name.split(".")[0] for name in state} and any(
            ".encoder_attn." in name for name in state)
        self.source = None  # [S, d], what the decoder of a pair attends to
        self.state = {name: value.double() for name, value in state.items()}
        self.options = options
        self.gap = math.inf  # smallest distance between a chosen and a left-out expert's score

    def option(self, name, default=None):
        return self.options.get(name, default)

    def own(self, name):
        """The option of this name that the decoder and the encoder have for themselves."""
        return self.options[f"{self.side}_{name}"]

    def has(self, name):
        return name in self.state

    def norm(self, x, name, eps=None):
        eps = eps or self.option("layernorm_eps", 1e-5)
        weight = self.state[name + ".weight"]
        if self.option("rms_norm", False):
            return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight
        centered = x - x.mean(-1, keepdim=True)
        variance = (centered * centered).mean(-1, keepdim=True)
        return centered / torch.sqrt(variance + eps) * weight + self.state[name + ".bias"]

    def linear(self, x, name):
        y = x @ self.state[name + ".weight"].T
        return y + self.state[name + ".bias"] if self.has(name + ".bias") else y

    def softmax(self, scores):
        shifted = torch.exp(scores - scores.max(-1, keepdim=True).values)
        return shifted / shifted.sum(-1, keepdim=True)

    def select(self, scores, k):
        """Indices of the k largest of a row of scores, the largest first."""
        order = sorted(range(len(scores)), key=lambda e: (-scores[e].item(), e))
        if k < len(order):
            self.gap = min(self.gap, (scores[order[k - 1]] - scores[order[k]]).item())
        return order[:k]

    def position_rows(self, length):
        """The rows that are added to the embeddings; the first token has position 2."""
        d = self.own("embed_dim")
        if self.own("learned_pos"):
            return self.state[f"{self.side}.embed_positions.weight"][2:2 + length]
        half = d // 2
        rows = torch.zeros(length, d, dtype=torch.double)
        for t in range(length):
            for j in range(half):
                angle = (t + 2) * math.exp(-j * math.log(10000) / (half - 1))
                rows[t, j], rows[t, half + j] = math.sin(angle), math.cos(angle)
        return rows

    def embed(self, tokens):
        x = self.state[f"{self.side}.embed_tokens.weight"][tokens]
        if not self.option("no_scale_embedding"):
            x = x * math.sqrt(self.own("embed_dim"))
        if not self.option("no_token_positional_embeddings"):
            x = x + self.position_rows(len(tokens))
        if self.option("layernorm_embedding", False):
            x = self.norm(x, f"{self.side}.layernorm_embedding")
        return x

    def attend(self, q, keys, values, t, bias=0):
        """One head at position t: q [head], keys and values [T, head]; bias of the scores. Without
        t, as in an encoder and in attention to a source, it sees all keys."""
        if t is not None:
            keys, values = keys[:t + 1], values[:t + 1]
        scores = keys @ q / math.sqrt(len(q)) + bias
        return self.softmax(scores) @ values

    def last(self, t):
        """The position up to which attention of the row at position t to its own text sees."""
        return t if self.side == "decoder" else None

    def alpha(self):
        """DeepNorm's factor of the rows that bypass a block."""
        if not self.option("deepnorm", False):
            return 1.0
        if not self.pair:
            return (2.0 * self.own("layers")) ** 0.25
        layers = self.options["encoder_layers"], self.options["decoder_layers"]
        if self.side == "decoder":
            return (3.0 * layers[1]) ** 0.25
        return 0.81 * (layers[0] ** 4 * layers[1]) ** 0.0625

    def rows(self, tokens):
        """The rows that reach the head, or that a decoder attends to."""
        x = self.embed(tokens)
        last = f"{self.side}.layer_norm"
        final = self.has(last + ".weight")
        deepnorm = self.option("deepnorm", False)
        before = final and (not deepnorm or self.own("normalize_before"))  # pre-norm
        if self.option("no_decoder_final_norm", False) or not self.option("normalize_output", True):
            before = self.own("normalize_before")
        alpha = self.alpha()
        names = {name.split(".")[2] for name in self.state
                 if name.startswith(f"{self.side}.layers.")}
        for i in range(len(names)):
            prefix = f"{self.side}.layers.{i}."
            branches = [(self.attention, "self_attn_layer_norm"),
                        (self.cross_attention, "encoder_attn_layer_norm"),
                        (self.feed_forward, "final_layer_norm")]
            if self.side == "encoder" or not self.pair:
                del branches[1]
            if not any(name.startswith(prefix + "self_attn.") for name in self.state):
                branches = branches[-1:]  # experts that X-MoE inserts
            for branch, name in branches:
                norm = self.has(f"{prefix}{name}.weight")
                y = self.norm(x, prefix + name) if before and norm else x
                x = alpha * x + branch(y, prefix, i)
                if norm and not before:
                    x = self.norm(x, prefix + name)
        return self.norm(x, last) if final else x

    def logits(self, tokens):
        x = self.rows(tokens)
        if self.side == "encoder":
            return self.masked_logits(x)
        if self.option("share_decoder_input_output_embed") or self.option("share_all_embeddings"):
            return x @ self.state["decoder.embed_tokens.weight"].T
        return x @ self.state["decoder.output_projection.weight"].T

    def masked_logits(self, x):
        """The head of masked tokens: a layer with a norm of its own eps, the matrix, a bias."""
        head = "encoder.output_projection"
        if not self.has(head + ".dense.weight"):
            matrix = self.state.get(head + ".weight", self.state["encoder.embed_tokens.weight"])
            return x @ matrix.T
        x = ACTIVATIONS[self.option("activation_fn")](self.linear(x, head + ".dense"))
        x = self.norm(x, head + ".layer_norm", 1e-5)
        return x @ self.state["encoder.embed_tokens.weight"].T + self.state[head + ".bias"]

    def classes(self, tokens, name):
        """The logits of a head of classification, which reads the first row."""
        head = f"classification_heads.{name}"
        act = {"tanh": torch.tanh, **ACTIVATIONS}[self.option("pooler_activation_fn")]
        row = self.rows(tokens)[:1]
        return self.linear(act(self.linear(row, head + ".dense")), head + ".out_proj")[0]


class Torchscale(Decoder):
    """torchscale's models, and with options of the fork those of MH-MoE."""

    @property
    def fork(self):
        return "mhmoe_heads_number" in self.options

    def rotate(self, x, t):
        """Rotates the first part of a head at position t; dimension i pairs with i + n / 2."""
        n = int(self.option("partial_rotary_factor", 1.0) * len(x))
        out = x.clone()
        for i in range(n // 2):
            angle = t * 10000.0 ** (-2 * i / n)
            a, b = x[i], x[i + n // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + n // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def bucket(self, distance):
        """The bucket of a key that is `distance` positions before the query."""
        buckets = self.option("rel_pos_buckets") // 2  # the others are for later positions
        if distance < 0:
            return buckets + self.bucket(-distance)
        exact = buckets // 2
        if distance < exact:
            return distance
        part = torch.log(torch.tensor(float(distance)) / exact)  # f32
        part = part / math.log(self.option("max_rel_pos") / exact) * (buckets - exact)
        return min(exact + int(part.item()), buckets - 1)

    def relative_bias(self, t, head, length):
        """The biases of all keys that the row at position t sees."""
        of = "self_attn_relative_position" if self.side == "decoder" else "relative_position"
        name = f"{self.side}.{of}.relative_attention_bias.weight"
        if not self.has(name):
            return 0
        seen = t + 1 if self.side == "decoder" else length
        return torch.stack([self.state[name][self.bucket(t - s), head] for s in range(seen)])

    def xpos(self, x, t, sign):
        """Rotates adjacent dimensions of a head at position t, and scales them; sign is 1 for
        queries, -1 for keys."""
        n = len(x)
        out = x.clone()
        for i in range(n // 2):
            angle = t * 10000.0 ** (-i / (n // 2))
            scale = ((2 * i + 0.4 * n) / (1.4 * n)) ** (sign * t / self.option("xpos_scale_base"))
            a, b = x[2 * i], x[2 * i + 1]
            out[2 * i] = (a * math.cos(angle) - b * math.sin(angle)) * scale
            out[2 * i + 1] = (b * math.cos(angle) + a * math.sin(angle)) * scale
        return out

    def cross_attention(self, x, prefix, _layer):
        name = prefix + "encoder_attn."
        length, d = x.shape
        heads = self.own("attention_heads")
        q = self.linear(x, name + "q_proj").view(length, heads, d // heads)
        k = self.linear(self.source, name + "k_proj").view(-1, heads, d // heads)
        v = self.linear(self.source, name + "v_proj").view(-1, heads, d // heads)
        rows = [torch.cat([self.attend(q[t, h], k[:, h], v[:, h], None) for h in range(heads)])
                for t in range(length)]
        return self.linear(torch.stack(rows), name + "out_proj")

    def attention(self, x, prefix, _layer):
        name = prefix + "self_attn."
        length, d = x.shape
        heads = self.own("attention_heads")
        groups = self.option("n_kv_heads", heads)
        q = self.linear(x, name + "q_proj").view(length, heads, d // heads)
        k = self.linear(x, name + "k_proj").view(length, groups, d // heads)
        v = self.linear(x, name + "v_proj").view(length, groups, d // heads)
        if self.option("xpos_rel_pos", False):
            q = torch.stack([torch.stack([self.xpos(h, t, 1) for h in q[t]])
                             for t in range(length)])
            k = torch.stack([torch.stack([self.xpos(h, t, -1) for h in k[t]])
                             for t in range(length)])
        if self.option("rotary_embed", False):
            q = torch.stack([torch.stack([self.rotate(h, t) for h in q[t]]) for t in range(length)])
            k = torch.stack([torch.stack([self.rotate(h, t) for h in k[t]]) for t in range(length)])
        out = torch.zeros_like(x).view(length, heads, d // heads)
        for t in range(length):
            for h in range(heads):
                # Keys and values are repeated as a whole, so heads use them in turn.
                out[t, h] = self.attend(q[t, h], k[:, h % groups], v[:, h % groups],
                                        self.last(t), self.relative_bias(t, h, length))
        out = out.reshape(length, d)
        if self.has(name + "inner_attn_ln.weight"):
            out = self.norm(out, name + "inner_attn_ln")
        return self.linear(out, name + "out_proj")

    def network(self, x, name):
        act = ACTIVATIONS[self.option("activation_fn")]
        if self.has(name + "fc3.weight"):
            inner = act(self.linear(x, name + "fc3")) * self.linear(x, name + "fc1")
        else:
            inner = act(self.linear(x, name + "fc1"))
        if self.has(name + "ffn_layernorm.weight"):
            inner = self.norm(inner, name + "ffn_layernorm")
        return self.linear(inner, name + "fc2")

    def sub_layers(self, x, name):
        """An expert of residual sub-layers, as those of fairseq's BASE layers are."""
        i = 0
        while self.has(f"{name}{i}.ff1.weight"):
            y = self.norm(x, f"{name}{i}.norm")
            y = ACTIVATIONS[self.option("activation_fn")](self.linear(y, f"{name}{i}.ff1"))
            x = x + self.linear(y, f"{name}{i}.ff2")
            i += 1
        return x

    def feed_forward(self, x, prefix, layer):
        if self.has(prefix + "fc1.weight"):  # fairseq's own models
            return self.network(x, prefix)
        name = prefix + "moe_layer."
        frequency = self.option("moe_freq", 0)
        inserted = not any(key.startswith(prefix + "self_attn.") for key in self.state)
        if not inserted and (frequency == 0 or (layer + 1) % frequency != 0):
            return self.network(x, prefix + "ffn.")
        heads = self.option("mhmoe_heads_number", 1)
        if heads == 1:
            return torch.stack([self.mixture(row, name) for row in x])
        split = self.linear(x, name + "multi_heads")
        rows = []
        for token in split:
            rows.append(torch.cat([self.mixture(part, name) for part in token.chunk(heads)]))
        return self.linear(torch.stack(rows), name + "out_proj")

    def scores(self, row, name):
        if not self.has(name + "gate.wg_reduction.weight"):
            return self.state[name + "gate.wg.weight"] @ row
        z = self.state[name + "gate.wg_reduction.weight"] @ row
        experts = self.state[name + "gate.wg"]
        scores = []
        for expert in experts:
            expert = expert * (1.5 / expert.norm())
            scores.append(z @ (expert / max(expert.norm().item(), 1e-4)))
        return torch.stack(scores)

    def mixture(self, row, name):
        scores = self.scores(row, name)
        shares = self.softmax(scores)
        if self.fork:
            chosen = self.select(scores, self.option("moe_top_k"))
            weights = [shares[e] for e in chosen]
        elif self.option("moe_top1_expert"):
            chosen = self.select(scores, 1)
            weights = [shares[chosen[0]]]
        else:
            chosen = self.select(scores, 2)
            total = shares[chosen[0]] + shares[chosen[1]]
            weights = [shares[e] / total for e in chosen]
        network = self.network
        if self.has(name + "experts.0.0.ff1.weight"):
            network = self.sub_layers
        return sum(w * network(row, f"{name}experts.{e}.") for w, e in zip(weights, chosen))


class Moa(Decoder):
    """A decoder or an encoder of MoA's layers."""

    def attention(self, x, prefix, _layer):
        return self.routed_heads(x, x, prefix + "self_attn.", self.last)

    def cross_attention(self, x, prefix, _layer):
        return self.routed_heads(x, self.source, prefix + "encoder_attn.", lambda _: None)

    def routed_heads(self, x, seen, name, last):
        k = seen @ self.state[name + "k_proj.weight"].T
        v = seen @ self.state[name + "v_proj.weight"].T
        rows = []
        for t, row in enumerate(x):
            scores = row @ self.state[name + "q_proj.w_gate"]
            shares = self.softmax(scores)
            out = torch.zeros_like(row)
            for e in self.select(scores, self.own("attention_heads")):
                q = row @ self.state[name + "q_proj.experts.w"][e]
                head = self.attend(q, k, v, last(t))
                out = out + shares[e] * (head @ self.state[name + "q_proj.output_experts.w"][e])
            rows.append(out)
        return torch.stack(rows)

    def feed_forward(self, x, prefix, _layer):
        act = ACTIVATIONS[self.option("activation_fn")]
        if self.option("ffd_type", "normal") == "normal":
            return self.linear(act(self.linear(x, prefix + "fc1")), prefix + "fc2")
        rows = []
        for row in x:
            scores = row @ self.state[prefix + "ffd.w_gate"]
            shares = self.softmax(scores)
            out = torch.zeros_like(row)
            for e in self.select(scores, min(4, self.option("num_expert"))):
                inner = act(row @ self.state[prefix + "ffd.experts.w"][e])
                out = out + shares[e] * (inner @ self.state[prefix + "ffd.output_experts.w"][e])
            rows.append(out)
        return torch.stack(rows)


class Pair:
    """An encoder and a decoder of the class `made`."""

    def __init__(self, made, state, options):
        self.encoder, self.decoder = (made(state, options, side) for side in ("encoder", "decoder"))

    def read(self, source):
        self.decoder.source = self.encoder.rows(source)

    @property
    def gap(self):
        return min(self.encoder.gap, self.decoder.gap)
