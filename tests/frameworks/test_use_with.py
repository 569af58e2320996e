"""Runs the examples of deploy/USE_WITH.md whose packages are installed."""

import pathlib
import re
import subprocess
import sys

import pytest

from conftest import ROOT

TEXT = (ROOT / "deploy/USE_WITH.md").read_text()
# (heading, language, code)
EXAMPLES = [(heading.strip(), language, code)
            for heading, section in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
            for language, code in re.findall(r"^```(\w+)\n(.*?)^```", section, re.M | re.S)]


def here(code, server):
    """Returns an example with the address and the name of a running server."""
    code = code.replace("http://127.0.0.1:8080", server.url)
    return re.sub(r"(?<!deploy/models/)mh-moe", server.name, code)


@pytest.mark.parametrize("heading, code", [
    pytest.param(heading, code, id=heading) for heading, language, code in EXAMPLES
    if language == "python"])
def test_python(server, heading, code, tmp_path):
    finished = subprocess.run([sys.executable, "-c", here(code, server)], cwd=tmp_path,
                              capture_output=True, text=True, timeout=120, check=False)
    if "ModuleNotFoundError" in finished.stderr:
        pytest.skip(finished.stderr.splitlines()[-1])
    assert finished.returncode == 0 and finished.stdout.strip(), finished.stderr[-3000:]


@pytest.mark.parametrize("heading, code", [
    pytest.param(heading, code, id=heading) for heading, language, code in EXAMPLES
    if language == "bash"])
def test_command(server, heading, code, tmp_path):
    program = pathlib.Path(sys.executable).with_name(code.split()[0])
    if not program.exists():
        pytest.skip(f"{program.name} is not installed")
    code = here(code, server).replace("deploy/models/", f"{ROOT}/deploy/models/").replace(
        "tests/lm_eval", f"{ROOT}/tests/lm_eval")
    finished = subprocess.run(["bash", "-c", f"{program.parent}/{code}"], cwd=tmp_path,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=500, check=False)
    assert finished.returncode == 0, finished.stdout[-4000:]


def test_every_client_has_an_example():
    table = re.findall(r"^\| ([\w, -]+?)(?: \(| \|)", TEXT, re.M)
    named = " ".join(heading.lower() for heading, _, _ in EXAMPLES)
    clients = [name for row in table[1:] for name in row.split(", ")]
    assert len(clients) >= 11 and not [name for name in clients if name.lower() not in named]
