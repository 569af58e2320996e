"""Clients of every interface, good and bad, that keep a server busy beside the probes."""

import collections
import copy
import http.client
import json
import random
import socket
import threading
import time

import grpc

import probes
from session import Refused, Unexpected, expect

ANY_TEXT = {"type": "any_text"}
# Constraints of which every token leaves hundreds of ways open; they end with an error or at the
# limit of tokens. The whole set of them is in tests/clients/test_heavy_constraints.py.
HEAVY = [{"response_format": {"type": "structural_tag", "format": {
              "type": "sequence", "elements": [ANY_TEXT] * 300}}},
         {"guided_grammar": "root ::= " + "r " * 300 + "\nr ::= [^#]* | \"(\" r \")\""},
         {"guided_regex": "[\\s\\S]{0,2000}x"}]
BAD = [b"{", b"[]", {"prompt": "x", "temperature": "hot"}, {"prompt": 1}, {"prompt": [1] * 20000},
       {"prompt": "x", "model": "none"}, {"prompt": "x", "n": 10**9}, {"prompt": "x", "top_p": 7},
       {"prompt": "x", "guided_json": {"type": "no type"}}, {"prompt": "x", "guided_regex": "("}]
SLOW_TEMPLATE = "{% for i in range(1500) %}{% set _ = a | join(',') %}{% endfor %}x"
PATHS = ["/v1/models", "/v1/models/split", "/v1/experts/stats?model=split", "/metrics", "/health",
         "/v1/experts/layout?model=heads", "/v1/experts/similarity?model=widths&layer=0",
         "/v1/experts/tokens?model=split&layer=1", "/v1/experts/collapse?model=split",
         "/v1/experts/profile?model=split", "/v2", "/v2/models/split", "/v2/models/heads/ready",
         "/v2/health/ready", "/ping", "/version", "/tokenizer_info", "/server_info", "/",
         "/openapi.json", "/v1/metrics/history?model=split"]


class Report:
    """What happened, by kind; and what must not have happened. Thread-safe."""

    def __init__(self):
        self.lock = threading.Lock()
        self.counts = collections.Counter()
        self.problems = collections.Counter()

    def count(self, what, number=1):
        with self.lock:
            self.counts[what] += number

    def problem(self, text):
        with self.lock:
            new = text not in self.problems
            self.problems[text] += 1
        if new:
            print(f"{time.strftime('%H:%M:%S')} problem: {text[:600]}", flush=True)


