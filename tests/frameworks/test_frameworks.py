"""Runs frameworks in their default modes against a bundled model. The model's texts have no meaning;
what counts is that every framework gets answers that it can read.
"""

import importlib.metadata
import json

import pytest
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "In the beginning"}]


class City(BaseModel):
    """A city and the year it was founded."""

    name: str
    year: int
    capital: bool


def needs(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")


@pytest.fixture
def base_url(server):
    return f"{server.url}/v1"


# Anthropic's client


@pytest.fixture
def anthropic_client(server):
    needs("anthropic")
    import anthropic
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0)


def test_anthropic(anthropic_client, server):
    answer = anthropic_client.messages.create(model=server.name, max_tokens=12, messages=MESSAGES)
    assert answer.content[0].type == "text" and answer.usage.output_tokens <= 12
    with anthropic_client.messages.stream(model=server.name, max_tokens=12,
                                          messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text
    count = anthropic_client.messages.count_tokens(model=server.name, messages=MESSAGES)
    assert count.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_anthropic_tools(anthropic_client, server):
    tool = {"name": "city", "input_schema": City.model_json_schema()}
    fields = dict(model=server.name, max_tokens=300, messages=MESSAGES, tools=[tool],
                  tool_choice={"type": "tool", "name": "city"})
    answer = anthropic_client.messages.create(**fields)
    assert answer.stop_reason == "tool_use"
    City.model_validate(answer.content[0].input)
    with anthropic_client.messages.stream(**fields) as stream:
        City.model_validate(stream.get_final_message().content[0].input)


def test_anthropic_errors(anthropic_client, server):
    import anthropic
    with pytest.raises(anthropic.BadRequestError) as error:
        anthropic_client.messages.create(model=server.name, max_tokens=0, messages=MESSAGES)
    assert error.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.create(model="other", max_tokens=4, messages=MESSAGES)


# instructor


def test_instructor(base_url, server):
    needs("instructor")
    import instructor
    import openai
    client = instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="unused"))
    city = client.chat.completions.create(model=server.name, messages=MESSAGES, response_model=City,
                                          max_tokens=300, max_retries=0)
    assert isinstance(city, City)


def test_instructor_with_anthropic(anthropic_client, server):
    needs("instructor")
    import instructor
    client = instructor.from_anthropic(anthropic_client)
    city = client.chat.completions.create(model=server.name, messages=MESSAGES, response_model=City,
                                          max_tokens=300, max_retries=0)
    assert isinstance(city, City)


# pydantic-ai


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_pydantic_ai(base_url, server, kind):
    needs("pydantic-ai-slim")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider
    make = OpenAIChatModel if kind == "chat" else OpenAIResponsesModel
    model = make(server.name, provider=OpenAIProvider(base_url=base_url, api_key="unused"))
    agent = Agent(model, output_type=City, model_settings={"max_tokens": 300})
    assert isinstance(agent.run_sync("In the beginning").output, City)

    calls = []
    plain = Agent(model, model_settings={"max_tokens": 40})

    @plain.tool_plain
    def weather(place: str) -> str:
        """Returns the weather of a place."""
        calls.append(place)
        return "rain"

    assert isinstance(plain.run_sync("In the beginning").output, str)


# langchain


@pytest.fixture
def langchain_model(base_url, server):
    needs("langchain-openai")
    from langchain_openai import ChatOpenAI
    return ChatOpenAI(model=server.name, base_url=base_url, api_key="unused", max_retries=0,
                      max_tokens=300)


def test_langchain(langchain_model):
    assert langchain_model.invoke("In the beginning").content
    assert "".join(piece.content for piece in langchain_model.stream("In the beginning"))


def test_langchain_tools(langchain_model):
    bound = langchain_model.bind_tools([City], tool_choice="any")
    answer = bound.invoke("In the beginning")
    assert answer.tool_calls and not answer.invalid_tool_calls
    for call in answer.tool_calls:
        City.model_validate(call["args"])
    whole = None
    for piece in bound.stream("In the beginning"):
        whole = piece if whole is None else whole + piece
    assert whole.tool_calls and not whole.invalid_tool_calls
    # The default lets the model choose.
    assert langchain_model.bind_tools([City]).invoke("In the beginning").response_metadata


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_structured(langchain_model, method):
    if method == "json_mode":
        answer = langchain_model.with_structured_output(None, method=method).invoke("In the beginning")
        assert isinstance(answer, dict)
        return
    structured = langchain_model.with_structured_output(City, method=method)
    assert isinstance(structured.invoke("In the beginning"), City)


# llama-index


def test_llama_index(base_url, server):
    needs("llama-index-llms-openai-like")
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike
    model = OpenAILike(model=server.name, api_base=base_url, api_key="unused", is_chat_model=True,
                       is_function_calling_model=True, max_tokens=300, max_retries=0)
    assert model.chat([ChatMessage(role="user", content="In the beginning")]).message.content
    assert "".join(piece.delta or "" for piece in model.stream_chat(
        [ChatMessage(role="user", content="In the beginning")]))

    def weather(place: str) -> str:
        """Returns the weather of a place."""
        return "rain"

    answer = model.chat_with_tools([FunctionTool.from_defaults(weather)], "In the beginning",
                                   tool_required=True)
    calls = model.get_tool_calls_from_response(answer)
    assert calls and all(call.tool_name == "weather" for call in calls)


# litellm


def test_litellm(base_url, server):
    needs("litellm")
    import litellm
    fields = dict(model=f"openai/{server.name}", api_base=base_url, api_key="unused",
                  messages=MESSAGES, max_tokens=300, num_retries=0)
    assert litellm.completion(**fields).choices[0].message.content
    tool = {"type": "function", "function": {"name": "city", "parameters": City.model_json_schema()}}
    answer = litellm.completion(**fields, tools=[tool], tool_choice="required")
    for call in answer.choices[0].message.tool_calls:
        City.model_validate(json.loads(call.function.arguments))
