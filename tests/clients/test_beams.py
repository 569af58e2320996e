"""Beam search over HTTP, gRPC and the command line: they find the same texts, streams send them at
the end, and what contradicts it is refused by name."""

import http.client
import json
import subprocess
import urllib.error

import grpc
import pytest

from conftest import ROOT, binary, device, model, post, start_server, stop_server, wait_for

PROMPT = "In the beginning"
FIELDS = {"prompt": PROMPT, "max_tokens": 20, "use_beam_search": True, "num_beams": 5, "n": 3,
          "length_penalty": 0.6, "early_stopping": "never", "return_token_ids": True}


@pytest.fixture(scope="module")
def server():
    running = start_server("--chat-template", str(ROOT / "deploy/models/plain_text.jinja"),
                           "--routing-records", "--max-num-seqs", "20")
    yield running
    assert stop_server(running) == 0


def scores(choices):
    return [(c["beam_score"], c["cumulative_logprob"]) for c in choices]


def test_choices_are_the_best_texts(server):
    answer = post(server, "/v1/completions", {**FIELDS, "logprobs": 1})
    choices = answer["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    assert len({c["text"] for c in choices}) == 3
    assert [s for s, _ in scores(choices)] == sorted((s for s, _ in scores(choices)), reverse=True)
    for choice in choices:
        values = choice["logprobs"]["token_logprobs"]
        assert len(values) == len(choice["token_ids"])
        assert sum(values) == pytest.approx(choice["cumulative_logprob"], abs=1e-4)
        assert choice["beam_score"] == pytest.approx(
            choice["cumulative_logprob"] / len(values) ** 0.6, abs=1e-9)
    usage = answer["usage"]
    assert usage["completion_tokens"] == sum(len(c["token_ids"]) for c in choices)
    greedy = post(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 20, "temperature": 0,
                                              "logprobs": 0})["choices"][0]
    one = post(server, "/v1/completions", {**FIELDS, "num_beams": 1, "n": 1})["choices"][0]
    assert one["text"] == greedy["text"]
    assert choices[0]["text"] != greedy["text"] or choices[1]["text"] != greedy["text"]


def test_several_prompts_have_a_search_each(server):
    alone = [post(server, "/v1/completions", {**FIELDS, "prompt": p}) for p in (PROMPT, "The king")]
    both = post(server, "/v1/completions", {**FIELDS, "prompt": [PROMPT, "The king"]})
    assert [c["index"] for c in both["choices"]] == list(range(6))
    assert [c["text"] for c in both["choices"]] == [c["text"] for a in alone for c in a["choices"]]


