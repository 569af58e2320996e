"""Whole conversations in the forms in which coding agents use the Messages API: many turns with calls
of tools and their results, streamed, with the headers and hints that agents send."""

import copy
import http.client
import json

import pytest

from conftest import ROOT, start_server, stop_server

TURNS = 3
SCHEMA = "https://json-schema.org/draft/2020-12/schema"
CACHED = {"cache_control": {"type": "ephemeral"}}


def tool(name, properties, **more):
    return {"name": name, "description": f"Runs {name}", "input_schema": {
        "$schema": SCHEMA, "type": "object", "properties": properties,
        "required": list(properties), "additionalProperties": False}, **more}


SHORT = {"type": "string", "maxLength": 8}
BASH = tool("Bash", {"command": SHORT, "timeout": {"type": "integer", "minimum": 0, "maximum": 9}})
READ = tool("Read", {"file_path": SHORT})
TODO_WRITE = tool("TodoWrite", {"todos": {"type": "array", "maxItems": 1, "items": {
    "type": "object", "properties": {"content": SHORT, "status": {
        "type": "string", "enum": ["pending", "completed"]}},
    "required": ["content", "status"], "additionalProperties": False}}})
MCP = tool("mcp__files__list-all", {"path": SHORT}, input_examples=[{"path": "/"}],
           defer_loading=False, allowed_callers=["direct"])
REMINDER = {"type": "text", "text": "<system-reminder>\nBe careful.\n</system-reminder>"}

