"""Compares fast_stack.py, in fp32, with the reference implementation of encoders and translators.

  python3 check_fast_encoders.py [NAME ...]
"""

import argparse
import pathlib
import sys

import torch
from torch.nn import functional

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import grouped_ops  # noqa: E402
from encoder_configs import ENCODERS, MASKED_LMS  # noqa: E402
from fast_model import Statistics  # noqa: E402
from fast_stack import FastMaskedLm, FastPair, Sequences  # noqa: E402
from routed_encoder import RoutedEncoder  # noqa: E402
from routed_pair import RoutedPair  # noqa: E402

LENGTHS = (9, 4, 12, 12)
TOLERANCE = 2e-4


def random_texts(vocabulary: int, generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randint(vocabulary, (length,), generator=generator) for length in LENGTHS]


def difference(name: str) -> float:
    """The largest difference of the log-probabilities of random texts and weights."""
    config = ENCODERS[name]
    generator = torch.Generator().manual_seed(3)
    sources, inputs = (random_texts(config["vocab_size"], generator) for _ in range(2))
    lengths = torch.tensor(LENGTHS)
    masked = name in MASKED_LMS
    model = FastMaskedLm(config) if masked else FastPair(config)
    for value in model.parameters.values():
        value += 0.05 * torch.randn(value.shape, generator=generator)
    reference = (RoutedEncoder if masked else RoutedPair)(config, model.native_tensors())
    if masked:
        places = Sequences(lengths)
        fast = model.logits(model.stack(torch.cat(sources), places, Statistics()))
        slow = torch.cat([reference.logits(reference.rows(text)) for text in sources])
    else:
        batch = (torch.cat(sources), lengths, torch.cat(inputs), lengths)
        fast = model.rows(batch, Statistics()) @ model.parameters["embed.weight"].t()
        rows = []
        for source, text in zip(sources, inputs):
            reference.read(source)
            rows.append(reference.decoder.forward(text))
        slow = torch.cat(rows)
    return float((functional.log_softmax(fast, 1) - functional.log_softmax(slow, 1)).abs().max())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("names", nargs="*", default=list(ENCODERS))
    torch.set_grad_enabled(False)
    grouped_ops.low_dtype = torch.float32
    worst = 0.0
    for name in arguments.parse_args().names:
        found = difference(name)
        print(f"{name}: largest difference of log-probabilities {found:.2e}")
        worst = max(worst, found)
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
