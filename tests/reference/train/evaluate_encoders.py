"""Measures the bundled masked language models and translators with the reference implementation.

Masked language models: the pseudo-perplexity of the first paragraphs of tests/data/heldout.txt, exp
of the mean of -ln p over all tokens, each of which is hidden in turn while the rest is seen.
Translators: the perplexity of the targets of tests/data/heldout_pairs.tsv. Of routed models also
the experts' loads, and by how much these figures grow if the experts of one block are permuted.
evaluate_pairs.py adds the translations' scores to the same file.

  python3 evaluate_encoders.py --models deploy/models --out FIGURES.json [NAME ...]
"""

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import tokenizers
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import routed_decoder  # noqa: E402
from encoder_configs import BOS_ID, ENCODERS, MASK_ID, MASKED_LMS  # noqa: E402
from evaluate import Loads, shuffled  # noqa: E402
from pair_file import read_pairs  # noqa: E402
from prepare_data import SEPARATOR  # noqa: E402
from routed_encoder import RoutedEncoder  # noqa: E402
from routed_pair import RoutedPair  # noqa: E402

DATA = pathlib.Path(__file__).resolve().parents[2] / "data"
PARAGRAPHS, SHUFFLE_PARAGRAPHS = 200, 40

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
Json = dict[str, Any]


def paragraphs(tokenizer: tokenizers.Tokenizer, limit: int) -> list[Tensor]:
    """The first paragraphs of the held-out text that fit into `limit` tokens, special tokens
    included."""
    out = []
    for document in (DATA / "heldout.txt").read_text(encoding="utf-8").split(SEPARATOR):
        for line in document.split("\n"):
            ids = tokenizer.encode(line).ids
            if 2 < len(ids) <= limit and len(out) < PARAGRAPHS:
                out.append(torch.tensor(ids))
    return out


def pairs(tokenizer: tokenizers.Tokenizer) -> list[tuple[Tensor, Tensor]]:
    """The held-out sources, which end with </s>, and targets between <s> and </s>."""
    return [(torch.tensor(tokenizer.encode(pair.source).ids),
             torch.tensor([BOS_ID, *tokenizer.encode(pair.target).ids]))
            for pair in read_pairs()]


def own_logprobs(model: RoutedEncoder, text: Tensor) -> Tensor:
    """Log-probabilities of the tokens of a text, without the first and the last, which are special.
    Each is computed from a text in which it alone is hidden."""
    found = []
    for place in range(1, len(text) - 1):
        hidden = text.clone()
        hidden[place] = MASK_ID
        logits = model.logits(model.rows(hidden)[place:place + 1])[0]
        found.append(logits.log_softmax(0)[text[place]])
    return torch.stack(found)


def target_logprobs(model: RoutedPair, source: Tensor, target: Tensor) -> Tensor:
    model.read(source)
    logits = model.decoder.forward(target[:-1])
    return logits.log_softmax(1).gather(1, target[1:, None])[:, 0]


def perplexity(logprobs: list[Tensor]) -> float:
    return math.exp(-float(torch.cat(logprobs).double().mean()))


def measure(name: str, config: Json, tensors: Tensors, texts: list[Any],
            loads: dict[str, Loads] | None = None) -> float:
    """The perplexity of a model. Adds the routes to `loads`, which has one entry for each stack."""
    if name in MASKED_LMS:
        model = RoutedEncoder(config, tensors)
        stacks = {"": model}
    else:
        model = RoutedPair(config, tensors)
        stacks = {"encoder.": model.encoder, "decoder.": model.decoder}
    found = []
    for text in texts:
        if name in MASKED_LMS:
            found.append(own_logprobs(model, text))
            if loads is not None:
                model.rows(text)  # the routes of the text as it is
        else:
            found.append(target_logprobs(model, *text))
        if loads is not None:
            for prefix, stack in stacks.items():
                loads.setdefault(prefix, Loads(stack.config)).add(stack.recorded)
    return perplexity(found)


def effects(name: str, config: Json, tensors: Tensors, texts: list[Any],
            loads: dict[str, Loads]) -> dict[str, float]:
    """The growth of the perplexity in percent if the experts of one block are permuted."""
    base = measure(name, config, tensors, texts)
    out = {}
    for prefix, of_stack in loads.items():
        for key in of_stack.counts:
            layer, part = key.split(".")
            broken = shuffled(tensors, int(layer), part, prefix)
            changed = measure(name, config, broken, texts)
            out[prefix + key] = round(100 * (changed / base - 1), 2)
    return out


def silent_effect(name: str, config: Json, tensors: Tensors, texts: list[Any]) -> float:
    """The growth of the perplexity in percent if the networks of the middle layer give nothing."""
    silent = {key: torch.zeros_like(value)
              if key.startswith("blocks.2.feed_forward.") and ".down." in key else value
              for key, value in tensors.items()}
    base = measure(name, config, tensors, texts)
    return round(100 * (measure(name, config, silent, texts) / base - 1), 2)


def evaluate(folder: pathlib.Path, report: Callable[[str], None]) -> Json:
    name = folder.name
    config, tensors = routed_decoder.load_folder(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts: list[Any] = (paragraphs(tokenizer, config["max_position_embeddings"])
                        if name in MASKED_LMS else pairs(tokenizer))
    loads: dict[str, Loads] = {}
    figures: Json = {"perplexity": measure(name, config, tensors, texts, loads),
                     "texts": len(texts),
                     "parameters": sum(value.numel() for value in tensors.values()),
                     "file_bytes": (folder / "model.safetensors").stat().st_size}
    report(f"{name}: perplexity {figures['perplexity']:.3f}")
    if name in MASKED_LMS:
        figures["silent_effect_percent"] = silent_effect(name, config, tensors,
                                                         texts[:SHUFFLE_PARAGRAPHS])
    if any(of_stack.counts for of_stack in loads.values()):
        figures["loads"] = {
            prefix + key: [round(float(share), 4) for share in count / count.sum()]
            for prefix, of_stack in loads.items() for key, count in of_stack.counts.items()}
        figures["dead_experts"] = sum(of_stack.dead() for of_stack in loads.values())
        figures["least_load"] = min(of_stack.least_share() for of_stack in loads.values())
        figures["shuffle_effect_percent"] = effects(name, config, tensors,
                                                    texts[:SHUFFLE_PARAGRAPHS], loads)
    return figures


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", type=pathlib.Path, required=True)
    arguments.add_argument("--out", type=pathlib.Path, required=True)
    arguments.add_argument("names", nargs="*", default=list(ENCODERS))
    options = arguments.parse_args()
    torch.set_num_threads(1)
    for name in options.names:
        found = evaluate(options.models / name, lambda line: print(line, flush=True))
        figures = json.loads(options.out.read_text()) if options.out.exists() else {}
        figures[name] = {**figures.get(name, {}), **found}
        options.out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
        print(name, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
