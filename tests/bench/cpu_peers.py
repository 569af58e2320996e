#!/usr/bin/env python3
"""Compares speed on the CPU with llama.cpp and ik_llama.cpp, on the same weights.

    write_synthetic --synthetic medium --gguf MODELS/medium-bf16.gguf
    cpu_peers.py MOESERVE --models MODELS --llama BIN --ik BIN [--run medium:bf16 ...]
                 [--threads 1,2] [--rounds 5] [--json FILE]

A run is SHAPE:TYPE. moeserve generates random weights for SHAPE in memory (--dtype TYPE). The peers
(llama.cpp and ik_llama.cpp) read MODELS/SHAPE-FILE.gguf, where FILE is bf16, q8_0 for int8 and q4_0
for int4. Each folder BIN holds llama-bench and llama-batched-bench.

Cases: a prompt of 512 tokens; decoding of one stream; decoding of 4, 16 and 32 sequences, 32 tokens
each after a prompt of 16. For one stream, moeserve generates 32 tokens after a prompt of 16 and the
peers generate 64 tokens from an empty cache, so that the mean context length is equal. Every round
reads the peers' file into the page cache and runs all engines one after the other. The table has
the median and range of the rates over the rounds, and the median of the ratios over the rounds.
All engines must process random tokens: a llama-batched-bench that feeds one token to every sequence
routes all sequences alike, and has to be patched first.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from cpu_common import bench, cases, read_once, spread, summary, table

FILES = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
BATCHES = [4, 16, 32]
PROMPT, STREAM, BATCHED_PROMPT, BATCHED_TOKENS = 512, 64, 16, 32
CASES = [f"prompt {PROMPT}", "decode 1"] + [f"decode {b}" for b in BATCHES]


def marks(shape, kind, threads, case):
    """Returns the required ratios of our rate for a case. The key is what our rate is divided by:
    an engine's name, the fastest peer ("better"), or the bandwidth bound ("bound")."""
    if case == "decode 1" and kind == "bf16" and threads == 1:
        return {"bound": 0.95}
    if threads != 2:
        return {}
    if kind == "bf16":
        if case.startswith("prompt"):
            wanted = {"medium": (3.0, 1.05), "small": (2.5, 1.2)}.get(shape)
            return {"llama.cpp": wanted[0], "ik -rtr": wanted[1]} if wanted else {}
        better = {"decode 1": 1.1}
        if shape == "medium":
            better.update({"decode 4": 1.5, "decode 16": 1.9, "decode 32": 2.2})
    else:
        better = {"int8": {"prompt 512": 1.3, "decode 16": 1.5, "decode 1": 1.15},
                  "int4": {"prompt 512": 1.3, "decode 16": 2.0, "decode 1": 1.0}}[kind]
    return {"better": better[case]} if case in better else {}


def run(command, timeout=1800):
    # Some engines write a log file into the working folder.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=timeout, cwd=folder)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: status {done.returncode}\n"
                           f"{(done.stdout + done.stderr)[-2000:]}")
    return done


def peer(folder, model, threads, options):
    """Runs the two benchmarks of one peer; returns {case: tokens per second}."""
    single = run([folder / "llama-bench", "-m", model, "-p", PROMPT, "-n", STREAM, "-t", threads,
                  "-r", 1, "-o", "json", *options]).stdout
    rates = {}
    # Some builds print other lines before the list.
    for test in json.loads(single[single.index("[\n"):]):
        rates[f"prompt {PROMPT}" if test["n_prompt"] else "decode 1"] = test["avg_ts"]
    # Some options take a value in llama-bench, but none in llama-batched-bench.
    flags = [o for o in options if o.startswith("-")]
    length = max(2048, max(BATCHES) * (BATCHED_PROMPT + BATCHED_TOKENS))
    done = run([folder / "llama-batched-bench", "-m", model, "-c", length, "-b", 2048,
                "-ub", 512, "-npp", BATCHED_PROMPT, "-ntg", BATCHED_TOKENS, "-npl",
                ",".join(map(str, BATCHES)), "-t", threads, "-tb", threads, *flags])
    # The columns are PP, TG, B, N_KV, T_PP, S_PP, T_TG, S_TG, T and S.
    for line in (done.stdout + done.stderr).splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if len(cells) == 10 and re.fullmatch(r"\d+", cells[2]):
            rates[f"decode {cells[2]}"] = float(cells[7])
    missing = set(CASES) - set(rates)
    if missing:
        raise RuntimeError(f"{folder}: no result for {sorted(missing)}")
    return rates


