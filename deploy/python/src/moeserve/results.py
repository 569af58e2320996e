"""What the client returns. Arrays are NumPy arrays; [n] in a comment is the shape of an array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RouteBlock:
    """A routed block, as the rows of a routing record have it."""

    layer: int
    block: str  # "attention", "cross_attention" or "feed_forward"
    num_experts: int
    sub_tokens: int  # rows of one token in this block
    first_row: int  # index of its first row among the rows of a token


@dataclass(frozen=True)
class Labels:
    """The scores of a text's labels."""

    label: str  # with the highest score
    scores: dict[str, float]  # of all labels


@dataclass(frozen=True)
class Entity:
    """A named part of a text."""

    name: str
    score: float
    text: str
    begin: int | None  # characters of the text; None for token ids
    end: int | None  # behind the last one


@dataclass(frozen=True)
class Word:
    """A word of a text, with the white space before it, and its tokens."""

    text: str
    begin: int  # index of its first token
    end: int  # behind its last token


@dataclass(frozen=True)
class Routes:
    """Which experts computed consecutive tokens, and with which weights, in compressed rows.

    Row r selected the experts `experts[offsets[r]:offsets[r + 1]]`, in ascending order, with the gate
    weights at the same indices of `weights`. Token t has the rows `t * rows_per_token` and following,
    by block in the order of `blocks` and then by sub-token. The last generated token is never
    computed and has no rows.
    """

    first_position: int  # 0 is the first token of the prompt
    tokens: int
    rows_per_token: int
    blocks: tuple[RouteBlock, ...]
    offsets: NDArray[np.int64]  # [tokens * rows_per_token + 1]
    experts: NDArray[np.int32]  # [offsets[-1]]
    weights: NDArray[np.float32]  # [offsets[-1]]

    def of(self, token: int, block: int = 0, sub_token: int = 0) -> tuple[
            NDArray[np.int32], NDArray[np.float32]]:
        """Returns the experts of one row and their weights. IndexError for a row that is not there."""
        place = self.blocks[block]
        if not 0 <= token < self.tokens or not 0 <= sub_token < place.sub_tokens:
            raise IndexError(f"no row of token {token}, sub-token {sub_token}")
        row = token * self.rows_per_token + place.first_row + sub_token
        begin, end = self.offsets[row], self.offsets[row + 1]
        return self.experts[begin:end], self.weights[begin:end]

    def word_counts(self, words: Sequence[Word], block: int = 0) -> NDArray[np.int64]:
        """Returns [words, num_experts]: how many rows of each word's tokens selected each expert.

        `words` are those of the tokens from `first_position` on, as Client.words() returns them.
        Tokens without routes, such as the last generated one, count as 0.
        """
        counts = self.counts(block)
        if not words:
            return counts[:0]
        return np.stack([counts[word.begin:word.end].sum(axis=0) for word in words])

    def counts(self, block: int = 0) -> NDArray[np.int64]:
        """Returns [tokens, num_experts]: how many rows of each token selected each expert."""
        place = self.blocks[block]
        out = np.zeros((self.tokens, place.num_experts), dtype=np.int64)
        for token in range(self.tokens):
            first = token * self.rows_per_token + place.first_row
            begin, end = self.offsets[first], self.offsets[first + place.sub_tokens]
            np.add.at(out[token], self.experts[begin:end], 1)
        return out


@dataclass(frozen=True)
class Piece:
    """A piece of a streamed answer."""

    text: str
    token_ids: NDArray[np.int32]  # [n]
    finish_reason: str | None  # "stop", "length" or, of chats, "tool_calls" in the last piece
    index: int = 0  # which of the n answers
    reasoning: str = ""  # of chats only


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: NDArray[np.int32]  # [n]
    logprobs: NDArray[np.float32] | None  # [n], if asked for
    finish_reason: str  # "stop" or "length"
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    experts_per_token: float | None  # None without experts, or if they are not counted
    activated_parameters_per_token: float | None
    macs_per_token: float | None
    routes: Routes | None  # of the prompt and the answer, if asked for
    source_routes: Routes | None = None  # of the source of an encoder-decoder, if asked for
    # Of a beam search: the sum of the tokens' log-probabilities, and that divided as
    # BeamSearch.length_penalty says.
    beam_score: float | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that a chat's answer asks for."""

    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class ChatAnswer:
    """The answer of a chat."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    message: dict[str, Any]  # to append to the messages of the next chat
    finish_reason: str  # "stop", "length" or "tool_calls"
    prompt_tokens: int
    completion_tokens: int  # of all n answers
    routes: Routes | None  # of the prompt and the answer, if asked for


@dataclass(frozen=True)
class BlockStatistics:
    """What the experts of one routed block did since the server started.

    A row is a token, or a sub-token if the block splits tokens.
    """

    layer: int
    block: str  # "attention", "cross_attention" or "feed_forward"
    num_experts: int
    tokens: int
    rows: int
    counts: NDArray[np.int64]  # [num_experts]: rows that selected the expert
    decode_counts: NDArray[np.int64]  # [num_experts]: those of generated tokens
    touching_tokens: NDArray[np.int64]  # [num_experts]: tokens with a row that selected the expert
    weight_sums: NDArray[np.float64]  # [num_experts]: sums of the gate weights
    expert_parameters: NDArray[np.int64]  # [num_experts]
    stack: str = ""  # "encoder" or "decoder"; empty if the model has one stack

    @property
    def shares(self) -> NDArray[np.float64]:
        """[num_experts]: the experts' shares of all selections; zeros if there is none."""
        total = self.counts.sum()
        return self.counts / total if total > 0 else np.zeros(self.num_experts)


@dataclass(frozen=True)
class ExpertStatistics:
    """What all experts of a model did since the server started."""

    model: str
    tokens: int
    blocks: tuple[BlockStatistics, ...]  # by layer, attention before feed_forward
    activation_ratio: float
    activated_parameters_per_token: float
    always_active_parameters: int

    def load(self) -> NDArray[np.float64]:
        """Returns [blocks, most experts]: shares of the selections; NaN beyond a block's experts."""
        width = max((block.num_experts for block in self.blocks), default=0)
        out = np.full((len(self.blocks), width), np.nan)
        for row, block in zip(out, self.blocks):
            row[:block.num_experts] = block.shares
        return out

    def labels(self) -> list[str]:
        """Returns a name for each row of load()."""
        return [f"layer {block.layer} {block.block}" for block in self.blocks]

    def since(self, earlier: ExpertStatistics) -> ExpertStatistics:
        """Returns what was counted after `earlier`, statistics of the same server and model.

        The ratios and means are not recomputed; they stay those of this object.
        """
        blocks = []
        for now, before in zip(self.blocks, earlier.blocks, strict=True):
            fields: dict[str, Any] = dict(vars(now))
            for name in ("tokens", "rows", "counts", "decode_counts", "touching_tokens",
                         "weight_sums"):
                fields[name] = getattr(now, name) - getattr(before, name)
            blocks.append(BlockStatistics(**fields))
        fields = dict(vars(self))
        fields.update(tokens=self.tokens - earlier.tokens, blocks=tuple(blocks))
        return ExpertStatistics(**fields)
