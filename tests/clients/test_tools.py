"""Tests tool calling with the official OpenAI client, with the chat templates of ten families."""

import json
import random
import sys

import jsonschema
import openai
import pytest

from conftest import ROOT, post, slow, start_server, stop_server

sys.path.insert(0, str(ROOT / "tests/chat"))
from reference_environment import Reference  # noqa: E402

TEMPLATES = {path.stem: path.read_text() for path in (ROOT / "tests/chat/templates").glob("*.jinja")}
USER = [{"role": "user", "content": "In the beginning"}]
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Returns the weather.", "parameters": {
        "type": "object", "required": ["place", "unit"], "additionalProperties": False,
        "properties": {"place": {"type": "string", "maxLength": 12},
                       "unit": {"type": "string", "enum": ["C", "F"]},
                       "days": {"type": "integer", "minimum": 0, "maximum": 9}}}}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {
    "type": "object", "properties": {}, "additionalProperties": False}}}


@pytest.fixture(scope="module")
def server():
    running = start_server("--chat-template", str(ROOT / "tests/chat/templates/chatml.jinja"),
                           "--allow-request-chat-template")
    yield running
    assert stop_server(running) == 0


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def random_schema(rng, depth=2):
    """Returns a schema whose instances have few bytes."""
    kind = rng.choice(["string", "enum", "integer", "boolean", "number", "array", "object", "any"]
                      if depth > 0 else ["enum", "integer", "boolean"])
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 8)}
    if kind == "enum":
        return {"enum": rng.sample(["a", "b c", "\"quoted\"", "é", 3, None, True], rng.randint(1, 4))}
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randint(-5, 5), "maximum": rng.randint(6, 99)}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": 2}
    if kind == "object":
        return random_object(rng, depth - 1)
    if kind == "any":
        return {"anyOf": [random_schema(rng, depth - 1), random_schema(rng, depth - 1)]}
    return {"type": kind}


def random_object(rng, depth):
    names = rng.sample(["city", "n", "flag", "deep", "x-y", "last one"], rng.randint(0, 3))
    return {"type": "object", "properties": {name: random_schema(rng, depth) for name in names},
            "required": [name for name in names if rng.random() < 0.7], "additionalProperties": False}


def random_tools(rng):
    return [{"type": "function", "function": {
        "name": f"{rng.choice(['get', 'set', 'find-all', 'a.b'])}_{i}",
        "description": rng.choice(["", "Does it.", "<tool_call> \"quoted\""]),
        "parameters": random_object(rng, 2)}} for i in range(rng.randint(1, 4))]


