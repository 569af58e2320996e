"""OpenAI's agents SDK in its default modes: the Responses API, and the model of chats."""

import asyncio

import pytest

agents = pytest.importorskip("agents")

import openai
from agents import (Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner,
                    function_tool, handoff)

from shapes import PROMPT, City, weather

agents.set_tracing_disabled(True)


@pytest.fixture(params=["responses", "chat"])
def model(request, base_url, server):
    client = openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0)
    make = OpenAIResponsesModel if request.param == "responses" else OpenAIChatCompletionsModel
    return make(model=server.name, openai_client=client)


async def run(agent, **fields):
    return await Runner.run(agent, PROMPT, **fields)


def test_text(model):
    agent = Agent(name="Teller", instructions="Tell stories.", model=model)

    async def both():
        result = Runner.run_streamed(agent, PROMPT)
        kinds = [event.type async for event in result.stream_events()]
        return (await run(agent)).final_output, kinds, result.final_output
    output, kinds, streamed = asyncio.run(both())
    assert output and streamed and "raw_response_event" in kinds


def test_structured(model):
    agent = Agent(name="Historian", model=model, output_type=City,
                  model_settings=ModelSettings(max_tokens=300))
    assert isinstance(asyncio.run(run(agent)).final_output, City)


def test_tools(model):
    """A whole round: the model must call the tool, then gets the result and answers."""
    calls = []

    @function_tool
    def observe(place: str, days: int) -> str:
        """Returns the weather of a place."""
        calls.append(place)
        return weather(place, days)

    agent = Agent(name="Watcher", model=model, tools=[observe],
                  model_settings=ModelSettings(max_tokens=300, tool_choice="required"))
    result = asyncio.run(run(agent))
    assert calls and result.final_output is not None
    assert len(result.to_input_list()) > 3


def test_handoffs(model):
    other = Agent(name="Other", model=model)
    agent = Agent(name="First", model=model, handoffs=[handoff(other)],
                  model_settings=ModelSettings(max_tokens=300, tool_choice="required"))
    result = asyncio.run(run(agent))
    assert result.last_agent.name == "Other" and result.final_output is not None


def test_by_environment(server, base_url, monkeypatch):
    """The default model provider, which reads the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    monkeypatch.setenv("OPENAI_BASE_URL", base_url)
    agent = Agent(name="Teller", model=server.name)
    assert asyncio.run(run(agent)).final_output
