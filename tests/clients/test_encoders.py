"""Tests the routes about texts with the official OpenAI client and plain HTTP, gRPC's Encode, and
the commands about texts, with small encoders."""

import base64
import json
import math
import random
import re
import struct
import subprocess
import urllib.error
import urllib.request

import grpc
import openai
import pytest

import encoder_models
from conftest import binary, post, start_server, stop_server, wait_for
from test_mutated_requests import mutated

TEXTS = ["rose", "a shrub of southern africa", ""]
PROMPTS = {"prompts": {"query": "q ", "document": "d "}, "default_prompt_name": None}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("encoders")


def serve(models, name, *arguments, **files):
    folder = encoder_models.make(name, models, **files)
    return start_server("--routing-records", "--routing-control", *arguments, name=name, folder=folder)


@pytest.fixture(scope="module")
def embedder(models):
    out = serve(models, "nomic-experts", config_sentence_transformers=PROMPTS)
    yield out
    stop_server(out)


@pytest.fixture(scope="module")
def ranker(models):
    out = serve(models, "roberta-cross-encoder")
    yield out
    stop_server(out)


@pytest.fixture(scope="module")
def masked(models):
    out = serve(models, "bert-masked-lm")
    yield out
    stop_server(out)


@pytest.fixture(scope="module")
def stub(embedder, protos):
    channel = grpc.insecure_channel(embedder.grpc)
    yield protos[0], protos[1].InferenceStub(channel)
    channel.close()


def floats(text):
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def as_float32(values):
    return list(struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}f", *values)))


def refusal(server, path, body):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, path, body)
    assert caught.value.code == 400
    error = json.load(caught.value)["error"]
    return error["code"], error["param"]


def test_openai_client(embedder):
    client = openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="unused", max_retries=0)
    # The client asks for base64 unless told otherwise.
    packed = client.embeddings.create(model=embedder.name, input=TEXTS)
    plain = client.embeddings.create(model=embedder.name, input=TEXTS, encoding_format="float")
    assert packed.usage.prompt_tokens == plain.usage.prompt_tokens > 0
    for index, (a, b) in enumerate(zip(packed.data, plain.data, strict=True)):
        assert a.index == b.index == index
        assert list(a.embedding) == as_float32(b.embedding)
    short = client.embeddings.create(model=embedder.name, input="rose", dimensions=8)
    assert len(short.data[0].embedding) == 8
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=embedder.name, input="rose", dimensions=10_000)
    assert caught.value.param == "dimensions"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="rose")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=embedder.name, prompt="rose")
    assert caught.value.code == "unsupported_task"
    card = client.models.retrieve(embedder.name)
    assert card.tasks == ["embed", "token_embed", "score"]


def test_prompts(embedder):
    def vector(text, **fields):
        return post(embedder, "/v1/embeddings", {"input": text, **fields})["data"][0]["embedding"]

    assert vector("rose", prompt_name="query") == vector("q rose")
    assert vector("rose", input_type="document") == vector("d rose") != vector("rose")
    assert refusal(embedder, "/v1/embeddings", {"input": "rose", "prompt_name": "other"}) == (
        "invalid_value", "prompt_name")


