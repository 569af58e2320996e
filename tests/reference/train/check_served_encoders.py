"""Compares log-probabilities of the served bundled encoders, in f32, with the training models.

The training models (fast_stack.py) read the folders' tensors and compute in fp32 here. Masked
language models are asked for the tokens of held-out paragraphs in which every seventh token is
hidden; translators for the tokens of held-out targets.

  MOESERVE_BIN=build/release/moeserve python3 check_served_encoders.py --models FOLDER [NAME ...]
"""

import argparse
import json
import pathlib
import sys
import urllib.request
from typing import Any

import tokenizers
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import grouped_ops  # noqa: E402
import routed_decoder  # noqa: E402
from encoder_configs import ENCODERS, MASK_ID, MASKED_LMS  # noqa: E402
from evaluate_encoders import pairs, paragraphs  # noqa: E402
from evaluate_pairs import serving  # noqa: E402
from fast_model import Statistics  # noqa: E402
from fast_stack import FastMaskedLm, FastPair, Sequences  # noqa: E402

TEXTS = 25
TOLERANCE = 1e-3

Tensor = torch.Tensor


def load(folder: pathlib.Path) -> FastMaskedLm | FastPair:
    config, tensors = routed_decoder.load_folder(folder)
    model = (FastMaskedLm if folder.name in MASKED_LMS else FastPair)(config)
    assert model.parameters.keys() == tensors.keys()
    for name, value in model.parameters.items():
        value.copy_(tensors[name].float())
    return model


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url + path, json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def masked_difference(url: str, model: FastMaskedLm, text: Tensor) -> float:
    hidden = text.clone()
    hidden[1:-1:7] = MASK_ID
    answer = ask(url, "/v1/fill-mask", {"input": hidden.tolist(), "logprobs": True,
                                        "targets_of": text.tolist()})
    rows = model.stack(hidden, Sequences(torch.tensor([len(text)])), Statistics())
    own = model.logits(rows).log_softmax(1).gather(1, text[:, None])[:, 0]
    return float((torch.tensor(answer["logprobs"]) - own).abs().max())


def pair_difference(url: str, model: FastPair, source: Tensor, target: Tensor) -> float:
    answer = ask(url, "/v1/completions", {
        "prompt": source.tolist(), "decoder_prompt": target[1:].tolist(), "echo": True,
        "logprobs": 1, "max_tokens": 1, "temperature": 0})
    count = len(target) - 1
    served = answer["choices"][0]["logprobs"]["token_logprobs"][:count]
    lengths = torch.tensor([len(source)]), torch.tensor([count])
    rows = model.rows((source, lengths[0], target[:-1], lengths[1]), Statistics())
    logits = rows @ model.parameters["embed.weight"].t()
    own = logits.log_softmax(1).gather(1, target[1:, None])[:, 0]
    return float((torch.tensor(served) - own).abs().max())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", type=pathlib.Path, required=True)
    arguments.add_argument("names", nargs="*", default=list(ENCODERS))
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    grouped_ops.low_dtype = torch.float32
    worst = 0.0
    for name in options.names:
        folder = options.models / name
        model = load(folder)
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        with serving(folder, "f32") as url:
            if name in MASKED_LMS:
                limit = model.config["max_position_embeddings"]
                found = [masked_difference(url, model, text)
                         for text in paragraphs(tokenizer, limit)[:TEXTS]]
            else:
                found = [pair_difference(url, model, *pair) for pair in pairs(tokenizer)[:TEXTS]]
        print(f"{name}: {len(found)} texts, largest difference {max(found):.2e}", flush=True)
        worst = max(worst, *found)
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
