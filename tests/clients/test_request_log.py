"""Tests the log line and the spans of requests, against a stub of a collector."""

import http.server
import json
import os
import threading
import urllib.error
import urllib.request

import pytest

from conftest import start_server, stop_server

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SECRET = "zebra-quartz-vow"
KEY = "key-of-the-team-1234567890"


class Collector:
    """Keeps the spans that it gets."""

    def __init__(self):
        self.spans = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/traces" and self.headers["x-token"] == "s3cret"
                for resource in body["resourceSpans"]:
                    for scope in resource["scopeSpans"]:
                        collector.spans += scope["spans"]
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def of(self, request_id):
        return [s for s in self.spans if attributes(s).get("gen_ai.request.id") == request_id]


def attributes(span):
    return {a["key"]: next(iter(a["value"].values())) for a in span["attributes"]}


def call(server, path, body=None, request_id=None, key=KEY, traceparent=None):
    """Returns (status, text of the answer)."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    if request_id:
        headers["X-Request-Id"] = request_id
    if traceparent:
        headers["traceparent"] = traceparent
        headers["tracestate"] = "team=a1"
    data = None if body is None else json.dumps(body).encode()
    try:
        answer = urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers),
                                        timeout=30)
        return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture(scope="module")
def observed(tmp_path_factory, protos):
    """Makes requests, ends the server, and returns (lines of the log, collector, raw log)."""
    folder = tmp_path_factory.mktemp("observed")
    keys = folder / "keys.json"
    keys.write_text(json.dumps({"keys": [
        {"name": "team-a", "key": KEY, "scopes": ["generate", "statistics"]}]}))
    keys.chmod(0o600)
    log = folder / "log"
    collector = Collector()
    with log.open("wb") as file:
        server = start_server(
            "--api-key-file", keys, "--log-format", "json", "--otlp-endpoint",
            f"http://127.0.0.1:{collector.server.server_port}", stderr=file,
            env={**os.environ, "MOESERVE_OTLP_HEADERS": "x-token=s3cret"})
        body = {"model": server.name, "prompt": f"{SECRET} is", "max_tokens": 4, "temperature": 0}
        parent = f"00-{TRACE}-{PARENT}-01"
        _, answer = call(server, "/v1/completions", body, "plain", traceparent=parent)
        call(server, "/v1/completions?q=" + SECRET, {**body, "stream": True}, "streamed")
        call(server, "/v1/completions", body, "unsampled", traceparent=parent[:-2] + "00")
        call(server, "/v1/completions", body, "malformed", traceparent="00-" + SECRET)
        call(server, "/v1/completions", {"prompt": [SECRET, {}]}, "invalid")
        call(server, "/v1/completions", {**body, "model": SECRET}, "nomodel")
        call(server, "/v1/completions", body, "badkey", key=SECRET)
        call(server, "/v1/models/%22%0a" + "x" * 1000, None, "longpath")
        for path in ("/health", "/metrics"):
            assert call(server, path)[0] == 200
        import grpc
        messages, stubs = protos
        with grpc.insecure_channel(server.grpc) as channel:
            stub = stubs.InferenceStub(channel)
            request = messages.GenerateRequest(text=f"{SECRET} is")
            request.sampling.max_tokens = 4
            stream = stub.Generate(request, metadata=[
                ("authorization", f"Bearer {KEY}"), ("x-request-id", "call"),
                ("traceparent", parent)])
            assert all(message.id.endswith("-call") for message in stream)
            trailers = dict(stream.trailing_metadata())
            assert trailers["traceparent"].startswith(f"00-{TRACE}-")
            assert PARENT not in trailers["traceparent"]
        metrics = call(server, "/metrics")[1]
        assert stop_server(server) == 0
    text = log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert "moeserve_spans_dropped_total 0" in metrics
    return {x["request_id"]: x for x in lines if "request_id" in x}, collector, text, answer


def test_lines(observed):
    lines, _, _, _ = observed
    plain = lines["plain"]
    assert {k: plain[k] for k in ("method", "path", "endpoint", "status", "prompt_tokens",
                                  "output_tokens", "finish_reason", "key", "model", "trace_id",
                                  "parent_span_id")} == {
        "method": "POST", "path": "/v1/completions", "endpoint": "/v1/completions", "status": 200,
        "prompt_tokens": plain["prompt_tokens"], "output_tokens": 4, "finish_reason": "length",
        "key": "team-a", "model": "test-model", "trace_id": TRACE, "parent_span_id": PARENT}
    assert plain["prompt_tokens"] > 0 and plain["ms"] > 0 and plain["response_bytes"] > 100
    assert plain["client"].startswith("127.0.0.1:")
    assert len(plain["span_id"]) == 16
    assert lines["streamed"]["path"] == "/v1/completions"  # without the query
    assert lines["streamed"]["output_tokens"] == 4
    assert lines["invalid"]["status"] == 400 and lines["nomodel"]["status"] == 404
    assert lines["badkey"]["status"] == 401 and "key" not in lines["badkey"]
    assert lines["malformed"]["trace_id"] != TRACE
    assert len(lines["longpath"]["path"]) <= 210
    assert lines["call"]["code"] == "OK" and lines["call"]["method"] == "Generate"
    assert lines["call"]["trace_id"] == TRACE and lines["call"]["output_tokens"] == 4
    assert all(x.get("endpoint") not in ("/health", "/metrics") for x in lines.values())


def test_spans(observed):
    lines, collector, _, _ = observed
    (plain,) = collector.of("plain")
    assert (plain["traceId"], plain["parentSpanId"], plain["kind"]) == (TRACE, PARENT, 2)
    assert plain["spanId"] == lines["plain"]["span_id"] and plain["traceState"] == "team=a1"
    assert "traceState" not in collector.of("malformed")[0]
    values = attributes(plain)
    assert values["gen_ai.operation.name"] == "text_completion"
    assert values["gen_ai.usage.output_tokens"] == "4"
    assert values["gen_ai.response.model"] == "test-model"
    assert 0 <= values["gen_ai.latency.time_in_queue"] < 60
    phases = [s for s in collector.spans if s.get("parentSpanId") == plain["spanId"]]
    assert [s["name"] for s in phases] == ["queue", "prefill", "decode"]
    bounds = [int(plain["startTimeUnixNano"])] + [
        int(s[f"{end}TimeUnixNano"]) for s in phases for end in ("start", "end")] + [
        int(plain["endTimeUnixNano"])]
    # The clocks of the engine and of HTTP are read at different places.
    assert all(b - a > -1_000_000 for a, b in zip(bounds, bounds[1:]))
    assert collector.of("unsampled") == []
    assert "parentSpanId" not in collector.of("malformed")[0]
    (rpc,) = collector.of("call")
    assert rpc["name"] == "moeserve.v1.Inference/Generate" and rpc["traceId"] == TRACE
    assert attributes(rpc)["rpc.grpc.status_code"] == "0"


def test_nothing_of_prompts_answers_and_keys(observed):
    _, collector, text, answer = observed
    spans = json.dumps(collector.spans)
    written = json.loads(answer)["choices"][0]["text"]
    assert len(written) > 3
    for secret in (SECRET, KEY, "s3cret", written):
        assert secret not in text and secret not in spans, secret


def test_modes(tmp_path):
    for mode, expected in (("off", []), ("all", ["/health", "/v1/models"])):
        log = tmp_path / mode
        with log.open("wb") as file:
            server = start_server("--log-format", "json", "--access-log", mode, stderr=file)
            call(server, "/health")
            call(server, "/v1/models")
            assert stop_server(server) == 0
        lines = [json.loads(x) for x in log.read_text().splitlines()]
        assert [x["endpoint"] for x in lines if "endpoint" in x] == expected
