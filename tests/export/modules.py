"""A mixture of experts in plain PyTorch, with names, stacks and transposed matrices of its own."""

import torch
from torch import nn
from torch.nn import functional

V, D, L, H, HEAD, E, WIDTH, K = 96, 32, 2, 4, 8, 6, 24, 2

CONFIG = {
    "vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": 0,
    "norm": {"kind": "rms"}, "position": {"kind": "rope"},
    "attention": {"kind": "dense", "num_heads": H, "head_dim": HEAD},
    "feed_forward": {
        "kind": "routed", "expert": {"form": "gated", "activation": "silu"},
        "routing": {"num_experts": E, "widths": WIDTH, "renormalize": True,
                    "select": {"kind": "top_k", "k": K}},
    },
}


def rotate(x):
    """Turns the pairs (i, i + HEAD / 2) of [T, H, HEAD] by position."""
    angle = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class RmsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(D))

    def forward(self, x):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.out_proj = nn.Linear(D, D, bias=False)

    def forward(self, x):
        q, k, v = (part.view(-1, H, HEAD) for part in self.qkv(x).chunk(3, -1))
        scores = torch.einsum("qhd,khd->hqk", rotate(q), rotate(k)) * HEAD**-0.5
        later = torch.ones(len(x), len(x)).triu(1).bool()
        shares = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.out_proj(torch.einsum("hqk,khd->qhd", shares, v).reshape(-1, D))


class Moe(nn.Module):
    def __init__(self, top_k=K):
        super().__init__()
        self.top_k, self.top_p = top_k, None
        self.router = nn.Linear(D, E, bias=False)
        self.w1 = nn.Parameter(torch.randn(E, D, WIDTH) * D**-0.5)
        self.w2 = nn.Parameter(torch.randn(E, WIDTH, D) * WIDTH**-0.5)
        self.w3 = nn.Parameter(torch.randn(E, D, WIDTH) * D**-0.5)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(E if self.top_p else self.top_k)
        if self.top_p:  # those before which the sum is below top_p
            weights = weights * (weights.cumsum(-1) - weights < self.top_p)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for token in range(len(x)):
            for weight, e in zip(weights[token], chosen[token]):
                inner = functional.silu(x[token] @ self.w1[e]) * (x[token] @ self.w3[e])
                out[token] += weight * (inner @ self.w2[e])
        return out


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = RmsNorm(), Attention()
        self.ln_2, self.moe = RmsNorm(), Moe()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.moe(self.ln_2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.h = nn.ModuleList(Layer() for _ in range(L))
        self.ln_f = RmsNorm()
        self.lm_head = nn.Linear(D, V, bias=False)
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, ids):
        x = self.wte(ids[0])
        for layer in self.h:
            x = layer(x)
        return self.lm_head(self.ln_f(x))[None]


def build(top_p=None):
    torch.manual_seed(3)
    module = Decoder()
    for layer in module.h:
        layer.moe.top_p = top_p
    return module
