"""A typed client of the gRPC interface, with chats over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, overload

import grpc
import numpy as np
from numpy.typing import NDArray

from moeserve import answers, fields
from moeserve.answers import Error, errors
from moeserve.chat_api import ChatApi
from moeserve.fields import BeamSearch, Decoder, Prompt, RoutingControl, Structured
from moeserve.results import (ChatAnswer, Completion, Entity, ExpertStatistics, Labels, Piece,
                              Routes, Word)
from moeserve.v1 import moeserve_pb2 as pb
from moeserve.v1 import moeserve_pb2_grpc as rpc

__all__ = ["Client", "Error"]


class Client:
    """Calls a server. Thread-safe. Closes its connection at the end of a `with` block.

    `address` is HOST:PORT of the server's gRPC, and `http_address` that of its HTTP, which only chats
    need (default: port 8080 of the same host, if gRPC has its default port 8081). With `ca_file`,
    connections are encrypted and the server must have a certificate of an authority in that file.
    `timeout` is in seconds for each call. Calls raise Error, and ValueError for arguments that cannot
    be sent. AsyncClient has the same methods for asyncio.
    """

    def __init__(self, address: str = "127.0.0.1:8081", *, http_address: str | None = None,
                 api_key: str | None = None, ca_file: str | os.PathLike[str] | None = None,
                 timeout: float = 600.0) -> None:
        if ca_file is None:
            self._channel = grpc.insecure_channel(address)
        else:
            with open(ca_file, "rb") as file:
                credentials = grpc.ssl_channel_credentials(file.read())
            self._channel = grpc.secure_channel(address, credentials)
        # The generated stub has no types.
        self._stub: Any = rpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._chats = ChatApi(address, http_address, api_key, ca_file, timeout)
        self._options = {"timeout": timeout,
                         "metadata": [("authorization", f"Bearer {api_key}")] if api_key else []}

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    @overload
    def generate(self, prompt: Prompt, *, model: str = ..., logprobs: bool = ...,
                 routes: bool = ..., n: None = ..., structured_output: Structured | None = ...,
                 routing_control: RoutingControl | None = ..., beam: BeamSearch | None = ...,
                 decoder: Decoder | None = ..., **sampling: Any) -> Completion: ...

    @overload
    def generate(self, prompt: Prompt, *, n: int, model: str = ..., logprobs: bool = ...,
                 routes: bool = ..., structured_output: Structured | None = ...,
                 routing_control: RoutingControl | None = ..., beam: BeamSearch | None = ...,
                 decoder: Decoder | None = ..., **sampling: Any) -> list[Completion]: ...

    def generate(self, prompt: Prompt, *, model: str = "", logprobs: bool = False,
                 routes: bool = False, n: int | None = None,
                 structured_output: Structured | None = None,
                 routing_control: RoutingControl | None = None, beam: BeamSearch | None = None,
                 decoder: Decoder | None = None, **sampling: Any) -> Completion | list[Completion]:
        """Continues a prompt, which is a text or token ids, and returns the whole answer; with `n`, a
        list of n answers.

        `sampling` has the fields of the message SamplingParams, such as max_tokens=32,
        temperature=0.0, seed=1, stop="\\n"; absent ones have the model's defaults. Where a field takes
        a list, a single value is a list of one. `structured_output` is a form that the answer must
        have: a JSON schema (dict, text or a Pydantic model), or a StructuredOutput. `routing_control`
        changes the routing, on a server with --routing-control. With `routes`, which needs a server
        with --routing-records, the answer has its routing record. With `beam`, the answers are the
        best ones that a beam search finds; there can be fewer than n. `decoder` says how an
        encoder-decoder, whose source the prompt is, begins.
        """
        request = fields.generate_request(prompt, sampling, model=model, logprobs=logprobs,
                                          routes=routes, n=1 if n is None else n,
                                          structured_output=structured_output,
                                          routing_control=routing_control, beam=beam,
                                          decoder=decoder)
        collector = answers.Collector()
        for message in self._generate(request):
            collector.add(message)
        found = collector.completions(count=n or 1, logprobs=logprobs, routes=routes,
                                      fewer=beam is not None)
        return found[0] if n is None else found

    def stream(self, prompt: Prompt, *, model: str = "", n: int = 1,
               structured_output: Structured | None = None,
               routing_control: RoutingControl | None = None, decoder: Decoder | None = None,
               **sampling: Any) -> Iterator[Piece]:
        """Like generate(), but yields the answers piece by piece as they are generated; `index` of a
        piece says to which of the n answers it belongs. Closing the iterator ends the request."""
        request = fields.generate_request(prompt, sampling, model=model, n=n,
                                          structured_output=structured_output,
                                          routing_control=routing_control, decoder=decoder)
        for message in self._generate(request):
            yield answers.piece(message)

    @overload
    def chat(self, messages: str | Sequence[Mapping[str, Any]], *, model: str = ...,
             tools: Sequence[Mapping[str, Any]] | None = ..., routes: bool = ..., n: None = ...,
             structured_output: Structured | None = ...,
             routing_control: RoutingControl | None = ..., **options: Any) -> ChatAnswer: ...

    @overload
    def chat(self, messages: str | Sequence[Mapping[str, Any]], *, n: int, model: str = ...,
             tools: Sequence[Mapping[str, Any]] | None = ..., routes: bool = ...,
             structured_output: Structured | None = ...,
             routing_control: RoutingControl | None = ...,
             **options: Any) -> list[ChatAnswer]: ...

    def chat(self, messages: str | Sequence[Mapping[str, Any]], *, model: str = "",
             tools: Sequence[Mapping[str, Any]] | None = None, routes: bool = False,
             n: int | None = None, structured_output: Structured | None = None,
             routing_control: RoutingControl | None = None,
             **options: Any) -> ChatAnswer | list[ChatAnswer]:
        """Answers a chat, over HTTP; with `n`, returns a list of n answers.

        `messages` are those of OpenAI's interface, or the text of one message of the user. `options`
        are further fields of /v1/chat/completions, such as max_tokens=32, temperature=0.0,
        tool_choice="required". The rest is as for generate().
        """
        body = fields.chat_body(messages, options, model=model, routes=routes, n=n, tools=tools,
                                structured_output=structured_output,
                                routing_control=routing_control)
        found = answers.chat_answers(self._chats.post(body))
        return found[0] if n is None else found

    def stream_chat(self, messages: str | Sequence[Mapping[str, Any]], *, model: str = "",
                    n: int | None = None, structured_output: Structured | None = None,
                    routing_control: RoutingControl | None = None,
                    **options: Any) -> Iterator[Piece]:
        """Like chat(), but yields text and reasoning piece by piece. Closing the iterator ends the
        request. Pieces have no calls of tools and no token ids."""
        body = fields.chat_body(messages, options, model=model, n=n, stream=True,
                                structured_output=structured_output,
                                routing_control=routing_control)
        yield from self._chats.stream(body)

    @overload
    def score(self, text: Prompt, *, model: str = ...,
              routes: Literal[False] = ...) -> NDArray[np.float32]: ...

    @overload
    def score(self, text: Prompt, *, model: str = ...,
              routes: Literal[True]) -> tuple[NDArray[np.float32], Routes]: ...

    def score(self, text: Prompt, *, model: str = "", routes: bool = False) -> (
            NDArray[np.float32] | tuple[NDArray[np.float32], Routes]):
        """Returns [tokens]: the log-probability of each token of a text; NaN for the first one if
        nothing precedes it. With `routes`, which needs a server with --routing-records, also returns
        the routes of the tokens."""
        if routes:
            collector = answers.Collector()
            for message in self._generate(fields.score_request(text, model)):
                collector.add(message)
            return collector.scores()
        request = pb.ScoreRequest(model=model)
        fields.set_prompt(request, text)
        with errors():
            answer = self._stub.Score(request, **self._options)
        return answers.logprob_array(answer.tokens)

    def embed(self, texts: str | Sequence[Prompt], *, model: str = "",
              dimensions: int | None = None, prompt_name: str | None = None,
              normalize: bool | None = None) -> NDArray[np.float32]:
        """Returns [texts, width]: the vector of each text. `prompt_name` names a text of the model that
        goes before each text, such as "query"; `dimensions` cuts the vectors. Vectors are normalized
        as the model says, unless `normalize` says otherwise."""
        request = fields.encode_request(texts, pb.ENCODE_TASK_EMBED, model=model,
                                        dimensions=dimensions, prompt_name=prompt_name,
                                        use_activation=normalize)
        with errors():
            answer = self._stub.Encode(request, **self._options)
        return answers.vectors(answer)

    def classify(self, texts: str | Sequence[Prompt], *, pairs: Sequence[str] | None = None,
                 model: str = "") -> list[Labels]:
        """Returns the scores of the labels of each text, or of each pair of a text and one of `pairs`,
        by a model that classifies texts."""
        request = fields.encode_request(texts, pb.ENCODE_TASK_CLASSIFY, model=model, pairs=pairs)
        with errors():
            answer = self._stub.Encode(request, **self._options)
        return answers.labels(answer)

    def entities(self, texts: str | Sequence[Prompt], *, aggregation: str = "default",
                 model: str = "") -> list[list[Entity]]:
        """Returns the named parts of each text, by a model that labels tokens. `aggregation` is "none",
        "simple", "viterbi" or the default of the model's labels."""
        request = fields.encode_request(texts, pb.ENCODE_TASK_TOKEN_CLASSIFY, model=model,
                                        aggregation=aggregation)
        with errors():
            answer = self._stub.Encode(request, **self._options)
        return answers.entities(answer)

    def tokenize(self, text: str, *, model: str = "") -> NDArray[np.int32]:
        """Returns [n]: the token ids of a text, as generate() encodes it."""
        request = pb.TokenizeRequest(model=model, text=text)
        with errors():
            answer = self._stub.Tokenize(request, **self._options)
        return np.asarray(answer.token_ids, dtype=np.int32)

    def detokenize(self, token_ids: Sequence[int] | NDArray[np.int32], *, model: str = "") -> str:
        request = pb.DetokenizeRequest(model=model, token_ids=[int(i) for i in token_ids])
        with errors():
            answer = self._stub.Detokenize(request, **self._options)
        return str(answer.text)

    def words(self, token_ids: Sequence[int] | NDArray[np.int32], *, model: str = "") -> list[Word]:
        """Returns the words of which tokens are parts, in order; for labels, and for the sums of
        Routes.word_counts()."""
        return answers.words([self.detokenize(token_ids[:end + 1], model=model)
                              for end in range(len(token_ids))])

    def statistics(self, *, model: str = "", activation_threshold: float = 0.0,
                   stack: str = "") -> ExpertStatistics:
        """Returns the statistics of the experts since the server started. `stack` is "encoder" or
        "decoder" (default) of an encoder-decoder."""
        request = pb.GetExpertStatsRequest(model=model, stack=stack,
                                           activation_threshold=activation_threshold)
        with errors():
            answer = self._stub.GetExpertStats(request, **self._options)
        return answers.statistics(answer)

    def _generate(self, request: Any) -> Iterator[Any]:
        call = self._stub.Generate(request, **self._options)
        try:
            with errors():
                yield from call
        finally:
            call.cancel()
