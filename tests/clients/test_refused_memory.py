"""Tests that a server whose allocations fail leaves no client without an end, and, if it lives,
serves again when they succeed."""

import concurrent.futures
import http.client
import json
import os
import signal
import time

import pytest

from conftest import binary, start_server, stop_server, streamed_text, wait_for

# More than every request takes, on a slow machine, too. A client that waits for as long has been
# forgotten.
PATIENCE = 300
REQUESTS = 60
CLIENTS = 6
# What a server may say that has no memory.
REFUSALS = (429, 500, 503)


def body(i):
    return {"prompt": "Once upon a time there was a " + ("cat", "dog", "tree")[i % 3],
            "max_tokens": 3 + i % 20, "temperature": 0, "ignore_eos": True, "stream": i % 2 == 1}


def ask(server, i):
    """Sends request i on a connection of its own. Returns its text; None if the server has said that
    it cannot answer, or has closed the connection before the end. TimeoutError if neither."""
    connection = http.client.HTTPConnection(server.http, timeout=PATIENCE)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body(i)),
                           {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            assert response.status in REFUSALS, response.read()
            return None
        if body(i)["stream"]:
            return streamed_text(response)
        return json.load(response)["choices"][0]["text"]
    except TimeoutError:
        raise
    except (http.client.HTTPException, OSError, ValueError):
        return None
    finally:
        connection.close()


@pytest.fixture
def starved(request, tmp_path):
    library = binary().parent / "tests/ranks/libmoeserve_failing_memory.so"
    if not library.exists():
        pytest.skip(f"{library} is not built")
    environment = {**os.environ, "LD_PRELOAD": str(library),
                   "MOESERVE_TEST_FAILING_MEMORY": str(request.param)}
    with (tmp_path / "log").open("w") as log:
        server = start_server(env=environment, stderr=log)
        yield server
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("starved", [20, 300, 2000, 10000], indirect=True)
def test_every_request_has_an_end(starved):
    expected = [ask(starved, i) for i in range(REQUESTS)]
    assert None not in expected
    starved.process.send_signal(signal.SIGUSR2)
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda i: ask(starved, i), range(REQUESTS)))
    wrong = [i for i in range(REQUESTS) if answers[i] not in (None, expected[i])]
    assert not wrong
    # A library may have ended the process, which is an end of all requests, too: json, for example,
    # cannot clean up after a failed allocation.
    starved.process.send_signal(signal.SIGUSR2)
    # The process may get the signal later than the next requests, and may end until then.
    def ended_or_serves():
        answers = [ask(starved, i) for i in range(REQUESTS)]
        assert all(answer in (None, right) for answer, right in zip(answers, expected))
        return starved.process.poll() is not None or answers == expected

    assert wait_for(ended_or_serves, PATIENCE)
    if starved.process.poll() is not None:
        assert starved.process.poll() < 0
        return
    assert stop_server(starved) == 0
