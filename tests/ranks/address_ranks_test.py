"""Ranks that are started one by one, without MPI, give the output of one process.

    address_ranks_test.py PROGRAM RANKS TRANSPORT NAME OF A CLASS OR TEST...

TRANSPORT is tcp or nccl. With nccl, PROGRAM has the emulated device, and LD_LIBRARY_PATH names the
folder of the stand-in for NCCL.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from mpi_runs import ROOT, Server, is_running, program_of_another_commit, run, wait_until
from server_test import LOST, MODELS, bodies, selections, without_times

PROGRAM = None
RANKS = 2
TRANSPORT = "tcp"
HOST = os.uname().nodename


def free_port():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def alone(*words):
    device = ["--device", "cuda"] if TRANSPORT == "nccl" else []
    return [PROGRAM, *map(str, words), "--threads", "1", *device]


class RanksTest(unittest.TestCase):
    """What the tests share: a key, an address, and processes that do not outlive the test."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.key = self.folder / "key"
        self.key.write_text("0123456789abcdef0123456789abcdef\n")
        self.port = free_port()
        self.processes = []
        self.addCleanup(self.kill)

    @classmethod
    def setUpClass(cls):
        # One process with --ranks refuses a device that cannot be a rank.
        if TRANSPORT != "nccl":
            return
        with tempfile.NamedTemporaryFile("w") as key:
            key.write("0123456789abcdef")
            key.flush()
            ended = run(alone(*Commands.WORDS, "--ranks", "nccl", "--of", 1, "--rank", 0,
                              "--rank-link", f"127.0.0.1:{free_port()}", "--rank-key-file",
                              key.name))
        if "expected device cpu" in ended.stderr:
            raise unittest.SkipTest("the CUDA backend has no ranks")

    def kill(self):
        for process in self.processes:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait(10)

    def ranked(self, rank, *words, of=None, key=None, program=None):
        return [str(program or PROGRAM), *alone(*words)[1:], "--ranks", TRANSPORT, "--rank", str(rank), "--of",
                str(of or RANKS), "--rank-link", f"127.0.0.1:{self.port}", "--rank-key-file",
                str(key or self.key)]

    def start(self, command):
        """Starts a process; its outputs are files."""
        path = self.folder / f"{len(self.processes)}"
        with open(f"{path}.out", "wb") as out, open(f"{path}.err", "wb") as err:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err)
        process.path = path
        self.processes.append(process)
        return process

    def finish(self, processes, seconds=120):
        """Waits for processes; returns the status, output and errors of each."""
        results = []
        for process in processes:
            status = process.wait(seconds)
            results.append((status, pathlib.Path(f"{process.path}.out").read_text(),
                            pathlib.Path(f"{process.path}.err").read_text()))
        return results

    def run_all(self, *commands):
        return self.finish([self.start(command) for command in commands])


