"""Tests that a log whose reader has stopped reading, or has gone, does not stop the server."""

import http.client
import os
import signal
import subprocess
import time
import urllib.request

import pytest

import http2
from conftest import generates, start_server


def call(server, path="/health"):
    return urllib.request.urlopen(server.url + path, timeout=5).read().decode()


def dropped(server):
    line = next(x for x in call(server, "/metrics").splitlines()
                if x.startswith("moeserve_log_lines_dropped_total "))
    return int(float(line.split()[-1]))


def make_log_lines(server, count):
    """Makes requests that are refused and logged, with one line each."""
    connection = http.client.HTTPConnection(server.http, timeout=5)
    for _ in range(count):
        connection.request("POST", "/v1/completions", b"{}", {
            "Content-Type": "application/json", "X-Request-Id": "x" * 64})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 400
    connection.close()


def ends(server, seconds):
    server.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert server.process.wait(timeout=seconds + 10) == 0
    assert time.monotonic() - began < seconds


@pytest.fixture
def log_pipe():
    read_end, write_end = os.pipe()
    ends = {"read": read_end, "write": write_end}
    yield ends
    for descriptor in ends.values():
        if descriptor is not None:
            os.close(descriptor)


def start_with(log_pipe):
    server = start_server("--log-format", "json", stderr=log_pipe["write"])
    os.close(log_pipe["write"])
    log_pipe["write"] = None
    return server


def test_log_that_nobody_reads(log_pipe):
    """The pipe holds 64 KiB and the queue 1 MiB; then lines are dropped and requests go on."""
    server = start_with(log_pipe)
    try:
        while dropped(server) == 0:
            make_log_lines(server, 200)
        call(server)
        ends(server, 5)
    finally:
        server.process.kill()


def test_what_the_grpc_library_logs(log_pipe, protos):
    """The library logs each header that it cannot parse. Nobody reads the log: the pipe would be
    full after some 450 lines. The log does not say what the client has sent."""
    server = start_with(log_pipe)
    try:
        for _ in range(5):
            client = http2.Connection(server.grpc)
            for _ in range(200):
                client.open(b"/moeserve.v1.Inference/Generate", end=True,
                            extra=[(b"grpc-encoding", b"no-such-encoding")])
            client.read(0.2)
            client.close()
        assert generates(server, protos)
        ends(server, 5)
        text = os.read(log_pipe["read"], 1 << 20).decode()
        assert "no-such-encoding" not in text
    finally:
        server.process.kill()


def test_log_is_taken_again(log_pipe):
    server = start_with(log_pipe)
    try:
        while dropped(server) == 0:
            make_log_lines(server, 200)
        os.set_blocking(log_pipe["read"], False)
        text = b""
        deadline = time.monotonic() + 20
        while b"lines were dropped" not in text and time.monotonic() < deadline:
            try:
                text += os.read(log_pipe["read"], 1 << 20)
            except BlockingIOError:
                make_log_lines(server, 1)
        assert b"lines were dropped" in text
        ends(server, 5)
    finally:
        server.process.kill()


def test_log_without_a_reader(log_pipe):
    server = start_with(log_pipe)
    try:
        os.close(log_pipe["read"])
        log_pipe["read"] = None
        make_log_lines(server, 5)
        deadline = time.monotonic() + 10
        while dropped(server) == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert dropped(server) > 0
        ends(server, 5)
    finally:
        server.process.kill()


def test_log_is_complete_after_the_end():
    """Lines that were queued when the server ended are written."""
    server = start_server(stderr=subprocess.PIPE)
    make_log_lines(server, 50)
    server.process.send_signal(signal.SIGTERM)
    log = server.process.stderr.read()
    assert server.process.wait(timeout=10) == 0
    assert log.count("endpoint=/v1/completions") == 50
    assert log.rstrip().endswith("serve: stopped")
