#!/usr/bin/env python3
"""Attacks a server with little memory and few descriptors, beside honest clients, and judges it.

  tests/attack/attack.py                # ten attackers for ten minutes
  tests/attack/attack.py --minutes 2    # a shorter one
  tests/attack/attack.py --only slow_readers,rapid_resets

The server runs in a control group of 2 GiB with 1,024 descriptors, with TLS. Nobody reads its log, and
its wall clock jumps. Ten attackers, each with an address and a key of its own, run the patterns of
patterns.py and handshakes.py in a random order. An operator replaces the model and the certificate, and
the key file by a pipe and back, also while there are no attackers. Ten honest clients send requests over HTTP and gRPC, retry those that
fail, and compare every answer. The exit status is 0 if

- the server lives, its memory stays within what its options allow, and no request of an honest client
  is lost or wrong,
- /health answers within a second, each time,
- the honest clients get at least 65 % of the throughput that they have without attackers,
- every change of the operator has its effect,
- 60 seconds later descriptors, threads, connections and memory are back.

The server has one core for itself. All clients have another one, on which the attackers run at the
lowest priority (nice 19): in production they would not take the honest clients' cores. The answers are
so long that the server's core is busy with the honest requests alone. The honest clients of a slow
server leave the attackers more of their core than those of a fast one. So that the attack is equally
strong everywhere, an attacker is paused when it has used more than --attacker-cpu of a core, and its
key may use --attacker-tokens of the tokens that the server generates without attackers.
Needs root for the control group, the packages of tests/requirements.txt, openssl and a C compiler.
MOESERVE_BIN and MOESERVE_MODEL: see tests/clients/conftest.py.
"""

import argparse
import collections
import contextlib
import ctypes
import http.client
import json
import mmap
import multiprocessing
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time

import grpc

import patterns

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/clients"))
import conftest as clients  # noqa: E402
from test_tls import Authority  # noqa: E402

MIB = 1 << 20
GROUP_MEMORY = 2048 * MIB
DESCRIPTORS = 1024
ATTACKERS, HONEST = 10, 10
REQUEST_MEMORY = 256  # MiB; calls over gRPC may hold a quarter as much besides
KV_CACHE = 64  # MiB
SLACK = 192  # MiB that the process may grow beyond that: caches of the allocator, model buffers
HEALTH_SECONDS = 1.0
LEAST_THROUGHPUT = 0.65
CALM_SECONDS = 60
TOKENS = 200
PROMPTS = [f"Chapter {i}. In the beginning" for i in range(8)]
TRIES = 50
CACHE_PROMPTS = 20  # of 4,000 tokens
CHANGE_SECONDS = 8  # between two changes of the operator
EFFECT_SECONDS = 30  # within which a change has its effect


class Group:
    """A control group (version 1 or 2) that limits memory."""

    def __init__(self, limit):
        root = pathlib.Path("/sys/fs/cgroup")
        old = (root / "memory").is_dir()
        self.folder = (root / "memory" if old else root) / f"moeserve-attack-{os.getpid()}"
        self.used = self.folder / ("memory.usage_in_bytes" if old else "memory.current")
        self.folder.mkdir()
        (self.folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))

    def enter(self):
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def bytes(self):
        return int(self.used.read_text())

    def remove(self):
        self.folder.rmdir()


class Process:
    """Reads the state of the server's process."""

    def __init__(self, process):
        self.folder = pathlib.Path(f"/proc/{process.pid}")

    def mib(self):
        return int(re.search(r"VmRSS:\s+(\d+)", (self.folder / "status").read_text())[1]) >> 10

    def descriptors(self):
        return len(os.listdir(self.folder / "fd"))

    def threads(self):
        return len(os.listdir(self.folder / "task"))


