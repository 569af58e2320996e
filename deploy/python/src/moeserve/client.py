"""A typed client of the gRPC interface."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from moeserve.results import BlockStatistics, Completion, ExpertStatistics, Piece, RouteBlock, Routes
from moeserve.v1 import moeserve_pb2 as pb
from moeserve.v1 import moeserve_pb2_grpc as rpc

_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class Error(Exception):
    """A call failed. `code` is the error code of the API, such as "context_length_exceeded", or the
    name of the gRPC status."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Client:
    """Calls a server. Thread-safe. Closes its connection at the end of a `with` block.

    `address` is HOST:PORT of the server's gRPC. With `ca_file`, the connection is encrypted and the
    server must have a certificate of an authority in that file. `timeout` is in seconds for each
    call. Calls raise Error.
    """

    def __init__(self, address: str = "127.0.0.1:8081", *, api_key: str | None = None,
                 ca_file: str | os.PathLike[str] | None = None, timeout: float = 600.0) -> None:
        if ca_file is None:
            self._channel = grpc.insecure_channel(address)
        else:
            with open(ca_file, "rb") as file:
                credentials = grpc.ssl_channel_credentials(file.read())
            self._channel = grpc.secure_channel(address, credentials)
        # The generated stub has no types.
        self._stub: Any = rpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._timeout = timeout
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def generate(self, prompt: str | Sequence[int], *, model: str = "", logprobs: bool = False,
                 routes: bool = False, **sampling: Any) -> Completion:
        """Continues a prompt, which is a text or token ids, and returns the whole answer.

        `sampling` has the fields of the message SamplingParams, such as max_tokens=32,
        temperature=0.0, seed=1, stop=["\\n"]; absent ones have the model's defaults. With `routes`,
        which needs a server with --routing-records, the answer has its routing record.
        """
        text: list[str] = []
        ids: list[int] = []
        values: list[float] = []
        records: list[pb.RoutingRecord] = []
        last = None
        for last in self._generate(prompt, model, logprobs, routes, sampling):
            text.append(last.text)
            ids.extend(last.token_ids)
            values.extend(entry.logprob for entry in last.logprobs)
            if last.HasField("routing"):
                records.append(last.routing)
        if last is None:
            raise Error("INTERNAL", "the answer has no messages")
        usage = last.usage
        return Completion(
            text="".join(text), token_ids=np.asarray(ids, dtype=np.int32),
            logprobs=np.asarray(values, dtype=np.float32) if logprobs else None,
            finish_reason=_FINISH.get(last.finish_reason, ""), prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            experts_per_token=_optional(usage, "experts_per_token"),
            activated_parameters_per_token=_optional(usage, "activated_parameters_per_token"),
            routes=_routes(records) if routes else None)

    def stream(self, prompt: str | Sequence[int], *, model: str = "",
               **sampling: Any) -> Iterator[Piece]:
        """Like generate(), but yields the answer piece by piece as it is generated. Closing the
        iterator ends the request."""
        for message in self._generate(prompt, model, False, False, sampling):
            yield Piece(message.text, np.asarray(message.token_ids, dtype=np.int32),
                        _FINISH.get(message.finish_reason))

    def score(self, text: str | Sequence[int], *, model: str = "") -> NDArray[np.float32]:
        """Returns [tokens]: the log-probability of each token of a text; NaN for the first one if
        nothing precedes it."""
        request = pb.ScoreRequest(model=model)
        _set_prompt(request, text)
        with _errors():
            answer = self._stub.Score(request, timeout=self._timeout, metadata=self._metadata)
        return np.asarray([entry.logprob if entry.HasField("logprob") else np.nan
                           for entry in answer.tokens], dtype=np.float32)

    def tokenize(self, text: str, *, model: str = "") -> NDArray[np.int32]:
        """Returns [n]: the token ids of a text, as generate() encodes it."""
        with _errors():
            answer = self._stub.Tokenize(pb.TokenizeRequest(model=model, text=text),
                                         timeout=self._timeout, metadata=self._metadata)
        return np.asarray(answer.token_ids, dtype=np.int32)

    def detokenize(self, token_ids: Sequence[int] | NDArray[np.int32], *, model: str = "") -> str:
        request = pb.DetokenizeRequest(model=model, token_ids=[int(i) for i in token_ids])
        with _errors():
            answer = self._stub.Detokenize(request, timeout=self._timeout, metadata=self._metadata)
        return str(answer.text)

    def statistics(self, *, model: str = "", activation_threshold: float = 0.0) -> ExpertStatistics:
        """Returns the statistics of the experts since the server started."""
        request = pb.GetExpertStatsRequest(model=model, activation_threshold=activation_threshold)
        with _errors():
            answer = self._stub.GetExpertStats(request, timeout=self._timeout,
                                               metadata=self._metadata)
        return ExpertStatistics(
            model=answer.model, tokens=answer.tokens,
            blocks=tuple(_block(block) for block in answer.blocks),
            activation_ratio=answer.activation_ratio,
            activated_parameters_per_token=answer.activated_parameters_per_token,
            always_active_parameters=answer.always_active_parameters)

    def _generate(self, prompt: str | Sequence[int], model: str, logprobs: bool, routes: bool,
                  sampling: dict[str, Any]) -> Iterator[pb.GenerateResponse]:
        request = pb.GenerateRequest(model=model, return_routing=routes,
                                     sampling=pb.SamplingParams(**sampling))
        if logprobs:
            request.logprobs = 0
        _set_prompt(request, prompt)
        call = self._stub.Generate(request, timeout=self._timeout, metadata=self._metadata)
        try:
            with _errors():
                yield from call
        finally:
            call.cancel()


