#!/usr/bin/env python3
"""Perplexity of the bundled models with the W8A8 arithmetic of vLLM, beside that of bf16.

    w8a8_perplexity.py [FOLDER ...]

Every linear layer but routers and the LM head gets int8 weights with one scale per output row, and
rounds each of its input rows to int8 with a scale of its own. Scales are the largest magnitude
divided by 127. The rest is the reference's bf16 run. Text and windows are those of
tests/golden/perplexity.json. The server's int8-channel rounds in the same way, and the LM head,
too; `perplexity_test` prints its perplexities. The Python needs PyTorch and tokenizers.
"""

import pathlib
import sys

import torch

TESTS = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(TESTS / "reference"), str(TESTS / "support")]

import bundled_models
from make_goldens import PERPLEXITY_TOKENS, PERPLEXITY_WINDOW, heldout_tokens
from routed_decoder import RoutedDecoder, perplexity

Tensor = torch.Tensor


def round_rows(x: Tensor) -> Tensor:
    """To int8 with one scale per row, and back."""
    scale = x.abs().amax(1, keepdim=True) / 127
    return (x / scale.clamp(min=1e-12)).round() * scale


class W8A8Decoder(RoutedDecoder):
    def _linear(self, x: Tensor, name: str) -> Tensor:
        if ".router" in name:
            return super()._linear(x, name)
        key = f"{name}.rounded"
        if key not in self.tensors:
            self.tensors[key] = round_rows(self.tensors[f"{name}.weight"])
        bias = self.tensors.get(f"{name}.bias")
        return torch.nn.functional.linear(round_rows(x), self.tensors[key], bias)


def main() -> None:
    folders = [pathlib.Path(f) for f in sys.argv[1:]]
    tokens = heldout_tokens()[:PERPLEXITY_TOKENS]
    for folder in folders or bundled_models.folders():
        plain, rounded = (
            perplexity(kind.from_folder(folder, bf16_products=True), tokens, PERPLEXITY_WINDOW)
            for kind in (RoutedDecoder, W8A8Decoder))
        print(f"{folder.name}: bf16 {plain:.4f}, W8A8 {rounded:.4f} ({rounded / plain - 1:+.3%})",
              flush=True)


if __name__ == "__main__":
    main()
