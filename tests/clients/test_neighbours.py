"""One client's requests do not end, hide or block those of another."""

import concurrent.futures
import http.client
import json
import shutil
import socket
import struct
import time
import urllib.request

import grpc
import pytest

from conftest import model, start_server, stop_server, wait_for
from test_drain import running

SECONDS = 8  # limit on the answer to a hostile request, and far below what it used to take
HEAD = ("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: {}\r\n\r\n")


def raw_request(server, receive=0, **body):
    """Sends a request over a new connection and returns the connection."""
    host, port = server.http.split(":")
    client = socket.socket()
    if receive:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    client.settimeout(30)
    client.connect((host, int(port)))
    data = json.dumps(body)
    client.sendall((HEAD.format(len(data)) + data).encode())
    return client


def test_a_request_id_that_is_used_again(server, protos):
    """A request has ended, and its client reads its answer, when another client uses the same id.
    If the first client leaves then, the other request goes on."""
    pb, rpc = protos

    def request(tokens, logprobs):
        return pb.GenerateRequest(
            text="The", request_id="same", logprobs=logprobs, sampling=pb.SamplingParams(
                max_tokens=tokens, temperature=0, ignore_eos=True))

    channels = [grpc.insecure_channel(server.grpc, options=[
        ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]) for _ in range(2)]
    stubs = [rpc.InferenceStub(channel) for channel in channels]
    first = stubs[0].Generate(request(400, 20))
    next(first)  # the rest stays unread
    assert wait_for(lambda: running(server.url) == 0, 20)
    second = stubs[1].Generate(request(1200, None))
    next(second)
    first.cancel()
    messages = list(second)
    assert messages[-1].finish_reason == pb.FINISH_REASON_LENGTH
    for channel in channels:
        channel.close()


def test_half_closed_clients_get_their_answers(server):
    for stream in (False, True):
        client = raw_request(server, prompt="The", max_tokens=300, ignore_eos=True, stream=stream)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(1 << 16):
            answer += part
        client.close()
        assert b"HTTP/1.1 200" in answer
        assert (b"data: [DONE]" if stream else b'"usage"') in answer


def test_a_reset_behind_pipelined_bytes_is_noticed(server):
    client = raw_request(server, prompt="The", max_tokens=7000, ignore_eos=True)
    assert wait_for(lambda: running(server.url) == 1)
    client.sendall(b"GET /health HTTP/1.1\r\n" * 20000)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    assert wait_for(lambda: running(server.url) == 0, 2)


def answered(url, path, body):
    """Posts `body` and returns the status of the answer."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=SECONDS)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse().status


def answers_beside(server, hostile):
    """Sends the hostile requests, each a path and a body, and checks that health is reported and
    that each of them is answered in time."""
    with concurrent.futures.ThreadPoolExecutor(len(hostile)) as pool:
        answers = [pool.submit(answered, server.url, *request) for request in hostile]
        while not all(answer.done() for answer in answers):
            assert urllib.request.urlopen(server.url + "/health", timeout=1).status == 200
            time.sleep(0.1)
        return [answer.result() for answer in answers]


@pytest.mark.parametrize("template", [
    "{% set d = {} %}{% set k = s * 100 %}{% for i in range(9999) %}{{ d[k] }}{% endfor %}",
    "{% set k = s * 100 %}{% for i in range(9999) %}{{ k.isupper() }}{% endfor %}",
    "{% for i in range(9999) %}{{ s.upper()[0] }}{% endfor %}",
    "{% for i in range(9999) %}{% set _ = s.split('a') %}{% endfor %}"])
def test_hostile_templates(template):
    server = start_server("--allow-request-chat-template")
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
            "chat_template": template, "chat_template_kwargs": {"s": "a" * (1 << 20)}}
    try:
        assert answers_beside(server, [("/v1/chat/completions", body)] * 4) == [400] * 4
    finally:
        assert stop_server(server) == 0


def changed_model(folder, change):
    """Returns a copy of the model whose tokenizer.json is changed by `change`."""
    copy = folder / "model"
    shutil.copytree(model(), copy)
    path = copy / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    change(tokenizer)
    path.write_text(json.dumps(tokenizer))
    return copy


def test_a_hostile_pattern_of_the_tokenizer(tmp_path, monkeypatch):
    def change(tokenizer):
        split = {"type": "Split", "pattern": {"Regex": "(a|a){0,20}b|a"}, "behavior": "Isolated",
                 "invert": False}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                      "use_regex": False}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}

    monkeypatch.setenv("MOESERVE_MODEL", str(changed_model(tmp_path, change)))
    server = start_server()
    try:
        statuses = answers_beside(server, [("/tokenize", {"prompt": "a" * 200000})] * 4)
        assert set(statuses) <= {200, 400}
    finally:
        assert stop_server(server) == 0


def test_ids_without_text_are_not_sampled(tmp_path, monkeypatch):
    """The embedding has more rows than the tokenizer has tokens."""
    most = 400

    def change(tokenizer):
        vocabulary = {text: index for text, index in tokenizer["model"]["vocab"].items()
                      if index < most}
        tokenizer["model"]["vocab"] = vocabulary
        tokenizer["model"]["merges"] = [
            pair for pair in tokenizer["model"]["merges"]
            if "".join(pair.split(" ") if isinstance(pair, str) else pair) in vocabulary]

    monkeypatch.setenv("MOESERVE_MODEL", str(changed_model(tmp_path, change)))
    server = start_server()
    try:
        request = urllib.request.Request(
            server.url + "/v1/completions", json.dumps({
                "prompt": "The", "max_tokens": 256, "temperature": 2, "n": 4, "seed": 1,
                "ignore_eos": True, "return_token_ids": True}).encode(),
            {"Content-Type": "application/json"})
        choices = json.load(urllib.request.urlopen(request))["choices"]
        assert len(choices) == 4
        for choice in choices:
            assert max(choice["token_ids"]) < most
    finally:
        assert stop_server(server) == 0
