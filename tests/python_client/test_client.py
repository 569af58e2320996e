"""Tests the methods of Client and AsyncClient against a server."""

import asyncio
import contextlib
import dataclasses
import inspect
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request

import numpy as np
import pytest

from conftest import ROOT, Running
from moeserve import (AsyncClient, BeamSearch, Client, Decoder, Error, ExpertOverride,
                      RoutingControl, StructuredOutput, answers)

PROMPT = "In the beginning God created"
GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
CHAT = [{"role": "user", "content": PROMPT}]
CITY = {"type": "object", "required": ["city", "year"], "additionalProperties": False,
        "properties": {"city": {"enum": ["Lima", "Oslo"]},
                       "year": {"type": "integer", "minimum": 1, "maximum": 9}}}


class OnThread:
    """AsyncClient with the methods of Client, so that one test body runs with both."""

    def __init__(self, *arguments, **options):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

        async def make():
            return AsyncClient(*arguments, **options)

        self._client = self._wait(make())

    def _wait(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def __getattr__(self, name):
        method = getattr(self._client, name)
        if not inspect.isasyncgenfunction(method):
            return lambda *arguments, **options: self._wait(method(*arguments, **options))

        async def collect(pieces):
            return [piece async for piece in pieces]

        return lambda *arguments, **options: iter(self._wait(collect(method(*arguments, **options))))

    def close(self):
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module", params=[Client, OnThread], ids=["client", "async_client"])
def client(server, request):
    out = request.param(server.grpc, http_address=server.http)
    yield out
    out.close()


def same(a, b):
    """Whether two results have the same values, arrays included."""
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if dataclasses.is_dataclass(x):
            assert same(x, y)
        else:
            assert np.array_equal(x, y), field.name
    return True


def test_generate_and_stream(client):
    answer = client.generate(PROMPT, logprobs=True, **GREEDY)
    assert answer.token_ids.shape == answer.logprobs.shape == (12,)
    assert answer.routes is None and answer.finish_reason == "length"
    assert client.detokenize(answer.token_ids) == answer.text
    ids = client.tokenize(PROMPT)
    assert client.generate(ids, **GREEDY).text == answer.text
    pieces = list(client.stream(PROMPT, **GREEDY))
    assert "".join(piece.text for piece in pieces) == answer.text
    assert pieces[-1].finish_reason == "length" and {piece.index for piece in pieces} == {0}


def test_a_text_is_one_stop_string(client):
    text = client.generate(PROMPT, **GREEDY).text
    stop = next(text[at:at + 2] for at in range(2, len(text) - 1)
                if text.index(text[at:at + 2]) == at and text[at] in text[:at])
    for given in (stop, [stop], (stop, "zzz")):
        answer = client.generate(PROMPT, stop=given, **GREEDY)
        assert answer.text == text[:text.index(stop)] and answer.finish_reason == "stop"
        chat = client.chat(CHAT, stop=given, **GREEDY)
        assert stop not in chat.text


def test_other_lists_take_one_value(client):
    plain = client.generate(PROMPT, **GREEDY)
    first = int(plain.token_ids[2])
    answer = client.generate(PROMPT, stop_token_ids=first, **GREEDY)
    assert answer.finish_reason == "stop" and len(answer.token_ids) <= 3
    answer = client.generate(PROMPT, allowed_token_ids=np.int32(first), **GREEDY)
    assert set(answer.token_ids.tolist()) == {first}
    word = plain.text.split()[0]
    assert word not in client.generate(PROMPT, bad_words=word, **GREEDY).text.split()
    assert client.generate(PROMPT, structured_output=StructuredOutput(choice="Lima"),
                           max_tokens=8).text == "Lima"


def test_several_answers(client):
    options = {"max_tokens": 6, "seed": 4, "temperature": 1.0, "ignore_eos": True}
    several = client.generate(PROMPT, n=3, logprobs=True, routes=True, **options)
    assert len(several) == 3 and len({answer.text for answer in several}) > 1
    for answer in several:
        assert client.detokenize(answer.token_ids) == answer.text
        assert len(answer.logprobs) == 6 and answer.routes.tokens == answer.prompt_tokens + 5
    assert isinstance(client.generate(PROMPT, n=1, **options), list)
    texts = ["", "", ""]
    for piece in client.stream(PROMPT, n=3, **options):
        texts[piece.index] += piece.text
    assert texts == [answer.text for answer in several]
    chats = client.chat(CHAT, n=2, **options)
    assert len(chats) == 2 and chats[0].text != chats[1].text
    with pytest.raises(ValueError, match="n: expected at least 1, found 0"):
        client.generate(PROMPT, n=0)


class Place:
    """Has what Pydantic's models have."""

    @classmethod
    def model_json_schema(cls):
        return CITY


def test_structured_output(client):
    for given in (CITY, json.dumps(CITY), Place, StructuredOutput(json_schema=CITY, strict=True)):
        for answer in (client.generate(PROMPT, structured_output=given, max_tokens=64, seed=1),
                       client.chat(CHAT, structured_output=given, max_tokens=64, seed=1)):
            value = json.loads(answer.text)
            assert value["city"] in ("Lima", "Oslo") and 1 <= value["year"] <= 9
    tag = {"type": "structural_tag",
           "format": {"type": "tag", "begin": "<a>", "end": "</a>",
                      "content": {"type": "const_string", "value": "x"}}}
    for given, expected in ((StructuredOutput(regex="[ab]{3}c"), lambda text: text[3] == "c"),
                            (StructuredOutput(choice=["yes", "no"]), ("yes", "no").__contains__),
                            (StructuredOutput(grammar='root ::= "x" "y"'), "xy".__eq__),
                            (StructuredOutput(structural_tag=tag), "<a>x</a>".__eq__)):
        assert expected(client.generate(PROMPT, structured_output=given, max_tokens=32).text)
        assert expected(client.chat(CHAT, structured_output=given, max_tokens=32).text)
    answer = client.chat(CHAT, structured_output=StructuredOutput(json_object=True), max_tokens=200)
    assert answer.text.startswith("{")
    for wrong in (StructuredOutput(), StructuredOutput(regex="a", json_object=True), 3):
        with pytest.raises(ValueError, match="expected"):
            client.generate(PROMPT, structured_output=wrong)
    with pytest.raises(Error) as caught:
        client.generate(PROMPT, structured_output=StructuredOutput(regex="("))
    assert caught.value.code == "invalid_schema"


def test_routing_control(client):
    plain = client.generate(PROMPT, routes=True, **GREEDY)
    block = plain.routes.blocks[0]
    half = range(block.num_experts // 2)
    control = RoutingControl(top_k=1, experts=[
        *(ExpertOverride(block.layer, e, block=block.block) for e in half),
        ExpertOverride(plain.routes.blocks[1].layer, 3, bias=100.0)])
    for answer in (client.generate(PROMPT, routes=True, routing_control=control, **GREEDY),
                   client.chat(CHAT, routes=True, routing_control=control, **GREEDY)):
        assert set(np.diff(answer.routes.offsets)) == {1}
        assert answer.routes.counts(0)[:, half].sum() == 0 < answer.routes.counts(0).sum()
        counts = answer.routes.counts(1).sum(axis=0)
        assert counts[3] == counts.sum() > 0
    streamed = client.stream(PROMPT, routing_control=RoutingControl(top_p=0.5), **GREEDY)
    whole = client.generate(PROMPT, routing_control=RoutingControl(top_p=0.5), **GREEDY)
    assert "".join(piece.text for piece in streamed) == whole.text
    chat = client.chat(CHAT, routing_control=RoutingControl(top_p=0.5), **GREEDY)
    pieces = client.stream_chat(CHAT, routing_control=RoutingControl(top_p=0.5), **GREEDY)
    assert "".join(piece.text for piece in pieces) == chat.text
    with pytest.raises(ValueError, match="found both"):
        client.generate(PROMPT, routing_control=RoutingControl(top_k=1, top_p=0.5))
    with pytest.raises(Error):
        client.chat(CHAT, routing_control=RoutingControl(top_k=1000))


def test_scores_with_routes(client):
    plain = client.score(PROMPT)
    scores, routes = client.score(PROMPT, routes=True)
    assert np.array_equal(plain, scores, equal_nan=True)
    assert len(plain) == len(client.tokenize(PROMPT))
    assert routes.tokens == len(scores) and routes.first_position == 0
    answer = client.generate(PROMPT, routes=True, **GREEDY)
    assert np.array_equal(routes.counts(0), answer.routes.counts(0)[:routes.tokens])
    scores, routes = client.score([5, 6, 7], routes=True)
    assert len(scores) == routes.tokens == 3


def test_chat(client):
    answer = client.chat(CHAT, routes=True, **GREEDY)
    assert answer.text and answer.finish_reason == "length" and not answer.tool_calls
    assert answer.completion_tokens == 12 and answer.prompt_tokens > 5
    assert answer.routes.tokens == answer.prompt_tokens + 11
    assert same(client.chat(PROMPT, routes=True, **GREEDY).routes, answer.routes)
    pieces = list(client.stream_chat(PROMPT, **GREEDY))
    assert "".join(piece.text for piece in pieces) == answer.text
    assert pieces[-1].finish_reason == "length" and len(pieces) > 3
    again = client.chat([*CHAT, answer.message, {"role": "user", "content": "And?"}], **GREEDY)
    assert again.prompt_tokens > answer.prompt_tokens + 12


def test_tools(client):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "required": ["place"], "additionalProperties": False,
        "properties": {"place": {"enum": ["Rome", "Oslo"]}}}}}
    answer = client.chat("Is it raining?", tools=[tool], tool_choice="required", max_tokens=64,
                         parallel_tool_calls=False)
    assert answer.finish_reason == "tool_calls" and len(answer.tool_calls) == 1
    call = answer.tool_calls[0]
    assert call.name == "weather" and json.loads(call.arguments)["place"] in ("Rome", "Oslo")
    assert call.id and answer.message["tool_calls"][0]["id"] == call.id


