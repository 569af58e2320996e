"""Tests the Python wheel: builds it, installs it into a new environment, serves a bundled model and
calls the client. Skipped if no package index can be reached."""

import os
import pathlib
import subprocess
import sys

import pytest

from packages import MODEL, ROOT, build_folder, check, need

CLIENT = r"""
import sys
import numpy as np
from moeserve import Client, Error, Server

with Server(sys.argv[1], "--routing-records") as server, Client(server.grpc_address) as client:
    before = client.statistics()
    answer = client.generate("In the beginning God created", max_tokens=8, temperature=0.0,
                             logprobs=True, routes=True)
    assert answer.text and answer.finish_reason == "length"
    assert answer.token_ids.shape == (8,) and answer.token_ids.dtype == np.int32
    assert answer.logprobs.shape == (8,) and (answer.logprobs <= 0).all()
    assert client.detokenize(answer.token_ids) == answer.text
    pieces = list(client.stream("In the beginning God created", max_tokens=8, temperature=0.0))
    assert "".join(piece.text for piece in pieces) == answer.text
    assert pieces[-1].finish_reason == "length"

    routes = answer.routes
    assert routes.tokens == answer.prompt_tokens + 7
    assert len(routes.offsets) == routes.tokens * routes.rows_per_token + 1
    assert routes.offsets[-1] == len(routes.experts) == len(routes.weights)
    statistics = client.statistics().since(before)
    assert len(statistics.blocks) == len(routes.blocks) > 0
    for index, (block, counted) in enumerate(zip(routes.blocks, statistics.blocks)):
        counts = routes.counts(index)
        assert counts.shape == (routes.tokens, block.num_experts)
        # The second request found the prompt in the prefix cache and computed the rest again.
        assert (counted.counts >= counts.sum(axis=0)).all()
        experts, weights = routes.of(0, index)
        assert (np.diff(experts) > 0).all() and len(weights) == len(experts) > 0
        assert counts[0][experts].min() >= 1
    load = statistics.load()
    assert np.allclose(np.nansum(load, axis=1), 1.0)
    assert statistics.labels()[0].startswith("layer ")

    scores = client.score("In the beginning")
    assert scores.shape == client.tokenize("In the beginning").shape
    try:
        client.generate("x" * 100000, max_tokens=4)
    except Error as error:
        assert error.code == "context_length_exceeded", error
    else:
        raise AssertionError("a prompt that is too long was accepted")
print("client works")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    build = build_folder()
    need("objdump", "strip", "ldd")
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run([ROOT / "deploy/python/build_wheel.sh", "--build", build, "--output", out,
                           "--python", sys.executable], text=True, capture_output=True)
    if done.returncode != 0 and "No matching distribution" in done.stderr + done.stdout:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stdout + done.stderr
    return pathlib.Path(done.stdout.strip())


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Returns the Python of a new environment with the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    check(sys.executable, "-m", "venv", folder)
    done = subprocess.run([folder / "bin/pip", "install", "-q", "--disable-pip-version-check", wheel],
                          text=True, capture_output=True)
    if done.returncode != 0 and "No matching distribution" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin/python"


def outside():
    """Returns an environment in which the wheel's program cannot find this machine's build."""
    return {name: value for name, value in os.environ.items()
            if name not in ("LD_LIBRARY_PATH", "PYTHONPATH")}


def test_the_wheel_is_for_one_platform(wheel):
    assert "-py3-none-manylinux_2_" in wheel.name and "-any" not in wheel.name


def test_the_program_and_its_libraries(python, tmp_path):
    command = python.parent / "moeserve"
    assert check(command, "--version", env=outside()).startswith("moeserve ")
    assert check(command, "generate", MODEL, "--prompt", "In", "--max-tokens", "2", env=outside(),
                 cwd=tmp_path).strip()
    done = subprocess.run([command, "srve"], text=True, capture_output=True, env=outside())
    assert done.returncode == 2 and '"serve"' in done.stderr
    # All libraries but those of the C library are the wheel's own.
    program = check(python, "-c", "import moeserve.program as p; print(p.path())",
                    env=outside()).strip()
    for line in check("ldd", program, env=outside()).splitlines():
        if "libgrpc" in line or "libprotobuf" in line or "libstdc++" in line:
            assert str(pathlib.Path(program).parents[1] / "lib") in os.path.normpath(line.split()[2])


def test_the_client(python, tmp_path):
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    assert "client works" in check(python, script, MODEL, env=outside(), cwd=tmp_path)


def test_the_example(python, tmp_path):
    printed = check(python, ROOT / "deploy/python/examples/expert_heat_map.py", MODEL,
                    tmp_path / "experts.png", env=outside(), cwd=tmp_path)
    assert "expert " in printed and ("wrote" in printed or "no picture" in printed)
    assert "feed_forward: rose" in printed and ", southern " in printed  # words, not tokens
