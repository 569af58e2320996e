"""llama-index in its default modes."""

import pytest

pytest.importorskip("llama_index.llms.openai_like")

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from shapes import PROMPT, City, weather

CHAT = [ChatMessage(role="user", content=PROMPT)]


@pytest.fixture
def model(base_url, server):
    return OpenAILike(model=server.name, api_base=base_url, api_key="unused", is_chat_model=True,
                      is_function_calling_model=True, max_tokens=300, max_retries=0)


def test_text(model, base_url, server):
    assert model.chat(CHAT).message.content
    assert "".join(piece.delta or "" for piece in model.stream_chat(CHAT))
    assert model.complete(PROMPT).text
    plain = OpenAILike(model=server.name, api_base=base_url, api_key="unused", max_tokens=12)
    assert plain.complete(PROMPT).text
    assert "".join(piece.delta for piece in plain.stream_complete(PROMPT))


def test_tools(model):
    tool = FunctionTool.from_defaults(weather)
    answer = model.chat_with_tools([tool], PROMPT, tool_required=True)
    calls = model.get_tool_calls_from_response(answer)
    assert calls and all(call.tool_name == "weather" for call in calls)
    *_, last = model.stream_chat_with_tools([tool], PROMPT, tool_required=True)
    assert model.get_tool_calls_from_response(last)
    assert model.predict_and_call([tool], PROMPT, tool_required=True).response


def test_structured(model, base_url, server):
    assert isinstance(model.as_structured_llm(City).complete(PROMPT).raw, City)
    assert isinstance(model.as_structured_llm(City).chat(CHAT).raw, City)
    # Here the model may write text instead of a call, so nothing need be filled in.
    *_, last = model.as_structured_llm(City).stream_chat(CHAT)
    assert set(City.model_fields) <= set(type(last.raw).model_fields)
    native = OpenAILike(model=server.name, api_base=base_url, api_key="unused", is_chat_model=True,
                        should_use_structured_outputs=True, max_tokens=300)
    assert isinstance(native.as_structured_llm(City).complete(PROMPT).raw, City)
