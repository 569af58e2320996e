#!/usr/bin/env python3
"""Checks that answers are the same to the bit, whatever else a server does.

  tests/soak/steady.py                  # half an hour
  tests/soak/steady.py --minutes 1      # a short one

A server with TLS, API keys and four models has clients of every interface, good and bad, and an
operator who swaps models, replaces keys and certificates and reloads. Beside them, rounds of about
60 probes run. Every answer is compared with that of an idle server without drafts and with memory
to spare: texts, token ids, log-probabilities and routes to the last bit, finish reasons, usage.
README.md has the details. The exit status is 0 if

- no answer differs, no status is unexpected, and every change of the operator has its effect,
- the expert statistics of the model `account` are exactly what it computed,
- descriptors and threads are back at the end, and from the fifth minute on memory does not grow,
- the server drains and ends with status 0 when it is told to.

Needs the packages of tests/requirements.txt and openssl. MOESERVE_BIN: see
tests/clients/conftest.py.
"""

import argparse
import json
import os
import pathlib
import queue
import random
import re
import shutil
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/clients"))
sys.path.insert(0, str(ROOT / "tests/soak"))
import conftest as clients  # noqa: E402
import operator_changes as changes  # noqa: E402
import probes  # noqa: E402
from account import Account  # noqa: E402
from session import Session  # noqa: E402
from test_tls import Authority  # noqa: E402
from traffic import Client, Report  # noqa: E402

CHECKPOINTS = ROOT / "deploy/models"
FIRST, *FURTHER = probes.MODELS
# Both servers have these options. They do not influence the speed of a server.
COMMON = {"max-model-len": 1536, "allow-request-chat-template": True, "routing-records": True,
          "routing-control": True, "access-log": "off",
          "chat-template": ROOT / "tests/chat/templates/chatml.jinja"}
# So little memory that sequences are preempted, and a sample of every step.
BUSY = {"kv-cache-memory": "2MiB", "max-num-seqs": 12, "router-stats-interval": 1,
        "hidden-samples": 64, "model-control": True}
SAMPLE_SECONDS = 2
EXTRA_SECONDS = 600  # for what has not happened yet, on a slow machine or with a sanitizer
SETTLED_SECONDS = 300  # after which memory should not grow any more
MAX_GROWTH = 64  # MiB after that
# More at the end than at the beginning. gRPC starts some threads when calls come.
MAX_DESCRIPTORS, MAX_THREADS = 24, 8
PROBE_CLIENTS, ACCOUNT_CLIENTS = 2, 2


def model_options(models):
    return [f"{name}={CHECKPOINTS / folder}" for name, folder in models.items()]


def start_idle():
    first, *further = model_options(probes.MODELS)
    options = []
    for option, value in COMMON.items():
        options += [f"--{option}"] if value is True else [f"--{option}", str(value)]
    for model in further:
        options += ["--model", model]
    return clients.start_server(*options, "--draft-tokens", "0", name=None, folder=first)


def idle_answers(v1, v2, report):
    """Returns {name: answer} of all probes on an idle server, which answers twice alike."""
    server = start_idle()
    session = Session(server, v1, v2)
    answers = {}
    try:
        for name, probe in probes.probes(v1[0]):
            answers[name] = probe(session)
        for name, probe in probes.probes(v1[0]):
            for text in probes.differences(answers[name], probe(session)):
                report.problem(f"the idle server: {name}: {text}")
    finally:
        session.close()
        status = clients.stop_server(server)
    if status != 0:
        report.problem(f"the idle server ended with status {status}")
    return answers


class Process:
    """Samples the memory, descriptors and threads of a process."""

    def __init__(self, pid):
        self.folder = pathlib.Path(f"/proc/{pid}")
        self.began = time.monotonic()
        self.samples = []

    def sample(self):
        status = (self.folder / "status").read_text()
        mib = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024
        descriptors, threads = (len(os.listdir(self.folder / name)) for name in ("fd", "task"))
        self.samples.append((time.monotonic() - self.began, mib, descriptors, threads))
        return self.samples[-1]

    def memory_at(self, seconds, width=30):
        """Returns the least memory in some seconds from then on: models that are being replaced
        are in memory twice."""
        return min((mib for at, mib, *_ in self.samples if seconds <= at <= seconds + width),
                   default=self.samples[-1][1])


