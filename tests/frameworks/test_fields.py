"""The newest clients know no field of a request that the server does not know."""

import importlib
import json
import typing
import urllib.request

import pytest

# Each route with the types of its requests in the clients.
TYPES = {
    "/v1/chat/completions": ["openai.types.chat.completion_create_params:CompletionCreateParamsStreaming"],
    "/v1/completions": ["openai.types.completion_create_params:CompletionCreateParamsStreaming"],
    "/v1/responses": ["openai.types.responses.response_create_params:ResponseCreateParamsStreaming",
                      "openai.types.responses.input_token_count_params:InputTokenCountParams"],
    "/v1/messages": ["anthropic.types.message_create_params:MessageCreateParamsStreaming",
                     "anthropic.types.beta.message_create_params:MessageCreateParamsStreaming"],
    "/v1/messages/count_tokens": [
        "anthropic.types.message_count_tokens_params:MessageCountTokensParams",
        "anthropic.types.beta.message_count_tokens_params:MessageCountTokensParams"],
    "/api/chat": ["ollama._types:ChatRequest"],
    "/api/generate": ["ollama._types:GenerateRequest"],
}


@pytest.mark.parametrize("route", TYPES)
def test_every_field_is_known(server, route):
    with urllib.request.urlopen(f"{server.url}/openapi.json") as answer:
        table = json.load(answer)["x-request-fields"]
    unknown, found = set(), 0
    for name in TYPES[route]:
        module, _, kind = name.partition(":")
        package = pytest.importorskip(module.split(".")[0])
        fields = set(typing.get_type_hints(getattr(importlib.import_module(module), kind)))
        fields = {field for field in fields if not field.startswith(("_", "model_config"))}
        found += len(fields)
        unknown |= fields - set(table)
    assert found > 5 and not unknown, (package.__name__, unknown)
