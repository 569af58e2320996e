"""Tests the list, chat and generate routes of Ollama's API with plain HTTP; tests/frameworks uses
Ollama's client."""

import datetime
import http.client
import json
import urllib.error
import urllib.request

import pytest

from conftest import ROOT, model, post, start_server, stop_server
from scripted_model import ScriptedModel

USER = [{"role": "user", "content": "In the beginning"}]
GREEDY = {"temperature": 0, "num_predict": 12}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "required": ["place"], "additionalProperties": False,
    "properties": {"place": {"type": "string", "maxLength": 12}}}}}
TEMPLATE = str(ROOT / "tests/chat/templates/chatml.jinja")
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def server():
    running = start_server("--chat-template", TEMPLATE)
    yield running
    assert stop_server(running) == 0


@pytest.fixture(scope="module")
def plain():
    """A model without a chat template."""
    running = start_server()
    yield running
    assert stop_server(running) == 0


def get(server, path):
    return json.load(urllib.request.urlopen(server.url + path))


def lines(server, path, body):
    """Returns the objects of a stream. Sends the body as curl does: not declared as JSON."""
    connection = http.client.HTTPConnection(server.http)
    connection.request("POST", path, json.dumps(body),
                       {"Content-Type": "application/x-www-form-urlencoded"})
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status == 200, text
    assert answer.getheader("Content-Type") == "application/x-ndjson" and text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def refusal(server, path, body, method="POST"):
    with pytest.raises(urllib.error.HTTPError) as error:
        request = urllib.request.Request(server.url + path, json.dumps(body).encode(),
                                         {"Content-Type": "application/json"}, method=method)
        urllib.request.urlopen(request)
    answer = json.load(error.value)
    assert set(answer) == {"error"} and isinstance(answer["error"], str)
    return error.value.code, answer["error"]


def is_time(text):
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).year >= 2024


def test_the_models_are_listed(server):
    assert get(server, "/api/version")["version"]
    [tag] = get(server, "/api/tags")["models"]
    assert tag["name"] == tag["model"] == f"{server.name}:latest" and is_time(tag["modified_at"])
    assert tag["size"] > 0 and len(tag["digest"]) == 64 and tag["details"]["family"] == "moe"
    [running] = get(server, "/api/ps")["models"]
    assert running["name"] == tag["name"] and is_time(running["expires_at"])
    shown = post(server, "/api/show", {"model": tag["name"]})
    assert shown == post(server, "/api/show", {"name": server.name, "verbose": True})
    assert shown["capabilities"] == ["completion", "tools"] and "<|im_start|>" in shown["template"]
    family = shown["model_info"]["general.architecture"]
    config = json.loads((model() / "config.json").read_text())
    assert shown["model_info"][f"{family}.embedding_length"] == config["hidden_size"]
    assert shown["model_info"][f"{family}.context_length"] == running["context_length"]
    assert refusal(server, "/api/show", {"model": "other"})[0] == 404


def test_a_chat_is_that_of_the_other_interfaces(server):
    body = {"model": f"{server.name}:latest", "messages": USER, "options": GREEDY}
    answer = post(server, "/api/chat", {**body, "stream": False})
    chat = post(server, "/v1/chat/completions", {"messages": USER, "max_tokens": 12, "temperature": 0})
    assert answer["message"] == {"role": "assistant",
                                 "content": chat["choices"][0]["message"]["content"]}
    assert answer["model"] == body["model"] and is_time(answer["created_at"])
    assert answer["done"] is True and answer["done_reason"] == "length"
    assert answer["prompt_eval_count"] == chat["usage"]["prompt_tokens"]
    assert answer["eval_count"] == chat["usage"]["completion_tokens"] == 12
    assert all(type(answer[name]) is int and answer[name] >= 0 for name in DURATIONS)
    assert answer["total_duration"] >= answer["prompt_eval_duration"] + answer["eval_duration"] > 0


@pytest.mark.parametrize("path, body", [("/api/chat", {"messages": USER}),
                                        ("/api/generate", {"prompt": "In the beginning"}),
                                        ("/api/generate", {"prompt": "In the", "raw": True})])
