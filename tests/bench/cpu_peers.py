#!/usr/bin/env python3
"""Compares speed on the CPU with other engines, on the same weights.

    cpu_peers.py MOESERVE --models MODELS [--llama BIN] [--ik BIN] [--vllm PYTHON]
                 [--zentorch PYTHON] [--openvino PYTHON] [--transformers PYTHON]
                 [--run medium:int8-channel ...] [--threads 1,2] [--rounds 5] [--json FILE]
                 [--earlier FILE ...]

README.md in this folder says how to install the engines and how to write the files in MODELS. A run
is SHAPE:TYPE. moeserve generates random weights for SHAPE in memory (--dtype TYPE); the others read
the same weights from MODELS, in the type that is closest to TYPE:

    TYPE                  llama.cpp, ik_llama.cpp (GGUF)   the others (folder)
    bf16                  SHAPE-bf16.gguf                  SHAPE-hf-bf16, SHAPE-openvino-bf16
    int8, int8-channel    SHAPE-q8_0.gguf                  SHAPE-hf-int8, SHAPE-openvino-int8
    int4, int4-k          SHAPE-q4_0.gguf, -q4_k.gguf      SHAPE-hf-int4, SHAPE-openvino-int4

Each folder BIN holds llama-bench and llama-batched-bench. PYTHON is a Python that has the engine's
packages. The scripts in peers/ run with it.

Cases: a prompt of 512 tokens; decoding of 1, 4, 16 and 32 sequences, 32 tokens each after a prompt
of 16. For one stream, llama-bench generates 64 tokens from an empty cache instead, so that the mean
context length is equal. Every round runs all engines one after the other, in reverse order in every
second round, and reads an engine's file into the page cache before the engine starts. moeserve runs
before and after each of them. A ratio divides the mean of its two rates around an engine by the
engine's rate; the table has its median and range over the rounds. All engines must process random
tokens: a llama-batched-bench that feeds one token to every sequence routes all sequences alike, and
has to be patched first.

moeserve measures the read bandwidth and the rate of the products of TYPE when it starts and when it
ends, so also directly before and after each engine. The range of these probes over the rounds is
beside each rate. A ratio is steady in a round if the probes directly around the engine and those of
both runs of moeserve are within 10 % of each other. The share of the bound is the median over
moeserve's runs during whose measurement of the case the machine was steady.

The limit is the ratio that moeserve would have if it ran at its bound in the state of the machine
in which the fastest engine ran: the tokens per second at which the bytes and operations of
moeserve's case take no longer than the probes directly around the engine allow, divided by the
engine's rate. It is the median over the rounds in which these two probes are within 10 % of each
other; over all rounds if there is none.

An engine that fails is listed with the reason. If its first run has no result, it does not run
again. The JSON file also has the end of what it printed, the versions of the engines' packages, and
every single rate and probe.

The rounds in the JSON files of earlier calls (--earlier) are counted with the new ones, if they have
the same SHAPE:TYPE, threads and engines. With --rounds 0, only these are counted. A round in the
file is the list of its runs in order of time.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys

from cpu_common import read_once, spread, summary, table
from peers import engines
from peers.engines import Outcome, Work

STEADY = 0.10
OURS = "moeserve"


# The required ratios of our rate to the fastest peer's: (prompt, one stream, 4, 16, 32 sequences).
# Hybrids have none.
MARKS = {"bf16": (1.12, 1.0, 1.0, 1.35, 1.35), "int8": (1.2, 1.3, 1.25, 1.25, 1.25),
         "int8-channel": (1.2, 1.3, 1.25, 1.25, 1.25), "int4": (1.5, 1.05, 1.4, 1.4, 1.4),
         "int4-k": (1.5, 1.05, 1.4, 1.4, 1.4)}


def marks(shape, kind, threads, case):
    """Returns the required ratios of our rate for a case. The key is what our rate is divided by:
    the fastest peer ("better"), or the bandwidth bound ("bound")."""
    if shape.endswith("-hybrid"):
        return {}
    if case == "decode 1" and kind == "bf16" and threads == 1:
        return {"bound": 0.95}
    if threads != 2:
        return {}
    columns = [f"prompt {Work().prompt}", "decode 1", "decode 4", "decode 16", "decode 32"]
    return {"better": MARKS[kind][columns.index(case)]} if case in columns else {}


def run_rounds(names, rounds, measure, tell=lambda text: None, keep=lambda history: None):
    """Runs all engines `names` once per round, and OURS before and after each. `measure(name)`
    returns an Outcome. Returns a list of rounds, each a list of runs {"engine", "rates", "probes",
    ...}, and passes it to `keep` after every round. An engine whose first run had no result is not
    run again; its failure, at the end of a round, is repeated."""
    history, dead = [], {}

    def run(name):
        outcome = measure(name)
        if outcome.error:
            tell(f"{name}: {outcome.error}")
        return {"engine": name, **dataclasses.asdict(outcome)}

    for number in range(rounds):
        runs = [run(OURS)]
        for name in names if number % 2 == 0 else names[::-1]:
            if name in dead:
                continue
            found = run(name)
            if not found["rates"] and not history:
                dead[name] = found
            else:
                runs += [found, run(OURS)]
        history.append([*runs, *dead.values()])
        tell(f"round {number + 1} of {rounds}")
        keep(history)
    return history


def runs_of(history, name):
    return [run for runs in history for run in runs if run["engine"] == name]


def beside(runs, name):
    """Returns an engine's run of a round and our runs before and after it."""
    at = next(i for i, run in enumerate(runs) if run["engine"] == name)
    return runs[at], runs[at - 1:at] + runs[at + 1:at + 2]


