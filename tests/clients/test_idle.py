"""Tests that a server without requests uses almost no CPU time."""

import os
import pathlib
import time

from conftest import post, start_server, stop_server

SECONDS = 10.0
MAX_WAKE_UPS = 15.0  # per second, of all threads; one thread that polls every 100 ms exceeds it
MAX_SHARE = 0.01  # of one core's time, beside what the wake-ups cost
# One period within the limits is enough, because other programs may disturb some periods. A server
# that polls exceeds the limits in every period.
PERIODS = 3


def processor_seconds(pid):
    """Returns the user and system time of all threads of a process, in seconds."""
    # The process name may contain any character; it ends at the last parenthesis.
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wake_ups(pid):
    """Returns how often the threads of a process have waited for something."""
    count = 0
    for status in pathlib.Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            lines = status.read_text().splitlines()
        except OSError:  # the thread has ended
            continue
        count += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))
    return count


def observe(pid):
    """Returns the wake-ups per second and the share of a core that a process uses beside them.

    Some virtual machines charge more than a millisecond for each wake-up. Its cost is therefore
    measured in the same period, by the wake-ups of this thread.
    """
    own_wake_ups = int(SECONDS / 0.2)
    waits, before, own = wake_ups(pid), processor_seconds(pid), time.thread_time()
    start = time.monotonic()
    for _ in range(own_wake_ups):
        time.sleep(0.2)
    cost = (time.thread_time() - own) / own_wake_ups
    elapsed = time.monotonic() - start
    used, waits = processor_seconds(pid) - before, wake_ups(pid) - waits
    return waits / elapsed, (used - waits * cost) / elapsed


def test_idle_costs_nothing():
    server = start_server()
    try:
        # A first request makes every thread of the server work once.
        post(server, "/v1/completions", {"prompt": "The", "max_tokens": 16})
        time.sleep(1.0)
        seen = []
        for _ in range(PERIODS):
            seen.append(observe(server.process.pid))
            if seen[-1][0] < MAX_WAKE_UPS and seen[-1][1] < MAX_SHARE:
                break
        else:
            raise AssertionError(f"wake-ups per second and shares of one core's time: {seen}")
    finally:
        assert stop_server(server) == 0