class Commands(RanksTest):
    """Commands that run to their end, and starts that fail."""

    WORDS = ("generate", "--quiet", "-m", f"{MODELS}/mh-moe", "--prompt", "Once", "--max-tokens",
             "8", "--temperature", "0")

    def test_generate(self):
        expected = run(alone(*self.WORDS))
        self.assertEqual(expected.returncode, 0, expected.stderr)
        results = self.run_all(*(self.ranked(r, *self.WORDS) for r in range(RANKS)))
        for status, _, errors in results:
            self.assertEqual(status, 0, errors)
        self.assertEqual(results[0][1], expected.stdout)
        for _, output, _ in results[1:]:
            self.assertEqual(output, "")

    def expect_error(self, results, text):
        """All processes end with status 1 and one error that has the text."""
        for status, _, errors in results:
            self.assertEqual(status, 1, errors)
            lines = [line for line in errors.splitlines() if line.startswith("error: ")]
            self.assertEqual(len(lines), 1, errors)
            self.assertIn(text, lines[0])

    def test_another_number_of_ranks(self):
        results = self.run_all(self.ranked(0, *self.WORDS),
                               self.ranked(1, *self.WORDS, of=RANKS + 1))
        self.expect_error(results, f"rank 1 on {HOST}: number of ranks: expected {RANKS} as rank 0 "
                                   f"on {HOST}, found {RANKS + 1}")

    def test_two_processes_with_one_number(self):
        results = self.run_all(self.ranked(0, *self.WORDS, of=3),
                               self.ranked(1, *self.WORDS, of=3),
                               self.ranked(1, *self.WORDS, of=3))
        self.expect_error(results, f"rank 1: expected one process, found two, on {HOST} and {HOST}")

    def test_missing_ranks(self):
        # Long enough for rank 2 to connect, also on a loaded machine.
        waits = self.ranked(0, *self.WORDS, "--rank-start-timeout", "8", of=4)
        results = self.run_all(waits, self.ranked(2, *self.WORDS, of=4))
        self.expect_error(results[:1], "ranks 1, 3 have not connected to rank 0 at 127.0.0.1:")
        self.assertEqual(results[1][0], 1)

    def test_another_key(self):
        other = self.folder / "other"
        other.write_text("another key of sufficient length")
        results = self.run_all(self.ranked(0, *self.WORDS, "--rank-start-timeout", "8", of=2),
                               self.ranked(1, *self.WORDS, of=2, key=other))
        self.expect_error(results[1:], f"rank 0 at 127.0.0.1:{self.port}: it has another key")
        self.expect_error(results[:1], "1 connections had another key")

    def test_the_start_fails_once_and_everywhere(self):
        damaged = self.folder / "damaged"
        shutil.copytree(ROOT / MODELS / "mh-moe", damaged)
        os.truncate(damaged / "model.safetensors", 1000)

        def with_model(path):
            at = self.WORDS.index("-m") + 1
            return (*self.WORDS[:at], str(path), *self.WORDS[at + 1:])

        differ = [((*self.WORDS, "--dtype", "bf16"), "--dtype: expected "),
                  ((*self.WORDS, "--cpu-isa", "plain"), "instruction set: expected "),
                  (with_model(f"{MODELS}/moa"), "model files")]
        fail = [(with_model(f"{MODELS}/none"), f"{MODELS}/none"),
                (with_model(damaged), "model.safetensors: ")]
        if TRANSPORT == "nccl":
            del differ[1]  # of CPUs
        for words, text in differ + fail:
            for who in (0, RANKS - 1):
                with self.subTest(text=text, who=who):
                    results = self.run_with_one(who, words)
                    # The others are compared with rank 0.
                    named = 1 if who == 0 and (words, text) in differ else who
                    self.expect_error(results, f"rank {named} on {HOST}: ")
                    self.expect_error(results, text)

    def run_with_one(self, who, words, program=None):
        """Starts ranks of which one has other words, or another program."""
        return self.run_all(*(self.ranked(r, *(words if r == who else self.WORDS),
                                          program=program if r == who else None)
                              for r in range(RANKS)))

    def test_another_commit(self):
        other = program_of_another_commit(PROGRAM, self.folder)
        if other is None:
            self.skipTest("the program knows no commit")
        for who in (0, RANKS - 1):
            with self.subTest(who=who):
                self.expect_error(self.run_with_one(who, self.WORDS, other),
                                  f"rank {who or 1} on {HOST}: commit: expected ")

    def test_strangers_do_not_disturb_the_start(self):
        expected = run(alone(*self.WORDS))
        leader = self.start(self.ranked(0, *self.WORDS))
        held = []
        self.addCleanup(lambda: [connection.close() for connection in held])
        for data in (b"", b"\xff" * 4, b"GET / HTTP/1.1\r\n\r\n", os.urandom(100000)) * 10:
            self.assertTrue(wait_until(lambda: self.connect(held), 60))
            with contextlib.suppress(OSError):
                held[-1].sendall(data)
        results = self.finish([leader, *(self.start(self.ranked(r, *self.WORDS))
                                         for r in range(1, RANKS))])
        for status, _, errors in results:
            self.assertEqual(status, 0, errors)
        self.assertEqual(results[0][1], expected.stdout)

    def connect(self, held):
        """Adds a connection to rank 0; returns whether it listens."""
        try:
            held.append(socket.create_connection(("127.0.0.1", self.port), 10))
        except OSError:
            return False
        return True

    def test_a_port_in_use(self):
        with socket.socket() as other:
            other.bind(("127.0.0.1", self.port))
            other.listen()
            results = self.run_all(*(self.ranked(r, *self.WORDS, "--rank-start-timeout", 5)
                                     for r in range(RANKS)))
        self.expect_error(results[:1], f"cannot listen on 127.0.0.1:{self.port}: ")
        self.expect_error(results[1:], f"rank 0 at 127.0.0.1:{self.port}: no meeting within 5s")

    def test_options_that_do_not_fit(self):
        for words, text in ((("--rank", "1"), "--rank: expected --ranks mpi, tcp or nccl"),
                            (("--of", "2"), "--of: expected --ranks mpi, tcp or nccl"),
                            (("--ranks", TRANSPORT), "--of: expected the number of processes"),
                            (("--ranks", TRANSPORT, "--of", "2"),
                             "--rank: expected the number of this process, 0 to 1, found none"),
                            (("--ranks", TRANSPORT, "--of", "2", "--rank", "0"), "--rank-link: "),
                            (("--ranks", TRANSPORT, "--of", "2", "--rank", "0", "--rank-link",
                              "127.0.0.1:99"), "--rank-key-file: ")):
            with self.subTest(words=words):
                ended = run(alone(*self.WORDS, *words))
                self.assertEqual(ended.returncode, 1)
                self.assertIn(text, ended.stderr)

    def test_a_rank_that_cannot_use_nccl_tells_why(self):
        # This rank's options say nccl and a device without streams; the other one is told.
        words = (*self.WORDS, "--device", "cpu")
        common = ("--of", "2", "--rank-link", f"127.0.0.1:{self.port}", "--rank-key-file",
                  str(self.key), "--ranks", "nccl")
        results = self.run_all(*([PROGRAM, *words, *common, "--rank", str(r)] for r in range(2)))
        self.expect_error(results, f"rank 0 on {HOST}: --ranks nccl: expected --device cuda, found "
                                   "cpu")


