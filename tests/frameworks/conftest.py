"""Serves a bundled model with a chat template for the tests of frameworks.

The tests run frameworks in their default modes. The model's texts have no meaning; what counts is
that every framework gets answers that it can read.
"""

import importlib.util
import json
import os
import pathlib
import shutil

import pytest

# litellm would otherwise fetch a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("clients_conftest", ROOT / "tests/clients/conftest.py")
clients = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(clients)


def model_that_ends(folder):
    """Copies the model to `folder`, with a full stop as one more end of a text. So its answers end
    by themselves, as clients expect of answers that no limit has cut."""
    shutil.copytree(clients.model(), folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**settings, "eos_token_id": [end, vocabulary["."]]}))
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    folder = model_that_ends(tmp_path_factory.mktemp("models") / "model")
    running = clients.start_server(
        "--chat-template", str(ROOT / "tests/chat/templates/chatml.jinja"), folder=folder)
    yield running
    assert clients.stop_server(running) == 0


@pytest.fixture
def base_url(server):
    return f"{server.url}/v1"