def test_streams_are_the_default(server, path, body):
    def text(part):
        return part["message"]["content"] if path == "/api/chat" else part["response"]
    whole = post(server, path, {**body, "options": GREEDY, "stream": False})
    *parts, last = lines(server, path, {**body, "options": GREEDY})
    assert len(parts) > 2 and "".join(text(part) for part in parts) == text(whole)
    assert not any(part["done"] or "eval_count" in part for part in parts)
    assert last["done"] and text(last) == "" and last["eval_count"] == whole["eval_count"]
    assert last.keys() == whole.keys()


def test_prompts_are_conversations_unless_they_are_raw(server, plain):
    answer = post(server, "/api/generate", {"prompt": "Why?", "system": "Be brief", "stream": False,
                                            "options": GREEDY})
    chat = post(server, "/v1/chat/completions", {
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Why?"}],
        "max_tokens": 12, "temperature": 0})
    assert answer["response"] == chat["choices"][0]["message"]["content"]
    completion = post(server, "/v1/completions", {"prompt": "Why?", "max_tokens": 12,
                                                  "temperature": 0})
    for where, fields in ((server, {"raw": True}), (plain, {})):
        answer = post(where, "/api/generate", {"prompt": "Why?", **fields, "stream": False,
                                               "options": GREEDY})
        assert answer["response"] == completion["choices"][0]["text"]
        assert answer["prompt_eval_count"] == completion["usage"]["prompt_tokens"]
    for where, fields in ((server, {"raw": True}), (plain, {})):
        assert "'system'" in refusal(where, "/api/generate", {
            "prompt": "Why?", "system": "Be brief", **fields})[1]
    assert "chat template" in refusal(plain, "/api/chat", {"messages": USER})[1]


def test_no_limit_means_the_whole_context(tmp_path):
    """The default length is not that of completions, which is 16 tokens."""
    ScriptedModel(tmp_path, {position: "ab" for position in range(40)}, 64, None)
    server = start_server(folder=tmp_path)
    try:
        for options in ({}, {"num_predict": -1}, {"num_predict": -2}):
            answer = post(server, "/api/generate", {"prompt": "x", "stream": False,
                                                    "options": options})
            assert answer["eval_count"] > 16 and answer["done_reason"] == "stop"
    finally:
        assert stop_server(server) == 0


def test_formats(server):
    schema = {"type": "object", "additionalProperties": False, "required": ["zeta", "alpha"],
              "properties": {"zeta": {"type": "boolean"}, "alpha": {"type": "boolean"}}}
    for path, body in (("/api/chat", {"messages": USER}), ("/api/generate", {"prompt": "x"}),
                       ("/api/generate", {"prompt": "x", "raw": True})):
        answer = post(server, path, {**body, "stream": False, "format": schema})
        text = answer["message"]["content"] if path == "/api/chat" else answer["response"]
        assert list(json.loads(text)) == ["zeta", "alpha"] and answer["done_reason"] == "stop"
        text = "".join(part.get("response") or part.get("message", {}).get("content", "")
                       for part in lines(server, path, {**body, "format": schema}))
        assert list(json.loads(text)) == ["zeta", "alpha"]
        assert "'format'" in refusal(server, path, {**body, "format": "xml"})[1]
    answer = post(server, "/api/chat", {"messages": USER, "format": "json", "stream": False,
                                        "options": {"num_predict": 300, "seed": 3}})
    assert answer["message"]["content"].startswith("{")


def test_a_round_with_a_tool(server):
    force = {"messages": USER, "tools": [WEATHER], "stream": False, "options": {"num_predict": 200}}
    # Whether a model calls a tool is its own decision, so a scripted one decides below.
    assert post(server, "/api/chat", force)["done"]
    history = [*USER, {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "get_weather", "arguments": {"place": "Rome", "days": 2}}},
        {"function": {"name": "get_weather", "arguments": {"place": "Oslo"}}}]},
        {"role": "tool", "content": "rain", "tool_name": "get_weather"},
        {"role": "tool", "content": "snow"}]
    chat = [*USER, {"role": "assistant", "content": "", "tool_calls": [
        {"id": f"call_{i}", "type": "function", "function": {"name": "get_weather", "arguments": text}}
        for i, text in enumerate(('{"place": "Rome", "days": 2}', '{"place": "Oslo"}'))]},
        {"role": "tool", "content": "rain", "tool_call_id": "call_0", "name": "get_weather"},
        {"role": "tool", "content": "snow", "tool_call_id": "call_1"}]
    answer = post(server, "/api/chat", {"messages": history, "tools": [WEATHER], "stream": False,
                                        "options": {"num_predict": 1}})
    same = post(server, "/v1/chat/completions", {"messages": chat, "tools": [WEATHER],
                                                 "max_tokens": 1})
    assert answer["prompt_eval_count"] == same["usage"]["prompt_tokens"]


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """A model whose answer to "q" is a thought and a call of a tool, then the end."""
    folder = tmp_path_factory.mktemp("speaking")
    template = ("{% for m in messages %}{{ m.content }}{% endfor %}"
                "{% if tools and false %}{{ tools }}<think><tool_call>{% endif %}")
    text = "<think>hm</think>" + CALL
    # The prompt is one token, the letter q.
    ScriptedModel(folder, dict(enumerate(text)), 160, template)
    running = start_server(folder=folder)
    yield running
    assert stop_server(running) == 0


