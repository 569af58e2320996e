"""Sends every request field that the server knows to every route. Each is obeyed, refused by name,
or cannot change the answer; the table at /openapi.json says which."""

import json
import re
import urllib.error
import urllib.request

import pytest

from conftest import ROOT, post, start_server, stop_server

CHAT = [{"role": "user", "content": "In the beginning"}]
SAMPLED = {"temperature": 1, "seed": 7}
BODIES = {
    "/v1/completions": {"prompt": "In the beginning", "max_tokens": 24, **SAMPLED},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 24, **SAMPLED},
    "/v1/responses": {"input": "In the beginning", "max_output_tokens": 24, **SAMPLED},
    "/v1/messages": {"messages": CHAT, "max_tokens": 24, **SAMPLED},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/tokenize": {"messages": CHAT},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/api/chat": {"messages": CHAT, "stream": False, "options": {"num_predict": 24, **SAMPLED}},
    "/api/generate": {"prompt": "In the beginning", "stream": False,
                      "options": {"num_predict": 24, **SAMPLED}},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
# For each field a value, and what else the body needs. Fields without a line have a value that
# every route refuses or ignores: the text "x".
VALUES = {
    "model": "test-model", "prompt": "The king", "decoder_prompt": "a", "forced_bos_token_id": 5, "target_language": "fr",
    "messages": [{"role": "user", "content": "Why"}],
    "input": "Why", "instructions": "Be brief", "system": "Be brief", "tokens": [4, 5],
    "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False,
    "chat_template": "{{ messages[0].content }}", "chat_template_kwargs": {"a": 1},
    "add_generation_prompt": False, "continue_final_message": True, "add_special_tokens": True,
    "truncate_prompt_tokens": 2, "reasoning_effort": "low", "reasoning": {"effort": "low"},
    "thinking": {"type": "enabled", "budget_tokens": 1024}, "stop_sequences": ["e"],
    "n": 2, "best_of": 9, "max_tokens": 3, "max_completion_tokens": 3, "max_output_tokens": 3,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["yes", "no"]}, "guided_json": {"type": "integer"},
    "guided_regex": "[xyz]{3}", "guided_choice": ["yes", "no"], "guided_grammar": 'root ::= "yes"',
    "text": {"format": {"type": "json_object"}}, "verbosity": "low",
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "integer"}}},
    "output_format": {"type": "json_schema", "schema": {"type": "integer"}},
    "prediction": {"type": "content", "content": "God created the heaven and the earth"},
    "stream": True, "stream_options": {"include_usage": True}, "echo": True, "logprobs": 2,
    "top_logprobs": 2, "prompt_logprobs": 2, "include": ["message.output_text.logprobs"],
    "include_reasoning": False, "return_token_ids": True, "return_tokens_as_token_ids": True,
    "return_token_strs": True, "return_routing": True, "return_routed_experts": True,
    "return_word_experts": ["the"],
    "routing_control": {"top_k": 1}, "priority": 3, "cache_salt": "s", "request_id": "r1",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "truncation": "auto", "metadata": {"a": "b"}, "store": True, "background": True,
    "temperature": 0, "top_p": 0, "min_p": 1, "top_k": 1, "seed": 8, "stop": ["e"],
    "presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.9, "min_tokens": 20,
    "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False,
    "stop_token_ids": [40, 41], "logit_bias": {"40": 100}, "bad_words": ["e", "a"],
    "allowed_token_ids": [40, 41], "mcp_servers": [{"type": "url"}], "max_tool_calls": 1,
    "functions": TOOLS, "documents": [{"a": "b"}], "use_beam_search": True, "samplers": ["top_k"],
    "modalities": ["text", "audio"], "length_penalty": 0.5, "num_beams": 3,
    "early_stopping": True, "no_repeat_ngram_size": 1, "return_hidden_states": True,
    "spaces_between_special_tokens": False, "no_stop_trim": True, "repeat_penalty": 1.5,
    "typical_p": 0.5, "tfs_z": 0.5, "mirostat": 1, "top_a": 0.5, "dynatemp_range": 0.5,
    "xtc_probability": 0.5, "dry_multiplier": 0.5, "input_ids": [1, 2],
    "options": {"num_predict": 3, "temperature": 0}, "format": "json", "think": "low", "raw": True,
    "context": [1, 2], "images": ["aGk="], "truncate": True, "shift": True, "speed": "fast",
    "thread": {"type": "create"},
}
# What a value needs beside it, on all routes that obey it or on one of them.
BEAMS = {"use_beam_search": True, "seed": None}
NEEDS = {
    "tool_choice": {"tools": TOOLS}, "include_stop_str_in_output": {"stop": ["e"]},
    "top_logprobs": {"logprobs": True}, "stream_options": {"stream": True},
    "min_tokens": {"stop": ["e"]}, "stop_token_ids": {"allowed_token_ids": [40, 41]}, "continue_final_message": {"add_generation_prompt": False},
    "return_tokens_as_token_ids": {"logprobs": 1},
    "use_beam_search": {"seed": None}, "length_penalty": BEAMS, "num_beams": BEAMS,
    "early_stopping": BEAMS,
}
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Obeyed fields whose effect the answer does not show: those that change nothing by design, and
# those that matter only for other conversations, tokenizers or moments.
INVISIBLE = {"model", "prediction", "priority", "cache_salt", "parallel_tool_calls",
             "chat_template_kwargs", "add_special_tokens", "reasoning_effort", "reasoning",
             "thinking", "include_reasoning", "ignore_eos", "skip_special_tokens", "tool_choice",
             "context_management", "truncation", "stream_options", "request_id", "think",
             "num_beams", "early_stopping"}
