"""Tests what happens to requests over HTTP and gRPC when the server receives SIGTERM."""

import concurrent.futures
import http.client
import json
import signal
import socket
import time
import urllib.error
import urllib.request

import grpc
import pytest

from conftest import ROOT, slow, start_server, stop_server, wait_for

STREAMS = 16  # number of streams over HTTP, and over gRPC
LIMIT = 600  # seconds; long enough for a server that runs with a sanitizer


def stream_http(url, tokens):
    """Returns (number of generated tokens, whether the stream ended with [DONE], error)."""
    body = {"prompt": "The", "max_tokens": tokens, "ignore_eos": True, "stream": True,
            "return_token_ids": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    generated, done, error = 0, False, None
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                done = True
            elif data and not data.startswith(":"):
                event = json.loads(data)
                error = error or event.get("error")
                if event.get("usage"):
                    generated = event["usage"]["completion_tokens"]
    return generated, done, error


def stream_grpc(stub, pb, tokens):
    sampling = pb.SamplingParams(max_tokens=tokens, ignore_eos=True)
    try:
        last = None
        for last in stub.Generate(pb.GenerateRequest(text="The", sampling=sampling), timeout=LIMIT):
            pass
        return last.usage.completion_tokens, bool(last.finish_reason), None
    except grpc.RpcError as error:
        return 0, False, error.code()


def running(url):
    text = urllib.request.urlopen(url + "/metrics").read().decode()
    line = next(x for x in text.splitlines() if x.startswith("moeserve_requests_running{"))
    return float(line.split()[-1])


def status_of(url):
    try:
        return urllib.request.urlopen(url, timeout=5).status, {}, None
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.load(error)["error"]["code"]


def status_of_post(url, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + "/v1/completions", data,
                                     {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture
def load(protos):
    """Provides a function that starts a server and 2 * STREAMS streams of `tokens` tokens. It
    returns (server, futures of the streams, (messages, stub))."""
    pb, stubs = protos
    pool = concurrent.futures.ThreadPoolExecutor(2 * STREAMS)
    servers = []

    def start(tokens, *options):
        server = start_server(*options)
        servers.append(server)
        channel = grpc.insecure_channel(server.grpc)
        stub = stubs.InferenceStub(channel)
        futures = [pool.submit(stream_http, server.url, tokens) for _ in range(STREAMS)]
        futures += [pool.submit(stream_grpc, stub, pb, tokens) for _ in range(STREAMS)]
        assert wait_for(lambda: running(server.url) == 2 * STREAMS, 20)
        return server, futures, (pb, stub)

    yield start
    for server in servers:
        server.process.kill()
    pool.shutdown()


def test_running_requests_finish_and_new_ones_are_refused(load):
    tokens = 1500
    server, futures, (pb, stub) = load(tokens, "--drain-timeout", str(LIMIT))
    server.process.send_signal(signal.SIGTERM)
    assert wait_for(lambda: status_of(server.url + "/health/ready")[0] == 503)
    assert not any(future.done() for future in futures)
    assert status_of(server.url + "/health/live")[0] == 200
    request = urllib.request.Request(server.url + "/v1/completions", b'{"prompt": "a"}',
                                     {"Content-Type": "application/json"})
    code, headers, error = status_of(request)
    assert (code, error) == (503, "draining") and headers["Retry-After"]
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(pb.GenerateRequest(text="a")))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    for future in futures:
        assert future.result() == (tokens, True, None)
    assert server.process.wait(timeout=20) == 0


def test_what_outlives_the_limit_ends_as_an_error(load):
    server, futures, _ = load(6000, "--drain-timeout", "0.3")
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    for future in futures:
        _, done, error = future.result()
        assert not done
        code = error["code"] if isinstance(error, dict) else error
        assert code in ("draining", grpc.StatusCode.UNAVAILABLE)
    assert server.process.wait(timeout=20) == 0
    assert time.monotonic() - begin < 10


def connect(server, receive_buffer=None):
    host, port = server.http.rsplit(":", 1)
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(60)
    client.connect((host, int(port)))
    return client


def send_completion(client, **fields):
    body = json.dumps({"prompt": "The", "ignore_eos": True, **fields}).encode()
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                   b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
                   + body)


def test_an_answer_that_the_drain_ends_is_an_error_of_the_server():
    server = start_server("--drain-timeout", "0.3")
    with connect(server) as client:
        send_completion(client, max_tokens=8000)
        assert wait_for(lambda: running(server.url) == 1, 20)
        server.process.send_signal(signal.SIGTERM)
        with client.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nConnection: close" in head
        assert json.loads(body)["error"]["code"] == "draining"
        assert json.loads(body)["error"]["type"] == "unavailable_error"
    assert server.process.wait(timeout=20) == 0


def events_until_the_end(server, path, body):
    """Returns the data of all events of a stream, with [DONE] as None."""
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        lines = [line.decode().strip() for line in answer]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [None if x == "[DONE]" else json.loads(x) for x in data]


def test_a_stream_of_every_api_ends_with_its_own_error():
    server = start_server("--drain-timeout", "0.3", "--chat-template",
                          str(ROOT / "tests/chat/templates/chatml.jinja"))
    limits = {"stream": True, "ignore_eos": True}
    messages = [{"role": "user", "content": "The"}]
    bodies = {
        "/v1/completions": {"prompt": "The", "max_tokens": 8000, **limits},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 8000, **limits},
        "/v1/responses": {"input": "The", "max_output_tokens": 8000, **limits},
        "/v1/messages": {"model": server.name, "messages": messages, "max_tokens": 8000, **limits},
    }
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        streams = {path: pool.submit(events_until_the_end, server, path, body)
                   for path, body in bodies.items()}
        assert wait_for(lambda: running(server.url) == len(bodies), 20)
        server.process.send_signal(signal.SIGTERM)
        events = {path: stream.result() for path, stream in streams.items()}
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert None not in events[path], path
        assert events[path][-1]["error"]["code"] == "draining", path
        assert not any("error" in event for event in events[path][:-1]), path
    response = events["/v1/responses"]
    assert response[0]["type"] == "response.created"
    assert (response[-1]["type"], response[-1]["code"], response[-1]["param"]) == (
        "error", "draining", None)
    assert [event["sequence_number"] for event in response] == list(range(len(response)))
    assert {"response.completed", "response.incomplete"}.isdisjoint(x["type"] for x in response)
    message = events["/v1/messages"]
    assert message[0]["type"] == "message_start"
    assert message[-1]["type"] == "error"
    assert (message[-1]["error"]["type"], message[-1]["error"]["code"]) == (
        "overloaded_error", "draining")
    assert "message_stop" not in {event["type"] for event in message}
    assert server.process.wait(timeout=20) == 0


