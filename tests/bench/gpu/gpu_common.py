"""Code that the PyTorch baselines share: it stores results as JSON lines, times functions and
checks their results."""

import dataclasses
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

Line = dict[str, Any]
Tensor = torch.Tensor

# A baseline that reaches less than this share of its own bound is marked as weak: being faster than
# it proves little.
WEAK_SHARE = 0.6


class Results:
    """A file with one JSON object per line. Results in the file are not measured again."""

    def __init__(self, path: pathlib.Path | None) -> None:
        self.path = path
        self.lines: dict[tuple[str, str], Line] = {}
        for line in read_lines(path):
            self.lines[line["name"], line.get("method", "")] = line

    def has(self, name: str, method: str) -> bool:
        return (name, method) in self.lines

    def add(self, line: Line) -> None:
        self.lines[line["name"], line.get("method", "")] = line
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        print(_describe(line), flush=True)


def read_lines(path: pathlib.Path | None) -> list[Line]:
    """Returns the results in a file. Ignores an incomplete last line."""
    if path is None or not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "name" in line and "started" not in line:
            lines.append(line)
    return lines


def _describe(line: Line) -> str:
    head = f"{line['name']:32} {line.get('method', ''):20}"
    if "error" in line:
        return f"{head} error: {line['error'][:150]}"
    if "median_us" not in line:
        rest = {k: v for k, v in line.items() if k not in ("name", "method")}
        return f"{head} {json.dumps(rest)}"
    share = line.get("share_of_floor")
    bound = "" if share is None else f" {100 * share:6.1f} % of its bound"
    weak = " (weak)" if line.get("weak") else ""
    graph = "" if line.get("graph") else " (no graph)"
    return f"{head} {line['median_us']:10.2f} us{bound}{weak}{graph}"


@dataclasses.dataclass
class Rates:
    """The device's best rates in bytes and operations per second; 0 means unknown."""

    copy: float = 0.0
    read: float = 0.0
    bf16: float = 0.0

    def floor(self, moved: float, flops: float, written: float = 0.0) -> float:
        """Returns the least seconds in which `moved` bytes and `flops` operations are possible.

        `written` of the bytes are written. As many bytes are moved at the rate of a copy, the rest
        at the rate of reading alone, as in cuda_bench.
        """
        copied = 2 * min(written, moved - written)
        rest = self.read if moved - written > written and self.read else self.copy
        by_bytes = copied / self.copy + (moved - copied) / rest if self.copy else 0.0
        by_flops = flops / self.bf16 if self.bf16 else 0.0
        return max(by_bytes, by_flops)


