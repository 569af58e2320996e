"""The client for asyncio. It has the methods of Client, with the same arguments and results."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, overload

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from moeserve import answers, fields
from moeserve.answers import errors
from moeserve.chat_api import ChatApi
from moeserve.fields import BeamSearch, Decoder, Prompt, RoutingControl, Structured
from moeserve.results import (ChatAnswer, Completion, Entity, ExpertStatistics, Labels, Piece,
                              Routes, Word)
from moeserve.v1 import moeserve_pb2 as pb
from moeserve.v1 import moeserve_pb2_grpc as rpc


async def in_thread(pieces: Generator[Piece, None, None]) -> AsyncIterator[Piece]:
    """Yields what a generator yields that waits. It runs in a thread; when nobody listens any more,
    it is closed after its next piece."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
    done = threading.Event()

    def run() -> None:
        last: BaseException | None = None
        try:
            for piece in pieces:
                if done.is_set():
                    break
                loop.call_soon_threadsafe(queue.put_nowait, piece)
        except BaseException as error:  # the listener raises it
            last = error
        finally:
            pieces.close()
        if not done.is_set():
            loop.call_soon_threadsafe(queue.put_nowait, last)

    running = loop.run_in_executor(None, run)
    try:
        while isinstance(item := await queue.get(), Piece):
            yield item
        if item is not None:
            raise item
        await running
    finally:
        done.set()


