"""Tests chats with the official OpenAI client, with a template from --chat-template."""

import json
import shutil
import subprocess
import sys
import time
import urllib.error

import openai
import pytest

from conftest import ROOT, binary, model, post, start_server, stop_server

sys.path.insert(0, str(ROOT / "tests/chat"))
from reference_environment import Reference  # noqa: E402

TEMPLATE = ROOT / "tests/chat/templates/chatml.jinja"
MESSAGES = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Tell me of the beginning.\nIn the beginning"},
]


@pytest.fixture(scope="module")
def server():
    running = start_server("--chat-template", str(TEMPLATE), "--allow-request-chat-template")
    yield running
    assert stop_server(running) == 0


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_marks_in_messages_cost_nothing(server):
    marks = "".join(f"\ufdd0{i}\ufdd1" for i in range(80_000))
    body = {"messages": [{"role": "user", "content": "In"}] * 2
            + [{"role": "assistant", "content": marks[:900_000]}],
            "add_generation_prompt": False, "continue_final_message": True, "max_tokens": 1}
    begin = time.monotonic()
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server, "/v1/chat/completions", body)
    assert refused.value.code == 400 and time.monotonic() - begin < 20


def test_many_members_cost_little(server):
    arguments = json.dumps({f"a{i}": 0 for i in range(60_000)})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    tools = [{"type": "function", "function": {
        "name": "f", "parameters": {f"a{i}": 0 for i in range(18_000)}}}]
    user = {"role": "user", "content": "In"}
    for body in ({"messages": [user, {"role": "assistant", "tool_calls": [call]},
                               {"role": "tool", "tool_call_id": "1", "content": "x"}]},
                 {"messages": [user], "tools": tools, "tool_choice": "none"}):
        begin = time.monotonic()
        try:
            post(server, "/v1/chat/completions", {**body, "max_tokens": 1})
        except urllib.error.HTTPError as error:  # the prompt may be too long
            assert error.code == 400
        assert time.monotonic() - begin < 10


def test_answer(client, server):
    answer = client.chat.completions.create(model=server.name, messages=MESSAGES,
                                            max_completion_tokens=8, temperature=0)
    assert answer.object == "chat.completion"
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.message.refusal is None
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id


def test_prompt_is_what_jinja_renders(client, server):
    text, error = Reference().render(TEMPLATE.read_text(),
                                     {"messages": MESSAGES, "add_generation_prompt": True})
    assert error is None
    tokens = post(server, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    assert post(server, "/tokenize", {"messages": MESSAGES})["tokens"] == tokens
    # The chat response must equal a completion of the rendered text.
    fields = dict(model=server.name, max_tokens=16, temperature=0)
    chat = client.chat.completions.create(messages=MESSAGES, **fields)
    completion = client.completions.create(prompt=tokens, **fields)
    assert chat.choices[0].message.content == completion.choices[0].text
    assert chat.usage.prompt_tokens == len(tokens)


@pytest.mark.parametrize("temperature", [0, 1])
def test_stream_joins_to_the_unary_answer(client, server, temperature):
    fields = dict(model=server.name, messages=MESSAGES, max_completion_tokens=24, n=2, seed=5,
                  temperature=temperature, logprobs=True, top_logprobs=2)
    unary = client.chat.completions.create(**fields)
    text, logprobs, reasons, usage = ["", ""], [[], []], [None, None], None
    chunks = [0, 0]
    for chunk in client.chat.completions.create(**fields, stream=True,
                                                stream_options={"include_usage": True}):
        assert chunk.object == "chat.completion.chunk"
        if not chunk.choices:
            usage = chunk.usage
            continue
        choice = chunk.choices[0]
        if chunks[choice.index] == 0:
            assert choice.delta.role == "assistant" and choice.delta.content == ""
        chunks[choice.index] += 1
        text[choice.index] += choice.delta.content or ""
        if choice.logprobs:
            logprobs[choice.index] += choice.logprobs.content
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    for choice in unary.choices:
        assert text[choice.index] == choice.message.content
        assert logprobs[choice.index] == choice.logprobs.content
        assert reasons[choice.index] == choice.finish_reason
    assert usage.model_copy(update={"prompt_tokens_details": None}) == \
        unary.usage.model_copy(update={"prompt_tokens_details": None})


def test_the_clients_own_accumulation(client, server):
    fields = dict(model=server.name, messages=MESSAGES, max_completion_tokens=24, temperature=0)
    whole = client.chat.completions.create(**fields).choices[0].message.content
    # The client raises an exception if the finish reason is "length".
    fields["stop"] = whole[len(whole) // 2:][:3]
    unary = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields, logprobs=True) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == unary.choices[0].message.content
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].finish_reason == "stop"
    assert len(final.choices[0].logprobs.content) == unary.usage.completion_tokens