def test_every_response_during_the_drain_closes_its_connection():
    server = start_server("--drain-timeout", str(LIMIT))
    pool = concurrent.futures.ThreadPoolExecutor(1)
    stream = pool.submit(stream_http, server.url, 4000)
    assert wait_for(lambda: running(server.url) == 1, 20)
    host, port = server.http.rsplit(":", 1)
    client = http.client.HTTPConnection(host, int(port), timeout=20)
    client.request("GET", "/version")
    answer = client.getresponse()
    answer.read()
    assert answer.getheader("Connection") != "close"
    server.process.send_signal(signal.SIGTERM)
    assert wait_for(lambda: status_of(server.url + "/health")[0] == 503)
    for path in ("/version", "/health", "/metrics", "/v1/models", "/nothing"):
        client.request("GET", path)  # on the open connection first, then on new ones
        answer = client.getresponse()
        answer.read()
        assert answer.getheader("Connection") == "close", path
    assert not stream.done()
    assert stream.result() == (4000, True, None)
    assert server.process.wait(timeout=20) == 0


@slow
def test_the_drain_waits_for_a_slow_reader():
    server = start_server("--drain-timeout", "30")
    with connect(server, 8192) as client:
        send_completion(client, max_tokens=1500, logprobs=20)
        assert wait_for(lambda: b"HTTP/1.1 200" in client.recv(64, socket.MSG_PEEK), 30)
        server.process.send_signal(signal.SIGTERM)
        received = b""
        end = time.monotonic() + 8  # longer than the least time that readers get
        while time.monotonic() < end:
            received += client.recv(1000)
            time.sleep(0.05)
        assert server.process.poll() is None
        with client.makefile("rb") as rest:
            received += rest.read()
    head, _, body = received.partition(b"\r\n\r\n")
    assert len(body) > 1 << 19
    assert len(json.loads(body)["choices"][0]["logprobs"]["tokens"]) == 1500
    assert server.process.wait(timeout=20) == 0


def test_a_second_signal_ends_at_once(load):
    server, futures, _ = load(6000, "--drain-timeout", "600")
    server.process.send_signal(signal.SIGTERM)
    assert wait_for(lambda: status_of(server.url + "/health/ready")[0] == 503)
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=5) == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 2
    for future in futures:
        assert future.exception() or not future.result()[1]


def test_what_is_being_prepared_is_answered():
    server = start_server("--drain-timeout", "60")
    # Compiling these patterns takes long until their automata exceed the size limit. They keep both
    # threads of the pool busy.
    slow = [{"prompt": "a", "guided_regex": f"(.*x{i}y.*){{9}}z(.|a){{14}}"} for i in range(4)]
    good = {"prompt": "a", "guided_regex": "yes|no"}
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        refused = [pool.submit(status_of_post, server.url, body) for body in slow]
        time.sleep(0.3)
        answered = pool.submit(status_of_post, server.url, good)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        assert [future.result() for future in refused] == [400] * 4
        assert answered.result() == 200
    assert server.process.wait(timeout=20) == 0


def test_work_of_clients_that_left_is_dropped():
    server = start_server()
    body = b'{"prompt": "x", "zzz": [' + b'{"a":1},' * 400_000 + b"1]}"
    head = (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body))
    host, port = server.http.rsplit(":", 1)
    begin = time.monotonic()
    assert status_of_post(server.url, body) == 200
    alone = time.monotonic() - begin
    leaving = []
    for _ in range(80):
        leaving.append(socket.create_connection((host, int(port))))
        leaving[-1].sendall(head + body)
    for connection in leaving:
        connection.close()
    begin = time.monotonic()
    assert status_of_post(server.url, body) == 200
    # If the two handler threads also processed the requests of the closed connections, this request
    # would take forty times as long.
    assert time.monotonic() - begin < 12 * alone + 0.5
    assert stop_server(server) == 0
