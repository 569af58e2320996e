"""What HTTP clients, proxies and browsers expect around the API: health, tokenizer, ids, traces,
CORS and compression, with the options of the command line."""

import gzip
import http.client
import json
import urllib.error
import urllib.request

import pytest

from conftest import ROOT, start_server, stop_server, wait_for

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def featured(tmp_path_factory):
    """Returns (server, file with its log)."""
    log = tmp_path_factory.mktemp("features") / "log"
    with log.open("wb") as file:
        server = start_server("--cors-origin", "https://app.example", "--log-format", "json",
                              "--chat-template", ROOT / "tests/chat/templates/chatml.jinja",
                              stderr=file)
    yield server, log
    assert stop_server(server) == 0


def call(server, method, path, body=None, headers=()):
    """Returns (status, headers, body)."""
    connection = http.client.HTTPConnection(server.http, timeout=30)
    if isinstance(body, dict):
        body = json.dumps(body)
    connection.request(method, path, body, {"Content-Type": "application/json", **dict(headers)})
    answer = connection.getresponse()
    result = answer.status, answer.headers, answer.read()
    connection.close()
    return result


def test_ping(featured):
    server = featured[0]
    assert call(server, "GET", "/ping")[0] == 200
    assert call(server, "POST", "/ping", b"")[0] == 200


@pytest.mark.parametrize("path, meant", [
    ("/chat/completions", "/v1/chat/completions"), ("/v1/v1/models", "/v1/models"),
    ("/models/", "/v1/models"), ("/v1/health", "/health"), ("/v1/nothing", None), ("/v1", None)])
def test_a_base_address_with_or_without_the_version(featured, path, meant):
    status, _, body = call(featured[0], "GET", path)
    message = json.loads(body)["error"]["message"]
    assert status == 404
    assert message == f"there is no {path}" + (f"; did you mean {meant}?" if meant else "")


def test_tokenizer_as_lm_eval_uses_it(featured):
    """With tokenizer_backend=remote, lm_eval uses these three routes."""
    server = featured[0]
    info = json.loads(call(server, "GET", "/tokenizer_info")[2])
    assert isinstance(info["eos_token"], str) and "bos_token" in info and "pad_token" in info
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    tokens = json.loads(call(server, "POST", "/tokenize", body)[2])["tokens"]
    assert tokens == info["eos_token_ids"][:1]
    text = json.loads(call(server, "POST", "/detokenize", {"tokens": tokens})[2])["prompt"]
    assert text == info["eos_token"]
    assert {"id": tokens[0], "token": info["eos_token"]} in info["special_tokens"]
    import jinja2
    template = jinja2.Environment().from_string(info["chat_template"])
    rendered = template.render(messages=[{"role": "user", "content": "hi"}],
                               add_generation_prompt=True)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    ids = json.loads(call(server, "POST", "/tokenize", chat)[2])["tokens"]
    plain = {"prompt": rendered, "add_special_tokens": False}
    assert json.loads(call(server, "POST", "/tokenize", plain)[2])["tokens"] == ids


def test_server_info_has_no_paths(featured):
    server = featured[0]
    text = call(server, "GET", "/server_info")[2].decode()
    info = json.loads(text)
    assert [m["id"] for m in info["models"]] == [server.name]
    assert info["settings"]["cors_origins"] == ["https://app.example"]
    assert str(ROOT) not in text and "/" not in json.dumps(info["models"])


def test_ids_and_traces_reach_answer_and_log(featured):
    server, log = featured
    body = {"prompt": "The", "max_tokens": 2}
    status, headers, text = call(server, "POST", "/v1/completions", body,
                                 {"X-Request-Id": "job-17", "traceparent": PARENT,
                                  "tracestate": "vendor=1"})
    assert status == 200
    assert headers["X-Request-Id"] == "job-17" and json.loads(text)["id"] == "cmpl-job-17"
    version, trace, span, flags = headers["traceparent"].split("-")
    assert (version, trace, flags) == ("00", TRACE, "01") and span != PARENT.split("-")[2]

    def logged():  # the server may write the line after the client has the answer
        whole = log.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines() if "job-17" in line]

    lines = wait_for(logged)
    assert lines and lines[0]["trace_id"] == TRACE and lines[0]["span_id"] == span
    assert lines[0]["parent_span_id"] == PARENT.split("-")[2]