class Prober:
    """Compares the answers of probes, in rounds of all of them."""

    def __init__(self, answers, report):
        self.answers, self.report = answers, report
        self.waiting = queue.SimpleQueue()
        self.compared, self.lock = 0, threading.Lock()

    def next(self, everything, pick):
        with self.lock:
            if self.waiting.empty():
                for probe in pick.sample(everything, len(everything)):
                    self.waiting.put(probe)
            return self.waiting.get()

    def compare(self, name, probe, session):
        try:
            wrong = probes.differences(self.answers[name], probe(session))
        except Exception as error:
            wrong = [repr(error)]
        for text in wrong:
            self.report.problem(f"probe {name}: {text}")
        with self.lock:
            self.compared += 1

    def run(self, number, session, stopping):
        pick, everything = random.Random(number), probes.probes(session.v1[0])
        while not stopping.is_set():
            self.compare(*self.next(everything, pick), session)
        session.close()


def run_account(number, account, session, report, stopping):
    pick = random.Random(number)
    while not stopping.is_set():
        try:
            account.send(session, pick)
            report.count("requests of the account")
        except Exception as error:
            report.problem(f"account: {error!r}")
        time.sleep(0.05)


def write_files(folder):
    """Writes what the busy server reads. Returns (keys, certificates, configuration, authority)."""
    models = folder / "models"
    models.mkdir()
    (models / "smoe").symlink_to(CHECKPOINTS / "smoe")
    shutil.copytree(CHECKPOINTS / "smoe", models / "broken")
    weights = models / "broken/model.safetensors"
    os.truncate(weights, weights.stat().st_size - 4096)
    names = ["operator", "account"] + [f"probe-{i}" for i in range(PROBE_CLIENTS)] + [
        f"client-{i}" for i in range(64)]
    keys = changes.Keys(folder / "keys.json", names)
    authority = Authority(folder, "authority")
    certificates = changes.Certificates(folder, authority)
    options = {**COMMON, **BUSY, "model": model_options({**probes.MODELS, Account.MODEL: "mh-moe"}),
               "models-folder": models, "api-key-file": keys.file,
               "tls-cert": certificates.link / "tls.crt", "tls-key": certificates.link / "tls.key"}
    config = folder / "moeserve.yaml"
    config.write_text("".join(f"{option}: {yaml_value(value)}\n" for option, value in
                              options.items()))
    return keys, certificates, config, authority


