"""Tests /metrics: both formats must be valid, counters must agree with the requests that were made,
and scrapes must succeed while the server is busy.
"""

import http.client
import json
import shutil
import statistics
import subprocess
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from conftest import binary, model, post, start_server, stop_server, wait_for

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


def scrape(server, accept="text/plain"):
    """Returns (Content-Type, text) of /metrics."""
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def families(text, parse=parser.text_string_to_metric_families):
    return {family.name: family for family in parse(text)}


class Counters:
    """Holds the samples of one scrape. Reading a missing sample raises KeyError. The label "model"
    may be left out, because the server has one model."""

    def __init__(self, server):
        self._samples = {}
        for family in families(scrape(server)[1]).values():
            for sample in family.samples:
                self._samples[sample.name, frozenset(sample.labels.items())] = sample.value

    def __call__(self, name, **labels):
        key = f"moeserve_{name}", frozenset(labels.items())
        if key not in self._samples:
            key = f"moeserve_{name}", frozenset({"model": "test-model", **labels}.items())
        return self._samples[key]

    def total(self, name, **labels):
        """Returns the sum of the metric's samples that have the given labels."""
        wanted = set(labels.items())
        values = [value for (sample, found), value in self._samples.items()
                  if sample == f"moeserve_{name}" and wanted <= found]
        assert values, name
        return sum(values)


@pytest.fixture(scope="module")
def own_server():
    """Starts a server that exports all metrics and that only this module's tests use."""
    server = start_server("--moe-metrics=full", "--moe-expert-weights",
                          "--metrics-compat=vllm,sglang")
    yield server
    assert stop_server(server) == 0


def settled(server):
    """Returns the counters once the server is idle."""
    def idle():
        now = Counters(server)
        return now("requests_running") == now("requests_waiting") == 0
    assert wait_for(idle, 30)
    time.sleep(0.05)  # a step is counted after its responses are sent
    return Counters(server)


def test_counters_agree_with_what_was_done(own_server):
    before = settled(own_server)
    bodies = [{"prompt": list(range(1, 1 + length)), "max_tokens": most, "n": samples,
               "ignore_eos": True, "temperature": 1}
              for length, most, samples in ((3, 5, 1), (40, 1, 2), (17, 20, 3), (9, 11, 1))]
    for body in bodies:
        post(own_server, "/v1/completions", body)
    with pytest.raises(urllib.error.HTTPError):
        post(own_server, "/v1/completions", {"prompt": "a", "temperature": -1})
    after = settled(own_server)

    def gain(name, **labels):
        return after(name, **labels) - before(name, **labels)

    sequences = sum(body["n"] for body in bodies)
    generated = sum(body["n"] * body["max_tokens"] for body in bodies)
    endpoint = {"endpoint": "/v1/completions", "method": "POST"}
    assert gain("http_requests_total", **endpoint, code="200") == len(bodies)
    assert gain("http_requests_total", **endpoint, code="500") == 0
    assert after("http_requests_total", **endpoint, code="400") >= 1
    assert gain("requests_rejected_total", reason="invalid") == 1
    assert gain("requests_finished_total", finished_reason="length") == sequences
    assert gain("generation_tokens_total") == generated
    assert gain("prompt_tokens_total") == sum(len(b["prompt"]) * b["n"] for b in bodies)
    assert gain("request_n_sum") == sequences
    assert gain("request_n_count") == len(bodies)
    assert gain("request_max_tokens_sum") == sum(body["max_tokens"] for body in bodies)
    assert gain("request_generation_tokens_sum") == generated
    for name in ("queue", "prefill", "decode", "inference"):
        assert gain(f"request_{name}_seconds_count") == sequences
    for name in ("time_to_first_token_seconds", "request_duration_seconds"):
        assert gain(f"{name}_count") == sequences
    assert gain("inter_token_latency_seconds_count") == generated - sequences
    # The times of the phases must add up to the request durations.
    phases = sum(gain(f"request_{name}_seconds_sum") for name in ("queue", "prefill", "decode"))
    assert phases == pytest.approx(gain("request_duration_seconds_sum"), abs=0.05 * sequences)
    assert gain("request_inference_seconds_sum") == pytest.approx(
        gain("request_prefill_seconds_sum") + gain("request_decode_seconds_sum"), abs=0.01)

    steps = gain("engine_steps_total")
    assert gain("step_tokens_count") == gain("step_sequences_count") == steps
    durations = [gain("step_duration_seconds_count", phase=phase) for phase in ("prefill", "decode")]
    assert sum(durations) == steps and min(durations) > 0
    # The model does not process the last token of a sequence, it processes a prompt once for all
    # samples, and it processes drafted tokens that it then does not draw.
    run = sum(len(body["prompt"]) for body in bodies) + generated - sequences
    cached = gain("prefix_cache_hit_tokens_total")
    rejected = gain("draft_tokens_total") - gain("draft_accepted_tokens_total")
    assert gain("step_tokens_sum") == run - cached + rejected


