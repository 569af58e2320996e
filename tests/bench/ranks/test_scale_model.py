"""Tests scale_model.py --check: with recorded runs of ranks_bench, and with times that follow from
the parts of which they are made."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import scale_model

RECORDED = pathlib.Path(__file__).with_name("recorded.jsonl")

# One process of 2 threads takes 1 s for 4 steps: of its 2 s of one thread, experts take 1.0, rows
# 0.6, the head 0.2, and 0.2 is not divided.
CASE = {"name": "made up", "ranks": 2, "cores": 2, "threads": 2, "alone_seconds": 1.0,
        "experts_share": 0.5, "rows_share": 0.3, "few_rows_share": 0.05, "head_share": 0.1,
        "divides_rows": True,
        "divides_head": True, "imbalance": 1.2, "steps": 4, "exchanges": 84, "bytes": 5e6,
        "alpha": 1e-3, "beta": 1e8, "seconds": 1.0}


def seconds(**changes):
    return scale_model.predict({**CASE, **changes}).seconds


def test_the_parts_of_a_prediction():
    parts = scale_model.predict(CASE)
    assert parts.undivided == pytest.approx(0.2)
    assert parts.divided == pytest.approx(0.4)
    assert parts.experts == pytest.approx(0.5)
    assert parts.imbalance == pytest.approx(0.1)
    assert parts.sharing == 0
    assert parts.latency == pytest.approx(0.1)  # 84 exchanges and 4 messages in each of 4 steps
    assert parts.transfer == pytest.approx(0.05)
    assert parts.seconds == pytest.approx(1.35)


def test_what_is_not_divided_is_computed_by_every_rank():
    assert seconds(divides_rows=False) == pytest.approx(1.35 + 0.3)
    assert seconds(divides_rows=False, divides_head=False) == pytest.approx(1.35 + 0.3 + 0.1 - 4e-3)


def test_ranks_that_share_cores_take_as_long_as_all_of_their_work():
    # The work of 4 ranks is 4 x 0.2 + 0.8 + 1.0 s, on 2 cores; one of them has more experts.
    parts = scale_model.predict({**CASE, "ranks": 4})
    assert parts.seconds - parts.latency - parts.transfer == pytest.approx(1.3 + 0.25 * 0.2)
    assert parts.sharing == pytest.approx(1.3 / 2)
    assert seconds(ranks=4, cores=4) == pytest.approx(1.35 - 0.2 - 0.25 * 1.2)


def test_few_rows_take_as_long_as_they_take_one_process():
    assert seconds(few_rows_share=0.25) == pytest.approx(1.35 + 2 * 0.25 - 0.3)
    assert seconds(few_rows_share=0.25, divides_rows=False) == seconds(divides_rows=False)


def test_the_measured_time_is_not_used():
    assert seconds(seconds=77.0) == seconds()


def test_recorded_runs_are_predicted(capsys):
    assert scale_model.check(RECORDED)
    assert len(capsys.readouterr().out.splitlines()) == 8


@pytest.mark.parametrize("factor, good", [(1.14, True), (0.86, True), (1.17, False), (0.84, False)])
def test_errors_above_15_percent_fail(tmp_path, factor, good):
    file = tmp_path / "run.jsonl"
    case = {**CASE, "seconds": seconds() / factor}
    file.write_text("\n".join(json.dumps(c) for c in ({**CASE, "seconds": seconds()}, case)))
    assert scale_model.check(file) == good


def test_no_case_is_no_check(tmp_path):
    file = tmp_path / "empty.jsonl"
    file.write_text("")
    assert not scale_model.check(file)
