"""Ranks that fail at random moments."""

import contextlib
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import threading
import time
import traceback

import namespaces
from mpi_runs import Runs, is_running, run, wait_until
from server_test import MODELS, ServerTest

MODEL = f"{MODELS}/mh-moe"
RANK_TIMEOUT = 8
# A link that is silent for so long is lost, that of a process that is stopped, too.
SILENCE = 5
# What can happen to a rank, and within how many seconds requests end.
KILLED = "killed"  # SIGKILL
CRASHED = "crashed"  # SIGSEGV
STOPPED = "stopped"  # SIGSTOP
CUT = "cut"  # its network is taken down
TRUNCATED = "truncated"  # a packed file that it has mapped is cut short
OVERWRITTEN = "overwritten"  # a packed file was changed before the start
STARVED = "starved"  # it may not get any more address space
REFUSED = "refused"  # some of its allocations of memory fail
# None: it is noticed when the rank reads the file or needs memory.
BOUNDS = {KILLED: 0.5, CRASHED: 0.5, STOPPED: SILENCE + 1, CUT: SILENCE + 1, TRUNCATED: None,
          OVERWRITTEN: None, STARVED: None, REFUSED: None}
FILES = (TRUNCATED, OVERWRITTEN)
MEMORY = (STARVED, REFUSED)
SIGNALS = {KILLED: signal.SIGKILL, CRASHED: signal.SIGSEGV, STOPPED: signal.SIGSTOP}
# How long a client waits for an answer: more than any takes on a slow machine. Without an answer by
# then, the service has forgotten the request.
PATIENCE = 300
# On loaded machines, processes do not always run when they could.
SLACK = float(os.environ.get("SLACK", "3"))
# Every n-th allocation of a rank that is refused memory fails.
REFUSALS = (1, 10, 100, 1000, 10000, 30000)


def body(max_tokens, words=1):
    return {"prompt": "Once upon a time" + " there was a cat" * words, "max_tokens": max_tokens,
            "temperature": 0, "ignore_eos": True}


BODIES = [body(20), body(300), body(6000)]
LATE_BODIES = [body(30, 2), body(60, 40), body(10, 200), body(1000, 3)]