class AsyncClient:
    """Client for asyncio, made in the event loop that uses it. Closes its connection at the end of an
    `async with` block. Cancelling a task, or closing an iterator (aclose()), ends its request; that of
    chat() runs on, and that of stream_chat() to its next piece."""

    def __init__(self, address: str = "127.0.0.1:8081", *, http_address: str | None = None,
                 api_key: str | None = None, ca_file: str | os.PathLike[str] | None = None,
                 timeout: float = 600.0) -> None:
        if ca_file is None:
            self._channel = grpc.aio.insecure_channel(address)
        else:
            with open(ca_file, "rb") as file:
                credentials = grpc.ssl_channel_credentials(file.read())
            self._channel = grpc.aio.secure_channel(address, credentials)
        # The generated stub has no types.
        self._stub: Any = rpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._chats = ChatApi(address, http_address, api_key, ca_file, timeout)
        self._options = {"timeout": timeout,
                         "metadata": [("authorization", f"Bearer {api_key}")] if api_key else []}

    async def close(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                       trace: TracebackType | None) -> None:
        await self.close()

    @overload
    async def generate(self, prompt: Prompt, *, model: str = ..., logprobs: bool = ...,
                       routes: bool = ..., n: None = ...,
                       structured_output: Structured | None = ...,
                       routing_control: RoutingControl | None = ...,
                       beam: BeamSearch | None = ..., decoder: Decoder | None = ...,
                       **sampling: Any) -> Completion: ...

    @overload
    async def generate(self, prompt: Prompt, *, n: int, model: str = ..., logprobs: bool = ...,
                       routes: bool = ..., structured_output: Structured | None = ...,
                       routing_control: RoutingControl | None = ...,
                       beam: BeamSearch | None = ..., decoder: Decoder | None = ...,
                       **sampling: Any) -> list[Completion]: ...

    async def generate(self, prompt: Prompt, *, model: str = "", logprobs: bool = False,
                       routes: bool = False, n: int | None = None,
                       structured_output: Structured | None = None,
                       routing_control: RoutingControl | None = None,
                       beam: BeamSearch | None = None, decoder: Decoder | None = None,
                       **sampling: Any) -> Completion | list[Completion]:
        request = fields.generate_request(prompt, sampling, model=model, logprobs=logprobs,
                                          routes=routes, n=1 if n is None else n,
                                          structured_output=structured_output,
                                          routing_control=routing_control, beam=beam,
                                          decoder=decoder)
        collector = answers.Collector()
        async for message in self._generate(request):
            collector.add(message)
        found = collector.completions(count=n or 1, logprobs=logprobs, routes=routes,
                                      fewer=beam is not None)
        return found[0] if n is None else found

    async def stream(self, prompt: Prompt, *, model: str = "", n: int = 1,
                     structured_output: Structured | None = None,
                     routing_control: RoutingControl | None = None, decoder: Decoder | None = None,
                     **sampling: Any) -> AsyncIterator[Piece]:
        request = fields.generate_request(prompt, sampling, model=model, n=n,
                                          structured_output=structured_output,
                                          routing_control=routing_control, decoder=decoder)
        async for message in self._generate(request):
            yield answers.piece(message)

    @overload
    async def chat(self, messages: str | Sequence[Mapping[str, Any]], *, model: str = ...,
                   tools: Sequence[Mapping[str, Any]] | None = ..., routes: bool = ...,
                   n: None = ...,
                   structured_output: Structured | None = ...,
                   routing_control: RoutingControl | None = ..., **options: Any) -> ChatAnswer: ...

    @overload
    async def chat(self, messages: str | Sequence[Mapping[str, Any]], *, n: int, model: str = ...,
                   tools: Sequence[Mapping[str, Any]] | None = ..., routes: bool = ...,
                   structured_output: Structured | None = ...,
                   routing_control: RoutingControl | None = ...,
                   **options: Any) -> list[ChatAnswer]: ...

    async def chat(self, messages: str | Sequence[Mapping[str, Any]], *, model: str = "",
                   tools: Sequence[Mapping[str, Any]] | None = None, routes: bool = False,
                   n: int | None = None, structured_output: Structured | None = None,
                   routing_control: RoutingControl | None = None,
                   **options: Any) -> ChatAnswer | list[ChatAnswer]:
        body = fields.chat_body(messages, options, model=model, routes=routes, n=n, tools=tools,
                                structured_output=structured_output,
                                routing_control=routing_control)
        found = answers.chat_answers(await asyncio.to_thread(self._chats.post, body))
        return found[0] if n is None else found

    async def stream_chat(self, messages: str | Sequence[Mapping[str, Any]], *, model: str = "",
                          n: int | None = None, structured_output: Structured | None = None,
                          routing_control: RoutingControl | None = None,
                          **options: Any) -> AsyncIterator[Piece]:
        body = fields.chat_body(messages, options, model=model, n=n, stream=True,
                                structured_output=structured_output,
                                routing_control=routing_control)
        async for piece in in_thread(self._chats.stream(body)):
            yield piece

    @overload
    async def score(self, text: Prompt, *, model: str = ...,
                    routes: Literal[False] = ...) -> NDArray[np.float32]: ...

    @overload
    async def score(self, text: Prompt, *, model: str = ...,
                    routes: Literal[True]) -> tuple[NDArray[np.float32], Routes]: ...

    async def score(self, text: Prompt, *, model: str = "", routes: bool = False) -> (
            NDArray[np.float32] | tuple[NDArray[np.float32], Routes]):
        if routes:
            collector = answers.Collector()
            async for message in self._generate(fields.score_request(text, model)):
                collector.add(message)
            return collector.scores()
        request = pb.ScoreRequest(model=model)
        fields.set_prompt(request, text)
        with errors():
            answer = await self._stub.Score(request, **self._options)
        return answers.logprob_array(answer.tokens)

    async def embed(self, texts: str | Sequence[Prompt], *, model: str = "",
                    dimensions: int | None = None, prompt_name: str | None = None,
                    normalize: bool | None = None) -> NDArray[np.float32]:
        request = fields.encode_request(texts, pb.ENCODE_TASK_EMBED, model=model,
                                        dimensions=dimensions, prompt_name=prompt_name,
                                        use_activation=normalize)
        with errors():
            answer = await self._stub.Encode(request, **self._options)
        return answers.vectors(answer)

    async def classify(self, texts: str | Sequence[Prompt], *, pairs: Sequence[str] | None = None,
                       model: str = "") -> list[Labels]:
        request = fields.encode_request(texts, pb.ENCODE_TASK_CLASSIFY, model=model, pairs=pairs)
        with errors():
            answer = await self._stub.Encode(request, **self._options)
        return answers.labels(answer)

    async def entities(self, texts: str | Sequence[Prompt], *, aggregation: str = "default",
                       model: str = "") -> list[list[Entity]]:
        request = fields.encode_request(texts, pb.ENCODE_TASK_TOKEN_CLASSIFY, model=model,
                                        aggregation=aggregation)
        with errors():
            answer = await self._stub.Encode(request, **self._options)
        return answers.entities(answer)

    async def tokenize(self, text: str, *, model: str = "") -> NDArray[np.int32]:
        request = pb.TokenizeRequest(model=model, text=text)
        with errors():
            answer = await self._stub.Tokenize(request, **self._options)
        return np.asarray(answer.token_ids, dtype=np.int32)

    async def detokenize(self, token_ids: Sequence[int] | NDArray[np.int32], *,
                         model: str = "") -> str:
        request = pb.DetokenizeRequest(model=model, token_ids=[int(i) for i in token_ids])
        with errors():
            answer = await self._stub.Detokenize(request, **self._options)
        return str(answer.text)

    async def words(self, token_ids: Sequence[int] | NDArray[np.int32], *,
                    model: str = "") -> list[Word]:
        prefixes = [await self.detokenize(token_ids[:end + 1], model=model)
                    for end in range(len(token_ids))]
        return answers.words(prefixes)

    async def statistics(self, *, model: str = "", activation_threshold: float = 0.0,
                         stack: str = "") -> ExpertStatistics:
        request = pb.GetExpertStatsRequest(model=model, stack=stack,
                                           activation_threshold=activation_threshold)
        with errors():
            answer = await self._stub.GetExpertStats(request, **self._options)
        return answers.statistics(answer)

    async def _generate(self, request: Any) -> AsyncIterator[Any]:
        call = self._stub.Generate(request, **self._options)
        try:
            with errors():
                async for message in call:
                    yield message
        finally:
            call.cancel()
