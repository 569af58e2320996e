"""Runs the clients of KServe's SDK against a server. Must not run in one process with the tests of
Triton's clients, because both register the protocol's messages."""

import asyncio

import numpy as np
from kserve import (InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest,
                    RESTConfig)

from conftest import TEXTS, decoded


def test_http_and_grpc(server, answers):
    def request(binary):
        text = InferInput("text_input", [len(TEXTS)], "BYTES")
        text.set_data_from_numpy(np.array(TEXTS, dtype=object), binary_data=binary)
        return InferRequest(server.name, [text], request_id="k",
                            parameters={"max_tokens": 8, "temperature": 0})

    async def run():
        rest = InferenceRESTClient(RESTConfig(protocol="v2"))
        assert await rest.is_server_live(server.url)
        assert await rest.is_server_ready(server.url)
        assert await rest.is_model_ready(server.url, server.name)
        for binary in (True, False):
            response = await rest.infer(server.url, request(binary), model_name=server.name)
            assert response.id == "k"
            assert decoded(response.outputs[0].data) == answers
        client = InferenceGRPCClient(server.grpc)
        assert await client.is_server_live() and await client.is_server_ready()
        assert await client.is_model_ready(server.name)
        response = await client.infer(request(True))
        assert decoded(response.outputs[0].as_numpy()) == answers

    asyncio.run(run())
