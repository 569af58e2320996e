"""Several ranks under mpirun give the output of one process, and end with each other.

    ranks_test.py MPIEXEC PROGRAM RANKS NAME OF A CLASS OR TEST...
"""

import json
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import threading
import time
import unittest

import namespaces
from mpi_runs import Runs, Server, is_running, run, wait_until

RUNS = None
MODELS = "deploy/models"
# The exit status after the loss of a rank.
LOST = 75


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


def selections(server):
    """The lines of /metrics that count the rows of each expert."""
    return [line for line in server.call("/metrics")[1].splitlines()
            if 'expert="' in line and "_total{" in line]


class Commands(unittest.TestCase):
    def compare(self, *words):
        alone = run(RUNS.alone(*words))
        self.assertEqual(alone.returncode, 0, alone.stderr)
        ranked = run(RUNS.ranked(*words))
        self.assertEqual(ranked.returncode, 0, ranked.stderr)
        self.assertEqual(ranked.stdout, alone.stdout)
        return alone, ranked

    def test_generate(self):
        for model, dtype in (("mh-moe", "f32"), ("moa", "bf16"), ("hmoe-topp", "int8-channel"),
                             ("hmoe-topp", "int4-k")):
            with self.subTest(model=model, dtype=dtype):
                alone, ranked = self.compare(
                    "generate", "--quiet", "-m", f"{MODELS}/{model}", "--prompt", "Once",
                    "--max-tokens", 16, "--temperature", 0.8, "--seed", 3, "--stats", "--dtype",
                    dtype)
                # The table of --stats; mpirun may add warnings of its own.
                self.assertIn(alone.stderr, ranked.stderr)

    def test_score_prints_every_digit(self):
        with tempfile.TemporaryDirectory() as folder:
            text = pathlib.Path(folder) / "text.txt"
            text.write_text("The cat sat on the mat. " * 20)
            for sums in ("on", "off"):
                with self.subTest(owner_sums=sums):
                    self.compare("score", "--quiet", "-m", f"{MODELS}/mh-moe", "--json",
                                 "--max-num-seqs", 1, "--text", text, "--owner-sums", sums)

    def test_the_start_fails_once_and_everywhere(self):
        good = ("generate", "--quiet", "-m", f"{MODELS}/mh-moe", "--prompt", "Once")
        missing = ("generate", "--quiet", "-m", f"{MODELS}/none", "--prompt", "Once")
        other = ("generate", "--quiet", "-m", f"{MODELS}/moa", "--prompt", "Once")
        for first, others, expected in (
                (good, (*good, "--dtype", "bf16"), "rank 1 on {}: --dtype: expected auto"),
                (good, (*good, "--cpu-isa", "plain"), "rank 1 on {}: instruction set: expected"),
                (good, (*good, "--owner-sums", "on"), "rank 1 on {}: --owner-sums: expected auto"),
                (good, other, "rank 1 on {}: model files"),
                (good, missing, "rank 1 on {}: " + f"{MODELS}/none"),
                (missing, good, "rank 0 on {}: " + f"{MODELS}/none")):
            with self.subTest(expected=expected):
                ended = run(RUNS.different(first, others))
                self.assertEqual(ended.returncode, 1, ended.stderr)
                errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
                self.assertEqual(len(errors), 1, ended.stderr)
                self.assertIn(expected.format(os.uname().nodename), errors[0])

    def test_serve_refuses_several_models(self):
        ended = run(RUNS.ranked("serve", "--model", f"a={MODELS}/moa", "--model",
                                f"b={MODELS}/moa", count=1))
        self.assertEqual(ended.returncode, 1)
        self.assertIn("--ranks: expected one --model", ended.stderr)


