"""Grouped matrix products over rows that are sorted by expert, with hand-written gradients.

The training path does the arithmetic of routed_decoder.py in a different order: rows are sorted
by expert once, each expert sees one contiguous block, and the matrix products run in bf16.
check_fast_path.py compares the two.
"""

import math
from typing import Any

import torch

Tensor = torch.Tensor

# Type of the matrix products; check_fast_path.py sets fp32 to compare with the reference.
low_dtype = torch.bfloat16


class Plan:
    """Where each (row, expert) assignment goes.

    Blocks of experts are padded to a multiple of BLOCK rows: matrix kernels are generated for each
    shape, and unpadded counts would bring new shapes at every step. Padding rows copy row 0 and
    carry a gate and gradient of 0.

    order:   [P] assignment of every sorted place; 0 for padding
    real:    [P] 1 for an assignment, 0 for padding
    inverse: [A] sorted place of every assignment
    source:  [P] row of every sorted place
    counts:  assignments per expert; blocks: the same, padded
    """

    BLOCK = 64

    def __init__(self, rows: Tensor, experts: Tensor, num_experts: int, num_rows: int,
                 fixed: int | None) -> None:
        counts = torch.bincount(experts, minlength=num_experts)
        blocks = (counts + self.BLOCK - 1) // self.BLOCK * self.BLOCK
        shift = (blocks.cumsum(0) - blocks) - (counts.cumsum(0) - counts)
        by_expert = torch.argsort(experts, stable=True)
        places = torch.arange(len(experts)) + shift[experts[by_expert]]
        self.order = torch.zeros(int(blocks.sum()), dtype=torch.int64)
        self.order[places] = by_expert
        self.real = torch.zeros(len(self.order))
        self.real[places] = 1.0
        self.inverse = torch.empty_like(by_expert)
        self.inverse[by_expert] = places
        self.source = rows[self.order]
        self.counts, self.blocks = counts.tolist(), blocks.tolist()
        self.num_rows = num_rows
        self.fixed = fixed  # assignments per row where that is a constant

    def reduce(self, sorted_values: Tensor) -> Tensor:
        """Sums the assignments of each row. [P, c] -> [rows, c]."""
        if self.fixed is not None:
            values = sorted_values.index_select(0, self.inverse)
            return values.view(self.num_rows, self.fixed, -1).sum(1)
        out = torch.zeros(self.num_rows, sorted_values.shape[1], dtype=torch.float32)
        return out.index_add_(0, self.source, sorted_values.float())


