"""Grouped matrix products over rows that are sorted by expert, with hand-written gradients.

Training computes the same function as routed_decoder.py in a different order: rows are sorted by
expert once, each expert processes one contiguous block of rows, and the matrix products run in
bf16. check_fast_path.py compares both implementations.
"""

import math
from typing import Any

import torch

Tensor = torch.Tensor

# The type in which matrix products run. check_fast_path.py sets fp32 to compare with the reference.
low_dtype = torch.bfloat16


class Plan:
    """A dispatch plan: the order of the A assignments (row, expert) when sorted by expert.

    Each expert's block of assignments is padded to a multiple of BLOCK: PyTorch generates matrix
    kernels for each shape, and unpadded blocks would have new shapes at every step. A padding entry
    copies the row of assignment 0, with a gate and gradient of 0. With padding, there are P sorted
    positions.

    order:   [P] assignment at each sorted position; 0 for padding
    real:    [P] 1 for an assignment, 0 for padding
    inverse: [A] sorted position of each assignment
    source:  [P] row at each sorted position
    counts:  [E] number of assignments per expert
    blocks:  [E] number of assignments per expert including padding
    fixed:   number of assignments per row if it is constant, else None
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
        self.fixed = fixed

    def reduce(self, sorted_values: Tensor) -> Tensor:
        """Sums the values [P, c] of each row's assignments. Returns [rows, c]."""
        if self.fixed is not None:
            values = sorted_values.index_select(0, self.inverse)
            return values.view(self.num_rows, self.fixed, -1).sum(1)
        out = torch.zeros(self.num_rows, sorted_values.shape[1], dtype=torch.float32)
        return out.index_add_(0, self.source, sorted_values.float())


class Gather(torch.autograd.Function):
    """Copies rows x [rows, c] to the sorted positions [P, c] of their assignments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.plan.reduce(grad).to(grad.dtype), None


class Combine(torch.autograd.Function):
    """Computes each row's weighted sum [rows, c] of expert results.

    y: [P, c] results by sorted position; gates: [A] in row order. The sum is in fp32, as in the
    engine.
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
    """Multiplies each block of rows with its expert's matrix.

    x: [P, in] sorted by expert; counts: rows per expert; weights: E matrices [out, in]. Returns
    [P, out].
    """

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
    """Computes down(silu(gate x) * up x) for each expert's block of rows.

    weights: E matrices [2w, c] with the gate's rows above the up projection's, followed by E down
    matrices [c, w].
    """

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
    """Computes the mean cross entropy with logits = hidden embed^T.

    With `smoothing`, the target takes 1 - smoothing of the wanted distribution, and all tokens
    share the rest equally. It processes BLOCK rows at a time, so that the logits stay in the CPU
    cache. forward() computes the gradients, too, since the logits are not kept for backward().
    """

    BLOCK = 256

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, embed: Tensor, targets: Tensor,
                smoothing: float = 0.0) -> Tensor:
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
            picked = (1.0 - smoothing) * logits.gather(1, wanted).sum()
            if smoothing > 0.0:
                picked += smoothing * logits.mean(1).sum()
            logits.exp_()
            total = logits.sum(1, keepdim=True)
            loss += float(total.log().sum() - picked)
            logits /= total
            if smoothing > 0.0:
                logits -= smoothing / logits.shape[1]
            logits.scatter_add_(1, wanted,
                                torch.full_like(wanted, smoothing - 1.0, dtype=torch.float32))
            grad = (logits * scale).to(low_dtype)
            dhidden[start:stop] = grad @ low
            dembed += grad.t() @ block
        ctx.save_for_backward(dhidden, dembed)
        return torch.tensor(loss * scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dhidden, dembed = ctx.saved_tensors
        return dhidden * grad, dembed * grad, None, None


class ToSorted(torch.autograd.Function):
    """Reorders assignments from row order [A, c] to sorted positions [P, c]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.plan.inverse), None


class FromSorted(torch.autograd.Function):
    """Reorders assignments from sorted positions [P, c] to row order [A, c]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = grad.index_select(0, ctx.plan.order)
        return rows * ctx.plan.real.to(grad.dtype)[:, None], None


def low_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes a linear layer in x's dtype from fp32 master weights."""
    return torch.nn.functional.linear(x, weight.to(x.dtype),
                                      None if bias is None else bias.to(x.dtype))


def init_std(fan_in: int, depth: int = 0) -> float:
    """Returns the standard deviation of initial weights, 1 / sqrt(fan_in).

    For matrices that end a residual branch, `depth` is the number of layers and the result is
    divided by the square root of the number of branches, 2 * depth.
    """
    return fan_in ** -0.5 / (math.sqrt(2 * depth) if depth else 1.0)
