"""Baselines of the routed layer: a loop over experts, torch._grouped_mm, torch.bmm and Triton.

Each computes the router, too, in the graph that is timed: scores, the best k experts and their
gates. Only the grouped products of cuBLAS have no router, because the host must know their sizes.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from gpu_common import Device, Line, Results, guarded, require_close

try:
    import triton_moe
except Exception:  # Triton is not installed
    triton_moe = None

Tensor = torch.Tensor

TOKENS = (16, 1, 256, 4096, 64, 1024, 8192, 4, 2048, 512, 128, 32, 8, 2)
# With more rows, the baseline bmm, which computes every expert for every row, would take too long.
MAX_BMM_ROWS = 128
# As in cuda_bench.
COSINE_DIM = 16
TEMPERATURE = 0.3


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer's shape. cuda_bench has the same shapes under the same names."""

    name: str
    width: int
    hidden: tuple[int, ...]
    k: int
    heads: int = 1
    gated: bool = True
    activation: str = "silu"
    cosine: bool = False

    @property
    def experts(self) -> int:
        return len(self.hidden)

    @property
    def equal(self) -> bool:
        return len(set(self.hidden)) == 1


_HMOE = (2304, 2816, 3328, 3840, 4352, 4864, 5376, 5888)
SHAPES = [
    Shape("mixtral", 4096, (14336,) * 8, 2),
    Shape("olmoe", 2048, (1024,) * 64, 8),
    Shape("jetmoe", 2048, (5632,) * 8, 2),
    Shape("hmoe", 1024, _HMOE, 2),
    Shape("moa", 512, (256,) * 32, 16, gated=False, activation="none"),
    Shape("jetmoe_heads", 2048, (2048,) * 8, 2, gated=False, activation="none"),
    *(Shape(name, 192, hidden, 2, heads=4, gated=False, activation="gelu", cosine=True)
      for name, hidden in (("mhmoe_n8", (3072,) * 8), ("mhmoe_n64", (3072,) * 64),
                           ("mhmoe_n256", (3072,) * 256), ("mhmoe_wide", (12288,) * 8))),
    Shape("mhmoe_gated", 192, (3024,) * 8, 2, heads=4),
]
TINY = [Shape("tiny_gated", 64, (64,) * 4, 2), Shape("hmoe", 64, (24, 40, 64, 88), 2),
        Shape("mhmoe_n8", 48, (72,) * 8, 2, heads=4, gated=False, activation="gelu",
              cosine=True)]


def activate(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return functional.silu(x)
    return functional.gelu(x) if name == "gelu" else x


class Layer:
    """The weights of one layer, stacked over its experts. Narrow experts are padded with zeros to
    the widest."""

    def __init__(self, device: Device, shape: Shape) -> None:
        widest, d = max(shape.hidden), shape.width
        halves = 2 if shape.gated else 1
        self.w1 = device.normal(shape.experts, halves, widest, d, scale=d ** -0.5)
        self.w2 = device.normal(shape.experts, d, widest, scale=widest ** -0.5)
        if not shape.equal:
            for e, f in enumerate(shape.hidden):
                self.w1[e, :, f:] = 0
                self.w2[e, :, f:] = 0
        self.w1 = self.w1.view(shape.experts, halves * widest, d)
        self.shape = shape
        # With a cosine router, scores are those of rows projected to few dimensions.
        columns = COSINE_DIM if shape.cosine else shape.experts
        self.router = device.normal(columns, d, scale=d ** -0.5)
        self.directions = functional.normalize(
            device.normal(shape.experts, COSINE_DIM, dtype=torch.float32)) if shape.cosine else None
        # The loop over experts uses the weights without padding.
        self.narrow = [(torch.cat([self.w1[e, h * widest:h * widest + f] for h in range(halves)]),
                        self.w2[e, :, :f].contiguous()) for e, f in enumerate(shape.hidden)] \
            if not shape.equal else [(self.w1[e], self.w2[e]) for e in range(shape.experts)]

    def route(self, x: Tensor) -> "Routed":
        """Selects the k best experts of each row; their gates sum to 1."""
        scores = functional.linear(x, self.router).float()
        if self.directions is not None:
            scores = functional.normalize(scores) @ self.directions.t() / TEMPERATURE
        top = scores.topk(self.shape.k, dim=1)
        return Routed(x, top.indices, top.values.softmax(1))

    def hidden(self, h: Tensor) -> Tensor:
        if not self.shape.gated:
            return activate(h, self.shape.activation)
        gate, up = h.chunk(2, -1)
        return activate(gate, self.shape.activation) * up


@dataclasses.dataclass
class Routed:
    """Rows, each with k experts."""

    x: Tensor  # [S, c]
    experts: Tensor  # int64 [S, k]
    weights: Tensor  # f32 [S, k]


def reference(layer: Layer, r: Routed, rows: list[int]) -> Tensor:
    """Returns the layer's output for some rows, in double precision."""
    out = []
    for row in rows:
        x = r.x[row].double()
        total = torch.zeros_like(x)
        for e, weight in zip(r.experts[row].tolist(), r.weights[row].tolist()):
            w1, w2 = layer.narrow[e]
            total += weight * (w2.double() @ layer.hidden(w1.double() @ x))
        out.append(total)
    return torch.stack(out)


def loop(layer: Layer, r: Routed) -> Tensor:
    """Computes the layer expert by expert. Copies the number of rows per expert to the host."""
    flat = r.experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=layer.shape.experts).tolist()
    out = torch.zeros(r.x.shape, dtype=torch.float32, device=r.x.device)
    gates = r.weights.flatten()
    at = 0
    for e, count in enumerate(counts):
        if count == 0:
            continue
        routes = order[at:at + count]
        at += count
        rows = routes // layer.shape.k
        w1, w2 = layer.narrow[e]
        y = layer.hidden(r.x.index_select(0, rows) @ w1.t()) @ w2.t()
        out.index_add_(0, rows, y.float() * gates[routes, None])
    return out


