#!/usr/bin/env python3
"""Compares pairs of layer shapes that cost the same arithmetic.

    cpu_shapes.py MOESERVE [--threads N] [--rounds 5] [--only NAME] [--json FILE] [--tiny]

The two sides of a pair, left and right, run alternately, each run in its own process. The table has
the median and range of the runs, and the median of the ratios of neighbouring runs, which a slow
drift of the machine's speed does not change. The pairs:

hmoe    Left: experts of widths 9u, 11u, ... 23u, repeated. Right: the same number of experts, all
        of width 16u. Both sides have the same number of parameters and, since random weights route
        almost evenly, the same expected work.
top-p   Left: top-p with p just below 1, which always reaches its maximum of k experts. Right: top-k
        with the same k. Both sides select the same experts with the same weights.
mh-moe  Left: each token is split into h sub-tokens of width d/h, and each sub-token selects k of
        E*h experts. Right: each token of width d selects k of E experts. All experts have the inner
        width w = 4 * d of the X-MoE and MH-MoE papers, and both routers are cosine routers. On both
        sides, the experts take 3 * k * d * w multiply-adds per token, hold the same number of
        parameters, and receive the same mean number of rows. The left side also computes the split
        and merge layers (2 * d * d). h = 4 is from the first MH-MoE paper; h = 2 with width 768 is
        a parity size of the second. Attention and LM head are as small as possible, so that the
        routed layer dominates the time.
moa     Left: k routed attention experts with one query head each and one shared key-value head.
        Right: dense attention with heads of size 128, each with its own keys and values. The number
        of heads is chosen so that the q, k, v and o projections take as many multiply-adds per
        token, and read as many weights for one stream, as on the left. Width 512: 16 of 32 experts
        with heads of size 256 (MoA's 16K32E256D) against 17 heads. Width 1536: 23 of 32 experts
        with heads of size 128 against 12 heads. The feed-forward layer and the LM head are as small
        as possible.
"""

import argparse
import json
import statistics
import sys

from cpu_common import bench, cases, spread, summary, table

RATIO = [9, 11, 13, 15, 17, 19, 21, 23]
SMALL_HEAD = ["--vocab", 512]
SMALL_FF = ["--ff", "dense", "--widths", 16]
SMALL_ATTENTION = ["--heads", 1, "--head-dim", 16]


def unequal(unit):
    return ["--widths", ",".join(str(r * unit) for r in RATIO)]


def pairs(tiny):
    """Returns (name, case, required ratio of left to right, left arguments, right arguments, common
    arguments) for every case of every pair."""
    prompt = ["--prompt", 64 if tiny else 512, "--batch", 16, "--tokens", 2 if tiny else 32]
    shape = ["--layers", 1] if tiny else []
    out = []
    for name, unit in [("small", 40), ("medium", 48)][: 1 if tiny else 2]:
        common = ["--synthetic", name, *shape, *prompt]
        experts = ["--experts", 32 if name == "small" else 64]
        for case in (f"prompt {prompt[1]}", "decode 16"):
            out.append((f"hmoe {name}", case, 0.95, [*experts, *unequal(unit)],
                        [*experts, "--widths", 16 * unit], common))
            k = 2 if name == "small" else 8
            out.append((f"top-p {name}", case, 0.97, ["--top-p", 0.999999, "--top-k", k],
                        ["--top-k", k], common))
    for width, h, experts in [(768, 2, 32), (768, 4, 32), (1536, 4, 16)][: 1 if tiny else 3]:
        common = ["--synthetic", "small", "--hidden", width, "--layers", 1 if tiny else 2,
                  *SMALL_ATTENTION, *SMALL_HEAD, "--score", "cosine", "--top-k", 2, "--widths",
                  4 * width, *prompt]
        experts = 8 if tiny else experts
        for case in (f"prompt {prompt[1]}", "decode 16"):
            out.append((f"mh-moe {width}, h = {h}", case, 0.85,
                        ["--split-heads", h, "--experts", h * experts], ["--experts", experts],
                        common))
    routed = ["--attention", "routed", "--attention-experts", 32, "--kv-heads", 1]
    for width, k, head, heads in [(512, 16, 256, 17), (1536, 23, 128, 12)][: 1 if tiny else 2]:
        common = ["--synthetic", "small", "--hidden", width, "--layers", 1 if tiny else 4,
                  *SMALL_FF, *SMALL_HEAD, "--context", 256 if tiny else 4096, "--tokens",
                  2 if tiny else 16, "--batch", "1,8"]
        for case in ("decode 1", "decode 8"):
            out.append((f"moa {width}", case, 2.0,
                        [*routed, "--attention-top-k", k, "--head-dim", head],
                        ["--head-dim", 128, "--heads", heads, "--kv-heads", heads], common))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--only", help="run only the pairs whose names begin with this text")
    parser.add_argument("--json")
    parser.add_argument("--tiny", action="store_true", help="use small sizes, to test the script")
    a = parser.parse_args()

    # One run measures all cases of a pair.
    groups = {}
    for name, case, mark, left, right, common in pairs(a.tiny):
        if a.only and not name.startswith(a.only):
            continue
        key = json.dumps([name, left, right, common])
        groups.setdefault(key, []).append((case, mark))
    results = []
    for key, wanted in groups.items():
        name, left, right, common = json.loads(key)
        runs = {"left": [], "right": []}
        for _ in range(a.rounds):
            for side, arguments in (("left", left), ("right", right)):
                report = bench(a.program, [*common, *arguments, "--threads", a.threads, "--dtype",
                                           a.dtype, "--rounds", 1 if a.tiny else 3])
                runs[side].append(report)
        for case, mark in wanted:
            speeds = {side: [cases(r)[case]["tokens_per_second"] for r in reports]
                      for side, reports in runs.items()}
            ratio = summary([x / y for x, y in zip(speeds["left"], speeds["right"])])
            results.append({
                "name": name, "case": case, "mark": mark, "reached": ratio["median"] >= mark,
                "left": {"arguments": left, **summary(speeds["left"])},
                "right": {"arguments": right, **summary(speeds["right"])},
                "common": common, "ratio": ratio,
                "read_bandwidth": statistics.median(
                    r["read_bandwidth"] for side in runs.values() for r in side)})
            print(name, case, f"{ratio['median']:.3f}", file=sys.stderr)
        if a.json:
            with open(a.json, "w") as file:
                json.dump(results, file, indent=2)
    print(table(["pair", "case", "routed, tokens/s", "against, tokens/s", "ratio", "mark", ""],
                [[r["name"], r["case"], spread(r["left"]), spread(r["right"]),
                  spread(r["ratio"], 3), f"{r['mark']:.2f}", "yes" if r["reached"] else "no"]
                 for r in results]))


if __name__ == "__main__":
    main()
