"""K2-Horizon, which is not a part of transformers: the model, written from its description.

A layer with experts has a router for the matrices of its values, too ("MoVA").
"""

import types

import torch
from torch import nn
from torch.nn import functional

Tensor = torch.Tensor


class GroupNorm(nn.Module):
    """An RMS norm of each of some adjacent groups of a row, with one weight for each element."""

    def __init__(self, width: int, groups: int, eps: float):
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.groups, -1))
        parts = parts / torch.sqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        return parts.flatten(-2) * self.weight


class Mlp(nn.Module):
    def __init__(self, d: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(d, width, bias=False)
        self.up_proj = nn.Linear(d, width, bias=False)
        self.down_proj = nn.Linear(width, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def route(router: nn.Linear, x: Tensor, config, count: int, renormalize: bool) -> Tensor:
    """Weights [..., E] of all experts, 0 for those that are not selected."""
    scores = functional.linear(x, router.weight)
    sigmoid = config.router_score_func == "sigmoid"
    scores = scores.sigmoid() if sigmoid else scores.softmax(-1)
    # The bias has a part in the choice alone.
    choice = scores if router.bias is None else scores + router.bias
    kept = torch.zeros_like(scores).scatter(-1, choice.topk(count, -1).indices, 1.0)
    weights = scores * kept
    if renormalize or count > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * (config.router_scaling_factor or 1.0)


class Attention(nn.Module):
    def __init__(self, config, routed: bool):
        super().__init__()
        self.config, self.routed = config, routed
        d, head = config.hidden_size, config.head_dim
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        bias, eps = config.attention_bias, config.rms_norm_eps
        self.q_proj = nn.Linear(d, heads * head, bias=bias)
        self.k_proj = nn.Linear(d, groups * head, bias=bias)
        self.o_proj = nn.Linear(heads * head, d, bias=bias)
        if routed:
            count = config.mova_num_experts
            self.v_router = nn.Linear(d, count, bias=config.moe_gate_bias)
            self.v_experts = nn.ModuleList(nn.Linear(d, groups * head, bias=False)
                                           for _ in range(count))
        else:
            self.v_proj = nn.Linear(d, groups * head, bias=bias)
        if config.attention_gate_func is not None:
            self.gate_proj = nn.Linear(d, heads * head, bias=False)
        if config.query_key_norm:
            self.q_norm = GroupNorm(heads * head, heads, eps)
            self.k_norm = GroupNorm(groups * head, groups, eps)

    def rotate(self, x: Tensor) -> Tensor:
        """x [B, T, heads, d_h]: the first elements of both halves of a head are rotated."""
        half, theta = x.shape[-1] // 2, self.config.rope_parameters["rope_theta"]
        size = self.config.rope_head_dim or x.shape[-1]
        frequency = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
        cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
        first, second = x[..., :size // 2], x[..., half:half + size // 2]
        out = x.clone()
        out[..., :size // 2] = first * cos - second * sin
        out[..., half:half + size // 2] = second * cos + first * sin
        return out

    def values(self, x: Tensor) -> Tensor:
        if not self.routed:
            return self.v_proj(x)
        weights = route(self.v_router, x, self.config, self.config.mova_num_experts_per_tok, False)
        results = torch.stack([functional.silu(expert(x)) for expert in self.v_experts], -2)
        return (results * weights[..., None]).sum(-2)

    def forward(self, x: Tensor) -> Tensor:
        config, head = self.config, self.config.head_dim
        q, k, v = self.q_proj(x), self.k_proj(x), self.values(x)
        if config.query_key_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (rows.unflatten(-1, (-1, head)) for rows in (q, k, v))
        q, k = self.rotate(q), self.rotate(k)
        repeats = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
        scores = torch.einsum("bthc,bshc->bhts", q, k) * head ** -0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, -torch.inf).softmax(-1)
        out = torch.einsum("bhts,bshc->bthc", shares, v).flatten(2)
        if config.attention_gate_func == "silu":
            out = out * functional.silu(self.gate_proj(x))
        elif config.attention_gate_func == "softplus":
            out = out * torch.log2(1 + torch.exp2(self.gate_proj(x)))
        return self.o_proj(out)


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        d, width = config.hidden_size, config.moe_intermediate_size
        self.gate = nn.Linear(d, config.num_experts, bias=config.moe_gate_bias)
        self.experts = nn.ModuleList(Mlp(d, width) for _ in range(config.num_experts))
        if config.num_shared_experts > 0:
            self.shared_experts = Mlp(d, width * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        weights = route(self.gate, x, config, config.num_experts_per_tok, config.norm_topk_prob)
        results = torch.stack([expert(x) for expert in self.experts], -2)
        out = (results * weights[..., None]).sum(-2)
        return out + self.shared_experts(x) if config.num_shared_experts > 0 else out


class Layer(nn.Module):
    def __init__(self, config, index: int):
        super().__init__()
        sparse = (index not in config.mlp_only_layers
                  and (index + 1) % config.decoder_sparse_step == 0)
        d, norm = config.hidden_size, (config.layernorm_num_groups, config.rms_norm_eps)
        self.self_attn = Attention(config, sparse and config.mova_num_experts > 0)
        self.mlp = Experts(config) if sparse else Mlp(d, config.intermediate_size)
        self.input_layernorm = GroupNorm(d, *norm)
        self.post_attention_layernorm = GroupNorm(d, *norm)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class K2Horizon(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        d, vocab = config.hidden_size, config.vocab_size
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab, d)
        self.model.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.model.norm = GroupNorm(d, config.layernorm_num_groups, config.rms_norm_eps)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, use_cache: bool = False):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return types.SimpleNamespace(logits=self.lm_head(self.model.norm(x)))


DEFAULTS = dict(attention_bias=False, attention_gate_func=None, query_key_norm=False,
                rope_head_dim=None, moe_gate_bias=True, norm_topk_prob=True,
                router_score_func="sigmoid", router_scaling_factor=None, mova_num_experts=0,
                mova_num_experts_per_tok=0, num_shared_experts=1, layernorm_num_groups=1,
                decoder_sparse_step=1, mlp_only_layers=[], rms_norm_eps=1e-6, hidden_act="silu",
                tie_word_embeddings=False, sliding_window=None, use_sliding_window=False,
                rope_parameters={"rope_type": "default", "rope_theta": 1000.0})


def build(config):
    """Returns the model and its config.json."""
    full = {**DEFAULTS, **config}
    stored = {**full, "model_type": "k2_horizon", "architectures": ["K2HorizonForCausalLM"]}
    return K2Horizon(types.SimpleNamespace(**full)), stored


def state_dict(model):
    return {name: value.contiguous() for name, value in model.state_dict().items()
            if name != "lm_head.weight" or not model.config.tie_word_embeddings}
