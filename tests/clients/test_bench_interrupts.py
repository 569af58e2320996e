"""Tests that the bench commands say what they are going to do, and show what they have finished
when they are interrupted."""

import json
import pathlib
import re
import signal
import subprocess

import pytest

from conftest import binary, model, start_server, stop_server

SMALL = ["--synthetic", "small", "--hidden", "64", "--layers", "2", "--vocab", "256", "--heads",
         "4", "--kv-heads", "4", "--head-dim", "16", "--experts", "4", "--widths", "32"]


def bench(*arguments):
    return subprocess.Popen([binary(), "bench", *map(str, arguments)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def lines_until(file, text):
    """Reads lines until one begins with `text`, and returns them all."""
    lines = []
    for line in file:
        lines.append(line)
        if line.startswith(text):
            return "".join(lines)
    raise AssertionError(f"no line {text!r} in {lines}")


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_bench_says_sizes_first_and_what_was_measured(number, status, tmp_path):
    results = tmp_path / "results.json"
    # Far more rounds than are run. The first results are there after a fraction of a second.
    running = bench(*SMALL, "--batch", "1,2", "--tokens", "4", "--rounds", "1000", "--json",
                    results)
    plan = lines_until(running.stdout, "to measure:")
    assert plan.startswith("model: synthetic small --hidden 64 --layers 2")
    assert "vocabulary 256, hidden size 64, 2 layers" in plan
    assert "4 experts, width 32" in plan
    assert re.search(r"^parameters: [\d,]+ \(", plan, re.M)
    assert re.search(r"^memory: about .* for weights in bf16, .* for the KV cache of 2 x 20 tokens",
                     plan, re.M)
    assert plan.endswith("to measure: 4 decode steps of 1 and 2 sequences after a context of 16 "
                         "tokens; a warm-up and 1000 rounds\n")
    lines_until(running.stderr, "measuring: ")  # written after some seconds of measurements
    running.send_signal(number)
    out, errors = running.communicate(timeout=60)
    assert running.returncode == status, errors
    measured = int(re.search(r"^interrupted: these are the results of (\d+) measurements", out,
                             re.M)[1])
    assert 1 <= measured < 2000
    assert re.search(r"^decode 1 +\d", out, re.M)
    written = json.loads(results.read_text())
    assert written["interrupted"] is True
    assert sum(len(case["rounds"]) for case in written["cases"]) == measured


def test_bench_of_a_model_with_states(tmp_path):
    folder = pathlib.Path(__file__).parents[1] / "golden/tiny-short-convolution"
    results = tmp_path / "results.json"
    running = bench("-m", folder, "--batch", "1,3", "--prompt", "40", "--chunk", "7", "--tokens", "4",
                    "--rounds", "1", "--json", results)
    out, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors
    assert re.search(r"^decode 3 +\d", out, re.M)
    written = json.loads(results.read_text())
    assert [case["name"] for case in written["cases"]] == ["prompt 40", "decode 1", "decode 3"]
    assert written["shape"]["attention"]["kind"] == "routed"  # that of the second layer


def test_bench_is_interrupted_before_it_measures():
    running = bench(*SMALL)
    lines_until(running.stdout, "to measure:")
    running.send_signal(signal.SIGINT)
    out, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (130, "interrupted before anything was measured\n"), out


@pytest.fixture(scope="module")
def served():
    running = start_server()
    yield running
    stop_server(running)


@pytest.mark.parametrize("local", [True, False])
def test_load(served, local, tmp_path):
    results = tmp_path / "results.json"
    target = ["--model", model()] if local else ["--url", served.url + "/v1"]
    running = bench("load", *target, "--clients", "2", "--requests", "1000000",
                    "--prompt-tokens", "8", "--output-tokens", "4:8", "--json", results)
    plan = lines_until(running.stdout, "requests:")
    if local:
        assert f"model: {model().name}\n" in plan
        assert re.search(r"^parameters: ", plan, re.M)
        assert re.search(r"^memory: about .* for weights in .*, .* for the KV cache of "
                         "--max-num-seqs 64", plan, re.M)
    else:
        assert plan.startswith(f"server: {served.url}/v1, the model that it lists first\n")
    assert "to measure: 1000000 requests by 2 clients\n" in plan
    assert ("requests: prompts of 8 tokens; outputs of 4 to 8 tokens; in all about 8000000 and"
            in plan)
    lines_until(running.stderr, "load: ")  # some requests are done
    running.send_signal(signal.SIGINT)
    out, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert "interrupted: these are the results until then\n" in out
    started, completed = map(int, re.search(r"^requests: (\d+) started, (\d+) completed", out,
                                            re.M).groups())
    assert 1 <= completed <= started < 1000000
    assert "time to first token" in out
    written = json.loads(results.read_text())
    assert (written["interrupted"], written["requests"]["unanswered"]) == (True, 0)


def test_json_on_standard_output_stays_json(served):
    done = subprocess.run([binary(), "bench", "load", "--url", served.url + "/v1", "--clients", "1",
                           "--requests", "2", "--output-tokens", "2", "--json", "-"],
                          capture_output=True, text=True, timeout=60)
    written = json.loads(done.stdout)
    assert (done.returncode, written["interrupted"]) == (0, False)
    assert "to measure: 2 requests by 1 client\n" in done.stderr


def test_held_streams_are_released(served):
    running = bench("load", "--url", served.url + "/v1", "--idle-streams", "2", "--seconds", "600",
                    "--drain", "600", "--idle-tokens", "2")
    lines_until(running.stdout, "idle streams: 2 of 2 tokens")
    running.send_signal(signal.SIGINT)
    out, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert out.startswith("interrupted: ") and "idle streams" in out
