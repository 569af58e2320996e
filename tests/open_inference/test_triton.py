"""Runs Triton's clients against a server."""

import queue

import numpy as np
import pytest

from conftest import TEXTS, decoded


def inputs(module, texts=TEXTS, **binary):
    text = module.InferInput("text_input", [len(texts)], "BYTES")
    text.set_data_from_numpy(np.array([t.encode() for t in texts], dtype=object), **binary)
    tokens = module.InferInput("max_tokens", [1], "INT32")
    tokens.set_data_from_numpy(np.array([8], dtype=np.int32), **binary)
    return [text, tokens]


def test_triton_over_http(server, answers):
    import tritonclient.http as triton
    from tritonclient.utils import InferenceServerException

    with triton.InferenceServerClient(server.http) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready(server.name)
        assert client.get_server_metadata()["name"] == "moeserve"
        assert client.get_model_metadata(server.name)["outputs"][0]["name"] == "text_output"
        assert client.get_model_repository_index()[0]["state"] == "READY"
        for binary_in in (True, False):
            for binary_out in (True, False):
                result = client.infer(
                    server.name, inputs(triton, binary_data=binary_in), request_id="7",
                    outputs=[triton.InferRequestedOutput("text_output", binary_data=binary_out)],
                    parameters={"temperature": 0}, timeout=60_000_000)
                assert decoded(result.as_numpy("text_output")) == answers
                assert result.get_response()["id"] == "7"
        result = client.infer(server.name, inputs(triton), parameters={"temperature": 0})
        assert result.as_numpy("num_output_tokens").tolist() == [8, 8]
        for name, given in (("none", inputs(triton)), (server.name, inputs(triton)[1:])):
            with pytest.raises(InferenceServerException) as error:
                client.infer(name, given)
            assert error.value.message()


def test_triton_over_grpc(server, answers):
    import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException

    with triton.InferenceServerClient(server.grpc) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready(server.name)
        assert client.get_model_metadata(server.name).platform == "moeserve"
        assert client.get_model_repository_index().models[0].state == "READY"
        result = client.infer(server.name, inputs(triton), parameters={"temperature": 0.0})
        assert decoded(result.as_numpy("text_output")) == answers
        with pytest.raises(InferenceServerException) as error:
            client.infer("none", inputs(triton))
        assert error.value.status() == "StatusCode.NOT_FOUND"


def test_triton_streams(server, answers):
    import tritonclient.grpc as triton

    results = queue.Queue()
    with triton.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        for i in range(100):
            stream = triton.InferInput("stream", [1], "BOOL")
            stream.set_data_from_numpy(np.array([True]))
            client.async_stream_infer(server.name, inputs(triton, [TEXTS[i % 2]]) + [stream],
                                      request_id=str(i), parameters={"temperature": 0.0})
        client.async_stream_infer(server.name, inputs(triton)[1:], request_id="bad")
        texts, ended, errors = {}, 0, 0
        while ended + errors < 101:
            result, error = results.get(timeout=60)
            if error is not None:
                errors += 1
                continue
            response = result.get_response()
            piece = decoded(result.as_numpy("text_output"))[0]
            texts[response.id] = texts.get(response.id, "") + piece
            ended += response.parameters["triton_final_response"].bool_param
        client.stop_stream()
    assert errors == 1
    assert texts == {str(i): answers[i % 2][len(TEXTS[i % 2]):] for i in range(100)}


def test_triton_loads_and_unloads(server):
    import tritonclient.grpc
    import tritonclient.http
    from tritonclient.utils import InferenceServerException

    for module, address in ((tritonclient.http, server.http), (tritonclient.grpc, server.grpc)):
        with module.InferenceServerClient(address) as client:
            client.load_model(server.name)  # replaces the version that is served
            assert client.is_model_ready(server.name)
            with pytest.raises(InferenceServerException):
                client.load_model("none")
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        assert client.get_model_metadata(server.name).versions == ["3"]
