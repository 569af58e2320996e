"""Tests vectors and labels of texts over the Open Inference Protocol, HTTP and gRPC, against the
server's own routes."""

import json
import struct
import urllib.error
import urllib.request

import grpc
import pytest

from conftest import post
from test_encoders import TEXTS, embedder, masked, models, ranker  # noqa: F401 (fixtures)


def text_input(texts):
    return {"name": "text_input", "datatype": "BYTES", "shape": [len(texts)], "data": texts}


def infer(server, texts, parameters=None, **more):
    answer = post(server, f"/v2/models/{server.name}/infer", {
        "inputs": [text_input(texts)], "parameters": parameters or {}, **more})
    return {output["name"]: output for output in answer["outputs"]}


def refusal(server, **body):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, f"/v2/models/{server.name}/infer", body)
    return caught.value.code, json.load(caught.value)["error"]


def rows(output):
    size = output["shape"][1]
    return [output["data"][at:at + size] for at in range(0, len(output["data"]), size)]


def test_vectors(embedder):  # noqa: F811
    own = [item["embedding"] for item in
           post(embedder, "/v1/embeddings", {"input": TEXTS})["data"]]
    found = infer(embedder, TEXTS)
    assert list(found) == ["embedding", "num_input_tokens"]
    assert found["embedding"]["shape"] == [len(TEXTS), len(own[0])]
    assert [[struct.pack("<f", x) for x in row] for row in rows(found["embedding"])] == [
        [struct.pack("<f", x) for x in row] for row in own]
    assert found["num_input_tokens"]["data"] == [6, 24, 2]
    short = infer(embedder, TEXTS[:1], {"dimensions": 8}, outputs=[{"name": "embedding"}])
    assert list(short) == ["embedding"] and short["embedding"]["shape"] == [1, 8]


def test_bytes_behind_the_json(embedder):  # noqa: F811
    own = post(embedder, "/v1/embeddings", {"input": TEXTS[0]})["data"][0]["embedding"]
    request = urllib.request.Request(
        f"{embedder.url}/v2/models/{embedder.name}/infer", json.dumps({
            "inputs": [text_input(TEXTS[:1])],
            "outputs": [{"name": "embedding", "parameters": {"binary_data": True}}]}).encode(),
        {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        size = int(answer.headers["Inference-Header-Content-Length"])
        body = answer.read()
    assert body[size:] == struct.pack(f"<{len(own)}f", *own)


def test_labels(ranker):  # noqa: F811
    own = post(ranker, "/classify", {"input": TEXTS})["data"]
    found = infer(ranker, TEXTS)
    assert list(found) == ["label", "scores", "num_input_tokens"]
    assert found["label"]["data"] == [item["label"] for item in own]
    assert rows(found["scores"]) == [pytest.approx(item["probs"], rel=1e-7) for item in own]


def test_metadata(embedder, ranker):  # noqa: F811
    def tensors(server):
        with urllib.request.urlopen(f"{server.url}/v2/models/{server.name}") as answer:
            return {one["name"]: one["shape"] for one in json.load(answer)["outputs"]}

    assert tensors(embedder) == {"embedding": [-1, -1], "num_input_tokens": [-1]}
    assert tensors(ranker) == {"label": [-1], "scores": [-1, -1], "num_input_tokens": [-1]}


def test_grpc(embedder, protos):  # noqa: F811
    own = post(embedder, "/v1/embeddings", {"input": TEXTS})["data"]
    raw = b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in TEXTS)
    # The messages of the protocol are written by hand: field numbers of grpc_predict_v2.proto.

    def field(number, data):
        assert len(data) < 1 << 14
        head = bytes([number << 3 | 2])
        size = len(data)
        head += bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])
        return head + data

    shape = field(3, bytes([len(TEXTS)]))
    tensor = field(1, b"text_input") + field(2, b"BYTES") + shape
    message = field(1, embedder.name.encode()) + field(5, tensor) + field(7, raw)
    with grpc.insecure_channel(embedder.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        answer = call(message)
    first = struct.pack(f"<{len(own[0]['embedding'])}f", *own[0]["embedding"])
    assert first in answer


@pytest.mark.parametrize("inputs, more, part", [
    ([], {}, "text_input"),
    ([{"name": "text_input", "datatype": "FP32", "shape": [1], "data": [1.0]}], {}, "text_input"),
    ([text_input(["a"])], {"outputs": [{"name": "text_output"}]}, "expected embedding or"),
    ([text_input(["a"])], {"parameters": {"dimensions": 1000000}}, "dimensions"),
    ([text_input(["a"]), {"name": "stream", "datatype": "BOOL", "shape": [1], "data": [True]}], {},
     "stream"),
    ([text_input(["rose " * 400])], {}, "text_input"),
])
def test_bad_requests(embedder, inputs, more, part):  # noqa: F811
    status, message = refusal(embedder, inputs=inputs, **more)
    assert status == 400 and part in message, message


def test_models_without_tensors(masked):  # noqa: F811
    status, message = refusal(masked, inputs=[text_input(["a [MASK]"])])
    assert status == 400 and "fill_mask" in message
