"""Starts `moeserve serve` on free ports for the tests of this folder.

MOESERVE_BIN names the program (default: build/release/moeserve) and MOESERVE_MODEL a checkpoint
folder (default: the first one of deploy/models).
"""

import importlib
import json
import os
import re
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


# Marks tests that take more than five seconds.
slow = pytest.mark.skipif(not os.environ.get("MOESERVE_SLOW_TESTS"),
                          reason="slow; MOESERVE_SLOW_TESTS=1 runs it")


# The thread sanitizer multiplies the memory of a process.
measures_memory = pytest.mark.skipif("TSAN_OPTIONS" in os.environ,
                                     reason="the thread sanitizer takes memory of its own")


@dataclass
class Server:
    http: str  # "127.0.0.1:1234"
    grpc: str
    name: str  # the model's served name
    process: subprocess.Popen

    @property
    def url(self):
        return f"http://{self.http}"


def preload(source, folder):
    """Compiles a C file to a library in `folder`. Returns the environment variables with which a
    program loads it before other libraries."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip(f"there is no C compiler for {source.name}")
    library = folder / source.with_suffix(".so").name
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    # AddressSanitizer refuses to start behind another library without this option.
    options = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
    return {"LD_PRELOAD": str(library), "ASAN_OPTIONS": options.lstrip(":")}


def binary():
    path = pathlib.Path(os.environ.get("MOESERVE_BIN", ROOT / "build/release/moeserve"))
    if not path.exists():
        pytest.skip(f"{path} is not built")
    return path


def model():
    given = os.environ.get("MOESERVE_MODEL")
    if given:
        return pathlib.Path(given)
    models = sorted((ROOT / "deploy/models").glob("*/config.json"))
    if not models:
        pytest.skip("there is no model; set MOESERVE_MODEL")
    return models[0].parent


def device():
    """Returns the option --device with the value of MOESERVE_TEST_DEVICE, or no option if the
    variable is not set."""
    name = os.environ.get("MOESERVE_TEST_DEVICE")
    return ["--device", name] if name else []


def start_server(*arguments, name="test-model", folder=None, **popen):
    """Starts a server and waits until it prints its addresses. `folder` has the checkpoint (default:
    that of all tests). Without `name`, the model has the name of its folder, and `arguments` can name
    further models. `popen` goes to Popen."""
    names = ["--served-model-name", name] if name else []
    process = subprocess.Popen(
        [binary(), "serve", "--model", folder or model(), "--http", "127.0.0.1:0", "--grpc",
         "127.0.0.1:0", *names, *device(), *arguments],
        stdout=subprocess.PIPE, text=True, **popen)
    addresses = {}
    while len(addresses) < 2:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended with status {process.wait()}")
        kind, _, address = line.strip().partition(" listening on ")
        addresses[kind] = address
    return Server(addresses["http"], addresses["grpc"], name or model().name, process)


def stop_server(server):
    """Sends SIGTERM and waits until the server has drained. Returns its exit status."""
    server.process.send_signal(signal.SIGTERM)
    try:
        return server.process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        server.process.kill()
        raise


def post(server, path, body):
    """Posts JSON and returns the JSON response. Raises HTTPError for a status of 400 or more."""
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))


def streamed_text(lines):
    """Returns the text of a streamed completion, from the lines of the response. ValueError if the
    stream has an error or was cut."""
    text, ended = "", False
    for line in lines:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            ended = True
        elif data and not data.startswith(":"):
            event = json.loads(data)
            if "error" in event:
                raise ValueError(event["error"])
            text += "".join(choice["text"] for choice in event["choices"])
    if not ended:
        raise ValueError("the stream was cut")
    return text


@pytest.fixture(scope="session")
def server():
    running = start_server()
    yield running
    assert stop_server(running) == 0


def generated(out, name):
    """Returns the modules (messages, stubs) that are generated from the file proto/NAME.proto."""
    from grpc_tools import protoc

    status = protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"--python_out={out}",
                          f"--grpc_python_out={out}", f"{name}.proto"])
    assert status == 0
    sys.path.insert(0, str(out))
    module = name.replace("/", ".")
    return importlib.import_module(f"{module}_pb2"), importlib.import_module(f"{module}_pb2_grpc")


@pytest.fixture(scope="session")
def protos(tmp_path_factory):
    """Returns the generated modules (messages, stubs) of moeserve.proto."""
    return generated(tmp_path_factory.mktemp("protos"), "moeserve/v1/moeserve")


def generates(server, protos, seconds=5):
    """Calls Generate over a new connection until it succeeds, and returns the messages."""
    import grpc

    pb, rpc = protos
    end = time.monotonic() + seconds
    while True:
        with grpc.insecure_channel(server.grpc) as channel:
            try:
                request = pb.GenerateRequest(text="The", sampling=pb.SamplingParams(max_tokens=2))
                return list(rpc.InferenceStub(channel).Generate(request, timeout=5))
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE, error
                assert time.monotonic() < end, error
        time.sleep(0.2)


def wait_for(condition, seconds=5.0):
    """Returns the value of `condition` once it is true, or False if it is not within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    return False


@pytest.fixture
def metric(server):
    """Returns a function that reads one sample of /metrics by its full name without the model."""
    def read(name):
        text = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
        text = re.sub(r'\{model="[^"]*"\}', "", text)
        text = re.sub(r'\{model="[^"]*",', "{", text)
        for line in text.splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    return read
