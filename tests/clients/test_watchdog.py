"""Tests what the server does while the engine's thread is stopped."""

import concurrent.futures
import contextlib
import ctypes
import os
import pathlib
import signal
import time
import urllib.request

import grpc
import pytest

from conftest import post, slow, start_server, stop_server, wait_for
from test_drain import running, status_of, status_of_post, stream_grpc, stream_http

PTRACE_CONT = 7
PTRACE_DETACH = 17
PTRACE_SEIZE = 0x4206
PTRACE_INTERRUPT = 0x4207
WALL = 0x40000000


def ptrace(request, thread):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(ctypes.c_long(request), ctypes.c_long(thread), None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")


def engine_thread(pid):
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return next(int(x.name) for x in tasks if (x / "comm").read_text() == "engine\n")


def answers(url):
    """Whether the server answers a request that reads the engine's state under its locks."""
    try:
        urllib.request.urlopen(url + "/metrics", timeout=0.25).read()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def stopped_engine(server):
    pid = server.process.pid
    thread = engine_thread(pid)
    state = pathlib.Path(f"/proc/{pid}/task/{thread}/syscall")
    try:
        ptrace(PTRACE_SEIZE, thread)
        for _ in range(1000):
            ptrace(PTRACE_INTERRUPT, thread)
            os.waitpid(thread, WALL)
            # The thread may hold a lock, in a system call one of those whom it wakes with the
            # call. A step that is stuck holds none.
            if state.read_text().startswith("-1 ") and answers(server.url):
                break
            ptrace(PTRACE_CONT, thread)
            time.sleep(0.001)
    except OSError as error:
        pytest.skip(f"a thread of another process cannot be stopped here: {error}")
    try:
        yield thread
    finally:
        with contextlib.suppress(OSError):  # the process may have ended
            ptrace(PTRACE_DETACH, thread)


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def started():
    servers = []

    def start(*options):
        servers.append(start_server(*options))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()


def metric_of(server, name):
    text = urllib.request.urlopen(server.url + "/metrics").read().decode()
    return float(next(x for x in text.splitlines() if x.startswith(name + "{")).split()[-1])


def test_a_stuck_step_is_reported_and_ends_requests(started, pool, protos):
    for attempt in range(3):
        try:
            return stick_and_go_on(started("--engine-watchdog", "0.5"), pool, protos)
        except concurrent.futures.TimeoutError:
            # The thread may have been stopped while it delivered a token, with the lock of one of
            # the two requests. That will not happen three times.
            if attempt == 2:
                raise


def stick_and_go_on(server, pool, protos):
    pb, stubs = protos
    with grpc.insecure_channel(server.grpc) as channel:
        stub = stubs.InferenceStub(channel)
        over_http = pool.submit(stream_http, server.url, 7000)
        over_grpc = pool.submit(stream_grpc, stub, pb, 7000)
        assert wait_for(lambda: running(server.url) == 2, 20)
        with stopped_engine(server):
            assert over_http.result(timeout=20)[2]["code"] == "engine_stuck"
            assert over_grpc.result(timeout=20)[2] == grpc.StatusCode.UNAVAILABLE
            for path in ("/health", "/health/ready", "/health/live"):
                code, _, error = status_of(server.url + path)
                assert (code, error) == (503, "engine_stuck")
            assert metric_of(server, "moeserve_engine_up") == 0
            assert status_of_post(server.url, {"prompt": "a"}) == 503
        assert wait_for(lambda: status_of(server.url + "/health")[0] == 200, 20)
    assert metric_of(server, "moeserve_engine_up") == 1
    assert wait_for(lambda: running(server.url) == 0, 20)
    assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 2})["choices"]
    assert stop_server(server) == 0


def test_a_stopped_process_is_not_a_stuck_engine(started, pool):
    server = started("--engine-watchdog", "0.5")
    stream = pool.submit(stream_http, server.url, 2000)
    assert wait_for(lambda: running(server.url) == 1, 20)
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    server.process.send_signal(signal.SIGCONT)
    assert stream.result(timeout=60) == (2000, True, None)
    assert stop_server(server) == 0


@slow
def test_a_server_whose_engine_is_stuck_still_ends(started, pool):
    server = started("--engine-watchdog", "0", "--drain-timeout", "0.2")
    stream = pool.submit(stream_http, server.url, 7000)
    assert wait_for(lambda: running(server.url) == 1, 20)
    with stopped_engine(server) as thread:
        server.process.send_signal(signal.SIGTERM)
        assert stream.result(timeout=30)[2]["code"] == "draining"
        # The process ends when its tracer has seen the end of the thread.
        assert wait_for(lambda: os.waitpid(thread, WALL | os.WNOHANG)[0] == thread, 10)
        assert server.process.wait(timeout=10) == 1
