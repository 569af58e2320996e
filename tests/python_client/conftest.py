"""Puts the Python client of deploy/python together, as build_wheel.sh does, and starts servers.

MOESERVE_BIN names the program (default: build/release/moeserve) and MOESERVE_MODEL a checkpoint
folder (default: deploy/models/mh-moe).
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def pytest_configure(config):
    """Makes the package importable, with the modules that are generated from the proto file."""
    from grpc_tools import protoc

    config.package = tempfile.TemporaryDirectory()
    out = pathlib.Path(config.package.name)
    shutil.copytree(ROOT / "deploy/python/src", out, dirs_exist_ok=True)
    status = protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"--python_out={out}", f"--pyi_out={out}",
                          f"--grpc_python_out={out}", "moeserve/v1/moeserve.proto"])
    assert status == 0
    (out / "moeserve/v1/__init__.py").touch()
    sys.path.insert(0, str(out))


def pytest_unconfigure(config):
    config.package.cleanup()


class Running:
    """A server on free ports, with a chat template."""

    def __init__(self, *arguments, model=None):
        program = pathlib.Path(os.environ.get("MOESERVE_BIN", ROOT / "build/release/moeserve"))
        if not program.exists():
            pytest.skip(f"{program} is not built")
        model = model or os.environ.get("MOESERVE_MODEL", ROOT / "deploy/models/mh-moe")
        self.process = subprocess.Popen(
            [program, "serve", "--model", model, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
             "--chat-template", ROOT / "tests/chat/templates/chatml.jinja", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        found = {}
        while len(found) < 2:
            line = self.process.stdout.readline()
            assert line, "the server ended before it listened"
            if match := re.match(r"(http|grpc) listening on (\S+)", line):
                found[match.group(1)] = match.group(2)
        self.http, self.grpc = found["http"], found["grpc"]

    def stop(self):
        self.process.terminate()
        assert self.process.wait(timeout=60) == 0


@pytest.fixture(scope="session")
def server():
    running = Running("--routing-records", "--routing-control")
    yield running
    running.stop()