def test_logprobs(client, server):
    answer = client.chat.completions.create(model=server.name, messages=MESSAGES, logprobs=True,
                                            max_completion_tokens=8, temperature=0, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        # Decoding is greedy, so the token is the first of the top tokens, with equal values.
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True)
    text = b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
    assert text.startswith(answer.choices[0].message.content)


def test_stop(client, server):
    fields = dict(model=server.name, messages=MESSAGES, max_completion_tokens=32, temperature=0)
    whole = client.chat.completions.create(**fields).choices[0].message.content
    stop = whole[len(whole) // 2:][:3]
    choice = client.chat.completions.create(**fields, stop=stop).choices[0]
    assert choice.message.content == whole[:whole.index(stop)]
    assert choice.finish_reason == "stop" and choice.stop_reason == stop


def test_special_tokens_of_messages_are_text(server):
    special = "<|endoftext|>"  # a special token in the bundled models' tokenizer
    one = post(server, "/tokenize", {"prompt": special, "add_special_tokens": False})["tokens"]
    assert len(one) == 1
    spoof = [{"role": "user", "content": special}]
    assert one[0] not in post(server, "/tokenize", {"messages": spoof})["tokens"]
    trusted = post(server, "/tokenize", {"messages": spoof, "chat_template":
                                         "{{ messages[0].content }}{{ eos_token }}"})["tokens"]
    assert trusted.count(one[0]) == 1 and trusted[-1] == one[0]


def test_continue_final_message(client, server):
    fields = dict(model=server.name, temperature=0)
    first = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=4,
                                           extra_body={"return_token_ids": True}, **fields)
    start = first.choices[0].message.content
    more = client.chat.completions.create(
        messages=[*MESSAGES, {"role": "assistant", "content": start}], max_completion_tokens=4,
        extra_body={"add_generation_prompt": False, "continue_final_message": True,
                    "return_token_ids": True}, **fields)
    eight = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=8, **fields)
    # The continuation must equal the uninterrupted completion only if the text of the first part is
    # encoded to the tokens that were generated.
    if more.prompt_token_ids == first.prompt_token_ids + first.choices[0].token_ids:
        assert start + more.choices[0].message.content == eight.choices[0].message.content
    text = post(server, "/detokenize", {"tokens": more.prompt_token_ids})["prompt"]
    assert text.endswith("<|im_start|>assistant\n" + start)