class ServerTest(unittest.TestCase):
    """What the tests of servers share."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def start(self, command):
        server = Server(command, pathlib.Path(self.folder.name) / f"{time.monotonic_ns()}.log",
                        RUNS.namespaces if RUNS.mpiexec in command else None)
        self.addCleanup(server.kill)
        return server

    def start_ranked(self, *words):
        server = self.start(RUNS.ranked("serve", "--model", f"{MODELS}/mh-moe", *words))
        self.assertEqual(len(server.pids), RUNS.ranks)
        return server

    def expect_none_left(self, server):
        self.assertTrue(wait_until(lambda: not any(map(is_running, server.pids)), 15),
                        server.errors())

    def host(self, rank):
        """The host name of a rank."""
        del rank
        return os.uname().nodename

    def compare_with_one_process(self):
        alone = self.start(RUNS.alone("serve", "--model", f"{MODELS}/mh-moe", "--draft-tokens", 0))
        expected = [without_times(text) for _, text in alone.complete(bodies())]
        counted = selections(alone)
        self.assertGreater(len(counted), 8)
        self.assertEqual(alone.stop(), 0, alone.errors())
        ranked = self.start_ranked("--draft-tokens", 0)
        found = [without_times(text) for _, text in ranked.complete(bodies())]
        self.assertEqual(found, expected)
        self.assertEqual(selections(ranked), counted)
        metrics = ranked.call("/metrics")[1]
        self.assertIn(f"moeserve_ranks {RUNS.ranks}\n", metrics)
        self.assertRegex(metrics, 'moeserve_rank_up{rank="1",host="[^"]+"} 1\n')
        self.assertNotIn('moeserve_exchange_bytes_total{kind="gather"} 0\n', metrics)
        known = json.loads(ranked.call("/server_info")[1])["ranks"]
        self.assertEqual([(rank["rank"], rank["up"]) for rank in known],
                         [(r, True) for r in range(RUNS.ranks)])
        self.assertEqual(ranked.stop(), 0, ranked.errors())
        self.expect_none_left(ranked)


class Serve(ServerTest):
    def test_answers_and_statistics_are_those_of_one_process(self):
        self.compare_with_one_process()

    def unequal_placement(self):
        """The path of a file that gives each routed layer's last expert to the last rank, and all
        others to the first one."""
        folder = pathlib.Path(self.folder.name)
        (folder / "text.txt").write_text("The cat sat on the mat. " * 20)
        file = folder / "placement.json"
        for words in (("save", folder / "profile", f"{MODELS}/mh-moe", "--text",
                       folder / "text.txt", "--quiet"),
                      ("place", folder / "profile", "--model", f"{MODELS}/mh-moe", "--ranks",
                       RUNS.ranks, "--output", file)):
            made = run([RUNS.program, "experts", *map(str, words)])
            self.assertEqual(made.returncode, 0, made.stderr)
        placement = json.loads(file.read_text())
        for block in placement["blocks"]:
            block["holders"] = [[0]] * (len(block["holders"]) - 1) + [[RUNS.ranks - 1]]
        file.write_text(json.dumps(placement))
        return file

    def test_answers_stay_the_same_while_experts_move(self):
        alone = self.start(RUNS.alone("serve", "--model", f"{MODELS}/mh-moe", "--draft-tokens", 0))
        expected = [without_times(text) for _, text in alone.complete(bodies())]
        self.assertIn("moeserve_placement_version 0\n", alone.call("/metrics")[1])
        self.assertEqual(alone.stop(), 0, alone.errors())
        ranked = self.start_ranked("--draft-tokens", 0, "--rebalance", 1,
                                   "--placement", self.unequal_placement())
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found = [without_times(text) for _, text in ranked.complete(bodies())]
            self.assertEqual(found, expected)
            metrics = ranked.call("/metrics")[1]
            if value_of(metrics, "placement_version") >= 2:
                break
        self.assertGreaterEqual(value_of(metrics, "placement_version"), 2)
        self.assertGreater(value_of(metrics, "placement_moved_bytes_total"), 0)
        self.assertGreaterEqual(value_of(metrics, "expert_imbalance"), 1)
        self.assertLessEqual(value_of(metrics, "expert_imbalance"), RUNS.ranks)
        found = [without_times(text) for _, text in ranked.complete(bodies())]
        self.assertEqual(found, expected)
        self.assertEqual(ranked.stop(), 0, ranked.errors())
        self.expect_none_left(ranked)

    def test_a_drain_lets_requests_end(self):
        server = self.start_ranked()
        body = {"prompt": "Once", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        server.process.send_signal(signal.SIGUSR1)  # begins while the requests run, or before
        for status, _ in server.complete([body] * 2):
            self.assertIn(status, (200, 503, 0))
        self.assertEqual(server.stop(), 0, server.errors())
        self.expect_none_left(server)

    def end_rank(self, rank, signal_number, seconds, running):
        """Sends a signal to a rank; the requests of others then end within `seconds`."""
        server = self.start_ranked("--rank-timeout", 4)
        body = {"prompt": "Once", "max_tokens": 8000, "temperature": 0, "ignore_eos": True}
        ended = []
        if running:
            thread = threading.Thread(target=lambda: ended.extend(server.complete([body] * 2)))
            thread.start()
            time.sleep(0.2)
        begin = time.monotonic()
        os.kill(server.pids[rank], signal_number)
        status = server.wait(seconds + 15)
        if running:
            thread.join()
            self.assertEqual(len(ended), 2)
            for code, text in ended:
                # The leader may be killed by mpirun before its last byte is sent.
                self.assertIn(code, (503, 0), text)
                if code == 503:
                    self.assertIn(f"rank {rank} on {os.uname().nodename} was lost", text)
                    self.assertIn('"engine_dead"', text)
        self.assertLess(time.monotonic() - begin, seconds + 5, server.errors())
        self.assertNotEqual(status, 0)
        if signal_number == signal.SIGSTOP:
            self.assertEqual(status, LOST, server.errors())
            os.kill(server.pids[rank], signal.SIGKILL)
        self.expect_none_left(server)

    def test_a_follower_that_is_killed_ends_the_service(self):
        for running in (True, False):
            with self.subTest(running=running):
                self.end_rank(RUNS.ranks - 1, signal.SIGKILL, 1, running)

    def test_a_follower_that_is_stopped_ends_the_service(self):
        self.end_rank(RUNS.ranks - 1, signal.SIGSTOP, 6, True)

    def test_a_leader_that_is_killed_ends_the_followers(self):
        server = self.start_ranked()
        os.kill(server.pids[0], signal.SIGKILL)
        self.assertTrue(wait_until(lambda: not any(map(is_running, server.pids)), 5),
                        server.errors())
        self.assertNotEqual(server.wait(15), 0)


class Network(ServerTest):
    """The same over TCP between network namespaces, and what happens to a network."""

    @classmethod
    def setUpClass(cls):
        reason = namespaces.why_not()
        if reason:
            raise unittest.SkipTest(reason)
        RUNS.namespaces = namespaces.Namespaces(RUNS.ranks)

    @classmethod
    def tearDownClass(cls):
        RUNS.namespaces.close()
        RUNS.namespaces = None

    test_generate = Commands.test_generate
    test_score_prints_every_digit = Commands.test_score_prints_every_digit
    compare = Commands.compare

    def host(self, rank):
        return RUNS.namespaces.names[rank]

    def test_answers_and_statistics_are_those_of_one_process(self):
        self.compare_with_one_process()

    def test_a_network_that_is_cut_ends_the_service(self):
        server = self.start_ranked()
        body = {"prompt": "Once", "max_tokens": 8000, "temperature": 0, "ignore_eos": True}
        ended = []
        thread = threading.Thread(target=lambda: ended.extend(server.complete([body] * 2)))
        thread.start()
        time.sleep(0.2)
        begin = time.monotonic()
        RUNS.namespaces.set_link(RUNS.ranks - 1, False)
        self.addCleanup(RUNS.namespaces.mend)
        thread.join()
        self.assertLess(time.monotonic() - begin, 12, server.errors())
        for code, text in ended:
            self.assertEqual(code, 503, text)
            self.assertIn(f"rank {RUNS.ranks - 1} on {self.host(RUNS.ranks - 1)} was lost", text)
        # mpirun and its daemon on the lost machine may stay; the ranks do not.
        self.expect_none_left(server)
        server.process.kill()


class Failures(ServerTest):
    """Ranks that fail at random moments; FAILURES of the environment says how often."""

    def test_every_request_has_a_status(self):
        chosen = random.Random(1)
        for i in range(int(os.environ.get("FAILURES", "3"))):
            rank = chosen.randrange(RUNS.ranks)
            kind = chosen.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
            with self.subTest(i=i, rank=rank, kind=kind):
                server = self.start_ranked("--rank-timeout", 4)
                body = {"prompt": "Once", "max_tokens": 3000, "temperature": 0,
                        "ignore_eos": True}
                ended = []
                thread = threading.Thread(
                    target=lambda: ended.extend(server.complete([body] * 3)))
                thread.start()
                time.sleep(chosen.random())
                begin = time.monotonic()
                os.kill(server.pids[rank], kind)
                if rank == 0 and kind == signal.SIGSTOP:
                    # A leader that is stopped answers nobody: its clients wait, the ranks do not.
                    self.assertTrue(wait_until(
                        lambda: not any(map(is_running, server.pids[1:])), 12), server.errors())
                    os.kill(server.pids[0], signal.SIGKILL)
                thread.join(20)
                self.assertEqual(len(ended), 3, server.errors())
                self.assertLess(time.monotonic() - begin, 14, server.errors())
                for code, text in ended:
                    self.assertIn(code, (200, 503, 0), text)
                    if code == 200:
                        self.check(text)
                if kind == signal.SIGSTOP and rank > 0:
                    os.kill(server.pids[rank], signal.SIGKILL)
                self.assertNotEqual(server.wait(20), 0)
                self.expect_none_left(server)

    def check(self, text):
        """An answer that has arrived is right."""
        answer = json.loads(text)["choices"][0]["text"]
        if not hasattr(Failures, "expected"):
            Failures.expected = answer
        self.assertEqual(answer, Failures.expected)


if __name__ == "__main__":
    RUNS = Runs(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]], verbosity=2)