def test_errors(client):
    for call in (lambda: client.generate("x" * 100_000, max_tokens=4),
                 lambda: client.chat("x" * 100_000, max_tokens=4),
                 lambda: list(client.stream_chat("x" * 100_000, max_tokens=4))):
        with pytest.raises(Error) as caught:
            call()
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(Error) as caught:
        client.chat("a", model="none")
    assert caught.value.code == "model_not_found"
    with pytest.raises(ValueError, match="temprature: expected a field of SamplingParams: temp"):
        client.generate(PROMPT, temprature=1.0)


def test_words(client):
    answer = client.generate(PROMPT, routes=True, **GREEDY)
    ids = np.concatenate([client.tokenize(PROMPT), answer.token_ids])
    words = client.words(ids)
    assert "".join(word.text for word in words) == client.detokenize(ids)
    assert [word.text for word in words[:4]] == ["In", " the", " beginning", " God"]
    assert words[0].begin == 0 and words[-1].end == len(ids)
    assert all(a.end == b.begin for a, b in zip(words, words[1:]))
    counts = answer.routes.word_counts(words)
    assert counts.shape == (len(words), answer.routes.blocks[0].num_experts)
    assert np.array_equal(counts.sum(axis=0), answer.routes.counts().sum(axis=0))
    assert np.array_equal(counts[0], answer.routes.counts()[words[0].begin:words[0].end].sum(axis=0))
    assert client.words([]) == [] and answer.routes.word_counts([]).shape[0] == 0
    # The bytes of a character may be several tokens.
    text = "na\u00efve \U0001f600 end"
    assert [word.text for word in client.words(client.tokenize(text))] == \
        ["na\u00efve", " \U0001f600", " end"]


