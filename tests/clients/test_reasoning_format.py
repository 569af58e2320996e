"""Formats of answers in chats of models that reason: they apply to the content and leave the reasoning
free. The model says a script; the length of the prompt chooses the answer."""

import json
import urllib.request

import pytest

from conftest import post, start_server, stop_server
from scripted_model import ScriptedModel

TEMPLATE = ("{# </think> #}<s>{{ messages[-1].content }}<think>"
            "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}")
TAGS = (("<think>", False), ("</think>", False))
THINKS = ["hm ", "ok", " ", "</think>", "\n"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
          "additionalProperties": False}
ANSWERS = {
    "json": [*THINKS, '{"a": ', "7}"],
    "number": [*THINKS, "12", "3"],
    "choice": [*THINKS, "y", "es"],
    "brackets": [*THINKS, "((", "x", "))"],
    "tagged": [*THINKS, "so ", "<a>", "12", "</a>", " done", "</s>"],
    "endless": ["on ", "and "] * 30,
    "closed": ['{"a": ', "7}"],
}
AT = {name: 5 + 70 * i for i, name in enumerate(ANSWERS)}


@pytest.fixture(scope="module", params=[0, 8], ids=["plain", "drafts"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reasons")
    script = {AT[name] + i: piece for name, answer in ANSWERS.items()
              for i, piece in enumerate(answer)}
    ScriptedModel(folder, script, 800, TEMPLATE, TAGS)
    running = start_server("--allow-request-chat-template", "--draft-tokens", str(request.param),
                           folder=folder)
    yield running
    assert stop_server(running) == 0


def body(name, closed=False, **fields):
    # Behind the content come the tags.
    length = AT[name] + 1 - (3 if closed else 2)
    fields.setdefault("max_tokens", 40)
    return {"messages": [{"role": "user", "content": "x" * length}], "temperature": 0, **fields}


def ask(server, name, **fields):
    return post(server, "/v1/chat/completions", body(name, **fields))["choices"][0]


def parts(choice):
    message = choice["message"]
    return message.get("reasoning_content"), message["content"], choice["finish_reason"]


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TAG_FORMAT = {"type": "structural_tag", "format": {
    "type": "triggered_tags", "triggers": ["<a"],
    "tags": [{"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]+"},
              "end": "</a>"}]}}
FORMATS = [
    ("json", {"response_format": JSON_SCHEMA}, '{"a": 7}'),
    ("json", {"response_format": {"type": "json_object"}}, '{"a": 7}'),
    ("json", {"guided_json": SCHEMA}, '{"a": 7}'),
    ("json", {"structured_outputs": {"json": SCHEMA}}, '{"a": 7}'),
    ("json", {"structured_outputs": {"json_object": True}}, '{"a": 7}'),
    ("number", {"guided_regex": "[0-9]{3}"}, "123"),
    ("number", {"structured_outputs": {"regex": "[0-9]{3}"}}, "123"),
    ("choice", {"guided_choice": ["yes", "no"]}, "yes"),
    ("choice", {"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
    ("brackets", {"guided_grammar": 'root ::= "(" root ")" | "x"'}, "((x))"),
    ("brackets", {"structured_outputs": {"grammar": 'root ::= "(" root ")" | "x"'}}, "((x))"),
    ("tagged", {"response_format": TAG_FORMAT}, "so <a>12</a> done"),
    ("tagged", {"structured_outputs": {"structural_tag": json.dumps(TAG_FORMAT)}},
     "so <a>12</a> done"),
]


@pytest.mark.parametrize("name, fields, content", FORMATS)
def test_the_format_applies_to_the_content(server, name, fields, content):
    assert parts(ask(server, name, **fields)) == ("hm ok", content, "stop")
    hidden = ask(server, name, include_reasoning=False, **fields)
    assert parts(hidden) == (None, content, "stop")
    with_logprobs = ask(server, name, logprobs=True, top_logprobs=1, **fields)
    assert parts(with_logprobs) == ("hm ok", content, "stop")
    told = "".join(entry["token"] for entry in with_logprobs["logprobs"]["content"])
    assert told.removesuffix("</s>") == "".join(ANSWERS[name]).removesuffix("</s>")


def test_streams_and_responses(server):
    request = urllib.request.Request(
        server.url + "/v1/chat/completions",
        json.dumps(body("json", response_format=JSON_SCHEMA, stream=True)).encode(),
        {"Content-Type": "application/json"})
    deltas = [json.loads(line[6:])["choices"][0]["delta"]
              for line in urllib.request.urlopen(request)
              if line.startswith(b"data: {")]
    for key, text in (("reasoning_content", "hm ok"), ("content", '{"a": 7}')):
        assert "".join(delta.get(key) or "" for delta in deltas) == text
    out = post(server, "/v1/responses", {
        "input": body("json")["messages"][0]["content"], "temperature": 0, "max_output_tokens": 40,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}})
    texts = {item["type"]: "".join(part["text"] for part in item["content"]) for item in out["output"]}
    assert texts == {"reasoning": "hm ok", "message": '{"a": 7}'}


def test_reasoning_ends_where_the_model_or_the_limit_ends_it(server):
    # Every limit cuts the reasoning off, and nothing of the format is forced into the answer.
    for limit in (1, 2, 3, 7, 30):
        choice = ask(server, "endless", max_tokens=limit, response_format=JSON_SCHEMA)
        expected = "".join(ANSWERS["endless"][:limit]).strip()
        assert parts(choice) == (expected, "", "length"), limit
    # White space at the end of reasoning that is cut off is no content, also without a format.
    assert parts(ask(server, "json", max_tokens=1)) == ("hm", "", "length")
    assert parts(ask(server, "json", max_tokens=3)) == ("hm ok", "", "length")
    # What follows the reasoning is complete or cut off.
    for limit in range(4, 10):
        reasoning, content, finish = parts(ask(server, "json", max_tokens=limit,
                                               response_format=JSON_SCHEMA))
        assert reasoning.startswith("hm ok")
        if finish == "length":
            assert limit < 6 and '{"a": 7}'.startswith(content)
        else:
            # Without the line end, the answer has six tokens.
            assert limit >= 6 and content == '{"a": 7}'


def test_stop_and_min_tokens(server):
    choice = ask(server, "json", response_format=JSON_SCHEMA, stop=["ok"])
    assert parts(choice) == ("hm", "", "stop")
    for tokens in (3, 6, 20):
        choice = ask(server, "json", response_format=JSON_SCHEMA, min_tokens=tokens)
        assert parts(choice) == ("hm ok", '{"a": 7}', "stop")


def test_a_model_that_is_told_not_to_reason(server):
    fields = {"closed": True, "chat_template_kwargs": {"enable_thinking": False}}
    assert parts(ask(server, "closed", response_format=JSON_SCHEMA, **fields)) == (
        None, '{"a": 7}', "stop")


def test_an_answer_that_continues_a_message_has_only_content(server):
    for source in ("{# <|channel|> #}<s>", "{# <think> </think> #}<s>"):
        out = post(server, "/v1/chat/completions", {
            "messages": [{"role": "assistant", "content": "x" * AT["closed"]}], "temperature": 0,
            "chat_template": source + "{{ messages[-1].content }}", "add_generation_prompt": False,
            "continue_final_message": True, "max_tokens": 40, "response_format": JSON_SCHEMA})
        assert parts(out["choices"][0]) == (None, '{"a": 7}', "stop")


def test_limits_do_not_change_draws():
    running = start_server()
    try:
        for seed in range(12):
            request = {"prompt": "And God said", "temperature": 1.0, "seed": seed,
                       "guided_json": {"type": "object", "additionalProperties": False,
                                       "required": ["name", "year"], "properties": {
                                           "name": {"type": "string", "maxLength": 12},
                                           "year": {"type": "integer", "minimum": 1, "maximum": 3000}}}}
            first = post(running, "/v1/completions", {**request, "max_tokens": 200})
            json.loads(first["choices"][0]["text"])
            tokens = first["usage"]["completion_tokens"]
            for limit in (tokens, tokens + 1, tokens + 3, tokens + 9):
                again = post(running, "/v1/completions", {**request, "max_tokens": limit})
                assert again["choices"] == first["choices"], (seed, limit, tokens)
            # With less, the text is complete as long as any is.
            for limit in range(max(tokens - 6, 32), tokens):
                short = post(running, "/v1/completions", {**request, "max_tokens": limit})
                json.loads(short["choices"][0]["text"])
    finally:
        assert stop_server(running) == 0


def test_words_that_would_end_the_answer_are_forbidden():
    running = start_server()
    try:
        schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"],
                  "additionalProperties": False}
        brace = post(running, "/tokenize", {"prompt": "}", "add_special_tokens": False})["tokens"]
        ids = [token for token in range(300) if token not in brace]
        out = post(running, "/v1/completions", {
            "prompt": "And God said", "temperature": 0, "max_tokens": 24, "guided_json": schema,
            "allowed_token_ids": ids})["choices"][0]
        assert out["finish_reason"] == "length" and out["text"].startswith("{")
        assert "}" not in out["text"]
    finally:
        assert stop_server(running) == 0
