"""Ollama's client, and clients that use its API, in their default modes."""

import asyncio

import pytest

ollama = pytest.importorskip("ollama")

from shapes import MESSAGES, PROMPT, City, weather


@pytest.fixture
def client(server):
    return ollama.Client(host=server.url)


def test_list(client, server):
    names = [model.model for model in client.list().models]
    assert f"{server.name}:latest" in names
    assert [model.model for model in client.ps().models] == names
    shown = client.show(server.name)
    assert shown.capabilities == ["completion", "tools"] and shown.modelinfo and shown.modified_at


def test_chat(client, server):
    answer = client.chat(model=server.name, messages=MESSAGES)
    assert answer.message.content and answer.done and answer.done_reason == "stop"
    assert answer.eval_count > 0 and answer.total_duration >= answer.eval_duration
    pieces = list(client.chat(model=server.name, messages=MESSAGES, stream=True))
    assert "".join(piece.message.content for piece in pieces) and pieces[-1].done
    history = [*MESSAGES, answer.message, {"role": "user", "content": "And then?"}]
    assert client.chat(model=server.name, messages=history).message.content

    async def run():
        chat = await ollama.AsyncClient(host=server.url).chat(
            model=server.name, messages=MESSAGES, stream=True)
        return [part async for part in chat]
    assert asyncio.run(run())[-1].done


def test_generate(client, server):
    answer = client.generate(model=server.name, prompt=PROMPT)
    assert answer.response and answer.done and answer.context is None
    pieces = list(client.generate(model=server.name, prompt=PROMPT, stream=True, think=False,
                                  options=ollama.Options(num_predict=8, seed=1)))
    assert pieces[-1].done and pieces[-1].eval_count <= 8


def test_tools(client, server):
    """The client makes the tool's schema from the function; the model decides whether it calls it."""
    answer = client.chat(model=server.name, messages=MESSAGES, tools=[weather],
                         options={"num_predict": 40})
    for call in answer.message.tool_calls or []:
        assert call.function.name == "weather" and set(call.function.arguments) == {"place", "days"}
    call = ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(
        name="weather", arguments={"place": "Rome", "days": 1}))
    history = [*MESSAGES, ollama.Message(role="assistant", tool_calls=[call]),
               {"role": "tool", "content": "rain", "tool_name": "weather"}]
    assert client.chat(model=server.name, messages=history, tools=[weather],
                       options={"num_predict": 8}).done


def test_format(client, server):
    answer = client.chat(model=server.name, messages=MESSAGES, format=City.model_json_schema())
    City.model_validate_json(answer.message.content)
    answer = client.generate(model=server.name, prompt=PROMPT, format=City.model_json_schema())
    City.model_validate_json(answer.response)


def test_errors(client, server):
    for call in (lambda: client.chat(model="other", messages=MESSAGES), lambda: client.show("other")):
        with pytest.raises(ollama.ResponseError) as error:
            call()
        assert error.value.status_code == 404 and server.name in error.value.error
    for call in (lambda: client.embed(model=server.name, input="x"), lambda: client.pull("x"),
                 lambda: client.delete("x"), lambda: client.copy("x", "y")):
        with pytest.raises(ollama.ResponseError) as error:
            call()
        assert error.value.status_code == 501 and "this server" in error.value.error


def test_langchain(server):
    module = pytest.importorskip("langchain_ollama")
    model = module.ChatOllama(model=server.name, base_url=server.url, num_predict=300)
    answer = model.invoke(PROMPT)
    assert answer.text and answer.usage_metadata["output_tokens"] > 0
    *_, last = model.stream(PROMPT)
    assert last.response_metadata.get("done", True)
    assert isinstance(model.with_structured_output(City).invoke(PROMPT), City)
    assert model.bind_tools([weather]).invoke(PROMPT).response_metadata["done"]


def test_llama_index(server):
    module = pytest.importorskip("llama_index.llms.ollama")
    from llama_index.core.llms import ChatMessage
    model = module.Ollama(model=server.name, base_url=server.url, request_timeout=60.0,
                          context_window=2048, additional_kwargs={"num_predict": 300})
    chat = [ChatMessage(role="user", content=PROMPT)]
    assert model.chat(chat).message.content
    assert "".join(piece.delta or "" for piece in model.stream_chat(chat))
    assert model.complete(PROMPT).text
    assert isinstance(model.as_structured_llm(City).chat(chat).raw, City)


@pytest.mark.parametrize("provider", ["ollama", "ollama_chat"])
def test_litellm(server, provider):
    litellm = pytest.importorskip("litellm")
    fields = dict(model=f"{provider}/{server.name}", api_base=server.url, messages=MESSAGES,
                  max_tokens=300, num_retries=0)
    assert litellm.completion(**fields).choices[0].message.content
    pieces = litellm.completion(**fields, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
    answer = litellm.completion(**fields, response_format=City)
    City.model_validate_json(answer.choices[0].message.content)
