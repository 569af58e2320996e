"""Compares the expert statistics of a model with what it computed, exactly."""

import collections
import contextlib
import json
import threading
import time

import probes
from session import Unexpected, exact, expect

class Account:
    """A model all of whose requests report their routes, so that its statistics can be compared
    with what it computed. Thread-safe."""

    MODEL = "account"

    def __init__(self):
        self.changed = threading.Condition()
        self.running = 0
        self.settling = False
        self.counts = collections.Counter()  # of the version that is served, by (block, expert)
        self.tokens = 0
        self.generated = 0  # tokens of the answers of all versions

    @contextlib.contextmanager
    def request(self):
        """A request runs in the block, which therefore waits while the account is settled."""
        with self.changed:
            self.changed.wait_for(lambda: not self.settling)
            self.running += 1
        try:
            yield
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify_all()

    @contextlib.contextmanager
    def settled(self):
        """No request runs in the block."""
        with self.changed:
            self.settling = True
            self.changed.wait_for(lambda: self.running == 0)
        try:
            yield
        finally:
            with self.changed:
                self.settling = False
                self.changed.notify_all()

    def renew(self):
        """Begins the account of a new version; the model must be settled."""
        self.tokens = 0
        self.counts.clear()

    def add(self, choice):
        """Adds a choice's record, without what was computed for other requests."""
        record = choice["routing"]
        rows = record["layout"]["rows_per_token"]
        blocks = record["layout"]["blocks"]
        reused = set()
        for begin, end in record["reused"]:
            reused.update(range(begin, end))
        owner = []
        for index, block in enumerate(blocks):
            last = blocks[index + 1]["first_row"] if index + 1 < len(blocks) else rows
            owner += [index] * (last - block["first_row"])
        first = record["first_position"]
        for token in range(record["tokens"]):
            if first + token in reused:
                continue
            self.tokens += 1
            for row in range(rows):
                begin, end = record["offsets"][token * rows + row:token * rows + row + 2]
                for expert in record["experts"][begin:end]:
                    self.counts[owner[row], expert] += 1

    def send(self, session, pick):
        """Sends one request to the model."""
        body = probes.completion(
            f"Chapter {pick.randrange(40)}. {probes.PSALM}", pick.choice([1, 12, 60]), self.MODEL,
            temperature=1, seed=pick.randrange(50), n=pick.choice([1, 1, 3]), return_routing=True,
            ignore_eos=pick.random() < 0.5)
        if pick.random() < 0.5:
            body.update(stream=True, stream_options={"include_usage": True})
        if body["n"] == 1 and pick.random() < 0.3:
            body["prompt"], body["max_tokens"] = probes.ECHOES, 64  # drafts
        with self.request():
            status, data = session.request("POST", probes.COMPLETIONS, body)
            expect(status == 200, f"status {status}: {data[:300]}")
            answer = exact.join_stream(data.decode()) if "stream" in body else json.loads(data)
            expect(len(answer["choices"]) == body["n"], f"an answer without choices: {data[:300]}")
            with self.changed:
                self.generated += answer["usage"]["completion_tokens"]
                for choice in answer["choices"]:
                    self.add(choice)

    def compare(self, session):
        """Returns the differences between the account and the statistics; none are expected. The
        model must be settled."""
        end = time.monotonic() + 10
        while True:
            stats = session.get(f"/v1/experts/stats?model={self.MODEL}")
            found = {(index, expert): count for index, layer in enumerate(stats["layers"])
                     for expert, count in enumerate(layer["counts"])}
            wrong = [f"block {place[0]} expert {place[1]}: {self.counts[place]} computed, "
                     f"{found.get(place)} counted" for place in {*found, *self.counts}
                     if found.get(place) != self.counts[place]]
            if stats["tokens"] != self.tokens:
                wrong.append(f"{self.tokens} tokens computed, {stats['tokens']} counted")
            generated = session.metric("generation_tokens_total", self.MODEL)
            if generated != self.generated:
                wrong.append(f"{self.generated} tokens received, {generated:.0f} in the metrics")
            if not wrong or time.monotonic() > end:
                return wrong
            time.sleep(0.2)
