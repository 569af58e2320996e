"""Tests the Responses API with the official OpenAI client."""

import json
import urllib.error

import openai
import pydantic
import pytest

from conftest import ROOT, post, start_server, stop_server

WEATHER = {"type": "function", "name": "get_weather", "strict": True, "parameters": {
    "type": "object", "required": ["place"], "additionalProperties": False,
    "properties": {"place": {"type": "string", "maxLength": 12}}}}
THINKS = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
          "{% if add_generation_prompt %}<think>\n{% endif %}")


@pytest.fixture(scope="module")
def server():
    running = start_server("--chat-template", str(ROOT / "tests/chat/templates/chatml.jinja"),
                           "--allow-request-chat-template")
    yield running
    assert stop_server(running) == 0


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_the_answer_is_that_of_a_chat(client, server):
    answer = client.responses.create(model=server.name, input="In the beginning", temperature=0,
                                     max_output_tokens=12)
    assert answer.object == "response" and answer.id.startswith("resp_")
    assert answer.output[0].type == "message" and answer.output[0].role == "assistant"
    assert answer.status in ("completed", "incomplete")
    assert (answer.incomplete_details is not None) == (answer.status == "incomplete")
    chat = client.chat.completions.create(
        model=server.name, messages=[{"role": "user", "content": "In the beginning"}], temperature=0,
        max_completion_tokens=12)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    assert answer.usage.model_dump()["experts_per_token"] == chat.usage.model_dump()[
        "experts_per_token"]


def test_items_become_messages(client, server):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "In the "},
                                     {"type": "input_text", "text": "beginning"}]},
        {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": "{\"place\":\"x\"}"},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "It rains.", "annotations": []}]},
        {"role": "user", "content": "And then"}]
    answer = client.responses.create(model=server.name, instructions="Tell stories.", input=items,
                                     max_output_tokens=4, temperature=0)
    chat = client.chat.completions.create(model=server.name, max_completion_tokens=4, temperature=0,
                                          messages=[
        {"role": "system", "content": "Tell stories."},
        {"role": "user", "content": "In the beginning"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function",
             "function": {"name": "get_weather", "arguments": "{\"place\":\"x\"}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "And then"}])
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.output_text == chat.choices[0].message.content
    assert answer.instructions == "Tell stories."


@pytest.mark.parametrize("fields", [
    {}, {"tools": [WEATHER], "tool_choice": "required"},
    {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}},
    {"tools": [WEATHER]}, {"extra_body": {"chat_template": THINKS}},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2}])
def test_streamed_events_join_to_the_unary_answer(client, server, fields):
    fields = dict(model=server.name, input="In the beginning", temperature=1, max_output_tokens=100,
                  **fields)
    fields["extra_body"] = {"seed": 7, **fields.get("extra_body", {})}
    unary = client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{unary.status}"
    last = events[-1].response

    def comparable(response):
        out = response.model_dump(exclude={"id", "created_at"})
        for item in out["output"]:
            item.pop("id"), item.pop("call_id", None)
        out["usage"].pop("input_tokens_details")  # the second request finds the prompt in the cache
        return out

    assert comparable(last) == comparable(unary)
    joined = {}
    for event in events:
        if event.type.endswith(".delta"):
            joined[event.output_index] = joined.get(event.output_index, "") + event.delta
    for index, item in enumerate(last.output):
        text = (item.arguments if item.type == "function_call" else
                "".join(part.text for part in item.content))
        assert joined.get(index, "") == text
        added = [e for e in events if e.type == "response.output_item.added"
                 and e.output_index == index]
        done = [e for e in events if e.type == "response.output_item.done"
                and e.output_index == index]
        assert len(added) == len(done) == 1 and added[0].item.id == done[0].item.id == item.id


def test_tools(client, server):
    answer = client.responses.create(model=server.name, input="In the beginning", tools=[WEATHER],
                                     tool_choice="required", max_output_tokens=200)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls and all(set(json.loads(call.arguments)) == {"place"} for call in calls)
    assert answer.tools[0].name == "get_weather"
    # The items can be sent back as they are.
    history = [{"role": "user", "content": "In the beginning"}]
    history += [item.model_dump(exclude_none=True) for item in answer.output]
    history += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
                for call in calls]
    after = client.responses.create(model=server.name, input=history, tools=[WEATHER],
                                    tool_choice="none", max_output_tokens=4)
    assert after.output[0].type == "message"


@pytest.mark.parametrize("template", [None, THINKS])
def test_an_answer_without_text_has_an_empty_message(client, server, template):
    fields = {"logit_bias": {"0": 100}}  # the token that ends a text
    if template is not None:
        fields["chat_template"] = template
    request = {"model": server.name, "input": "In the beginning", "max_output_tokens": 4,
               "temperature": 0, "extra_body": fields}
    answer = client.responses.create(**request)
    assert answer.status == "completed" and answer.output_text == ""
    assert [item.type for item in answer.output] == ["message"]
    assert answer.output[0].status == "completed" and answer.output[0].content[0].text == ""
    events = list(client.responses.create(**request, stream=True))
    assert [item.type for item in events[-1].response.output] == ["message"]
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done",
        "content_part.done", "output_item.done", "completed"]


def test_reasoning_is_an_item(client, server):
    answer = client.responses.create(model=server.name, input="In the beginning", temperature=1,
                                     max_output_tokens=30, extra_body={"chat_template": THINKS})
    assert answer.output[0].type == "reasoning" and answer.output[0].content[0].text
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


def test_parse(client, server):
    class Answer(pydantic.BaseModel):
        yes: bool
        number: int

    answer = client.responses.parse(model=server.name, input="In the beginning", text_format=Answer,
                                    max_output_tokens=100)
    assert isinstance(answer.output_parsed, Answer)


@pytest.mark.parametrize("fields, code, param", [
    ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
    ({"background": True}, "unsupported_parameter", "background"),
    ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
    ({"input": []}, "invalid_value", "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "unsupported_parameter", "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "unsupported_parameter", "input[0].content[0]"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "invalid_value", "input"),
    ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
    ({"max_output_tokens": 10**8}, "context_length_exceeded", "input"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "thing"}}}},
     "invalid_schema", "text.format"),
    ({"metadata": {"a": "x" * 70000}}, "invalid_value", "metadata"),
    ({"user": "x" * 5000}, "invalid_value", "user"),
    ({"tool_choice": {f"a{i}": 0 for i in range(100_000)}}, "invalid_value", "tool_choice"),
    ({"text": {"format": {"type": "json_schema", **{f"a{i}": 0 for i in range(100_000)}}}},
     "invalid_value", "text"),
    ({"text": {"verbosity": 5}}, "invalid_value", "text.verbosity"),
    ({"truncation": "sometimes"}, "invalid_value", "truncation"),
])
def test_refusals(client, server, fields, code, param):
    body = {"input": "In the beginning", **fields}
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model=server.name, **body)
    assert (error.value.code, error.value.param) == (code, param)


def test_a_refused_stream_is_an_error_without_events(server):
    with pytest.raises(urllib.error.HTTPError) as error:
        post(server, "/v1/responses", {"input": "x", "stream": True, "temperature": -1})
    assert error.value.code == 400
    assert json.load(error.value)["error"]["param"] == "temperature"
