"""Tests how cpu_states.py tells the states of a machine apart, with invented rounds."""

import json
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).with_name("cpu_states.py")


def ours(rate, share, probes, steady=1, size=1e9):
    """A run of moeserve that decodes 4 sequences and reads `size` bytes in a step."""
    return {"engine": "moeserve", "rates": {"prompt 512": 1, "decode 4": rate}, "error": "",
            "probes": [{"read_bandwidth": p * 1e9, "arithmetic": 1e12} for p in probes],
            "details": {"share": {"decode 4": share}, "steady": {"decode 4": steady},
                        "cost": {"decode 4": {"bytes": size, "operations": 1}}}}


def theirs(name, rate):
    return {"engine": name, "rates": {"prompt 512": 1, "decode 4": rate}, "error": "",
            "probes": [], "details": {}}


def rows_of(tmp_path, *rounds):
    file = tmp_path / "rounds.json"
    result = {"shape": "small", "type": "int8", "threads": 2, "case": "decode 4"}
    file.write_text(json.dumps([{"results": [result], "rounds": list(rounds)}]))
    done = subprocess.run([sys.executable, SCRIPT, file], capture_output=True, text=True,
                          check=True)
    assert f"## small int8, 2 threads, {len(rounds)} rounds" in done.stdout
    return [line for line in done.stdout.splitlines() if line.startswith("| decode")]


def test_states_are_told_apart(tmp_path):
    # A bound of 120 tokens/s is 30 steps of 1 GB, so 30 GB/s.
    slow, fast = ours(96, 0.8, (30, 30)), ours(180, 0.75, (60, 60))
    between = ours(94, 0.5, (30, 30))
    rounds = [
        [slow, theirs("a", 80), ours(108, 0.9, (30, 60)), theirs("b", 150), fast],
        [slow, theirs("a", 60), ours(48, 0.4, (30, 60), steady=0), theirs("b", 170), fast],
        [between, theirs("a", 300), ours(200, 0.8, (47, 30)), theirs("c", 65), slow],
    ]
    assert rows_of(tmp_path, *rounds) == [
        # a ran at 80 and 60 in the slow state; its 300 began there and ended between the states.
        "| decode 4 | slow | 96 (4) | 80% | a: 70 (2) | 1.37 | 1.71 |",
        "| decode 4 | fast | 180 (3) | 75% | b: 160 (2) | 1.12 | 1.50 |",
    ]


def test_a_state_that_one_side_never_had_is_left_out(tmp_path):
    rounds = [ours(96, 0.8, (30, 60)), theirs("a", 80), ours(180, 0.75, (60, 60))]
    assert rows_of(tmp_path, rounds) == [
        "| decode 4 | fast | 180 (1) | 75% | a: 80 (1) | 2.25 | 3.00 |"]


def test_runs_without_costs_and_failures_do_not_count(tmp_path):
    old = ours(96, 0.8, (30, 30))
    del old["details"]["cost"]
    failed = {"engine": "b", "rates": {}, "error": "not installed", "probes": [], "details": {}}
    assert rows_of(tmp_path, [old, theirs("a", 80), ours(90, 0.75, (30, 30)), failed]) == [
        "| decode 4 | slow | 90 (1) | 75% | a: 80 (1) | 1.12 | 1.50 |"]