def test_content_parts(client, server):
    fields = dict(model=server.name, max_completion_tokens=4, temperature=0)
    whole = client.chat.completions.create(messages=[{"role": "user", "content": "one two"}],
                                           **fields)
    parts = client.chat.completions.create(messages=[{"role": "user", "content": [
        {"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}], **fields)
    assert parts.choices[0].message.content == whole.choices[0].message.content
    assert parts.usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("fields, code", [
    ({"messages": []}, "invalid_value"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "invalid_value"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "missing_field"),
    ({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://x"}}]}]}, "unsupported_parameter"),
    ({"tools": [{"type": "web_search"}]}, "unsupported_parameter"),
    ({"top_logprobs": 2}, "invalid_value"),
    ({"max_completion_tokens": 10**9}, "context_length_exceeded"),
    ({"extra_body": {"chat_template": "{% if"}}, "invalid_template"),
    ({"extra_body": {"chat_template": "{{ raise_exception('no') }}"}}, "invalid_value"),
    ({"extra_body": {"chat_template": "{% for a in range(99999) %}{% for b in range(99999) %}"
                                      "{% endfor %}{% endfor %}"}}, "invalid_template"),
    ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "invalid_value"),
])
def test_bad_requests(client, server, fields, code):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{"model": server.name, "messages": MESSAGES, **fields})
    assert error.value.code == code


def test_template_that_does_not_compile_is_refused_at_start(tmp_path):
    bad = tmp_path / "bad.jinja"
    bad.write_text("{% for %}")
    with pytest.raises(RuntimeError, match="status 1"):
        start_server("--chat-template", str(bad))


def test_models_without_a_template_refuse_chats():
    plain = start_server()
    try:
        with pytest.raises(urllib.error.HTTPError) as error:
            post(plain, "/v1/chat/completions", {"messages": MESSAGES})
        assert error.value.code == 400
        assert json.load(error.value)["error"]["code"] == "invalid_template"
    finally:
        assert stop_server(plain) == 0


@pytest.fixture
def own_model(tmp_path, monkeypatch):
    """Copies the model, so that a test can add a chat template to the copy. Returns the folder."""
    folder = tmp_path / "model"
    shutil.copytree(model(), folder)
    monkeypatch.setenv("MOESERVE_MODEL", str(folder))
    return folder


def test_template_of_the_checkpoint(own_model):
    config = json.loads((own_model / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "other", "template": "no"},
                               {"name": "default", "template": "D{{ messages[0].content }}"}]
    (own_model / "tokenizer_config.json").write_text(json.dumps(config))

    def rendered():
        running = start_server()
        try:
            tokens = post(running, "/tokenize", {"messages": [{"role": "user", "content": "x"}]})
            return post(running, "/detokenize", {"tokens": tokens["tokens"]})["prompt"]
        finally:
            assert stop_server(running) == 0

    assert rendered() == "Dx"
    (own_model / "chat_template.jinja").write_text("J{{ messages[0].content }}{{ eos_token }}")
    assert rendered() == "Jx" + config["eos_token"]


def test_template_of_the_checkpoint_that_does_not_compile(own_model):
    (own_model / "chat_template.jinja").write_text("\n{% for %}")
    check = subprocess.run([binary(), "check", "--model", own_model], capture_output=True, text=True)
    assert check.returncode == 0 and "line 2" in check.stderr
    inspect = subprocess.run([binary(), "inspect", "--model", own_model], capture_output=True,
                             text=True)
    assert "chat template: cannot be used" in inspect.stdout
    running = start_server()
    try:
        with pytest.raises(urllib.error.HTTPError) as error:
            post(running, "/v1/chat/completions", {"messages": MESSAGES})
        answer = json.load(error.value)["error"]
        assert error.value.code == 400 and answer["code"] == "invalid_template"
        assert "line 2" in answer["message"]
        assert post(running, "/v1/completions", {"prompt": "a", "max_tokens": 1})["choices"]
    finally:
        assert stop_server(running) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(client, server, stream):
    schema = {"type": "object", "required": ["answer"], "additionalProperties": False,
              "properties": {"answer": {"type": "boolean"}}}
    answer = client.chat.completions.create(
        model=server.name, messages=MESSAGES, max_tokens=40, seed=1, stream=stream,
        response_format={"type": "json_schema",
                         "json_schema": {"name": "answer", "schema": schema, "strict": True}})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in answer) if stream else (
        answer.choices[0].message.content)
    assert json.loads(text)["answer"] in (True, False)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            model=server.name, messages=MESSAGES, stream=stream,
            response_format={"type": "json_schema",
                             "json_schema": {"name": "answer", "schema": {"type": "thing"}}})
    assert error.value.code == "invalid_schema"


def test_tokenize_refuses_what_it_does_not_know(server):
    with pytest.raises(urllib.error.HTTPError) as error:
        post(server, "/tokenize", {"messages": MESSAGES, "functions": [{"name": "f"}]})
    assert json.load(error.value)["error"]["code"] == "unsupported_parameter"
