"""Tests the HTTP interface with the official OpenAI client and with an evaluation harness's
requests."""

import concurrent.futures
import json
import re
import urllib.error
import urllib.request

import openai
import pytest

from conftest import post, start_server, stop_server, wait_for

PROMPT = "The history of the"


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_models(client, server):
    assert [model.id for model in client.models.list()] == [server.name]
    assert client.models.retrieve(server.name).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion(client, server):
    answer = client.completions.create(model=server.name, prompt=PROMPT, max_tokens=8,
                                       temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id


def test_greedy_is_repeatable_alone_and_in_company(client, server):
    def run(prompt):
        return client.completions.create(model=server.name, prompt=prompt, max_tokens=16,
                                         temperature=0).choices[0].text

    prompts = [f"{PROMPT} {i}" for i in range(8)]
    alone = [run(prompt) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, prompts)) == alone
    together = client.completions.create(model=server.name, prompt=prompts, max_tokens=16,
                                         temperature=0)
    assert [choice.text for choice in together.choices] == alone


def test_seeds(client, server):
    def run(seed):
        answer = client.completions.create(model=server.name, prompt=PROMPT, max_tokens=12,
                                           seed=seed, n=2)
        return [choice.text for choice in answer.choices]

    assert run(1) == run(1)
    assert run(1) != run(2)
    first, second = run(3)
    assert first != second


@pytest.mark.parametrize("temperature", [0, 1])
def test_stream_joins_to_the_unary_answer(client, server, temperature):
    fields = dict(model=server.name, prompt=PROMPT, max_tokens=24, temperature=temperature, seed=5,
                  logprobs=2, n=2)
    unary = client.completions.create(**fields)
    text, tokens, reasons = ["", ""], [[], []], [None, None]
    usage = None
    stream = client.completions.create(**fields, stream=True,
                                       stream_options={"include_usage": True})
    for chunk in stream:
        if not chunk.choices:
            usage = chunk.usage
            continue
        choice = chunk.choices[0]
        text[choice.index] += choice.text
        if choice.logprobs:
            tokens[choice.index] += choice.logprobs.token_logprobs
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    for i, choice in enumerate(unary.choices):
        assert text[i] == choice.text
        assert tokens[i] == choice.logprobs.token_logprobs
        assert reasons[i] == choice.finish_reason
    assert usage == unary.usage


def test_stop_strings(client, server):
    whole = client.completions.create(model=server.name, prompt=PROMPT, max_tokens=32,
                                      temperature=0).choices[0].text
    stop = whole[len(whole) // 2:][:3]
    answer = client.completions.create(model=server.name, prompt=PROMPT, max_tokens=32,
                                       temperature=0, stop=[stop]).choices[0]
    assert answer.text == whole[:whole.index(stop)]
    assert answer.finish_reason == "stop"
    assert answer.stop_reason == stop


def test_log_likelihoods_as_a_harness_reads_them(server):
    ids = post(server, "/tokenize", {"prompt": PROMPT})["tokens"]
    body = {"model": server.name, "prompt": [ids], "temperature": 0, "max_tokens": 1,
            "logprobs": 1, "seed": 1234, "echo": True}
    logprobs = post(server, "/v1/completions", body)["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(ids) + 1}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for token, value, top in zip(*(logprobs[key][1:] for key in
                                   ("tokens", "token_logprobs", "top_logprobs"))):
        assert top[token] == value
        assert value <= max(top.values()) <= 0
    # The generated token must have the highest log-probability, since decoding is greedy.
    assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())
    # With "max_tokens": 0, the prompt's log-probabilities must be the same.
    scored = post(server, "/v1/completions", {**body, "max_tokens": 0})["choices"][0]["logprobs"]
    assert scored["token_logprobs"] == logprobs["token_logprobs"][:-1]


def test_tokenize_round_trip(server):
    text = "Größe, 東京 and 🙂."
    ids = post(server, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    assert post(server, "/detokenize", {"tokens": ids})["prompt"].strip() == text


@pytest.mark.parametrize("fields, code", [
    ({"prompt": ""}, "invalid_value"),
    ({"prompt": "a", "max_tokens": -1}, "invalid_value"),
    ({"prompt": "a", "temperature": 3}, "invalid_value"),
    ({"prompt": "a", "presence_penalty": 3}, "invalid_value"),
    ({"prompt": "a", "suffix": "b"}, "unsupported_parameter"),
    ({"prompt": "a", "max_tokens": 10**9}, "context_length_exceeded"),
])
def test_bad_requests(client, server, fields, code):
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=server.name, **fields)
    assert error.value.code == code


def test_unknown_model_and_chat(client, server):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=server.name,
                                       messages=[{"role": "user", "content": "a"}])


