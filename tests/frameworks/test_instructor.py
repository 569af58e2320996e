"""instructor in its default modes."""

from typing import Iterable

import pytest

instructor = pytest.importorskip("instructor")

import anthropic
import openai

from shapes import MESSAGES, City


@pytest.fixture(params=["openai", "responses", "anthropic"])
def client(request, base_url, server):
    if request.param == "anthropic":
        return instructor.from_anthropic(anthropic.Anthropic(base_url=server.url, api_key="unused"))
    raw = openai.OpenAI(base_url=base_url, api_key="unused")
    if request.param == "responses":
        return instructor.from_openai(raw, mode=instructor.Mode.RESPONSES_TOOLS)
    return instructor.from_openai(raw)


def test_object(client, server):
    fields = dict(model=server.name, messages=MESSAGES, max_tokens=300, max_retries=0)
    city = client.chat.completions.create(response_model=City, **fields)
    assert isinstance(city, City)
    city, raw = client.chat.completions.create_with_completion(response_model=City, **fields)
    assert isinstance(city, City) and raw.model == server.name


def test_streams(client, server):
    fields = dict(model=server.name, messages=MESSAGES, max_tokens=300, max_retries=0)
    *_, last = client.chat.completions.create_partial(response_model=City, **fields)
    assert City.model_validate(last.model_dump())


def test_by_name(base_url, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    monkeypatch.setenv("OPENAI_BASE_URL", base_url)
    client = instructor.from_provider(f"openai/{server.name}")
    assert isinstance(client.create(response_model=City, messages=MESSAGES, max_tokens=300,
                                    max_retries=0), City)
