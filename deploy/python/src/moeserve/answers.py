"""Makes results of the messages and JSON objects that a server sends."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from moeserve.results import (BlockStatistics, ChatAnswer, Completion, Entity, ExpertStatistics,
                              Labels, Piece, RouteBlock, Routes, ToolCall, Word)
from moeserve.v1 import moeserve_pb2 as pb

_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class Error(Exception):
    """A call failed. `code` is the error code of the API, such as "context_length_exceeded", or the
    name of the gRPC status."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class errors:
    """Turns errors of gRPC into Error."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if not isinstance(error, grpc.RpcError):
            return
        metadata: Any = error.trailing_metadata() or ()
        trailers = {item[0]: item[1] for item in metadata}
        code = trailers.get("x-error-code") or error.code().name
        raise Error(str(code), error.details() or "") from None


def vectors(answer: Any) -> NDArray[np.float32]:
    """Returns [texts, width]: the vectors of an EncodeResponse."""
    return np.stack([np.asarray(output.values, dtype=np.float32) for output in answer.outputs])


def labels(answer: Any) -> list[Labels]:
    return [Labels(output.label, dict(zip(answer.labels, output.values, strict=True)))
            for output in answer.outputs]


def entities(answer: Any) -> list[list[Entity]]:
    return [[Entity(found.entity_group, found.score, found.word,
                    found.start if found.HasField("start") else None,
                    found.end if found.HasField("end") else None)
             for found in output.entities] for output in answer.outputs]


class Collector:
    """Joins the messages of Generate to whole answers."""

    def __init__(self) -> None:
        self._messages: dict[int, list[Any]] = {}

    def add(self, message: Any) -> None:
        self._messages.setdefault(message.index, []).append(message)

    def completions(self, *, count: int, logprobs: bool, routes: bool,
                    fewer: bool = False) -> list[Completion]:
        """Returns `count` answers; with `fewer`, there can be fewer, but one. Error if some are
        missing."""
        found = len(self._messages)
        if fewer and 0 < found < count:
            count = found
        if sorted(self._messages) != list(range(count)):
            raise Error("INTERNAL", f"expected {count} answers, found {found}")
        return [_completion(self._messages[index], logprobs, routes) for index in range(count)]

    def scores(self) -> tuple[NDArray[np.float32], Routes]:
        """Returns the log-probabilities of the prompt's tokens, and their routes."""
        messages = self._messages.get(0, [])
        routes = join_routes([m.routing for m in messages if m.HasField("routing")])
        if routes is None:
            raise Error("INTERNAL", "the answer has no routes")
        return logprob_array([entry for m in messages for entry in m.prompt_logprobs]), routes


def _completion(messages: Sequence[Any], logprobs: bool, routes: bool) -> Completion:
    last = messages[-1]
    usage = last.usage
    values = [entry.logprob for m in messages for entry in m.logprobs]
    return Completion(
        text="".join(m.text for m in messages),
        token_ids=np.asarray([i for m in messages for i in m.token_ids], dtype=np.int32),
        logprobs=np.asarray(values, dtype=np.float32) if logprobs else None,
        finish_reason=_FINISH.get(last.finish_reason, ""), prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        experts_per_token=_optional(usage, "experts_per_token"),
        activated_parameters_per_token=_optional(usage, "activated_parameters_per_token"),
        macs_per_token=_optional(usage, "macs_per_token"),
        routes=join_routes([m.routing for m in messages if m.HasField("routing")])
        if routes else None,
        source_routes=join_routes([m.source_routing for m in messages
                                   if m.HasField("source_routing")]) if routes else None,
        beam_score=_optional(last, "beam_score"),
        cumulative_logprob=_optional(last, "cumulative_logprob"))


def piece(message: Any) -> Piece:
    return Piece(message.text, np.asarray(message.token_ids, dtype=np.int32),
                 _FINISH.get(message.finish_reason), message.index)


def logprob_array(entries: Sequence[Any]) -> NDArray[np.float32]:
    return np.asarray([entry.logprob if entry.HasField("logprob") else np.nan for entry in entries],
                      dtype=np.float32)


def words(prefixes: Sequence[str]) -> list[Word]:
    """Splits a text into words. `prefixes` are the texts of its first token, its first two, ..., so
    that a character of several tokens belongs to the token that completes it.

    A word begins with a token that begins with white space, or that follows white space.
    """
    out: list[Word] = []
    before = ""
    for token, prefix in enumerate(prefixes):
        text = prefix.rstrip("\ufffd")  # the start of a character
        shared = len(os.path.commonprefix([before, text]))
        added = text[shared:]
        # What is only white space so far belongs to the word that follows.
        begins = added and out and out[-1].text.strip() and (
            added[0].isspace() or out[-1].text[-1].isspace())
        if begins or not out:
            out.append(Word(added, token, token + 1))
        else:
            out[-1] = Word(out[-1].text + added, out[-1].begin, token + 1)
        before = text
    return out


def statistics(answer: Any) -> ExpertStatistics:
    return ExpertStatistics(
        model=answer.model, tokens=answer.tokens,
        blocks=tuple(_block(block) for block in answer.blocks),
        activation_ratio=answer.activation_ratio,
        activated_parameters_per_token=answer.activated_parameters_per_token,
        always_active_parameters=answer.always_active_parameters)


def chat_answers(answer: Mapping[str, Any]) -> list[ChatAnswer]:
    """Returns the answers of /v1/chat/completions."""
    return [_chat_answer(choice, answer["usage"])
            for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"]))]


def _chat_answer(choice: Mapping[str, Any], usage: Mapping[str, Any]) -> ChatAnswer:
    message = choice["message"]
    calls = tuple(ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
                  for call in message.get("tool_calls") or ())
    return ChatAnswer(
        text=message.get("content") or "", reasoning=message.get("reasoning_content") or "",
        tool_calls=calls, message=message, finish_reason=choice["finish_reason"],
        prompt_tokens=usage["prompt_tokens"], completion_tokens=usage["completion_tokens"],
        routes=_json_routes(choice["routing"]) if "routing" in choice else None)


def chat_piece(choice: Mapping[str, Any]) -> Piece:
    delta = choice["delta"]
    return Piece(delta.get("content") or "", np.zeros(0, dtype=np.int32),
                 choice.get("finish_reason"), choice["index"], delta.get("reasoning_content") or "")


def join_routes(records: Sequence[Any]) -> Routes | None:
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


def _json_routes(record: Mapping[str, Any]) -> Routes:
    layout = record["layout"]
    return Routes(
        first_position=record["first_position"], tokens=record["tokens"],
        rows_per_token=layout["rows_per_token"],
        blocks=tuple(RouteBlock(block["layer"], block["block"], block["experts"],
                                block["sub_tokens"], block["first_row"])
                     for block in layout["blocks"]),
        offsets=np.asarray(record["offsets"], dtype=np.int64),
        experts=np.asarray(record["experts"], dtype=np.int32),
        weights=np.asarray(record["weights"], dtype=np.float32))


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _block(block: Any) -> BlockStatistics:
    def whole(values: Any) -> NDArray[np.int64]:
        return np.asarray(values, dtype=np.int64)

    return BlockStatistics(
        layer=block.layer, block=block.block, num_experts=block.num_experts,
        tokens=block.prefill_tokens + block.decode_tokens,
        rows=block.prefill_rows + block.decode_rows, counts=whole(block.counts),
        decode_counts=whole(block.decode_counts), touching_tokens=whole(block.touching_tokens),
        weight_sums=np.asarray(block.weight_sums, dtype=np.float64),
        expert_parameters=whole(block.expert_parameters), stack=block.stack)