# What each form sends besides messages; `results` makes the content of a result of a tool.
FORMS = {
    "plain": {"fields": {"tools": [BASH, READ]}, "results": lambda n: "a b c"},
    "blocks of a command line agent": {
        "headers": {"anthropic-version": "2023-06-01", "anthropic-beta":
                    "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
                    "x-app": "cli", "anthropic-dangerous-direct-browser-access": "true",
                    "User-Agent": "claude-cli/2.1.0 (external, cli)", "x-stainless-lang": "js"},
        "query": "?beta=true",
        "fields": {
            "system": [{"type": "text", "text": "You are an agent."},
                       {"type": "text", "text": "Be brief.", **CACHED}],
            "tools": [BASH, {**READ, "eager_input_streaming": True}, TODO_WRITE,
                      {**MCP, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
            "thinking": {"type": "adaptive", "display": "summarized"},
            "context_management": {"edits": [
                {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens",
                                                                 "value": 100_000}},
                {"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "metadata": {"user_id": "user_0_account__session_1"}, "mcp_servers": [],
            "fallbacks": [{"model": "other"}], "diagnostics": {"previous_message_id": None},
            "speed": "standard", "service_tier": "auto"},
        "user": [REMINDER, {"type": "text", "text": "List the files", **CACHED}],
        "results": lambda n: [{"type": "text", "text": f"file {n}"},
                              {"type": "text", "text": REMINDER["text"]}]},
    "manual thinking, errors of tools, custom types": {
        "headers": {"anthropic-version": "2023-06-01"},
        "fields": {"system": "You are an agent.", "temperature": 1, "top_k": 40,
                   "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
                   "tools": [{**BASH, "type": "custom", "strict": True}],
                   "stop_sequences": ["\n\nHuman:"],
                   "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        "results": lambda n: "Error: no such file", "is_error": True},
    "thinking between tools, a system message in the middle": {
        "fields": {"tools": [TODO_WRITE], "thinking": {"type": "between_tools"},
                   "cache_control": {"type": "ephemeral"}},
        "results": lambda n: [], "middle": {"role": "system", "content": [
            {"type": "text", "text": "The user has left.", **CACHED}]}},
    "a named tool": {
        "fields": {"tools": [READ, BASH], "tool_choice": {"type": "tool", "name": "Bash"}},
        "results": lambda n: None},
}


@pytest.fixture(scope="module", params=["chatml", "llama3", "qwen3-coder"])
def server(request):
    running = start_server(
        "--chat-template", str(ROOT / f"tests/chat/templates/{request.param}.jinja"))
    yield running
    assert stop_server(running) == 0


def send(server, form, body, path="/v1/messages"):
    """Returns (status, text)."""
    connection = http.client.HTTPConnection(server.http, timeout=120)
    connection.request("POST", path + form.get("query", ""), json.dumps(body),
                       {"Content-Type": "application/json", "X-Api-Key": "unused",
                        **form.get("headers", {})})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def streamed(text):
    """Returns (message, usage) of a stream, put together as clients do."""
    message, usage, partial, open_block = None, None, "", None
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        data = json.loads(data.removeprefix("data: "))
        assert name == f"event: {data['type']}" and data["type"] != "error", data
        if data["type"] == "message_start":
            message = data["message"]
        elif data["type"] == "content_block_start":
            assert open_block is None and data["index"] == len(message["content"])
            open_block, partial = copy.deepcopy(data["content_block"]), ""
        elif data["type"] == "content_block_delta":
            kind = data["delta"]["type"]
            if kind == "input_json_delta":
                partial += data["delta"]["partial_json"]
            else:
                field = kind.removesuffix("_delta")
                open_block[field] += data["delta"][field]
        elif data["type"] == "content_block_stop":
            if open_block["type"] == "tool_use":
                open_block["input"] = json.loads(partial or "{}")
            message["content"].append(open_block)
            open_block = None
        elif data["type"] == "message_delta":
            message.update(data["delta"])
            usage = data["usage"]
    assert open_block is None and text.rstrip().endswith('data: {"type":"message_stop"}')
    return message, usage


@pytest.mark.parametrize("kind", FORMS)
def test_conversation(server, kind):
    form = FORMS[kind]
    names = [entry["name"] for entry in form["fields"]["tools"]]
    choice = form["fields"].get("tool_choice", {"type": "any"})
    messages = [{"role": "user", "content": form.get("user", "List the files")}]
    counted = 0
    for turn in range(TURNS):
        body = {"model": server.name, "max_tokens": 400, "stream": True, **form["fields"],
                "tool_choice": choice, "messages": messages}
        status, text = send(server, form, body)
        assert status == 200, text
        message, usage = streamed(text)
        calls = [block for block in message["content"] if block["type"] == "tool_use"]
        assert calls and message["stop_reason"] == "tool_use", message
        assert all(call["name"] in names for call in calls)
        if choice["type"] == "tool" or choice.get("disable_parallel_tool_use"):
            assert len(calls) == 1
        for call in calls:
            schema = next(entry["input_schema"] for entry in form["fields"]["tools"]
                          if entry["name"] == call["name"])
            assert set(call["input"]) == set(schema["required"])
        assert len({call["id"] for call in calls}) == len(calls)
        # The counts agree, and grow with the conversation.
        count = {k: v for k, v in body.items() if k not in ("stream", "max_tokens")}
        status, text = send(server, form, count, "/v1/messages/count_tokens")
        assert status == 200, text
        tokens = json.loads(text)["input_tokens"]
        assert tokens == usage["input_tokens"] + usage["cache_read_input_tokens"] > counted
        counted = tokens
        # Agents send the answer back as they got it, with the marks of their cache.
        content = copy.deepcopy(message["content"])
        content[-1].update(CACHED)
        results = []
        for call in calls:
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": form["results"](turn)}
            results.append({k: v for k, v in {**result, "is_error": form.get("is_error")}.items()
                            if v is not None})
        messages = [*messages, {"role": "assistant", "content": content},
                    {"role": "user", "content": [*results, {"type": "text", "text": "Go on"}]}]
        if "middle" in form:
            messages.append(form["middle"])
    # The last turn is text, unary.
    body.update({"messages": messages, "stream": False, "max_tokens": 20})
    body["tool_choice"] = {"type": "none"}
    status, text = send(server, form, body)
    answer = json.loads(text)
    assert status == 200 and answer["stop_reason"] in ("max_tokens", "end_turn"), text
    assert all(block["type"] == "text" for block in answer["content"])


BASE = {"max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize("fields, param", [
    ({"thread": {"type": "create"}}, "thread"),
    ({"compaction": {"type": "enabled"}}, "compaction"),
    ({"container": "c"}, "container"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
    ({"tools": [{"type": "web_search_20260318", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"type": "computer_toolset_20260801"}]}, "tools[0].type"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
    ({"messages": [*BASE["messages"], {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]}]}, "messages"),
    ({"messages": [{"role": "system", "content": [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}]}]}, "messages")])
def test_refusals_name_the_field(server, fields, param):
    status, text = send(server, {}, {**BASE, **fields})
    error = json.loads(text)
    assert status == 400 and error["type"] == "error", text
    assert error["error"]["type"] == "invalid_request_error" and error["error"]["param"] == param
    # By this code, clients that prefer threads know that they can send the whole conversation.
    if param == "thread":
        assert error["error"]["details"]["error_code"] == "thread_unsupported_request"
    else:
        assert "details" not in error["error"]


def test_hints_have_warnings(server):
    plain = json.loads(send(server, {}, {**BASE, "temperature": 0})[1])
    assert "warnings" not in plain
    hinted = json.loads(send(server, {}, {**BASE, "temperature": 0, "speed": "fast"})[1])
    assert hinted["content"] == plain["content"] and "speed" in hinted["warnings"][0]


def test_models_have_the_members_of_both_apis(server):
    connection = http.client.HTTPConnection(server.http)
    connection.request("GET", "/v1/models?limit=1000", headers={
        "X-Api-Key": "unused", "anthropic-version": "2023-06-01"})
    listed = json.load(connection.getresponse())
    assert listed["has_more"] is False and listed["object"] == "list"
    assert listed["first_id"] == listed["last_id"] == server.name
    [card] = listed["data"]
    assert card["type"] == card["object"] == "model" and card["display_name"] == server.name
    assert card["created_at"].endswith("Z") and card["max_input_tokens"] == card["max_model_len"]
