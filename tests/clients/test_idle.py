"""Tests that a server without requests uses almost no CPU time."""

import os
import pathlib
import time

from conftest import post, start_server, stop_server

SECONDS = 10.0
SHARE = 0.01  # the largest allowed share of one core's time


def processor_seconds(pid):
    """Returns the user and system time of all threads of a process, in seconds."""
    # The process name may contain any character; it ends at the last parenthesis.
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_idle_costs_nothing():
    server = start_server()
    try:
        # A first request makes every thread of the server work once.
        post(server, "/v1/completions", {"prompt": "The", "max_tokens": 16})
        time.sleep(1.0)
        before, start = processor_seconds(server.process.pid), time.monotonic()
        time.sleep(SECONDS)
        used = processor_seconds(server.process.pid) - before
        assert used < SHARE * (time.monotonic() - start), f"{used:.2f} s of {SECONDS:.0f} s"
    finally:
        assert stop_server(server) == 0
