"""API keys of the running server: rights of every route and call, limits, reloads, cached prefixes."""

import concurrent.futures
import hashlib
import http.client
import json
import os
import pty
import signal
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import grpc
import openai
import pytest

from conftest import binary, model, start_server, stop_server, wait_for

SCOPES = ("generate", "statistics", "routing", "admin")
PROMPT = "In the beginning God created the heaven and the earth. " * 4


def entry(name, scopes=SCOPES, **fields):
    return {"name": name, "key": f"secret-{name}", "scopes": list(scopes), **fields}


def write_keys(file, entries, replace=True):
    """Writes a key file, as an operator does: in one step, or in place."""
    text = json.dumps({"keys": entries})
    if not replace:
        file.write_text(text)
        return
    new = file.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.rename(file)


@contextmanager
def serving(tmp_path, entries, *arguments):
    """Yields (server, key file, function that returns the log so far)."""
    file = tmp_path / "keys.json"
    write_keys(file, entries)
    log = tmp_path / "log"
    with open(log, "wb") as errors:
        server = start_server("--api-key-file", str(file), *arguments, stderr=errors)
    try:
        yield server, file, log.read_text
    finally:
        assert stop_server(server) == 0


def call(server, method, path, keys=(), body=None):
    """Returns (status, headers, body). Sends one Authorization header for each of `keys`."""
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.putrequest(method, path)
    for key in keys:
        connection.putheader("Authorization", f"Bearer {key}")
    data = json.dumps(body).encode() if body is not None else b""
    if body is not None:
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(data)))
    connection.endheaders(data)
    response = connection.getresponse()
    result = response.status, response.headers, response.read().decode(errors="replace")
    connection.close()
    return result


def complete(server, name, **fields):
    """Returns (status, headers, JSON) of a short completion with the key of `name`."""
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, **fields}
    status, headers, text = call(server, "POST", "/v1/completions", [f"secret-{name}"], body)
    return status, headers, json.loads(text)


def client(server, name, **options):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=f"secret-{name}", max_retries=0,
                         **options)


def metrics(server):
    return urllib.request.urlopen(f"{server.url}/metrics").read().decode()


def sample(server, name):
    for line in metrics(server).splitlines():
        if line.startswith(name + " "):
            return float(line.rsplit(" ", 1)[1])
    return None


def routes():
    """Returns [method, path, scopes] of every route and call of the program."""
    text = subprocess.run([binary(), "serve", "--model", model(), "--print-routes"], check=True,
                          capture_output=True, text=True).stdout
    return [line.split(" ") for line in text.splitlines()]


def test_every_route_and_call_under_every_kind_of_key(tmp_path):
    entries = [entry(scope, [scope]) for scope in SCOPES]
    entries.append(entry("expired", expires="2020-01-01T00:00:00Z"))
    answers = []

    def http_code(server, method, path, keys):
        path = path.replace("/v1/models/*", "/v1/models/test-model").replace("*", "main.js")
        status, _, text = call(server, method, path, keys, {} if method == "POST" else None)
        answers.append(text if status >= 400 else "")
        return status

    def rpc_code(server, method, path, keys):
        with grpc.insecure_channel(server.grpc) as channel:
            metadata = [("authorization", f"Bearer {key}") for key in keys]
            answer = channel.unary_stream(path)(b"", metadata=metadata, timeout=5)
            if path.endswith("/Watch"):
                next(iter(answer))
                answer.cancel()
                return grpc.StatusCode.OK
            try:
                list(answer)
            except grpc.RpcError as error:
                answers.append(error.details())
            return answer.code()

    table = routes()
    assert len(table) > 20
    assert {scope for *_, access in table for scope in access.split("|")} >= {
        "generate", "statistics", "admin", "open"}
    codes = grpc.StatusCode
    with serving(tmp_path, entries) as (server, _, log):
        for method, path, access in table:
            send = rpc_code if method == "RPC" else http_code
            unknown, doubled, denied = ((codes.UNAUTHENTICATED, codes.INVALID_ARGUMENT,
                                         codes.PERMISSION_DENIED)
                                        if method == "RPC" else (401, 400, 403))
            where = f"{method} {path}"
            if access == "open":
                assert send(server, method, path, []) in (200, codes.OK), where
                continue
            assert send(server, method, path, []) == unknown, where
            assert send(server, method, path, ["wrong-key"]) == unknown, where
            assert send(server, method, path, ["secret-expired"]) == unknown, where
            assert send(server, method, path, ["secret-admin"] * 2) == doubled, where
            for scope in SCOPES:
                code = send(server, method, path, [f"secret-{scope}"])
                if scope in access.split("|"):
                    assert code not in (unknown, denied), f"{where} with {scope}"
                else:
                    assert code == denied, f"{where} with {scope}"
        for text in (log(), metrics(server), *answers):
            assert "secret-" not in text
            assert "wrong-key" not in text


