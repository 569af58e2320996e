#!/usr/bin/env python3
"""Writes the tables of results/*.md from the figures in results/data/*.json.

    results_tables.py [--check]

results/data/PAGE.json has the tables of results/PAGE.md, by name. A page says where a table goes:

    <!-- table NAME -->
    ... what this script writes ...
    <!-- end of table -->

A table has `columns`, a list of [header, key] or [header, key, how], and `rows`, objects with these
keys. More keys than the page shows are welcome: single rounds, other engines, what a figure means. A
figure is a number, a text, {"median": m, "range": [least, greatest]}, or {"rounds": [...]}, whose mean
counts. `how` is the number of digits after the point, or {"per": key, "digits": n}: the figure divided by
that of another key. {"share": s, "target": t, "ratio": r, "ratio_target": q}, of which only the share is
needed, is shown as "s (t), r"; if `how` is "share", as "s (t)", and if it is "ratio", as "r". These keys
are computed:

    reached       whether `measure` (a key of the table, "ratio" if none is named) reaches `target`; if
                  the row has `"at_most": true`, whether it is at most the target; with `end_below`, the
                  end of the range must be below that, too
    best          the engine of `peers` that the row's `fastest` names, or the fastest, with its rate

and of a row with `of`, names of tables:

    reached_of    how many of their targets are reached
    faster_of     how many of their rows have a ratio above 1
    always_of     how many of their rows have no round with a ratio of 1 or less

A table with `matrix` has rows of other tables as cells. A row's `case` is "what is compared, situation";
what is compared becomes a row, and `matrix` is a list of columns [header, table, situation, ...]. `first`
is the header of the first column. `cells` is a list of [key] or [key, digits]; with `"ranges": true`,
cells have the ranges and rounds of their figures. The first figure of a cell that misses its target is
bold.

`--check` exits with 1 if a page's tables are not what the data say.
"""

import argparse
import json
import pathlib
import re
import statistics
import sys

from cpu_common import table

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
MARKED = re.compile(r"<!-- table (?P<name>[\w-]+) -->\n(?P<table>.*?)<!-- end of table -->", re.DOTALL)


def value(figure):
    """Returns the number that counts of a figure."""
    if isinstance(figure, dict):
        return figure["median"] if "median" in figure else statistics.mean(figure["rounds"])
    return figure


def text(figure, digits=None):
    """Returns a figure as the page shows it."""
    if figure is None:
        return ""
    if isinstance(figure, dict) and "median" in figure:
        middle, low, high = (text(v, digits) for v in (figure["median"], *figure["range"]))
        return f"{middle} ({low} to {high})"
    if isinstance(figure, dict) and "share" in figure:
        target = f" ({figure['target']})" if "target" in figure else ""
        return f"{figure['share']}{target}" + (f", {figure['ratio']:.2f}" if "ratio" in figure else "")
    if isinstance(figure, dict):
        return ", ".join(text(v, digits) for v in figure["rounds"])
    if digits is not None and not isinstance(figure, str):
        return f"{figure:.{digits}f}"
    return str(figure)


def reached(row, measure):
    """Returns whether a row reaches its target; None if it has none."""
    if row.get("target") is None:
        return None
    difference = value(row[measure]) - row["target"]
    if "end_below" in row and row[measure]["range"][1] >= row["end_below"]:
        return False
    return difference <= 0 if row.get("at_most") else difference >= 0


def best(row):
    peers = {name: rate for name, rate in row["peers"].items() if rate is not None}
    name = row.get("fastest") or max(peers, key=lambda peer: value(peers[peer]))
    first = name.split(";")[0].split(",")[0]
    return f"{value(peers[first])} ({name})"


def results(data):
    """Returns for each target of a table whether it is reached."""
    for row in data["rows"]:
        yield reached(row, data.get("measure", "ratio"))
        for figure in row.values():
            if isinstance(figure, dict) and "target" in figure:
                yield figure["share"] >= figure["target"]
            if isinstance(figure, dict) and "ratio_target" in figure:
                yield figure["ratio"] >= figure["ratio_target"]


def reached_of(names, tables):
    found = [result for name in names for result in results(tables[name]) if result is not None]
    return f"{found.count(True)} of {len(found)}"


def least(figure):
    """Returns the least number of a figure."""
    if isinstance(figure, dict):
        return figure["range"][0] if "median" in figure else min(figure["rounds"])
    return figure


def ratios_of(names, tables, counted):
    """Returns for how many rows of the tables `counted` of the ratio is above 1."""
    rows = [row for name in names for row in tables[name]["rows"]]
    return f"{sum(counted(row['ratio']) > 1 for row in rows)} of {len(rows)}"


def part(figure, how):
    """Returns the share of a figure with its target, or its ratio."""
    if not figure or how not in figure:
        return ""
    if how == "ratio":
        return text(figure["ratio"], 2)
    return text({key: figure[key] for key in ("share", "target") if key in figure})


def cell(row, column, data, tables):
    key, *how = column[1:]
    if key == "reached":
        return {True: "yes", False: "no", None: ""}[reached(row, data.get("measure", "ratio"))]
    if key == "best":
        return best(row) if "peers" in row else ""
    if key == "reached_of":
        return reached_of(row["of"], tables)
    if key in ("faster_of", "always_of"):
        return ratios_of(row["of"], tables, value if key == "faster_of" else least)
    if how and isinstance(how[0], str):
        return part(row.get(key), how[0])
    if how and isinstance(how[0], dict):
        if key not in row:
            return ""
        return text(value(row[key]) / value(row[how[0]["per"]]), how[0]["digits"])
    return text(row.get(key), *how)


def matrix_cell(row, data, measure):
    parts = [text(row[key] if data.get("ranges") else value(row[key]), *digits)
             for key, *digits in data["cells"] if key in row]
    if reached(row, measure) is False:
        parts[0] = f"**{parts[0]}**"
    return ", ".join(parts)


def matrix(data, tables):
    """Returns the Markdown of a table whose cells are rows of other tables."""
    found = {}
    for at, (_, name, *situations) in enumerate(data["matrix"]):
        for row in tables[name]["rows"]:
            what, situation = row["case"].rsplit(", ", 1)
            if situation in situations:
                cells = found.setdefault(what, [""] * len(data["matrix"]))
                cells[at] = matrix_cell(row, data, tables[name].get("measure", "ratio"))
    return table([data["first"], *(column[0] for column in data["matrix"])],
                 [[what, *cells] for what, cells in found.items()])


def rendered(name, tables):
    """Returns the Markdown of a table."""
    data = tables[name]
    if "matrix" in data:
        return matrix(data, tables)
    return table([column[0] for column in data["columns"]],
                 [[cell(row, column, data, tables) for column in data["columns"]]
                  for row in data["rows"]])


def filled(page, tables):
    """Returns a page's text with its tables written anew."""
    def fill(match):
        return (f"<!-- table {match['name']} -->\n{rendered(match['name'], tables)}\n"
                "<!-- end of table -->")
    return MARKED.sub(fill, page)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    old = []
    for data in sorted(RESULTS.glob("data/*.json")):
        page = RESULTS / f"{data.stem}.md"
        before = page.read_text()
        after = filled(before, json.loads(data.read_text())["tables"])
        if after != before:
            old.append(page.name)
            if not options.check:
                page.write_text(after)
    if options.check and old:
        sys.exit(f"run tests/bench/results_tables.py: {', '.join(old)} differ from their data")


if __name__ == "__main__":
    main()
