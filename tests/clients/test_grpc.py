"""Tests the gRPC interface with a generated Python client."""

import json
import re
import threading

import grpc
import pytest

from conftest import start_server, stop_server, wait_for

PROMPT = "The history of the"


@pytest.fixture(scope="module")
def channel(server):
    with grpc.insecure_channel(server.grpc) as channel:
        yield channel


@pytest.fixture(scope="module")
def pb(protos):
    return protos[0]


@pytest.fixture(scope="module")
def stub(protos, channel):
    return protos[1].InferenceStub(channel)


def text_of(messages):
    return "".join(message.text for message in messages)


def test_generate(pb, stub):
    request = pb.GenerateRequest(text=PROMPT, logprobs=1,
                                 sampling=pb.SamplingParams(temperature=0, max_tokens=12))
    call = stub.Generate(request, metadata=[("x-request-id", "abc")])
    messages = list(call)
    assert dict(call.trailing_metadata())["x-request-id"] == "abc"
    last = messages[-1]
    assert last.finish_reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
    tokens = [token for message in messages for token in message.token_ids]
    assert len(tokens) == last.usage.completion_tokens
    assert [l.token_id for message in messages for l in message.logprobs] == tokens
    again = list(stub.Generate(request))
    assert text_of(again) == text_of(messages)


def test_score_matches_generate(pb, stub):
    ids = stub.Tokenize(pb.TokenizeRequest(text=PROMPT)).token_ids
    score = stub.Score(pb.ScoreRequest(token_ids=pb.TokenIds(ids=ids), top_logprobs=1))
    assert [token.token_id for token in score.tokens] == list(ids)
    assert not score.tokens[0].HasField("logprob")
    assert score.scored_tokens == len(ids) - 1
    first = next(iter(stub.Generate(pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids), prompt_logprobs=1,
        sampling=pb.SamplingParams(max_tokens=1)))))
    assert [t.logprob for t in first.prompt_logprobs] == [t.logprob for t in score.tokens]


def test_detokenize(pb, stub):
    tokens = stub.Tokenize(pb.TokenizeRequest(text=PROMPT, add_special_tokens=False,
                                              return_token_strs=True))
    assert len(tokens.token_strs) == len(tokens.token_ids)
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids)).text.strip() == PROMPT


@pytest.mark.parametrize("fields, code, api_code", [
    ({}, grpc.StatusCode.INVALID_ARGUMENT, "missing_field"),
    ({"text": "a", "model": "other"}, grpc.StatusCode.NOT_FOUND, "model_not_found"),
    ({"text": "a", "n": 1000}, grpc.StatusCode.INVALID_ARGUMENT, "invalid_value"),
])
def test_errors(pb, stub, fields, code, api_code):
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(pb.GenerateRequest(**fields)))
    assert error.value.code() == code
    assert dict(error.value.trailing_metadata())["x-error-code"] == api_code


def test_cancel_frees_everything(pb, stub, metric):
    call = stub.Generate(pb.GenerateRequest(
        text=PROMPT, sampling=pb.SamplingParams(max_tokens=4000, ignore_eos=True)))
    next(iter(call))
    call.cancel()
    assert wait_for(lambda: metric("moeserve_requests_running") == 0)
    assert metric('moeserve_kv_cache_tokens{state="used"}') == 0


def test_deadline(pb, stub, metric):
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(pb.GenerateRequest(
            text=PROMPT, n=16, sampling=pb.SamplingParams(max_tokens=8000, ignore_eos=True)),
            timeout=0.05))
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert wait_for(lambda: metric("moeserve_requests_running") == 0)


@pytest.mark.parametrize("limit", ["0", "0.5"])
def test_the_servers_own_limit_on_the_time_cuts_the_answer(protos, limit):
    pb, pb_grpc = protos
    server = start_server("--request-timeout", limit)
    try:
        with grpc.insecure_channel(server.grpc) as channel:
            tokens = 4 if limit == "0" else 2000
            messages = list(pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(
                text=PROMPT, n=1 if limit == "0" else 8, sampling=pb.SamplingParams(
                    max_tokens=tokens, ignore_eos=True))))
            ends = [m for m in messages if m.finish_reason]
            assert {m.finish_reason for m in ends} == {pb.FINISH_REASON_LENGTH}
            generated = sum(m.usage.completion_tokens for m in ends)
            assert generated == 4 if limit == "0" else 0 < generated < 16_000
    finally:
        assert stop_server(server) == 0


def test_many_streams(pb, stub):
    request = pb.GenerateRequest(text=PROMPT,
                                 sampling=pb.SamplingParams(temperature=0, max_tokens=20))
    expected = text_of(stub.Generate(request))
    texts = []
    threads = [threading.Thread(target=lambda: texts.append(text_of(stub.Generate(request))))
               for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 16


def test_model_info_and_expert_stats(pb, stub, server):
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert list(info.names) == [server.name]
    stats = stub.GetExpertStats(pb.GetExpertStatsRequest())
    assert len(stats.blocks) == info.routed_blocks
    for block in stats.blocks:
        assert len(block.counts) == block.num_experts
        assert block.prefill_rows + block.decode_rows == block.split_heads * (
            block.prefill_tokens + block.decode_tokens)


def test_health(channel):
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    for name in ("", "moeserve.v1.Inference", "model/test-model"):
        request = b"" if not name else b"\x0a" + bytes([len(name)]) + name.encode()
        assert check(request) == b"\x08\x01", name


def test_structured_output(pb, stub):
    request = pb.GenerateRequest(
        text=PROMPT, n=3, structured_output=pb.StructuredOutput(regex="[0-9]{3}-(ab|cd)"),
        sampling=pb.SamplingParams(max_tokens=20))
    texts = ["", "", ""]
    for message in stub.Generate(request):
        texts[message.index] += message.text
    assert all(re.fullmatch("[0-9]{3}-(ab|cd)", text) for text in texts)
    for output in (pb.StructuredOutput(grammar='root ::= [0-9]{3} "-" ("ab" | "cd")'),
                   pb.StructuredOutput(structural_tag=json.dumps({"format": {
                       "type": "tag", "begin": "", "end": "",
                       "content": {"type": "regex", "pattern": "[0-9]{3}-(ab|cd)"}}}))):
        request.structured_output.CopyFrom(output)
        text = "".join(message.text for message in stub.Generate(request) if message.index == 0)
        assert re.fullmatch("[0-9]{3}-(ab|cd)", text)
    request.structured_output.structural_tag = "{}"
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(request))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    request.structured_output.regex = "("
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(request))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
