"""Serves a bundled model with a chat template for the tests of frameworks."""

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("clients_conftest", ROOT / "tests/clients/conftest.py")
clients = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(clients)


@pytest.fixture(scope="session")
def server():
    running = clients.start_server(
        "--chat-template", str(ROOT / "tests/chat/templates/chatml.jinja"))
    yield running
    assert clients.stop_server(running) == 0
