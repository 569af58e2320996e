"""Runs the program as one process and as several ranks under mpirun."""

import contextlib
import http.client
import json
import os
import pathlib
import signal
import subprocess
import threading
import time

from namespaces import CLIENTS

START_SECONDS = 120
ROOT = pathlib.Path(__file__).resolve().parents[2]


class Runs:
    """How the program and mpirun are started: on this machine, or in namespaces."""

    def __init__(self, mpiexec, program, ranks, namespaces=None):
        self.mpiexec = mpiexec
        self.program = program
        self.ranks = ranks
        self.namespaces = namespaces

    def launcher(self, count):
        if self.namespaces is not None:
            # Each namespace would have its rank on the first core, as a machine of its own.
            return [*self.namespaces.launcher(self.mpiexec, count), "--bind-to", "none"]
        # mpirun refuses root and more ranks than cores unless it is told. Containers often forbid
        # that a process reads the memory of another one.
        return [self.mpiexec, "--allow-run-as-root", "--oversubscribe", "--mca",
                "btl_vader_single_copy_mechanism", "none", "-n", str(count)]

    def alone(self, *words):
        return [self.program, *map(str, words), "--threads", "1"]

    def ranked(self, *words, count=None):
        return [*self.launcher(count or self.ranks), *self.alone(*words), "--ranks", "mpi"]

    def different(self, words):
        """A command in which rank r has words[r]; if they begin with a path, that of a program."""
        command = self.launcher(1)
        for rank, own in enumerate(words):
            program = [] if not isinstance(own[0], pathlib.Path) else [own[0]]
            whole = [*self.alone(*own[len(program):]), "--ranks", "mpi"]
            command += [*([":", "-n", "1"] if rank > 0 else []), *(program or whole[:1]), *whole[1:]]
        return [str(word) for word in command]


def program_of_another_commit(program, folder):
    """Writes a copy of a program that says that it is of another commit; None if it knows none."""
    with contextlib.suppress(OSError):
        text = (pathlib.Path(program).parent / "server/commit.inc").read_text()
        commit = text.split('"')[1].encode()
        code = pathlib.Path(program).read_bytes()
        if commit and code.count(commit) == 1:
            other = pathlib.Path(folder) / "moeserve"
            other.write_bytes(code.replace(commit, commit[::-1]))
            other.chmod(0o755)
            # The library is found beside the program.
            library = pathlib.Path(program).resolve().parent / "libmoeserve_mpi.so"
            if library.exists():
                (other.parent / library.name).symlink_to(library)
            return other
    return None


def run(command, timeout=120):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout,
                          check=False)


def is_running(pid):
    """Whether a process exists that has not ended."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def children(pid):
    """The processes that `pid` has started, which have not ended, in the order of their ids."""
    found = []
    for folder in pathlib.Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == pid and fields[0] not in "ZX":
                found.append(int(folder.name))
    return sorted(found)


class Server:
    """A server on free ports, of one process or of several ranks.

    `pids` are the processes of the ranks, in their order if they are on this machine.
    """

    def __init__(self, command, log, namespaces=None):
        self.log = log
        self.host = "127.0.0.1" if namespaces is None else f"{CLIENTS}.10"
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(
                [*command, "--http", f"{self.host}:0", "--grpc", f"{self.host}:0",
                 "--allow-open"], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.port = None
        # A start that waits for what never comes must fail, not hang.
        alarm = threading.Timer(START_SECONDS, self.process.kill)
        alarm.start()
        for line in self.process.stdout:
            if line.startswith("http listening on "):
                self.port = int(line.strip().rsplit(":", 1)[1])
            if line.startswith("grpc listening on "):
                break
        alarm.cancel()
        if self.port is None:
            self.wait(START_SECONDS)
            raise AssertionError(f"the server did not start: {self.errors()}")
        self.pids = (children(self.process.pid) if namespaces is None else
                     namespaces.pids("moeserve"))

    def errors(self):
        return pathlib.Path(self.log).read_text(errors="replace")

    def call(self, path, body=None, timeout=60):
        """Returns the status and the body of an answer; status 0 if there was none."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body),
                                   {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            connection.close()

    def complete(self, bodies, timeout=60):
        """Sends requests at the same time and returns their answers, in the order of `bodies`."""
        answers = [None] * len(bodies)

        def send(i):
            answers[i] = self.call("/v1/completions", bodies[i], timeout)

        threads = [threading.Thread(target=send, args=(i,)) for i in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def wait(self, seconds):
        """Waits until the server has ended; returns its exit status."""
        self.process.stdout.close()
        return self.process.wait(seconds)

    def stop(self):
        if self.process.poll() is None:
            # The signal of a drain: mpirun would kill its processes after SIGTERM.
            self.process.send_signal(signal.SIGUSR1 if self.pids else signal.SIGTERM)
        return self.wait(60)

    def kill(self):
        """Ends whatever is left; for tests that have failed."""
        for pid in [*self.pids, self.process.pid]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


def wait_until(condition, seconds):
    """Returns whether the condition became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
