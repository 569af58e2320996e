"""nomic-embed-text-v2-moe as its authors' files and code have it: a model of torch modules."""

import math

import torch
from torch import nn
from torch.nn import functional


def _rotate(x, base, fraction):
    """Rotary positions of x [T, heads, d], halves paired."""
    size = int(x.shape[-1] * fraction)
    frequency = base ** (-torch.arange(0, size, 2).float() / size)
    angle = torch.arange(x.shape[0]).float()[:, None] * frequency[None]
    cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angle.cos(), angle.sin()))
    turned, rest = x[..., :size], x[..., size:]
    half = torch.cat([-turned[..., size // 2:], turned[..., :size // 2]], -1)
    return torch.cat([turned * cos + half * sin, rest], -1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.base, self.fraction = c["n_head"], c["rotary_emb_base"], c["rotary_emb_fraction"]
        d = c["n_embd"]
        self.Wqkv = nn.Linear(d, 3 * d, bias=c["qkv_proj_bias"])
        self.out_proj = nn.Linear(d, d, bias=c["qkv_proj_bias"])

    def forward(self, x):
        q, k, v = self.Wqkv(x).view(len(x), 3, self.heads, -1).unbind(1)
        q, k = (_rotate(part, self.base, self.fraction) for part in (q, k))
        scores = torch.einsum("nhc,mhc->hnm", q, k) / math.sqrt(q.shape[-1])
        return self.out_proj(torch.einsum("hnm,mhc->nhc", scores.softmax(-1), v).flatten(1))


class Dense(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, f, bias = c["n_embd"], c["n_inner"], c["mlp_fc1_bias"]
        self.gated = c["activation_function"] == "swiglu"
        if self.gated:
            self.fc11, self.fc12 = nn.Linear(d, f, bias=bias), nn.Linear(d, f, bias=bias)
        else:
            self.fc1 = nn.Linear(d, f, bias=bias)
        self.fc2 = nn.Linear(f, d, bias=bias)

    def forward(self, x):
        if self.gated:
            return self.fc2(self.fc11(x) * functional.silu(self.fc12(x)))
        return self.fc2(functional.gelu(self.fc1(x)))


class Layer(nn.Module):
    """The linear layer of the router."""

    def __init__(self, d, experts):
        super().__init__()
        self.layer = nn.Linear(d, experts, bias=False)


class ExpertWeights(nn.Module):
    def __init__(self, d, width, experts):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts * width, d))
        self.w2 = nn.Parameter(torch.empty(experts * width, d))


class ExpertList(nn.Module):
    def __init__(self, d, width, experts):
        super().__init__()
        self.mlp = ExpertWeights(d, width, experts)
        self.bias = nn.Parameter(torch.empty(d))


class Experts(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.count, self.top, self.width = c["num_experts"], c["moe_top_k"], c["n_inner"]
        self.router = Layer(c["n_embd"], self.count)
        self.experts = ExpertList(c["n_embd"], self.width, self.count)

    def forward(self, x):
        weights, chosen = self.router.layer(x).softmax(-1).topk(self.top, -1)
        w1 = self.experts.mlp.w1.view(self.count, self.width, -1)
        w2 = self.experts.mlp.w2.view(self.count, self.width, -1)
        rows = []
        for row, gates, ids in zip(x, weights, chosen):
            rows.append(sum(gate * (functional.gelu(w1[e] @ row) @ w2[e])
                            for gate, e in zip(gates, ids)))
        return torch.stack(rows) + self.experts.bias


class Block(nn.Module):
    def __init__(self, c, routed):
        super().__init__()
        self.attn = Attention(c)
        self.mlp = Experts(c) if routed else Dense(c)
        self.norm1 = nn.LayerNorm(c["n_embd"], eps=c["layer_norm_epsilon"])
        self.norm2 = nn.LayerNorm(c["n_embd"], eps=c["layer_norm_epsilon"])

    def forward(self, x):
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class Nomic(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings = nn.ModuleDict({
            "word_embeddings": nn.Embedding(c["vocab_size"], c["n_embd"]),
            "token_type_embeddings": nn.Embedding(c["type_vocab_size"], c["n_embd"])})
        self.emb_ln = nn.LayerNorm(c["n_embd"], eps=c["layer_norm_epsilon"])
        every = c.get("moe_every_n_layers", 2)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(
            [Block(c, c.get("num_experts", 0) > 0 and i % every == 1) for i in range(c["n_layer"])])})

    def forward(self, tokens, types):
        x = (self.embeddings["word_embeddings"](tokens)
             + self.embeddings["token_type_embeddings"](types))
        x = self.emb_ln(x)
        for block in self.encoder["layers"]:
            x = block(x)
        return x
