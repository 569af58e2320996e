"""One client address cannot take the connections of a port from others."""

import http.client
import json
import resource
import select
import socket
import time

import pytest

import http2
from conftest import generates, start_server, stop_server, wait_for

FILES = 256  # file descriptors of the server; it then takes 64 HTTP and 21 gRPC connections
ATTACKER = "127.0.0.2"  # the honest clients have 127.0.0.1


@pytest.fixture
def server():
    started = start_server(
        "--max-connections-per-address", "8",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)))
    yield started
    assert stop_server(started) == 0


@pytest.fixture
def connect():
    """Returns a function that opens `count` connections of the attacker; closes them at the end."""
    opened = []

    def open_all(address, count):
        host, port = address.rsplit(":", 1)
        for _ in range(count):
            opened.append(socket.create_connection((host, int(port)), timeout=5,
                                                   source_address=(ATTACKER, 0)))
        return opened[-count:]

    yield open_all
    for connection in opened:
        connection.close()


def is_open(connection):
    """Returns whether the server has not closed the connection."""
    if not select.select([connection], [], [], 0)[0]:
        return True
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except ConnectionError:
        return False


def wait_for_open(connections, count):
    end = time.monotonic() + 10
    while sum(is_open(connection) for connection in connections) != count:
        assert time.monotonic() < end
        time.sleep(0.01)


def over_limit(server, proto):
    connection = http.client.HTTPConnection(server.http, timeout=5)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    name = f'moeserve_connections_over_limit_total{{proto="{proto}",limit="address"}} '
    return next(float(line[len(name):]) for line in text.splitlines() if line.startswith(name))


def test_busy_connections_of_one_address(server, connect):
    """The attacker's connections are all being answered, so that none of them can be replaced."""
    body = json.dumps({"prompt": "The", "max_tokens": 4000, "ignore_eos": True,
                       "stream": True}).encode()
    busy = connect(server.http, 8)
    for connection in busy:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                           b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                           % (len(body), body))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    more = connect(server.http, 100)
    wait_for_open(more, 0)
    assert over_limit(server, "http") == 100
    kept = [http.client.HTTPConnection(server.http, timeout=5) for _ in range(4)]
    for connection in kept:
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200


def test_idle_connections_of_one_address(server, connect):
    """A client beyond its limit replaces its own connections, and no other client's."""
    kept = http.client.HTTPConnection(server.http, timeout=5)
    kept.request("GET", "/v1/models")
    assert kept.getresponse().read()
    idle = connect(server.http, 100)
    wait_for_open(idle, 8)
    assert over_limit(server, "http") == 92
    assert is_open(kept.sock)
    kept.request("GET", "/v1/models")
    assert kept.getresponse().status == 200


def test_grpc_connections_of_one_address(server, connect, protos):
    idle = connect(server.grpc, 30)
    wait_for_open(idle, 8)
    assert over_limit(server, "grpc") == 22
    assert generates(server, protos, seconds=2)


def test_loopback_is_limited_only_by_the_option(connect):
    started = start_server(
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)))
    idle = connect(started.http, 40)
    assert over_limit(started, "http") == 0
    assert all(is_open(connection) for connection in idle)
    assert stop_server(started) == 0


def test_a_client_that_is_refused_often_is_slowed(server):
    """After 50 refusals in a row, each costs 50 ms. Other addresses do not notice."""

    def refused(source, count):
        began = time.monotonic()
        connection = http.client.HTTPConnection(server.http, timeout=5, source_address=(source, 0))
        for _ in range(count):
            connection.request("POST", "/v1/completions", "{", {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.read() and response.status == 400
        connection.close()
        return time.monotonic() - began

    assert refused(ATTACKER, 91) >= 2
    assert refused("127.0.0.3", 40) < 1.9  # 40 refusals of the attacker would take 2 s


def test_connections_without_requests_are_a_flood(server, connect):
    # Four connections at a time stay below the limit of eight, so each that counts was a flood.
    for address, proto in ((server.grpc, "grpc"), (server.http, "http")):
        end = time.monotonic() + 10
        while over_limit(server, proto) == 0:
            assert time.monotonic() < end
            for connection in connect(address, 4):
                connection.close()
    # New connections of the client are dropped until there have been fewer of them for some time.
    host, port = server.http.split(":")
    for _ in range(10):
        time.sleep(0.5)
        again = http.client.HTTPConnection(host, int(port), timeout=5, source_address=(ATTACKER, 0))
        try:
            again.request("GET", "/v1/models")
            assert again.getresponse().status == 200
            break
        except (ConnectionError, http.client.HTTPException):
            pass  # dropped
        finally:
            again.close()
    else:
        raise AssertionError("the client was kept away")


def test_a_client_that_floods_is_kept_away_for_a_time(server, protos):
    client = http2.Connection(server.grpc, source=ATTACKER)
    while not client.closed and client.goaway() is None:
        stream = client.open(b"/moeserve.v1.Inference/Generate")
        client.send(http2.frame(http2.RST_STREAM, 0, stream, b"\0\0\0\x08"))
    assert "reset" in client.wait_for_goaway()
    client.close()

    def is_refused():
        again = http2.Connection(server.grpc, source=ATTACKER)
        again.read(0.1)
        again.close()
        return again.closed

    assert is_refused()
    assert generates(server, protos)  # another address
    assert wait_for(lambda: not is_refused(), 5)