class Device:
    """The device that the baselines run on, and its timing functions."""

    def __init__(self, name: str, tiny: bool) -> None:
        self.name = name
        self.tiny = tiny
        self.cuda = name == "cuda"
        self.rates = Rates()
        self.title = "cpu"
        self.l2_bytes = 1 << 20
        self.budget = 1 << 28
        if self.cuda:
            properties = torch.cuda.get_device_properties(0)
            self.title = properties.name
            self.l2_bytes = getattr(properties, "L2_cache_size", 60 << 20)
            self.budget = min(24 << 30, properties.total_memory // 3)
        self._generator = torch.Generator(device=name)
        self._generator.manual_seed(1)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16,
               ) -> Tensor:
        values = torch.empty(*shape, dtype=dtype, device=self.name)
        return values.normal_(0.0, scale, generator=self._generator)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=self.name, generator=self._generator)

    def sets_for(self, touched: float, whole: float) -> int:
        """Returns the number of data sets between which timed calls alternate.

        The sets together have at least 4 times the size of the L2 cache if memory allows. `touched`
        is the number of bytes that one call reads, `whole` the size of one set in bytes.
        """
        if self.tiny:
            return 2
        wanted = math.ceil(4 * self.l2_bytes / max(touched, 1.0))
        room = max(2, int(self.budget / max(whole, 1.0)))
        return max(2, min(wanted, room, 64))

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def quick(self, function: Callable[[], Any], rounds: int = 5) -> float:
        """Returns the approximate seconds per call, for choosing between configurations."""
        for _ in range(2):
            function()
        self.synchronize()
        if not self.cuda:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        times = []
        for _ in range(rounds):
            begin, end = _events()
            begin.record()
            function()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        return statistics.median(times)

    def time(self, items: int, function: Callable[[int], Any], graph: bool = True) -> Line:
        """Times function(0) to function(items - 1) in a replayed CUDA graph if possible.

        Returns the median and quantiles of the time per call.
        """
        for i in range(items):
            function(i)
        self.synchronize()
        note = ""
        replay: Callable[[], Any] | None = None
        repeats = 1
        if self.cuda and graph:
            try:
                replay, repeats = self._capture(items, function)
            except Exception as error:  # work that cannot be captured is timed without a graph
                torch.cuda.synchronize()
                note = f"not captured: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        captured = replay is not None

        def plain() -> None:
            for i in range(items):
                function(i)

        run = replay or plain
        line = self._replays(run, items * repeats)
        line["graph"] = captured
        if note:
            line["note"] = note
        elif self.cuda and not graph:
            line["note"] = "waits for the host, so it cannot be captured"
        return line

    def _capture(self, items: int, function: Callable[[int], Any],
                 ) -> tuple[Callable[[], Any], int]:
        def record(repeats: int) -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for i in range(items):
                    function(i)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                for _ in range(repeats):
                    for i in range(items):
                        function(i)
            return graph

        graph = record(1)
        once = self.quick(graph.replay, 3)
        repeats = max(1, min(math.ceil(300e-6 / max(once, 1e-6)), 512 // items))
        if repeats > 1:
            graph = record(repeats)
        return graph.replay, repeats

    def _replays(self, run: Callable[[], Any], items: int) -> Line:
        start = time.perf_counter()
        while True:
            run()
            self.synchronize()
            if self.tiny or time.perf_counter() - start > 0.02:
                break
        times: list[float] = []
        start = time.perf_counter()
        while len(times) < (3 if self.tiny else 40):
            if self.cuda:
                begin, end = _events()
                begin.record()
                run()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1e-3 / items)
            else:
                at = time.perf_counter()
                run()
                times.append((time.perf_counter() - at) / items)
            if len(times) >= 10 and time.perf_counter() - start > 2.0:
                break
        times.sort()
        return {"median_us": statistics.median(times) * 1e6,
                "p10_us": times[len(times) // 10] * 1e6,
                "p90_us": times[(len(times) * 9) // 10] * 1e6, "replays": len(times)}


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns the relative error in the 2-norm, or infinity if a value is not finite."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    if not bool(torch.isfinite(actual).all()) or float(expected.norm()) == 0:
        return math.inf
    return float((actual - expected).norm() / expected.norm())


def require_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-2) -> None:
    error = relative_error(actual, expected)
    if not error <= tolerance:
        raise ValueError(f"wrong result: relative error {error:.3g}")


def guarded(results: Results, name: str, method: str, device: Device,
            measure: Callable[[], Line]) -> Line | None:
    """Adds the result of `measure`, or its error, to `results`. Does nothing if `results` has the
    case already."""
    if results.has(name, method):
        return None
    line: Line = {"name": name, "method": method, "device": device.title}
    try:
        line.update(measure())
        if "floor_us" in line and line["median_us"] > 0:
            line["share_of_floor"] = line["floor_us"] / line["median_us"]
            line["weak"] = line["share_of_floor"] < WEAK_SHARE
    except Exception as error:  # a failing baseline must not end the run
        line["error"] = f"{type(error).__name__}: {error}".replace("\n", " ")[:400]
        if device.cuda:
            try:
                torch.cuda.synchronize()
            except Exception as lost:
                results.add(line)
                sys.exit(f"error: the device does not answer any more: {lost}")
    results.add(line)
    return line
