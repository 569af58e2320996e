"""Tests requests to encoder-decoders: over HTTP, gRPC and on the command line."""

import itertools
import json
import pathlib
import shutil
import struct
import subprocess
import urllib.error

import grpc
import pytest

import encoder_models
from conftest import binary, post, start_server, stop_server

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "golden/pairs/tiny-pair-moa"
START = 3  # decoder_start_token_id


def golden():
    """Returns the pairs of the golden file: source, beginning, greedy tokens, scores of beams."""
    data = (FOLDER / "golden.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])

    def values(name):
        begin, end = header[name]["data_offsets"]
        code = "f" if header[name]["dtype"] == "F32" else "i"
        return struct.unpack(f"<{(end - begin) // 4}{code}", data[8 + size + begin:8 + size + end])

    def rows(name, offsets):
        return [list(values(name)[a:b]) for a, b in itertools.pairwise(values(offsets))]

    greedy, scores = values("greedy"), values("beam_scores")
    return [{"source": source, "begin": begin, "greedy": list(greedy[20 * i:20 * i + 20]),
             "scores": list(scores[4 * i:4 * i + 4])}
            for i, (source, begin) in enumerate(zip(rows("sources", "source_offsets"),
                                                    rows("tokens", "offsets")))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return encoder_models.make_pair(FOLDER, tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def server(folder):
    out = start_server("--dtype", "f32", folder=folder)
    yield out
    assert stop_server(out) == 0


@pytest.fixture(scope="module")
def decoder():
    out = start_server()
    yield out
    stop_server(out)


def complete(server, prompt, **more):
    return post(server, "/v1/completions", {
        "model": server.name, "prompt": prompt, "max_tokens": 20, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **more})


def refusal(server, **more):
    with pytest.raises(urllib.error.HTTPError) as error:
        complete(server, **more)
    return error.value.code, json.load(error.value)["error"]


def test_the_prompt_is_the_source(server):
    pairs = golden()
    assert all(pair["begin"][0] == START for pair in pairs)
    for pair in pairs:
        answer = complete(server, pair["source"], decoder_prompt=pair["begin"][1:])
        assert answer["choices"][0]["token_ids"] == pair["greedy"]
        assert answer["choices"][0]["prompt_token_ids"] == pair["source"]
        tokens = len(pair["source"]) + len(pair["begin"]) - 1
        assert answer["usage"]["prompt_tokens"] == tokens
        assert answer["usage"]["completion_tokens"] == 20


def test_several_sources(server):
    pairs = golden()
    answer = complete(server, [pair["source"] for pair in pairs], n=2)
    alone = [complete(server, pair["source"]) for pair in pairs]
    for i, choice in enumerate(answer["choices"]):
        assert choice["token_ids"] == alone[i // 2]["choices"][0]["token_ids"]
    assert answer["usage"]["prompt_tokens"] == sum(len(pair["source"]) for pair in pairs)


def test_beams(server):
    for pair in golden():
        answer = complete(server, pair["source"], decoder_prompt=pair["begin"][1:], max_tokens=10,
                          use_beam_search=True, num_beams=4, n=4, ignore_eos=False)
        found = [choice["beam_score"] for choice in answer["choices"]]
        assert found == pytest.approx(pair["scores"], abs=1e-4)


def test_echo_and_prompt_logprobs_are_about_the_decoder(server):
    answer = complete(server, "a rose", decoder_prompt="a shrub", echo=True, logprobs=1,
                      prompt_logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"].startswith("a shrub")
    assert len(choice["prompt_logprobs"]) == 6  # a, and the letters of shrub
    assert all(entry is not None for entry in choice["prompt_logprobs"])
    assert len(choice["logprobs"]["tokens"]) == 6 + 20
    assert choice["logprobs"]["token_logprobs"][0] is not None


def test_texts_have_special_tokens(server):
    ids = complete(server, "a rose")["choices"][0]["prompt_token_ids"]
    assert (ids[0], ids[-1]) == (2, 3)  # [CLS], [SEP]
    assert complete(server, "a rose", add_special_tokens=False)["choices"][0][
        "prompt_token_ids"] == ids[1:-1]


def test_bad_requests_are_refused(server, decoder):
    long = [5] * 161
    status, error = refusal(server, prompt=long)
    assert (status, error["code"]) == (400, "context_length_exceeded"), error
    assert "160" in error["message"] and "161" in error["message"]
    assert len(complete(server, long, truncate_prompt_tokens=-1)["choices"][0][
        "prompt_token_ids"]) == 160
    status, error = refusal(server, prompt=[5], decoder_prompt=[5] * 150)
    assert (status, error["code"]) == (400, "context_length_exceeded"), error
    for value in ([100000], [-1], 5, {}, [[1]]):
        status, error = refusal(server, prompt=[5], decoder_prompt=value)
        assert (status, error["param"]) == (400, "decoder_prompt"), error
    status, error = refusal(decoder, prompt=[5], decoder_prompt="a")
    assert (status, error["param"]) == (400, "decoder_prompt"), error


def test_grpc(server, protos):
    pb, services = protos
    stub = services.InferenceStub(grpc.insecure_channel(server.grpc))
    for pair in golden():
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=pair["source"]), prompt_logprobs=0)
        request.decoder_prompt_token_ids.ids.extend(pair["begin"][1:])
        request.sampling.temperature = 0
        request.sampling.max_tokens = 20
        request.sampling.ignore_eos = True
        messages = list(stub.Generate(request))
        assert [token for message in messages for token in message.token_ids] == pair["greedy"]
        assert len(messages[0].prompt_logprobs) == len(pair["begin"]) - 1
        assert messages[-1].usage.prompt_tokens == len(pair["source"]) + len(pair["begin"]) - 1
    with pytest.raises(grpc.RpcError) as error:
        stub.Score(pb.ScoreRequest(text="a"))
    assert "encoder" in error.value.details()


def test_command(folder):
    def generate(*arguments):
        return subprocess.run([binary(), "generate", "--model", folder, "--prompt", "a rose",
                               "--max-tokens", "12", *arguments],
                              capture_output=True, text=True, check=True).stdout
    assert generate() != generate("--decoder-prompt", "a shrub")
    assert generate("--decoder-prompt", "a shrub", "--echo").startswith("a shrub")


def test_the_first_token_can_be_forced(server, protos):
    def first(**more):
        return complete(server, [5, 6, 7], logprobs=0, **more)["choices"][0]
    free = first()
    forced = next(token for token in (20, 21) if token != free["token_ids"][0])
    choice = first(forced_bos_token_id=forced)
    assert choice["token_ids"][0] == forced
    assert choice["logprobs"]["token_logprobs"][0] < -0.1  # the model's own
    # What follows is what follows the same token in a prompt.
    assert choice["token_ids"][1:] == first(decoder_prompt=[forced])["token_ids"][:19]
    assert first(target_language="[MASK]")["token_ids"][0] == 4
    beams = complete(server, [5, 6, 7], forced_bos_token_id=forced, use_beam_search=True,
                     num_beams=3, n=3, max_tokens=6)
    behind = complete(server, [5, 6, 7], decoder_prompt=[forced], use_beam_search=True,
                      num_beams=3, n=3, max_tokens=5)
    for one, other in zip(beams["choices"], behind["choices"]):
        assert one["token_ids"] == [forced] + other["token_ids"]
        assert one["cumulative_logprob"] == pytest.approx(other["cumulative_logprob"], abs=1e-5)
    pb, services = protos
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), target_language="[MASK]")
    messages = list(services.InferenceStub(grpc.insecure_channel(server.grpc)).Generate(request))
    assert messages[0].token_ids[0] == 4


def test_wrong_forced_tokens_are_refused(server, decoder):
    for field, value in (("target_language", "fr"), ("target_language", "a"),
                         ("forced_bos_token_id", 100000), ("forced_bos_token_id", -1)):
        status, error = refusal(server, prompt=[5], **{field: value})
        assert (status, error["param"]) == (400, field), error
    for more in ({"decoder_prompt": "a"}, {"target_language": "[MASK]"},
                 {"structured_outputs": {"choice": ["a"]}}):
        status, error = refusal(server, prompt=[5], forced_bos_token_id=20, ignore_eos=False, **more)
        assert (status, error["param"]) == (400, "forced_bos_token_id"), error
    status, error = refusal(decoder, prompt=[5], forced_bos_token_id=20)
    assert (status, error["param"]) == (400, "forced_bos_token_id"), error


def test_the_rules_of_generation_config_are_obeyed(server, folder, tmp_path):
    free = complete(server, [5, 6, 7], ignore_eos=False, max_tokens=9)["choices"][0]["token_ids"]
    copy = tmp_path / "moa"
    shutil.copytree(folder, copy)
    rules = {"forced_bos_token_id": 20, "forced_eos_token_id": 2, "min_length": 7,
             "no_repeat_ngram_size": 1, "bad_words_ids": [[30], [31, 32]]}
    (copy / "generation_config.json").write_text(json.dumps(rules))
    ruled = start_server("--dtype", "f32", folder=copy)
    try:
        for more in ({}, {"use_beam_search": True, "num_beams": 3}):
            found = complete(ruled, [5, 6, 7], ignore_eos=False, max_tokens=9, **more)["choices"][0]
            tokens = found["token_ids"]
            assert tokens != free
            assert tokens[0] == 20 and 7 <= len(tokens) + 1
            assert len(set(tokens)) == len(tokens)
            assert len(tokens) < 9 or tokens[-1] == 2
            assert 30 not in tokens
            short = complete(ruled, [5, 6, 7], ignore_eos=False, max_tokens=3, **more)["choices"][0]
            assert short["token_ids"][0] == 20 and short["token_ids"][-1] == 2
        # The request's fields replace the model's rules.
        tokens = complete(ruled, [5, 6, 7], forced_bos_token_id=21)["choices"][0]["token_ids"]
        assert tokens[0] == 21
        tokens = complete(ruled, [5, 6, 7], decoder_prompt=[], max_tokens=9)["choices"][0][
            "token_ids"]
        assert tokens[0] == free[0]
        answer = complete(ruled, [5, 6, 7], structured_outputs={"choice": ["a", "b"]},
                          ignore_eos=False)
        assert answer["choices"][0]["text"].strip("#") in ("a", "b")
    finally:
        assert stop_server(ruled) == 0


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """A checkpoint of fairseq with a dictionary for each language, the source's the larger one."""
    out = tmp_path_factory.mktemp("pairs") / "translator"
    out.mkdir()
    for path in (FOLDER.parent / "fairseq-xmoe-mt").glob("*.pt"):
        shutil.copy(path, out)
    for language, words in (("de", 41), ("en", 33)):
        lines = [f"{language}{i} {100 - i}\n" for i in range(words)]
        (out / f"dict.{language}.txt").write_text("".join(lines))
    server = start_server("--dtype", "f32", folder=out)
    yield server
    assert stop_server(server) == 0


def test_each_language_has_its_dictionary(translator):
    answer = complete(translator, "de0 de40 en1")
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == [4, 44, 3, 2]
    words = [f"en{i - 4}" for i in choice["token_ids"] if i > 3]
    assert words and [word for word in choice["text"].split() if word != "<unk>"] == words
    assert complete(translator, [4, 44, 3, 2])["choices"][0]["token_ids"] == choice["token_ids"]
    status, error = refusal(translator, prompt=[45])
    assert (status, error["param"]) == (400, "prompt"), error
    status, error = refusal(translator, prompt=[44], decoder_prompt=[37])
    assert (status, error["param"]) == (400, "decoder_prompt"), error
    tokens = post(translator, "/tokenize", {"model": translator.name, "prompt": "de1 de2"})
    assert tokens["tokens"] == [5, 6, 2]