def test_pages_of_the_listed_origin(featured):
    server = featured[0]
    ask = {"Access-Control-Request-Method": "POST",
           "Access-Control-Request-Headers": "authorization,content-type"}
    page = {"Origin": "https://app.example"}
    status, headers, _ = call(server, "OPTIONS", "/v1/chat/completions", None, {**page, **ask})
    assert status == 204
    assert headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert headers["Access-Control-Allow-Methods"] == "POST"
    assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    status, headers, _ = call(server, "GET", "/v1/models", None, page)
    assert status == 200 and headers["Access-Control-Allow-Origin"] == "https://app.example"
    # The server listens on loopback without keys, where other pages are refused.
    assert call(server, "GET", "/v1/models", None, {"Origin": "https://b.example"})[0] == 403
    rebound = {**page, "Host": "app.example"}
    assert call(server, "GET", "/v1/models", None, rebound)[0] == 403


def test_a_bad_origin_is_refused_at_the_start():
    with pytest.raises(RuntimeError):
        start_server("--cors-origin", "app.example")


def test_compression(featured):
    server = featured[0]
    body = {"prompt": "The", "max_tokens": 8, "temperature": 0, "logprobs": 5}
    packed = gzip.compress(json.dumps(body).encode())
    coding = {"Content-Encoding": "gzip"}
    plain = json.loads(call(server, "POST", "/v1/completions", body)[2])
    status, headers, text = call(server, "POST", "/v1/completions", packed,
                                 {**coding, "Accept-Encoding": "gzip"})
    assert status == 200 and headers["Content-Encoding"] == "gzip"
    assert "Accept-Encoding" in headers["Vary"]
    assert json.loads(gzip.decompress(text))["choices"] == plain["choices"]
    status, headers, _ = call(server, "POST", "/v1/completions", packed[:-1], coding)
    assert status == 400
    status, headers, _ = call(server, "POST", "/v1/completions", packed,
                              {"Content-Encoding": "br"})
    assert status == 415 and headers["Accept-Encoding"] == "gzip"
    _, headers, text = call(server, "GET", "/metrics", None, {"Accept-Encoding": "gzip"})
    assert b"moeserve_http_requests_total" in gzip.decompress(text)


def test_a_bomb_takes_no_memory(featured):
    server = featured[0]
    bomb = gzip.compress(b" " * (256 << 20), 9)
    status, _, text = call(server, "POST", "/v1/completions", bomb, {"Content-Encoding": "gzip"})
    assert status == 413 and json.loads(text)["error"]["code"] == "body_too_large"
    metrics = call(server, "GET", "/metrics")[2].decode()
    held = [line for line in metrics.splitlines()
            if line.startswith("moeserve_request_memory_bytes ")]
    assert float(held[0].rsplit(" ", 1)[1]) == 0


def test_the_template_can_be_hidden():
    server = start_server("--hide-chat-template", "--chat-template",
                          ROOT / "tests/chat/templates/chatml.jinja")
    try:
        assert json.loads(call(server, "GET", "/tokenizer_info")[2])["chat_template"] is None
    finally:
        stop_server(server)


def test_equal_request_ids_give_calls_of_different_ids(featured):
    server = featured[0]
    tool = {"name": "weather", "parameters": {
        "type": "object", "properties": {"place": {"enum": ["Rome"]}}, "required": ["place"]}}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200,
            "tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    responses = {"input": "hi", "max_output_tokens": 200, "tool_choice": "required",
                 "tools": [{"type": "function", **tool}]}
    ids = []
    for _ in range(2):
        same = {"X-Request-Id": "same"}
        answer = json.loads(call(server, "POST", "/v1/chat/completions", chat, same)[2])
        assert answer["id"] == "chatcmpl-same"
        ids += [c["id"] for c in answer["choices"][0]["message"]["tool_calls"]]
        answer = json.loads(call(server, "POST", "/v1/responses", responses, same)[2])
        items = [item for item in answer["output"] if item["type"] == "function_call"]
        assert items
        ids += [item[name] for item in items for name in ("id", "call_id")]
    assert len(set(ids)) == len(ids), ids