class Honest:
    """Clients that send requests until they are stopped, retry, and compare the answers.
    `authority` is the certificate of a server with TLS, else None."""

    def __init__(self, server, protos, key, authority):
        self.server, self.key = server, key
        self.tls = ssl.create_default_context(cafile=str(authority)) if authority else None
        self.credentials = grpc.ssl_channel_credentials(
            authority.read_bytes()) if authority else None
        self.pb, self.rpc = protos
        self.host, port = server.http.split(":")
        self.port = int(port)
        self.answers = {}
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.done, self.retries, self.errors = 0, 0, []
        self.kinds, self.reasons = collections.Counter(), collections.Counter()

    def body(self, prompt, **fields):
        return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
                **fields}

    def connect(self, seconds=60):
        if self.tls is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=seconds)
        return http.client.HTTPSConnection(self.host, self.port, timeout=seconds, context=self.tls)

    def channel(self):
        if self.credentials is None:
            return grpc.insecure_channel(self.server.grpc)
        return grpc.secure_channel(self.server.grpc, self.credentials)

    def get(self, path, seconds=10):
        """Returns (status, text)."""
        connection = self.connect(seconds)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.key}"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def metric(self, name):
        """Returns the sum of the samples of a metric; `name` can have labels."""
        pattern = name if "{" in name else rf"{name}(?:{{.*}})?"
        _, text = self.get("/metrics")
        return sum(float(value) for value in re.findall(rf"^moeserve_{pattern} (\S+)", text, re.M))

    def post(self, body, number=0, path="/v1/completions"):
        connection = self.connect()
        try:
            connection.request("POST", path, json.dumps(body), {
                "Content-Type": "application/json", "Authorization": f"Bearer {self.key}",
                "X-Request-Id": f"honest-{number}"})
            response = connection.getresponse()
            data = response.read()
            if response.status != 200:
                raise ValueError(f"{response.status} {data[:200]}")
            return data
        finally:
            connection.close()

    def completion(self, prompt, number):
        return json.loads(self.post(self.body(prompt), number))["choices"][0]["text"]

    def stream(self, prompt, number):
        return clients.streamed_text(
            self.post(self.body(prompt, stream=True), number).splitlines())

    def call(self, prompt, number):
        sampling = self.pb.SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        request = self.pb.GenerateRequest(text=prompt, sampling=sampling,
                                          request_id=f"honest-{number}")
        with self.channel() as channel:
            stub = self.rpc.InferenceStub(channel)
            metadata = [("authorization", f"Bearer {self.key}")]
            return "".join(message.text for message in
                           stub.Generate(request, timeout=20, metadata=metadata))

    def learn(self):
        for prompt in PROMPTS:
            self.answers[prompt] = self.completion(prompt, 0)

    def fill_cache(self):
        """Has every block of the KV cache used once, which makes its memory the process's own."""
        pick = random.Random(0)
        for _ in range(CACHE_PROMPTS):
            prompt = [pick.randrange(5, 1000) for _ in range(4000)]
            self.post({"prompt": prompt, "max_tokens": 1})

    def run(self, number):
        pick = random.Random(number)
        kind = (self.completion, self.stream, self.call)[number % 3]
        while not self.stopping.is_set():
            prompt = pick.choice(PROMPTS)
            for attempt in range(TRIES):
                if self.stopping.is_set():
                    return
                try:
                    answer = kind(prompt, number)
                    break
                except (OSError, http.client.HTTPException, ValueError, grpc.RpcError) as error:
                    last = error.details() if isinstance(error, grpc.RpcError) else str(error)
                    with self.lock:
                        self.reasons[f"{kind.__name__}: {last[:120]}"] += 1
                    time.sleep(min(0.02 * 2**attempt, 1.0))
            else:
                self.errors.append(f"{kind.__name__}: no answer after {TRIES} tries: {last}")
                continue
            with self.lock:
                self.done += 1
                self.kinds[kind.__name__] += 1
                self.retries += attempt
                if answer != self.answers[prompt]:
                    self.errors.append(f"{kind.__name__}: {prompt!r}: {answer!r}")

    def start(self):
        self.threads = [threading.Thread(target=self.run, args=(i,)) for i in range(HONEST)]
        for thread in self.threads:
            thread.start()

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join()


def probe(honest, stopping, results):
    """Asks for the server's health twice a second, over a new connection each time."""
    while not stopping.is_set():
        began = time.monotonic()
        try:
            good = honest.get("/health")[0] == 200
        except (OSError, http.client.HTTPException) as error:
            good = False
            print(f"health: {error!r}", flush=True)
        results.append((time.monotonic() - began, good))
        time.sleep(0.5)


