"""Tests the Open Inference Protocol, version 2, over gRPC. tests/open_inference has the tests with
the clients of Triton and KServe."""

import queue
import signal
import struct
import urllib.request

import grpc
import pytest

from conftest import generated, model, post, start_server, stop_server, wait_for


@pytest.fixture(scope="session")
def v2(tmp_path_factory):
    """Returns the generated modules of grpc_predict_v2.proto."""
    return generated(tmp_path_factory.mktemp("v2"), "inference/grpc_predict_v2")


@pytest.fixture
def stub(server, v2):
    with grpc.insecure_channel(server.grpc) as channel:
        yield v2[1].GRPCInferenceServiceStub(channel)


def infer_request(pb, texts, id="", stream=None, **parameters):
    """Returns a ModelInferRequest with greedy sampling."""
    request = pb.ModelInferRequest(id=id)
    request.parameters["temperature"].double_param = 0
    for name, value in parameters.items():
        if isinstance(value, bool):
            request.parameters[name].bool_param = value
        else:
            request.parameters[name].int64_param = value
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)])
    text.contents.bytes_contents.extend(text.encode() for text in texts)
    if stream is not None:
        flag = request.inputs.add(name="stream", datatype="BOOL", shape=[1])
        flag.contents.bool_contents.append(stream)
    return request


def output(response, name):
    tensor = next(tensor for tensor in response.outputs if tensor.name == name)
    if tensor.datatype == "BYTES":
        return [text.decode() for text in tensor.contents.bytes_contents]
    return list(tensor.contents.uint_contents)


def reference(server, text, max_tokens):
    body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0}
    return post(server, "/v1/completions", body)["choices"][0]["text"]


def test_describes_the_server_and_its_model(server, stub, v2):
    pb, _ = v2
    assert stub.ServerLive(pb.ServerLiveRequest()).live
    assert stub.ServerReady(pb.ServerReadyRequest()).ready
    assert stub.ModelReady(pb.ModelReadyRequest(name=server.name)).ready
    assert not stub.ModelReady(pb.ModelReadyRequest(name=server.name, version="9")).ready
    assert stub.ServerMetadata(pb.ServerMetadataRequest()).name == "moeserve"
    metadata = stub.ModelMetadata(pb.ModelMetadataRequest(name=server.name))
    assert [tensor.name for tensor in metadata.inputs][0] == "text_input"
    assert [tensor.name for tensor in metadata.outputs][0] == "text_output"
    index = stub.RepositoryIndex(pb.RepositoryIndexRequest())
    assert [(entry.name, entry.state) for entry in index.models] == [(server.name, "READY")]


def test_answers_like_completions(server, stub, v2):
    pb, _ = v2
    texts = ["The", "Once upon a time"]
    response = stub.ModelInfer(infer_request(pb, texts, id="7", max_tokens=6))
    assert (response.model_name, response.model_version, response.id) == (server.name, "1", "7")
    assert output(response, "text_output") == [t + reference(server, t, 6) for t in texts]
    assert output(response, "finish_reason") == ["length", "length"]
    assert output(response, "num_output_tokens") == [6, 6]


def test_elements_as_bytes(server, stub, v2):
    pb, _ = v2
    request = infer_request(pb, ["The"], max_tokens=6)
    request.inputs[0].ClearField("contents")
    request.raw_input_contents.append(struct.pack("<I", 3) + b"The")
    response = stub.ModelInfer(request)
    text = ("The" + reference(server, "The", 6)).encode()
    assert response.raw_output_contents[0] == struct.pack("<I", len(text)) + text
    assert not response.outputs[0].contents.bytes_contents


@pytest.mark.parametrize("change, code", [
    (lambda r: r.inputs.pop(), "INVALID_ARGUMENT"),
    (lambda r: r.inputs.add(name="max_tokens", datatype="INT32", shape=[2]), "INVALID_ARGUMENT"),
    (lambda r: r.inputs.add(name="x", datatype="FP16", shape=[0]), "INVALID_ARGUMENT"),
    (lambda r: r.inputs[0].shape.append(1 << 40), "INVALID_ARGUMENT"),
    (lambda r: r.raw_input_contents.append(b"x"), "INVALID_ARGUMENT"),
    (lambda r: r.inputs[0].contents.bytes_contents.__setitem__(0, b"\xff"), "INVALID_ARGUMENT"),
    (lambda r: setattr(r, "model_name", "other"), "NOT_FOUND"),
    (lambda r: setattr(r, "model_version", "9"), "NOT_FOUND"),
    (lambda r: r.outputs.add(name="other"), "INVALID_ARGUMENT"),
    (lambda r: r.parameters["sequence_id"].__setattr__("int64_param", 5), "INVALID_ARGUMENT"),
    (lambda r: r.parameters["max_tokens"].Clear(), "INVALID_ARGUMENT"),
])
def test_refuses_bad_requests(stub, v2, change, code):
    request = infer_request(v2[0], ["The"])
    change(request)
    with pytest.raises(grpc.RpcError) as error:
        stub.ModelInfer(request)
    assert error.value.code().name == code
    assert error.value.details()


