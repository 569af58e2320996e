"""Sends MOESERVE_LOAD_REQUESTS (default: 1,000) random requests from 32 threads over HTTP and gRPC.
A third of the requests are cancelled at random times.

MOESERVE_BIN should name a server built with a sanitizer: if the sanitizer reports an error, the
server's exit status is not 0 and the test fails.
"""

import http.client
import json
import os
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc

from conftest import model, start_server, stop_server, wait_for

REQUESTS = int(os.environ.get("MOESERVE_LOAD_REQUESTS", "1000"))
THREADS = 32
WORDS = "the Lord God said unto him that an index of a table is a small word in many pages".split()


def prompt(rng):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))


def ask_http(address, rng, cancel):
    """Sends one request; with `cancel`, closes the connection early. Returns "done" or "cancelled".
    Without `cancel`, checks that exactly one complete response arrives."""
    connection = http.client.HTTPConnection(address, timeout=120)
    body = {"prompt": prompt(rng), "max_tokens": rng.randint(1, 64), "stream": rng.random() < 0.5,
            "temperature": rng.choice([0, 1]), "seed": rng.randint(0, 9)}
    if rng.random() < 0.1:
        body["n"] = 2
    if rng.random() < 0.1:
        body["cache_salt"] = "salt"
    if rng.random() < 0.1:
        body["logprobs"] = 2
    if rng.random() < 0.1:
        body["guided_regex"] = rng.choice(["[a-z ]{3,30}", "(yes|no)!", "[0-9]+(,[0-9]+)*"])
    if cancel:
        body.update(stream=True, max_tokens=256)
    connection.request("POST", "/v1/completions", json.dumps(body),
                       {"Content-Type": "application/json"})
    if cancel and rng.random() < 0.5:
        # SO_LINGER with a timeout of 0 makes close() reset the connection.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
        return "cancelled"
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    if cancel:
        answer.read(rng.randint(1, 300))
        connection.close()
        return "cancelled"
    text = answer.read().decode()
    if body["stream"]:
        assert text.count("data: [DONE]") == 1
    else:
        assert len(json.loads(text)["choices"]) == body.get("n", 1)
    connection.close()
    return "done"


def ask_grpc(stub, pb, rng, cancel):
    sampling = pb.SamplingParams(max_tokens=256 if cancel else rng.randint(1, 64),
                                 temperature=rng.choice([0, 1]), seed=rng.randint(0, 9))
    call = stub.Generate(pb.GenerateRequest(text=prompt(rng), sampling=sampling), timeout=120)
    if cancel:
        for _ in range(rng.randint(0, 3)):
            if next(call, None) is None:
                break
        call.cancel()
        return "cancelled"
    finished = [m for m in call if m.finish_reason]
    assert len(finished) == 1
    return "done"


def test_requests_of_which_a_third_are_cancelled(protos):
    pb, stubs = protos
    server = start_server("--max-num-seqs", "16", "--kv-cache-memory", "64MiB")
    try:
        channel = grpc.insecure_channel(server.grpc)
        stub = stubs.InferenceStub(channel)
        outcomes = {"done": 0, "cancelled": 0}
        lock = threading.Lock()

        def one(i):
            rng = random.Random(i)
            cancel = rng.random() < 1 / 3
            if i % 2 == 0:
                outcome = ask_http(server.http, rng, cancel)
            else:
                outcome = ask_grpc(stub, pb, rng, cancel)
            with lock:
                outcomes[outcome] += 1

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(one, range(REQUESTS)))
        assert sum(outcomes.values()) == REQUESTS
        assert outcomes["cancelled"] > REQUESTS / 5

        def sample(name):
            connection = http.client.HTTPConnection(server.http, timeout=60)
            connection.request("GET", "/metrics")
            for line in connection.getresponse().read().decode().splitlines():
                if line.startswith(name + " ") or line.startswith(name + "{"):
                    return float(line.rsplit(" ", 1)[1])
            raise KeyError(name)

        assert wait_for(lambda: sample("moeserve_requests_running") == 0, 60)
        assert wait_for(lambda: sample("moeserve_requests_waiting") == 0, 60)
        assert wait_for(lambda: sample("moeserve_kv_cache_usage_ratio") == 0, 60)
        channel.close()
        print(f"{model().name}: {outcomes}")
    finally:
        status = stop_server(server)
    assert status == 0