def steady(probes):
    """Whether these probes agree within STEADY."""
    for key in ("read_bandwidth", "arithmetic"):
        values = [p[key] for p in probes]
        if not values or max(values) > min(values) * (1 + STEADY):
            return False
    return True


def ratios(history, name, case):
    """Returns our mean rate around an engine's run divided by that of the engine, of each round that
    has both, and in how many of these rounds the machine was steady; None if there is no such
    round."""
    values, calm = [], 0
    for runs in history:
        theirs, ours = beside(runs, name)
        if case not in theirs["rates"] or not all(case in run["rates"] for run in ours):
            continue
        values.append(statistics.mean(run["rates"][case] for run in ours) / theirs["rates"][case])
        calm += steady([p for run in ours for p in run["probes"]])
    return {**summary(values), "steady": calm} if values else None


def limit(history, name, case):
    """Returns our bound at the probes directly around an engine's run, divided by the engine's rate,
    over the rounds in which these probes agree; over all rounds if there is none."""
    tokens = int(case.split()[1])
    found = []
    for runs in history:
        theirs, ours = beside(runs, name)
        costs = [run["details"]["cost"][case] for run in ours
                 if case in run["details"].get("cost", {})]
        if case not in theirs["rates"] or len(costs) < 2:
            continue
        probes = around(ours)
        seconds = max(
            mean_of(costs, "bytes") / mean_of(probes, "read_bandwidth"),
            mean_of(costs, "operations") / mean_of(probes, "arithmetic"))
        found.append((tokens / seconds / theirs["rates"][case], steady(probes)))
    values = [value for value, calm in found if calm] or [value for value, _ in found]
    return summary(values) if values else None


def mean_of(entries, key):
    return statistics.mean(entry[key] for entry in entries)


def around(ours):
    """Returns the probes directly before and after an engine's run, which our runs beside it made."""
    return ours[0]["probes"][-1:] + ours[1]["probes"][:1]


def state(history, name):
    """Returns the range of the probes around an engine, or of our own; None if it has none."""
    if name == OURS:
        probes = [p for run in runs_of(history, name) for p in run["probes"]]
    else:
        pairs = [beside(runs, name) for runs in history]
        probes = [p for run, ours in pairs if run["rates"] for p in around(ours)]
    if not probes:
        return None
    return {key: summary([p[key] for p in probes]) for key in ("read_bandwidth", "arithmetic")}


def share_of_bound(history, case):
    """Returns the shares of the bound that our runs reached while the machine was steady; those of
    all runs if it never was."""
    runs = [run["details"] for run in runs_of(history, OURS) if case in run["details"]["share"]]
    calm = [details for details in runs if details["steady"].get(case)]
    shares = [details["share"][case] for details in calm or runs]
    return {**summary(shares), "steady": len(calm), "measured": len(runs)} if shares else None


def evaluate(history, shape, kind, threads, case):
    """Returns the result of one case from all rounds."""
    names = list(dict.fromkeys(run["engine"] for run in history[0]))
    rates = {n: [run["rates"][case] for run in runs_of(history, n) if case in run["rates"]]
             for n in names}
    shares = share_of_bound(history, case)
    found = {n: ratios(history, n, case) for n in names if n != OURS}
    measured = {n: ratio for n, ratio in found.items() if ratio}
    best = max(measured, key=lambda n: statistics.median(rates[n]), default=None)
    against = {**measured, **({"better": measured[best]} if best else {})}
    wanted = marks(shape, kind, threads, case)
    reached = {}
    for name, mark in wanted.items():
        if name == "bound" and shares:
            reached[name] = shares["median"] >= mark
        elif name in against:
            reached[name] = against[name]["median"] >= mark
    return {
        "shape": shape, "type": kind, "threads": threads, "case": case,
        "engines": {n: summary(v) if v else None for n, v in rates.items()},
        "failures": {n: failure(history, n, case) for n in names if failure(history, n, case)},
        "machine": {n: state(history, n) for n in names}, "ratios": against, "best_peer": best,
        "share_of_bound": shares, "limit": limit(history, best, case) if best else None,
        "marks": wanted, "reached": reached}


