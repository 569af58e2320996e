"""Runs the examples of README.md and server/README.md as they stand there, but for the addresses,
and compares what they print with what the page says."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, binary, start_server, stop_server

sys.path.append(str(ROOT / "tests/support"))
import bundled_models  # noqa: E402

MODEL = ROOT / "deploy/models/mh-moe"
TEMPLATE = ROOT / "deploy/models/plain_text.jinja"
ANSWER = " southern Africa and central Asia having small yellow flowers."

# The texts are those of the CPU: another device may round another way.
pytestmark = pytest.mark.skipif("MOESERVE_TEST_DEVICE" in os.environ, reason="texts of the CPU")


def pythons(path):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / path).read_text(), re.M | re.S)


def curls(path):
    """Returns the commands of a page that begin with curl, with the lines that continue them."""
    return re.findall(r"^    (curl (?:[^\n'\\]|'[^']*'|\\\n)*)\n", (ROOT / path).read_text(), re.M)


@pytest.fixture(scope="module")
def served():
    running = start_server("--chat-template", TEMPLATE, "--routing-records", "--model-control",
                           name="mh-moe", folder=MODEL)
    yield running
    stop_server(running)


def with_addresses(text, served):
    return text.replace("127.0.0.1:8080", served.http).replace("127.0.0.1:8081", served.grpc)


def curl(command, served):
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    done = subprocess.run(["bash", "-c", with_addresses(command, served) + " --fail-with-body"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def printed(code, served, names):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(with_addresses(code, served), names)  # pylint: disable=exec-used
    return out.getvalue()


def test_the_page_says_what_its_examples_print():
    assert f"`{ANSWER}`" in (ROOT / "README.md").read_text()


def test_python_over_http(served):
    pytest.importorskip("openai")
    names = {}
    assert printed(pythons("README.md")[0], served, names) == ANSWER
    chat = next(code for code in pythons("server/README.md") if "chat.completions" in code)
    assert printed(chat, served, names) == ANSWER + "\n"


def test_python_over_grpc(served, protos):
    names = {}
    code = pythons("README.md")[1].replace(
        "from moeserve.v1 import moeserve_pb2 as pb, moeserve_pb2_grpc as rpc", "")
    names["pb"], names["rpc"] = protos
    assert printed(code, served, names) == ANSWER


@pytest.mark.parametrize("page", ["README.md", "server/README.md"])
def test_a_tool(served, page):
    command = next(command for command in curls(page) if '"tools"' in command)
    message = curl(command, served)["choices"][0]["message"]
    call = message["tool_calls"][0]["function"]
    assert call["name"] == "weather"
    assert json.loads(call["arguments"]) == {"place": "Rome", "days": 1}


def test_structured_output(served):
    command = next(command for command in curls("server/README.md") if "guided_json" in command)
    text = curl(command, served)["choices"][0]["text"]
    assert json.loads(text) == {"colour": "white", "height": 126}


def test_every_curl(served):
    commands = curls("README.md") + curls("server/README.md")
    assert len(commands) >= 9
    # Loading comes first on the page, and nothing is served after unloading.
    for command in sorted(commands, key=lambda command: "unload" in command):
        assert curl(command, served)
    curl(next(command for command in commands if "models/load" in command), served)


def test_the_clients_of_the_quickstart(served, protos):
    script = (ROOT / "deploy/quickstart.sh").read_text()
    # The functions of the script, with the variables that they read.
    lines = re.search(r"^readonly prompt=.*?^readonly sampling=[^\n]*\n", script, re.M | re.S)[0]
    functions = "".join(re.findall(r"^ask_(?:http|grpc)\(\) \{\n.*?^\}\n", script, re.M | re.S))
    stubs = os.path.dirname(os.path.dirname(os.path.dirname(protos[0].__file__)))
    done = subprocess.run(
        ["bash", "-euc", f"http={served.http} grpc={served.grpc} stubs={stubs} "
         f"python={sys.executable}\n{lines}{functions}ask_http\nask_grpc"],
        cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"rose: a shrub of{ANSWER}\n" * 2, done.stderr


def test_every_instruction_set_gives_the_same_text():
    command = [binary(), "generate", "--quiet", "--model", MODEL, "--prompt", "rose: a shrub of",
               "--max-tokens", "48", "--temperature", "0.7", "--top-p", "0.9", "--seed", "39",
               "--stop", "\n", "--cpu-isa"]
    listed = subprocess.run([binary(), "generate", "--help"], capture_output=True, text=True,
                            timeout=60)
    names = re.search(r"--cpu-isa \{auto,(.*)\}", listed.stdout)[1].split(",")
    ran = []
    for name in names:
        done = subprocess.run([*command, name], capture_output=True, text=True, timeout=60)
        if "is not available here" not in done.stderr and "neon" not in name:
            assert done.stdout.rstrip("\n") == ANSWER, name + done.stderr
            ran.append(name)
    assert "plain" in ran


def test_the_bundled_decoders_have_defaults_for_sampling(served):
    for folder in bundled_models.folders():
        values = json.loads((folder / "generation_config.json").read_text())
        assert (values["temperature"], values["top_p"]) == (0.7, 0.9), folder
    info = curl(f"curl -s {served.url}/server_info", served)
    assert info["models"][0]["default_sampling"] == {"temperature": 0.7, "top_p": 0.9}
