#!/usr/bin/env python3
"""Serves mixed traffic for a long time and checks that memory, descriptors and latency stay flat.

Good requests over HTTP and gRPC, bad ones, wrong keys and clients that leave, all over TLS; every
few seconds a model is replaced, or the key file or the certificate changes.

  tests/soak/soak.py --minutes 30
  tests/soak/soak.py --minutes 420              # the long one
  tests/soak/soak.py --minutes 5 --plant-leak   # exit status 0 if a leak of 1 kB per request is found

Needs the packages of tests/requirements.txt, openssl, and a C compiler for --plant-leak. MOESERVE_BIN
and MOESERVE_MODEL: see tests/clients/conftest.py.
"""

import argparse
import collections
import http.client
import importlib.util
import json
import os
import pathlib
import random
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import grpc

ROOT = pathlib.Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("clients_conftest",
                                               ROOT / "tests/clients/conftest.py")
clients = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(clients)

KEY = "soak-key-0123456789"
# A flat server may grow by so much per request, because the allocator's free memory varies.
MAX_GROWTH = 300  # bytes
MAX_DESCRIPTORS = 40  # more at the end than at the start
MAX_SLOWDOWN = 1.5  # of the median latency, last third against first third
WARM_UP = 0.25  # part of the run that is not judged
SAMPLE_SECONDS = 2


def certificate(folder, name):
    """Makes a self-signed certificate; returns (certificate, key)."""
    files = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                    "ec_paramgen_curve:P-256", "-nodes", "-keyout", files[1], "-out", files[0],
                    "-days", "30", "-subj", "/CN=localhost", "-addext",
                    "subjectAltName=IP:127.0.0.1,DNS:localhost"], check=True, capture_output=True)
    return files


class Soak:
    def __init__(self, folder, server, protos):
        self.folder, self.server = folder, server
        self.pb, self.rpc = protos
        self.host, port = server.http.split(":")
        self.port = int(port)
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self.counts = collections.Counter()
        self.problems = []
        self.tls = ssl.create_default_context()
        self.tls.check_hostname, self.tls.verify_mode = False, ssl.CERT_NONE

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def post(self, path, body, key=KEY, read=True):
        connection = http.client.HTTPSConnection(self.host, self.port, context=self.tls, timeout=60)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, data, {"Content-Type": "application/json",
                                                    "Authorization": f"Bearer {key}"})
            response = connection.getresponse()
            if not read:
                response.read(64)
                return response.status, None
            return response.status, response.read()
        finally:
            connection.close()

    # Each of these sends one request and returns what came of it.

    def completion(self, pick):
        body = {"prompt": f"Chapter {pick.randrange(1000)}", "max_tokens": 8}
        status, _ = self.post("/v1/completions", body)
        return "ok" if status == 200 else f"completion {status}"

    def infer(self, pick):
        body = {"text_input": f"Part {pick.randrange(1000)}", "max_tokens": 8}
        status, _ = self.post("/v2/models/m/generate", body)
        return "ok" if status == 200 else f"infer {status}"

    def stream_left(self, _):
        body = {"prompt": "The", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        status, _ = self.post("/v1/completions", body, read=False)
        return "left" if status == 200 else f"stream {status}"

    def bad(self, pick):
        body = pick.choice([b"{", b"[]", {"prompt": "x", "temperature": "hot"}, {"prompt": 1},
                            {"prompt": [1] * 20000}, {"prompt": "x", "model": "none"},
                            {"prompt": "x", "n": 10**9}])
        status, _ = self.post("/v1/completions", body)
        return "refused" if status in (400, 404, 413) else f"bad {status}"

    def wrong_key(self, _):
        status, _ = self.post("/v1/completions", {"prompt": "x"}, key="wrong-key-0123456789")
        return "refused" if status == 401 else f"wrong key {status}"

    def cut(self, _):
        plain = socket.create_connection((self.host, self.port), timeout=20)
        plain.sendall(b"\x16\x03\x01\x00\xff")
        plain.close()
        return "left"

    def call(self, pick):
        credentials = grpc.ssl_channel_credentials((self.folder / "live.crt").read_bytes())
        sampling = self.pb.SamplingParams(max_tokens=8)
        request = self.pb.GenerateRequest(text=f"Verse {pick.randrange(1000)}", sampling=sampling)
        with grpc.secure_channel(self.server.grpc, credentials) as channel:
            stub = self.rpc.InferenceStub(channel)
            messages = list(stub.Generate(request, timeout=60,
                                          metadata=[("authorization", f"Bearer {KEY}")]))
        return "ok" if messages[-1].finish_reason else "call without an end"

    def run_client(self, number):
        pick = random.Random(number)
        kinds = [self.completion] * 4 + [self.infer] * 2 + [self.call] * 1
        kinds += [self.stream_left, self.bad, self.wrong_key, self.cut]
        while not self.stopping.is_set():
            kind = pick.choice(kinds)
            try:
                result = kind(pick)
            except grpc.RpcError as error:
                # The certificate has changed since it was read.
                unavailable = error.code() == grpc.StatusCode.UNAVAILABLE
                result = "certificate changed" if unavailable else f"call {error.code()}"
            except (OSError, http.client.HTTPException) as error:
                result = f"{kind.__name__}: {error!r}"
            self.count("requests")
            self.count(result)
            if result not in ("ok", "left", "refused", "certificate changed"):
                self.problems.append(result)

    def run_changes(self):
        certificates = [certificate(self.folder, f"c{i}") for i in range(2)]
        for step in range(10**9):
            if self.stopping.wait(5):
                return
            if step % 3 == 0:
                status, text = self.post("/v1/models/load", {"model": "m"})
                if status != 200:
                    self.problems.append(f"swap: {status} {text}")
                self.count("swaps")
            elif step % 3 == 1:
                write_keys(self.folder, f"other-key-{step:010d}")
                self.count("key files")
            else:
                for kind, source in zip(("crt", "key"), certificates[step % 2]):
                    new = self.folder / f"new.{kind}"
                    shutil.copy(source, new)
                    new.rename(self.folder / f"live.{kind}")
                self.count("certificates")

    def sample(self):
        """Returns (requests, resident bytes, descriptors, seconds of a request)."""
        process = self.server.process.pid
        pages = int(pathlib.Path(f"/proc/{process}/statm").read_text().split()[1])
        descriptors = len(os.listdir(f"/proc/{process}/fd"))
        began = time.monotonic()
        self.post("/v1/completions", {"prompt": "The", "max_tokens": 4, "temperature": 0})
        return (self.counts["requests"], pages * os.sysconf("SC_PAGE_SIZE"), descriptors,
                time.monotonic() - began)


def write_keys(folder, other):
    keys = {"keys": [{"name": "soak", "key": KEY, "scopes": ["generate", "statistics", "admin"]},
                     {"name": "other", "key": other, "scopes": ["generate"]}]}
    new = folder / "keys.new"
    new.write_text(json.dumps(keys))
    new.chmod(0o600)
    new.rename(folder / "keys")


def growth(samples):
    """Returns the median slope between all pairs of samples (Theil and Sen), in bytes per request."""
    step = max(1, len(samples) // 200)
    chosen = samples[::step]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(chosen) for b in chosen[i + 1:]
              if b[0] > a[0]]
    return statistics.median(slopes)


def judge(samples):
    """Returns (list of what is not flat, description)."""
    judged = samples[int(WARM_UP * len(samples)):]
    third = max(1, len(judged) // 3)
    per_request = growth(judged)
    descriptors = judged[-1][2] - judged[0][2]
    slowdown = (statistics.median(s[3] for s in judged[-third:]) /
                statistics.median(s[3] for s in judged[:third]))
    text = (f"memory {judged[0][1] >> 20} MiB to {judged[-1][1] >> 20} MiB, {per_request:+.0f} bytes "
            f"per request; descriptors {descriptors:+d}; latency times {slowdown:.2f}")
    bad = []
    if per_request > MAX_GROWTH:
        bad.append("memory")
    if descriptors > MAX_DESCRIPTORS:
        bad.append("descriptors")
    if slowdown > MAX_SLOWDOWN:
        bad.append("latency")
    return bad, text


def planted(folder):
    library = folder / "leak.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library,
                    pathlib.Path(__file__).with_name("leak.c"), "-ldl"], check=True)
    return dict(os.environ, LD_PRELOAD=str(library))