# Values that are wrong for every route that obeys the field, where a list of a list is not.
WRONG = {"context_management": 5}


@pytest.fixture(scope="module")
def server():
    running = start_server("--chat-template", str(ROOT / "tests/chat/templates/chatml.jinja"),
                           "--allow-request-chat-template", "--routing-records",
                           "--routing-control")
    yield running
    assert stop_server(running) == 0


@pytest.fixture(scope="module")
def table(server):
    with urllib.request.urlopen(f"{server.url}/openapi.json") as answer:
        return json.load(answer)["x-request-fields"]


def send(server, route, body):
    """Returns (status, parsed answer or text of the stream)."""
    try:
        request = urllib.request.Request(server.url + route, json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
            is_json = answer.headers["Content-Type"].startswith("application/json")
            return 200, json.loads(text) if is_json else text
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def shown(answer):
    """Returns the answer without what differs between equal requests."""
    if isinstance(answer, str):
        return answer[:20]
    answer = {k: v for k, v in answer.items()
              if k not in ("id", "created", "created_at", "usage", "warnings", "metadata", "store",
                           "user", "service_tier", "completed_at")
              and not k.endswith("_duration")}
    for item in answer.get("output", []):
        item.pop("id")
    return answer


def value_of(field, route):
    """Returns (value, further fields) for a route."""
    value, more = VALUES.get(field, "x"), dict(NEEDS.get(field, {}))
    if route == "/v1/completions":
        more.pop("add_generation_prompt", None)
    if field == "logprobs" and route != "/v1/completions":
        value = True
    if field == "options" and not route.startswith("/api/"):
        value = "x"
    if field == "return_tokens_as_token_ids" and route != "/v1/completions":
        more = {"include": ["message.output_text.logprobs"]} if route == "/v1/responses" else {
            "logprobs": True}
    if field == "top_logprobs" and route == "/v1/responses":
        more = {}
    if field in ("tools", "tool_choice"):
        if route.startswith("/v1/messages"):
            tools = [{"name": "f", "input_schema": {"type": "object"}}]
            value, more = (tools, {}) if field == "tools" else ({"type": "auto"}, {"tools": tools})
        if route == "/v1/responses":
            tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
            value, more = (tools, {}) if field == "tools" else (value, {"tools": tools})
    if field == "context_management" and route == "/v1/responses":
        value = [{"type": "compaction"}]
    if field == "continue_final_message" and route in BODIES and "messages" in BODIES[route]:
        more["messages"] = CHAT + [{"role": "assistant", "content": "God"}]
    return value, more


def body_of(field, route):
    body = dict(BODIES[route])
    if field in LENGTHS:
        body = {k: v for k, v in body.items() if k not in LENGTHS}
    if route == "/tokenize" and field == "prompt":
        body = {}
    if field in ("add_generation_prompt", "chat_template") and route == "/v1/messages":
        body["messages"] = CHAT
    return body


def names(error, field):
    return re.search(rf"""['"]{field}(['"\\[.]|$)""", json.dumps(error)) is not None


def check(server, route, field, use):
    value, more = value_of(field, route)
    body = body_of(field, route)
    status, answer = send(server, route, {**body, **({} if use == "refused" else more), field: value})
    if use == "refused":
        assert 400 <= status < 500 and names(answer, field), answer
        return
    if use in ("no effect", "hint"):
        assert status == 200, answer
        assert shown(answer) == shown(send(server, route, {**body, **more})[1])
        assert use == "no effect" or names(answer["warnings"], field) or field in str(
            answer["warnings"])
        return
    wrong, error = send(server, route, {**body, **more, field: WRONG.get(field, [[]])})
    assert 400 <= wrong < 500 and names(error, field), (wrong, error)
    assert status == 200 or names(answer, field), answer
    if field in LENGTHS:
        usage = answer["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == 3, usage
    elif status == 200 and field not in INVISIBLE:
        without = send(server, route, {**body, **more})[1]
        if without.get("error"):  # the field is required
            return
        assert shown(answer) != shown(without), answer


@pytest.mark.parametrize("route", BODIES)
def test_every_field_is_obeyed_or_refused(server, table, route):
    assert len(table) > 100
    faults = []
    for field, uses in table.items():
        try:
            check(server, route, field, uses[route])
        except Exception as error:  # collects all faults of a route
            faults.append(f"{field} ({uses[route]}): {error!r:.400}")
    assert not faults, "\n".join(faults)


def test_open_inference_reads_the_fields_of_completions(server, table):
    """Its parameters are fields of completions, or refused because no tensor shows their effect."""
    route = f"/v2/models/{server.name}/generate"
    base = {"text_input": "In the beginning", "parameters": {"max_tokens": 8}}
    for field, uses in table.items():
        if uses["/v1/completions"] != "refused":
            continue
        body = {**base, "parameters": {"max_tokens": 8, field: value_of(field, route)[0]}}
        status, answer = send(server, route, body)
        assert status == 400 and field in answer["error"], (field, answer)


def test_unknown_fields_are_ignored_and_counted(server):
    def ignored():
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines
                   if "ignored_fields" in line and not line.startswith("#"))
    before = ignored()
    for route, body in BODIES.items():
        post(server, route, {**body, "colour": "red"})
    assert ignored() == before + len(BODIES)
