"""langchain and langgraph in their default modes, with OpenAI's and Anthropic's APIs."""

import pytest

pytest.importorskip("langchain")

from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

from shapes import PROMPT, City, weather


@pytest.fixture(params=["openai", "responses", "anthropic"])
def model(request, base_url, server):
    common = dict(model=server.name, api_key="unused", max_retries=0, max_tokens=300)
    if request.param == "anthropic":
        return ChatAnthropic(base_url=server.url, **common)
    return ChatOpenAI(base_url=base_url, use_responses_api=request.param == "responses", **common)


def test_text(model):
    assert model.invoke(PROMPT).text
    pieces = list(model.stream(PROMPT))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.text
    if not isinstance(model, ChatOpenAI) or model.use_responses_api:
        assert whole.usage_metadata["output_tokens"] > 0


def test_the_model_by_its_name(base_url, server):
    model = init_chat_model(f"openai:{server.name}", base_url=base_url, api_key="unused",
                            max_tokens=12)
    assert model.invoke(PROMPT).text
    model = init_chat_model(f"anthropic:{server.name}", base_url=server.url, api_key="unused",
                            max_tokens=12)
    assert model.invoke(PROMPT).text


def test_tools(model):
    bound = model.bind_tools([City], tool_choice="any")
    answer = bound.invoke(PROMPT)
    assert answer.tool_calls and not answer.invalid_tool_calls
    for call in answer.tool_calls:
        City.model_validate(call["args"])
    whole = None
    for piece in bound.stream(PROMPT):
        whole = piece if whole is None else whole + piece
    assert whole.tool_calls and not whole.invalid_tool_calls
    # The default lets the model choose.
    assert model.bind_tools([weather]).invoke(PROMPT).response_metadata


def test_structured(model):
    assert isinstance(model.with_structured_output(City).invoke(PROMPT), City)
    assert isinstance(model.with_structured_output(City.model_json_schema()).invoke(PROMPT), dict)
    *_, last = model.with_structured_output(City).stream(PROMPT)
    assert isinstance(last, City)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_methods(base_url, server, method):
    model = ChatOpenAI(model=server.name, base_url=base_url, api_key="unused", max_tokens=300)
    if method == "json_mode":
        assert isinstance(model.with_structured_output(None, method=method).invoke(PROMPT), dict)
        return
    assert isinstance(model.with_structured_output(City, method=method).invoke(PROMPT), City)


def test_agent(model):
    """A whole round: the model calls the tool, and the agent gives it the result."""
    agent = create_agent(model, tools=[weather], response_format=City)
    state = agent.invoke({"messages": [("user", PROMPT)]}, {"recursion_limit": 60})
    assert isinstance(state["structured_response"], City)
    agent = create_agent(model.bind(max_tokens=40), tools=[])
    assert agent.invoke({"messages": [("user", PROMPT)]})["messages"][-1].text
