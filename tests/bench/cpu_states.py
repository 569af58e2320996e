#!/usr/bin/env python3
"""Compares decoding in moeserve and the other engines while the machine was in one state.

    cpu_states.py FILE... [--slow 42] [--fast 52]

A FILE is the JSON of cpu_peers.py. Ratios within a round mix the states of a machine whose memory
bandwidth changes within seconds. This script takes the runs of each state apart: those with less
than --slow GB/s, and those with more than --fast GB/s. A run between them does not count.

For moeserve's case, the bandwidth is the one that its bound was computed with (of decoding, memory
sets the bound); only cases during which the machine was steady count. For another engine, it is
that of the probes directly before and after its run; both must be in the state, but the state may
still have changed between them. The columns are medians over these runs, and in brackets how many
they are:

    moeserve, share    tokens per second, and the share of the bound
    the fastest        the engine with the highest median in this state
    ratio              moeserve's median divided by the engine's
    limit              what the ratio would be with moeserve at its bound
"""

import argparse
import collections
import json
import pathlib
import statistics

from cpu_common import table
from cpu_peers import OURS, around, beside


def state_of(bandwidth, slow, fast):
    """Returns the name of the state with this bandwidth in GB/s; None between the two."""
    return "slow" if bandwidth < slow else "fast" if bandwidth > fast else None


def bandwidth_of(run, case):
    """Returns the GB/s that the bound of our case was computed with, if memory sets that bound."""
    details = run["details"]
    bound = run["rates"][case] / details["share"][case]
    return bound / int(case.split()[1]) * details["cost"][case]["bytes"] / 1e9


def ours_by_state(rounds, case, slow, fast):
    """Returns {state: [(rate, share of the bound)]} of our runs that were steady."""
    found = collections.defaultdict(list)
    for run in (run for runs in rounds for run in runs if run["engine"] == OURS):
        details = run["details"]
        if case in details.get("cost", {}) and details["steady"].get(case):
            state = state_of(bandwidth_of(run, case), slow, fast)
            found[state].append((run["rates"][case], details["share"][case]))
    return found


def theirs_by_state(rounds, case, slow, fast):
    """Returns {state: {engine: [rate]}} of the other engines' runs."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for runs in rounds:
        for name in (run["engine"] for run in runs if case in run["rates"]):
            if name == OURS:
                continue
            theirs, ours = beside(runs, name)
            states = {state_of(p["read_bandwidth"] / 1e9, slow, fast) for p in around(ours)}
            if len(states) == 1:
                found[states.pop()][name].append(theirs["rates"][case])
    return found


def compare(rounds, case, slow, fast):
    """Returns a row of the table for each state that both sides have runs of."""
    ours = ours_by_state(rounds, case, slow, fast)
    theirs = theirs_by_state(rounds, case, slow, fast)
    rows = []
    for state in ("slow", "fast"):
        if not ours[state] or not theirs[state]:
            continue
        rate = statistics.median(rate for rate, _ in ours[state])
        share = statistics.median(share for _, share in ours[state])
        name, rates = max(theirs[state].items(), key=lambda item: statistics.median(item[1]))
        ratio = rate / statistics.median(rates)
        rows.append([case, state, f"{rate:.0f} ({len(ours[state])})", f"{share:.0%}",
                     f"{name}: {statistics.median(rates):.0f} ({len(rates)})", f"{ratio:.2f}",
                     f"{ratio / share:.2f}"])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="FILE", nargs="+", type=pathlib.Path)
    parser.add_argument("--slow", type=float, default=42, metavar="GB/s")
    parser.add_argument("--fast", type=float, default=52, metavar="GB/s")
    args = parser.parse_args()

    found = collections.defaultdict(list)
    for file in args.files:
        for run in json.loads(file.read_text()):
            first = run["results"][0]
            found[first["shape"], first["type"], first["threads"]] += run["rounds"]
    for (shape, kind, threads), rounds in found.items():
        cases = dict.fromkeys(case for runs in rounds for run in runs for case in run["rates"]
                              if case.startswith("decode"))
        rows = [row for case in cases for row in compare(rounds, case, args.slow, args.fast)]
        print(f"## {shape} {kind}, {threads} threads, {len(rounds)} rounds\n")
        print(table(["case", "state", OURS, "share", "the fastest", "ratio", "limit"], rows) + "\n")


if __name__ == "__main__":
    main()
