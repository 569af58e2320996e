"""The description at /openapi.json: valid OpenAPI 3.1, and true of a running server."""

import copy
import json
import re
import urllib.error
import urllib.request

import jsonschema
import pytest

import encoder_models
from conftest import ROOT, start_server, stop_server

TEMPLATE = ROOT / "tests/chat/templates/chatml.jinja"
PROMPT = "In the beginning"
CHAT = [{"role": "user", "content": PROMPT}]
METHODS = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}


@pytest.fixture(scope="module")
def described():
    """Returns (server, document). The server has all switched on and refuses unknown fields."""
    server = start_server("--strict-fields", "--routing-records", "--routing-control",
                          "--model-control", "--allow-request-chat-template",
                          "--hidden-samples", "64", "--chat-template", TEMPLATE)
    yield server, json.loads(call(server, "GET", "/openapi.json")[2])
    assert stop_server(server) == 0


def call(server, method, path, body=None):
    """Returns (status, media type, body)."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} if method == "POST" else {}
    request = urllib.request.Request(server.url + path, data, headers, method=method)
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        answer = error
    return answer.status, answer.headers["Content-Type"], answer.read().decode("utf-8", "replace")


def closed(schema):
    """Returns the schema with objects that have no other members than those described."""
    if isinstance(schema, dict):
        schema = {key: closed(value) for key, value in schema.items()}
        if schema.get("properties") and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
    elif isinstance(schema, list):
        schema = [closed(item) for item in schema]
    return schema


def validator(document, name, strict=False):
    components = copy.deepcopy(document["components"])
    if strict:
        components["schemas"] = {k: closed(v) for k, v in components["schemas"].items()}
    return jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": components})


def resolved(document, item):
    if "$ref" in item:
        for key in item["$ref"].removeprefix("#/").split("/"):
            document = document[key]
        return document
    return item


def schema_of(content):
    return content["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]


def test_is_openapi(described):
    document = described[1]
    assert re.fullmatch(r"3\.1\.\d+", document["openapi"])
    assert document["info"].keys() >= {"title", "version"}
    schemes = document["components"]["securitySchemes"]
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    ids = []
    for path, item in document["paths"].items():
        assert path.startswith("/") and item.keys() <= METHODS
        for operation in item.values():
            assert operation.keys() <= {"operationId", "tags", "summary", "parameters",
                                        "requestBody", "responses", "security"}
            ids.append(operation["operationId"])
            names = set()
            for parameter in operation.get("parameters", []):
                parameter = resolved(document, parameter)
                assert parameter["in"] in ("path", "query", "header")
                assert parameter["in"] != "path" or parameter["required"] is True
                jsonschema.Draft202012Validator.check_schema(parameter["schema"])
                names.add((parameter["in"], parameter["name"]))
            assert len(names) == len(operation.get("parameters", []))
            assert {n for kind, n in names if kind == "path"} == set(re.findall(r"{(\w+)}", path))
            for status, response in operation["responses"].items():
                assert status == "default" or re.fullmatch(r"[1-5]\d\d", status)
                assert response["description"]
            for alternative in operation["security"]:
                assert alternative.keys() <= schemes.keys()
    assert len(set(ids)) == len(ids)


def examples(name):
    """Returns an example of each operation: (method, path of the document, path, body)."""
    short = {"max_tokens": 4, "temperature": 0}
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [PROMPT]}
    routing = {"return_routing": True, "routing_control": {
        "top_k": 1, "masked_experts": [{"layer": 0, "experts": [0]}]}}
    completion = "/v1/completions"
    chat = "/v1/chat/completions"
    for body in ({"prompt": PROMPT}, {"prompt": [PROMPT, "The king"], "n": 2, "logprobs": 3,
                                      "echo": True, "return_token_ids": True},
                 {"prompt": [[1, 2], [3]], "prompt_logprobs": 2, "stop": "\n", "seed": 1},
                 {"prompt": PROMPT, "use_beam_search": True, "n": 2, "early_stopping": "never"},
                 {"prompt": PROMPT, "best_of": 3, "stop_token_ids": [5], "logit_bias": {"3": 1}},
                 {"prompt": PROMPT, **routing}, {"prompt": PROMPT, "guided_choice": ["a", "b"]}):
        yield "post", completion, completion, {**short, **body}
    for body in ({}, {"logprobs": True, "top_logprobs": 2, "n": 2, "return_token_ids": True},
                 {"prompt_logprobs": 1, "stop": ["x"], **routing},
                 {"response_format": {"type": "json_object"}}):
        yield "post", chat, chat, {"messages": CHAT, **short, **body}
    yield "post", "/v1/responses", "/v1/responses", {"input": PROMPT, "max_output_tokens": 4}
    count = "/v1/responses/input_tokens"
    yield "post", count, count, {"input": PROMPT}
    yield "post", "/v1/messages", "/v1/messages", {"messages": CHAT, "max_tokens": 4}
    count = "/v1/messages/count_tokens"
    yield "post", count, count, {"messages": CHAT}
    for body in ({}, {"logprobs": True, "top_logprobs": 1}, {"stream": True},
                 {"options": {"num_predict": 4, "num_ctx": 100}}, {"messages": []}):
        yield "post", "/api/chat", "/api/chat", {"messages": CHAT, "stream": False, "options": {
            "num_predict": 4}, **body}
    for body in ({"raw": True}, {"stream": True}, {"prompt": ""}):
        yield "post", "/api/generate", "/api/generate", {"prompt": PROMPT, "stream": False, **body,
                                                         "options": {"num_predict": 4}}
    yield "post", "/api/show", "/api/show", {"model": name}
    yield "post", "/tokenize", "/tokenize", {"prompt": PROMPT, "return_token_strs": True}
    yield "post", "/tokenize", "/tokenize", {"messages": CHAT, "add_generation_prompt": True}
    yield "post", "/detokenize", "/detokenize", {"tokens": [1, 2, 3]}
    for path in ("/tokenizer_info", "/v1/models", "/v1/experts/stats", "/v1/experts/layout",
                 "/v1/experts/collapse", "/v1/experts/profile", "/v2", "/health",
                 "/health/ready", "/health/live", "/v2/health/ready", "/v2/health/live", "/ping",
                 "/version", "/api/version", "/api/tags", "/api/ps", "/server_info", "/metrics", "/v1/metrics/history", "/openapi.json",
                 "/"):
        yield "get", path, path, None
    yield "post", "/ping", "/ping", None
    yield "get", "/v1/experts/stats", "/v1/experts/stats?window=60&threshold=0.5", None
    for what in ("tokens", "similarity"):
        path = f"/v1/experts/{what}"
        yield "get", path, path + "?layer=LAYER&block=BLOCK", None
    yield "get", "/v1/models/{model}", f"/v1/models/{name}", None
    yield "get", "/dashboard/{file}", "/dashboard/main.js", None
    model = f"/v2/models/{name}"
    yield "get", "/v2/models/{model}", model, None
    yield "get", "/v2/models/{model}/versions/{version}", model + "/versions/1", None
    yield "get", "/v2/models/{model}/ready", model + "/ready", None
    yield "post", "/v2/models/{model}/infer", model + "/infer", {
        "id": "1", "inputs": [tensor], "parameters": {"max_tokens": 4},
        "outputs": [{"name": "text_output"}]}
    yield "post", "/v2/models/{model}/generate", model + "/generate", {
        "text_input": PROMPT, "parameters": {"max_tokens": 4}}
    yield "post", "/v2/models/{model}/generate_stream", model + "/generate_stream", {
        "text_input": PROMPT, "parameters": {"max_tokens": 4}}
    yield "get", "/info", "/info", None
    yield "post", "/v2/repository/index", "/v2/repository/index", {"ready": True}
    # In the end, the model is loaded again.
    yield "post", "/v1/models/unload", "/v1/models/unload", {"model": name}
    yield "post", "/v1/models/load", "/v1/models/load", {"model": name}
    repository = f"/v2/repository/models/{name}"
    yield "post", "/v2/repository/models/{model}/unload", repository + "/unload", {}
    yield "post", "/v2/repository/models/{model}/load", repository + "/load", {}


PAIR = {"text_1": "rose", "text_2": ["a shrub", "b"]}
RANKED = {"query": "rose", "documents": ["a shrub", {"text": "b"}]}
# Requests about texts, by the models that answer them.
ABOUT_TEXTS = {
    "nomic-experts": [
        ("/v1/embeddings", {"input": ["rose", "a"], "dimensions": 8, "return_routing": True}),
        ("/v1/embeddings", {"input": [2, 7, 3], "encoding_format": "base64",
                            "return_routed_experts": True}),
        ("/pooling", {"input": "rose", "task": "token_embed", "encoding_format": "base64"}),
        ("/pooling", {"input": "rose", "task": "token_embed"}),
        ("/score", {**PAIR, "return_routing": True}),
        ("/v1/score", {"queries": ["rose"], "documents": "b"}),
        ("/rerank", {**RANKED, "return_routing": True}),
        ("/embed", {"inputs": ["rose", "a"], "truncate": True}),
        ("/embed_all", {"inputs": "rose"}),
        ("/similarity", {"inputs": {"source_sentence": "rose", "sentences": ["a"]}})],
    "bert-classifier": [
        ("/classify", {"input": [{"text": "rose", "text_pair": "b"}, "a"]}),
        ("/v1/classify", {"input": "rose", "use_activation": False}),
        ("/pooling", {"input": "rose", "task": "classify"})],
    "tiny-encoder-split": [("/classify", {"input": "a shrub of southern africa"}),
                           ("/classify", {"input": [[7, 8, 9]], "aggregation": "none"})],
    "roberta-cross-encoder": [("/score", PAIR), ("/rerank", {**RANKED, "top_n": 1}),
                              ("/v1/rerank", RANKED), ("/predict", {"inputs": [["rose"]]}),
                              ("/rerank", {"query": "rose", "texts": ["a"], "return_text": True}),
                              ("/v2/rerank", {**RANKED, "max_tokens_per_doc": 2})],
    "bert-masked-lm": [
        ("/v1/fill-mask", {"input": "a [MASK]", "top_k": 3}),
        ("/v1/fill-mask", {"input": [2, 4, 3], "targets": [7, 8], "logprobs": True})]}


@pytest.mark.parametrize("name", ABOUT_TEXTS)
def test_answers_about_texts_are_as_described(name, described, tmp_path):
    _, document = described
    server = start_server("--strict-fields", "--routing-records", name=name,
                          folder=encoder_models.make(name, tmp_path))
    try:
        for path, body in ABOUT_TEXTS[name]:
            operation = document["paths"][path]["post"]
            validator(document, schema_of(operation["requestBody"]["content"])).validate(body)
            status, _, text = call(server, "POST", path, body)
            assert status == 200, (path, body, text)
            answer = schema_of(operation["responses"]["200"]["content"])
            validator(document, answer, strict=True).validate(json.loads(text))
    finally:
        assert stop_server(server) == 0


def test_answers_are_as_described(described):
    server, document = described
    block = json.loads(call(server, "GET", "/v1/experts/layout")[2])["blocks"][0]
    open_operations = {(method, path) for path, item in document["paths"].items()
                       for method in item}
    for method, path, actual, body in examples(server.name):
        actual = actual.replace("LAYER", str(block["layer"])).replace("BLOCK", block["block"])
        operation = document["paths"][path][method]
        open_operations.discard((method, path))
        if body is not None:
            validator(document, schema_of(operation["requestBody"]["content"])).validate(body)
        status, media_type, text = call(server, method.upper(), actual, body)
        assert status == 200, (actual, body, text)
        content = operation["responses"]["200"]["content"]
        media_type = media_type.partition(";")[0]
        if media_type == "application/json":
            validator(document, schema_of(content), strict=True).validate(json.loads(text))
        elif path == "/dashboard/{file}":
            assert media_type.startswith("text/")
        else:
            assert media_type in content, actual
    texts = {("post", path) for requests in ABOUT_TEXTS.values() for path, _ in requests}
    assert open_operations == texts, "each of the others has an example"


def test_errors_are_as_described(described):
    server, document = described
    for path, body in [("/v1/completions", {}), ("/v1/chat/completions", {"messages": []}),
                       ("/v1/responses", {}), ("/v1/messages", {}), ("/tokenize", {"prompt": 1}),
                       ("/api/chat", {"messages": 1}), ("/api/generate", {"raw": 1}),
                       ("/api/show", {}),
                       ("/v2/models/{model}/infer", {"inputs": []})]:
        actual = path.replace("{model}", server.name)
        status, _, text = call(server, "POST", actual, body)
        assert 400 <= status < 500, (actual, text)
        content = document["paths"][path]["post"]["responses"]["default"]["content"]
        validator(document, schema_of(content), strict=True).validate(json.loads(text))


@pytest.mark.parametrize("path, body", [("/v1/completions", {"prompt": PROMPT}),
                                        ("/v1/chat/completions", {"messages": CHAT})])
def test_every_described_field_is_known(described, path, body):
    server, document = described
    schema = document["paths"][path]["post"]["requestBody"]["content"]
    for field in document["components"]["schemas"][schema_of(schema)]["properties"]:
        if field in body:
            continue
        sent = {**body, "max_tokens": 1, field: None}
        validator(document, schema_of(schema)).validate(sent)
        status, _, text = call(server, "POST", path, sent)
        assert status == 200, (field, text)
    assert call(server, "POST", path, {**body, "max_tokens": 1, "colour": None})[0] == 400