class Operator:
    """Changes what a server uses, one thing after the other, and sees that it has its effect."""

    def __init__(self, honest, folder, keys, authority):
        self.honest, self.keys, self.folder = honest, keys, folder
        self.pairs = [authority.issue(f"pair-{i}") for i in range(2)] if authority else []
        self.steps = [self.swap, self.pipe_for_keys] + [self.certificate] * bool(authority)
        self.done, self.wrong = collections.Counter(), []

    def wait_until(self, condition, what):
        end = time.monotonic() + EFFECT_SECONDS
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: not within {EFFECT_SECONDS} s")
            time.sleep(0.2)

    def hang_up(self):
        self.honest.server.process.send_signal(signal.SIGHUP)

    def swap(self):
        before = self.honest.metric("model_version")
        for attempt in range(TRIES):
            try:
                self.honest.post({"model": "m"}, path="/v1/models/load")
                break
            except ValueError as error:  # attackers may hold all memory of requests for a moment
                if "out_of_memory" not in str(error) or attempt + 1 == TRIES:
                    raise
                time.sleep(0.1)
        if self.honest.metric("model_version") <= before:
            raise ValueError("the model was not replaced")

    def pipe_for_keys(self):
        """A pipe that nobody writes to, and then the keys again."""
        good = self.keys.read_text()
        failed = self.honest.metric('key_reloads_total{result="failed"}')
        new = self.keys.with_suffix(".new")
        os.mkfifo(new)
        new.rename(self.keys)
        self.hang_up()
        try:
            self.wait_until(lambda: self.honest.metric('key_reloads_total{result="failed"}')
                            > failed, "the refusal of a pipe")
        finally:
            new.write_text(good)
            new.chmod(0o600)
            new.rename(self.keys)
            loaded = self.honest.metric('key_reloads_total{result="ok"}')
            self.hang_up()
        self.wait_until(lambda: self.honest.metric('key_reloads_total{result="ok"}') > loaded,
                        "the keys")

    def certificate(self):
        loaded = self.honest.metric('tls_reloads_total{result="ok"}')
        # A reload between the two files is refused, and the next one takes both.
        for name, source in zip(("tls.crt", "tls.key"), self.pairs[self.done["certificate"] % 2]):
            new = self.folder / f"{name}.new"
            shutil.copy(source, new)
            new.rename(self.folder / name)
        self.hang_up()
        self.wait_until(lambda: self.honest.metric('tls_reloads_total{result="ok"}') > loaded,
                        "the certificate")

    def run(self, stopping):
        turn = 0
        while not stopping.wait(CHANGE_SECONDS):
            step = self.steps[turn % len(self.steps)]
            turn += 1
            try:
                step()
                self.done[step.__name__] += 1
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.wrong.append(f"operator, {step.__name__}: {error!r}")


def attack(number, addresses, tls, stopping, names, counts):
    """What the process of one attacker does."""
    os.nice(19)
    target = patterns.Target(*addresses, f"attacker-{number}-0123456789", f"127.0.0.{10 + number}",
                             stopping, tls)
    patterns.run(target, number, names, counts)


class Pace:
    """Stops processes for a while whenever they have used more than their share of a core."""

    def __init__(self, pids, share):
        self.pids, self.share, self.began = pids, share, time.monotonic()
        self.used, self.paused = dict.fromkeys(pids, 0.0), set()

    def keep(self):
        for pid in self.pids:
            try:
                stat = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except FileNotFoundError:  # it has ended
                continue
            self.used[pid] = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
            ahead = self.used[pid] > 1 + self.share * (time.monotonic() - self.began)
            if ahead != (pid in self.paused):
                os.kill(pid, signal.SIGSTOP if ahead else signal.SIGCONT)
                (self.paused.add if ahead else self.paused.remove)(pid)

    def end(self):
        for pid in self.paused:
            os.kill(pid, signal.SIGCONT)
        share = sum(self.used.values()) / (time.monotonic() - self.began)
        print(f"attackers used {100 * share:.0f} % of a core")


def write_keys(file, tokens_per_minute):
    keys = [{"name": "honest", "key": "honest-key-0123456789",
             "scopes": ["generate", "statistics", "admin"]}]
    limits = {"requests_per_minute": 600, "tokens_per_minute": tokens_per_minute,
              "max_concurrent_requests": 16}
    keys += [{"name": f"attacker-{i}", "key": f"attacker-{i}-0123456789",
              "scopes": ["generate", "statistics", "routing"], "limits": limits}
             for i in range(ATTACKERS)]
    file.write_text(json.dumps({"keys": keys}))
    file.chmod(0o600)