def test_long_texts(embedder):
    long = "rose " * 200
    assert refusal(embedder, "/v1/embeddings", {"input": long}) == (
        "context_length_exceeded", "input")
    cut = post(embedder, "/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1})
    assert cut["usage"]["prompt_tokens"] == 160


def test_pooling(embedder):
    answer = post(embedder, "/pooling", {"input": "rose", "task": "token_embed"})
    rows = answer["data"][0]["data"]
    assert len(rows) == answer["usage"]["prompt_tokens"]
    packed = post(embedder, "/pooling", {"input": "rose", "task": "token_embed",
                                         "encoding_format": "base64"})["data"][0]
    assert packed["shape"] == [len(rows), len(rows[0])]
    assert floats(packed["data"]) == as_float32([x for row in rows for x in row])


def test_similarity(embedder):
    vectors = [item["embedding"] for item in
               post(embedder, "/v1/embeddings", {"input": TEXTS})["data"]]

    def cosine(a, b):
        return sum(x * y for x, y in zip(a, b)) / math.hypot(*a) / math.hypot(*b)

    answer = post(embedder, "/score", {"text_1": TEXTS[0], "text_2": TEXTS})
    for item, vector in zip(answer["data"], vectors, strict=True):
        assert item["score"] == pytest.approx(cosine(vectors[0], vector), abs=1e-6)


def test_routes(embedder):
    answer = post(embedder, "/v1/embeddings", {"input": TEXTS, "return_routing": True})
    assert [item["routing"]["tokens"] for item in answer["data"]] == [6, 24, 2]
    assert answer["usage"]["experts_per_token"] > 0
    assert answer["usage"]["macs_per_token"] > 0


def test_ranking(ranker):
    request = {"query": "rose", "documents": ["a shrub", {"text": "a rose"}, "rose"]}
    scores = {item["index"]: item["score"] for item in
              post(ranker, "/score", {"text_1": "rose",
                                      "text_2": ["a shrub", "a rose", "rose"]})["data"]}
    for path, documents in (("/rerank", True), ("/v1/rerank", True), ("/v2/rerank", False)):
        results = post(ranker, path, request)["results"]
        found = [item["relevance_score"] for item in results]
        assert found == sorted(found, reverse=True)
        assert {item["index"]: item["relevance_score"] for item in results} == scores
        assert all(("document" in item) == documents for item in results)
    assert len(post(ranker, "/rerank", {**request, "top_n": 1})["results"]) == 1
    pair = post(ranker, "/classify", {"input": {"text": "rose", "text_pair": "a shrub"}})
    assert pair["data"][0]["probs"] == [scores[0]]


def test_masks(masked):
    answer = post(masked, "/v1/fill-mask", {"input": "a [MASK] b", "top_k": 3})
    (mask,) = answer["masks"]
    assert mask["position"] == 2 and len(mask["tokens"]) == 3
    assert sum(token["score"] for token in mask["tokens"]) <= 1
    assert refusal(masked, "/v1/fill-mask", {"input": "a b"}) == ("invalid_value", "input")
    own = post(masked, "/v1/fill-mask", {"input": "a b", "logprobs": True})
    assert len(own["logprobs"]) == 4 and max(own["logprobs"]) <= 0
    assert refusal(masked, "/v1/embeddings", {"input": "a"}) == ("unsupported_task", "model")


def test_pooling_option(models):
    server = serve(models, "bert-classifier")
    try:
        answer = post(server, "/classify", {"input": "rose"})["data"][0]
        assert answer["label"] == f"LABEL_{answer['probs'].index(max(answer['probs']))}"
    finally:
        stop_server(server)
    folder = encoder_models.make("camembert-masked-lm", models)
    server = start_server("--pooling", "mean", name="pooled", folder=folder)
    try:
        assert post(server, "/v1/embeddings", {"input": "rose"})["data"][0]["embedding"]
    finally:
        stop_server(server)


def test_grpc(embedder, stub):
    pb, inference = stub
    request = pb.EncodeRequest(task=pb.ENCODE_TASK_EMBED)
    for text in TEXTS:
        request.inputs.add().text = text
    answer = inference.Encode(request)
    expected = post(embedder, "/v1/embeddings", {"input": TEXTS})
    for output, item in zip(answer.outputs, expected["data"], strict=True):
        assert list(output.values) == as_float32(item["embedding"])
    assert answer.usage.prompt_tokens == expected["usage"]["prompt_tokens"]
    request.routing_control.top_k = 1
    changed = inference.Encode(request)
    assert changed.outputs[0].values != answer.outputs[0].values
    assert changed.usage.experts_per_token < answer.usage.experts_per_token
    score = pb.EncodeRequest(task=pb.ENCODE_TASK_SCORE)
    score.inputs.add(text="rose", text_pair="rose")
    assert inference.Encode(score).outputs[0].score == pytest.approx(1.0, abs=1e-6)
    info = inference.GetModelInfo(pb.GetModelInfoRequest())
    assert list(info.tasks) == ["embed", "token_embed", "score"]
    for wrong, code in ((pb.EncodeRequest(), "missing_field"),
                        (pb.EncodeRequest(task=pb.ENCODE_TASK_CLASSIFY), "unsupported_task")):
        with pytest.raises(grpc.RpcError) as caught:
            inference.Encode(wrong)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert ("x-error-code", code) in [tuple(item) for item in
                                          caught.value.trailing_metadata()]
    with pytest.raises(grpc.RpcError) as caught:
        next(inference.Generate(pb.GenerateRequest(text="rose")))
    assert ("x-error-code", "unsupported_task") in [tuple(item) for item in
                                                    caught.value.trailing_metadata()]


def run(*arguments, **options):
    return subprocess.run([binary(), *arguments], capture_output=True, text=True, timeout=120,
                          check=False, **options)


def test_embed_command(models, embedder):
    folder = models / "nomic-experts"
    done = run("embed", folder, *TEXTS, "--quiet")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    expected = post(embedder, "/v1/embeddings", {"input": TEXTS})["data"]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert [line["embedding"] for line in lines] == [item["embedding"] for item in expected]
    # Lines of standard input.
    again = run("embed", folder, "--quiet", input="\n".join(TEXTS[:2]) + "\n")
    assert again.stdout.splitlines() == done.stdout.splitlines()[:2]
    failed = run("embed", folder, "rose", "--dimensions", "100000", "--quiet")
    assert failed.returncode == 1 and "dimensions" in failed.stderr
    failed = run("embed", folder, "--file", folder, "--quiet")
    assert failed.returncode == 1 and "cannot read" in failed.stderr


def test_classify_command(models):
    folder = encoder_models.make("tiny-encoder-split", models)
    done = run("classify", folder, "a shrub of southern africa", "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    for entity in json.loads(done.stdout)["entities"]:
        assert entity["word"] == "a shrub of southern africa"[entity["start"]:entity["end"]]
    wrong = run("classify", folder, "--pairs", "a\tshrub", "--quiet")
    assert wrong.returncode == 1 and "labels tokens" in wrong.stderr
    pairs = encoder_models.make("qwen3-reranker", models)
    done = run("classify", pairs, "rose", "--quiet")
    assert done.stdout.split("\t")[:2] == ["0", "LABEL_0"], done.stderr
    wrong = run("classify", models / "nomic-experts", "rose", "--quiet")
    assert wrong.returncode == 1 and "its tasks are embed" in wrong.stderr


@pytest.mark.parametrize("arguments", [
    ("generate", "--prompt", "a"), ("bench",),
    ("bench", "load", "--requests", "1", "--clients", "1"),
], ids=["generate", "bench", "bench-load"])
def test_commands_that_generate_refuse(models, embedder, arguments):
    words = 2 if arguments[:2] == ("bench", "load") else 1
    done = run(*arguments[:words], "--model", models / "nomic-experts", *arguments[words:])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "needs a model that generates text" in done.stderr, done.stderr


def test_draft_models_generate(models, embedder):
    done = run("generate", "--model", models / "nomic-experts", "--prompt", "a", "--draft-model",
               models / "nomic-experts")
    assert done.returncode == 1 and "generates text" in done.stderr


def test_inspect(models, embedder):
    done = run("inspect", models / "nomic-experts")
    assert "tasks: embed, token_embed, score\n" in done.stdout
    assert "pooling: " in done.stdout
    found = json.loads(run("inspect", models / "nomic-experts", "--json").stdout)
    assert found["tasks"] == ["embed", "token_embed", "score"] and found["labels"] == []


FIELDS = {
    "/v1/embeddings": ("embedder", {"input": "rose"}),
    "/pooling": ("embedder", {"input": "rose"}),
    "/score": ("ranker", {"text_1": "rose", "text_2": "a"}),
    "/rerank": ("ranker", {"query": "rose", "documents": ["a"]}),
    "/classify": ("ranker", {"input": "rose"}),
    "/v1/fill-mask": ("masked", {"input": "a [MASK]"}),
}


@pytest.mark.parametrize("route", FIELDS)
def test_every_field_is_obeyed_or_refused(request, route):
    name, body = FIELDS[route]
    server = request.getfixturevalue(name)
    with urllib.request.urlopen(f"{server.url}/openapi.json") as answer:
        table = json.load(answer)["x-request-fields"]
    plain = post(server, route, body)
    faults = []
    for field, uses in table.items():
        use = uses[route]
        try:
            answer = post(server, route, {**body, field: "x"})
            if use != "no effect" or {**answer, "id": 0} != {**plain, "id": 0}:
                faults.append(f"{field} ({use}) was accepted")
        except urllib.error.HTTPError as error:
            message = json.load(error)["error"]
            # "x" is wrong for most fields, and a salt, an id or a text for the others.
            if use == "no effect" or field not in message["message"] + str(message["param"]):
                faults.append(f"{field} ({use}): {message}")
    right = {"cache_salt", "request_id", "input", "text_1", "text_2", "query", "documents"}
    assert [fault for fault in faults if fault.split()[0] not in right] == []


@pytest.mark.parametrize("route", FIELDS)
def test_mutated_requests(request, route):
    """Requests with random changes get an answer or a refusal, and the server lives."""
    name, body = FIELDS[route]
    server = request.getfixturevalue(name)
    rng = random.Random(route)
    more = {"dimensions": 4, "truncate_prompt_tokens": -1, "truncation_side": "left",
            "use_activation": True, "return_routing": True, "priority": 1, "top_k": 2, "top_n": 1,
            "targets": [7], "logprobs": True, "targets_of": [2, 7, 3], "aggregation": "none",
            "token_type_ids": [[0]], "documents": [{"text": "a"}], "max_tokens_per_doc": 1,
            "input": ["a", "b"], "text_1": ["a"], "encoding_format": "base64"}
    statuses = set()
    for _ in range(300):
        chosen = {**body, **{key: more[key] for key in rng.sample(sorted(more), rng.randrange(3))}}
        try:
            post(server, route, mutated(chosen, rng))
            statuses.add(200)
        except urllib.error.HTTPError as error:
            statuses.add(error.code)
            assert json.load(error)["error"]["message"]
    assert statuses <= {200, 400, 404}
    assert {200, 400} <= statuses
    assert post(server, route, body)


def test_cancelled_call(embedder, stub):
    pb, inference = stub

    def busy():
        with urllib.request.urlopen(f"{embedder.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines
                   if re.match(r"moeserve_requests_(running|waiting)\{", line))

    request = pb.EncodeRequest(task=pb.ENCODE_TASK_EMBED)
    for _ in range(2048):
        request.inputs.add().text = "a shrub of southern africa " * 5
    call = inference.Encode.future(request)
    assert wait_for(lambda: busy() > 0)
    call.cancel()
    assert wait_for(lambda: busy() == 0)
    assert call.cancelled()