def soak(options, folder):
    for kind, source in zip(("crt", "key"), certificate(folder, "first")):
        shutil.copy(source, folder / f"live.{kind}")
    write_keys(folder, "other-key-first-0")
    environment = planted(folder) if options.plant_leak else dict(os.environ)
    with open(options.log or os.devnull, "w") as log:
        server = clients.start_server(
            "--model-control", "--api-key-file", folder / "keys", "--tls-cert",
            folder / "live.crt", "--tls-key", folder / "live.key", "--access-log", "off",
            name="m", env=environment, stderr=log)
    protos = clients.generated(folder, "moeserve/v1/moeserve")
    run = Soak(folder, server, protos)
    threads = [threading.Thread(target=run.run_client, args=(i,)) for i in range(options.clients)]
    threads.append(threading.Thread(target=run.run_changes))
    samples = []
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + 60 * options.minutes
        while time.monotonic() < end and server.process.poll() is None:
            samples.append(run.sample())
            time.sleep(SAMPLE_SECONDS)
            if len(samples) % 30 == 0 and len(samples) > 8:
                print(f"{run.counts['requests']} requests; {judge(samples)[1]}", flush=True)
    finally:
        run.stopping.set()
        for thread in threads:
            thread.join()
        status = clients.stop_server(server)
    bad, text = judge(samples)
    print(json.dumps(run.counts, indent=1))
    print(f"{run.counts['requests']} requests; {text}; exit status {status}")
    if options.plant_leak:
        print("the planted leak was found" if "memory" in bad else "the planted leak was NOT found")
        return "memory" in bad
    for problem, count in collections.Counter(run.problems).most_common(10):
        print(f"problem: {count} times {problem}")
    if bad:
        print(f"NOT flat: {', '.join(bad)}")
    return not bad and not run.problems and status == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--plant-leak", action="store_true")
    parser.add_argument("--log", help="file for the server's log")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(0 if soak(options, pathlib.Path(folder)) else 1)


if __name__ == "__main__":
    main()
