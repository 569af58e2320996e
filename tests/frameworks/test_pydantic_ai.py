"""pydantic-ai in its default modes."""

import asyncio

import pytest

pytest.importorskip("pydantic_ai")

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from shapes import PROMPT, City, weather


@pytest.fixture(params=["chat", "responses", "anthropic"])
def model(request, base_url, server):
    if request.param == "anthropic":
        return AnthropicModel(server.name, provider=AnthropicProvider(base_url=server.url,
                                                                      api_key="unused"))
    make = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
    return make(server.name, provider=OpenAIProvider(base_url=base_url, api_key="unused"))


def test_text(model):
    agent = Agent(model, model_settings={"max_tokens": 40})
    assert isinstance(agent.run_sync(PROMPT).output, str)

    async def run():
        async with agent.run_stream(PROMPT) as result:
            pieces = [piece async for piece in result.stream_text(delta=True)]
            return "".join(pieces), await result.get_output()
    text, output = asyncio.run(run())
    assert text == output


@pytest.mark.parametrize("mode", [None, ToolOutput, NativeOutput])
def test_structured(model, mode):
    output_type = City if mode is None else mode(City)
    agent = Agent(model, output_type=output_type, model_settings={"max_tokens": 300}, retries=3)
    if mode is NativeOutput and isinstance(model, AnthropicModel):
        pytest.skip("pydantic-ai allows it for models whose names it knows")
    assert isinstance(agent.run_sync(PROMPT).output, City)


def test_tools(model):
    """A whole round: the model calls the tool, and gets the result."""
    agent = Agent(model, tools=[weather], output_type=City, model_settings={"max_tokens": 300})
    run = agent.run_sync(PROMPT)
    assert isinstance(run.output, City)
    again = agent.run_sync("And then?", message_history=run.all_messages())
    assert isinstance(again.output, City)
