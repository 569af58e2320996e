"""Two replicas behind HAProxy, with the configuration of deploy/haproxy: clients that retry get one
right answer to every request, although the replicas are restarted and killed. MOESERVE_BIN and
MOESERVE_MODEL: see tests/clients/conftest.py."""

import http.client
import importlib.util
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request

import grpc
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("clients_conftest",
                                               ROOT / "tests/clients/conftest.py")
clients = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(clients)

pytestmark = [clients.slow,
              pytest.mark.skipif(shutil.which("haproxy") is None, reason="there is no haproxy")]

RESTARTS = 10
KILLS = 10
HTTP_CLIENTS, STREAM_CLIENTS, GRPC_CLIENTS = 3, 3, 3
TRIES = 30
PROMPTS = [f"Chapter {i}. The" for i in range(12)]
TOKENS = 48


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Replica:
    def __init__(self, http_port, grpc_port):
        self.http_port, self.grpc_port = http_port, grpc_port
        self.process = None

    def start(self):
        self.process = subprocess.Popen(
            [clients.binary(), "serve", "--model", clients.model(), "--served-model-name", "m",
             "--http", f"127.0.0.1:{self.http_port}", "--grpc", f"127.0.0.1:{self.grpc_port}",
             "--access-log", "off", "--log-level", "warning", *clients.device()],
            stdout=subprocess.PIPE, text=True)
        for _ in range(2):
            assert self.process.stdout.readline()

    def end(self, how):
        self.process.send_signal(how)
        status = self.process.wait(timeout=60)
        assert status == (0 if how == signal.SIGTERM else -how)


class Load:
    """Clients that send requests until stop() is called."""

    def __init__(self, http_port, grpc_port, protos, answers):
        self.http_port, self.grpc_port, self.answers = http_port, grpc_port, answers
        self.pb, self.rpc = protos
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self.finished, self.tries, self.errors = 0, 0, []
        kinds = [self.completion] * HTTP_CLIENTS + [self.stream] * STREAM_CLIENTS
        kinds += [self.call] * GRPC_CLIENTS
        self.threads = [threading.Thread(target=self.run, args=(kind, i))
                        for i, kind in enumerate(kinds)]
        for thread in self.threads:
            thread.start()

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    def run(self, kind, number):
        pick = random.Random(number)
        while not self.stopping.is_set():
            prompt = pick.choice(PROMPTS)
            for attempt in range(TRIES):
                try:
                    answer = kind(prompt)
                    break
                except (OSError, http.client.HTTPException, ValueError, grpc.RpcError) as error:
                    last = error
                    time.sleep(min(0.05 * 2**attempt, 1.0))
            else:
                with self.lock:
                    self.errors.append(f"{kind.__name__}: no answer after {TRIES} tries: {last!r}")
                continue
            with self.lock:
                self.finished += 1
                self.tries += attempt + 1
                if answer != self.answers[prompt]:
                    self.errors.append(f"{kind.__name__}: {prompt!r}: {answer!r}")

    def open(self, body):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=60)

    def completion(self, prompt):
        with self.open(body_of(prompt)) as answer:
            return json.load(answer)["choices"][0]["text"]

    def stream(self, prompt):
        with self.open(dict(body_of(prompt), stream=True)) as answer:
            return clients.streamed_text(answer)

    def call(self, prompt):
        sampling = self.pb.SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            stub = self.rpc.InferenceStub(channel)
            text = ""
            for message in stub.Generate(self.pb.GenerateRequest(text=prompt, sampling=sampling),
                                         timeout=60):
                text += message.text
        return text


def body_of(prompt):
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def protos(tmp_path_factory):
    return clients.generated(tmp_path_factory.mktemp("protos"), "moeserve/v1/moeserve")


def test_clients_that_retry_get_one_right_answer(protos, tmp_path):
    ports = free_ports(6)
    replicas = [Replica(ports[0], ports[1]), Replica(ports[2], ports[3])]
    text = (ROOT / "deploy/haproxy/haproxy.cfg").read_text()
    old = (9080, 9081, 9180, 9181)
    for number, port in zip(old, ports[:4]):
        text = text.replace(f" {number}", f" {port}").replace(f":{number}", f":{port}")
    text = text.replace("bind :8080", f"bind 127.0.0.1:{ports[4]}")
    text = text.replace("bind :8081", f"bind 127.0.0.1:{ports[5]}")
    (tmp_path / "haproxy.cfg").write_text(text)
    for replica in replicas:
        replica.start()
    proxy = subprocess.Popen(["haproxy", "-f", tmp_path / "haproxy.cfg"])
    try:
        def answered():
            try:
                url = f"http://127.0.0.1:{ports[4]}/health/ready"
                return urllib.request.urlopen(url, timeout=2).status == 200
            except OSError:
                return False

        assert clients.wait_for(answered, 20)
        # The answers of an undisturbed server.
        answers = {}
        for prompt in PROMPTS:
            request = urllib.request.Request(
                f"http://127.0.0.1:{ports[0]}/v1/completions",
                json.dumps(body_of(prompt)).encode(), {"Content-Type": "application/json"})
            answers[prompt] = json.load(urllib.request.urlopen(request))["choices"][0]["text"]
        load = Load(ports[4], ports[5], protos, answers)
        try:
            for how, times in ((signal.SIGTERM, RESTARTS), (signal.SIGKILL, KILLS)):
                before = load.finished
                for i in range(times):
                    time.sleep(1.0)
                    replicas[i % 2].end(how)
                    time.sleep(0.3)
                    replicas[i % 2].start()
                    time.sleep(1.0)  # until HAProxy has seen that it is ready
                assert load.finished > before
        finally:
            load.stop()
        print(f"{load.finished} requests, {load.tries - load.finished} retries")
        assert not load.errors, load.errors[:10]
        assert load.finished > 100
    finally:
        proxy.terminate()
        proxy.wait()
        for replica in replicas:
            if replica.process.poll() is None:
                replica.end(signal.SIGTERM)
