"""Anthropic's client in its default modes."""

import asyncio

import pytest

anthropic = pytest.importorskip("anthropic")

from shapes import MESSAGES, City, weather

TOOL = {"name": "city", "input_schema": City.model_json_schema()}


@pytest.fixture
def client(server):
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0)


def test_models(client, server):
    models = list(client.models.list())
    assert server.name in [model.id for model in models]
    assert models[0].type == "model" and models[0].display_name and models[0].created_at.year > 2000
    assert client.models.retrieve(server.name).id == server.name


def test_messages(client, server):
    fields = dict(model=server.name, max_tokens=12, messages=MESSAGES)
    answer = client.messages.create(**fields)
    assert answer.content[0].type == "text" and answer.usage.output_tokens <= 12
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text
    count = client.messages.count_tokens(model=server.name, messages=MESSAGES)
    assert count.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens

    async def run():
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="unused") as other:
            async with other.messages.stream(**fields) as stream:
                return await stream.get_final_text()
    assert asyncio.run(run())


def test_tools(client, server):
    fields = dict(model=server.name, max_tokens=300, messages=MESSAGES, tools=[TOOL],
                  tool_choice={"type": "tool", "name": "city"})
    answer = client.messages.create(**fields)
    assert answer.stop_reason == "tool_use"
    City.model_validate(answer.content[0].input)
    with client.messages.stream(**fields) as stream:
        City.model_validate(stream.get_final_message().content[0].input)
    history = [*MESSAGES, {"role": "assistant", "content": answer.content},
               {"role": "user", "content": [{"type": "tool_result", "content": "done",
                                             "tool_use_id": answer.content[0].id}]}]
    assert client.messages.create(model=server.name, max_tokens=12, messages=history,
                                  tools=[TOOL]).stop_reason


def test_parse(client, server):
    fields = dict(model=server.name, max_tokens=300, messages=MESSAGES, output_format=City)
    assert isinstance(client.messages.parse(**fields).parsed_output, City)
    with client.messages.stream(**fields) as stream:
        assert isinstance(stream.get_final_message().parsed_output, City)


def test_tool_runner(client, server):
    calls = []

    @anthropic.beta_tool
    def observe(place: str, days: int) -> str:
        """Returns the weather of a place."""
        calls.append(place)
        return weather(place, days)

    runner = client.beta.messages.tool_runner(
        model=server.name, max_tokens=300, messages=MESSAGES, tools=[observe],
        tool_choice={"type": "any"}, max_iterations=2)
    assert len(list(runner)) == 2 and calls


def test_errors(client, server):
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(model=server.name, max_tokens=0, messages=MESSAGES)
    assert error.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=4, messages=MESSAGES)
