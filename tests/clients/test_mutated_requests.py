"""Requests of all forms with random changes: each gets an answer or a refusal, and the server lives."""

import copy
import http.client
import json
import random

import pytest

from conftest import ROOT, start_server, stop_server
from test_prompt_forms import agent_request
from test_request_fields import BODIES, VALUES

REQUESTS = 1500
JUNK = [None, True, False, 0, -1, 1.5, 1e300, 2**63, 2**64, 10**30, "", "x", "text", "é" * 50, [], {},
        [[]], [None], {"type": "x"}, {"type": "text", "text": "a"}, {"a": {"b": [1, {"c": None}]}}]
CHAT = {"messages": [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": None, "thinking": "w", "reasoning": "x", "tool_calls": [
        {"id": "c", "type": "function", "function": {
            "name": "f", "arguments": {"b": 10**30, "a": [1, {"x": 2}]}}}]},
    {"role": "tool", "tool_call_id": "c", "content": "1"}],
    "tools": [{"type": "function", "function": {"name": "f"}}], "max_tokens": 3,
    "chat_template_kwargs": {"enable_thinking": True, "z": {"b": 2**64, "a": 1}}, "logprobs": True,
    "prediction": {"type": "content", "content": [{"type": "text", "text": "abc"}]}}
RESPONSE = {"input": [
    {"role": "user", "content": "q"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "why"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"b": 1e5, "a": 1}'},
    {"type": "function_call_output", "call_id": "c", "output": "1"},
    {"type": "custom_tool_call", "call_id": "d", "name": "run", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": "1"}],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}},
              {"type": "custom", "name": "run", "format": {
                  "type": "grammar", "syntax": "regex", "definition": "a+"}}],
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "integer"}}},
    "reasoning": {"effort": "low"}, "context_management": [{"type": "compaction"}],
    "max_output_tokens": 4, "stream": True}


def places(value, path=()):
    """Returns the paths of all values inside `value`."""
    items = value.items() if isinstance(value, dict) else (
        enumerate(value) if isinstance(value, list) else [])
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def mutated(body, rng):
    body = copy.deepcopy(body)
    values = list(VALUES.values())
    for _ in range(rng.randint(1, 3)):
        paths = list(places(body))
        if not paths:
            break
        *way, last = rng.choice(paths)
        container = body
        for key in way:
            container = container[key]
        kind = rng.randrange(4)
        if kind == 0:
            del container[last]
        elif kind == 1 and isinstance(container, dict):
            name = rng.choice([*VALUES, "type", "content", "name", "arguments"])
            container[name] = copy.deepcopy(rng.choice(values + JUNK))
        elif kind == 1:
            container.insert(last, copy.deepcopy(rng.choice(container)))
        else:
            container[last] = copy.deepcopy(rng.choice(JUNK))
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        if isinstance(body.get(name), (int, float)) and body[name] > 30:
            body[name] = 5
    return body


@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_every_request_gets_an_answer(template):
    server = start_server("--chat-template", str(ROOT / f"tests/chat/templates/{template}.jinja"),
                          "--allow-request-chat-template", "--routing-records", "--routing-control",
                          "--request-timeout", "2", "--access-log", "off")
    rng = random.Random(template)
    bodies = [("/v1/messages", agent_request(server.name)), ("/v1/responses", RESPONSE),
              ("/v1/messages/count_tokens", agent_request(server.name)),
              ("/v1/responses/input_tokens", RESPONSE), ("/v1/chat/completions", CHAT),
              ("/tokenize", CHAT), *BODIES.items()]
    statuses = []
    try:
        for _ in range(REQUESTS // 2):
            path, body = rng.choice(bodies)
            body = mutated(body, rng)
            connection = http.client.HTTPConnection(server.http, timeout=60)
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            statuses.append(answer.status)
            text = answer.read()
            assert answer.status < 500 or answer.status == 504, (path, body, text)
            connection.close()
        assert statuses.count(200) > 50 and statuses.count(400) > 50
    finally:
        assert stop_server(server) == 0
