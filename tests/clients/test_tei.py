"""Tests the routes in the form of Text Embeddings Inference against this server's own."""

import json
import urllib.error
import urllib.request

import pytest

from conftest import post
from test_encoders import TEXTS, embedder, models, ranker  # noqa: F401 (fixtures)


def refusal(server, path, body):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, path, body)
    error = json.load(caught.value)["error"]
    return caught.value.code, error["message"]


def test_vectors(embedder):  # noqa: F811
    own = [item["embedding"] for item in
           post(embedder, "/v1/embeddings", {"input": TEXTS, "normalize": True})["data"]]
    assert post(embedder, "/embed", {"inputs": TEXTS}) == own
    assert post(embedder, "/embed", {"inputs": TEXTS[0], "truncate": True}) == own[:1]
    assert post(embedder, "/embed", {"inputs": [[2, 5, 3]]}) == [
        post(embedder, "/v1/embeddings", {"input": [2, 5, 3], "normalize": True})[
            "data"][0]["embedding"]]
    raw = [item["embedding"] for item in
           post(embedder, "/v1/embeddings", {"input": TEXTS, "normalize": False})["data"]]
    assert post(embedder, "/embed", {"inputs": TEXTS, "normalize": False}) == raw
    query = post(embedder, "/embed", {"inputs": "rose", "prompt_name": "query"})
    assert query == post(embedder, "/embed", {"inputs": "q rose"})
    every = [item["data"] for item in post(embedder, "/pooling", {
        "input": TEXTS, "task": "token_embed", "use_activation": False})["data"]]
    assert post(embedder, "/embed_all", {"inputs": TEXTS}) == every


def test_long_texts(embedder):  # noqa: F811
    status, message = refusal(embedder, "/embed", {"inputs": "rose " * 400})
    assert status == 400 and "tokens" in message
    cut = post(embedder, "/embed", {"inputs": "rose " * 400, "truncate": True})
    left = post(embedder, "/embed", {"inputs": "shrub " + "rose " * 400, "truncate": True,
                                     "truncation_direction": "Left"})
    assert len(cut) == 1 and len(left[0]) == len(cut[0])


def test_similarity(embedder):  # noqa: F811
    own = post(embedder, "/score", {"text_1": TEXTS[0], "text_2": TEXTS})["data"]
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS},
            "parameters": {"truncate": True}}
    assert post(embedder, "/similarity", body) == [item["score"] for item in own]
    for name in ("model", "text_1"):
        status, message = refusal(embedder, "/similarity", {**body, "parameters": {name: "x"}})
        assert status == 400 and name in message


def test_labels(ranker):  # noqa: F811
    def own(text, **more):
        return post(ranker, "/classify", {"input": text, **more})["data"][0]["probs"]

    def scores(labels):
        assert all(set(label) == {"score", "label"} for label in labels)
        return [label["score"] for label in labels]

    pair = {"text": "rose", "text_pair": "a shrub"}
    assert scores(post(ranker, "/predict", {"inputs": "rose"})) == own("rose")
    assert scores(post(ranker, "/predict", {"inputs": ["rose", "a shrub"]})) == own(pair)
    raw = post(ranker, "/predict", {"inputs": "rose", "raw_scores": True})
    assert scores(raw) == own("rose", use_activation=False)
    several = post(ranker, "/predict", {"inputs": [["rose"], ["rose", "a shrub"]]})
    assert [scores(labels) for labels in several] == [own("rose"), own(pair)]


def test_ranking(ranker):  # noqa: F811
    texts = ["a shrub", "a rose", "rose"]
    own = post(ranker, "/rerank", {"query": "rose", "documents": texts})["results"]
    found = post(ranker, "/rerank", {"query": "rose", "texts": texts, "return_text": True})
    assert [(item["index"], item["score"], item["text"]) for item in found] == [
        (item["index"], item["relevance_score"], item["document"]["text"]) for item in own]
    raw = post(ranker, "/rerank", {"query": "rose", "texts": texts, "raw_scores": True})
    assert [item["index"] for item in raw] == [item["index"] for item in found]
    assert all("text" not in item for item in raw)


def test_info(embedder, ranker):  # noqa: F811
    def info(server):
        with urllib.request.urlopen(server.url + "/info") as answer:
            return json.load(answer)

    assert info(embedder)["model_type"] == {"embedding": {"pooling": "mean"}}
    assert "reranker" in info(ranker)["model_type"]
    assert info(embedder)["max_input_length"] > 0


@pytest.mark.parametrize("path, body, part", [
    ("/embed", {}, "'inputs'"),
    ("/embed", {"inputs": {"a": 1}}, "'inputs'"),
    ("/embed", {"inputs": "a", "truncate": 1}, "'truncate'"),
    ("/embed", {"inputs": "a", "truncation_direction": "up"}, "'truncation_direction'"),
    ("/embed", {"inputs": "a", "normalize": "x"}, "'normalize'"),
    ("/similarity", {"inputs": "a"}, "'source_sentence'"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [1]}}, "inputs.sentences"),
])
def test_bad_requests(embedder, path, body, part):  # noqa: F811
    status, message = refusal(embedder, path, body)
    assert status == 400 and part in message, message


def test_bad_pairs(ranker):  # noqa: F811
    for inputs in (["a", "b", "c"], [1], [["a", 2]], []):
        status, message = refusal(ranker, "/predict", {"inputs": inputs})
        assert status == 400 and "'inputs'" in message, message
    status, message = refusal(ranker, "/rerank", {"query": "a", "texts": [1]})
    assert status == 400 and "'texts'" in message, message
