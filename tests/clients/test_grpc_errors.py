"""Tests the details of errors over gRPC (google.rpc.Status) as gRPC's Python library reads them."""

import json
import signal

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

import http2
from conftest import generated, start_server, stop_server, wait_for


@pytest.fixture(scope="module")
def v2(tmp_path_factory):
    return generated(tmp_path_factory.mktemp("v2"), "inference/grpc_predict_v2")


def details(error):
    """Returns the details of an error by the names of their types, after comparing them with the
    trailers."""
    status = rpc_status.from_call(error)
    assert status is not None, error
    assert (status.code, status.message) == (error.code().value[0], error.details())
    found = {}
    for any_ in status.details:
        name = any_.type_url.rpartition(".")[2]
        assert name not in found
        found[name] = getattr(error_details_pb2, name)()
        assert any_.Unpack(found[name])
    trailers = dict(error.trailing_metadata())
    assert found["ErrorInfo"].domain == "moeserve"
    assert found["ErrorInfo"].reason == trailers["x-error-code"]
    assert found["RequestInfo"].request_id == trailers["x-request-id"]
    return found


def fails(call):
    """Returns the error of a call or of a stream."""
    with pytest.raises(grpc.RpcError) as error:
        result = call()
        if hasattr(result, "__next__"):
            list(result)
    return error.value


def serving_with_keys(tmp_path, *arguments):
    file = tmp_path / "keys.json"
    keys = [{"name": "few", "key": "secret-few", "scopes": ["generate"],
             "limits": {"requests_per_minute": 1}},
            {"name": "any", "key": "secret-any", "scopes": ["generate"]}]
    file.write_text(json.dumps({"keys": keys}))
    file.chmod(0o600)
    return start_server("--api-key-file", str(file), *arguments)


def test_invalid_fields(server, protos, v2):
    pb, rpc = protos
    with grpc.insecure_channel(server.grpc) as channel:
        stub = rpc.InferenceStub(channel)
        v2_stub = v2[1].GRPCInferenceServiceStub(channel)
        index = v2[0].RepositoryIndexRequest(repository_name="other")
        for call, reason, field in [
                (lambda: stub.Generate(pb.GenerateRequest(text="a", n=1000)), "invalid_value", "n"),
                (lambda: stub.Detokenize(pb.DetokenizeRequest(token_ids=[-1])), "invalid_value",
                 "token_ids"),
                (lambda: v2_stub.ModelInfer(v2[0].ModelInferRequest()), None, None),
                (lambda: v2_stub.RepositoryIndex(index), "invalid_value", "repository_name")]:
            error = fails(call)
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            found = details(error)
            assert "RetryInfo" not in found
            if reason is None:
                continue
            assert found["ErrorInfo"].reason == reason
            violation, = found["BadRequest"].field_violations
            assert (violation.field, violation.description) == (field, error.details())


def test_other_errors(server, protos):
    pb, rpc = protos
    with grpc.insecure_channel(server.grpc) as channel:
        stub = rpc.InferenceStub(channel)
        found = details(fails(lambda: stub.Score(pb.ScoreRequest(text="a", model="other"),
                                                 metadata=[("x-request-id", "mine")])))
        assert found["ErrorInfo"].reason == "model_not_found"
        assert found["RequestInfo"].request_id == "mine"
        assert "BadRequest" not in found
        error = fails(lambda: channel.unary_unary("/moeserve.v1.Inference/Nothing")(b""))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED
        assert details(error)["ErrorInfo"].reason == "not_found"
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        error = fails(lambda: check(b"\x0a\x05other"))
        assert error.code() == grpc.StatusCode.NOT_FOUND
        assert details(error)["ErrorInfo"].reason == "not_found"


def test_errors_of_the_frame_guard(server):
    """The library cannot be made to cause them, but it must be able to read them."""
    client = http2.Connection(server.grpc)
    answer = client.answer(client.open(b"/moeserve.v1.Inference/Tokenize",
                                       extra=[(b"grpc-encoding", b"snappy"),
                                              (b"x-request-id", b"mine")]))
    client.close()

    class Call:
        def code(self):
            return next(code for code in grpc.StatusCode
                        if code.value[0] == int(answer["grpc-status"]))

        def details(self):
            return answer["grpc-message"]

        def trailing_metadata(self):
            return [(name, http2.base64_bytes(value) if name.endswith("-bin") else value)
                    for name, value in answer.items()]

    found = details(Call())
    assert found["ErrorInfo"].reason == "unsupported_encoding"
    assert found["RequestInfo"].request_id == "mine"


