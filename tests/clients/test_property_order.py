"""The properties of a schema come in the schema's order, and no others, through every field that
takes a schema."""

import json

import grpc
import pytest

from conftest import ROOT, post, start_server, stop_server

NAMES = ["zebra", "mid", "apple", "b"]
SCHEMA = {"type": "object", "properties": {name: {"type": "boolean"} for name in NAMES},
          "required": ["apple", "zebra"]}
TAG = {"type": "tag", "begin": "<", "end": ">",
       "content": {"type": "json_schema", "json_schema": SCHEMA}}
STRUCTURES = {"type": "structural_tag", "triggers": ["<"],
              "structures": [{"begin": "<", "schema": SCHEMA, "end": ">"}]}
USER = [{"role": "user", "content": "a"}]
SAMPLING = {"max_tokens": 200, "temperature": 1.5}
TOOL = {"name": "f", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def chats():
    running = start_server("--chat-template", str(ROOT / "tests/chat/templates/chatml.jinja"),
                           "--allow-request-chat-template")
    yield running
    assert stop_server(running) == 0


def arguments(message):
    return message["tool_calls"][0]["function"]["arguments"]


COMPLETIONS = {
    "json_schema": {"response_format": {"type": "json_schema",
                                        "json_schema": {"name": "a", "schema": SCHEMA}}},
    "tag": {"response_format": {"type": "structural_tag", "format": TAG}},
    "tag as text": {"structured_outputs": {"structural_tag": json.dumps({"format": TAG})}},
    "tag in outputs": {"structured_outputs": {"structural_tag": {"format": TAG}}},
    "outputs": {"structured_outputs": {"json": SCHEMA}},
    "outputs as text": {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    "guided": {"guided_json": SCHEMA},
    "guided as text": {"guided_json": json.dumps(SCHEMA)},
}


def check(texts):
    """Checks the objects in `texts`, of which some must have optional properties."""
    optional = 0
    for text in texts:
        names = list(json.loads(text))
        assert names == [name for name in NAMES if name in names], text
        assert {"apple", "zebra"} <= set(names)
        optional += len(names) > 2
    assert optional > 0


@pytest.mark.parametrize("field", COMPLETIONS)
def test_completions(server, field):
    answer = post(server, "/v1/completions", {"prompt": "a", "n": 8, "seed": 5, **SAMPLING,
                                              **COMPLETIONS[field]})
    check([choice["text"].strip("<>") for choice in answer["choices"]])


def test_tags_of_the_older_form(server):
    answer = post(server, "/v1/completions", {"prompt": "a <", "n": 24, "seed": 1, **SAMPLING,
                                              "response_format": STRUCTURES})
    texts = [part.split(">")[0] for choice in answer["choices"]
             for part in choice["text"].split("<")[1:]]
    for text in texts:
        if text.endswith("}"):
            names = list(json.loads(text))
            assert names == [name for name in NAMES if name in names], text


@pytest.mark.parametrize("template", ["chatml", "llama3", "qwen3-coder", "kimi"])
def test_tools(chats, template):
    source = (ROOT / f"tests/chat/templates/{template}.jinja").read_text()
    answer = post(chats, "/v1/chat/completions", {
        "messages": USER, "n": 8, "seed": 5, **SAMPLING, "chat_template": source,
        "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required",
        "parallel_tool_calls": False})
    check([arguments(choice["message"]) for choice in answer["choices"]])


def test_responses_and_messages(chats):
    texts, calls, uses = [], [], []
    for seed in range(6):
        fields = {"input": "a", "temperature": 1.5, "seed": seed, "max_output_tokens": 200}
        answer = post(chats, "/v1/responses", {**fields, "text": {"format": {
            "type": "json_schema", "name": "a", "schema": SCHEMA}}})
        assert list(answer["text"]["format"]["schema"]["properties"]) == NAMES
        texts.append(answer["output"][0]["content"][0]["text"])
        answer = post(chats, "/v1/responses", {**fields, "tool_choice": "required",
                                               "tools": [{"type": "function", **TOOL}]})
        calls.append(answer["output"][0]["arguments"])
        answer = post(chats, "/v1/messages", {
            "messages": USER, "max_tokens": 200, "temperature": 1, "seed": seed,
            "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}})
        uses.append(json.dumps(answer["content"][0]["input"]))
    check(texts)
    check(calls)
    check(uses)


def test_grpc(server, protos):
    pb, rpc = protos
    with grpc.insecure_channel(server.grpc) as channel:
        texts = [""] * 8
        request = pb.GenerateRequest(
            text="a", n=8, sampling=pb.SamplingParams(max_tokens=200, temperature=1.5),
            structured_output=pb.StructuredOutput(json_schema=json.dumps(SCHEMA)))
        for message in rpc.InferenceStub(channel).Generate(request):
            texts[message.index] += message.text
    check(texts)