def test_expert_counters_agree_with_each_other(own_server):
    post(own_server, "/v1/completions", {"prompt": "In the beginning", "max_tokens": 12})
    now = settled(own_server)
    config = json.loads((model() / "config.json").read_text())
    with urllib.request.urlopen(f"{own_server.url}/v1/experts/stats") as answer:
        stats = json.load(answer)
    assert stats["layers"], config
    rejected = now("draft_tokens_total") - now("draft_accepted_tokens_total")
    for layer in stats["layers"]:
        labels = {"model": "test-model", "layer": str(layer["layer"]), "block": layer["block"]}
        rows = now.total("moe_layer_rows_total", **labels)
        assert rows == layer["rows"]
        assert rows == layer["split_heads"] * now.total("moe_layer_tokens_total", **labels)
        for expert, count in enumerate(layer["counts"]):
            assert now("moe_expert_tokens_total", **labels, expert=str(expert)) == count
            assert now("moe_expert_weight_total", **labels, expert=str(expert)) == pytest.approx(
                layer["weight_sums"][expert])
        assert now("moe_recomputed_tokens_total", **labels) == 0
        assert now("moe_rejected_tokens_total", **labels) == rejected
    # In each step, an expert processes one row for every selection of the expert, those for
    # rejected tokens included.
    rejected_rows = sum(sum(layer["rejected"]["counts"]) for layer in stats["layers"])
    assert now.total("moe_expert_tokens_per_step_sum") == (
        now.total("moe_expert_tokens_total") + rejected_rows)
    assert now.total("moe_active_experts_per_step_sum") == now.total(
        "moe_expert_tokens_per_step_count")
    assert now.total("moe_active_experts_per_step_count") == len(stats["layers"]) * now(
        "engine_steps_total")


def test_a_scrape_has_the_experts_of_all_responses_before_it(own_server):
    rows = []
    for _ in range(5):
        post(own_server, "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4,
                                             "ignore_eos": True})
        rows.append(Counters(own_server).total("moe_layer_rows_total"))
        with urllib.request.urlopen(f"{own_server.url}/v1/experts/stats") as answer:
            assert rows[-1] == sum(layer["rows"] for layer in json.load(answer)["layers"])
    assert rows == sorted(set(rows))


def test_both_formats_say_the_same(own_server):
    kind, text = scrape(own_server)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    open_kind, open_text = scrape(own_server, OPENMETRICS)
    assert open_kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    # The OpenMetrics parser rejects every deviation from the format.
    strict = families(open_text, openmetrics_parser.text_string_to_metric_families)
    plain = families(text)
    assert {name: family.type for name, family in strict.items()} == {
        name: family.type for name, family in plain.items()}
    for name, family in strict.items():
        assert family.samples, name
        assert ({(s.name, tuple(s.labels.items())) for s in family.samples} ==
                {(s.name, tuple(s.labels.items())) for s in plain[name].samples})
    assert "vllm:num_requests_running" in plain and "sglang:num_running_reqs" in plain


def lint(text):
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool (of Debian's package prometheus) is not here")
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_promtool_finds_no_fault(server):
    assert lint(scrape(server)[1]) == (0, "")


@pytest.fixture
def load(server):
    """Keeps the server fully loaded during a test."""
    process = subprocess.Popen(
        [binary(), "bench", "load", "--url", f"{server.url}/v1", "--clients", "64", "--seconds", "60"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield process
    process.kill()
    process.wait()


def test_scrapes_of_a_busy_server(server, load):
    assert wait_for(lambda: Counters(server)("requests_running") >= 32, 30)
    texts = []
    seconds = []
    connection = http.client.HTTPConnection(server.http)
    for _ in range(40):
        begin = time.monotonic()
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        texts.append(answer.read().decode())
        seconds.append(time.monotonic() - begin)
        assert answer.status == 200
        time.sleep(0.02)
    connection.close()
    print(f"scrape under load: median {statistics.median(seconds) * 1e3:.1f} ms, "
          f"longest {max(seconds) * 1e3:.1f} ms")
    # The bounds are loose, because the load uses every core and other processes may run.
    assert statistics.median(seconds) < 0.05
    assert max(map(len, texts)) < 2 << 20
    # Counters must never decrease.
    last = {}
    for text in texts:
        for family in families(text).values():
            for sample in family.samples:
                if family.type == "gauge":
                    continue
                key = sample.name, tuple(sample.labels.items())
                assert sample.value >= last.get(key, 0), key
                last[key] = sample.value
    assert lint(texts[-1]) == (0, "")


@pytest.mark.parametrize("arguments, message", [
    (["--moe-metrics=all"], "expected off, layer, top, full or auto, found all"),
    (["--moe-metrics=layer", "--moe-expert-weights"], "--moe-expert-weights needs"),
    (["--metrics-compat=triton"], "expected vllm or sglang, found triton"),
])
def test_wrong_options_are_refused_at_start(arguments, message):
    done = subprocess.run(
        [binary(), "serve", "--model", model(), "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
         *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert message in done.stderr


def test_without_expert_metrics():
    server = start_server("--moe-metrics=off")
    try:
        post(server, "/v1/completions", {"prompt": "a", "max_tokens": 2})
        assert "_moe_" not in scrape(server)[1]
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{server.url}/v1/experts/stats")
        assert refused.value.code == 404
    finally:
        stop_server(server)