def test_nothing_of_prompts_and_keys_leaves_the_request(tmp_path):
    word = "Zanzibarian"
    with serving(tmp_path, [entry("a"), entry("b")]) as (server, _, log):
        assert complete(server, "a", prompt=word)[0] == 200
        client(server, "a").models.list()
        errors = [
            complete(server, "b", prompt=word, max_tokens=10**6),
            complete(server, "b", prompt=word, temperature="hot"),
            complete(server, "b", prompt=word, priority=-1),
            complete(server, "b" + word)]
        assert [status for status, *_ in errors] == [400, 400, 400, 401]
        for text in (log(), metrics(server), *(json.dumps(body) for *_, body in errors)):
            assert word not in text
            assert "secret" not in text
        assert wait_for(lambda: " key=a" in log())
        assert 'key="a"' in metrics(server)


def test_text_of_others_is_for_admins(tmp_path):
    entries = [entry("user", ["generate", "statistics", "routing"]), entry("admin", ["admin"])]
    with serving(tmp_path, entries) as (server, _, _log):
        assert complete(server, "user")[0] == 200
        layout = json.loads(call(server, "GET", "/v1/experts/stats", ["secret-user"])[2])
        layer, block = layout["layers"][0]["layer"], layout["layers"][0]["block"]
        for path in (f"/v1/experts/tokens?layer={layer}&block={block}", "/v1/experts/profile"):
            assert call(server, "GET", path, ["secret-user"])[0] == 403
            assert call(server, "GET", path, ["secret-admin"])[0] == 200


def cached(answer):
    status, _, body = answer
    assert status == 200, body
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_keys_do_not_see_each_others_prompts_in_the_cache(tmp_path, protos):
    pb, rpc = protos
    entries = [entry("a"), entry("b"), entry("c", cache_group="both"),
               entry("d", cache_group="both")]
    with serving(tmp_path, entries) as (server, _, _log):
        def over_grpc(name):
            with grpc.insecure_channel(server.grpc) as channel:
                request = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(max_tokens=2))
                answer = rpc.InferenceStub(channel).Generate(
                    request, metadata=[("authorization", f"Bearer secret-{name}")])
                return max(message.usage.cached_tokens for message in answer)

        assert cached(complete(server, "a")) == 0
        assert cached(complete(server, "a")) > 0
        assert over_grpc("a") > 0
        assert cached(complete(server, "b")) == 0
        assert over_grpc("b") > 0, "HTTP and gRPC share the cache of one key"
        assert cached(complete(server, "c", cache_salt="x")) == 0
        assert cached(complete(server, "d", cache_salt="x")) > 0, "a group shares on purpose"
        assert cached(complete(server, "d")) == 0, "salts of requests still separate"
        assert over_grpc("c") > 0


def test_without_keys_the_cache_is_shared():
    server = start_server()
    try:
        body = {"prompt": PROMPT, "max_tokens": 2}
        assert call(server, "POST", "/v1/completions", [], body)[0] == 200
        status, headers, text = call(server, "POST", "/v1/completions", [], body)
        assert cached((status, headers, json.loads(text))) > 0
    finally:
        assert stop_server(server) == 0


