#!/usr/bin/env python3
"""Measures how long servers take until they are ready, as one process and as ranks, and what idle
ranks cost.

    ready_and_idle.py BUILD_FOLDER MODEL [--ranks 2] [--rounds 8] [--idle-seconds 30]

Starts a server of one process and one of ranks under mpirun in turns; both have one thread for each
rank, all together. Who begins alternates: on some machines every other start takes longer, whoever
it is, so the ratio ranks / one process is the geometric mean of the medians of both orders. Prints
medians, the ratio, and of the last server the share of a core that each rank takes while nothing is
asked for. Required of two ranks: a ratio of at most 1.1, and at most 1 % for followers. The status is 2 if that is not so. MODEL should
take seconds to load, because mpirun takes some tenths of a second; write_synthetic writes one. It
is read once before, so that the page cache has it. Weights are not kept in packed files, which one
process would map at once in later rounds, unless options of the server say so after --.
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "ranks")]

import cpu_common
import mpi_runs

MOST_RATIO = 1.1
MOST_SHARE = 0.01
SETTLE_SECONDS = 3


def commands(arguments):
    """The commands of one process and of ranks, which Server completes."""
    program = str(pathlib.Path(arguments.build).resolve() / "moeserve")
    serve = [program, "serve", "--model", str(pathlib.Path(arguments.model).resolve()),
             *arguments.more]
    launcher = mpi_runs.Runs(arguments.mpirun, program, arguments.ranks).launcher(arguments.ranks)
    return ([*serve, "--threads", str(arguments.ranks)],
            [*launcher, "--bind-to", "none", *serve, "--threads", "1", "--ranks", "mpi"])


def start(command, folder):
    """Returns the server and the seconds until it listened."""
    begin = time.monotonic()
    server = mpi_runs.Server(command, pathlib.Path(folder) / "log")
    return server, time.monotonic() - begin


def core_seconds(pid):
    """The processor time of all threads of a process."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_shares(pids, seconds):
    """The share of a core that each process takes in the next seconds."""
    begin = time.monotonic()
    before = [core_seconds(pid) for pid in pids]
    time.sleep(seconds)
    took = time.monotonic() - begin
    return [(core_seconds(pid) - b) / took for pid, b in zip(pids, before)]


def measure(arguments):
    """Returns the seconds of both in each round, by whether one process began, and the idle shares of
    the last ranks."""
    alone, ranked = commands(arguments)
    times, shares = {True: [], False: []}, []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(arguments.rounds):
            of_round = {}
            # The last one, ranks, is measured while it is idle.
            alone_first = i % 2 == 1
            order = [alone, ranked] if alone_first else [ranked, alone]
            for command in order:
                server, seconds = start(command, folder)
                try:
                    of_round[command is ranked] = seconds
                    if i == arguments.rounds - 1 and command is ranked:
                        time.sleep(SETTLE_SECONDS)
                        shares = idle_shares(server.pids, arguments.idle_seconds)
                    # A single process has no child, and ends by SIGTERM.
                    server.stop()
                finally:
                    if server.process.poll() is None:
                        server.kill()
            times[alone_first].append((of_round[False], of_round[True]))
            print(f"{'one process' if alone_first else 'ranks'} first: ready after "
                  f"{of_round[False]:.2f} s and {of_round[True]:.2f} s", file=sys.stderr)
    return times, shares


def main(words):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build")
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8, help="even")
    parser.add_argument("--idle-seconds", type=float, default=30)
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("more", nargs="*", default=["--packed-cache", "off"],
                        help="options of moeserve serve, after --; default: --packed-cache off")
    arguments = parser.parse_args(words)
    if arguments.rounds < 2 or arguments.rounds % 2 != 0:
        parser.error(f"--rounds: expected an even number, found {arguments.rounds}")
    cpu_common.read_once(arguments.model)
    times, shares = measure(arguments)
    alone, ranked = zip(*times[True], *times[False])
    first, second = (statistics.median(r / a for a, r in times[order]) for order in (True, False))
    ratio = (first * second) ** 0.5
    print(f"ready: one process {statistics.median(alone):.2f} s, {arguments.ranks} ranks "
          f"{statistics.median(ranked):.2f} s, ratio {ratio:.2f} ({first:.2f} if one process starts "
          f"first, {second:.2f} if ranks do); asked: at most {MOST_RATIO}")
    print(f"idle for {arguments.idle_seconds:.0f} s: " + ", ".join(
        f"{'leader' if i == 0 else f'rank {i}'} {share:.2%} of a core"
        for i, share in enumerate(shares)) + f"; asked of followers: at most {MOST_SHARE:.0%}")
    good = ratio <= MOST_RATIO and all(share <= MOST_SHARE for share in shares[1:])
    return 0 if good else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
