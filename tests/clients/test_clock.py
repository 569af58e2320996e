"""Tests that a wall clock that jumps neither ends requests nor keeps them."""

import concurrent.futures
import mmap
import os
import pathlib
import struct
import time

import grpc
import pytest

from conftest import post, preload, start_server, wait_for
from test_drain import running, stream_grpc, stream_http

SOURCE = pathlib.Path(__file__).with_name("shifted_clock.c")
TOKENS = 1200


class ShiftedServer:
    """A server whose wall clock the test sets."""

    def __init__(self, folder):
        if "TSAN_OPTIONS" in os.environ:
            pytest.skip("the thread sanitizer reads the clock itself")
        library = preload(SOURCE, folder)
        path = folder / "shift"
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._shift = mmap.mmap(file.fileno(), 8)
        environment = {**os.environ, **library, "SHIFTED_CLOCK": str(path)}
        self.server = start_server("--drain-timeout", "60", env=environment)

    def shift(self, seconds):
        self._shift[:] = struct.pack("<q", seconds)


@pytest.fixture
def shifted(tmp_path):
    shifted = ShiftedServer(tmp_path)
    yield shifted
    shifted.server.process.kill()


@pytest.fixture
def stub(shifted, protos):
    pb, stubs = protos
    with grpc.insecure_channel(shifted.server.grpc) as channel:
        yield pb, stubs.InferenceStub(channel)


def created(server):
    return post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1})["created"]


def test_the_clock_of_the_server_can_be_shifted(shifted):
    shifted.shift(3600)
    assert abs(created(shifted.server) - time.time() - 3600) < 60
    shifted.shift(-3600)
    assert abs(created(shifted.server) - time.time() + 3600) < 60


def test_running_requests_do_not_notice(shifted, stub):
    pb, stub = stub
    server = shifted.server
    for seconds in (3600, -3600):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(stream_http, server.url, TOKENS) for _ in range(2)]
            futures += [pool.submit(stream_grpc, stub, pb, TOKENS) for _ in range(2)]
            assert wait_for(lambda: running(server.url) == 4, 20)
            shifted.shift(seconds)
            assert [future.result() for future in futures] == [(TOKENS, True, None)] * 4
        shifted.shift(0)


def test_deadlines_and_the_drain_hold(shifted, stub):
    pb, stub = stub
    shifted.shift(-3600)
    # The server adds the time that the client gives to its own clock.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        request = pb.GenerateRequest(
            text="The", sampling=pb.SamplingParams(max_tokens=7000, ignore_eos=True))
        ended = pool.submit(lambda: list(stub.Generate(request, timeout=0.5)))
        assert wait_for(lambda: running(shifted.server.url) == 1, 20)
        shifted.shift(-7200)
        with pytest.raises(grpc.RpcError) as error:
            ended.result(timeout=20)
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert wait_for(lambda: running(shifted.server.url) == 0, 20)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        last = pool.submit(stream_http, shifted.server.url, TOKENS)
        assert wait_for(lambda: running(shifted.server.url) == 1, 20)
        shifted.server.process.terminate()
        shifted.shift(0)
        assert last.result() == (TOKENS, True, None)
    assert shifted.server.process.wait(timeout=20) == 0
