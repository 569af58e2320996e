"""Tests that the tables of results/*.md are those of results/data/*.json, and how they are made."""

import json
import re

import pytest

import peer_rows
import results_tables
from results_tables import RESULTS

DATA = sorted(RESULTS.glob("data/*.json"))


def tables_of(data):
    return json.loads(data.read_text())["tables"]


@pytest.mark.parametrize("data", DATA, ids=lambda data: data.stem)
def test_a_page_has_the_tables_of_its_data(data):
    page = (RESULTS / f"{data.stem}.md").read_text()
    assert results_tables.filled(page, tables_of(data)) == page, "run tests/bench/results_tables.py"


@pytest.mark.parametrize("data", DATA, ids=lambda data: data.stem)
def test_a_page_has_no_other_tables(data):
    page = (RESULTS / f"{data.stem}.md").read_text()
    assert results_tables.MARKED.search(page)
    assert not re.search(r"^\|", results_tables.MARKED.sub("", page), re.MULTILINE)


def test_every_page_has_data():
    pages = {page.stem for page in RESULTS.glob("*.md")} - {"README"}
    assert pages == {data.stem for data in DATA}


def rendered(*rows, columns=(["ratio", "ratio", 2], ["reached", "reached"]), **table):
    tables = {"t": {"columns": columns, "rows": list(rows), **table},
              "sum": {"columns": [["reached", "reached_of"]], "rows": [{"of": ["t"]}]}}
    page = "<!-- table t -->\n<!-- end of table --><!-- table sum -->\nold\n<!-- end of table -->"
    lines = results_tables.filled(page, tables).splitlines()
    return [line for line in lines if line.startswith("| ") and "reached" not in line]


def test_targets_are_compared():
    assert rendered({"ratio": {"median": 1.2, "range": [0.9, 1.3]}, "target": 1.2},
                    {"ratio": {"rounds": [1.1, 1.2]}, "target": 1.16},
                    {"ratio": 3}) == [
        "| 1.20 (0.90 to 1.30) | yes |", "| 1.10, 1.20 | no |", "| 3.00 |  |", "| 1 of 2 |"]


def test_a_target_may_be_a_limit():
    cost = {"target": 1, "at_most": True, "end_below": 2}
    columns = (["cost", "cost"], ["reached", "reached"])
    assert rendered({"cost": {"median": 1, "range": [0, 1.9]}, **cost},
                    {"cost": {"median": 1, "range": [0, 2.0]}, **cost},
                    {"cost": {"median": 1.1, "range": [0, 1.9]}, **cost},
                    columns=columns, measure="cost") == [
        "| 1 (0 to 1.9) | yes |", "| 1 (0 to 2.0) | no |", "| 1.1 (0 to 1.9) | no |", "| 1 of 3 |"]


def test_the_fastest_engine_is_named():
    row = {"peers": {"one": 5, "two": 7, "three": None}}
    assert rendered(row, {**row, "fastest": "one, Q4_0; two"}, columns=(["peer", "best"],))[1:] == [
        "| 7 (two) |", "| 5 (one, Q4_0; two) |", "| 0 of 0 |"]


def test_cells_have_targets_of_their_own():
    row = {"a": {"share": 40, "target": 50, "ratio": 1.5, "ratio_target": 1.2}, "b": {"share": 60}}
    assert rendered(row, columns=(["a", "a"], ["b", "b"]))[1:] == [
        "| 40 (50), 1.50 | 60 |", "| 1 of 2 |"]


def test_cells_show_one_part_or_a_quotient():
    row = {"a": {"share": 40, "target": 50, "ratio": 1.5}, "b": {"rounds": [9, 11]}, "c": 4}
    columns = (["a", "a", "share"], ["a", "a", "ratio"], ["b", "c", {"per": "b", "digits": 2}],
               ["b", "d", {"per": "b", "digits": 2}], ["d", "d", "ratio"])
    assert rendered(row, columns=columns)[1:] == ["| 40 (50) | 1.50 | 0.40 |  |  |", "| 0 of 1 |"]


