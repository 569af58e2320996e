"""Starts the server for the tests of this folder. MOESERVE_BIN and MOESERVE_MODEL: see
tests/clients/conftest.py."""

import importlib.util
import pathlib

import pytest

_path = pathlib.Path(__file__).resolve().parents[1] / "clients/conftest.py"
_spec = importlib.util.spec_from_file_location("clients_conftest", _path)
clients = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(clients)

TEXTS = ["The", "Once upon a time"]


@pytest.fixture(scope="module")
def server():
    running = clients.start_server("--model-control")
    yield running
    assert clients.stop_server(running) == 0


@pytest.fixture(scope="module")
def answers(server):
    """Returns what the completions interface answers to TEXTS, after the texts themselves."""
    body = {"prompt": TEXTS, "max_tokens": 8, "temperature": 0, "echo": True}
    return [choice["text"] for choice in clients.post(server, "/v1/completions", body)["choices"]]


def decoded(array):
    return [x.decode() if isinstance(x, bytes) else x for x in array]
