#!/usr/bin/env python3
"""Puts what cpu_peers.py measured into the data of results/*.md.

    peer_rows.py PAGE TABLE FILE... [--threads 2]

FILE is a JSON file of cpu_peers.py. The rows of the table TABLE in results/data/PAGE.json become the
cases with this number of threads: moeserve's and the other engines' median rates, the ratio to the
fastest engine with its range, the share of the bound in percent, the limit and, where there is one, the
required ratio. Other entries of the table stay, such as what the machine was. With a table that is new
comes the table TABLE_ratios, for the page: a line for each model and type, a column for each case. The file
is written if there is none. Afterwards, results_tables.py writes the page.
"""

import argparse
import json
import pathlib

from results_tables import RESULTS

COLUMNS = ["prompt", "one stream", "4 sequences", "16 sequences", "32 sequences"]


def situation(case):
    """The words of the pages for a case."""
    what, _, number = case.partition(" ")
    if what == "prompt":
        return f"prompt of {number}"
    return "one stream" if number == "1" else f"{number} sequences"


def rounded(value):
    """Three digits, which is more than the rates and ratios repeat."""
    return float(f"{value:.3g}") if value < 100 else round(value)


def spread(found):
    return {"median": rounded(found["median"]),
            "range": [rounded(found["min"]), rounded(found["max"])]}


def row(result):
    """The row of one case; None if moeserve has no rate."""
    rates = {name: rounded(found["median"]) if found else None
             for name, found in result["engines"].items()}
    ours = rates.pop("moeserve")
    if ours is None:
        return None
    model = result["shape"].upper().replace("-", " ")
    found = {"case": f"{model} {result['type']}, {situation(result['case'])}", "ours": ours,
             "peers": rates}
    best = result["best_peer"]
    if best:
        found |= {"ratio": spread(result["ratios"]["better"]), "fastest": best}
    if result["share_of_bound"]:
        found["share"] = round(100 * result["share_of_bound"]["median"])
    if result["limit"]:
        found["limit"] = spread(result["limit"])
    if "better" in result["marks"]:
        found["target"] = result["marks"]["better"]
    return found


def rows(runs, threads):
    """The rows of all runs with this number of threads, which must be of different models or types."""
    found = {}
    for run in runs:
        for result in run["results"]:
            made = row(result) if result["threads"] == threads else None
            if made is None:
                continue
            if made["case"] in found:
                raise SystemExit(f"{made['case']}: expected in one file, found in two; join them with "
                                 "cpu_peers.py --rounds 0 --earlier FILE --earlier FILE")
            found[made["case"]] = made
    return list(found.values())


def put(tables, name, found):
    """Replaces the rows of a table; adds it, and the table for the page, if there is none."""
    if name not in tables:
        columns = [["case", "case"], ["moeserve", "ours"], ["fastest other", "best"],
                   ["ratio", "ratio", 2], ["share, %", "share"], ["limit", "limit", 2]]
        tables[f"{name}_ratios"] = {
            "first": "ratio, share in %",
            "matrix": [[c, name, "prompt of 512" if c == "prompt" else c] for c in COLUMNS],
            "cells": [["ratio", 2], ["share", 0]]}
        tables[name] = {"columns": columns}
    tables[name]["rows"] = found


def lines(value, depth=0):
    """The JSON text of a value, in which each row of a table is a line."""
    short = json.dumps(value, ensure_ascii=False)
    rows_of_table = isinstance(value, list) and value and isinstance(value[0], dict)
    if not value or not rows_of_table and (not isinstance(value, dict) or depth > 3):
        return short
    pad = " " * (depth + 1)
    if rows_of_table:
        parts = [pad + json.dumps(v, ensure_ascii=False) for v in value]
    else:
        parts = [f"{pad}{json.dumps(k, ensure_ascii=False)}: {lines(v, depth + 1)}"
                 for k, v in value.items()]
    begin, end = "[]" if rows_of_table else "{}"
    return begin + "\n" + ",\n".join(parts) + "\n" + " " * depth + end


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("page")
    parser.add_argument("table")
    parser.add_argument("files", type=pathlib.Path, nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_args()
    path = RESULTS / "data" / f"{a.page}.json"
    data = json.loads(path.read_text()) if path.exists() else {"tables": {}}
    runs = [run for file in a.files for run in json.loads(file.read_text())]
    put(data["tables"], a.table, rows(runs, a.threads))
    path.write_text(lines(data) + "\n")


if __name__ == "__main__":
    main()