def failure(history, name, case):
    """Returns why an engine lacks runs of a case; empty if it lacks none."""
    reasons = [run["error"] for run in runs_of(history, name) if case not in run["rates"]]
    return {"rounds": len(reasons), "reason": reasons[0]} if reasons else {}


def rounds_of(files, shape, kind, threads):
    """Returns the rounds of one SHAPE:TYPE in JSON files that this script wrote."""
    history = []
    for file in files:
        for run in json.loads(file.read_text()):
            first = run["results"][0]
            if (first["shape"], first["type"], first["threads"]) == (shape, kind, threads):
                history += run["rounds"]
    for runs in history:
        if not isinstance(runs, list):
            sys.exit(f"--earlier: {shape}:{kind}: expected rounds that are lists of runs, found "
                     f"{type(runs).__name__}; an older version of this script wrote the file")
        if engines_of(runs) != engines_of(history[0]):
            sys.exit(f"--earlier: {shape}:{kind}: expected the engines "
                     f"{', '.join(engines_of(history[0]))} in every round, found "
                     f"{', '.join(engines_of(runs))}")
    return history


def engines_of(runs):
    """Returns the names of the engines of a round, sorted."""
    return sorted({run["engine"] for run in runs})


def compare(a, shape, kind, threads, work, keep=lambda run: None):
    """Measures one SHAPE:TYPE with all engines. Returns {"results": one per case, "rounds": all
    runs, those of earlier calls first}, and passes the same of the rounds so far to `keep` after
    every round."""
    earlier = rounds_of(a.earlier, shape, kind, threads)
    peers = {e.name: e for e in engines.peers(a, shape, kind, threads, work)}

    def measure(name):
        if name == OURS:
            return engines.run_moeserve(a.program, shape, kind, work, threads, a.timeout)
        if not peers[name].model.exists():
            return Outcome(error=f"there is no {peers[name].model.name} in {a.models}")
        read_once(peers[name].model)
        return peers[name].measure()

    def run_of(history):
        history = [*earlier, *history]
        return {"results": [evaluate(history, shape, kind, threads, c) for c in work.cases()],
                "rounds": history}

    if earlier and a.rounds and sorted([OURS, *peers]) != engines_of(earlier[0]):
        sys.exit(f"--earlier: {shape}:{kind}: expected the engines "
                 f"{', '.join(sorted([OURS, *peers]))}, found {', '.join(engines_of(earlier[0]))}")
    if not earlier and not a.rounds:
        sys.exit(f"{shape}:{kind}: there are no rounds")
    return run_of(run_rounds(
        list(peers), a.rounds, measure,
        lambda text: print(f"{shape} {kind}, {threads} threads: {text}", file=sys.stderr),
        lambda history: keep(run_of(history))))


def rate_cell(result, name, known):
    """Returns a cell of the first table. A reason of a failure that is in the set `known` is left
    out, else added to the set."""
    failed = result["failures"].get(name)
    rates, machine = result["engines"][name], result["machine"][name]
    reason = ""
    if failed:
        told = (name, failed["reason"]) in known
        reason = "failed" if told else f"failed: {shorten(failed['reason'])}"
        known.add((name, failed["reason"]))
    if not rates:
        return reason
    bandwidth, arithmetic = machine["read_bandwidth"], machine["arithmetic"]
    cell = (f"{spread(rates)} [{bandwidth['min'] / 1e9:.0f}-{bandwidth['max'] / 1e9:.0f} GB/s, "
            f"{arithmetic['min'] / 1e12:.2f}-{arithmetic['max'] / 1e12:.2f} Top/s]")
    return f"{cell} {failed['rounds']} rounds {reason}" if failed else cell


def shorten(text, limit=100):
    text = " ".join(text.replace("|", "/").split())
    return text if len(text) <= limit else text[:limit - 3] + "..."


def ratio_cell(ratio):
    if not ratio:
        return "-"
    return f"{spread(ratio, 2)}, steady {ratio['steady']}/{len(ratio['runs'])}"


def share_cell(shares):
    if not shares:
        return "-"
    return f"{shares['median']:.0%}, steady {shares['steady']}/{shares['measured']}"


