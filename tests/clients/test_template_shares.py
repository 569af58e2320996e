"""Clients with slow chat templates do not make the chats of another client wait.

The limits are in multiples of the time that one slow template takes in the same run, so that they
hold on busy machines, too.
"""

import contextlib
import http.client
import json
import statistics
import threading
import time

import pytest

from conftest import slow as slow_test, start_server, stop_server, wait_for

# The slowest loops over these filters that are within the limit on a template's work.
SLOW = [("{% for i in range(12000) %}{% set _ = a | join(',') %}{% endfor %}x", [1.5] * 200),
        ("{% for i in range(70) %}{% set _ = a | sort %}{% endfor %}x",
         ["a" * 50 + str(i * 7919 % 2000) for i in range(2000)])]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SLOW_CLIENTS = 8
KEY = "shares-key-{}-0123456789"


class Client:
    """Sends chats over a connection of its own, with a key of its own if the server has keys."""

    def __init__(self, server, number):
        self.connection = http.client.HTTPConnection(server.http, timeout=120)
        self.headers = {"Content-Type": "application/json",
                        "Authorization": f"Bearer {KEY.format(number)}"}

    def chat(self, template, values):
        """Returns how many seconds the answer took."""
        body = {"messages": [{"role": "user", "content": "The"}], "max_tokens": 1,
                "chat_template": template, "chat_template_kwargs": {"a": values}}
        begin = time.monotonic()
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body), self.headers)
        response = self.connection.getresponse()
        text = response.read()
        assert response.status == 200, text
        return time.monotonic() - begin


@contextlib.contextmanager
def slow_clients(server):
    """Eight clients that send slow templates, one after the other, until the block ends. Yields,
    once each has had an answer, the list of pairs (client, seconds that an answer took)."""
    stopping, took, failed = threading.Event(), [], []

    def run(number):
        client = Client(server, number)
        try:
            while not stopping.is_set():
                took.append((number, client.chat(*SLOW[number % len(SLOW)])))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(SLOW_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        assert wait_for(lambda: failed or len({number for number, _ in took}) == SLOW_CLIENTS, 120)
        yield took
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    assert not failed, failed


# Without keys, and where addresses are not limited, every connection is a client.
@pytest.mark.parametrize("keys", [True, pytest.param(False, marks=slow_test)])
def test_slow_templates_delay_nobody_else(tmp_path, keys):
    file = tmp_path / "keys"
    file.write_text("\n".join(KEY.format(number) for number in range(SLOW_CLIENTS + 1)))
    file.chmod(0o600)
    server = start_server("--allow-request-chat-template", *(["--api-key-file", file] if keys else []))
    try:
        other = Client(server, SLOW_CLIENTS)
        slow = min(Client(server, number).chat(*SLOW[0]) for number in range(2))
        with slow_clients(server) as took:
            waits = []
            for _ in range(9):
                waits.append(other.chat(PLAIN, []))
                time.sleep(slow / 4)
    finally:
        assert stop_server(server) == 0
    seconds = [second for _, second in took]
    found = f"one slow template alone: {slow:.2f} s; the slow clients: {seconds}; the other: {waits}"
    assert statistics.median(waits) < slow, found
    # One slow template may be in the way, but not those that wait.
    assert max(waits) < statistics.median(seconds), found
    # The slow clients wait for each other.
    assert statistics.median(seconds) > slow, found
