"""Tests `moeserve config` and `moeserve serve --config`."""

import json
import os
import subprocess
import urllib.request

import pytest

from conftest import Server, binary, model, stop_server


def run(*arguments, **variables):
    """Runs the program; returns (exit status, standard output, standard error)."""
    environment = {k: v for k, v in os.environ.items() if k not in ("MOESERVE_HTTP", "MOESERVE_GRPC")}
    done = subprocess.run([binary(), *arguments], env={**environment, **variables}, text=True,
                          capture_output=True, timeout=30)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def config(tmp_path):
    """Returns a function that writes a configuration file and returns its path."""
    path = tmp_path / "moeserve.yaml"

    def write(text):
        path.write_text(text)
        return str(path)

    return write


def test_a_served_file(config):
    file = config(f"model: {json.dumps(str(model()))}\nhttp: 127.0.0.1:0\ngrpc: 127.0.0.1:0\n"
                  "served-model-name:\n- one\n- two\nno-dashboard: true\n")
    process = subprocess.Popen([binary(), "serve", "--config", file], text=True,
                               stdout=subprocess.PIPE)
    address = process.stdout.readline().split()[-1]
    server = Server(address, process.stdout.readline().split()[-1], "one", process)
    try:
        models = json.load(urllib.request.urlopen(server.url + "/v1/models"))
        assert [entry["id"] for entry in models["data"]] == ["one", "two"]
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(server.url + "/")
    finally:
        assert stop_server(server) == 0


def test_show_prints_a_file_that_gives_the_same(config):
    file = config("model: some/folder\nmax-num-seqs: 8\nhttp: 127.0.0.1:1\nstrict-fields: true\n")
    status, shown, _ = run("config", "show", "--config", file, "--max-num-seqs", "16",
                           MOESERVE_GRPC="127.0.0.1:9")
    assert status == 0
    lines = shown.splitlines()
    assert f"model: [some/folder]  # {file}:1" in lines
    assert "max-num-seqs: 16  # command line" in lines
    assert 'grpc: "127.0.0.1:9"  # environment MOESERVE_GRPC' in lines
    assert f"strict-fields: true  # {file}:4" in lines
    assert "log-level: info  # default" in lines
    again = run("config", "show", "--config", config(shown))[1].splitlines()
    assert [x.split("  # ")[0] for x in again] == [x.split("  # ")[0] for x in lines]


def test_check(config, tmp_path):
    assert run("config", "check", config("model: m\nmax-num-seqs: 8\n"))[0] == 0
    template = tmp_path / "broken.jinja"
    template.write_text("{% if %}")
    keys = tmp_path / "keys"
    keys.write_text('{"keys": 1}')
    for text, line, words in [
            ("model: m\nmax-num-seq: 8\n", 2, "max-num-seqs"),
            ("max-num-seqs: 0\n", 1, "from 1 to"),
            ("\nhttp: localhost\n", 2, "HOST:PORT"),
            ("http: 0.0.0.0:80\n", None, "--api-key-file"),
            (f"chat-template: {template}\n", 1, "--chat-template"),
            (f"\napi-key-file: {keys}\n", 2, "--api-key-file"),
            ("kv-cache-memory: much\n", 1, "--kv-cache-memory"),
            ("moe-metrics: much\n", 1, "much")]:
        file = config(text)
        status, _, errors = run("config", "check", file)
        assert status == 1, text
        assert words in errors and (line is None or f"{file}:{line}" in errors), errors


def test_errors_of_serve_are_usage_errors(config):
    file = config("modle: m\n")
    status, _, errors = run("serve", "--config", file)
    assert status == 2
    assert f'{file}:1: expected the name of an option, found "modle"; did you mean "model"?' in errors
    status, _, errors = run("serve")
    assert status == 2 and "--model is required" in errors
