"""Rotary and sinusoidal positions."""

import math
from typing import Any

import torch

Tensor = torch.Tensor
Json = dict[str, Any]


def frequencies(rotated: int, head: int, position: Json,
                is_long: bool) -> tuple[Tensor, float]:
    """Frequencies [rotated / 2] in radians per position, and the factor of cosines and sines."""
    theta = float(position["theta"])
    size = head if position["frequencies"] == "head" else rotated
    plain = theta ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / size)
    scaling = position.get("scaling", {"kind": "none"})
    kind, magnitude = scaling["kind"], scaling.get("magnitude", 1.0)
    if kind == "none":
        return plain, magnitude
    if kind == "linear":
        return plain / scaling["factor"], magnitude
    if kind == "factors":
        return plain / torch.tensor(scaling["factors"], dtype=torch.float64), magnitude
    if kind == "long":
        key = "long_factors" if is_long else "factors"
        if is_long:
            magnitude = scaling.get("long_magnitude", 1.0)
        return plain / torch.tensor(scaling[key], dtype=torch.float64), magnitude
    factor, original = scaling["factor"], scaling["original_positions"]
    if kind == "llama3":
        low, high = scaling.get("low_freq_factor", 1.0), scaling.get("high_freq_factor", 4.0)
        rotations = original * plain / (2 * math.pi)
        kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
        return (1.0 - kept) * plain / factor + kept * plain, magnitude
    # yarn: "YaRN: Efficient Context Window Extension of Large Language Models", section 3.2

    def pair(rotations: float) -> float:
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.get("beta_fast", 32.0)), pair(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001
    divided = ((torch.arange(rotated // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    return divided * plain / factor + (1.0 - divided) * plain, magnitude


def xpos(size: int, positions: Tensor, base: float, keys: bool) -> Tensor:
    """Factors [n, size / 2] of XPOS: "A Length-Extrapolatable Transformer", section 3.2."""
    zeta = (torch.arange(0, size, 2, dtype=torch.float64) / size + 0.4) / 1.4
    power = positions.double()[:, None] / base
    return zeta[None] ** (-power if keys else power)


def rope(x: Tensor, positions: Tensor, position: Json, is_long: bool = False,
         keys: bool = False) -> Tensor:
    """Rotates the first fraction * d_h dimensions of x [n, heads, d_h] by the row's position.

    With XPOS, `keys` tells whether x are keys or queries.
    """
    size = round(position["fraction"] * x.shape[-1])
    frequency, magnitude = frequencies(size, x.shape[-1], position, is_long)
    angle = positions.double()[:, None] * frequency[None]
    if position.get("xpos_base", 0) > 0:
        magnitude = magnitude * xpos(size, positions, position["xpos_base"], keys)
    cos = (angle.cos() * magnitude).to(x.dtype)[:, None]
    sin = (angle.sin() * magnitude).to(x.dtype)[:, None]
    rotated = x.clone()
    if position["pairing"] == "half":
        partner = x.shape[-1] // 2 if position["span"] == "head" else size // 2
        first, second = slice(0, size // 2), slice(partner, partner + size // 2)
    else:
        first, second = slice(0, size, 2), slice(1, size, 2)
    a, b = x[..., first], x[..., second]
    rotated[..., first] = a * cos - b * sin
    rotated[..., second] = b * cos + a * sin
    return rotated


def relative_buckets(distance: Tensor, bias: Json) -> Tensor:
    """Buckets of distances, negative for keys after the query, as in T5: logarithms in f32.

    Causal attention does not see the negative ones.
    """
    later = bias["buckets"] // 2 * (distance < 0) if bias.get("bidirectional", False) else 0
    distance = distance.abs()
    used = bias["buckets"] // 2 if bias.get("bidirectional", False) else bias["buckets"]
    exact = used // 2
    steps = torch.log(distance.clamp(min=1).float() / exact)
    steps = steps / math.log(bias["max_distance"] / exact) * (used - exact)
    near = torch.where(distance < exact, distance, (exact + steps.long()).clamp(max=used - 1))
    return near + later


def sinusoidal(positions: Tensor, d: int, spacing: str = "fairseq") -> Tensor:
    """[T, d]: all sines, then all cosines; f_j = 10000^(-j / (d/2 - 1)), or 10000^(-2 j / d)."""
    half = d // 2
    steps = half - 1 if spacing == "fairseq" else half
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / steps)
    angle = positions.double()[:, None] * frequency[None]
    return torch.cat([angle.sin(), angle.cos()], 1)