def events(server, path, body):
    """Returns the events of a stream."""
    connection = http.client.HTTPConnection(server.http)
    connection.request("POST", path, json.dumps({**body, "stream": True}),
                       {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    lines = answer.read().decode().split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_streams_send_every_choice_whole(server):
    unary = post(server, "/v1/completions", FIELDS)["choices"]
    chunks = events(server, "/v1/completions", FIELDS)
    assert [c["choices"][0]["index"] for c in chunks] == [0, 1, 2], "one chunk for each choice"
    for chunk, choice in zip(chunks, unary):
        streamed = chunk["choices"][0]
        assert {k: v for k, v in streamed.items() if k in choice} == choice


def test_chats(server):
    body = {**FIELDS, "messages": [{"role": "user", "content": PROMPT}]}
    del body["prompt"]
    chat = post(server, "/v1/chat/completions", body)["choices"]
    assert len(chat) == 3
    assert [s for s, _ in scores(chat)] == sorted((s for s, _ in scores(chat)), reverse=True)
    chunks = events(server, "/v1/chat/completions", body)
    for choice in chat:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        assert scores([own[-1]]) == scores([choice])


def test_grpc_finds_the_same(server, protos):
    pb, services = protos
    choices = post(server, "/v1/completions", FIELDS)["choices"]
    request = pb.GenerateRequest(
        text=PROMPT, n=3, sampling=pb.SamplingParams(max_tokens=20),
        beam=pb.BeamSearch(num_beams=5, length_penalty=0.6, early_stopping=pb.EARLY_STOPPING_NEVER))
    with grpc.insecure_channel(server.grpc) as channel:
        messages = list(services.InferenceStub(channel).Generate(request))
        assert [m.index for m in messages] == [0, 1, 2]
        for message, choice in zip(messages, choices):
            assert list(message.token_ids) == choice["token_ids"]
            assert message.text == choice["text"]
            assert [(message.beam_score, message.cumulative_logprob)] == scores([choice])
        with pytest.raises(grpc.RpcError) as error:
            request.sampling.temperature = 0.5
            list(services.InferenceStub(channel).Generate(request))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "'sampling.temperature': expected 1 or 0" in error.value.details()


def test_the_command_prints_the_best_text(server):
    best = post(server, "/v1/completions", FIELDS)["choices"][0]["text"]
    command = [binary(), "generate", "--model", model(), *device(), "--prompt", PROMPT,
               "--max-tokens", "20", "--num-beams", "5", "--length-penalty", "0.6",
               "--early-stopping", "never"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == best + "\n"
    done = subprocess.run([*command, "--temperature", "0.5"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "'temperature': expected 1 or 0 with '--num-beams', found 0.5" in done.stderr


def test_stop_strings_structured_output_and_records(server):
    stop = post(server, "/v1/completions", {**FIELDS, "stop": [" the", "a"]})["choices"]
    assert any(c["stop_reason"] in (" the", "a") for c in stop)
    assert not any(" the" in c["text"] or "a" in c["text"] for c in stop)
    words = ["yes", "no", "perhaps"]
    chosen = post(server, "/v1/completions", {**FIELDS, "guided_choice": words})["choices"]
    assert len(chosen) == 3 and {c["text"] for c in chosen} <= set(words)
    few = post(server, "/v1/completions", {**FIELDS, "max_tokens": 1, "allowed_token_ids": [70, 80]})
    assert [len(c["token_ids"]) for c in few["choices"]] == [1, 1]
    record = post(server, "/v1/completions", {**FIELDS, "return_routing": True})["choices"]
    for choice in record:
        prompt = len(choice["prompt_token_ids"])
        assert choice["routing"]["tokens"] == prompt + len(choice["token_ids"]) - 1


@pytest.mark.parametrize("fields, param", [
    ({"temperature": 0.7}, "temperature"), ({"top_p": 0.9}, "top_p"), ({"top_k": 5}, "top_k"),
    ({"min_p": 0.1}, "min_p"), ({"seed": 1}, "seed"), ({"n": 6}, "n"), ({"num_beams": 21}, "num_beams"),
    ({"num_beams": 65}, "num_beams"), ({"length_penalty": 11}, "length_penalty"),
    ({"early_stopping": "no"}, "early_stopping"), ({"best_of": 4}, "best_of"),
    ({"use_beam_search": False}, "num_beams")])
def test_refusals_name_the_field(server, fields, param):
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server, "/v1/completions", {**FIELDS, **fields})
    assert refused.value.code == 400
    assert json.load(refused.value)["error"]["param"] == param


def test_other_routes_refuse_it(server):
    body = {"input": PROMPT, "use_beam_search": True}
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server, "/v1/responses", body)
    assert "/v1/completions" in json.load(refused.value)["error"]["message"]


def test_a_client_that_leaves_ends_the_search(server, metric):
    body = {**FIELDS, "max_tokens": 400, "num_beams": 20, "ignore_eos": True}
    rows = metric("moeserve_beam_rows_total")
    connection = http.client.HTTPConnection(server.http)
    connection.request("POST", "/v1/completions", json.dumps(body),
                       {"Content-Type": "application/json"})
    assert wait_for(lambda: metric("moeserve_beam_rows_total") > rows)
    connection.close()
    assert wait_for(lambda: metric("moeserve_requests_running") == 0)
    assert metric("moeserve_kv_cache_usage_ratio") == 0
