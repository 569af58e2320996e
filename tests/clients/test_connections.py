"""Tests that clients with too many or too slow connections do not lock others out."""

import json
import os
import resource
import socket
import time
import urllib.error
import urllib.request

import pytest

from conftest import generates, start_server, stop_server, wait_for

FILES = 256  # file descriptors of the server; it then takes 64 HTTP and 21 gRPC connections


@pytest.fixture
def small_server():
    server = start_server(
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)))
    yield server
    assert stop_server(server) == 0


@pytest.fixture
def connect():
    """Returns a function that opens `count` connections to an address; closes them at the end."""
    opened = []

    def open_all(address, count):
        host, port = address.rsplit(":", 1)
        new = [socket.create_connection((host, int(port)), timeout=5) for _ in range(count)]
        opened.extend(new)
        return new

    yield open_all
    for connection in opened:
        connection.close()


def answers(server, path="/health"):
    return urllib.request.urlopen(server.url + path, timeout=1).status == 200


def complete(server, **fields):
    body = {"prompt": "The", "max_tokens": 2, **fields}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=5))


def test_more_connections_than_descriptors(small_server, connect, protos):
    connect(small_server.grpc, 200)
    connect(small_server.http, 400)
    for _ in range(3):
        assert answers(small_server)
        assert complete(small_server)["choices"]
    # A silent connection of gRPC makes room after 3 s.
    assert generates(small_server, protos, seconds=15)
    assert answers(small_server, "/metrics")


def test_both_ports_recover(small_server, connect, protos):
    for _ in range(3):
        for connection in connect(small_server.http, 400) + connect(small_server.grpc, 100):
            connection.close()
    assert answers(small_server)
    assert generates(small_server, protos, seconds=5)


def test_slow_bodies_do_not_lock_out(small_server, connect):
    """Each client sends a head, and then one byte of the body from time to time."""
    slow = connect(small_server.http, 400)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" \
           b"Content-Length: 1000\r\n\r\n"
    for connection in slow:
        connection.sendall(head)
    for _ in range(5):
        assert answers(small_server)
        assert complete(small_server)["choices"]
        for connection in slow:
            try:
                connection.sendall(b" ")
            except OSError:
                pass  # closed to make room


def test_operators_get_in_when_all_connections_are_busy(small_server, connect):
    """64 streams are being answered; the server takes some more connections, for operators."""
    body = json.dumps({"prompt": "The", "max_tokens": 4000, "ignore_eos": True,
                       "stream": True}).encode()
    busy = connect(small_server.http, 64)
    for connection in busy:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                           b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                           % (len(body), body))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert answers(small_server)
    assert answers(small_server, "/metrics")
    with pytest.raises(urllib.error.HTTPError) as refused:
        complete(small_server)
    assert refused.value.code == 503
    assert json.load(refused.value)["error"]["code"] == "too_many_connections"
    assert refused.value.headers["Retry-After"] == "1"
    busy[0].close()
    end = time.monotonic() + 5
    while True:
        try:
            assert complete(small_server)["choices"]
            break
        except urllib.error.HTTPError as error:
            assert error.code == 503 and time.monotonic() < end
    for connection in busy[1:]:
        connection.close()


def test_silent_grpc_connections_take_one_descriptor_each(small_server, connect):
    """gRPC's part of a connection begins with the client's first bytes."""
    def descriptors():
        return len(os.listdir(f"/proc/{small_server.process.pid}/fd"))

    before = descriptors()
    connect(small_server.grpc, 15)
    assert wait_for(lambda: descriptors() >= before + 15)
    time.sleep(0.2)
    assert descriptors() == before + 15
