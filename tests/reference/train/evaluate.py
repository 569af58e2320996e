"""Measures the bundled models and writes the values for their model cards.

Runs the reference implementation on the validation text, which is not part of the training text.
Measures the perplexity, the expert loads, the activated parameters, and the increase in perplexity
when the experts of one layer are permuted. For comparison, also measures the perplexity of an
interpolated bigram model of the training tokens.

  python3 evaluate.py --data FOLDER --models deploy/models --out FIGURES.json [NAME ...]
"""

import argparse
import json
import math
import pathlib
import sys
from typing import Any

import numpy as np
import torch
from torch.nn import functional

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import routed_decoder  # noqa: E402
from bundled_configs import BUNDLED, activated_parameters  # noqa: E402

WINDOW = 512
SHUFFLE_WINDOWS = 24
# An expert is dead if its load is below this share of the mean load.
DEAD_SHARE = 0.05


class Bigram:
    """A bigram model with Jelinek-Mercer smoothing: p = l2 * p(w | v) + l1 * p(w) + l0 / V.

    tune() fits the weights l2, l1 and l0 to held-out tokens by expectation maximization.
    """

    def __init__(self, tokens: np.ndarray, vocab: int) -> None:
        self.vocab = vocab
        self.unigram = np.bincount(tokens, minlength=vocab) / len(tokens)
        keys, counts = np.unique(tokens[:-1].astype(np.int64) * vocab + tokens[1:],
                                 return_counts=True)
        self.keys, self.counts = keys, counts
        self.context = np.bincount(tokens[:-1], minlength=vocab)
        self.weights = np.full(3, 1 / 3)

    def _parts(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Returns [3, n]: p(w | v), p(w) and 1 / V for each pair of v in `first`, w in `second`."""
        wanted = first.astype(np.int64) * self.vocab + second
        place = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        pairs = np.where(self.keys[place] == wanted, self.counts[place], 0)
        bigram = pairs / np.maximum(self.context[first], 1)
        return np.stack([bigram, self.unigram[second], np.full(len(second), 1 / self.vocab)])

    def tune(self, tokens: np.ndarray) -> None:
        parts = self._parts(tokens[:-1], tokens[1:])
        for _ in range(50):
            joint = self.weights[:, None] * parts
            self.weights = (joint / joint.sum(0)).mean(1)

    def perplexity(self, tokens: np.ndarray) -> float:
        """Returns the perplexity over the predictions that routed_decoder.perplexity makes with
        windows of WINDOW tokens."""
        wanted = np.arange(1, len(tokens))
        wanted = wanted[wanted % WINDOW != 0]
        parts = self._parts(tokens[wanted - 1], tokens[wanted])
        return math.exp(-np.log((self.weights[:, None] * parts).sum(0)).mean())


class Loads:
    """Counts how often each expert of each routed block is selected."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = routed_decoder.complete_config(config)
        self.counts: dict[str, torch.Tensor] = {}
        self.rows: dict[str, int] = {}

    def add(self, recorded: dict[str, routed_decoder.Routes]) -> None:
        for key, routes in recorded.items():
            layer, part = key.split(".")
            experts = self.config[part][int(layer)]["routing"]["num_experts"]
            count = torch.bincount(routes.experts, minlength=experts)
            self.counts[key] = self.counts.get(key, 0) + count
            self.rows[key] = self.rows.get(key, 0) + len(routes.offsets) - 1

    def least_share(self) -> float:
        """Returns the smallest load of any expert as a multiple of its block's mean load."""
        return min((float(c.min() / c.double().mean()) for c in self.counts.values()), default=1.0)

    def dead(self) -> int:
        return sum(int((c < DEAD_SHARE * c.double().mean()).sum()) for c in self.counts.values())

    def selected_width(self) -> float | None:
        """Returns the sum of the selected experts' widths, averaged over rows and feed-forward
        layers; None if no feed-forward layer is routed."""
        means = []
        for key, count in self.counts.items():
            layer, part = key.split(".")
            if part == "feed_forward":
                widths = self.config[part][int(layer)]["routing"]["widths"]
                means.append(float((count * torch.tensor(widths)).sum()) / self.rows[key])
        return sum(means) / len(means) if means else None

    def activation_ratio(self) -> float | None:
        """Returns the share of a block's expert parameters that one row uses, averaged over rows
        and routed blocks; None if no block is routed."""
        ratios = []
        for key, count in self.counts.items():
            layer, part = key.split(".")
            routing = self.config[part][int(layer)]["routing"]
            sizes = torch.tensor(routing.get("widths", [1] * routing["num_experts"]))
            ratios.append(float((count * sizes).sum()) / self.rows[key] / float(sizes.sum()))
        return sum(ratios) / len(ratios) if ratios else None


def measure(model: routed_decoder.RoutedDecoder, tokens: torch.Tensor,
            loads: Loads | None = None) -> float:
    """Returns the perplexity as routed_decoder.perplexity defines it. Adds the routes to `loads`.
    """
    total, count = 0.0, 0
    for start in range(0, len(tokens), WINDOW):
        piece = tokens[start:start + WINDOW]
        if len(piece) < 2:
            continue
        logits = model.forward(piece)[:-1]
        total += float(functional.cross_entropy(logits, piece[1:], reduction="sum"))
        count += len(piece) - 1
        if loads is not None:
            loads.add(model.recorded)
    return math.exp(total / count)


def shuffled(tensors: dict[str, torch.Tensor], layer: int, part: str,
             stack: str = "") -> dict[str, torch.Tensor]:
    """Returns the tensors with the experts of one block rotated by one index. The router is
    unchanged, so every selection runs a wrong expert. `stack`: what names of the block begin with.
    """
    prefix = f"{stack}blocks.{layer}.{part}.experts."
    numbers = sorted({int(name[len(prefix):].split(".")[0])
                      for name in tensors if name.startswith(prefix)})
    out = dict(tensors)
    for name in tensors:
        if name.startswith(prefix):
            number, rest = name[len(prefix):].split(".", 1)
            source = numbers[(int(number) + 1) % len(numbers)]
            out[name] = tensors[f"{prefix}{source}.{rest}"]
    return out


def evaluate(folder: pathlib.Path, validation: torch.Tensor) -> dict[str, Any]:
    config, tensors = routed_decoder.load_folder(folder)
    loads = Loads(config)
    figures: dict[str, Any] = {"validation_perplexity": measure(
        routed_decoder.RoutedDecoder(config, tensors), validation, loads)}
    part_tokens = validation[:SHUFFLE_WINDOWS * WINDOW]
    base = measure(routed_decoder.RoutedDecoder(config, tensors), part_tokens)
    effects = {}
    for key in loads.counts:
        layer, part = key.split(".")
        broken = shuffled(tensors, int(layer), part)
        changed = measure(routed_decoder.RoutedDecoder(config, broken), part_tokens)
        effects[key] = round(100 * (changed / base - 1), 2)
    figures.update({
        "parameters": sum(value.numel() for value in tensors.values()),
        "file_bytes": (folder / "model.safetensors").stat().st_size,
        "activated_parameters": round(activated_parameters(config, loads.selected_width())),
        "selected_width": loads.selected_width(), "activation_ratio": loads.activation_ratio(),
        "dead_experts": loads.dead(), "least_load": round(loads.least_share(), 3),
        "shuffle_effect_percent": effects})
    return figures


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--data", type=pathlib.Path, required=True)
    arguments.add_argument("--models", type=pathlib.Path, required=True)
    arguments.add_argument("--out", type=pathlib.Path, required=True)
    arguments.add_argument("names", nargs="*", default=list(BUNDLED))
    options = arguments.parse_args()
    torch.set_num_threads(1)
    validation = np.load(options.data / "validation.npy")
    figures = json.loads(options.out.read_text()) if options.out.exists() else {}
    if "bigram" not in figures:
        bigram = Bigram(np.load(options.data / "train.npy"), 4096)
        bigram.tune(np.load(options.data / "heldout.npy"))
        figures["bigram"] = {"validation_perplexity": bigram.perplexity(validation),
                             "weights": bigram.weights.round(4).tolist()}
        print("bigram", figures["bigram"], flush=True)
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    tokens = torch.from_numpy(validation.astype(np.int64))
    for name in options.names:
        figures[name] = evaluate(options.models / name, tokens)
        print(name, json.dumps(figures[name]), flush=True)
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
