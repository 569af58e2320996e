"""Writes the golden results of encoders that the server's tests compare with.

For every model of encoder_models.py: the checkpoint folder and golden.safetensors, computed in fp32
from the stored weights by routed_encoder.py. For P texts of together T tokens it holds:
  tokens I32 [T], offsets I32 [P+1], types I32 [T]; where the head has them
  target_logprobs F32 [T]: log-probability of the token at its own position, top_ids I32,
  top_logprobs F32 [T,8]; logits F32 [T,n] of labels of tokens; where there is a pooling
  texts F32 [P,w]: vectors, or logits of labels of texts; all also with the prefix bf16_ (top_logprobs
  at top_ids) of a run with bf16 products and the fp32 run's routes; and
  routes.<layer>.<attention|feed_forward>.{offsets, experts, weights} as in make_goldens.py.

  python3 make_encoder_goldens.py [--check] [--only NAME ...]
"""

import argparse
import hashlib
import pathlib
import sys

import torch

import encoder_models
import make_goldens
import safetensors_io
import selection
from routed_encoder import RoutedEncoder

Tensor = torch.Tensor


def texts_of(name: str, vocab: int, types: int) -> list[tuple[Tensor, Tensor]]:
    """The tokens of each text and their types."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for length in encoder_models.LENGTHS:
        tokens = torch.randint(0, vocab, (length,), generator=generator)
        second = torch.arange(length) >= length // 2
        texts.append((tokens, second.long() if types > 1 else torch.zeros_like(tokens)))
    return texts


def outputs_of(model: RoutedEncoder, rows: Tensor, tokens: Tensor,
               top_ids: Tensor | None) -> dict[str, Tensor]:
    out = {}
    kind = model.config["head"]["kind"]
    if kind in ("masked_lm", "language_model"):
        logits = model.logits(rows) if kind == "masked_lm" else model.forward(tokens)
        logprobs = logits.log_softmax(-1)
        ids = logprobs.topk(make_goldens.TOP, dim=1).indices if top_ids is None else top_ids
        out = {"target_logprobs": logprobs.gather(1, tokens[:, None])[:, 0],
               "top_ids": ids, "top_logprobs": logprobs.gather(1, ids)}
    elif kind in ("token_classification", "spans"):
        out = {"logits": model.logits(rows)}
    if "pooling" in model.config:
        out["texts"] = model.text(rows)[None]
    return out


def golden(name: str) -> bytes:
    config, tensors = encoder_models.encoder_tensors(name)
    model, narrow = (RoutedEncoder(config, tensors, bf16_products=bf16) for bf16 in (False, True))
    texts = texts_of(name, config["vocab_size"], model.config["token_types"])
    parts: list[dict[str, Tensor]] = []
    recorded = []
    for tokens, types in texts:
        part = outputs_of(model, model.rows(tokens, types), tokens, None)
        recorded.append(dict(model.recorded))
        narrow.replay = recorded[-1]
        rounded = outputs_of(narrow, narrow.rows(tokens, types), tokens, part.get("top_ids"))
        part.update({f"bf16_{key}": value for key, value in rounded.items() if key != "top_ids"})
        parts.append(part)
    out = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    if "top_ids" in out:
        out["top_ids"] = out["top_ids"].to(torch.int32)
    lengths = torch.tensor([0] + [len(tokens) for tokens, _ in texts])
    out["offsets"] = lengths.cumsum(0).to(torch.int32)
    out["tokens"] = torch.cat([tokens for tokens, _ in texts]).to(torch.int32)
    out["types"] = torch.cat([types for _, types in texts]).to(torch.int32)
    for key in recorded[0]:
        routes = selection.concatenate_routes([routes[key] for routes in recorded])
        for field in ("offsets", "experts", "weights"):
            out[f"routes.{key}.{field}"] = getattr(routes, field)
    meta = make_goldens.metadata(encoder_models.folder_files(name), None)
    return safetensors_io.to_bytes(out, meta)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=pathlib.Path,
                           default=make_goldens.ROOT / "tests" / "golden" / "encoders")
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--only", nargs="+")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    problems = []
    for name in options.only or encoder_models.ENCODERS:
        for file, content in encoder_models.folder_files(name).items():
            problems += make_goldens.emit(options.out / name / file, content, options.check)
        problems += make_goldens.emit(options.out / name / "golden.safetensors", golden(name),
                                      options.check)
        print(name, flush=True)
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
