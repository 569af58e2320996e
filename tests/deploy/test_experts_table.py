"""Tests the table of experts that deploy/quickstart.sh prints."""

import json
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "deploy/clients/experts_table.py"


def table(*counts):
    layers = [{"layer": i, "block": "feed_forward", "rows": 10, "distinct_experts_mean": 2.0,
               "counts": c} for i, c in enumerate(counts)]
    stats = {"model": "m", "layers": layers, "tokens": 5, "activation_ratio": 0.5,
             "activated_parameters_per_token": 12.0, "always_active_parameters": 4}
    return subprocess.run([sys.executable, SCRIPT], input=json.dumps(stats), text=True,
                          encoding="utf-8", capture_output=True, check=True).stdout


def test_every_expert_has_its_share_and_a_bar():
    text = table([60, 30, 0, 10])
    assert "3 of 4 experts worked, 100 choices by 10 rows" in text
    assert "   0 █ 60.0%   1 ▅ 30.0%   2 -  none   3 ▂ 10.0%" in text


def test_a_large_block_shows_its_busiest():
    text = table([1] * 99 + [101])
    assert "the 16 busiest" in text
    assert "  99 █ 50.5%" in text
    assert text.count("%") == 16


def test_a_block_without_choices():
    assert table([0, 0]).count("none") == 2


def test_lines_fit_a_terminal():
    grid = [line for line in table([7] * 64).splitlines() if "█" in line]
    assert len(grid) == 8 and max(map(len, grid)) <= 100


def test_a_dense_model():
    assert "has no experts" in table()