def test_reload_when_the_file_changes(tmp_path):
    with serving(tmp_path, [entry("a"), entry("b")]) as (server, file, log):
        stream = client(server, "a").completions.create(
            model=server.name, prompt=PROMPT, max_tokens=150, stream=True,
            extra_body={"ignore_eos": True})
        chunks = iter(stream)
        next(chunks)
        write_keys(file, [entry("b"), entry("c")])
        assert wait_for(lambda: complete(server, "c")[0] == 200, 10)
        assert complete(server, "a")[0] == 401, "a removed key stops at once"
        assert complete(server, "b")[0] == 200
        last = None
        for chunk in chunks:
            last = chunk
        assert last.choices[0].finish_reason == "length", "what runs goes on"
        assert sample(server, 'moeserve_key_reloads_total{result="ok"}') == 1
        assert sample(server, "moeserve_keys") == 2
        assert "secret" not in log()


def test_a_broken_file_leaves_the_old_keys(tmp_path):
    with serving(tmp_path, [entry("a")]) as (server, file, log):
        failed = 'moeserve_key_reloads_total{result="failed"}'
        for count, broken in enumerate(
                ["", "{", '{"keys": []}', '{"keys": [{"name": "b"}]}', os.mkfifo, None], 1):
            if broken is None:
                file.unlink()
            elif broken is os.mkfifo:  # nobody ever writes to it
                file.unlink()
                os.mkfifo(file)
            else:
                file.write_text(broken)
            server.process.send_signal(signal.SIGHUP)
            assert wait_for(lambda: sample(server, failed) == count), broken
            assert complete(server, "a")[0] == 200
            assert complete(server, "b")[0] == 401
            assert wait_for(lambda: log().count("the old keys stay in force") == count)
        assert " error keys: " in log()
        file.write_text("{")
        assert wait_for(lambda: sample(server, failed) == count + 1), "without a signal"
        write_keys(file, [entry("b")])
        assert wait_for(lambda: complete(server, "b")[0] == 200, 10)
        assert complete(server, "a")[0] == 401
        assert sample(server, failed) == count + 1, "a broken file is read once"
        assert "secret" not in log()


def test_reload_on_hangup(tmp_path):
    with serving(tmp_path, [entry("a")]) as (server, _file, _log):
        server.process.send_signal(signal.SIGHUP)
        assert wait_for(lambda: sample(server, 'moeserve_key_reloads_total{result="ok"}') == 1)
        assert complete(server, "a")[0] == 200


def test_a_hangup_without_keys_changes_nothing():
    server = start_server(stdin=subprocess.DEVNULL)
    for _ in range(3):
        server.process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    body = json.dumps({"prompt": "The", "max_tokens": 2}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", body,
                                     {"Content-Type": "application/json"})
    assert urllib.request.urlopen(request, timeout=10).status == 200
    assert stop_server(server) == 0


def test_a_closed_terminal_ends_the_server():
    """The server drains; the signal alone would end it at once."""
    ours, theirs = pty.openpty()
    server = start_server(stdin=theirs)
    os.close(theirs)
    server.process.send_signal(signal.SIGHUP)
    assert server.process.wait(timeout=20) == 0
    os.close(ours)


def test_limits_survive_a_reload(tmp_path):
    limits = {"limits": {"requests_per_minute": 2}}
    with serving(tmp_path, [entry("a", **limits)]) as (server, file, _log):
        assert [complete(server, "a")[0] for _ in range(3)] == [200, 200, 429]
        write_keys(file, [entry("a", **limits), entry("b")])
        assert wait_for(lambda: complete(server, "b")[0] == 200, 10)
        assert complete(server, "a")[0] == 429


