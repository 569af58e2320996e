"""litellm in its default modes, with OpenAI's, Anthropic's and Ollama's APIs."""

import asyncio
import json

import pytest

litellm = pytest.importorskip("litellm")

from shapes import MESSAGES, PROMPT, City

TOOL = {"type": "function", "function": {"name": "city", "parameters": City.model_json_schema()}}


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def fields(request, base_url, server):
    return dict(model=f"{request.param}/{server.name}", messages=MESSAGES, max_tokens=300,
                api_base=server.url if request.param == "anthropic" else base_url,
                api_key="unused", num_retries=0)


def test_text(fields):
    assert litellm.completion(**fields).choices[0].message.content
    pieces = litellm.completion(**fields, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert asyncio.run(litellm.acompletion(**fields)).choices[0].message.content


def test_tools(fields):
    answer = litellm.completion(**fields, tools=[TOOL], tool_choice="required")
    calls = answer.choices[0].message.tool_calls
    for call in calls:
        City.model_validate(json.loads(call.function.arguments))
    chunks = list(litellm.completion(**fields, tools=[TOOL], tool_choice="required", stream=True))
    whole = litellm.stream_chunk_builder(chunks)
    for call in whole.choices[0].message.tool_calls:
        City.model_validate(json.loads(call.function.arguments))
    history = [*MESSAGES, answer.choices[0].message,
               *({"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls)]
    assert litellm.completion(**{**fields, "messages": history}, tools=[TOOL]).choices


def test_structured(fields):
    answer = litellm.completion(**fields, response_format=City)
    City.model_validate_json(answer.choices[0].message.content)


def test_responses(base_url, server):
    answer = litellm.responses(model=f"openai/{server.name}", input=PROMPT, max_output_tokens=12,
                               api_base=base_url, api_key="unused")
    assert answer.output[0].content[0].text
