#!/usr/bin/env python3
"""Prints one table with the results of cuda_bench, gpu_baselines.py and gpu_models.py.

    gpu_table.py FILE.jsonl... [--all]

A line of the table has moeserve's result, the best baseline's result, both as percentages of their
bounds, and how many times faster moeserve is. A baseline below 60 % of its own bound is marked
"weak". The project's performance goals follow: each with the measured value, the required value and
whether it is reached. --all adds the cases that have no baseline.
"""

import argparse
import collections
import pathlib
from collections.abc import Iterator

from gpu_common import Line, read_lines

OURS = "moeserve"
Cases = dict[str, dict[str, Line]]


def load(paths: list[pathlib.Path]) -> Cases:
    """Returns the results by case and method; later results replace earlier ones."""
    cases: Cases = collections.defaultdict(dict)
    for path in paths:
        for line in read_lines(path):
            old = cases[line["name"]].get(line.get("method", ""))
            if old is None or "error" not in line:
                cases[line["name"]][line.get("method", "")] = line
    return cases


def speed(line: Line | None) -> float | None:
    """Returns items or tokens per second; None if nothing was measured."""
    if line is None or "error" in line:
        return None
    if "tokens_per_second" in line:
        return line["tokens_per_second"]
    return 1e6 / line["median_us"] if line.get("median_us") else None


def best_baseline(methods: dict[str, Line]) -> Line | None:
    lines = [m for name, m in methods.items() if name != OURS and speed(m)]
    return max(lines, key=lambda line: speed(line) or 0.0, default=None)


def percent(line: Line | None) -> str:
    if line is None or "share_of_floor" not in line:
        return "-"
    return f"{100 * line['share_of_floor']:.0f}%"


def amount(line: Line | None) -> str:
    if line is None:
        return "-"
    if "error" in line:
        return "error"
    if "tokens_per_second" in line:
        return f"{line['tokens_per_second']:.1f}/s"
    return f"{line['median_us']:.2f} us"


def describe(name: str, methods: dict[str, Line]) -> str:
    ours, other = methods.get(OURS), best_baseline(methods)
    ratio = "-"
    notes = []
    if speed(ours) and speed(other):
        factor = (speed(ours) or 0.0) / (speed(other) or 1.0)
        ratio = f"{factor:.2f}x"
        if factor < 1:
            notes.append("BEHIND")
    if other is not None:
        if other.get("weak"):
            notes.append("weak")
        if other.get("graph") is False:
            notes.append("no graph")
    if ours is not None and "error" in ours:
        notes.append(ours["error"][:60])
    failed = [m for m, line in methods.items() if m != OURS and "error" in line]
    if failed:
        notes.append("failed: " + ", ".join(sorted(failed)))
    method = other["method"] if other else ""
    bound = ours.get("bound", "") if ours else ""
    return (f"{name:32} {amount(ours):>13} {percent(ours):>6} {bound:8} {method:22} "
            f"{amount(other):>13} {percent(other):>6} {ratio:>8}  {'; '.join(notes)}")


def _median(cases: Cases, name: str) -> float | None:
    line = cases.get(name, {}).get(OURS)
    return line["median_us"] if line is not None and "median_us" in line else None


def _sizes(cases: Cases, prefix: str) -> list[str]:
    return [n.rsplit("/", 1)[1] for n in cases if n.startswith(prefix + "/")]


def _share(cases: Cases, field: str, family: str, enough: float) -> Iterator[tuple[str, float]]:
    for name, methods in cases.items():
        line = methods.get(OURS, {})
        if name.startswith(family + "/") and line.get("weight_mb", 0) > enough and field in line:
            yield name, line[field]