def test_leaving_a_stream_stops_the_generation(client, server, metric):
    before = metric('moeserve_requests_finished_total{finished_reason="abort"}')
    stream = client.completions.create(model=server.name, prompt=PROMPT, max_tokens=4000,
                                       stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert wait_for(lambda: metric('moeserve_requests_finished_total{finished_reason="abort"}')
                    == before + 1)
    assert wait_for(lambda: metric("moeserve_requests_running") == 0)
    assert metric('moeserve_kv_cache_tokens{state="used"}') == 0


def test_expert_statistics_add_up(client, server):
    def stats():
        return json.load(urllib.request.urlopen(f"{server.url}/v1/experts/stats"))

    before = stats()
    answer = client.completions.create(model=server.name, prompt=PROMPT, max_tokens=5,
                                       temperature=0, extra_body={"ignore_eos": True})
    after = stats()
    # The model does not process the last sampled token.
    tokens = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
    assert after["tokens"] - before["tokens"] == tokens
    assert after["layers"]
    for old, new in zip(before["layers"], after["layers"]):
        rows = new["rows"] - old["rows"]
        assert rows == tokens * new["split_heads"]
        chosen = sum(new["counts"]) - sum(old["counts"])
        if new["select"] == "top_k":
            assert chosen == rows * new["max_selected"]
        else:
            assert rows <= chosen <= rows * new["max_selected"]


def test_keys_are_asked_for(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# two keys\nalpha\nbeta\n")
    guarded = start_server("--api-key-file", str(keys))
    try:
        def client(key):
            return openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0)

        client("beta").models.list()
        with pytest.raises(openai.AuthenticationError):
            client("gamma").models.list()
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{guarded.url}/v1/experts/stats")
        assert error.value.code == 401
        assert urllib.request.urlopen(f"{guarded.url}/health").status == 200
    finally:
        assert stop_server(guarded) == 0


def test_draining_finishes_what_is_running():
    draining = start_server()
    client = openai.OpenAI(base_url=f"{draining.url}/v1", api_key="unused", max_retries=0)
    stream = client.completions.create(model=draining.name, prompt=PROMPT, max_tokens=100,
                                       stream=True, extra_body={"ignore_eos": True})
    iterator = iter(stream)
    next(iterator)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        status = pool.submit(stop_server, draining)
        last = None
        for chunk in iterator:
            last = chunk
        assert last.choices[0].finish_reason == "length"
        assert status.result() == 0


SCHEMA = {"type": "object", "additionalProperties": False, "required": ["name", "size"],
          "properties": {"name": {"type": "string", "maxLength": 20},
                         "size": {"enum": ["small", "large"]}}}


@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(client, server, stream):
    answer = client.completions.create(
        model=server.name, prompt=PROMPT, max_tokens=100, seed=1, stream=stream,
        extra_body={"response_format": {"type": "json_schema",
                                        "json_schema": {"name": "thing", "schema": SCHEMA}}})
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        text, reason = "".join(choice.text for choice in choices), choices[-1].finish_reason
    else:
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert reason == "stop"
    value = json.loads(text)
    assert set(value) == {"name", "size"} and value["size"] in ("small", "large")


@pytest.mark.parametrize("extra", [{"guided_choice": ["yes", "no"]},
                                   {"structured_outputs": {"regex": "yes|no"}}])
def test_choice_and_regex(client, server, extra):
    answer = client.completions.create(model=server.name, prompt=PROMPT, n=4, extra_body=extra)
    assert {choice.text for choice in answer.choices} <= {"yes", "no"}


@pytest.mark.parametrize("extra", [
    {"guided_grammar": 'root ::= "(" root ")" | [ab]'},
    {"structured_outputs": {"grammar": 'start: "(" start ")" | /[ab]/'}}])
def test_grammar(client, server, extra):
    answer = client.completions.create(model=server.name, prompt=PROMPT, n=4, seed=3, max_tokens=40,
                                       extra_body=extra)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        opened = choice.text.count("(")
        assert choice.text.strip("()") in ("a", "b")
        assert choice.text == "(" * opened + choice.text.strip("()") + ")" * opened


TAGS = [{"begin": f"<call={name}>", "end": "</call>",
         "content": {"type": "json_schema", "json_schema": SCHEMA}} for name in ("f", "g")]


@pytest.mark.parametrize("extra", [
    {"response_format": {"type": "structural_tag", "format": {
        "type": "triggered_tags", "triggers": ["<call="], "tags": TAGS, "at_least_one": True,
        "stop_after_first": True}}},
    {"structured_outputs": {"structural_tag": json.dumps({"format": {
        "type": "tags_with_separator", "separator": ", ", "tags": TAGS, "at_least_one": True}})}}])
def test_structural_tag(client, server, extra):
    answer = client.completions.create(model=server.name, prompt=PROMPT, max_tokens=200, seed=2,
                                       extra_body=extra)
    assert answer.choices[0].finish_reason == "stop"
    regions = re.findall(r"<call=[fg]>(.*?)</call>", answer.choices[0].text, re.DOTALL)
    assert regions
    for region in regions:
        assert set(json.loads(region)) == {"name", "size"}


def test_structural_tag_of_unknown_kind_is_refused(client, server):
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(
            model=server.name, prompt=PROMPT,
            extra_body={"response_format": {"type": "structural_tag", "format": {
                "type": "sequence", "elements": [{"type": "qwen_xml_parameter"}]}}})
    assert error.value.param == "response_format.format.elements[0].type"


def test_hopeless_schema_is_refused(client, server):
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=server.name, prompt=PROMPT,
                                  extra_body={"guided_json": {"type": "string", "minLength": 3,
                                                              "maxLength": 2}})
    assert error.value.code == "invalid_schema"
