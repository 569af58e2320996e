"""Tests the Messages API (Anthropic's form) with plain HTTP; tests/frameworks uses Anthropic's client."""

import http.client
import json
import urllib.error

import pytest

from conftest import ROOT, post, start_server, stop_server

USER = [{"role": "user", "content": "In the beginning"}]
WEATHER = {"name": "get_weather", "input_schema": {
    "type": "object", "required": ["place"], "additionalProperties": False,
    "properties": {"place": {"type": "string", "maxLength": 12}}}}
THINKS = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
          "{% if add_generation_prompt %}<think>\n{% endif %}")


@pytest.fixture(scope="module")
def server():
    running = start_server("--chat-template", str(ROOT / "tests/chat/templates/chatml.jinja"),
                           "--allow-request-chat-template")
    yield running
    assert stop_server(running) == 0


def events(server, body):
    """Returns the (event, data) pairs of a stream."""
    connection = http.client.HTTPConnection(server.http)
    connection.request("POST", "/v1/messages", json.dumps({**body, "stream": True}),
                       {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.getheader("Content-Type").startswith("text/event-stream")
    out = []
    for block in answer.read().decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        out.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in out)
    return out


def test_the_answer_is_that_of_a_chat(server):
    body = {"model": server.name, "max_tokens": 12, "temperature": 0, "system": "Tell stories."}
    answer = post(server, "/v1/messages", {**body, "messages": USER})
    chat = post(server, "/v1/chat/completions", {
        "max_tokens": 12, "temperature": 0,
        "messages": [{"role": "system", "content": "Tell stories."}] + USER})
    assert answer["type"] == "message" and answer["role"] == "assistant"
    assert answer["id"].startswith("msg_") and answer["model"] == server.name
    assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
    assert answer["stop_reason"] == {"length": "max_tokens", "stop": "end_turn"}[
        chat["choices"][0]["finish_reason"]]
    count = post(server, "/v1/messages/count_tokens",
                 {"model": server.name, "system": "Tell stories.", "messages": USER})
    assert count == {"input_tokens": chat["usage"]["prompt_tokens"]}


def test_blocks_become_messages(server):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "In the "},
                                     {"type": "text", "text": "beginning"}]},
        {"role": "assistant", "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "1", "name": "get_weather", "input": {"place": "x"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "And then"}]}]
    answer = post(server, "/v1/messages", {"max_tokens": 4, "temperature": 0, "messages": messages})
    chat = post(server, "/v1/chat/completions", {"max_tokens": 4, "temperature": 0, "messages": [
        {"role": "user", "content": "In the beginning"},
        {"role": "assistant", "content": "I look.", "tool_calls": [
            {"id": "1", "type": "function",
             "function": {"name": "get_weather", "arguments": "{\"place\": \"x\"}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "user", "content": "And then"}]})
    assert answer["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_the_last_message_of_the_assistant_is_continued(server):
    answer = post(server, "/v1/messages", {"max_tokens": 4, "temperature": 0, "messages": USER + [
        {"role": "assistant", "content": "God created"}]})
    chat = post(server, "/v1/chat/completions", {
        "max_tokens": 4, "temperature": 0, "add_generation_prompt": False,
        "continue_final_message": True,
        "messages": USER + [{"role": "assistant", "content": "God created"}]})
    assert answer["content"][0]["text"] == chat["choices"][0]["message"]["content"]


@pytest.mark.parametrize("fields", [
    {}, {"tools": [WEATHER], "tool_choice": {"type": "any"}},
    {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}},
    {"tools": [WEATHER]}, {"chat_template": THINKS}, {"stop_sequences": ["e"]}])
def test_streamed_events_join_to_the_unary_answer(server, fields):
    body = {"max_tokens": 100, "temperature": 1, "seed": 7, "messages": USER, **fields}
    unary = post(server, "/v1/messages", body)
    stream = events(server, body)
    assert [name for name, _ in stream[:1]] == ["message_start"]
    assert [name for name, _ in stream[-2:]] == ["message_delta", "message_stop"]
    blocks = []
    for name, data in stream[1:-2]:
        if name == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append(dict(data["content_block"]))
            blocks[-1].pop("id", None)
            partial = ""
        elif name == "content_block_delta":
            delta = data["delta"]
            if delta["type"] == "input_json_delta":
                partial += delta["partial_json"]
            else:
                key = {"text_delta": "text", "thinking_delta": "thinking"}[delta["type"]]
                blocks[-1][key] += delta[key]
        else:
            assert name == "content_block_stop"
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(partial)
    expected = [{k: v for k, v in block.items() if k != "id"} for block in unary["content"]]
    assert blocks == expected
    end = stream[-2][1]
    assert end["delta"]["stop_reason"] == unary["stop_reason"]
    assert end["delta"]["stop_sequence"] == unary["stop_sequence"]
    assert end["usage"]["output_tokens"] == unary["usage"]["output_tokens"]
    choice = fields.get("tool_choice")
    if choice:
        assert unary["stop_reason"] == "tool_use"
        assert all(set(block["input"]) == {"place"} for block in unary["content"])


@pytest.mark.parametrize("fields, param", [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"temperature": -1}, "temperature"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
])
def test_errors_have_the_form_of_the_api(server, fields, param):
    with pytest.raises(urllib.error.HTTPError) as error:
        post(server, "/v1/messages", {"max_tokens": 4, "messages": USER, **fields})
    assert error.value.code == 400
    body = json.load(error.value)
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param and body["error"]["message"]


def test_a_message_without_blocks_is_empty(server):
    def count(content):
        return post(server, "/v1/messages/count_tokens", {
            "messages": [{"role": "user", "content": content}]})
    assert count([]) == count("")


def test_a_budget_of_reasoning_has_no_effect_and_is_refused_with_strict_fields(server):
    body = {"max_tokens": 4, "messages": USER, "temperature": 0}
    budget = {**body, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert post(server, "/v1/messages", budget)["content"] == (
        post(server, "/v1/messages", body)["content"])
    strict = start_server("--strict-fields", "--chat-template",
                          str(ROOT / "tests/chat/templates/chatml.jinja"))
    try:
        with pytest.raises(urllib.error.HTTPError) as error:
            post(strict, "/v1/messages", budget)
        assert error.value.code == 400
        assert json.load(error.value)["error"]["param"] == "thinking.budget_tokens"
        post(strict, "/v1/messages", {**body, "thinking": {"type": "enabled"}})
    finally:
        assert stop_server(strict) == 0


def test_the_key_may_come_in_its_own_header(tmp_path):
    key = "k" * 40
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "one", "key": key, "scopes": ["generate"]}]}))
    file.chmod(0o600)
    server = start_server("--api-key-file", str(file),
                          "--chat-template", str(ROOT / "tests/chat/templates/chatml.jinja"))
    try:
        def status(headers):
            connection = http.client.HTTPConnection(server.http)
            connection.request("POST", "/v1/messages",
                               json.dumps({"max_tokens": 2, "messages": USER}),
                               {"Content-Type": "application/json", **headers})
            return connection.getresponse().status
        assert status({"X-Api-Key": key}) == 200
        assert status({"Authorization": f"Bearer {key}"}) == 200
        assert status({"X-Api-Key": "wrong"}) == 401
        assert status({}) == 401
        assert status({"X-Api-Key": key, "Authorization": f"Bearer {key}"}) == 400
    finally:
        assert stop_server(server) == 0