def shifted_clock(folder):
    """Returns (environment, map of the file with the shift) for a server whose wall clock jumps."""
    library = folder / "shifted_clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library,
                    ROOT / "tests/clients/shifted_clock.c", "-ldl"], check=True)
    path = folder / "shift"
    path.write_bytes(bytes(8))
    with path.open("r+b") as file:
        shift = mmap.mmap(file.fileno(), 8)
    return {**os.environ, "LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(path)}, shift


class Run:
    """One server, its honest clients, and what was measured."""

    def __init__(self, folder, group, with_tls):
        self.keys = folder / "keys"
        write_keys(self.keys, 6000)
        environment, self.shift = shifted_clock(folder)

        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            sys.exit("the attack needs two cores")

        def limit():
            group.enter()
            os.sched_setaffinity(0, cores[:1])
            resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))

        authority, tls = None, []
        if with_tls:
            authority = Authority(folder, "authority")
            for name, source in zip(("tls.crt", "tls.key"), authority.issue("first")):
                shutil.copy(source, folder / name)
            tls = ["--tls-cert", folder / "tls.crt", "--tls-key", folder / "tls.key"]
        self.group, self.with_tls = group, with_tls
        log = os.pipe()  # nobody reads it: the log cannot be written soon
        self.server = clients.start_server(
            "--api-key-file", self.keys, "--allow-request-chat-template",
            "--routing-records", "--routing-control", "--model-control",
            "--max-connections-per-address", "100", "--request-memory", str(REQUEST_MEMORY),
            "--kv-cache-memory", f"{KV_CACHE}MiB", "--access-log", "all", "--threads", "1", *tls,
            name="m", env=environment, stderr=log[1], preexec_fn=limit)
        os.sched_setaffinity(0, cores[1:])
        self.process = Process(self.server.process)
        self.honest = Honest(self.server, clients.generated(folder, "moeserve/v1/moeserve"),
                             "honest-key-0123456789",
                             authority.certificate if authority else None)
        self.operator = Operator(self.honest, folder, self.keys, authority)
        self.probes = []
        self.stop_probe = threading.Event()
        self.peak = 0

    def limit_attackers(self, rate, share):
        """Gives each attacker's key a share of the tokens of `rate` honest requests per second."""
        write_keys(self.keys, max(60, round(60 * rate * TOKENS * share)))
        self.server.process.send_signal(signal.SIGHUP)

    def measure(self, seconds, counts=None, pace=None):
        """Watches the server for some time; returns the honest requests per second."""
        done, began = self.honest.done, time.monotonic()
        next_line = began + 30
        while time.monotonic() < began + seconds and self.server.process.poll() is None:
            self.peak = max(self.peak, self.process.mib())
            jumps = counts is not None and random.random() < 0.05
            self.shift[:] = struct.pack("<q", random.choice([-3600, 3600]) if jumps else 0)
            time.sleep(0.25)
            if pace is not None:
                pace.keep()
            if time.monotonic() > next_line:
                next_line += 30
                rate = (self.honest.done - done) / (time.monotonic() - began)
                print(f"{time.monotonic() - began:4.0f} s: {rate:.1f} honest requests/s, "
                      f"{self.process.mib()} MiB, {self.process.descriptors()} descriptors, "
                      f"{sum(counts) if counts else 0} attacks; {dict(self.honest.kinds)}",
                      flush=True)
        return (self.honest.done - done) / (time.monotonic() - began)

    @contextlib.contextmanager
    def operated(self):
        """The operator makes changes meanwhile."""
        stopping = threading.Event()
        operator = threading.Thread(target=self.operator.run, args=(stopping,))
        operator.start()
        try:
            yield
        finally:
            stopping.set()
            operator.join()

    def quiet(self, seconds):
        """Returns the honest requests per second without attackers."""
        with self.operated():
            return self.measure(seconds)

    def state(self):
        metric = self.honest.metric
        return {"descriptors": self.process.descriptors(), "threads": self.process.threads(),
                "MiB": self.process.mib(),
                "request MiB": metric("request_memory_bytes") / MIB,
                "running": metric("requests_running"),
                "waiting": metric("requests_waiting")}

    def attack(self, seconds, only, share):
        # Not a fork, because this process has threads.
        processes = multiprocessing.get_context("spawn")
        stopping = processes.Event()
        names = [p.__name__ for p in patterns.PATTERNS if not only or p.__name__ in only]
        counts = processes.Array(ctypes.c_int64, len(names))
        workers = [processes.Process(target=attack, args=(
            i, (self.server.http, self.server.grpc), self.with_tls, stopping, names, counts))
            for i in range(ATTACKERS)]
        for worker in workers:
            worker.start()
        pace = Pace([worker.pid for worker in workers], share)
        with self.operated():
            rate = self.measure(seconds, counts, pace)
        pace.end()
        stopping.set()
        end = time.monotonic() + 2 * patterns.PATTERN_SECONDS
        for worker in workers:
            worker.join(max(0, end - time.monotonic()))
            worker.kill()
        done = dict(zip(names, counts))
        print("patterns:", done)
        return rate, done


