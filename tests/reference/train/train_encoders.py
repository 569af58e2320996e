"""Trains a bundled masked language model or translator on one core and exports its folder.

A routed model and its dense twin see the same batches in the same order. Batches hold about
TOKENS_PER_STEP tokens of texts of similar lengths, without padding. The papers have extra losses:
  X-MoE eq. 9:         load balance, weight 1e-2
  MoA eq. 13 and 16:   load balance with normalized loads, weight 1e-2; router z-loss, weight 1e-3
Translators are trained with label smoothing 0.1, as in MoA section 5.1; masked language models with
30 % of the tokens hidden, of which 80 % become the mask, 10 % another token and 10 % stay.

  python3 train_encoders.py --model NAME --data FOLDER --tokenizer FOLDER --work FOLDER \
      --export FOLDER
"""

import math
import pathlib
from collections.abc import Iterator

import numpy as np
import torch

import train
from encoder_configs import (BOS_ID, ENCODERS, EOS_ID, MASK_ID, MASKED_LMS, MLM_POSITIONS,
                             SPECIAL_TOKENS)
from fast_model import Statistics
from fast_stack import FastMaskedLm, FastPair

TOKENS_PER_STEP = 4096
MAX_PAIR_TOKENS = 96
# Batches are made of texts that are neighbours in the order of lengths within a pool.
POOL = 8192
HIDDEN_SHARE = 0.3
SMOOTHING = 0.1

Batch = tuple[torch.Tensor, ...]


def load_texts(path: pathlib.Path) -> list[np.ndarray]:
    """The texts that special_tokenizer.py has encoded."""
    stored = np.load(path)
    return np.split(stored["tokens"].astype(np.int64), stored["offsets"][1:-1])


def groups(sizes: np.ndarray, lengths: np.ndarray, generator: np.random.Generator,
           budget: int) -> Iterator[np.ndarray]:
    """Yields the texts of each batch of one epoch: `sizes` [n] count against the budget, and
    `lengths` [n, keys] are what texts of a batch have in common."""
    order = generator.permutation(len(sizes))
    for start in range(0, len(order), POOL):
        pool = order[start:start + POOL]
        pool = pool[np.lexsort(lengths[pool].T)]
        place = np.cumsum(sizes[pool]) // budget
        batches = np.split(pool, np.flatnonzero(np.diff(place)) + 1)
        for index in generator.permutation(len(batches)):
            yield batches[index]


def packed(texts: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.from_numpy(np.concatenate(texts)),
            torch.tensor([len(text) for text in texts]))


class PairData:
    """Sources that end with </s>, and targets that begin with <s> and end with </s>."""

    def __init__(self, data: pathlib.Path, part: str) -> None:
        sources, targets = (load_texts(data / f"{part}.{side}.npz")
                            for side in ("source", "target"))
        self.pairs = [(np.append(source, EOS_ID), np.concatenate([[BOS_ID], target, [EOS_ID]]))
                      for source, target in zip(sources, targets)
                      if max(len(source), len(target)) <= MAX_PAIR_TOKENS]

    def batch(self, chosen: np.ndarray) -> Batch:
        sources = packed([self.pairs[i][0] for i in chosen])
        inputs = packed([self.pairs[i][1][:-1] for i in chosen])
        wanted = packed([self.pairs[i][1][1:] for i in chosen])
        return (*sources, *inputs, wanted[0])

    def epoch(self, generator: np.random.Generator) -> Iterator[Batch]:
        lengths = np.array([[len(source), len(target)] for source, target in self.pairs])
        for chosen in groups(lengths.sum(1), lengths, generator, TOKENS_PER_STEP):
            yield self.batch(chosen)


class MaskedData:
    """Texts between <s> and </s>, cut where they are too long, with hidden tokens."""

    def __init__(self, data: pathlib.Path, part: str, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        room = MLM_POSITIONS - 2
        self.texts = [np.concatenate([[BOS_ID], text[start:start + room], [EOS_ID]])
                      for text in load_texts(data / f"{part}.text.npz")
                      for start in range(0, len(text), room)]

    def batch(self, chosen: np.ndarray, generator: np.random.Generator) -> Batch:
        tokens, lengths = packed([self.texts[i] for i in chosen])
        seen = tokens.numpy().copy()
        ordinary = np.flatnonzero(seen >= len(SPECIAL_TOKENS["masked-lm"]))
        count = max(1, round(HIDDEN_SHARE * len(ordinary)))
        hidden = np.sort(generator.choice(ordinary, count, replace=False))
        fate = generator.random(count)
        others = generator.integers(len(SPECIAL_TOKENS["masked-lm"]), self.vocabulary, count)
        seen[hidden] = np.where(fate < 0.8, MASK_ID, np.where(fate < 0.9, others, seen[hidden]))
        hidden = torch.from_numpy(hidden)
        return torch.from_numpy(seen), lengths, hidden, tokens[hidden]

    def epoch(self, generator: np.random.Generator) -> Iterator[Batch]:
        lengths = np.array([len(text) for text in self.texts])
        for chosen in groups(lengths, lengths[:, None], generator, TOKENS_PER_STEP):
            yield self.batch(chosen, generator)


class EncoderRun(train.Run):
    def data(self, part: str) -> PairData | MaskedData:
        if self.options.model in MASKED_LMS:
            return MaskedData(self.options.data, part, self.config["vocab_size"])
        return PairData(self.options.data, part)

    def batches(self) -> Iterator[Batch]:
        generator = np.random.default_rng(self.options.seed)
        data, step = self.data("train"), 0
        while True:
            for batch in data.epoch(generator):
                if step == self.options.steps:
                    return
                step += 1
                yield batch

    def tokens_of(self, batch: Batch) -> int:
        return len(batch[0]) + (len(batch[2]) if self.options.model not in MASKED_LMS else 0)

    def extra_loss(self, stats: Statistics) -> torch.Tensor | float:
        z_loss = 0.0 if self.options.model in MASKED_LMS else train.Z_LOSS * sum(stats.z_loss)
        return train.BALANCE * sum(stats.balance) + z_loss

    @torch.no_grad()
    def validate(self) -> str:
        masked = self.options.model in MASKED_LMS
        plain = {} if masked else {"smoothing": 0.0}
        total = count = 0.0
        for batch in self.data("validation").epoch(np.random.default_rng(0)):
            weight = len(batch[-1])
            total += weight * float(self.model.loss(batch, Statistics(), **plain))
            count += weight
        return f"validation perplexity {math.exp(total / count):.2f}"


def main() -> None:
    options = train.parse_options(__doc__, ENCODERS, steps=2500, rate=3e-3)
    config = ENCODERS[options.model]
    model = (FastMaskedLm(config, options.seed) if options.model in MASKED_LMS
             else FastPair(config, options.seed, SMOOTHING))
    EncoderRun(options, config, model).run()


if __name__ == "__main__":
    main()
