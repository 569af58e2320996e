"""Tests what people read who name a model that is not there."""

import json
import shutil
import subprocess
import urllib.error
import urllib.request

import grpc
import pytest

from conftest import binary, model, post, start_server, stop_server

TEXT = "The king said unto his people that the city was great.\n"
COMMANDS = [
    "serve MODEL --http 127.0.0.1:0 --grpc 127.0.0.1:0", "generate MODEL --prompt x", "chat MODEL",
    "score MODEL --text text", "inspect MODEL", "check MODEL", "convert MODEL out",
    "quantize MODEL out --dtype int4", "bench --model MODEL",
    "bench load --model MODEL --clients 1 --requests 1", "experts save out MODEL --text text",
    "experts compare MODEL --text text", "generate GOOD --draft-model MODEL --prompt x",
]


@pytest.fixture(name="folder", scope="module")
def a_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("missing")
    (folder / "text").write_text(TEXT)
    (folder / "empty").mkdir()
    for name in ("b", "a"):
        (folder / "models" / name).mkdir(parents=True)
        shutil.copy(model() / "config.json", folder / "models" / name)
    return folder


def run(folder, words, **names):
    words = [str(names.get(word, word)) for word in words.split()]
    done = subprocess.run([binary(), *words], cwd=folder, text=True, capture_output=True,
                          timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command(folder, command):
    for name in ("no/such", "owner/Some-8B"):
        errors = run(folder, command, MODEL=name, GOOD=model())
        assert f"{name}: expected a model folder, " in errors
        assert "models are not downloaded" in errors
    errors = run(folder, command, MODEL="empty", GOOD=model())
    assert "empty: expected a model folder, which has a config.json, " in errors
    assert "models are not downloaded" in errors and "its folder" not in errors
    errors = run(folder, command, MODEL="models", GOOD=model())
    assert "; its folders a, b are models; models are not downloaded" in errors


def test_profiles(folder):
    errors = run(folder, "experts diff none other")
    assert "none: expected an expert profile or a model folder, found nothing" in errors


def test_the_broken_one_of_several_models(folder):
    errors = run(folder, "serve GOOD --model empty --http 127.0.0.1:0 --grpc 127.0.0.1:0",
                 GOOD=model())
    assert "error: --model empty: empty: expected a model folder" in errors


@pytest.mark.parametrize("name, found", [("none", "nothing"), ("text", "a file")])
def test_the_folder_of_further_models(folder, name, found):
    errors = run(folder, f"serve GOOD --models-folder {name} --http 127.0.0.1:0 --grpc 127.0.0.1:0",
                 GOOD=model())
    assert f"--models-folder: {name}: expected a folder of models, found {found}" in errors


@pytest.fixture(scope="module")
def served(folder):
    running = start_server("--model", f"second={model()}", "--models-folder", folder / "models",
                           name=None, folder=f"first={model()}")
    yield running
    stop_server(running)


def refusal(served, path, body=None):
    with pytest.raises(urllib.error.HTTPError) as refused:
        if body is None:
            urllib.request.urlopen(served.url + path)
        else:
            post(served, path, body)
    assert refused.value.code == 404, path
    return json.load(refused.value)["error"]


def test_requests_learn_the_names_that_are_served(served, folder):
    wanted = 'the model "other" is not served here; served: first, second'
    for path, body in {
            "/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
            "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
            "/tokenize": {"prompt": "a"}, "/v1/models/unload": {}}.items():
        assert refusal(served, path, {"model": "other", **body})["message"] == wanted, path
    for path in ("/v1/models/other", "/v1/experts/stats?model=other",
                 "/v1/experts/layout?model=other"):
        assert refusal(served, path)["message"] == wanted, path
    assert refusal(served, "/v2/models/other/generate", {"text_input": "a"}) == wanted
    assert refusal(served, "/v1/models/load", {"model": "other"})["message"] == (
        f'--models-folder {folder / "models"} has no "other"; models are not downloaded')


def test_a_plus_in_a_query_is_a_space(served):
    assert '"an other"' in refusal(served, "/v1/experts/stats?model=an+other")["message"]
    assert '"an+other"' in refusal(served, "/v1/experts/stats?model=an%2Bother")["message"]


def test_grpc(served, protos):
    pb, rpc = protos
    with grpc.insecure_channel(served.grpc) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            list(rpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="a", model="other")))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert refused.value.details() == 'the model "other" is not served here; served: first, second'


def test_bench_load(served, folder):
    errors = run(folder, "bench load --url URL --served-model other --clients 1 --requests 1",
                 URL=served.url + "/v1")
    assert f'--served-model: {served.url} lists first, second; found "other"' in errors
    errors = run(folder, "bench load --url URL --clients 1 --requests 1", URL=served.url)
    assert f"is the base URL {served.url}/v1 meant?" in errors