def test_thinking_and_calls(speaking):
    body = {"messages": [{"role": "user", "content": "q"}], "options": {"temperature": 0}}
    answer = post(speaking, "/api/chat", {**body, "stream": False})
    assert answer["message"]["thinking"] == "hm"
    assert answer["message"]["content"] == CALL
    without = post(speaking, "/api/chat", {**body, "stream": False, "think": False})
    assert without["message"] == {"role": "assistant", "content": CALL}
    tools = {**body, "tools": [WEATHER]}
    whole = post(speaking, "/api/chat", {**tools, "stream": False})
    parts = lines(speaking, "/api/chat", tools)
    calls = [call for part in parts for call in part["message"].get("tool_calls", [])]
    for got in (whole["message"]["tool_calls"], calls):
        [call] = got
        assert call["id"] and call["function"] == {"index": 0, "name": "get_weather",
                                                   "arguments": {"place": "Rome"}}
    assert "".join(part["message"].get("thinking", "") for part in parts) == "hm"
    assert whole["message"]["thinking"] == "hm" and whole["message"]["content"] == ""
    assert whole["done_reason"] == parts[-1]["done_reason"] == "stop"


def test_log_probabilities(server):
    body = {"messages": USER, "options": GREEDY, "logprobs": True, "top_logprobs": 2}
    whole = post(server, "/api/chat", {**body, "stream": False})
    assert len(whole["logprobs"]) == 12 and all(len(entry["top_logprobs"]) == 2
                                                for entry in whole["logprobs"])
    parts = lines(server, "/api/chat", body)
    assert [entry for part in parts for entry in part.get("logprobs", [])] == whole["logprobs"]
    raw = post(server, "/api/generate", {"prompt": "x", "raw": True, "stream": False,
                                         "options": GREEDY, "logprobs": True})
    assert len(raw["logprobs"]) == 12


def test_requests_without_a_prompt_only_load(server):
    for path, body in (("/api/chat", {}), ("/api/chat", {"messages": []}), ("/api/generate", {}),
                       ("/api/generate", {"prompt": "", "keep_alive": 0})):
        answer = post(server, path, {"model": server.name, **body})
        assert answer["done"] and answer["done_reason"] == "load" and "eval_count" not in answer


@pytest.mark.parametrize("options, changes", [
    ({"seed": 1}, {"seed": 1}), ({"top_k": 1}, {"top_k": 1}), ({"top_p": 0.1}, {"top_p": 0.1}),
    ({"min_p": 0.5}, {"min_p": 0.5}), ({"stop": ["e"]}, {"stop": ["e"]}),
    ({"repeat_penalty": 1.9}, {"repetition_penalty": 1.9}),
    ({"presence_penalty": 2}, {"presence_penalty": 2}),
    ({"frequency_penalty": 2}, {"frequency_penalty": 2}),
    ({"num_predict": 5}, {"max_tokens": 5}), ({"temperature": 0.2}, {"temperature": 0.2})])
def test_options_are_obeyed(server, options, changes):
    base = {"seed": 7, "temperature": 1}
    answer = post(server, "/api/chat", {"messages": USER, "stream": False, "options": {
        "num_predict": 24, **base, **options}})
    chat = post(server, "/v1/chat/completions", {"messages": USER, "max_tokens": 24, **base,
                                                 **changes})
    assert answer["message"]["content"] == chat["choices"][0]["message"]["content"]


