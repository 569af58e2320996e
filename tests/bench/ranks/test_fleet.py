"""Tests the simulation of fleets."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import fleet
import scale_model

MODEL = next(m for m in scale_model.MODELS if m.name == "Mixtral-8x7B")
NETWORK = scale_model.NETWORKS[1]


def test_steps_take_the_time_of_the_scale_model():
    # One token is bound by reading weights, as the tables are.
    for ranks in (1, 2, 4):
        expected = scale_model.decode_seconds(MODEL, ranks, 1, NETWORK)
        found = fleet.step_seconds(MODEL, ranks, 1, NETWORK, fleet.Machine())
        assert found == pytest.approx(expected, rel=0.02)


def test_prompts_take_the_time_of_their_products():
    machine = fleet.Machine()
    found = fleet.step_seconds(MODEL, 1, 4096, NETWORK, machine)
    of_row = MODEL.dense_parameters + MODEL.expert_parameters * MODEL.chosen / MODEL.experts
    assert found == pytest.approx(2 * of_row * 4096 / machine.operations, rel=0.01)


def run(replicas, load, balance="least", step=lambda rows: 0.01 + 1e-4 * rows, seconds=120):
    requests = fleet.Requests(prompt=100, output=50)
    simulated = fleet.Fleet(replicas, step, requests, balance)
    rate = load * replicas * fleet.capacity(step, requests)
    return simulated, simulated.run(rate, seconds), rate


def test_what_arrives_is_answered():
    simulated, figures, rate = run(4, 0.7)
    # Three quarters of the time count; the mean output is half a token above 50.
    assert figures.tokens == pytest.approx(rate * 50.5 * 90, rel=0.05)
    assert len(figures.first_tokens) == pytest.approx(rate * 90, rel=0.05)
    assert sum(len(r.waiting) for r in simulated.replicas) < 40


def test_too_many_requests_wait():
    simulated, figures, rate = run(2, 1.5)
    assert sum(len(r.waiting) for r in simulated.replicas) > 0.2 * figures.arrived
    # The replicas do what their capacity is.
    assert figures.tokens / 90 == pytest.approx(rate / 1.5 * 50.5, rel=0.1)


def test_the_least_loaded_replica_answers_first():
    p99 = {balance: fleet.percentile(run(8, 0.9, balance)[1].first_tokens, 0.99)
           for balance in ("least", "two", "turns")}
    assert p99["least"] <= p99["two"] <= p99["turns"]


def test_replicas_are_groups_of_ranks(capsys):
    fleet.main(["--machines", "4", "--group-sizes", "1,4", "--seconds", "400"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(int(row[1]), int(row[2])) for row in rows] == [(4, 1), (1, 4)]
    # A group is faster than a machine, but not by as much as it has machines.
    assert float(rows[1][5]) < float(rows[0][5])


def test_a_thousand_replicas():
    _, figures, rate = run(1000, 0.7, "two", lambda rows: 0.1 + 1e-3 * rows, seconds=20)
    assert figures.arrived == pytest.approx(rate * 20, rel=0.05)
    assert figures.tokens > 0
