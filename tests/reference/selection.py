"""Gates and selection of experts, in the order of sums that the router's numerics contract fixes."""

import dataclasses
import math
from typing import Any

import torch
from torch.nn import functional

Tensor = torch.Tensor
Json = dict[str, Any]


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


# Gates whose values are not shares of a sum over all experts.
OWN_VALUES = ("sigmoid", "sqrt_softplus")


def select(scores: Tensor, routing: Json, choice_bias: Tensor | None = None,
           expert_scale: Tensor | None = None, listed: Tensor | None = None) -> Routes:
    """Gate and selection of fp32 scores [R, E].

    `choice_bias` [E] changes the ranking alone, `expert_scale` [E] multiplies the final weights;
    `listed` [R, k] has the experts of every row if they come from a table.

    softmax gates:  X-MoE eq. 8, HMoE eq. 9 to 11;  top-p: HMoE eq. 10.
    """
    rows, num_experts = scores.shape
    finite = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    highest = finite.amax(1, keepdim=True)
    usable = highest.isfinite()
    if routing["gate"] == "sigmoid":
        mass = 1.0 / (1.0 + torch.exp(-finite))
        total = torch.ones(rows)
    elif routing["gate"] == "sqrt_softplus":
        mass = torch.logaddexp(finite, torch.zeros_like(finite)).sqrt()
        total = torch.ones(rows)
    else:
        mass = torch.exp(finite - torch.where(usable, highest, torch.zeros_like(highest)))
        total = lane_sum(mass)
    chooser = routing["select"]
    order = rank_experts(scores)
    if chooser["bias"] or chooser["best_groups"] < chooser["groups"]:
        share = mass if routing["gate"] in OWN_VALUES else mass / total[:, None]
        ranking = choice(scores, share, chooser, choice_bias)
        order = torch.where(usable, rank_experts(ranking), order)
    if chooser["kind"] == "table":
        order = torch.where(usable, rank_by_table(finite, order, listed), order)
    ranked = mass.gather(1, order)

    if chooser["kind"] in ("top_k", "table"):
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
    if routing["gate"] == "sparse_mixer":
        gates = mixer_gates(finite, order, kept, routing["mixer_limit"])
    gates = gates * routing["scale"]
    if expert_scale is not None:
        gates = gates * expert_scale
    gates = torch.where(usable, gates, 0.0)

    chosen = torch.zeros(rows, num_experts, dtype=torch.bool).scatter(1, order, kept)
    offsets = functional.pad(chosen.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    experts = chosen.nonzero()[:, 1].to(torch.int32)  # row-major, so ascending within a row
    return Routes(offsets, experts, gates[chosen].float())


def rank_by_table(finite: Tensor, order: Tensor, listed: Tensor) -> Tensor:
    """Expert ids [R, E]: first those of the table, in its order, unless their score is -inf; the
    others follow as in `order` [R, E]."""
    out = []
    for row in range(len(order)):
        first = [e for e in listed[row].tolist() if finite[row, e] != -math.inf]
        out.append(first + [e for e in order[row].tolist() if e not in first])
    return torch.tensor(out)


def choice(scores: Tensor, share: Tensor, chooser: Json, bias: Tensor | None) -> Tensor:
    """Values [R, E] by which experts are ranked: DeepSeek-V3, eq. 16, and groups of experts.

    NaN stands for experts that rank last.
    """
    values = share + (0.0 if bias is None else bias[None])
    values = values.masked_fill(scores.isnan() | (scores == -math.inf), math.nan)
    groups, best = chooser["groups"], chooser["best_groups"]
    if best == groups:
        return values
    grouped = values.view(len(values), groups, -1)
    ordered = grouped.nan_to_num(nan=-math.inf, neginf=-math.inf).sort(2, descending=True).values
    if chooser["group_score"] == "max":
        of_group = ordered[:, :, 0]
    else:
        of_group = ordered[:, :, 0] + ordered[:, :, 1]
    rank = rank_experts(of_group).argsort(1)
    masked = 0.0 if chooser["group_mask"] == "zero" else -math.inf
    outside = (rank >= best)[:, :, None] & ~grouped.isnan()
    return torch.where(outside, masked, grouped).view(values.shape)


def mixer_gates(scores: Tensor, order: Tensor, kept: Tensor, limit: float) -> Tensor:
    """Phi-3.5-MoE's gates [R, E]: the share of a selected expert in a softmax over itself and the
    experts after it in the ranking whose scores are near."""
    gates = torch.zeros_like(scores)
    for row in range(len(scores)):
        for rank in range(int(kept[row].sum())):
            later = order[row, rank:]
            score, others = scores[row, later[0]], scores[row, later]
            distance = (score - others) / torch.maximum(score, others.abs())
            terms = torch.zeros(scores.shape[1])
            terms[later] = torch.where(distance > limit, 0.0, torch.exp(others - score))
            if score.isfinite():
                gates[row, later[0]] = 1.0 / lane_sum(terms)
    return gates


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