@pytest.mark.parametrize("texts, expected", [
    (["a", "b", " c", "d"], ["ab", " cd"]),
    (["the ", "cat ", "s"], ["the ", "cat ", "s"]),
    (["\n", "\n", "x", " ", "y"], ["\n\nx", " y"]),
    (["", "a", "", "b"], ["ab"]),
    (["a", " "], ["a", " "]),
])
def test_rules_of_words(texts, expected):
    words = answers.words(["".join(texts[:end + 1]) for end in range(len(texts))])
    assert [word.text for word in words] == expected
    assert [word.begin for word in words] == [0, *(word.end for word in words[:-1])]


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_keys_and_tls(tmp_path):
    certificate, key, keys = (tmp_path / name for name in ("cert.pem", "key.pem", "keys"))
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-keyout", key, "-out", certificate, "-days", 2, "-subj", "/CN=localhost",
            "-addext", "subjectAltName=IP:127.0.0.1")
    keys.write_text("secret\n")
    keys.chmod(0o600)
    key.chmod(0o600)
    server = Running("--tls-cert", certificate, "--tls-key", key, "--api-key-file", keys)
    try:
        options = {"http_address": server.http, "ca_file": certificate}
        with Client(server.grpc, api_key="secret", **options) as client:
            assert client.generate(PROMPT, **GREEDY).text and client.chat(PROMPT, **GREEDY).text
            assert "".join(piece.text for piece in client.stream_chat(PROMPT, **GREEDY))
        with Client(server.grpc, **options) as client:
            for call in (client.generate, client.chat):
                with pytest.raises(Error) as caught:
                    call(PROMPT)
                assert caught.value.code == "invalid_api_key"
        with Client(server.grpc, api_key="secret", http_address=server.http) as client:
            with pytest.raises(Error):  # HTTP without TLS
                client.chat(PROMPT)
    finally:
        server.stop()