class Gather(torch.autograd.Function):
    """x [rows, c] -> the row of every sorted place [P, c]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.plan.reduce(grad).to(grad.dtype), None


class Combine(torch.autograd.Function):
    """Weighted sum of the experts' results: y [P, c], gates [A] in row order -> [rows, c].

    The weighting happens in fp32, as in the engine.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, gates: Tensor, plan: Plan) -> Tensor:
        sorted_gates = gates.index_select(0, plan.order) * plan.real
        ctx.plan = plan
        ctx.save_for_backward(y, sorted_gates)
        return plan.reduce(y.float() * sorted_gates[:, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        y, sorted_gates = ctx.saved_tensors
        rows = grad.index_select(0, ctx.plan.source)
        dy = (rows * sorted_gates[:, None]).to(y.dtype)
        dgates = (rows * y).sum(1).index_select(0, ctx.plan.inverse)
        return dy, dgates, None


class GroupedLinear(torch.autograd.Function):
    """x [A, in] sorted by expert, weights E times [out, in] -> [A, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        low = [w.to(x.dtype) for w in weights]
        out = torch.empty(x.shape[0], weights[0].shape[0], dtype=x.dtype)
        for block, result, weight in zip(x.split(counts), out.split(counts), low):
            torch.mm(block, weight.t(), out=result)
        ctx.counts = counts
        ctx.save_for_backward(x, *low)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        dx = torch.empty_like(x)
        grads = []
        for block, up, down, weight in zip(x.split(ctx.counts), grad.split(ctx.counts),
                                           dx.split(ctx.counts), weights):
            torch.mm(up, weight, out=down)
            grads.append((up.t() @ block).float())
        return dx, None, *grads


class GatedExperts(torch.autograd.Function):
    """down(silu(gate x) * up x) per expert; gate and up are one matrix [2w, c], down [c, w]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], *weights: Tensor) -> Tensor:
        low = [w.to(x.dtype) for w in weights]
        num = len(counts)
        out = torch.empty_like(x)
        hidden = []
        for block, result, first, second in zip(x.split(counts), out.split(counts), low[:num],
                                                low[num:]):
            both = block @ first.t()
            gate, up = both.chunk(2, 1)
            torch.mm(torch.nn.functional.silu(gate) * up, second.t(), out=result)
            hidden.append(both)
        ctx.counts, ctx.hidden = counts, hidden
        ctx.save_for_backward(x, *low)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        num = len(ctx.counts)
        dx = torch.empty_like(x)
        dfirst, dsecond = [], []
        for i, (block, up_grad, result) in enumerate(zip(
                x.split(ctx.counts), grad.split(ctx.counts), dx.split(ctx.counts))):
            gate, up = ctx.hidden[i].chunk(2, 1)
            act = torch.nn.functional.silu(gate)
            dsecond.append((up_grad.t() @ (act * up)).float())
            dhidden = up_grad @ weights[num + i]
            dboth = torch.empty_like(ctx.hidden[i])
            dgate, dup = dboth.chunk(2, 1)
            torch.mul(dhidden, act, out=dup)
            dgate.copy_(torch.ops.aten.silu_backward(dhidden * up, gate))
            torch.mm(dboth, weights[i], out=result)
            dfirst.append((dboth.t() @ block).float())
        ctx.hidden = None
        return dx, None, *dfirst, *dsecond


class TiedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of h E^T, in blocks small enough to stay in cache.

    The gradient is computed together with the loss, since the logits are never stored.
    """

    BLOCK = 256

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, embed: Tensor, targets: Tensor) -> Tensor:
        low = embed.to(low_dtype)
        states = hidden.to(low_dtype)
        loss = 0.0
        dhidden = torch.empty_like(hidden)
        dembed = torch.zeros_like(embed)
        scale = 1.0 / len(targets)
        for start in range(0, len(targets), TiedCrossEntropy.BLOCK):
            stop = min(start + TiedCrossEntropy.BLOCK, len(targets))
            block, wanted = states[start:stop], targets[start:stop, None]
            logits = (block @ low.t()).float()
            logits -= logits.amax(1, keepdim=True)
            picked = logits.gather(1, wanted).sum()
            logits.exp_()
            total = logits.sum(1, keepdim=True)
            loss += float(total.log().sum() - picked)
            logits /= total
            logits.scatter_add_(1, wanted, torch.full_like(wanted, -1.0, dtype=torch.float32))
            grad = (logits * scale).to(low_dtype)
            dhidden[start:stop] = grad @ low
            dembed += grad.t() @ block
        ctx.save_for_backward(dhidden, dembed)
        return torch.tensor(loss * scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dhidden, dembed = ctx.saved_tensors
        return dhidden * grad, dembed * grad, None


class ToSorted(torch.autograd.Function):
    """Assignments in row order [A, c] -> sorted places [P, c]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.plan.inverse), None


class FromSorted(torch.autograd.Function):
    """Sorted places [P, c] -> assignments in row order [A, c]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = grad.index_select(0, ctx.plan.order)
        return rows * ctx.plan.real.to(grad.dtype)[:, None], None


def low_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Linear layer in x's dtype; the weights stay fp32 masters."""
    return torch.nn.functional.linear(x, weight.to(x.dtype),
                                      None if bias is None else bias.to(x.dtype))


def init_std(fan_in: int, depth: int = 0) -> float:
    """1/sqrt(fan in); matrices that end a residual branch shrink with the number of branches."""
    return fan_in ** -0.5 / (math.sqrt(2 * depth) if depth else 1.0)
