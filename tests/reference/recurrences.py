"""The mixers of tokens with a recurrent state, token by token: linear attention with a delta rule
("Gated Delta Networks", equation 10; "Kimi Linear", equation 1) and state-space layers ("Mamba-2",
section 7). All functions compute a whole text [T, d] from its first token on."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Json = dict

Linear = Callable[[Tensor, str], Tensor]


def complete(settings: Json) -> Json:
    """Sets the defaults of an attention object of the kind "delta" or "ssm"."""
    if settings["kind"] == "delta":
        settings.setdefault("num_key_heads", settings["num_heads"])
        for key, value in (("conv", 4), ("decay", "head"), ("decay_form", "softplus"),
                           ("decay_bound", -5.0), ("decay_rank", 0), ("gate_activation", "silu"),
                           ("gate_rank", 0)):
            settings.setdefault(key, value)
    else:
        for key, value in (("groups", 1), ("conv", 4), ("conv_bias", True), ("bias", False),
                           ("step_low", 0.0), ("step_high", None)):
            settings.setdefault(key, value)
    return settings


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A causal convolution of each column [T, C] by itself, then SiLU."""
    taps = weight.shape[1]
    padded = functional.pad(inputs, (0, 0, taps - 1, 0))
    mixed = sum(weight[:, tap] * padded[tap:tap + len(inputs)] for tap in range(taps))
    return functional.silu(mixed if bias is None else mixed + bias)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def delta(x: Tensor, name: str, settings: Json, tensors: dict[str, Tensor], linear: Linear,
          rounded: Callable[[Tensor], Tensor], eps: float) -> Tensor:
    """Returns what the projection `o` reads, [T, num_heads * value_dim]."""
    heads, key_heads = settings["num_heads"], settings["num_key_heads"]
    key_dim, value_dim = settings["key_dim"], settings["value_dim"]
    wide = torch.promote_types(x.dtype, torch.float32)

    def low_rank(part: str) -> Tensor:
        inner = rounded(linear(x, f"{name}.{part}_down")) if settings[f"{part}_rank"] else x
        return linear(inner, f"{name}.{part}").to(wide)

    mixed = torch.cat([linear(x, f"{name}.{part}") for part in ("q", "k", "v")], 1).to(wide)
    weights = torch.cat([tensors[f"{name}.{part}_conv.weight"] for part in ("q", "k", "v")])
    mixed = _convolve(mixed, weights.to(wide), None)
    keys_width = key_heads * key_dim
    q, k, v = mixed.split([keys_width, keys_width, heads * value_dim], 1)

    def unit(rows: Tensor) -> Tensor:
        rows = rows.view(len(x), key_heads, key_dim)
        rows = rows / torch.sqrt(rows.square().sum(-1, keepdim=True) + 1e-6)
        return rows.repeat_interleave(heads // key_heads, 1)

    q, k, v = unit(q) / math.sqrt(key_dim), unit(k), v.view(len(x), heads, value_dim)
    strength = torch.sigmoid(linear(x, f"{name}.beta").to(wide))
    inner = low_rank("decay") + tensors[f"{name}.decay_bias"].to(wide)
    inner = inner.view(len(x), heads, -1)
    rate = tensors[f"{name}.decay_log"].to(wide).exp()[None, :, None]
    if settings["decay_form"] == "bounded":
        decay = settings["decay_bound"] * torch.sigmoid(rate * inner)
    else:
        decay = -rate * torch.log1p(torch.exp(inner))
    state = torch.zeros(heads, key_dim, value_dim, dtype=wide)
    rows = []
    for t in range(len(x)):
        state = state * decay[t].exp()[:, :, None]
        known = torch.einsum("hkv,hk->hv", state, k[t])
        written = strength[t][:, None] * (v[t] - known)
        state = state + k[t][:, :, None] * written[:, None, :]
        rows.append(torch.einsum("hkv,hk->hv", state, q[t]))
    out = _rms(torch.stack(rows), tensors[f"{name}.out_norm.weight"].to(wide), eps).flatten(1)
    gate = low_rank("gate")
    act = functional.silu if settings["gate_activation"] == "silu" else torch.sigmoid
    return (out * act(gate)).to(x.dtype)


def state_space(x: Tensor, name: str, settings: Json, tensors: dict[str, Tensor], linear: Linear,
                rounded: Callable[[Tensor], Tensor], eps: float) -> Tensor:
    """Returns what the projection `o` reads, [T, num_heads * head_dim]."""
    del rounded
    heads, head_dim, groups = settings["num_heads"], settings["head_dim"], settings["groups"]
    state_dim, width = settings["state_dim"], heads * head_dim
    wide = torch.promote_types(x.dtype, torch.float32)
    mixed = torch.cat([linear(x, f"{name}.{part}") for part in ("x", "b", "c")], 1).to(wide)
    bias = tensors[f"{name}.conv.bias"].to(wide) if settings["conv_bias"] else None
    mixed = _convolve(mixed, tensors[f"{name}.conv.weight"].to(wide), bias)
    values, b, c = mixed.split([width, groups * state_dim, groups * state_dim], 1)
    values = values.view(len(x), heads, head_dim)
    b, c = (part.view(len(x), groups, state_dim).repeat_interleave(heads // groups, 1)
            for part in (b, c))
    step = linear(x, f"{name}.step").to(wide) + tensors[f"{name}.step_bias"].to(wide)
    step = torch.log1p(torch.exp(step)).clamp(settings["step_low"], settings["step_high"])
    decay = torch.exp(-step * tensors[f"{name}.decay_log"].to(wide).exp())
    state = torch.zeros(heads, head_dim, state_dim, dtype=wide)
    rows = []
    for t in range(len(x)):
        state = state * decay[t][:, None, None]
        state = state + (step[t][:, None] * values[t])[:, :, None] * b[t][:, None, :]
        rows.append(torch.einsum("hpn,hn->hp", state, c[t]))
    out = torch.stack(rows) + tensors[f"{name}.skip"].to(wide)[:, None] * values
    gated = out.flatten(1) * functional.silu(linear(x, f"{name}.gate").to(wide))
    parts = gated.view(len(x), groups, -1)
    weight = tensors[f"{name}.out_norm.weight"].to(wide).view(groups, -1)
    return _rms(parts, weight, eps).flatten(1).to(x.dtype)