class Serve(RanksTest):
    """Servers, and what happens to them when a rank ends."""

    WORDS = ("serve", "--model", f"{MODELS}/mh-moe", "--draft-tokens", 0)

    def start_server(self, *words):
        """Starts a server of all ranks; returns it, and the processes of the followers."""
        followers = [self.start(self.ranked(r, *self.WORDS, *words)) for r in range(1, RANKS)]
        server = Server(self.ranked(0, *self.WORDS, *words), self.folder / "leader.log")
        self.addCleanup(server.kill)
        return server, followers

    def requests(self):
        # The emulated device is slow.
        return bodies() if TRANSPORT == "tcp" else [dict(body, max_tokens=3)
                                                    for body in bodies()[:3]]

    def test_answers_and_statistics_are_those_of_one_process(self):
        single = Server(alone(*self.WORDS), self.folder / "alone.log")
        self.addCleanup(single.kill)
        expected = [without_times(text) for _, text in single.complete(self.requests())]
        counted = selections(single)
        self.assertEqual(single.stop(), 0, single.errors())
        server, followers = self.start_server()
        found = [without_times(text) for _, text in server.complete(self.requests())]
        self.assertEqual(found, expected)
        self.assertEqual(selections(server), counted)
        metrics = server.call("/metrics")[1]
        self.assertIn(f"moeserve_ranks {RANKS}\n", metrics)
        self.assertNotIn('moeserve_exchange_bytes_total{kind="gather"} 0\n', metrics)
        self.assertEqual(server.stop(), 0, server.errors())  # by SIGTERM
        for status, _, errors in self.finish(followers, 15):
            self.assertEqual(status, 0, errors)

    def end_follower(self, signal_number, seconds):
        server, followers = self.start_server("--rank-timeout", 4)
        body = {"prompt": "Once", "max_tokens": 8000, "temperature": 0, "ignore_eos": True}
        ended = []
        thread = threading.Thread(target=lambda: ended.extend(server.complete([body] * 2)))
        thread.start()
        time.sleep(0.3)
        begin = time.monotonic()
        followers[-1].send_signal(signal_number)
        self.assertEqual(server.wait(seconds + 15), LOST, server.errors())
        self.assertLess(time.monotonic() - begin, seconds + 5, server.errors())
        thread.join()
        for code, text in ended:
            self.assertEqual(code, 503, text)
            self.assertIn(f"rank {RANKS - 1} on {HOST} was lost", text)
        followers[-1].kill()
        self.assertTrue(wait_until(
            lambda: not any(is_running(process.pid) for process in followers), 15))
        for process in followers[:-1]:
            self.assertEqual(process.wait(5), LOST)

    def test_a_follower_that_is_killed_ends_the_service(self):
        self.end_follower(signal.SIGKILL, 1)

    def test_a_follower_that_is_stopped_ends_the_service(self):
        self.end_follower(signal.SIGSTOP, 6)

    def test_a_leader_that_is_killed_ends_the_followers(self):
        server, followers = self.start_server()
        server.process.kill()
        for process in followers:
            self.assertEqual(process.wait(5), LOST)


if __name__ == "__main__":
    PROGRAM, RANKS, TRANSPORT = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]], verbosity=2)