def judge(run, before, after, rates, counts):
    """Returns the list of what is wrong."""
    quiet = statistics.mean((rates[0], rates[2]))
    slowest = max(seconds for seconds, _ in run.probes)
    bad_probes = sum(not good or seconds > HEALTH_SECONDS for seconds, good in run.probes)
    most = before["MiB"] + KV_CACHE + REQUEST_MEMORY * 5 // 4 + SLACK
    print(f"{run.honest.done} honest requests, {run.honest.retries} retries; "
          f"{rates[0]:.1f} and {rates[2]:.1f} requests/s without attackers, {rates[1]:.1f} with them: "
          f"{rates[1] / quiet:.2f}")
    print(f"answers: {dict(run.honest.kinds)}")
    for reason, count in run.honest.reasons.most_common(10):
        print(f"retried {count} times: {reason}")
    print(f"{len(run.probes)} health checks, slowest {slowest:.2f} s; memory at most {run.peak} MiB "
          f"(limit {most}); before {before}; after {after}")
    print(f"operator: {dict(run.operator.done)}")
    wrong = [f"honest: {error}" for error in run.honest.errors[:10]] + run.operator.wrong[:10]
    if len(run.operator.done) < len(run.operator.steps):
        wrong.append("not every change of the operator was made")
    if bad_probes:
        wrong.append(f"{bad_probes} health checks failed or took more than {HEALTH_SECONDS} s")
    if run.peak > most:
        wrong.append("memory was not bounded")
    if rates[1] < LEAST_THROUGHPUT * quiet:
        wrong.append("honest clients got too little")
    if not all(counts.values()):
        wrong.append("not every pattern ran")
    # The honest clients go on meanwhile.
    slack = {"descriptors": HONEST, "threads": 4, "MiB": 64, "request MiB": 1, "running": HONEST,
             "waiting": HONEST}
    wrong += [f"{name} is {after[name]}, and was {before[name]}" for name in before
              if after[name] > before[name] + slack.get(name, 0)]
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--quiet-seconds", type=float, default=60,
                        help="duration of the measurement without attackers, before and after")
    parser.add_argument("--only", type=lambda text: text.split(","), help="patterns to run")
    parser.add_argument("--attacker-cpu", type=float, default=0.03,
                        help="share of a core that one attacker may use")
    parser.add_argument("--attacker-tokens", type=float, default=0.005,
                        help="share of the server's tokens per minute that one attacker may use")
    parser.add_argument("--plain", action="store_true", help="without TLS")
    options = parser.parse_args()
    group = Group(GROUP_MEMORY)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(pathlib.Path(folder), group, not options.plain)
        run.honest.learn()
        run.honest.fill_cache()
        run.honest.start()
        prober = threading.Thread(target=probe,
                                  args=(run.honest, run.stop_probe, run.probes))
        prober.start()
        try:
            run.measure(10)  # warm up
            rates = [run.quiet(options.quiet_seconds)]
            before = run.state()
            run.limit_attackers(rates[0], options.attacker_tokens)
            rate, counts = run.attack(60 * options.minutes, options.only, options.attacker_cpu)
            time.sleep(CALM_SECONDS)
            rates += [rate, run.quiet(options.quiet_seconds)]
            after = run.state()
        finally:
            run.honest.stop()
            run.stop_probe.set()
            prober.join()
            alive = run.server.process.poll() is None
            status = clients.stop_server(run.server) if alive else run.server.process.returncode
            group.remove()
    wrong = judge(run, before, after, rates, counts)
    if not alive or status != 0:
        wrong.append(f"the server ended with status {status}{'' if alive else ' during the attack'}")
    for line in wrong:
        print(f"WRONG: {line}")
    print("the server stood" if not wrong else "the server did not stand")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
