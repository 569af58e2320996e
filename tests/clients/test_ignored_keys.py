"""Tests --ignore-config: commands that load a model read its configuration without the given keys."""

import json
import pathlib
import shutil
import subprocess
import urllib.request

import pytest

from conftest import binary, model, start_server, stop_server


def run(*arguments):
    done = subprocess.run([binary(), *map(str, arguments)], text=True, capture_output=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose configuration has two keys that nobody knows."""
    to = tmp_path_factory.mktemp("odd") / "odd-model"
    to.mkdir()
    for path in pathlib.Path(model()).iterdir():
        if path.name != "config.json" and path.is_file():
            shutil.copy(path, to)
    config = json.loads((pathlib.Path(model()) / "config.json").read_text())
    config["odd_key"] = 3
    config["norm"]["odd"] = True
    (to / "config.json").write_text(json.dumps(config))
    return to


IGNORE = ["--ignore-config", "odd_key", "--ignore-config", "norm.odd"]


def commands(folder, new):
    return {
        "check": ["check", folder],
        "inspect": ["inspect", folder],
        "generate": ["generate", folder, "--prompt", "a", "--max-tokens", "2", "--quiet"],
        "convert": ["convert", folder, new / "converted", "--quiet"],
        "quantize": ["quantize", folder, new / "quantized", "--dtype", "int8", "--quiet"],
    }


@pytest.mark.parametrize("name", ["check", "inspect", "generate", "convert", "quantize"])
def test_commands_name_and_take_the_option(folder, tmp_path, name):
    words = commands(folder, tmp_path)[name]
    status, _, errors = run(*words)
    assert status == 1
    assert "--ignore-config odd_key" in errors and "--ignore-config norm.odd" in errors
    status, out, errors = run(*words, *IGNORE)
    assert status == 0, errors
    if name in ("check", "inspect"):
        assert "read without these keys, as --ignore-config says: odd_key, norm.odd" in out
    if name in ("convert", "quantize"):  # the new folder lacks the keys
        assert run("check", tmp_path / words[2].name)[0] == 0


@pytest.mark.parametrize("words", [["serve"], ["check"], ["generate"], ["inspect"], ["score"], ["convert"],
                                   ["quantize"], ["chat"], ["bench"], ["bench", "load"],
                                   ["experts", "save"], ["experts", "show"], ["experts", "diff"],
                                   ["experts", "compare"]])
def test_help_names_the_option(words):
    assert "--ignore-config" in run(*words, "--help")[1]


def test_a_server_takes_the_option(folder, monkeypatch):
    monkeypatch.setenv("MOESERVE_MODEL", str(folder))
    server = start_server(*IGNORE)
    try:
        with urllib.request.urlopen(f"{server.url}/v1/models") as answer:
            assert json.load(answer)["data"][0]["id"] == server.name
    finally:
        assert stop_server(server) == 0