def check(message, tools):
    """Checks that the calls of a message are valid, and returns their number."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    calls = message.tool_calls or []
    for call in calls:
        assert call.type == "function" and call.id
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
    assert len({call.id for call in calls}) == len(calls)
    return len(calls)


def check_generated_tools(client, server, family, sets):
    """Checks calls of generated tools under every choice."""
    rng = random.Random(family)
    for i in range(sets):
        tools = random_tools(rng)
        named = rng.choice(tools)["function"]["name"]
        for choice in ("auto", "required", {"type": "function", "function": {"name": named}}):
            answer = client.chat.completions.create(
                model=server.name, messages=USER, tools=tools, tool_choice=choice, temperature=1,
                seed=i, max_completion_tokens=400,
                extra_body={"chat_template": TEMPLATES[family]}).choices[0]
            calls = check(answer.message, tools)
            if getattr(answer.message, "reasoning_content", None) and not calls:
                # The limit has cut the reasoning off, or the text behind it.
                assert answer.finish_reason in (["stop", "length"] if choice == "auto" else ["length"])
                assert choice == "auto" or not answer.message.content
                continue
            if choice == "auto":
                assert answer.finish_reason in (["tool_calls"] if calls else ["stop", "length"])
            elif choice == "required":
                assert calls >= 1 and answer.message.content is None
                assert answer.finish_reason == "tool_calls"
            else:
                assert calls == 1 and answer.message.tool_calls[0].function.name == named
                assert answer.finish_reason == "stop"


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_generated_tools_under_every_choice(client, server, family):
    check_generated_tools(client, server, family, 5)


@slow
@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_two_hundred_sets_of_tools(client, server, family):
    check_generated_tools(client, server, family, 34)


@pytest.mark.parametrize("parallel", [True, False])
def test_streamed_calls_join_to_the_unary_answer(client, server, parallel):
    tools = [WEATHER, NOW]
    fields = dict(model=server.name, messages=USER, tools=tools, tool_choice="required", seed=3,
                  temperature=1, max_completion_tokens=300, n=2, parallel_tool_calls=parallel)
    unary = client.chat.completions.create(**fields)
    calls, reasons = [[], []], [None, None]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or []:
                mine = calls[choice.index]
                if delta.index == len(mine):
                    assert delta.id and delta.type == "function" and delta.function.name
                    mine.append([delta.function.name, delta.function.arguments])
                else:
                    assert delta.index == len(mine) - 1
                    assert delta.id is None and delta.function.name is None
                    mine[-1][1] += delta.function.arguments
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    for choice in unary.choices:
        check(choice.message, tools)
        assert [[c.function.name, c.function.arguments] for c in choice.message.tool_calls] == calls[
            choice.index]
        assert reasons[choice.index] == choice.finish_reason == "tool_calls"
        assert parallel or len(calls[choice.index]) == 1


@pytest.mark.parametrize("family", ["chatml", "deepseek", "glm", "kimi", "llama3", "minimax",
                                    "mistral", "qwen3-coder"])
def test_the_template_renders_tools_and_calls(server, family):
    messages = USER + [
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {
                "name": "get_weather", "arguments": json.dumps({"unit": "C", "place": "é <b>"})}}]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "15 degrees"}]
    parsed = json.loads(json.dumps(messages))
    call = parsed[1]["tool_calls"][0]["function"]
    call["arguments"] = json.loads(call["arguments"])
    # A template that does not show tools gets a description of them in a message, which
    # generic_tools_test tests.
    tools = [WEATHER, NOW] if "tools" in TEMPLATES[family] else None
    text, error = Reference().render(TEMPLATES[family], {
        "messages": parsed, "tools": tools, "add_generation_prompt": True,
        "date_string": "1 Jan 2026", "eos_token": "</s>", "bos_token": "<s>"})
    assert error is None
    fields = {"messages": messages, "tools": tools, "chat_template": TEMPLATES[family],
              "chat_template_kwargs": {"date_string": "1 Jan 2026"}}
    tokens = post(server, "/tokenize", fields)["tokens"]
    mine = post(server, "/detokenize", {"tokens": tokens})["prompt"]
    special = ("<s>", "</s>", "<bos>", "<eos>", "<|endoftext|>")
    for token in special:
        text, mine = text.replace(token, ""), mine.replace(token, "")
    assert mine == text


def test_a_conversation_with_a_tool(client, server):
    answer = client.chat.completions.create(model=server.name, messages=USER, tools=[WEATHER],
                                            tool_choice="required", max_completion_tokens=200)
    message = answer.choices[0].message
    history = USER + [message.model_dump(exclude_none=True)] + [
        {"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    after = client.chat.completions.create(model=server.name, messages=history, tools=[WEATHER],
                                           tool_choice="none", max_completion_tokens=8)
    assert after.choices[0].message.tool_calls is None
    assert after.usage.prompt_tokens > answer.usage.prompt_tokens / 2


def test_without_the_choice_the_model_does_not_see_tools(client, server):
    plain = client.chat.completions.create(model=server.name, messages=USER, max_completion_tokens=8,
                                           temperature=0)
    none = client.chat.completions.create(model=server.name, messages=USER, max_completion_tokens=8,
                                          temperature=0, tools=[WEATHER], tool_choice="none")
    assert none.choices[0].message == plain.choices[0].message
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens


def test_tools_beside_a_response_format(client, server):
    schema = {"type": "object", "required": ["yes"], "additionalProperties": False,
              "properties": {"yes": {"type": "boolean"}}}
    answers = client.chat.completions.create(
        model=server.name, messages=USER, tools=[WEATHER], temperature=1, seed=1, n=16,
        max_completion_tokens=200, response_format={
            "type": "json_schema", "json_schema": {"name": "answer", "schema": schema}})
    for choice in answers.choices:
        if not check(choice.message, [WEATHER]):
            jsonschema.validate(json.loads(choice.message.content), schema)


def test_schemas_that_cannot_be_enforced(client, server):
    odd = {"type": "function", "function": {"name": "odd", "parameters": {
        "type": "object", "$dynamicRef": "#nowhere"}}}
    answer = client.chat.completions.create(model=server.name, messages=USER, tools=[odd],
                                            tool_choice="required", max_completion_tokens=200)
    assert isinstance(json.loads(answer.choices[0].message.tool_calls[0].function.arguments), dict)
    odd["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=server.name, messages=USER, tools=[odd])
    assert error.value.code == "invalid_schema" and error.value.param == "tools"


def test_reasoning_is_split_off(client, server):
    template = ("{% for m in messages %}{{ m.content }}{% endfor %}"
                "{% if add_generation_prompt %}<think>\n{% endif %}")
    fields = dict(model=server.name, messages=USER, temperature=1, seed=2, max_completion_tokens=40)
    whole = client.chat.completions.create(**fields, extra_body={"chat_template": template})
    message = whole.choices[0].message
    assert message.content == "" and message.reasoning_content
    without = client.chat.completions.create(
        **fields, extra_body={"chat_template": template, "include_reasoning": False})
    assert not hasattr(without.choices[0].message, "reasoning_content")
    streamed = ""
    for chunk in client.chat.completions.create(**fields, stream=True,
                                                extra_body={"chat_template": template}):
        streamed += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    assert streamed == message.reasoning_content


@pytest.mark.parametrize("fields, code, param", [
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "invalid_value",
     "tools[0].function.name"),
    ({"tools": [WEATHER, WEATHER]}, "invalid_value", "tools[1].function.name"),
    ({"tools": [WEATHER], "tool_choice": "sometimes"}, "invalid_value", "tool_choice"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tools": [WEATHER], "ignore_eos": True}, "invalid_value", "ignore_eos"),
])
def test_refusals(client, server, fields, code, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=server.name, messages=USER, extra_body=fields)
    assert (error.value.code, error.value.param) == (code, param)


def test_the_operator_chooses_how_calls_are_written():
    running = start_server("--chat-template", str(ROOT / "tests/chat/templates/chatml.jinja"),
                           "--tool-call-parser", "json")
    try:
        answer = post(running, "/v1/chat/completions", {
            "messages": USER, "tools": [NOW], "tool_choice": "required", "max_tokens": 100,
            "parallel_tool_calls": False, "return_token_ids": True})["choices"][0]
        call = answer["message"]["tool_calls"][0]["function"]
        assert (call["name"], json.loads(call["arguments"])) == ("now", {})
        text = post(running, "/detokenize", {"tokens": answer["token_ids"]})["prompt"]
        assert "".join(text.split()).startswith('[{"name":"now","arguments":{}}]')
    finally:
        assert stop_server(running) == 0