class Failures(ServerTest):
    """FAILURES of the environment says how many there are, KINDS and SEED which."""

    def setUp(self):
        super().setUp()
        self.random = random.Random(int(os.environ.get("SEED", "1")))
        self.worst = {}
        alone = self.start(self.runs.alone("serve", "--model", MODEL))
        self.expected = {}
        for wanted in BODIES + LATE_BODIES:
            status, text = alone.call("/v1/completions", wanted)
            self.assertEqual(status, 200, text)
            self.expected[json.dumps(wanted)] = json.loads(text)["choices"][0]["text"]
        self.assertEqual(alone.stop(), 0)
        self.packed = pathlib.Path(self.folder.name) / "packed"
        made = run([self.runs.program, "pack", MODEL, self.packed, "--quiet"])
        self.assertEqual(made.returncode, 0, made.stderr)

    def keep_log(self, server):
        """Messages have the logs of the servers that they are about."""

    def test_on_this_machine(self):
        self.fail_often([KILLED, CRASHED, STOPPED, *FILES, *MEMORY])

    def test_of_every_kind(self):
        reason = namespaces.why_not()
        if reason:
            print(f"networks are not cut: {reason}", flush=True)
            return self.test_on_this_machine()
        spaces = namespaces.Namespaces(self.runs.ranks)
        self.addCleanup(spaces.close)
        self.cut_runs = Runs(self.runs.mpiexec, self.runs.program, self.runs.ranks, spaces)
        return self.fail_often(list(BOUNDS))

    def fail_often(self, kinds):
        if not self.failing_memory().exists():
            print(f"no allocations are refused: {self.failing_memory()} is missing", flush=True)
            kinds.remove(REFUSED)
        if "KINDS" in os.environ:
            kinds = os.environ["KINDS"].split(",")
        for i in range(int(os.environ.get("FAILURES", len(kinds)))):
            # All kinds in turn, so that a short test has each.
            kind = kinds[i % len(kinds)]
            rank = self.random.randrange(self.runs.ranks)
            with self.subTest(i=i, kind=kind, rank=rank):
                try:
                    self.fail_once(kind, rank)
                except Exception:
                    # At once: the rest can take long.
                    print(i, kind, rank, traceback.format_exc(), flush=True)
                    raise
        for kind, (count, losses, seconds) in self.worst.items():
            print(f"{kind}: {count} times, service lost {losses} times, requests ended within "
                  f"{seconds:.2f} s", flush=True)

    def fail_once(self, kind, rank):
        self.runs = self.cut_runs if kind == CUT else self.all_runs
        command = self.runs.ranked("serve", "--model", MODEL, "--rank-timeout", RANK_TIMEOUT)
        folders = None
        if kind in FILES:
            folders = self.copy_files()
            command = self.with_script(
                command, f"MOESERVE_PACKED_CACHE={folders}/$OMPI_COMM_WORLD_RANK")
            command += ["--memory", "1MiB"]  # less than the experts have
        if kind == REFUSED:
            command = self.with_script(
                command, f"LD_PRELOAD={self.failing_memory()} MOESERVE_TEST_FAILING_MEMORY=" +
                str(self.random.choice(REFUSALS)))
        if kind == OVERWRITTEN:
            self.damage_file(kind, folders / str(rank))
        try:
            server = self.start(command)
        except AssertionError as error:
            # The first step, which no client has asked for, may find the damage.
            if kind != OVERWRITTEN:
                raise
            self.assertIn("the checksum differs", str(error))
            return self.note(kind, True, 0)
        self.assertEqual(len(server.pids), self.runs.ranks)
        ended = []
        threads = [self.send(server, ended, BODIES)]
        time.sleep(self.random.random())
        begin = time.monotonic()
        if kind in SIGNALS:
            os.kill(server.pids[rank], SIGNALS[kind])
        elif kind == CUT:
            self.runs.namespaces.set_link(rank, False)
            self.addCleanup(self.runs.namespaces.mend)
        elif kind == TRUNCATED:
            self.damage_file(kind, folders / str(rank))
        elif kind == STARVED:
            limits = self.starve(server.pids[rank])
        elif kind == REFUSED:
            os.kill(server.pids[rank], signal.SIGUSR2)
        # All requests may have ended before. So that some run while a rank is stopped:
        if kind in FILES + MEMORY or kind == STOPPED:
            threads.append(self.send(server, ended, LATE_BODIES))
        bound = (BOUNDS[kind] or 60) + SLACK
        if kind == STOPPED and rank == 0:
            # A leader that is stopped answers nobody: its clients wait, the ranks do not.
            self.assertTrue(wait_until(
                lambda: not any(map(is_running, server.pids[1:])), bound), server.errors())
            os.kill(server.pids[0], signal.SIGKILL)
        for thread in threads:
            thread.join(PATIENCE + 10)
        seconds = time.monotonic() - begin
        self.assertEqual(len(ended), sum(len(b) for b in (BODIES, LATE_BODIES)[:len(threads)]))
        # A rank that is gone is always a loss, also if all requests had ended before. One without
        # memory may fail some requests only.
        gone = kind in SIGNALS or kind == CUT
        lost = (gone or any('"engine_dead"' in text or code != 200 and kind not in MEMORY
                    for _, code, text in ended) or not all(map(is_running, server.pids)))
        if kind == STARVED and not lost:
            with contextlib.suppress(OSError):
                resource.prlimit(server.pids[rank], resource.RLIMIT_AS, limits)
        self.end(server, kind, rank, lost)
        for wanted, code, text in ended:
            self.check_answer(server, kind, rank, lost, wanted, code, text)
        if lost:
            self.assertLess(seconds, bound, server.errors())
        self.assertTrue(lost or kind in FILES + MEMORY, server.errors())
        self.note(kind, lost, seconds)
        if kind == CUT:
            self.runs.namespaces.mend()

    def end(self, server, kind, rank, lost):
        """The server ends, or can be ended."""
        if not lost:
            status = server.stop()
            self.assertTrue(status == 0 or kind in MEMORY, f"{status}: {server.errors()}")
        elif kind == CUT:
            # mpirun and its daemon on the lost machine may stay; the ranks do not.
            self.expect_none_left(server)
            server.process.kill()
            server.wait(20)
        else:
            if kind == STOPPED and rank > 0:
                os.kill(server.pids[rank], signal.SIGKILL)
            self.assertTrue(wait_until(lambda: server.process.poll() is not None, 20),
                            server.errors())
            self.assertNotEqual(server.wait(1), 0, server.errors())
        self.expect_none_left(server)

    def note(self, kind, lost, seconds):
        count, losses, most = self.worst.get(kind, (0, 0, 0.0))
        self.worst[kind] = (count + 1, losses + lost, max(most, seconds if lost else 0.0))

    def send(self, server, ended, bodies):
        """Sends requests on a thread, which adds each with its status and text to `ended`."""
        def run_all():
            for wanted, (code, text) in zip(bodies, server.complete(bodies, PATIENCE)):
                ended.append((wanted, code, text))

        thread = threading.Thread(target=run_all)
        thread.start()
        return thread

    def check_answer(self, server, kind, rank, lost, wanted, code, text):
        """Every answer is right or says why there is none."""
        said = f"{code} {text}: {server.errors()}"
        if code == 200:
            answer = json.loads(text)["choices"][0]["text"]
            self.assertEqual(answer, self.expected[json.dumps(wanted)], said)
        elif code == 503 and "was lost" in text:
            # A leader that runs again or has no network has lost all others.
            if rank > 0:
                self.assertIn(f"rank {rank} on {self.host(rank)} was lost", said)
            self.assertIn('"engine_dead"', said)
        elif code == 503 and "the engine has stopped" in text and wanted in LATE_BODIES:
            # Sent to a leader that knows of the loss.
            self.assertTrue(lost and '"engine_dead"' in text, said)
        elif code == 503 and kind == STOPPED and rank == 0:
            # mpirun continues a stopped leader to end it, which may then refuse what it finds.
            self.assertIn('"draining"', text, said)
        elif code == 0:
            # Of a leader that has ended, or an answer to a request that was sent after that.
            self.assertTrue(lost and (rank == 0 and kind != CUT or wanted in LATE_BODIES), said)
        elif kind in FILES:
            self.assertIn(code, (500, 503), said)
            self.assertRegex(server.errors(), r"file \S*\.packed", said)
        else:
            self.assertIn(kind, MEMORY, said)
            self.assertIn(code, (429, 500, 503), said)

    def host(self, rank):
        spaces = self.runs.namespaces
        return super().host(rank) if spaces is None else spaces.names[rank]

    def copy_files(self):
        """Returns a folder with a copy of the packed files for each rank."""
        folders = pathlib.Path(self.folder.name) / str(time.monotonic_ns())
        for r in range(self.runs.ranks):
            shutil.copytree(self.packed, folders / str(r))
        return folders

    def with_script(self, command, variables):
        """The command with variables of the environment that a shell sets in each rank."""
        at = command.index(self.runs.program)
        return [*command[:at], "sh", "-c", f'{variables} exec "$0" "$@"', *command[at:]]

    def failing_memory(self):
        """The path of failing_memory.cc, built."""
        return (pathlib.Path(self.runs.program).resolve().parent /
                "tests/ranks/libmoeserve_failing_memory.so")

    def damage_file(self, kind, folder):
        """Cuts a file at a random place, or changes a byte in some pages of a file of experts."""
        pattern = "*.packed" if kind == TRUNCATED else "*experts*.packed"
        file = self.random.choice(sorted(folder.rglob(pattern)))
        size = file.stat().st_size
        with open(file, "r+b") as opened:
            if kind == TRUNCATED:
                opened.truncate(self.random.randrange(4096, size))
                return
            for page in range(4096, size, 4096):
                if self.random.random() < 0.7:
                    continue
                opened.seek(page + self.random.randrange(min(4096, size - page)))
                byte = opened.read(1)[0]
                opened.seek(-1, os.SEEK_CUR)
                opened.write(bytes([byte ^ 0x10]))

    @staticmethod
    def starve(pid):
        """Allows a process no more address space than it has; returns its limits before."""
        pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[0])
        limits = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS,
                         (pages * resource.getpagesize(), limits[1]))
        return limits