def yaml_value(value):
    if isinstance(value, list):
        return "[" + ", ".join(f'"{item}"' for item in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(
        value, int) else f'"{value}"'


class Steady:
    """The busy server, everybody who uses it, and what came of it."""

    def __init__(self, options, folder, report):
        self.options, self.report = options, report
        self.v1 = clients.generated(folder, "moeserve/v1/moeserve")
        self.v2 = clients.generated(folder, "inference/grpc_predict_v2")
        self.answers = idle_answers(self.v1, self.v2, report)
        self.keys, certificates, config, self.authority = write_files(folder)
        self.log = open(options.log or os.devnull, "w")
        # The models are in the configuration, too; the command line wins.
        self.server = clients.start_server(
            "--config", config, *sum((["--model", model] for model in model_options(
                {**{name: probes.MODELS[name] for name in FURTHER}, Account.MODEL: "mh-moe"})), []),
            name=None, folder=model_options(probes.MODELS)[0], stderr=self.log)
        self.process = Process(self.server.process.pid)
        self.account = Account()
        self.prober = Prober(self.answers, report)
        self.operator = changes.Operator(self.server, self.session("operator"), self.keys,
                                         certificates, config, self.account, report)
        self.stopping = threading.Event()

    def session(self, name):
        return Session(self.server, self.v1, self.v2, self.keys.key(name),
                       self.authority.certificate)

    def threads(self):
        out = []
        for i in range(self.options.clients):
            client = Client(i, lambda i=i: self.session(f"client-{i}"), self.keys, self.report,
                            self.stopping)
            out.append(threading.Thread(target=client.run))
        for i in range(PROBE_CLIENTS):
            out.append(threading.Thread(target=self.prober.run, args=(
                i, self.session(f"probe-{i}"), self.stopping)))
        for i in range(ACCOUNT_CLIENTS):
            out.append(threading.Thread(target=run_account, args=(
                i, self.account, self.session("account"), self.report, self.stopping)))
        out.append(threading.Thread(target=self.operator.run, args=(
            self.stopping, self.options.pause)))
        return out

    def run(self):
        """Lets everybody use the server. Returns the first sample of the process."""
        threads = self.threads()
        first = self.process.sample()
        for thread in threads:
            thread.start()
        end = time.monotonic() + 60 * self.options.minutes
        while self.server.process.poll() is None:
            now = time.monotonic()
            if now > end and (not self.missing() or now > end + EXTRA_SECONDS):
                break
            time.sleep(SAMPLE_SECONDS)
            seconds, mib, descriptors, tasks = self.process.sample()
            if len(self.process.samples) % 30 == 0:
                print(f"{seconds:5.0f} s: {self.report.counts['requests']} requests, "
                      f"{self.rounds():.1f} rounds, {self.operator.turn} changes, {mib:.0f} MiB, "
                      f"{descriptors} descriptors, {tasks} threads", flush=True)
        self.stopping.set()
        for thread in threads:
            thread.join()
        return first

    def rounds(self):
        return self.prober.compared / len(self.answers)

    def judge_quiet(self, first):
        """Checks what must be so when the clients are gone."""
        session = self.session("operator")
        with self.account.settled():
            wrong = self.account.compare(session)
        if wrong:
            self.report.problem(f"statistics at the end: {wrong[:5]}")
        for name, probe in probes.probes(self.v1[0]):
            self.prober.compare(name, probe, session)
        for name in ("requests_running", "requests_waiting"):
            if session.metric(name) != 0:
                self.report.problem(f"{name} is {session.metric(name)} without requests")
        session.close()
        end = time.monotonic() + 40
        while True:
            last = self.process.sample()
            more = last[2] - first[2], last[3] - first[3]
            if more[0] <= MAX_DESCRIPTORS and more[1] <= MAX_THREADS:
                break
            if time.monotonic() > end:
                self.report.problem(f"descriptors {more[0]:+d}, threads {more[1]:+d} at the end")
                break
            time.sleep(1)
        return last

    def judge_memory(self, last):
        settled = min(SETTLED_SECONDS, 0.4 * last[0])
        early, late = self.process.memory_at(settled), self.process.memory_at(last[0] - 30)
        print(f"memory: {self.process.samples[0][1]:.0f} MiB at the start, {early:.0f} after "
              f"{settled:.0f} s, {late:.0f} at the end, at most "
              f"{max(mib for _, mib, *_ in self.process.samples):.0f}; descriptors "
              f"{self.process.samples[0][2]}, {last[2]}; threads {self.process.samples[0][3]}, "
              f"{last[3]}")
        if settled == SETTLED_SECONDS and late > early + MAX_GROWTH:
            self.report.problem(f"memory grew by {late - early:.0f} MiB")

    def missing(self):
        """Returns what has not been tried yet that this is about."""
        counts = self.report.counts
        out = [step.__name__ for step in self.operator.steps
               if not counts[f"operator: {step.__name__}"]]
        if not counts["versions whose statistics were right"]:
            out.append("a comparison of statistics")
        if self.rounds() < 1:
            out.append("a round of probes")
        return out

    def judge_coverage(self):
        session = self.session("operator")
        for name, labels in (("preemptions_total", {}), ("prefix_cache_hit_tokens_total", {}),
                             ("draft_accepted_tokens_total", {}),
                             ("requests_finished_total", {"finished_reason": "abort"})):
            value = session.metric(name, **labels)
            self.report.count(f"metric {name}", int(value))
            if value == 0:
                self.report.problem(f"{name} {labels} is 0: it was not tried")
        for what in self.missing():
            self.report.problem(f"{what} did not happen")

    def stop(self):
        """Sends SIGTERM in the middle of streams, which are finished."""
        session, texts = self.session("operator"), []

        def stream():
            try:
                texts.append(session.answer(probes.COMPLETIONS, {
                    "model": "split", "prompt": "The", "max_tokens": 400, "ignore_eos": True,
                    "stream": True, "return_token_ids": True})["choices"][0])
            except Exception as error:
                self.report.problem(f"a stream at the end: {error!r}")

        threads = [threading.Thread(target=stream) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        status = clients.stop_server(self.server)
        for thread in threads:
            thread.join()
        if status != 0 or any(len(choice["token_ids"]) != 400 for choice in texts):
            self.report.problem(f"the server ended with status {status}, and streams with "
                                f"{[len(choice['token_ids']) for choice in texts]} tokens")
        self.log.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--pause", type=float, default=1.0,
                        help="seconds between two changes of the operator")
    parser.add_argument("--log", help="file for the server's log")
    options = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        steady = Steady(options, pathlib.Path(folder), report)
        try:
            first = steady.run()
            if steady.server.process.poll() is None:
                steady.judge_coverage()
                last = steady.judge_quiet(first)
                steady.judge_memory(last)
                steady.stop()
            else:
                report.problem(f"the server ended with status {steady.server.process.returncode}")
        finally:
            steady.stopping.set()
            if steady.server.process.poll() is None:
                steady.server.process.kill()
    print(json.dumps(dict(sorted(report.counts.items())), indent=1))
    print(f"{report.counts['requests']} requests, {steady.prober.compared} answers of "
          f"{len(steady.answers)} probes compared ({steady.rounds():.1f} rounds), "
          f"{steady.operator.turn} changes")
    for text, count in report.problems.most_common(20):
        print(f"PROBLEM, {count} times: {text[:600]}")
    print("steady" if not report.problems else "NOT steady")
    sys.exit(1 if report.problems else 0)


if __name__ == "__main__":
    main()