def test_statistics(client):
    before = client.statistics()
    client.generate(PROMPT, **GREEDY)
    after = client.statistics().since(before)
    assert after.tokens > 0 and after.load().shape[0] == len(after.blocks)


@pytest.fixture(params=[Client, OnThread], ids=["client", "async_client"])
def client_of(request, tmp_path, monkeypatch):
    """Returns a client of a small encoder."""
    monkeypatch.syspath_prepend(ROOT / "tests/clients")
    import encoder_models

    with contextlib.ExitStack() as ends:
        def start(name):
            running = Running(model=encoder_models.make(name, tmp_path))
            ends.callback(running.stop)
            made = request.param(running.grpc)
            ends.callback(made.close)
            return made

        yield start


def test_vectors(client_of):
    client = client_of("nomic-experts")
    texts = ["rose", "a shrub", ""]
    vectors = client.embed(texts)
    assert vectors.dtype == np.float32 and vectors.shape[0] == 3
    assert np.array_equal(client.embed("a shrub"), vectors[1:2])
    assert np.array_equal(client.embed([[2, 7, 3]]).shape, vectors[:1].shape)
    short = client.embed(texts, dimensions=8, normalize=True)
    assert np.allclose(np.linalg.norm(short, axis=1), 1.0, atol=1e-6)
    with pytest.raises(Error, match="unsupported_task"):
        client.classify("rose")
    with pytest.raises(Error, match="dimensions"):
        client.embed("rose", dimensions=10_000)


def test_labels(client_of):
    client = client_of("bert-classifier")
    one, pair = client.classify(["rose", "rose"])[0], client.classify(["rose"], pairs=["a"])[0]
    assert one.label == max(one.scores, key=one.scores.get) and one.scores != pair.scores
    assert sum(one.scores.values()) == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(ValueError, match="second text"):
        client.classify(["rose"], pairs=["a", "b"])


def test_entities(client_of):
    client = client_of("tiny-encoder-split")
    text = "a shrub of southern africa"
    (found,) = client.entities([text])
    assert all(text[e.begin:e.end] == e.text and 0 < e.score <= 1 for e in found)
    assert client.entities([text], aggregation="viterbi") == [found]


def test_both_clients_have_the_same_methods():
    def public(kind):
        return {name: inspect.signature(member) for name, member in vars(kind).items()
                if inspect.isfunction(member) and not name.startswith("_")}

    plain, other = public(Client), public(AsyncClient)
    assert set(plain) == set(other)
    for name, signature in plain.items():
        assert signature.parameters == other[name].parameters, name
    assert inspect.signature(Client.__init__) == inspect.signature(AsyncClient.__init__)


def test_chats_need_an_address(server):
    with Client(server.grpc) as client:
        with pytest.raises(ValueError, match="expected http_address"):
            client.chat("a")
    with Client("127.0.0.1:1", http_address="127.0.0.1:1", timeout=5) as client:
        with pytest.raises(Error, match="UNAVAILABLE"):
            client.chat("a")
        with pytest.raises(Error, match="UNAVAILABLE"):
            client.generate("a")