def test_other_options_are_refused_or_have_a_warning(server):
    def send(options):
        return post(server, "/api/chat", {"messages": USER, "stream": False,
                                          "options": {**GREEDY, **options}})
    plain = send({})
    assert "warnings" not in plain
    for options in ({"num_gpu": 1, "num_thread": 4, "use_mmap": True}, {"mirostat": 0, "tfs_z": 1},
                    {"seed": -1}, {"colour": "red"}, {"num_ctx": None}):
        answer = send(options)
        assert answer["message"] == plain["message"] and "warnings" not in answer
    for name in ("num_ctx", "repeat_last_n", "penalize_newline"):
        answer = send({name: 1})
        assert answer["message"] == plain["message"] and name in answer["warnings"][0]
    for options, name in (({"mirostat": 2}, "mirostat"), ({"tfs_z": 0.5}, "tfs_z"),
                          ({"typical_p": 0.5}, "typical_p"), ({"num_predict": 0}, "num_predict"),
                          ({"num_predict": 1.5}, "num_predict"), ({"temperature": "x"}, "temperature"),
                          ({"repeat_penalty": 0}, "repetition_penalty"), ({"stop": [""]}, "stop"),
                          ({"repeat_penalty": 1, "repetition_penalty": 1}, "repeat_penalty"),
                          ({"top_p": 7}, "top_p"), ({"rope_frequency_base": 5}, "rope")):
        code, message = refusal(server, "/api/chat", {"messages": USER, "options": options})
        assert code == 400 and name in message
    assert refusal(server, "/api/chat", {"messages": USER, "options": []})[0] == 400


@pytest.mark.parametrize("path, body, word", [
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
    ("/api/generate", {"prompt": "x", "images": ["aGk="]}, "images"),
    ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
    ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
    ("/api/generate", {"prompt": "x", "context": [1, 2]}, "context"),
    ("/api/generate", {"prompt": "x", "raw": True, "think": True}, "think"),
    ("/api/generate", {"prompt": "x", "raw": "yes"}, "raw"),
    ("/api/generate", {"prompt": 3}, "prompt"),
    ("/api/chat", {"messages": "x"}, "messages"), ("/api/chat", {"messages": [3]}, "messages[0]"),
    ("/api/chat", {"messages": USER, "think": "loud"}, "think"),
    ("/api/chat", {"messages": USER, "stream": "no"}, "stream"),
    ("/api/chat", {"messages": USER, "tools": 3}, "tools"),
    ("/api/chat", {"messages": USER, "temperature": 0}, "temperature"),
    ("/api/chat", {"messages": USER, "top_logprobs": 2}, "top_logprobs")])
def test_what_cannot_be_obeyed_is_refused_by_name(server, path, body, word):
    code, message = refusal(server, path, body)
    assert code == 400 and word in message


def test_what_the_server_does_not_have(server):
    assert "embeddings" in refusal(server, "/api/embed", {"model": server.name, "input": "x"})[1]
    for path in ("/api/embed", "/api/embeddings", "/api/pull", "/api/push", "/api/create",
                 "/api/copy", "/api/blobs/sha256:0"):
        assert refusal(server, path, {"model": server.name})[0] == 501
    assert refusal(server, "/api/delete", {"model": server.name}, "DELETE")[0] == 501
    assert refusal(server, "/api/other", {})[0] == 404
    assert refusal(server, "/api/chat", {"model": "other", "messages": USER})[0] == 404


def test_keys_count_here_too(tmp_path):
    key = "k" * 40
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "one", "key": key, "scopes": ["generate"]}]}))
    file.chmod(0o600)
    server = start_server("--api-key-file", str(file), "--chat-template", TEMPLATE)
    try:
        def status(method, path, body=None, **headers):
            connection = http.client.HTTPConnection(server.http)
            connection.request(method, path, body and json.dumps(body), headers)
            return connection.getresponse().status
        chat = {"messages": USER, "stream": False, "options": GREEDY}
        for method, path, body in (("GET", "/api/tags", None), ("POST", "/api/chat", chat),
                                   ("POST", "/api/show", {"model": server.name}),
                                   ("GET", "/api/ps", None)):
            assert status(method, path, body, Authorization=f"Bearer {key}") == 200
            assert status(method, path, body) == 401
        # A web page may not send what a browser does not ask about.
        assert status("POST", "/api/chat", chat, Authorization=f"Bearer {key}",
                      Origin=server.url) == 415
    finally:
        assert stop_server(server) == 0