class Client:
    """Sends requests of random kinds until it is stopped."""

    def __init__(self, number, make_session, keys, report, stopping):
        self.session = make_session()
        self.pick = random.Random(number)
        self.keys, self.report, self.stopping = keys, report, stopping
        self.http = probes.http_probes()
        self.calls = list(probes.calls(self.session.v1[0]))
        self.kinds = [self.probe] * 6 + [self.long_answer] * 3 + [self.call] * 2 + [
            self.leave, self.leave_stream, self.cancel_call, self.page, self.bad, self.heavy,
            self.slow_template, self.wrong_key, self.half_handshake, self.rotating_key,
            self.limited_key, self.temporary_model, self.infer, self.keep_alive]

    def text(self):
        text = self.pick.choice([probes.PSALM, probes.GENESIS])
        return f"Chapter {self.pick.randrange(300)}. {text}"

    def probe(self):
        """A probe with another text or seed."""
        _, path, body = self.pick.choice(self.http)
        body = copy.deepcopy(body)
        if "temperature" in body:
            body["temperature"], body["seed"] = 1, self.pick.randrange(10**6)
        for name in ("prompt", "input", "text_input"):
            if isinstance(body.get(name), str) and self.pick.random() < 0.5:
                body[name] = self.text()
        self.session.answer(path, body)

    def long_answer(self):
        """Fills the KV cache, so that sequences are preempted."""
        body = probes.completion(self.text(), 400, self.pick.choice(list(probes.MODELS)),
                                 temperature=1, seed=self.pick.randrange(100), ignore_eos=True,
                                 n=self.pick.choice([1, 2, 4]), stream=self.pick.random() < 0.5)
        self.session.answer(probes.COMPLETIONS, body)

    def call(self):
        _, method, request = self.pick.choice(self.calls)
        if method:
            self.session.call(method, request)
        else:
            request = type(request).FromString(request.SerializeToString())
            request.text = self.text()
            self.session.generate(request)

    def infer(self):
        if self.pick.random() < 0.5:
            probes.infer(self.session, "heads", self.text(), max_tokens=16)
        else:
            probes.infer_stream(self.session, "split", self.text(), max_tokens=16)

    def leave(self):
        """Goes before the answer comes."""
        connection = self.session.connect()
        try:
            connection.connect()
            body = probes.completion(self.text(), 1000, ignore_eos=True, n=2)
            connection.request("POST", probes.COMPLETIONS, json.dumps(body), {
                "Content-Type": "application/json", "Authorization": f"Bearer {self.session.key}"})
            time.sleep(self.pick.random() / 4)
        finally:
            connection.close()

    def leave_stream(self):
        """Goes in the middle of a stream."""
        connection = self.session.connect()
        try:
            path, extra = self.pick.choice([
                (probes.COMPLETIONS, {"prompt": probes.ECHOES}),
                (probes.CHATS, {"messages": probes.ASK}),
                ("/v1/messages", {"messages": probes.ASK})])
            response = self.session.send(connection, "POST", path, {
                "model": "split", "max_tokens": 1000, "stream": True, **extra})
            expect(response.status == 200, f"status {response.status}")
            response.read(self.pick.choice([16, 2000]))
        finally:
            connection.close()

    def cancel_call(self):
        pb = self.session.v1[0]
        call = self.session.inference().Generate(pb.GenerateRequest(
            model="split", text=probes.ECHOES, sampling=pb.SamplingParams(
                max_tokens=1000, ignore_eos=True), n=self.pick.choice([1, 3])),
            metadata=self.session.metadata, timeout=60)
        next(call)
        call.cancel()

    def page(self):
        path = self.pick.choice(PATHS)
        status, _ = self.session.request("GET", path)
        expect(status == 200, f"{path}: {status}")

    def bad(self):
        status, _ = self.session.request("POST", probes.COMPLETIONS, self.pick.choice(BAD))
        expect(status in (400, 404, 413), f"status {status}")

    def heavy(self):
        try:
            self.session.answer(probes.COMPLETIONS, probes.completion(
                "a", 40, temperature=1, seed=1, **self.pick.choice(HEAVY)))
        except Refused as error:
            # On a busy machine, two seconds may not be enough to compile it.
            expect(error.status == 400 and ("too much work" in str(error) or
                                            "too long to compile" in str(error)), str(error))

    def slow_template(self):
        try:
            self.session.answer(probes.CHATS, {
                "model": "split", "messages": probes.ASK, "max_tokens": 1,
                "chat_template": SLOW_TEMPLATE, "chat_template_kwargs": {"a": [1.5] * 200}})
        except Refused as error:  # on a busy machine, ten seconds may not be enough
            expect(error.status == 400 and "too much time" in str(error), str(error))

    def with_key(self, key):
        """Returns the status of a short completion with another key."""
        mine, self.session.key = self.session.key, key
        try:
            return self.session.request("POST", probes.COMPLETIONS, {
                "model": "split", "prompt": "The", "max_tokens": 4})[0]
        finally:
            self.session.key = mine

    def wrong_key(self):
        status = self.with_key("a-wrong-key-0123456789")
        expect(status == 401, f"status {status}")

    def rotating_key(self):
        """Uses a key that the operator replaces."""
        changing, key = self.keys.changing, self.keys.current
        status = self.with_key(key)
        changed = changing or self.keys.changing or self.keys.current != key
        expect(status == 200 or status == 401 and changed, f"status {status}")

    def limited_key(self):
        status = self.with_key(self.keys.key("limited"))
        expect(status in (200, 429), f"status {status}")

    def half_handshake(self):
        host, port = self.session.grpc_address.split(":")
        port = self.pick.choice([int(port), self.session.port])
        with socket.create_connection((host, port), timeout=20) as plain:
            plain.sendall(self.pick.choice([b"\x16\x03\x01\x00\xff", b"\0" * 40,
                                            b"GET / HTTP/1.1"]))

    def temporary_model(self):
        """Asks for the model that the operator loads and unloads."""
        body = probes.completion(self.text(), 8, "temporary")
        status, text = self.session.request("POST", probes.COMPLETIONS, body)
        # It is unloaded, or its first version is being loaded.
        expect(status in (200, 404) or status == 503 and b"loading" in text,
               f"{status} {text[:200]}")

    def keep_alive(self):
        """Several requests over one connection, which outlives changes of the certificate."""
        connection = self.session.connect()
        try:
            for _ in range(self.pick.randrange(2, 6)):
                body = probes.completion(self.text(), 8, "heads")
                response = self.session.send(connection, "POST", probes.COMPLETIONS, body)
                expect(response.status == 200, f"status {response.status}")
                response.read()
        finally:
            connection.close()

    def run(self):
        while not self.stopping.is_set():
            kind = self.pick.choice(self.kinds)
            try:
                kind()
            except (Unexpected, Refused, OSError, http.client.HTTPException, grpc.RpcError,
                    ValueError) as error:
                text = f"{error.code()} {error.details()}" if isinstance(
                    error, grpc.RpcError) else repr(error)
                self.report.problem(f"{kind.__name__}: {text}")
            self.report.count(kind.__name__)
            self.report.count("requests")
        self.session.close()