def test_limits_of_keys(tmp_path, protos, v2):
    pb, rpc = protos
    server = serving_with_keys(tmp_path)
    try:
        with grpc.insecure_channel(server.grpc) as channel:
            stub = rpc.InferenceStub(channel)
            v2_stub = v2[1].GRPCInferenceServiceStub(channel)
            few = [("authorization", "Bearer secret-few")]
            assert stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=few).token_ids
            for call in [
                    lambda: stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=few),
                    lambda: stub.Generate(pb.GenerateRequest(text="a"), metadata=few),
                    lambda: v2_stub.ServerLive(v2[0].ServerLiveRequest(), metadata=few),
                    lambda: v2_stub.ModelStreamInfer(iter([]), metadata=few)]:
                error = fails(call)
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                found = details(error)
                assert found["ErrorInfo"].reason == "rate_limit_exceeded"
                seconds = int(dict(error.trailing_metadata())["retry-after"])
                assert found["RetryInfo"].retry_delay.seconds == seconds >= 1
            for call in [
                    lambda: stub.Generate(pb.GenerateRequest(text="a")),
                    lambda: v2_stub.ServerLive(v2[0].ServerLiveRequest()),
                    lambda: v2_stub.ModelStreamInfer(iter([]))]:
                error = fails(call)
                assert error.code() == grpc.StatusCode.UNAUTHENTICATED
                assert details(error)["ErrorInfo"].reason == "invalid_api_key"
    finally:
        assert stop_server(server) == 0


def test_no_memory(protos):
    """Requests that the memory for calls, 512 KiB, could never hold, and does not hold now."""
    pb, rpc = protos
    server = start_server("--request-memory", "2")
    others = []
    try:
        with grpc.insecure_channel(server.grpc, compression=grpc.Compression.Gzip) as channel:
            stub = rpc.InferenceStub(channel)

            def refused(size):
                """Returns the details of the refusal; None if the memory holds the request. Its
                model is not served, so no memory is needed for the answer."""
                error = fails(lambda: stub.Tokenize(
                    pb.TokenizeRequest(text="a" * size, model="other")))
                if error.code() == grpc.StatusCode.NOT_FOUND:
                    return None
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                return details(error)

            found = refused(450000)
            assert found["ErrorInfo"].reason == "request_too_large"
            assert "RetryInfo" not in found
            assert refused(200000) is None

            def refused_beside_unfinished():
                """An unfinished message holds almost half of the memory. The server closes its
                connection if the memory of the call before is not back yet."""
                others.append(http2.Connection(server.grpc))
                stream = others[-1].open(b"/moeserve.v1.Inference/Tokenize")
                others[-1].send_data(stream, http2.message(b"a" * 215000, length=300000))
                return wait_for(lambda: refused(200000), seconds=0.2)  # it is read meanwhile

            found = wait_for(refused_beside_unfinished)
            assert found["ErrorInfo"].reason == "out_of_memory"
            assert found["RetryInfo"].retry_delay.seconds == 1
            for other in others:
                other.close()
            assert wait_for(lambda: stub.Tokenize(pb.TokenizeRequest(text="a")).token_ids)
    finally:
        assert stop_server(server) == 0


def test_draining(protos):
    """A stream that runs when the server stops, and health checks that watch."""
    pb, rpc = protos
    server = start_server("--drain-timeout", "0.3")
    with grpc.insecure_channel(server.grpc) as channel:
        stream = rpc.InferenceStub(channel).Generate(pb.GenerateRequest(
            text="The", sampling=pb.SamplingParams(max_tokens=8000, ignore_eos=True)))
        next(stream)
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert next(watch) == b"\x08\x01"
        server.process.send_signal(signal.SIGTERM)
        assert next(watch) == b"\x08\x02"
        assert wait_for(lambda: watch.done())
        error = fails(lambda: stream)
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        found = details(error)
        assert found["ErrorInfo"].reason == "draining"
        assert found["RetryInfo"].retry_delay.seconds == 5
    assert server.process.wait(timeout=60) == 0