def test_requests_per_minute(tmp_path):
    with serving(tmp_path, [entry("a", limits={"requests_per_minute": 3})]) as (server, _, _log):
        user = client(server, "a")
        for remaining in (2, 1, 0):
            raw = user.completions.with_raw_response.create(model=server.name, prompt="a",
                                                            max_tokens=1)
            assert raw.headers["x-ratelimit-limit-requests"] == "3"
            assert raw.headers["x-ratelimit-remaining-requests"] == str(remaining)
            assert raw.headers["x-ratelimit-reset-requests"].endswith("s")
        with pytest.raises(openai.RateLimitError) as error:
            user.completions.create(model=server.name, prompt="a", max_tokens=1)
        assert error.value.code == "rate_limit_exceeded"
        assert 1 <= int(error.value.response.headers["retry-after"]) <= 20
        assert error.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        with grpc.insecure_channel(server.grpc) as channel:
            answer = channel.unary_unary("/moeserve.v1.Inference/GetModelInfo")
            with pytest.raises(grpc.RpcError) as refused:
                answer(b"", metadata=[("authorization", "Bearer secret-a")])
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            trailers = dict(refused.value.trailing_metadata())
            assert 1 <= int(trailers["retry-after"]) <= 20
            assert trailers["x-error-code"] == "rate_limit_exceeded"
            assert trailers["x-ratelimit-limit-requests"] == "3"
        assert sample(server, 'moeserve_key_refusals_total{key="a",reason="requests"}') == 2
        assert sample(server, 'moeserve_key_requests_total{key="a"}') == 3


@pytest.mark.parametrize("arguments, status", [((), 400), (("--min-priority", "-1000"), 200)])
def test_priority_of_text_keys(tmp_path, arguments, status):
    file = tmp_path / "keys"
    file.write_text("secret-a\n")
    server = start_server("--api-key-file", str(file), *arguments)
    try:
        assert complete(server, "a", priority=-1000)[0] == status
        assert sample(server, 'moeserve_key_requests_total{key="key-1"}') == 1
    finally:
        assert stop_server(server) == 0


def test_digests_serve_as_keys(tmp_path):
    hashed = {"name": "h", "sha256": hashlib.sha256(b"secret-h").hexdigest(),
              "scopes": ["generate"]}
    with serving(tmp_path, [hashed]) as (server, _, _log):
        assert complete(server, "h")[0] == 200
        assert call(server, "GET", "/v1/models", [hashed["sha256"]])[0] == 401


def test_a_file_that_others_can_read_is_warned_about(tmp_path):
    file = tmp_path / "keys"
    file.write_text("secret-a\n")
    for mode, warned in ((0o644, True), (0o600, False)):
        file.chmod(mode)
        log = tmp_path / f"log-{mode}"
        with open(log, "wb") as errors:
            server = start_server("--api-key-file", str(file), stderr=errors)
        assert stop_server(server) == 0
        assert ("every user of this machine can read" in log.read_text()) == warned


def test_a_wrong_file_is_an_error_at_the_start(tmp_path):
    file = tmp_path / "keys.json"
    write_keys(file, [entry("a"), {**entry("b"), "scopes": ["root"]}])
    run = subprocess.run([binary(), "serve", "--model", model(), "--http", "127.0.0.1:0", "--grpc",
                          "127.0.0.1:0", "--api-key-file", file], capture_output=True, text=True)
    assert run.returncode != 0
    assert f"{file}, keys[1] (b), field 'scopes': expected" in run.stderr
    assert "secret" not in run.stderr


def test_reloads_under_load_lose_no_request(tmp_path):
    with serving(tmp_path, [entry("a")]) as (server, file, _log):
        def work(_):
            return [complete(server, "a")[0] for _ in range(15)]

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            results = pool.map(work, range(4))
            for i in range(20):
                write_keys(file, [entry("a"), entry(f"n{i}")], replace=i % 2 == 0)
                os.kill(server.process.pid, signal.SIGHUP)
            assert {status for result in results for status in result} == {200}
