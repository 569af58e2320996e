#!/usr/bin/env python3
"""Measures PyTorch and Triton on the shapes of cuda_bench. The cases have cuda_bench's names.

    gpu_baselines.py [--json FILE] [--only rates,moe,attention,sampling,cublas] [--filter SUBSTRING]
                     [--seconds N] [--device cuda|cpu] [--tiny]

Each baseline is first checked against a computation in double precision. It is then timed in a CUDA
graph if it can be captured. The timed calls alternate between sets of random data that together
exceed the L2 cache. A baseline that fails is recorded in FILE with the field "error". Baselines
whose results are already in FILE are not measured again.
"""

import argparse
import math
import pathlib
import time
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

import gpu_moe
from gpu_common import Device, Line, Rates, Results, Tensor, guarded, require_close

PARTS = ("rates", "moe", "attention", "sampling")
# This part calls cuBLAS directly and may crash the process, so it runs only if --only names it.
EXTRA_PARTS = ("cublas",)


def measure_rates(device: Device, results: Results) -> None:
    """Measures the device's rates of bf16 products, copies and reading, from which the bounds are
    computed."""
    def matrix() -> Line:
        n = 256 if device.tiny else 8192
        sets = [(device.normal(n, n), device.normal(n, n)) for _ in range(2)]
        out = torch.empty(n, n, dtype=torch.bfloat16, device=device.name)
        line = device.time(2, lambda i: torch.mm(*sets[i], out=out))
        row = sets[1][0][:1].double() @ sets[1][1].double()
        require_close(out[:1], row)
        return {**line, "tflops": 2.0 * n ** 3 / line["median_us"] / 1e6}

    def copy() -> Line:
        count = (1 << 20) if device.tiny else (2 << 30)  # bf16 numbers
        source = device.normal(count)
        target = torch.empty_like(source)
        line = device.time(1, lambda _: target.copy_(source))
        return {**line, "gbps": 4.0 * count / line["median_us"] / 1e3}

    def read() -> Line:
        count = (1 << 20) if device.tiny else (2 << 30)  # bf16 numbers
        source = device.normal(count).view(torch.int32)
        line = device.time(1, lambda _: source.amax())
        return {**line, "gbps": 2.0 * count / line["median_us"] / 1e3}

    guarded(results, "rate/bf16", "torch", device, matrix)
    guarded(results, "rate/copy", "torch", device, copy)
    guarded(results, "rate/read", "torch", device, read)
    if device.cuda:
        torch.cuda.empty_cache()


def load_rates(results: Results) -> Rates:
    bf16 = results.lines.get(("rate/bf16", "torch"), {}).get("tflops", 0.0)
    copy = results.lines.get(("rate/copy", "torch"), {}).get("gbps", 0.0)
    read = results.lines.get(("rate/read", "torch"), {}).get("gbps", 0.0)
    # PyTorch has no operation that only reads, and its reduction may be slower than a copy.
    return Rates(copy=copy * 1e9, read=max(copy, read) * 1e9, bf16=bf16 * 1e12)


# Attention shapes: (key-value heads, query heads, head size).
ATTENTION = {"moa": (1, 16, 256), "jetmoe": (16, 32, 128), "gqa": (8, 32, 128),
             "mha": (16, 16, 128)}
TINY_ATTENTION = {"gqa": (2, 4, 32), "moa": (1, 4, 32)}


