"""What becomes of a request before it is a prompt, and the ends of the ranges of its fields."""

import json
import shutil
import time
import urllib.error
import urllib.request

import anthropic
import openai
import pytest

from conftest import ROOT, model, post, start_server, stop_server

QUESTION = [{"role": "user", "content": "In the beginning"}]
# Shows calls as tojson writes them, and reasoning.
SHOWS_CALLS = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}"
               "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
               "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
               "{% endfor %}{# tools #}")
INPUT = '{"zeta": 1, "mid": {"y": 123456789012345678901234567890, "b": 2}, "alpha": "last"}'


@pytest.fixture(scope="module")
def server():
    running = start_server("--chat-template", str(ROOT / "tests/chat/templates/chatml.jinja"),
                           "--allow-request-chat-template", "--draft-tokens", "6")
    yield running
    assert stop_server(running) == 0


def refusal(server, path, body):
    with pytest.raises(urllib.error.HTTPError) as error:
        post(server, path, body)
    return error.value.code, json.load(error.value)["error"]


def post_text(server, path, text):
    """Posts a body as it is written, with its order and its digits."""
    request = urllib.request.Request(server.url + path, text.encode(),
                                     {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))


def rendered(server, conversation):
    tokens = post_text(server, "/tokenize", conversation)["tokens"]
    return post(server, "/detokenize", {"tokens": tokens})["prompt"]


def test_all_interfaces_make_the_same_prompt_of_a_history(server):
    template = json.dumps(SHOWS_CALLS)
    tools = '"tools": [{"type": "function", "function": {"name": "f"}}]'
    chat = ('{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": null, '
            '"reasoning": "why", "tool_calls": [{"id": "c", "type": "function", "function": '
            '{"name": "f", "arguments": ARGUMENTS}}]}, {"role": "tool", "tool_call_id": "c", '
            '"content": "1"}], "chat_template": %s, %s}' % (template, tools))
    texts = {rendered(server, chat.replace("ARGUMENTS", arguments))
             for arguments in (json.dumps(INPUT), INPUT)}
    assert texts == {f"[user]q[assistant](why){INPUT}[tool]1"}
    count = post_text(server, "/tokenize", chat.replace("ARGUMENTS", INPUT))["count"]
    messages = ('{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": '
                '[{"type": "thinking", "thinking": "w", "signature": ""}, {"type": "thinking", '
                '"thinking": "hy", "signature": ""}, {"type": "redacted_thinking", "data": "x"}, '
                '{"type": "tool_use", "id": "c", "name": "f", "input": %s}]}, {"role": "user", '
                '"content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]}], '
                '"chat_template": %s, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}'
                % (INPUT, template))
    assert post_text(server, "/v1/messages/count_tokens", messages) == {"input_tokens": count}
    responses = json.dumps({"chat_template": SHOWS_CALLS, "input": [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "why"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": INPUT},
        {"type": "function_call_output", "call_id": "c", "output": "1"}],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]})
    assert post_text(server, "/v1/responses/input_tokens", responses) == {
        "object": "response.input_tokens", "input_tokens": count}


def test_ends_of_ranges(server):
    greedy = post(server, "/v1/completions", {"prompt": "The king", "temperature": 0})
    nucleus = post(server, "/v1/completions", {"prompt": "The king", "top_p": 0, "seed": 3})
    assert greedy["choices"] == nucleus["choices"]
    body = {"messages": QUESTION, "max_tokens": 2}
    assert post(server, "/v1/chat/completions", {**body, "top_logprobs": 0})["choices"][0][
        "logprobs"] is None
    assert refusal(server, "/v1/completions", {"prompt": "x", "top_p": -0.1})[1]["param"] == "top_p"


def test_the_empty_prompt_is_what_the_tokenizer_adds(server):
    for prompt in ("", ["", "x"]):
        added = post(server, "/tokenize", {"prompt": ""})["count"]
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
        if added:
            answer = post(server, "/v1/completions", body)
            assert answer["choices"][0]["text"]
        else:
            assert refusal(server, "/v1/completions", body)[1]["param"] == "prompt"


