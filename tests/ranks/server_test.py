"""What the tests of servers and commands share."""

import json
import os
import pathlib
import re
import tempfile
import time
import unittest

from mpi_runs import Server, is_running, wait_until

MODELS = "deploy/models"
# The exit status after the loss of a rank.
LOST = 75


class RanksTest(unittest.TestCase):
    """`all_runs`: how programs are started; set by ranks_test.py."""

    all_runs = None

    def setUp(self):
        self.runs = self.all_runs


def bodies():
    """Requests of which some draw tokens, share a prefix, or ask for several samples."""
    made = []
    for i in range(6):
        made.append({"prompt": "Once upon a time there was a " + ("cat", "dog", "tree")[i % 3],
                     "max_tokens": 12 + i, "temperature": 0.8 if i % 2 else 0, "seed": i,
                     "logprobs": 3, "ignore_eos": True})
    made[3]["n"] = 2
    return made


def without_times(text):
    """The content of an answer that does not depend on when it was made."""
    answer = json.loads(text)
    for key in ("id", "created"):
        answer.pop(key)
    answer["usage"].pop("prompt_tokens_details", None)  # depends on what was served before
    return answer


def value_of(metrics, name):
    """The value of a metric without labels."""
    return float(re.search(f"^moeserve_{name} (.*)$", metrics, re.MULTILINE)[1])


def value_with_labels(metrics, name):
    """The value of a metric with labels, of which there is one line."""
    return float(re.search(rf"^moeserve_{name}{{.*}} (.*)$", metrics, re.MULTILINE)[1])


def selections(server):
    """The lines of /metrics that count the rows of each expert."""
    return [line for line in server.call("/metrics")[1].splitlines()
            if 'expert="' in line and "_total{" in line]


class ServerTest(RanksTest):
    """What the tests of servers share."""

    def setUp(self):
        super().setUp()
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def run(self, result=None):
        """Prints the logs of the servers if the test fails."""
        self.logs = []
        failed = len(result.failures) + len(result.errors)
        super().run(result)
        if len(result.failures) + len(result.errors) > failed:
            for log in self.logs:
                print(f"--- log of a server\n{log}", flush=True)

    def keep_log(self, server):
        self.logs.append(server.errors()[-20000:])

    def start(self, command):
        server = Server(command, pathlib.Path(self.folder.name) / f"{time.monotonic_ns()}.log",
                        self.runs.namespaces if self.runs.mpiexec in command else None)
        self.addCleanup(self.keep_log, server)
        self.addCleanup(server.kill)
        return server

    def start_ranked(self, *words, model=f"{MODELS}/mh-moe"):
        server = self.start(self.runs.ranked("serve", "--model", model, *words))
        self.assertEqual(len(server.pids), self.runs.ranks)
        return server

    def expect_none_left(self, server):
        self.assertTrue(wait_until(lambda: not any(map(is_running, server.pids)), 15),
                        server.errors())

    def host(self, rank):
        """The host name of a rank."""
        del rank
        return os.uname().nodename

    def compare_with_one_process(self, *words, model=f"{MODELS}/mh-moe"):
        """`words`: options of the ranks."""
        alone = self.start(self.runs.alone("serve", "--model", model, "--draft-tokens", 0))
        expected = [without_times(text) for _, text in alone.complete(bodies())]
        counted = selections(alone)
        self.assertGreater(len(counted), 8)
        self.assertEqual(alone.stop(), 0, alone.errors())
        ranked = self.start_ranked("--draft-tokens", 0, *words, model=model)
        found = [without_times(text) for _, text in ranked.complete(bodies())]
        self.assertEqual(found, expected)
        self.assertEqual(selections(ranked), counted)
        metrics = ranked.call("/metrics")[1]
        self.assertIn(f"moeserve_ranks {self.runs.ranks}\n", metrics)
        self.assertRegex(metrics, 'moeserve_rank_up{rank="1",host="[^"]+"} 1\n')
        self.assertNotIn('moeserve_exchange_bytes_total{kind="gather"} 0\n', metrics)
        known = json.loads(ranked.call("/server_info")[1])["ranks"]
        self.assertEqual([(rank["rank"], rank["up"]) for rank in known],
                         [(r, True) for r in range(self.runs.ranks)])
        self.assertEqual(ranked.stop(), 0, ranked.errors())
        self.assertNotIn("--rank-timeout", ranked.errors())
        self.expect_none_left(ranked)
