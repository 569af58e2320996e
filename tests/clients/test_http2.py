"""Tests that clients cannot use up the server by what they send to the gRPC port."""

import pathlib
import re
import socket
import time
import urllib.request

import grpc
import pytest

import http2
from conftest import generates, measures_memory, slow, start_server, stop_server, wait_for

GENERATE = b"/moeserve.v1.Inference/Generate"
WATCH = b"/grpc.health.v1.Health/Watch"
MEMORY = 64  # MiB of --request-memory; calls over gRPC may hold a quarter as much
SLACK = 64  # MiB by which the process may grow besides


@pytest.fixture
def small_server():
    server = start_server("--request-memory", str(MEMORY))
    yield server
    assert stop_server(server) == 0


@pytest.fixture
def connect(small_server):
    """Returns a function that opens a connection, which is closed at the end."""
    opened = []

    def new(**options):
        opened.append(http2.Connection(small_server.grpc, **options))
        return opened[-1]

    yield new
    for connection in opened:
        connection.close()


def memory(server):
    text = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) // 1024


def dropped(server):
    text = urllib.request.urlopen(server.url + "/metrics", timeout=5).read().decode()
    return int(re.search(r"^moeserve_grpc_connections_dropped_total (\d+)", text, re.M)[1])


def test_rapid_resets(small_server, connect, protos):
    before = memory(small_server)
    for _ in range(6):
        client = connect()
        for _ in range(2000):
            stream = client.open(GENERATE)
            client.send(http2.frame(http2.RST_STREAM, 0, stream, b"\0\0\0\x08"))
            if client.goaway() is not None:
                break
        assert "reset" in client.wait_for_goaway()
    assert memory(small_server) < before + SLACK
    assert dropped(small_server) == 6
    assert generates(small_server, protos)


def test_endless_header_block(small_server, connect, protos):
    client = connect()
    client.send(http2.frame(http2.HEADERS, 0, 1, http2.call_headers(GENERATE)))
    sent = 0
    while client.goaway() is None and sent < 10000:
        client.send(http2.frame(http2.CONTINUATION, 0, 1, http2.header(b"x-a", b"b" * 100)))
        sent += 1
    assert sent < 10000
    assert "header block" in client.wait_for_goaway()
    assert generates(small_server, protos)


def test_streams_beyond_the_limit_without_acknowledged_settings(small_server, connect, protos):
    before = memory(small_server)
    clients = []
    for _ in range(8):
        client = connect(acknowledge=False)
        clients.append(client)
        for _ in range(1000):
            stream = client.open(WATCH)
            client.send(http2.frame(http2.DATA, http2.END_STREAM, stream, http2.message(b"")))
            if client.goaway() is not None:
                break
        assert "open streams" in client.wait_for_goaway()
    assert memory(small_server) < before + SLACK
    assert generates(small_server, protos)


def test_watch_streams_within_the_limit(small_server, connect, protos):
    """Many clients that stay within the limits of one connection are limited together."""
    before = memory(small_server)
    clients = [connect() for _ in range(12)]
    for client in clients:
        for _ in range(250):
            stream = client.open(WATCH)
            client.send(http2.frame(http2.DATA, http2.END_STREAM, stream, http2.message(b"")))
    assert memory(small_server) < before + SLACK

    def open_connections():
        for client in clients:
            client.read(0.02)
        return sum(not client.closed for client in clients)

    # Half of 16 MiB holds 512 streams: at most two full connections and the rest of another.
    assert wait_for(lambda: open_connections() <= 3)
    assert generates(small_server, protos)


@measures_memory
def test_unfinished_messages(small_server, connect, protos):
    """Calls whose messages never end, from clients that keep to HTTP/2's windows."""
    before = memory(small_server)
    clients = [connect() for _ in range(12)]
    for client in clients:
        for _ in range(250):
            stream = client.open(GENERATE)
            # The message is said to have 15 MiB.
            if not client.send_data(stream, b"\0\0\xf0\0\0" + b"x" * 60000):
                break
    assert memory(small_server) < before + SLACK
    assert dropped(small_server) > 0
    assert generates(small_server, protos)


@pytest.mark.parametrize("flood", [
    http2.frame(http2.PING, http2.ACK, 0, b"12345678"), http2.frame(http2.SETTINGS, 0, 0),
    http2.frame(8, 0, 0, b"\0\0\0\1"), http2.frame(2, 0, 3, b"\0" * 5)])
def test_floods_of_frames_without_content(small_server, connect, protos, flood):
    client = connect()
    sent = 0
    while client.goaway() is None and not client.closed and sent < 1000000:
        client.send(flood * 100)
        sent += 100
    assert sent < 1000000
    assert generates(small_server, protos)


def test_other_protocols(small_server, protos):
    host, port = small_server.grpc.rsplit(":", 1)
    for text in [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0", b"\0" * 100]:
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.sendall(text)
            while client.recv(4096):
                pass
    assert generates(small_server, protos)


@slow
def test_silent_clients_are_closed(small_server, protos):
    """A client that does not send its preface is closed after ten seconds."""
    host, port = small_server.grpc.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as client:
        began = time.monotonic()
        while client.recv(4096):
            pass
        assert 9 < time.monotonic() - began < 15


@measures_memory
def test_memory_is_given_back(small_server, connect, protos):
    """After a connection is gone, its calls hold nothing: the same load fits again and again."""
    for _ in range(10):  # 31 MiB in all
        client = connect()
        for _ in range(200):
            client.open(GENERATE)
        client.read(0.05)
        assert not client.closed
        client.close()
        assert generates(small_server, protos)
    assert dropped(small_server) == 0


def test_more_calls_than_streams_over_one_connection(small_server, protos):
    """A client that keeps to the limit of open streams may ask for more calls than that."""
    pb, rpc = protos
    request = pb.TokenizeRequest(text="The " * 200)
    generate = pb.GenerateRequest(text="The", sampling=pb.SamplingParams(max_tokens=1))
    with grpc.insecure_channel(small_server.grpc) as channel:
        stub = rpc.InferenceStub(channel)
        calls = [stub.Tokenize.future(request, timeout=30) for _ in range(1000)]
        streams = [stub.Generate(generate, timeout=30) for _ in range(600)]
        assert all(len(call.result().token_ids) > 100 for call in calls)
        assert all(len(list(stream)) >= 1 for stream in streams)
    assert dropped(small_server) == 0


def test_clients_that_cancel(small_server, protos):
    """Every stream of a full connection may be cancelled at once."""
    pb, rpc = protos
    request = pb.GenerateRequest(text="The", sampling=pb.SamplingParams(max_tokens=4000))
    with grpc.insecure_channel(small_server.grpc) as channel:
        stub = rpc.InferenceStub(channel)
        # The server may take calls in another order than they were sent, and it answers 64 at a time.
        # So the first call is known to run before the others begin.
        streams = [stub.Generate(request, timeout=60)]
        next(iter(streams[0]))
        streams += [stub.Generate(request, timeout=60) for _ in range(249)]
        time.sleep(0.2)
        for stream in streams:
            stream.cancel()
        assert len(list(stub.Generate(pb.GenerateRequest(
            text="The", sampling=pb.SamplingParams(max_tokens=2)), timeout=30))) > 0
    assert dropped(small_server) == 0
