"""Tests `moeserve experts place`: its report, and the file that it writes."""

import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = ROOT / "deploy" / "models"


def moeserve(*arguments, status=0):
    program = os.environ["MOESERVE_BIN"]
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, timeout=300)
    assert done.returncode == status, done.stderr.decode()
    return done.stdout.decode() if status == 0 else done.stderr.decode()


@pytest.fixture(scope="module", params=["mh-moe", "moa", "hmoe-topp"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("placement")
    text = (ROOT / "tests" / "data" / "heldout.txt").read_bytes()[:4000]
    (folder / "text.txt").write_bytes(text.decode(errors="ignore").encode())
    profile = folder / "profile"
    path = MODELS / request.param
    moeserve("experts", "save", profile, path, "--text", folder / "text.txt", "--quiet")
    return path, profile, folder


def test_every_expert_is_placed(model):
    path, profile, folder = model
    file = folder / "placement.json"
    arguments = ["experts", "place", profile, "--model", path, "--ranks", 2]
    report = json.loads(moeserve(*arguments, "--output", file, "--json"))
    placement = json.loads(file.read_text())
    assert (placement["format"], placement["version"], placement["ranks"]) == (1, 1, 2)
    assert placement["model"] == path.name
    assert len(placement["blocks"]) == len(report["blocks"])
    for block in placement["blocks"]:
        assert all(holders in ([0], [1]) for holders in block["holders"])
    for block in report["blocks"]:
        assert len(block["imbalance"]) == len(report["rows_of_steps"])
        assert all(1.0 <= imbalance <= 2.0 for imbalance in block["imbalance"])
    assert len(report["expert_bytes_of_ranks"]) == 2
    assert min(report["expert_bytes_of_ranks"]) > 0
    # The same again, over the old file.
    text = file.read_bytes()
    moeserve(*arguments, "--output", file)
    assert file.read_bytes() == text


def test_copies_take_memory(model):
    path, profile, folder = model
    arguments = ["experts", "place", profile, "--model", path, "--ranks", 2, "--json"]
    one = json.loads(moeserve(*arguments))
    both = json.loads(moeserve(*arguments, "--expert-copies", 100))
    total = sum(one["expert_bytes_of_ranks"])
    assert both["expert_bytes_of_ranks"] == [total, total]
    table = moeserve(*arguments[:-1])
    for block in one["blocks"]:
        assert block["block"] in table
    assert "rank 1" in table


def test_what_does_not_fit_is_refused(model):
    path, profile, folder = model
    other = MODELS / ("moa" if path.name != "moa" else "x-moe")
    place = ["experts", "place", profile, "--ranks", 2]
    assert "another model" in moeserve(*place, "--model", other, status=1)
    note = folder / "note.txt"
    note.write_text("not a placement")
    error = moeserve(*place, "--model", path, "--output", note, status=1)
    assert "is not overwritten" in error
    assert note.read_text() == "not a placement"
    for wrong in (["--ranks", 0], ["--ranks", 65], ["--expert-copies", -1]):
        arguments = ["experts", "place", profile, "--model", path, "--ranks", 2]
        if wrong[0] == "--ranks":
            arguments = arguments[:-2]
        moeserve(*arguments, *wrong, status=2)