def ours(program, shape, kind, threads):
    common = ["--synthetic", shape, "--dtype", kind, "--threads", threads, "--rounds", 1]
    report = bench(program, [*common, "--prompt", PROMPT, "--batch",
                             ",".join(map(str, [1, *BATCHES])), "--context", BATCHED_PROMPT,
                             "--tokens", BATCHED_TOKENS])
    return cases(report), [report]


def compare(a, shape, kind, threads, engines):
    """Measures one SHAPE:TYPE with all engines; returns one result per case."""
    model = a.models.resolve() / f"{shape}-{FILES[kind]}.gguf"
    rates = {name: {case: [] for case in CASES} for name in ["moeserve", *engines]}
    shares = {case: [] for case in CASES}
    bandwidths = []
    for number in range(a.rounds):
        found, reports = ours(a.program, shape, kind, threads)
        bandwidths += [r["read_bandwidth"] for r in reports]
        for case in CASES:
            rates["moeserve"][case].append(found[case]["tokens_per_second"])
            shares[case].append(found[case].get("share", 0.0))
        for name, (folder, options) in engines.items():
            read_once(model)
            for case, rate in peer(folder, model, threads, options).items():
                rates[name][case].append(rate)
        print(f"{shape} {kind}, {threads} threads, round {number + 1} of {a.rounds}",
              file=sys.stderr)

    results = []
    for case in CASES:
        mine = rates["moeserve"][case]
        ratios = {name: summary([x / y for x, y in zip(mine, rates[name][case])])
                  for name in engines}
        if engines:
            best = max(engines, key=lambda name: statistics.median(rates[name][case]))
            ratios["better"] = ratios[best]
        wanted = marks(shape, kind, threads, case)
        reached = {}
        for against, mark in wanted.items():
            if against == "bound":
                reached[against] = statistics.median(shares[case]) >= mark
            elif against in ratios:
                reached[against] = ratios[against]["median"] >= mark
        results.append({
            "shape": shape, "type": kind, "threads": threads, "case": case,
            "engines": {name: summary(values[case]) for name, values in rates.items()},
            "ratios": ratios, "share_of_bound": summary(shares[case]), "marks": wanted,
            "reached": reached, "read_bandwidth": summary(bandwidths)})
    return results


def print_table(results, engines):
    rows = []
    for r in results:
        better = r["ratios"].get("better")
        wanted = ", ".join(
            f"{name} {mark:g}: {'yes' if r['reached'][name] else 'no'}" if name in r["reached"]
            else f"{name} {mark:g}: not measured" for name, mark in r["marks"].items())
        rows.append([f"{r['shape']} {r['type']}", r["threads"], r["case"],
                     spread(r["engines"]["moeserve"]),
                     *(spread(r["engines"][name]) for name in engines),
                     spread(better, 2) if better else "", f"{r['share_of_bound']['median']:.0%}",
                     wanted])
    print(table(["model", "threads", "case", "moeserve", *engines, "ratio to the better",
                 "share of bound", "marks"], rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--models", type=pathlib.Path, required=True)
    parser.add_argument("--llama", type=pathlib.Path)
    parser.add_argument("--ik", type=pathlib.Path)
    parser.add_argument("--run", action="append", help="SHAPE:TYPE (default small:bf16, medium:bf16)")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    a = parser.parse_args()

    engines = {}
    if a.llama:
        engines["llama.cpp"] = (a.llama.resolve(), [])
    if a.ik:
        engines["ik"] = (a.ik.resolve(), [])
        engines["ik -rtr"] = (a.ik.resolve(), ["-rtr", "1"])
    results = []
    for spec in a.run or ["small:bf16", "medium:bf16"]:
        shape, _, kind = spec.partition(":")
        if kind not in FILES:
            parser.error(f"--run: expected SHAPE:TYPE with a type of {', '.join(FILES)}, found {spec}")
        for threads in map(int, a.threads.split(",")):
            results += compare(a, shape, kind, threads, engines)
            if a.json:  # writes the file after every run, because a measurement may be interrupted
                partial = a.json + ".part"
                pathlib.Path(partial).write_text(json.dumps(results, indent=2) + "\n")
                os.replace(partial, a.json)
    print_table(results, engines)


if __name__ == "__main__":
    main()
