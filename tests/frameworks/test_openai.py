"""OpenAI's client in its default modes."""

import asyncio
import json

import pytest

openai = pytest.importorskip("openai")

from shapes import MESSAGES, PROMPT, City

CHAT_TOOL = {"type": "function", "function": {"name": "city", "parameters": City.model_json_schema()}}
TOOL = {"type": "function", "name": "city", "parameters": City.model_json_schema(), "strict": False}


@pytest.fixture
def client(base_url):
    return openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0)


def test_models(client, server):
    assert server.name in [model.id for model in client.models.list()]
    assert client.models.retrieve(server.name).id == server.name


def test_chat(client, server):
    fields = dict(model=server.name, messages=MESSAGES, temperature=0, seed=1)
    whole = client.chat.completions.create(**fields).choices[0].message.content
    assert whole
    pieces = client.chat.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == whole
    with client.chat.completions.stream(**fields) as stream:
        assert stream.get_final_completion().choices[0].message.content == whole

    async def run():
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="unused") as other:
            return await other.chat.completions.create(**fields)
    assert asyncio.run(run()).choices[0].message.content == whole


def test_chat_tools(client, server):
    fields = dict(model=server.name, messages=MESSAGES, max_completion_tokens=300, tools=[CHAT_TOOL],
                  tool_choice="required")
    message = client.chat.completions.create(**fields).choices[0].message
    City.model_validate_json(message.tool_calls[0].function.arguments)
    with client.chat.completions.stream(**fields) as stream:
        for call in stream.get_final_completion().choices[0].message.tool_calls:
            City.model_validate_json(call.function.arguments)
    call = message.tool_calls[0]
    answer = client.chat.completions.create(
        model=server.name, max_completion_tokens=12, messages=[
            *MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": "done"}],
        tools=[CHAT_TOOL], tool_choice="none")
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_chat_parse(client, server):
    fields = dict(model=server.name, messages=MESSAGES, max_completion_tokens=300)
    answer = client.chat.completions.parse(**fields, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City)
    tool = openai.pydantic_function_tool(City)
    answer = client.chat.completions.parse(**fields, tools=[tool], tool_choice="required")
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, City)


def test_responses(client, server):
    fields = dict(model=server.name, input=PROMPT, temperature=0)
    whole = client.responses.create(**fields)
    assert whole.output_text
    with client.responses.stream(**fields) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == whole.output_text == stream.get_final_response().output_text
    assert client.responses.input_tokens.count(
        model=server.name, input=PROMPT).input_tokens == whole.usage.input_tokens


def test_responses_tools(client, server):
    fields = dict(model=server.name, input=PROMPT, max_output_tokens=300, tools=[TOOL],
                  tool_choice="required")
    calls = [item for item in client.responses.create(**fields).output
             if item.type == "function_call"]
    City.model_validate_json(calls[0].arguments)
    with client.responses.stream(**fields) as stream:
        output = stream.get_final_response().output
    assert all(City(**json.loads(item.arguments)) for item in output if item.type == "function_call")
    history = [{"role": "user", "content": PROMPT}, *output,
               *({"type": "function_call_output", "call_id": item.call_id, "output": "done"}
                 for item in output if item.type == "function_call")]
    assert client.responses.create(model=server.name, input=history, tools=[TOOL],
                                   max_output_tokens=12, tool_choice="none").output_text


def test_responses_parse(client, server):
    fields = dict(model=server.name, input=PROMPT, max_output_tokens=300)
    assert isinstance(client.responses.parse(**fields, text_format=City).output_parsed, City)
    with client.responses.stream(**fields, text_format=City) as stream:
        assert isinstance(stream.get_final_response().output_parsed, City)
    answer = client.responses.parse(**fields, tools=[openai.pydantic_function_tool(City)],
                                    tool_choice="required")
    assert isinstance(answer.output[-1].parsed_arguments, City)


def test_completions(client, server):
    fields = dict(model=server.name, prompt=PROMPT, max_tokens=12, temperature=0)
    whole = client.completions.create(**fields).choices[0].text
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(
        **fields, stream=True)) == whole
