"""A mixture-of-experts layer in Triton, as a baseline.

Three kernels sort the routes (pairs of a row and a selected expert) by expert into tiles of rows
(align). Two grouped matrix products follow; the first includes the activation. A last kernel sums
the weighted results per row. All experts have the width of the widest: narrower ones are padded.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor


@triton.jit
def _count(experts, ranks, counts, routes, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < routes
    expert = tl.load(experts + at, mask=mask, other=0)
    rank = tl.atomic_add(counts + expert, 1, mask=mask)
    tl.store(ranks + at, rank, mask=mask)


@triton.jit
def _tiles(counts, rows_of, starts, tile_expert, num_experts, tiles,
           BM: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    # A single program runs this kernel. It resets the counters to 0 for the next launch.
    e = tl.arange(0, EXPERTS)
    mask = e < num_experts
    count = tl.load(counts + e, mask=mask, other=0)
    needed = (count + BM - 1) // BM
    end = tl.cumsum(needed, 0)
    tl.store(rows_of + e, count, mask=mask)
    tl.store(starts + e, (end - needed) * BM, mask=mask)
    tl.store(counts + e, tl.zeros_like(count), mask=mask)
    for begin in range(0, tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        # The tile's expert is the number of experts whose tiles end at or before this tile. It is
        # num_experts for tiles past the last expert's.
        before = tl.sum(((end[None, :] <= tile[:, None]) & mask[None, :]).to(tl.int32), 1)
        tl.store(tile_expert + tile, before, mask=tile < tiles)


@triton.jit
def _place(experts, ranks, starts, sorted_routes, routes, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < routes
    expert = tl.load(experts + at, mask=mask, other=0)
    rank = tl.load(ranks + at, mask=mask, other=0)
    start = tl.load(starts + expert, mask=mask, other=0)
    tl.store(sorted_routes + start + rank, at, mask=mask)


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == 1:
        return x * tl.sigmoid(x)
    if KIND == 2:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x


@triton.jit
def _product(a, weights, out, sorted_routes, tile_expert, starts, rows_of, N, K, num_experts,
             per_row, a_stride, out_stride, m_tiles, GROUP: tl.constexpr, BM: tl.constexpr,
             BN: tl.constexpr, BK: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr,
             KIND: tl.constexpr, EVEN: tl.constexpr):
    """Computes one tile of a grouped product, where `position` is an index into sorted_routes.

    FIRST: out[position] = act(a[route // per_row] W). Otherwise: out[route] = a[position] W.
    """
    # Consecutive programs compute GROUP row tiles for the same columns, and so share weights in L2.
    program = tl.program_id(0)
    in_group = GROUP * tl.cdiv(N, BN)
    first_tile = program // in_group * GROUP
    height = tl.minimum(m_tiles - first_tile, GROUP)
    tile = first_tile + program % in_group % height
    column = program % in_group // height
    expert = tl.load(tile_expert + tile)
    if expert >= num_experts:
        return
    start = tl.load(starts + expert)
    valid = tl.load(rows_of + expert) - (tile * BM - start)
    i = tl.arange(0, BM)
    mask = i < valid
    place = tile * BM + i
    route = tl.load(sorted_routes + place, mask=mask, other=0)
    if FIRST:
        source = (route // per_row).to(tl.int64)
        target = place.to(tl.int64)
    else:
        source = place.to(tl.int64)
        target = route.to(tl.int64)
    n = column * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    n_mask = n < N
    halves = 2 if GATED else 1
    matrix = weights + expert.to(tl.int64) * N * K * halves
    a_at = a + source[:, None] * a_stride + k[None, :]
    w_at = matrix + n[None, :].to(tl.int64) * K + k[:, None]
    u_at = w_at + tl.cast(N, tl.int64) * K
    acc = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, K, BK):
        if EVEN:
            rows = tl.load(a_at, mask=mask[:, None], other=0.0)
            w = tl.load(w_at, mask=n_mask[None, :], other=0.0)
        else:
            inside = k < K - begin
            rows = tl.load(a_at, mask=mask[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_at, mask=n_mask[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(rows, w, acc)
        if GATED:
            if EVEN:
                u = tl.load(u_at, mask=n_mask[None, :], other=0.0)
            else:
                u = tl.load(u_at, mask=n_mask[None, :] & (k < K - begin)[:, None], other=0.0)
            up = tl.dot(rows, u, up)
            u_at += BK
        a_at += BK
        w_at += BK
    if FIRST:
        acc = _activate(acc, KIND)
        if GATED:
            acc = acc * up
    tl.store(out + target[:, None] * out_stride + n[None, :], acc.to(out.dtype.element_ty),
             mask=mask[:, None] & n_mask[None, :])


@triton.jit
def _fused(x, w1, w2, out, sorted_routes, tile_expert, starts, rows_of, width, hidden, num_experts,
           per_row, BM: tl.constexpr, BF: tl.constexpr, BD: tl.constexpr, GATED: tl.constexpr,
           KIND: tl.constexpr):
    """Computes out[route] = act(x[route // per_row] W1) W2. The hidden units stay in registers."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert >= num_experts:
        return
    i = tl.arange(0, BM)
    mask = i < tl.load(rows_of + expert) - (tile * BM - tl.load(starts + expert))
    route = tl.load(sorted_routes + tile * BM + i, mask=mask, other=0)
    c = tl.arange(0, BD)
    inside = c < width
    rows = tl.load(x + (route // per_row).to(tl.int64)[:, None] * width + c[None, :],
                   mask=mask[:, None] & inside[None, :], other=0.0)
    halves = 2 if GATED else 1
    size = tl.cast(hidden, tl.int64) * width
    first = w1 + expert.to(tl.int64) * size * halves
    second = w2 + expert.to(tl.int64) * size
    acc = tl.zeros((BM, BD), tl.float32)
    for begin in range(0, hidden, BF):
        f = begin + tl.arange(0, BF)
        units = f < hidden
        both = units[None, :] & inside[:, None]
        w = tl.load(first + f[None, :].to(tl.int64) * width + c[:, None], mask=both, other=0.0)
        h = _activate(tl.dot(rows, w), KIND)
        if GATED:
            u = tl.load(first + size + f[None, :].to(tl.int64) * width + c[:, None], mask=both,
                        other=0.0)
            h = h * tl.dot(rows, u)
        w = tl.load(second + c[None, :].to(tl.int64) * hidden + f[:, None],
                    mask=units[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(h.to(w.dtype), w, acc)
    tl.store(out + route.to(tl.int64)[:, None] * width + c[None, :], acc.to(out.dtype.element_ty),
             mask=mask[:, None] & inside[None, :])


@triton.jit
def _combine(results, weights, out, width, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < width
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(PER_ROW):
        weight = tl.load(weights + row * PER_ROW + j)
        y = tl.load(results + (row * PER_ROW + j) * width + c, mask=mask, other=0.0)
        total += weight * y.to(tl.float32)
    tl.store(out + row * width + c, total, mask=mask)


@dataclasses.dataclass(frozen=True)
class Config:
    bm: int
    bn: int
    bk: int
    stages: int
    warps: int


CONFIGS = [
    Config(16, 64, 128, 4, 4), Config(16, 128, 64, 4, 4), Config(16, 64, 256, 3, 4),
    Config(32, 64, 128, 4, 4), Config(32, 128, 64, 4, 4),
    Config(64, 64, 128, 3, 4), Config(64, 128, 64, 4, 8), Config(64, 128, 64, 3, 4),
    Config(128, 64, 64, 4, 4), Config(128, 128, 64, 3, 8), Config(128, 128, 64, 4, 8),
    Config(128, 256, 64, 3, 8),
]
# Configurations of the fused kernel. bk is the number of hidden units per step; bn is not used.
FUSED_CONFIGS = [
    Config(16, 0, 64, 3, 4), Config(32, 0, 64, 3, 4), Config(64, 0, 64, 2, 4),
    Config(64, 0, 32, 3, 4), Config(128, 0, 64, 2, 8), Config(128, 0, 32, 3, 8),
]
MAX_FUSED_WIDTH = 256
KINDS = {"none": 0, "silu": 1, "gelu": 2}


def configs_for(rows_per_expert: float) -> list[Config]:
    """Returns the configurations whose tiles have about as many rows as one expert receives."""
    if rows_per_expert <= 16:
        heights = (16,)
    elif rows_per_expert <= 48:
        heights = (16, 32, 64)
    elif rows_per_expert <= 128:
        heights = (64, 128)
    else:
        heights = (128,)
    return [c for c in CONFIGS if c.bm in heights]


class TritonExperts:
    """Launches the kernels; owns their buffers for `rows` rows of `width` with `per_row` routes
    each."""

    def __init__(self, rows: int, width: int, hidden: int, num_experts: int, per_row: int,
                 gated: bool, activation: str, device: str) -> None:
        self.rows, self.width, self.hidden = rows, width, hidden
        self.num_experts, self.per_row, self.gated = num_experts, per_row, gated
        self.kind = KINDS[activation]
        self.routes = rows * per_row
        self.first = self.second = CONFIGS[0]
        most = self.routes + min(num_experts, self.routes) * 128

        def integers(n: int) -> Tensor:
            return torch.zeros(n, dtype=torch.int32, device=device)

        self.ranks, self.counts = integers(self.routes), integers(num_experts)
        self.rows_of, self.starts = integers(num_experts), integers(num_experts)
        self.tile_expert, self.sorted_routes = integers(most // 16 + 1), integers(most)
        self.hidden_rows = torch.empty(most, hidden, dtype=torch.bfloat16, device=device)
        self.results = torch.empty(self.routes, width, dtype=torch.bfloat16, device=device)
        self.output = torch.empty(rows, width, dtype=torch.float32, device=device)

    def _max_tiles(self, bm: int) -> int:
        return self.routes // bm + min(self.num_experts, self.routes)

    def align(self, experts: Tensor) -> None:
        block = 256
        grid = (triton.cdiv(self.routes, block),)
        tiles = self._max_tiles(self.first.bm)
        _count[grid](experts, self.ranks, self.counts, self.routes, BLOCK=block)
        _tiles[(1,)](self.counts, self.rows_of, self.starts, self.tile_expert, self.num_experts,
                     tiles, BM=self.first.bm, EXPERTS=triton.next_power_of_2(self.num_experts),
                     BLOCK=32)
        _place[grid](experts, self.ranks, self.starts, self.sorted_routes, self.routes, BLOCK=block)

    def _launch(self, first: bool, a: Tensor, weights: Tensor, out: Tensor, config: Config) -> None:
        n, k = (self.hidden, self.width) if first else (self.width, self.hidden)
        tiles = self._max_tiles(config.bm)
        _product[(triton.cdiv(n, config.bn) * tiles,)](
            a, weights, out, self.sorted_routes, self.tile_expert, self.starts, self.rows_of, n, k,
            self.num_experts, self.per_row, a.stride(0), out.stride(0), tiles,
            GROUP=8 if config.bm > 16 else 1, BM=config.bm, BN=config.bn, BK=config.bk,
            FIRST=first, GATED=self.gated and first, KIND=self.kind if first else 0,
            EVEN=k % config.bk == 0, num_stages=config.stages, num_warps=config.warps)

    def _launch_fused(self, x: Tensor, w1: Tensor, w2: Tensor, config: Config) -> None:
        _fused[(self._max_tiles(config.bm),)](
            x, w1, w2, self.results, self.sorted_routes, self.tile_expert, self.starts,
            self.rows_of, self.width, self.hidden, self.num_experts, self.per_row, BM=config.bm,
            BF=config.bk, BD=triton.next_power_of_2(self.width), GATED=self.gated, KIND=self.kind,
            num_stages=config.stages, num_warps=config.warps)

    def run_fused(self, x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w2: Tensor,
                  ) -> Tensor:
        """Computes the same as run() with the fused kernel, for widths up to MAX_FUSED_WIDTH."""
        self.align(experts)
        self._launch_fused(x, w1, w2, self.first)
        return self.combine(weights)

    def tune_fused(self, x: Tensor, experts: Tensor, w1: Tensor, w2: Tensor,
                   quick: Callable[[Callable[[], Any]], float]) -> dict[str, Any]:
        best: tuple[float, Config] | None = None
        for config in FUSED_CONFIGS:
            self.first = config
            self.align(experts)
            try:
                seconds = quick(lambda: self._launch_fused(x, w1, w2, config))
            except Exception:  # for example, too much shared memory
                continue
            if best is None or seconds < best[0]:
                best = (seconds, config)
        if best is None:
            raise RuntimeError("no configuration runs")
        self.first = best[1]
        return {"tried": len(FUSED_CONFIGS), "config": dataclasses.astuple(self.first)}

    def combine(self, weights: Tensor) -> Tensor:
        block = min(1024, triton.next_power_of_2(self.width))
        _combine[(self.rows, triton.cdiv(self.width, block))](
            self.results, weights, self.output, self.width, PER_ROW=self.per_row, BLOCK=block)
        return self.output

    def run(self, x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        """Computes the layer; returns [S, c] f32, which the next call overwrites.

        x: [S, c] bf16; experts: [S * k] int32; weights: [S * k] f32; w1: [E, f, c], or [E, 2 f, c]
        with the gate before the up projection if gated; w2: [E, c, f].
        """
        self.align(experts)
        self._launch(True, x, w1, self.hidden_rows, self.first)
        self._launch(False, self.hidden_rows, w2, self.results, self.second)
        return self.combine(weights)

    def tune(self, x: Tensor, experts: Tensor, w1: Tensor, w2: Tensor,
             quick: Callable[[Callable[[], Any]], float]) -> dict[str, Any]:
        """Chooses the fastest configuration for each product. Both products use tiles with the same
        number of rows."""
        best: tuple[float, Config, Config] | None = None
        tried = failed = 0
        candidates = configs_for(self.routes / self.num_experts)
        for height in sorted({c.bm for c in candidates}):
            times: list[list[tuple[float, Config]]] = [[], []]
            self.first = next(c for c in candidates if c.bm == height)
            self.align(experts)
            for config in (c for c in candidates if c.bm == height):
                for which in (0, 1):
                    args = ((True, x, w1, self.hidden_rows) if which == 0
                            else (False, self.hidden_rows, w2, self.results))
                    tried += 1
                    try:
                        seconds = quick(lambda: self._launch(*args, config))
                        times[which].append((seconds, config))
                    except Exception:  # for example, too much shared memory
                        failed += 1
            if not times[0] or not times[1]:
                continue
            one, two = min(times[0], key=lambda t: t[0]), min(times[1], key=lambda t: t[0])
            if best is None or one[0] + two[0] < best[0]:
                best = (one[0] + two[0], one[1], two[1])
        if best is None:
            raise RuntimeError("no configuration runs")
        _, self.first, self.second = best
        return {"tried": tried, "failed": failed,
                "config": [dataclasses.astuple(self.first), dataclasses.astuple(self.second)]}
