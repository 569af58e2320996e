"""Tests a server whose mapped files are cut short while it runs."""

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request

import grpc
import pytest

import conftest
import re
from conftest import start_server, stop_server, wait_for


def status_of(url):
    try:
        return urllib.request.urlopen(url, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code


def truncate_all(folder):
    for file in folder.iterdir():
        os.truncate(file, 4096)


@pytest.fixture
def packed(tmp_path):
    if conftest.device():
        pytest.skip("only the CPU reads packed files in place")
    folder = tmp_path / "packed"
    stop_server(start_server("--packed-cache", folder))  # writes the files
    with open(tmp_path / "log", "w") as log:
        server = start_server("--packed-cache", folder, stderr=log)
    yield server, folder, tmp_path / "log"
    assert server.process.poll() is None
    assert stop_server(server) == 0


def test_requests_end_with_the_files_name(packed, protos):
    server, folder, log = packed
    pb, rpc = protos
    with grpc.insecure_channel(server.grpc) as channel:
        stub = rpc.InferenceStub(channel)
        long = pb.GenerateRequest(text="The", sampling=pb.SamplingParams(
            max_tokens=400, ignore_eos=True))
        calls = [stub.Generate(long) for _ in range(3)]
        for call in calls:
            next(call)
        assert status_of(server.url + "/health/ready") == 200
        truncate_all(folder)
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                for _ in call:
                    pass
            assert caught.value.code() == grpc.StatusCode.INTERNAL
    # As for every internal error, the log has the details.
    assert wait_for(lambda: ".packed changed while it was in use" in log.read_text())
    assert status_of(server.url + "/health/ready") == 503
    assert status_of(server.url + "/health/live") == 503
    request = urllib.request.Request(server.url + "/v1/completions",
                                     json.dumps({"prompt": "The"}).encode(),
                                     {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert refused.value.code == 503
    metrics = urllib.request.urlopen(server.url + "/metrics").read().decode()
    assert re.search(r"^moeserve_engine_up\{.*\} 0$", metrics, re.M)


def test_a_model_cut_short_is_refused(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(conftest.model(), folder)
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    for command in (["check", "--model", folder], ["inspect", "--model", folder],
                    ["generate", "--model", folder, "--prompt", "a"],
                    ["convert", folder, tmp_path / "new"],
                    ["quantize", folder, tmp_path / "new", "--dtype", "int8"],
                    ["serve", "--model", folder, "--http", "127.0.0.1:0"]):
        result = subprocess.run([conftest.binary(), *command], capture_output=True, text=True)
        assert result.returncode == 1, result
        assert "model.safetensors" in result.stderr