def test_a_default_of_zero_does_not_stop_the_start(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(model(), folder)
    (folder / "generation_config.json").write_text('{"top_p": 0.0}')
    monkeypatch.setenv("MOESERVE_MODEL", str(folder))
    running = start_server()
    try:
        texts = {post(running, "/v1/completions", {"prompt": "The king", "seed": seed})[
            "choices"][0]["text"] for seed in range(3)}
        assert len(texts) == 1, "the most probable tokens"
    finally:
        assert stop_server(running) == 0


def test_time_that_runs_out_cuts_the_answer():
    long = {"max_tokens": 1000, "ignore_eos": True, "temperature": 0}
    template = ("--chat-template", str(ROOT / "tests/chat/templates/chatml.jinja"))
    # The limit depends on how fast this machine is: far more than a token, far less than an answer.
    running = start_server("--request-timeout", "0", *template)
    try:
        begin = time.monotonic()
        whole = post(running, "/v1/completions", {"prompt": "The king", **long})
        limit = (time.monotonic() - begin) / 4
        assert "warnings" not in whole
        assert post_info(running)["limits"]["max_request_seconds"] == 0
    finally:
        assert stop_server(running) == 0
    running = start_server("--request-timeout", f"{limit:.3f}", *template)
    try:
        cut = post(running, "/v1/completions", {"prompt": ["The king", "And"], "n": 2, **long})
        assert len(cut["choices"]) == 4
        assert 0 < cut["usage"]["completion_tokens"] < 4000
        assert {choice["finish_reason"] for choice in cut["choices"]} == {"length"}
        assert any("--request-timeout" in warning for warning in cut["warnings"])
        assert whole["choices"][0]["text"].startswith(cut["choices"][0]["text"])
        message = post(running, "/v1/messages", {"messages": QUESTION, **long})
        assert message["stop_reason"] == "max_tokens" and message["content"][0]["text"]
        assert message["warnings"] and 0 < message["usage"]["output_tokens"] < 1000
        response = post(running, "/v1/responses", {"input": "The king", **long})
        assert response["status"] == "incomplete" and response["warnings"]
        for path, body in (("/v1/chat/completions", {"messages": QUESTION}),
                           ("/v1/messages", {"messages": QUESTION})):
            lines = stream(running, path, {**body, **long})
            assert sum("--request-timeout" in line for line in lines) == 1
            assert any("length" in line or "max_tokens" in line for line in lines)
    finally:
        assert stop_server(running) == 0


def stream(server, path, body):
    """Returns the lines of a streamed answer."""
    request = urllib.request.Request(server.url + path, json.dumps({**body, "stream": True}).encode(),
                                     {"Content-Type": "application/json"})
    return urllib.request.urlopen(request).read().decode().splitlines()


def post_info(server):
    return json.load(urllib.request.urlopen(server.url + "/server_info"))


@pytest.mark.parametrize("path, body", [
    ("/v1/completions", {"prompt": "The king"}),
    ("/v1/chat/completions", {"messages": QUESTION}),
    ("/v1/responses", {"input": "The king"}),
    ("/v1/messages", {"messages": QUESTION})])
def test_predictions_do_not_change_the_answer(server, path, body):
    def text(answer):
        if "choices" in answer:
            return answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"]
        if "output" in answer:
            return answer["output"][0]["content"][0]["text"]
        return answer["content"][0]["text"]
    body = {**body, "max_tokens": 40, "seed": 5, "cache_salt": path}
    plain = text(post(server, path, body))
    for prediction in (plain, [{"type": "text", "text": "Something else"}], "", "long " * 20_000):
        guessed = {**body, "prediction": {"type": "content", "content": prediction}}
        assert text(post(server, path, guessed)) == plain
    assert refusal(server, path, {**body, "prediction": "text"})[0] == 400


def test_hints_have_warnings(server):
    body = {"messages": QUESTION, "max_tokens": 2, "temperature": 0}
    plain = post(server, "/v1/chat/completions", body)
    assert "warnings" not in plain
    hinted = post(server, "/v1/chat/completions",
                  {**body, "verbosity": "low", "reasoning_effort": "high"})
    assert hinted["choices"] == plain["choices"] and len(hinted["warnings"]) == 2
    read = post(server, "/v1/chat/completions", {**body, "reasoning_effort": "high", "chat_template":
                "{{ messages[0].content }}{{ reasoning_effort }}"})
    assert "warnings" not in read


def test_an_unknown_model_is_told_which_there_are(server):
    status, error = refusal(server, "/v1/completions", {"model": "gpt-5", "prompt": "x"})
    assert status == 404 and server.name in error["message"]


def test_variables_of_the_template_need_no_flag():
    running = start_server("--chat-template", str(ROOT / "tests/chat/templates/chatml.jinja"))
    try:
        body = {"messages": QUESTION, "max_tokens": 2}
        assert post(running, "/v1/chat/completions", {**body, "chat_template_kwargs": {"a": 1}})
        assert refusal(running, "/v1/chat/completions", {**body, "chat_template": "x"})[1][
            "param"] == "chat_template"
    finally:
        assert stop_server(running) == 0


def agent_request(name):
    """Returns the body of a request as coding agents that speak the Messages API send it."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
              "properties": {"command": {"type": "string", "maxLength": 10}},
              "required": ["command"], "additionalProperties": False}
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    return {
        "model": name, "max_tokens": 24, "stream": True,
        "metadata": {"user_id": "user_abc_account__session_1"},
        "system": [{"type": "text", "text": "You are an agent."},
                   {"type": "text", "text": "Be brief.", **cached}],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "mcp_servers": [],
        "tools": [{"name": "Bash", "description": "Runs a command", "input_schema": schema,
                   "eager_input_streaming": True, **cached}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>"},
                                         {"type": "text", "text": "List the files", **cached}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "", "signature": "abc"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"},
                 "caller": {"type": "direct"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": False,
                 "content": [{"type": "text", "text": "a b"}], **cached},
                {"type": "text", "text": "And now?"}]},
            {"role": "system", "content": "The user has left."}]}


def test_requests_of_coding_agents(server):
    client = anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0)
    body = agent_request(server.name)
    body.pop("stream")
    with client.beta.messages.stream(
            betas=["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
            **{k: v for k, v in body.items()}) as stream:
        message = stream.get_final_message()
    assert message.stop_reason in ("max_tokens", "end_turn", "tool_use")
    answer = post(server, "/v1/messages?beta=true", {**agent_request(server.name), "stream": False})
    assert any("context_management" in warning for warning in answer["warnings"])
    count = {k: v for k, v in agent_request(server.name).items()
             if k in ("model", "messages", "system", "tools", "thinking")}
    assert post(server, "/v1/messages/count_tokens", count)["input_tokens"] == (
        answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"])


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_formats_of_messages_are_enforced(server, field):
    form = {"type": "json_schema", "schema": {
        "type": "object", "properties": {"zeta": {"type": "boolean"}, "alpha": {"type": "boolean"}},
        "required": ["zeta", "alpha"], "additionalProperties": False}}
    answer = post(server, "/v1/messages", {"messages": QUESTION, "max_tokens": 100, field:
                  {"format": form} if field == "output_config" else form})
    assert set(json.loads(answer["content"][0]["text"])) == {"zeta", "alpha"}
    error = refusal(server, "/v1/messages", {"messages": QUESTION, "max_tokens": 9, field: {
        "format": {"type": "grammar"}, "type": "grammar"}})[1]
    assert error["param"].startswith(field)


def test_custom_tools(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    tool = {"type": "custom", "name": "run", "description": "Runs code",
            "format": {"type": "grammar", "syntax": "regex", "definition": "(yes|no){1,3}"}}
    body = dict(model=server.name, tools=[tool], tool_choice={"type": "custom", "name": "run"},
                input="Run something", max_output_tokens=300, temperature=0)
    response = client.responses.create(**body)
    call = response.output[-1]
    assert call.type == "custom_tool_call" and call.name == "run"
    assert call.input and not call.input.replace("yes", "").replace("no", "")
    with client.responses.stream(**body) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output[-1].input == call.input
    assert "response.custom_tool_call_input.delta" in kinds
    assert "response.function_call_arguments.delta" not in kinds
    history = [{"role": "user", "content": "Run"}, call.model_dump(exclude_none=True),
               {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}]
    assert client.responses.create(model=server.name, input=history, tools=[tool],
                                   max_output_tokens=16).output
    assert client.responses.input_tokens.count(
        model=server.name, input=history, tools=[tool]).input_tokens > 10
    for wrong in ({"type": "grammar", "syntax": "lark", "definition": "start: X"}, {"type": "x"}):
        error = refusal(server, "/v1/responses", {"input": "x", "tools": [{**tool, "format": wrong}]})
        assert error[1]["param"] == "tools[0].format"


def test_reasons_of_refusals(server):
    for path, body, word in [
            ("/v1/responses", {"tools": [{"type": "web_search"}]}, "runs no tools"),
            ("/v1/responses", {"previous_response_id": "r"}, "keeps no responses"),
            ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "keeps no items"),
            ("/v1/messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]},
             "tools that Anthropic defines or runs"),
            ("/v1/messages", {"messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}]}]},
             "image"),
            ("/v1/chat/completions", {"stop_sequences": ["x"]}, "/v1/messages")]:
        base = {"input": "x"} if path == "/v1/responses" else {"messages": QUESTION, "max_tokens": 2}
        status, error = refusal(server, path, {**base, **body})
        assert status == 400 and word in error["message"], error