def grouped_mm(layer: Layer, r: Routed) -> Tensor:
    flat = r.experts.flatten()
    ordered, order = flat.sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(layer.shape.experts, device=flat.device),
                              right=True).to(torch.int32)
    rows = r.x.index_select(0, order // layer.shape.k)
    h = torch._grouped_mm(rows, layer.w1.transpose(1, 2), offs=ends)
    y = torch._grouped_mm(layer.hidden(h), layer.w2.transpose(1, 2), offs=ends)
    results = torch.empty_like(y)
    results[order] = y
    results = results.view(-1, layer.shape.k, layer.shape.width)
    return (results.float() * r.weights[:, :, None]).sum(1)


def bmm(layer: Layer, r: Routed) -> Tensor:
    """Computes every expert for every row, and weights the experts that a row did not select by 0.
    """
    dense = torch.zeros(len(r.x), layer.shape.experts, device=r.x.device)
    dense = dense.scatter(1, r.experts, r.weights)
    x = r.x.expand(layer.shape.experts, *r.x.shape)
    h = torch.bmm(x, layer.w1.transpose(1, 2))
    y = torch.bmm(layer.hidden(h), layer.w2.transpose(1, 2))
    return torch.einsum("esc,se->sc", y.float(), dense)


def _work(shape: Shape, cases: list[Routed], rows: int) -> tuple[float, float, float]:
    """Returns the bytes that one layer moves, those of them that it writes, and its operations; each
    is a mean over the cases."""
    matrices = 3 if shape.gated else 2
    weights = flops = hidden = 0.0
    for r in cases:
        counts = torch.bincount(r.experts.flatten(), minlength=shape.experts).tolist()
        for f, count in zip(shape.hidden, counts):
            weights += matrices * shape.width * f * 2 * (count > 0)
            flops += 2 * matrices * shape.width * f * count
            hidden += f * count
    n = len(cases)
    routes = rows * shape.k
    moved = (weights / n + 4 * hidden / n + 2 * rows * shape.width + 4 * routes * shape.width
             + 4 * rows * shape.width)
    written = 2 * hidden / n + 2 * routes * shape.width + 4 * rows * shape.width
    return moved, written, flops / n


def _measure(device: Device, layers: list[Layer], cases: list[Routed], method: str,
             function: Callable[[int], Tensor], extra: Line) -> Line:
    rows = sorted({0, len(cases[0].x) // 2, len(cases[0].x) - 1})
    expected = reference(layers[0], cases[0], rows)
    require_close(function(0)[rows], expected, 1.5e-2)
    shape = layers[0].shape
    moved, written, flops = _work(shape, cases, len(cases[0].x))
    line = device.time(len(cases), function, graph=method != "loop")
    return {**line, **extra, "bytes": moved, "flops": flops, "sets": len(cases),
            "router": method != "cublas_grouped",
            "routes": len(cases[0].x) * shape.k,
            "floor_us": device.rates.floor(moved, flops, written) * 1e6}


def _methods(device: Device, layers: list[Layer], cases: list[Routed], rows: int,
             ) -> Iterator[tuple[str, Callable[[], Line]]]:
    shape = layers[0].shape
    plain: dict[str, Callable[[Layer, Routed], Tensor]] = {"loop": loop}
    if device.cuda:
        plain["grouped_mm"] = grouped_mm
    if rows <= MAX_BMM_ROWS:
        plain["bmm"] = bmm
    padded = {} if shape.equal else {"note_widths": "experts padded to the widest"}
    for name, function in plain.items():
        extra: Line = {} if name == "loop" else padded

        def measure(name: str = name, extra: Line = extra,
                    function: Callable[[Layer, Routed], Tensor] = function) -> Line:
            return _measure(device, layers, cases, name,
                            lambda i: function(layers[i], layers[i].route(cases[i].x)), extra)

        yield name, measure
    if triton_moe is None or not device.cuda:
        return

    def measure_triton(fused: bool = False) -> Line:
        runner = triton_moe.TritonExperts(rows, shape.width, max(shape.hidden), shape.experts,
                                          shape.k, shape.gated, shape.activation, device.name)

        def flat(r: Routed) -> tuple[Tensor, Tensor]:
            return r.experts.flatten().to(torch.int32), r.weights.flatten().contiguous()

        tune, launch = ((runner.tune_fused, runner.run_fused) if fused
                        else (runner.tune, runner.run))
        tuning = tune(cases[0].x, flat(cases[0])[0], layers[0].w1, layers[0].w2, device.quick)
        return _measure(device, layers, cases, "triton",
                        lambda i: launch(cases[i].x, *flat(layers[i].route(cases[i].x)),
                                         layers[i].w1, layers[i].w2),
                        {**padded, **tuning})

    yield "triton", measure_triton
    # For wider rows, the fused kernel's accumulators do not fit into registers.
    if shape.heads > 1 and shape.width <= triton_moe.MAX_FUSED_WIDTH:
        yield "triton_fused", lambda: measure_triton(fused=True)


def _cublas(device: Device, layers: list[Layer], cases: list[Routed]) -> Line:
    import gpu_cublas
    library = gpu_cublas.library()
    experts = [gpu_cublas.CublasExperts(device, library, layer, r)
               for layer, r in zip(layers, cases)]
    return _measure(device, layers, cases, "cublas_grouped", lambda i: experts[i].run(),
                    {"note_counts": "no router: row counts are known to the host"})


def run(device: Device, results: Results, wanted: Callable[[str], bool],
        in_time: Callable[[], bool], cublas: bool = False) -> None:
    """Measures all shapes. The most informative numbers of tokens come first, because the time may
    run out. With `cublas`, measures only the grouped products of cuBLAS, which may crash the
    process."""
    shapes = TINY if device.tiny else SHAPES
    tokens = (5, 1) if device.tiny else TOKENS
    for sizes in (tokens[:6], tokens[6:]):
        for shape in shapes:
            names = {t: f"moe/{shape.name}/T{t}" for t in sizes}
            if not any(wanted(n) for n in names.values()):
                continue
            if not in_time():
                return
            layers: list[Layer] = []
            try:
                whole = 2.0 * sum(shape.hidden) * shape.width * (3 if shape.gated else 2)
                # Unequal widths are stored twice: padded, and without padding.
                copies = 1 if shape.equal else 2.5
                touched = whole * min(1.0, shape.k * shape.heads / shape.experts)
                layers = [Layer(device, shape)
                          for _ in range(device.sets_for(touched, whole * copies))]
                for t in sizes:
                    if wanted(names[t]) and in_time():
                        _run_size(device, results, shape, layers, t, names[t], whole, cublas)
            except Exception as error:  # for example, out of memory
                message = str(error).replace("\n", " ")[:300]
                results.add({"name": f"moe/{shape.name}", "method": "setup", "error": message})
            del layers
            if device.cuda:
                torch.cuda.empty_cache()


def _run_size(device: Device, results: Results, shape: Shape, layers: list[Layer], tokens: int,
              name: str, whole: float, cublas: bool) -> None:
    rows = tokens * shape.heads
    hit = 1 - (1 - shape.k / shape.experts) ** rows
    count = min(len(layers), device.sets_for(whole * hit, whole))
    cases = [layers[i].route(device.normal(rows, shape.width)) for i in range(count)]
    if cublas:
        guarded(results, name, "cublas_grouped", device,
                lambda: _cublas(device, layers[:count], cases))
        return
    for method, measure in _methods(device, layers[:count], cases, rows):
        guarded(results, name, method, device, measure)