def mark_cell(result):
    return ", ".join(
        f"{name} {mark:g}: {'yes' if result['reached'][name] else 'no'}"
        if name in result["reached"] else f"{name} {mark:g}: not measured"
        for name, mark in result["marks"].items())


def tables(run):
    """Returns the tables of one SHAPE:TYPE, and the versions of the engines, as Markdown."""
    results = run["results"]
    first = results[0]
    peers = [n for n in first["engines"] if n != OURS]
    known = set()
    rates = table(["case", OURS, *peers],
                  [[r["case"], *(rate_cell(r, n, known) for n in [OURS, *peers])] for r in results])
    rows = [[r["case"], *(ratio_cell(r["ratios"].get(n)) for n in peers),
             f"{ratio_cell(r['ratios']['better'])} ({r['best_peer']})" if r["best_peer"] else "-",
             share_cell(r["share_of_bound"]), spread(r["limit"], 2) if r["limit"] else "-",
             mark_cell(r)] for r in results]
    text = [
        f"## {first['shape']} {first['type']}, {first['threads']} threads",
        f"Tokens per second: median (range) over {len(run['rounds'])} rounds, and the range of the "
        "probes around the runs.", rates,
        "moeserve's mean rate before and after the engine, divided by the engine's: median (range), "
        "and the number of rounds in which the machine was steady. Share of the bound: median of "
        "the runs in which the machine was steady, and their number. Limit: the ratio to the "
        "fastest engine that moeserve would have at its bound, while the machine was steady.",
        table(["case", *peers, "the fastest", "share of bound", "limit", "marks"], rows)]
    return "\n\n".join([*text, *setups(run["rounds"][0])])


def setups(first_round):
    """Returns a line for each engine that reported its packages, from one round."""
    lines = []
    for run in first_round:
        name, details = run["engine"], run["details"]
        if "versions" not in details:
            continue
        parts = [f"{package} {version}" for package, version in details["versions"].items()]
        parts += [f"with {library}" for library in details["preloaded"]]
        parts.append(f"loaded in {details['load_seconds']:.0f} s")
        distinct = details.get("distinct_tokens", {})
        if distinct:
            parts.append(f"at least {min(distinct.values()):.0%} of a step's tokens distinct")
        lines.append(f"{name}: {', '.join(parts)}.")
    return lines


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--models", type=pathlib.Path, required=True)
    parser.add_argument("--llama", type=pathlib.Path, help="folder of llama.cpp's programs")
    parser.add_argument("--ik", type=pathlib.Path, help="folder of ik_llama.cpp's programs")
    parser.add_argument("--vllm", help="Python with vLLM's CPU backend, without zentorch")
    parser.add_argument("--zentorch", help="Python with vLLM's CPU backend and zentorch")
    parser.add_argument("--openvino", help="Python with OpenVINO GenAI")
    parser.add_argument("--transformers", help="Python with transformers")
    parser.add_argument("--run", action="append",
                        help="SHAPE:TYPE (default small:bf16, medium:bf16)")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=Work.prompt, help="0: no prompt case")
    parser.add_argument("--batch", default=",".join(map(str, Work.batches)),
                        help="numbers of sequences that decode together")
    parser.add_argument("--timeout", type=int, default=1800,
                        help="seconds for one run of an engine")
    parser.add_argument("--json")
    parser.add_argument("--earlier", action="append", type=pathlib.Path, default=[],
                        help="JSON file of an earlier call, whose rounds are counted as well")
    a = parser.parse_args(arguments)
    for spec in a.run or []:
        if spec.partition(":")[2] not in engines.GGUF:
            parser.error(f"--run: expected SHAPE:TYPE with a type of {', '.join(engines.GGUF)}, "
                         f"found {spec}")
    return a


def write_json(path, runs):
    """Replaces the file, which is complete at any time. Does nothing without a path."""
    if path:
        pathlib.Path(path + ".part").write_text(json.dumps(runs, indent=2) + "\n")
        os.replace(path + ".part", path)


def main(arguments=None):
    a = parse(arguments)
    work = Work(prompt=a.prompt, batches=tuple(int(b) for b in a.batch.split(",")))
    runs = []
    for spec in a.run or ["small:bf16", "medium:bf16"]:
        shape, _, kind = spec.partition(":")
        for threads in map(int, a.threads.split(",")):
            # Writes the file after every round, because a measurement may be interrupted.
            runs.append(compare(a, shape, kind, threads, work,
                                lambda run: write_json(a.json, [*runs, run])))
            write_json(a.json, runs)
            print(tables(runs[-1]) + "\n", flush=True)


if __name__ == "__main__":
    main()