def _backends(device: Device) -> Iterator[tuple[str, object]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    if not device.cuda:
        yield "math", lambda: sdpa_kernel(SDPBackend.MATH)
        return
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        if hasattr(SDPBackend, name):
            yield (name.split("_")[0].lower(),
                   lambda backend=getattr(SDPBackend, name): sdpa_kernel(backend))


def _attention_reference(q: Tensor, k: Tensor, v: Tensor, limit: int) -> Tensor:
    """Returns the attention of one query [d] over keys [L, d], in double precision."""
    k, v = k[:limit].double(), v[:limit].double()
    scores = k @ q.double() / math.sqrt(len(q))
    return scores.softmax(0) @ v


def _best_attention(device: Device, sets: list[tuple[Tensor, Tensor, Tensor]], causal: bool,
                    fold: bool) -> Line:
    """Times every attention backend and returns the result of the fastest.

    With `fold` (decoding), also times the variant that passes the query heads of a group as rows of
    one head instead of as grouped queries (GQA).
    """
    group = sets[0][0].shape[1] // sets[0][1].shape[1]
    lines: list[Line] = []
    errors = []
    last = sets[0][1].shape[2]
    for name, context in _backends(device):
        for folded in ((False, True) if fold and group > 1 else (False,)):
            def attend(i: int, folded: bool = folded, context=context) -> Tensor:
                q, k, v = sets[i]
                b, h, t, d = q.shape
                with context():
                    if folded:
                        rows = q.view(b, h // group, group, d)
                        return functional.scaled_dot_product_attention(rows, k, v).view(b, h, t, d)
                    return functional.scaled_dot_product_attention(
                        q, k, v, is_causal=causal, enable_gqa=group > 1)
            try:
                out = attend(0)
                q, k, v = sets[0]
                for head in (0, q.shape[1] - 1):
                    kv = head // group
                    expected = _attention_reference(q[-1, head, -1], k[-1, kv], v[-1, kv], last)
                    require_close(out[-1, head, -1], expected, 2e-2)
                line = device.time(len(sets), attend)
                line["config"] = name + (" folded" if folded else "")
                lines.append(line)
            except Exception as error:
                errors.append(f"{name}: {str(error).splitlines()[0][:80]}")
    if not lines:
        raise RuntimeError("; ".join(errors) or "no backend")
    return min(lines, key=lambda line: line["median_us"])


def run_attention(device: Device, results: Results, wanted: Callable[[str], bool],
                  in_time: Callable[[], bool]) -> None:
    tables = TINY_ATTENTION if device.tiny else ATTENTION
    batches = (2,) if device.tiny else (32, 8, 128, 1)
    contexts = (40,) if device.tiny else (4096, 1024, 128, 16384, 32768)
    lengths = (37,) if device.tiny else (4096, 512, 2048, 8192)

    def decode(kv: int, heads: int, d: int, batch: int, context: int) -> Line:
        size = 4.0 * kv * d * batch * context
        sets = []
        for _ in range(min(device.sets_for(size, size), 32)):
            sets.append((device.normal(batch, heads, 1, d), device.normal(batch, kv, context, d),
                         device.normal(batch, kv, context, d)))
        line = _best_attention(device, sets, causal=False, fold=True)
        moved = size + 4.0 * batch * heads * d
        flops = 4.0 * heads * d * batch * context
        return {**line, "bytes": moved, "flops": flops, "sets": len(sets), "query_dtype": "bf16",
                "floor_us": device.rates.floor(moved, flops, 2.0 * batch * heads * d) * 1e6}

    def prompt(kv: int, heads: int, d: int, length: int) -> Line:
        sets = [(device.normal(1, heads, length, d), device.normal(1, kv, length, d),
                 device.normal(1, kv, length, d)) for _ in range(2)]
        line = _best_attention(device, sets, causal=True, fold=False)
        moved = 4.0 * (kv + heads) * d * length
        flops = 2.0 * heads * d * length * (length + 1)
        return {**line, "bytes": moved, "flops": flops, "query_dtype": "bf16",
                "floor_us": device.rates.floor(moved, flops, 2.0 * heads * d * length) * 1e6}

    for first in (True, False):
        for shape, (kv, heads, d) in tables.items():
            for batch in batches:
                for context in contexts:
                    name = f"attention/{shape}/B{batch}L{context}"
                    early = device.tiny or context == 4096 or (batch, context) == (32, 1024)
                    if 4.0 * kv * d * batch * context > 16e9 or early != first:
                        continue
                    if wanted(name) and in_time():
                        guarded(results, name, "sdpa", device,
                                lambda: decode(kv, heads, d, batch, context))
            for length in lengths:
                name = f"prompt/{shape}/L{length}"
                early = device.tiny or length == 4096
                if early == first and wanted(name) and in_time():
                    guarded(results, name, "sdpa", device, lambda: prompt(kv, heads, d, length))
    run_blocks(device, results, wanted, in_time)


class Block:
    """A standard attention block in a decode step: norm, q, k and v projections, RoPE, KV cache,
    attention and output projection."""

    def __init__(self, device: Device, width: int, heads: int, d: int, batch: int, context: int,
                 ) -> None:
        self.heads, self.d, self.context = heads, d, context
        self.norm = device.normal(width)
        self.projection = device.normal(3 * heads * d, width, scale=width ** -0.5)
        self.output = device.normal(width, heads * d, scale=(heads * d) ** -0.5)
        self.keys = device.normal(batch, heads, context, d)
        self.values = device.normal(batch, heads, context, d)
        angle = (context - 1) * 10000.0 ** (-torch.arange(0, d, 2, device=device.name) / d)
        self.cosine = torch.cat([angle.cos(), angle.cos()]).to(torch.bfloat16)
        self.sine = torch.cat([angle.sin(), angle.sin()]).to(torch.bfloat16)

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cosine + torch.cat([-second, first], -1) * self.sine

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.rms_norm(x, (x.shape[1],), self.norm, 1e-5)
        q, k, v = functional.linear(normed, self.projection).view(
            len(x), 3, self.heads, self.d).unbind(1)
        self.keys[:, :, self.context - 1] = self.rotate(k)
        self.values[:, :, self.context - 1] = v
        out = functional.scaled_dot_product_attention(self.rotate(q)[:, :, None], self.keys,
                                                      self.values)
        return x + functional.linear(out.reshape(len(x), -1), self.output)


def run_blocks(device: Device, results: Results, wanted: Callable[[str], bool],
               in_time: Callable[[], bool]) -> None:
    width, heads, d = (64, 3, 32) if device.tiny else (512, 17, 128)
    sizes = ((2, 20),) if device.tiny else ((32, 4096), (32, 1024), (32, 16384), (1, 4096),
                                            (128, 1024))

    def measure(batch: int, context: int) -> Line:
        kv = 4.0 * heads * d * batch * context
        blocks = [Block(device, width, heads, d, batch, context)
                  for _ in range(max(2, min(8, device.sets_for(kv, kv))))]
        x = device.normal(batch, width)
        if not bool(torch.isfinite(blocks[0].forward(x)).all()):
            raise ValueError("a value is not finite")
        with torch.no_grad():
            line = device.time(len(blocks), lambda i: blocks[i].forward(x))
        moved = kv + 2.0 * 4 * width * heads * d + 4.0 * batch * width
        flops = 8.0 * batch * width * heads * d + 4.0 * heads * d * batch * context
        return {**line, "bytes": moved, "flops": flops,
                "floor_us": device.rates.floor(moved, flops, 2.0 * batch * width) * 1e6}

    for batch, context in sizes:
        name = f"block/mha/B{batch}L{context}"
        if wanted(name) and in_time():
            guarded(results, name, "torch", device, lambda: measure(batch, context))


def _draw(weights: Tensor) -> Tensor:
    """Draws one index per row, in proportion to the weights, without waiting for the host."""
    return (weights / torch.empty_like(weights).exponential_(1.0)).argmax(-1)


def sample(kind: str, logits: Tensor) -> Tensor:
    """Draws one token per row of logits, by sorting the logits for top-k and top-p."""
    if kind == "greedy":
        return logits.argmax(-1)
    if kind == "plain":
        return _draw(logits.softmax(-1))
    if kind == "minp":
        shares = logits.softmax(-1)
        least = 0.05 * shares.amax(-1, keepdim=True)
        return _draw(shares.where(shares >= least, torch.zeros_like(shares)))
    if kind == "topk":
        top = (logits / 0.8).topk(min(50, logits.shape[1]), dim=-1)
        return top.indices.gather(1, _draw(top.values.softmax(-1))[:, None]).squeeze(1)
    ordered, index = (logits / 0.8).sort(dim=-1, descending=True)
    shares = ordered.softmax(-1)
    before = shares.cumsum(-1) - shares
    kept = shares.where(before < 0.9, torch.zeros_like(shares))
    return index.gather(1, _draw(kept)[:, None]).squeeze(1)


def run_sampling(device: Device, results: Results, wanted: Callable[[str], bool],
                 in_time: Callable[[], bool]) -> None:
    vocabularies = (100,) if device.tiny else (32000, 128000)

    def measure(kind: str, batch: int, vocabulary: int) -> Line:
        size = 4.0 * batch * vocabulary
        sets = [device.normal(batch, vocabulary, scale=2.5, dtype=torch.float32)
                for _ in range(min(64, device.sets_for(size, size)))]
        tokens = sample(kind, sets[0])
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            raise ValueError("a token is not of the vocabulary")
        line = device.time(len(sets), lambda i: sample(kind, sets[i]))
        return {**line, "bytes": size, "floor_us": device.rates.floor(size, 0) * 1e6}

    for batch in (2,) if device.tiny else (128, 32, 1):
        for vocabulary in vocabularies:
            for kind in ("greedy", "plain", "topk", "topp", "minp"):
                name = f"sample/{kind}{vocabulary}/B{batch}"
                if wanted(name) and in_time():
                    guarded(results, name, "torch", device,
                            lambda: measure(kind, batch, vocabulary))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--filter", default="",
                        help="run only cases whose name contains one of these texts (with commas)")
    parser.add_argument("--seconds", type=float, default=1e9,
                        help="seconds after which no baseline starts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use small shapes, to test the program")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here; try --device cpu --tiny")
    parts = [p for p in arguments.only.split(",") if p]
    known = PARTS + EXTRA_PARTS
    if not set(parts) <= set(known):
        parser.error(f"--only: expected some of {', '.join(known)}, found {arguments.only}")
    start = time.monotonic()

    def wanted(name: str) -> bool:
        return not arguments.filter or any(f in name for f in arguments.filter.split(","))

    def in_time() -> bool:
        return time.monotonic() - start < arguments.seconds

    torch.set_grad_enabled(False)
    device = Device(arguments.device, arguments.tiny)
    results = Results(arguments.json)
    if "rates" in parts:
        measure_rates(device, results)
    device.rates = load_rates(results)
    if "attention" in parts:
        run_attention(device, results, wanted, in_time)
        if device.cuda:
            torch.cuda.empty_cache()
    if "sampling" in parts:
        run_sampling(device, results, wanted, in_time)
        if device.cuda:
            torch.cuda.empty_cache()
    if "moe" in parts:
        gpu_moe.run(device, results, wanted, in_time)
    if "cublas" in parts and device.cuda:
        gpu_moe.run(device, results, wanted, in_time, cublas=True)
    if not in_time():
        print("the time was up before all baselines ran")


if __name__ == "__main__":
    main()
