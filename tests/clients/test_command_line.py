"""Tests the command line: unknown words, arguments without a name, addresses, help."""

import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys

import pytest

from conftest import Server, binary, model, stop_server


def run(*arguments, **variables):
    """Runs the program; returns (exit status, standard output, standard error)."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOESERVE_H")}
    done = subprocess.run([binary(), *map(str, arguments)], env={**environment, **variables},
                          text=True, capture_output=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def commands(*path):
    """Returns the names of the commands that a command has."""
    listed = run(*path, "--help")[1].partition("\nCommands:\n")[2]
    return re.findall(r"^  (\S+)", listed, re.M)


def all_commands(*path):
    """Returns the paths of all commands below one."""
    for name in commands(*path):
        yield (*path, name)
        yield from all_commands(*path, name)


@pytest.mark.parametrize("words, unknown, nearest", [
    (["srve"], "srve", "serve"),
    (["serve", "--htp"], "--htp", "--http"),
    (["serve", "--model", "/missing", "--htp", "x"], "--htp", "--http"),
    (["serve", "/missing", "--max-num-seq=4"], "--max-num-seq", "--max-num-seqs"),
    (["generate", "--promt", "x"], "--promt", "--prompt"),
    (["experts", "shwo", "x"], "shwo", "show"),
    (["bench", "laod"], "laod", "load"),
    (["--versoin"], "--versoin", "--version"),
    # The names that other programs use.
    (["serve", "m", "--max-num-batched-tokens", "1"], "--max-num-batched-tokens", "--max-step-tokens"),
    (["serve", "m", "-c", "100"], "-c", "--max-model-len"),
    (["serve", "m", "-np", "4"], "-np", "--max-num-seqs"),
    (["generate", "--temp", "1"], "--temp", "--temperature"),
])
def test_unknown_words(words, unknown, nearest):
    status, out, errors = run(*words)
    assert (status, out) == (2, "")
    assert f'"{unknown}"; did you mean "{nearest}"?' in errors
    assert len(errors.splitlines()) == 2


@pytest.mark.parametrize("words", [["zzzzzz"], ["serve", "m", "--zzzzzz"], ["generate", "m", "zzzzzz"]])
def test_unknown_words_without_a_similar_one(words):
    status, _, errors = run(*words)
    assert status == 2 and 'unknown' in errors and '"zzzzzz"' in errors.replace("--z", "z")
    assert "did you mean" not in errors


def test_values_are_no_words():
    # A value that looks like an option or a command belongs to the option before it.
    for words in [["--prompt", "--htp"], ["--prompt", "srve"], ["--prompt=--htp"]]:
        status, _, errors = run("generate", "--model", "/missing", *words)
        assert status == 1 and "/missing" in errors, errors
    status, _, errors = run("generate", "/missing", "--prompt", "a", "--seed", "-1")
    assert status == 1 and "/missing" in errors


def test_help_is_plain():
    paths = [(), *all_commands()]
    assert ("experts", "save") in paths and ("bench", "load") in paths
    for path in paths:
        status, text, errors = run(*path, "--help")
        assert (status, errors) == (0, ""), path
        assert "{false}" not in text and "{true}" not in text
        assert re.search(r"^Usage: moeserve", text, re.M)
        assert max(map(len, text.splitlines())) <= 200
        # Every option of the text is an option.
        for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.M):
            assert "unknown" not in run(*path, option)[2]


def test_a_model_without_an_option():
    with_option = run("inspect", "--model", model())
    assert with_option[0] == 0
    assert run("inspect", model()) == with_option
    assert run("inspect", "-m", model()) == with_option
    status, out, _ = run("generate", model(), "--prompt", "In the", "--max-tokens", "2",
                         "--temperature", "0")
    assert status == 0 and out.strip()
    status, _, errors = run("inspect", model(), "--model", model())
    assert status == 2 and "--model" in errors


def serve(*arguments, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOESERVE_H")}
    process = subprocess.Popen([binary(), "serve", *map(str, arguments)], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**environment, **variables})
    return Server(process.stdout.readline().split()[-1], process.stdout.readline().split()[-1], "",
                  process)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_serving_by_host_and_port():
    server = serve(model(), "--host", "127.0.0.1", "--port", "0", "--grpc", "127.0.0.1:0")
    assert stop_server(server) == 0
    port = free_port()
    # The command line overrides the environment, of which the rest stays.
    server = serve(model(), "--port", port, "--grpc", "127.0.0.1:0", MOESERVE_HTTP="127.0.0.1:1")
    try:
        assert server.http == f"127.0.0.1:{port}"
    finally:
        assert stop_server(server) == 0


def shown(*arguments, **variables):
    status, out, errors = run("config", "show", "--model", "m", *arguments, **variables)
    return status, dict(re.findall(r"^([\w-]+): (.*?)  # ", out, re.M)), errors


def test_two_addresses_are_an_error_that_names_both(tmp_path):
    for other in [("--port", "9"), ("--host", "::1")]:
        status, _, errors = shown("--http", "127.0.0.1:1", *other)
        assert status == 1 and f"--http and {other[0]}" in errors, errors
        assert run("serve", "m", "--http", "127.0.0.1:1", *other)[0] == 2
    file = tmp_path / "config.yaml"
    file.write_text("http: 127.0.0.1:1\nport: 2\n")
    status, _, errors = shown("--config", file)
    assert status == 1 and f"({file}:1 and {file}:2)" in errors
    # A stronger source wins over a weaker one.
    file.write_text("port: 2\n")
    assert shown("--config", file, "--http", "127.0.0.1:1")[0] == 0
    assert shown("--config", file, MOESERVE_HTTP="127.0.0.1:1")[0] == 0
    status, _, errors = run("serve", "m", "--http", "127.0.0.1:7", "--grpc", "127.0.0.1:7")
    assert status == 1 and "--http and --grpc" in errors
    status, _, errors = run("serve", "m", "--host", "no such host")
    assert status in (1, 2) and "no such host" in errors


@pytest.mark.parametrize("option", ["--http", "--grpc"])
def test_a_busy_port(option):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        free = "--grpc" if option == "--http" else "--http"
        status, _, errors = run("serve", model(), option, address, free, "127.0.0.1:0",
                                "--log-level", "error")
    assert status == 1
    assert errors.startswith(f"error: {option}: cannot listen on {address}")
    assert "in use" in errors and len(errors.splitlines()) == 1


def test_long_paths_are_shown_in_full(tmp_path):
    path = tmp_path / ("x" * 200) / ("y" * 200)
    for words in [["serve", path], ["generate", path, "--prompt", "x"], ["inspect", path],
                  ["check", path], ["convert", path, tmp_path / "new"],
                  ["quantize", path, tmp_path / "new", "--dtype", "int8"],
                  ["pack", path, tmp_path / "new"],
                  ["experts", "show", path], ["config", "check", path],
                  ["serve", "--config", path], ["score", model(), "--text", path]]:
        status, _, errors = run(*words)
        assert status in (1, 2) and str(path) in errors, (words[0], errors)


def test_a_small_address_space_is_refused_at_start():
    """Threads that cannot be started would end the process without a word about the reason."""
    space = 600 << 20
    done = subprocess.run(
        [binary(), "serve", "--model", model(), "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"],
        capture_output=True, text=True, timeout=20,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (space, space)))
    assert done.returncode == 1 and "ulimit -v" in done.stderr, done
    assert "limited to 600.0 MiB" in done.stderr


def test_a_header_with_a_million_tensors_takes_little_memory(tmp_path):
    folder = tmp_path / "many"
    shutil.copytree(model(), folder)
    entry = '":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(f'"t{i}{entry}' for i in range(1_000_000)) + "}").encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    # In a process of its own, whose only child is the program.
    code = """import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
print(done.returncode, done.stderr, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"""
    out = subprocess.run([sys.executable, "-c", code, binary(), "check", "--model", folder],
                         capture_output=True, text=True, timeout=60).stdout
    assert out.startswith("1 error: model.safetensors: header: expected at most"), out
    if "ASAN_OPTIONS" not in os.environ:
        assert int(out.split()[-1]) < 400 << 10, "KiB"
