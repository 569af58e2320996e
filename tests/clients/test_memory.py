"""Tests that requests together cannot hold more memory than --request-memory allows."""

import http.client
import json
import pathlib
import re
import socket
import urllib.error
import urllib.request

import pytest

from conftest import measures_memory, post, slow, start_server, stop_server, wait_for

MIB = 1 << 20
BUDGET = 64  # MiB; new requests get three quarters of it
# The process may grow by this much beyond the budget: caches of the allocator, and the model's own
# buffers, which grow with the first large batch.
SLACK = 64


@pytest.fixture
def small_server():
    server = start_server("--request-memory", str(BUDGET))
    post(server, "/v1/completions", {"prompt": list(range(5, 405)), "max_tokens": 2, "n": 8})
    yield server
    assert stop_server(server) == 0


class Growth:
    """Measures how much the peak memory of a server grows."""

    def __init__(self, server):
        self.folder = pathlib.Path(f"/proc/{server.process.pid}")
        (self.folder / "clear_refs").write_text("5")  # resets the peak
        self.before = self.read("VmRSS")

    def read(self, field):
        text = (self.folder / "status").read_text()
        return int(re.search(field + r":\s+(\d+) kB", text)[1]) // 1024

    def mib(self):
        return self.read("VmHWM") - self.before


def held(server):
    text = urllib.request.urlopen(server.url + "/metrics", timeout=5).read().decode()
    return float(re.search(r"^moeserve_request_memory_bytes (\S+)", text, re.M)[1])


def refusal(server, body):
    """Returns the status and the code of the error that `body`, JSON or bytes, is answered with."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    request = urllib.request.Request(server.url + "/v1/completions", body,
                                     {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    return caught.value.code, json.load(caught.value)["error"]["code"]


@pytest.mark.parametrize("fields", [
    {"echo": True, "logprobs": 20, "n": 128},
    {"prompt_logprobs": 20, "n": 128},
    {"echo": True, "logprobs": 20, "n": 128, "stream": True},
])
def test_answers_about_long_prompts(small_server, fields):
    growth = Growth(small_server)
    body = {"prompt": [i % 200 + 5 for i in range(1000)], "max_tokens": 1, **fields}
    assert refusal(small_server, body) == (413, "request_too_large")
    assert growth.mib() < SLACK


@measures_memory
def test_estimate_covers_what_is_used(small_server):
    """The largest answers that are accepted stay within the budget."""
    growth = Growth(small_server)
    prompt = [i % 200 + 5 for i in range(400)]
    for fields in [{"echo": True, "logprobs": 20}, {"prompt_logprobs": 20},
                   {"prompt_logprobs": 0, "return_token_ids": True}]:
        samples = 128
        while True:
            body = {"prompt": prompt, "max_tokens": 1, "n": samples, **fields}
            try:
                assert len(post(small_server, "/v1/completions", body)["choices"]) == samples
                break
            except urllib.error.HTTPError as error:
                assert error.code == 413
                samples -= max(1, samples // 10)
        assert growth.mib() < BUDGET + SLACK, fields
    assert held(small_server) == 0


@measures_memory
@pytest.mark.parametrize("element", [b"{}", b"[]", b'""', b'{"a":1}'])
def test_json_of_many_small_values(small_server, element):
    growth = Growth(small_server)
    values = b",".join([element] * (15 * MIB // (len(element) + 1)))
    assert refusal(small_server, b'{"prompt":[' + values + b"]}") == (413, "request_too_large")
    assert growth.mib() < BUDGET + SLACK
    assert wait_for(lambda: held(small_server) == 0)


def test_unfinished_bodies(small_server):
    growth = Growth(small_server)
    host, port = small_server.http.rsplit(":", 1)
    # Four of them fill the half of the budget that large bodies may have.
    body = b"x" * (BUDGET // 2 * MIB // 4 - 1)
    head = (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (len(body) + 1))
    clients = []
    for i in range(8):
        client = socket.create_connection((host, int(port)), timeout=10)
        clients.append(client)
        try:
            client.sendall(head + body)
        except OSError:  # refused: the server has answered and closed
            assert i >= 4
        if i < 4:
            assert wait_for(lambda: held(small_server) > (i + 1) * len(body))
    assert growth.mib() < BUDGET + SLACK

    # Requests with small bodies find memory at once.
    for _ in range(20):
        assert post(small_server, "/v1/completions", {"prompt": "The", "max_tokens": 1})

    refused = []

    def served():
        try:
            return post(small_server, "/v1/completions", {"prompt": "The " * (MIB // 4)})
        except urllib.error.HTTPError as error:
            if error.code == 400:
                return True  # its body was read
            assert error.code == 503
            assert error.headers["Retry-After"]
            refused.append(error)
            return False
    # Bodies that have been arriving for five seconds are given up for others.
    assert wait_for(served, 10)
    assert refused
    for client in clients:
        client.close()
    assert wait_for(lambda: held(small_server) == 0)


@measures_memory
def test_many_readers_of_large_answers(small_server):
    """Clients that ask for large answers and do not read them cannot use more memory than allowed."""
    growth = Growth(small_server)
    host, port = small_server.http.rsplit(":", 1)
    body = json.dumps({"prompt": "a b " * 25000, "return_token_strs": True}).encode()
    request = (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
               b"Content-Length: %d\r\n\r\n" % len(body)) + body
    clients = []
    for _ in range(200):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(request)
        clients.append(client)

    def answered():
        text = urllib.request.urlopen(small_server.url + "/metrics", timeout=5).read().decode()
        return float(re.search(r"^moeserve_request_memory_refusals_total (\S+)", text, re.M)[1]) > 20
    assert wait_for(answered, 20)
    assert growth.mib() < BUDGET + SLACK
    assert urllib.request.urlopen(small_server.url + "/health", timeout=1).status == 200
    for client in clients:
        client.close()
    assert wait_for(lambda: held(small_server) == 0)


@slow
def test_memory_goes_back_to_the_system(small_server):
    """glibc would keep what was freed behind blocks that are still in use."""
    growth = Growth(small_server)
    values = b",".join([b'"abcdefgh"'] * (4 * MIB // 10))
    for _ in range(3):
        assert refusal(small_server, b'{"prompt":[' + values + b"]}")[0] == 400
    assert growth.mib() > 24
    assert wait_for(lambda: growth.read("VmRSS") < growth.before + 12, 20)