class _errors:
    """Turns errors of gRPC into Error."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if not isinstance(error, grpc.RpcError):
            return
        trailers = {item[0]: item[1] for item in error.trailing_metadata() or ()}
        code = trailers.get("x-error-code") or error.code().name
        raise Error(str(code), error.details() or "") from None


def _set_prompt(request: Any, prompt: str | Sequence[int]) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(int(token) for token in prompt)


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _block(block: pb.BlockExpertStats) -> BlockStatistics:
    def whole(values: Any) -> NDArray[np.int64]:
        return np.asarray(values, dtype=np.int64)

    return BlockStatistics(
        layer=block.layer, block=block.block, num_experts=block.num_experts,
        tokens=block.prefill_tokens + block.decode_tokens,
        rows=block.prefill_rows + block.decode_rows, counts=whole(block.counts),
        decode_counts=whole(block.decode_counts), touching_tokens=whole(block.touching_tokens),
        weight_sums=np.asarray(block.weight_sums, dtype=np.float64),
        expert_parameters=whole(block.expert_parameters))


def _routes(records: list[pb.RoutingRecord]) -> Routes | None:
    """Joins the records of a choice, which follow each other without gaps."""
    if not records:
        return None
    layout = records[0].layout
    offsets = [np.zeros(1, dtype=np.int64)]
    end = 0
    for record in records:
        if len(record.offsets) > 1:
            offsets.append(np.asarray(record.offsets[1:], dtype=np.int64) + end)
        end += len(record.experts)

    def joined(name: str, kind: Any) -> NDArray[Any]:
        return np.concatenate([np.asarray(getattr(record, name), dtype=kind) for record in records])

    return Routes(
        first_position=records[0].first_position, tokens=sum(record.tokens for record in records),
        rows_per_token=layout.rows_per_token,
        blocks=tuple(RouteBlock(block.layer, block.block, block.num_experts, block.sub_tokens,
                                block.first_row) for block in layout.blocks),
        offsets=np.concatenate(offsets), experts=joined("experts", np.int32),
        weights=joined("weights", np.float32))