@pytest.mark.parametrize("reply, code", [
    (b"", "UNAVAILABLE"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{", "UNAVAILABLE"),
    (b"nonsense\r\n\r\n", "UNAVAILABLE"),
    (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 3\r\n\r\nbad", "502"),
    (b"HTTP/1.1 200 OK\r\n\r\ndata: {\"choices\": []}\n\n", "UNAVAILABLE"),
    (b"HTTP/1.1 200 OK\r\n\r\ndata: {\"error\": {\"code\": \"x\", \"message\": \"y\"}}\n\n", "x"),
    (None, "DEADLINE_EXCEEDED"),
])
def test_broken_connections(reply, code):
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            if reply is None:
                while connection.recv(1 << 16):  # until the client gives up
                    pass
            else:
                connection.sendall(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    address = "%s:%d" % listener.getsockname()
    try:
        timeout = 0.2 if reply is None else 10
        with Client("127.0.0.1:1", http_address=address, timeout=timeout) as client:
            with pytest.raises(Error) as caught:
                list(client.stream_chat("a"))
        assert caught.value.code == code
    finally:
        thread.join()
        listener.close()


def running(server):
    text = urllib.request.urlopen(f"http://{server.http}/metrics").read().decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
               if line.startswith("moeserve_requests_running"))


@pytest.mark.parametrize("method", ["stream", "stream_chat"])
def test_closing_a_stream_ends_the_request(server, method):
    long = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}

    async def first():
        async with AsyncClient(server.grpc, http_address=server.http) as client:
            async with contextlib.aclosing(getattr(client, method)(PROMPT, **long)) as pieces:
                async for piece in pieces:
                    return piece.text

    assert asyncio.run(first()) is not None
    with Client(server.grpc, http_address=server.http) as client:
        pieces = getattr(client, method)(PROMPT, **long)
        next(pieces)
        pieces.close()
    end = time.monotonic() + 5
    while running(server) > 0 and time.monotonic() < end:
        time.sleep(0.02)
    assert running(server) == 0


def test_many_requests_at_a_time(server):
    async def ask():
        async with AsyncClient(server.grpc, http_address=server.http) as client:
            return await asyncio.gather(*(client.generate(PROMPT, **GREEDY) for _ in range(8)),
                                        *(client.chat(PROMPT, **GREEDY) for _ in range(4)))

    answers = asyncio.run(ask())
    assert len({answer.text for answer in answers[:8]}) == 1
    assert len({answer.text for answer in answers[8:]}) == 1


@pytest.fixture(params=[Client, OnThread], ids=["client", "async_client"])
def translator(request, tmp_path, monkeypatch):
    """A client of a small encoder-decoder."""
    monkeypatch.syspath_prepend(ROOT / "tests/clients")
    import encoder_models

    folder = encoder_models.make_pair(ROOT / "tests/golden/pairs/tiny-pair-moa", tmp_path)
    running = Running("--routing-records", "--dtype", "f32", model=folder)
    made = request.param(running.grpc)
    yield made
    made.close()
    running.stop()


def test_encoder_decoders(translator):
    source = [2, 7, 8, 9, 3]
    plain = translator.generate(source, routes=True, **GREEDY)
    assert plain.routes.tokens == 12 and plain.source_routes.tokens == len(source)
    assert plain.beam_score is None
    forced = translator.generate(source, decoder=Decoder(forced_bos_token_id=9), **GREEDY)
    assert forced.token_ids[0] == 9
    begun = translator.generate(source, decoder=Decoder(prompt=plain.token_ids[:4]),
                                **{**GREEDY, "max_tokens": 8})
    assert np.array_equal(begun.token_ids, plain.token_ids[4:])
    found = translator.generate(source, n=3, beam=BeamSearch(4, early_stopping="never"),
                                max_tokens=6)
    assert 1 <= len(found) <= 3
    scores = [answer.beam_score for answer in found]
    assert scores == sorted(scores, reverse=True)
    for answer in found:
        assert answer.beam_score == pytest.approx(
            answer.cumulative_logprob / len(answer.token_ids), rel=1e-6)
    encoder, decoder = (translator.statistics(stack=stack) for stack in ("encoder", "decoder"))
    assert {block.stack for block in encoder.blocks} == {"encoder"}
    assert "cross_attention" in {block.block for block in decoder.blocks}
    with pytest.raises(ValueError, match="early_stopping"):
        translator.generate(source, beam=BeamSearch(2, early_stopping="soon"))
    with pytest.raises(Error, match="stack"):
        translator.statistics(stack="third")