LONG = "n" * (2 << 20)


@pytest.mark.parametrize("change", [
    lambda r: setattr(r.inputs[0], "name", LONG),
    lambda r: r.inputs.add(name=LONG, datatype="INT32", shape=[2]),
    lambda r: setattr(r.inputs[0], "datatype", LONG),
    lambda r: r.outputs.add(name=LONG),
    lambda r: setattr(r, "model_name", LONG),
    lambda r: setattr(r, "model_version", LONG),
])
def test_errors_quote_a_part_of_long_names(stub, v2, change):
    """The error travels in trailers, which clients refuse if they are long."""
    request = infer_request(v2[0], ["The"])
    change(request)
    with pytest.raises(grpc.RpcError) as error:
        stub.ModelInfer(request)
    assert error.value.code().name in ("INVALID_ARGUMENT", "NOT_FOUND"), error.value.code()
    trailers = sum(len(k) + len(v) for k, v in error.value.trailing_metadata())
    assert 10 < len(error.value.details()) + trailers < 6000


def test_requests_of_a_stream_run_side_by_side(server, stub, v2):
    pb, _ = v2
    count = 150  # more than run at a time
    requests = [infer_request(pb, [f"Number {i % 5}"], id=str(i), stream=i % 2 == 0, max_tokens=12)
                for i in range(count)]
    requests.insert(20, infer_request(pb, [], id="bad"))
    texts, final, errors = {}, set(), []
    for message in stub.ModelStreamInfer(iter(requests)):
        response = message.infer_response
        if message.error_message:
            errors.append((response.id, message.error_message))
            continue
        texts[response.id] = texts.get(response.id, "") + output(response, "text_output")[0]
        if response.parameters["triton_final_response"].bool_param or int(response.id) % 2:
            final.add(response.id)
    assert [id for id, _ in errors] == ["bad"] and "text_input" in errors[0][1]
    assert final == {str(i) for i in range(count)}
    answers = [reference(server, f"Number {i}", 12) for i in range(5)]
    for i in range(count):
        prompt = "" if i % 2 == 0 else f"Number {i % 5}"
        assert texts[str(i)] == prompt + answers[i % 5]


def test_a_cancelled_stream_cancels_its_requests(stub, v2, metric):
    pb, _ = v2
    requests = queue.Queue()
    call = stub.ModelStreamInfer(iter(requests.get, None))
    for i in range(3):
        requests.put(infer_request(pb, ["The"], id=str(i), stream=True, max_tokens=8000,
                                   ignore_eos=True))
    assert wait_for(lambda: metric("moeserve_requests_running") == 3)
    call.cancel()
    requests.put(None)
    assert wait_for(lambda: metric("moeserve_requests_running") == 0)


def test_draining_ends_idle_streams_and_finishes_requests(v2):
    pb, rpc = v2
    server = start_server()
    with grpc.insecure_channel(server.grpc) as channel:
        stub = rpc.GRPCInferenceServiceStub(channel)
        requests = queue.Queue()
        idle = stub.ModelStreamInfer(iter(queue.Queue().get, None))
        busy = stub.ModelStreamInfer(iter(requests.get, None))
        requests.put(infer_request(pb, ["The"], stream=True, max_tokens=300,
                                   ignore_eos=True))
        first = next(busy)
        server.process.send_signal(signal.SIGTERM)
        rest = []
        with pytest.raises(grpc.RpcError) as error:
            for message in busy:
                rest.append(message)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        last = rest[-1].infer_response
        assert last.parameters["triton_final_response"].bool_param
        assert output(last, "num_output_tokens") == [300]
        assert not first.error_message
        with pytest.raises(grpc.RpcError) as error:
            next(idle)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        requests.put(None)
        # The whole grace is 30 seconds.
        assert server.process.wait(timeout=15) == 0


def test_loads_and_unloads_models(v2, tmp_path):
    pb, rpc = v2
    (tmp_path / "second").symlink_to(model().resolve())
    server = start_server("--models-folder", tmp_path)
    with grpc.insecure_channel(server.grpc) as channel:
        stub = rpc.GRPCInferenceServiceStub(channel)
        request = pb.RepositoryModelLoadRequest(model_name="third")
        request.parameters["path"].string_param = "second"
        assert stub.RepositoryModelLoad(request).is_loaded
        # KServe's clients send the name in the first field.
        assert stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(repository_name="second"))
        states = {m.name: m.state for m in
                  stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True)).models}
        assert states == {server.name: "READY", "second": "READY", "third": "READY"}
        assert stub.RepositoryModelUnload(
            pb.RepositoryModelUnloadRequest(model_name="third")).is_unloaded
        assert not any(m.name == "third" for m in
                       stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True)).models)
        for name in ("../second", "none"):
            with pytest.raises(grpc.RpcError):
                stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name))
        for action in ("load", "unload"):
            url = f"{server.url}/v2/repository/models/third/{action}"
            body = b'{"parameters": {"path": "second"}}' if action == "load" else b""
            assert urllib.request.urlopen(urllib.request.Request(url, body, method="POST"),
                                          timeout=30).status == 200
    assert stop_server(server) == 0