def marks(cases: Cases) -> Iterator[tuple[str, str, str, bool]]:
    """Yields (goal, measured value, required value, whether reached) for the performance goals."""
    for name, share in _share(cases, "share_of_copy", "experts", 200):
        tokens = int(name.rsplit("/T", 1)[1])
        if tokens <= 256 and cases[name][OURS]["bound"] == "memory":
            yield f"copy bandwidth, {name}", f"{100 * share:.0f}%", "80%", share >= 0.8
    for shape in ("mixtral", "jetmoe"):
        line = cases.get(f"experts/{shape}/T4096", {}).get(OURS, {})
        if "share_of_bf16" in line:
            share = line["share_of_bf16"]
            yield f"bf16 rate, {line['name']}", f"{100 * share:.0f}%", "65%", share >= 0.65
    for name, methods in cases.items():
        if name.startswith("route/") and name.endswith("/R256") and _median(cases, name):
            time = _median(cases, name) or 0.0
            yield f"router and plan, {name}", f"{time:.1f} us", "8 us", time <= 8
    # The arguments are: our case, the other case, the required quotient other / ours, the goal.
    for family in ("experts", "moe"):
        for size in _sizes(cases, f"{family}/hmoe"):
            yield from _quotient(cases, f"{family}/hmoe/{size}", f"{family}/hmoe_equal/{size}",
                                 1 / 1.05, "equal widths / unequal")
            yield from _quotient(cases, f"{family}/hmoe/{size}", f"{family}/hmoe_padded/{size}",
                                 1.3, "padded / unequal")
            yield from _top_p(cases, f"{family}/hmoe_topp/{size}", f"{family}/hmoe/{size}")
    for name in list(cases):
        if name.startswith("fused/") and int(name.rsplit("/T", 1)[1]) >= 1024:
            pair = name.replace("fused/", "experts/")
            yield from _quotient(cases, name, pair, 1.4, "pair / fused")
    for size in _sizes(cases, "block/moa"):
        ours, block = _median(cases, f"block/moa/{size}"), cases.get(f"block/mha/{size}", {})
        times = {m: line["median_us"] for m, line in block.items() if "median_us" in line}
        if ours and times:
            method = min(times, key=lambda m: times[m])
            quotient = times[method] / ours
            # Both blocks have as many parameters in their projections. The standard block has 17
            # heads of 128, so its cache has 8.5 times the bytes of MoA's one head of 256.
            yield (f"standard ({method}, equal parameters) / MoA block, {size}",
                   f"{quotient:.2f}x", "3x", quotient >= 3)


def _top_p(cases: Cases, ours: str, other: str) -> Iterator[tuple[str, str, str, bool]]:
    """Compares top-p with top-k where both have equally many routes, within 5 %. A few rows cannot
    select k experts on average."""
    routes = [cases.get(name, {}).get(OURS, {}).get("routes", 0) for name in (ours, other)]
    if int(ours.rsplit("/T", 1)[1]) >= 16 and abs(routes[0] - routes[1]) <= 0.05 * routes[1]:
        yield from _quotient(cases, ours, other, 1 / 1.03,
                             f"top-k / top-p of {routes[0]:.0f} and {routes[1]:.0f} routes")


def _quotient(cases: Cases, ours: str, other: str, least: float, what: str,
              ) -> Iterator[tuple[str, str, str, bool]]:
    a, b = _median(cases, ours), _median(cases, other)
    if a and b:
        yield f"{what}, {ours}", f"{b / a:.2f}x", f"{least:.2f}x", b / a >= least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--all", action="store_true", help="also print cases without a baseline")
    arguments = parser.parse_args()
    cases = load(arguments.files)
    for name in ("device/rates", "rate/bf16", "rate/copy", "rate/read"):
        for line in cases.pop(name, {}).values():
            fields = ("device", "copy_gbps", "read_gbps", "bf16_tflops", "bf16_sustained_tflops",
                      "bf16_method", "graph_node_us", "tflops", "gbps")
            print(f"{name}: " + ", ".join(
                f"{f} {line[f]:.4g}" if isinstance(line[f], float) else f"{f} {line[f]}"
                for f in fields if f in line))
    print(f"\n{'case':32} {'ours':>13} {'bound':>6} {'':8} {'best baseline':22} {'':>13} "
          f"{'bound':>6} {'ratio':>8}")
    ahead = behind = 0
    for name, methods in cases.items():
        other = best_baseline(methods)
        if not arguments.all and other is None and "error" not in methods.get(OURS, {}):
            continue
        print(describe(name, methods))
        if speed(methods.get(OURS)) and speed(other):
            faster = (speed(methods[OURS]) or 0.0) >= (speed(other) or 0.0)
            ahead, behind = ahead + faster, behind + (not faster)
    print(f"\nahead of the best baseline in {ahead} cases, behind in {behind}\n")
    rows = list(marks(cases))
    for what, measured, wanted, reached in rows:
        print(f"{what:58} {measured:>10} {wanted:>8}  {'yes' if reached else 'NO'}")
    print(f"\n{sum(r[3] for r in rows)} of {len(rows)} marks reached")


if __name__ == "__main__":
    main()