def test_rows_that_are_faster_are_counted():
    tables = {"t": {"rows": [{"ratio": {"median": 1.2, "range": [0.9, 1.3]}},
                             {"ratio": {"rounds": [1.1, 1.2]}}, {"ratio": 1}]},
              "sum": {"columns": [["faster", "faster_of"], ["always", "always_of"]],
                      "rows": [{"of": ["t"]}]}}
    assert results_tables.rendered("sum", tables).splitlines()[-1] == "| 2 of 3 | 1 of 3 |"


def test_a_matrix_has_rows_of_other_tables_as_cells():
    ratio = {"median": 1.2, "range": [0.9, 1.3]}
    rows = [{"case": "A, x, one", "ratio": ratio, "share": 70, "target": 1},
            {"case": "A, x, two", "ratio": 0.9, "target": 1}, {"case": "B, two", "ratio": 3}]
    matrix = {"first": "what", "matrix": [["1", "t", "one"], ["2", "t", "two", "three"]],
              "cells": [["ratio", 2], ["share"]]}
    tables = {"t": {"rows": rows}, "m": matrix, "r": {**matrix, "ranges": True}}
    assert results_tables.rendered("m", tables).splitlines() == [
        "| what | 1 | 2 |", "|---|---|---|", "| A, x | 1.20, 70 | **0.90** |", "| B |  | 3.00 |"]
    assert "| 1.20 (0.90 to 1.30), 70 |" in results_tables.rendered("r", tables)


def test_measurements_become_rows(monkeypatch, tmp_path):
    def result(case, threads=2, **more):
        some = {"median": 2.345, "min": 1.0, "max": 300.4}
        return {"shape": "small-hybrid", "type": "int4-k", "threads": threads, "case": case,
                "engines": {"moeserve": some, "ik q4_0": {**some, "median": 1234.5}, "vLLM": None},
                "ratios": {"better": some, "ik q4_0": some}, "best_peer": "ik q4_0",
                "share_of_bound": {"median": 0.876}, "limit": some, "marks": {}, **more}

    monkeypatch.setattr(peer_rows, "RESULTS", tmp_path)
    (tmp_path / "data").mkdir()
    file = tmp_path / "measured.json"
    cases = [result("prompt 512"), result("decode 1", marks={"better": 1.5}),
             result("decode 4", share_of_bound=None, limit=None, best_peer=None),
             result("decode 16", threads=1), result("decode 32", engines={"moeserve": None})]
    file.write_text(json.dumps([{"results": cases, "rounds": []}]))

    def put(*more):
        monkeypatch.setattr("sys.argv", ["peer_rows.py", "page", "zen", str(file), *more])
        peer_rows.main()
        return json.loads((tmp_path / "data/page.json").read_text())["tables"]

    tables = put()
    first, one, four = tables["zen"]["rows"]
    spread = {"median": 2.35, "range": [1.0, 300]}
    assert first == {"case": "SMALL HYBRID int4-k, prompt of 512", "ours": 2.35,
                     "peers": {"ik q4_0": 1234, "vLLM": None}, "ratio": spread,
                     "fastest": "ik q4_0", "share": 88, "limit": spread}
    assert one["target"] == 1.5
    assert four == {"case": "SMALL HYBRID int4-k, 4 sequences", "ours": 2.35,
                    "peers": first["peers"]}
    assert results_tables.rendered("zen_ratios", tables).splitlines()[2] == (
        "| SMALL HYBRID int4-k | 2.35, 88 | 2.35, 88 |  |  |  |")
    (tmp_path / "data/page.json").write_text(json.dumps(
        {"tables": {**tables, "zen": {**tables["zen"], "machine": "Zen"}}}))
    assert put()["zen"] == {**tables["zen"], "machine": "Zen"}
    assert [r["case"] for r in put("--threads", "1")["zen"]["rows"]] == [
        "SMALL HYBRID int4-k, 16 sequences"]
    with pytest.raises(SystemExit, match="found in two"):
        put(str(file))
