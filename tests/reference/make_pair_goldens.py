"""Writes the golden results of encoder-decoders that the server's tests compare with.

For every model of pair_models.py: the checkpoint folder and golden.safetensors, computed in fp32
from the stored weights by routed_pair.py. For P pairs of a source and the beginning of the
decoder's text, which the start token begins:
  sources I32 [S], source_offsets I32 [P+1]; tokens I32 [T], offsets I32 [P+1];
  top_ids I32, top_logprobs F32 [T,8]: after each of the tokens; greedy I32 [P,G] and greedy_margin
  F32 [P,G]: the greedy continuation; beam_tokens I32 [P,4,B], padded with -1, and beam_scores F32
  [P,4]: beam search of width 4 with at most B tokens and length penalty 1, best first.

  python3 make_pair_goldens.py [--check] [--only NAME ...]
"""

import argparse
import hashlib
import pathlib
import sys

import torch

import make_goldens
import pair_models
import safetensors_io
from routed_pair import RoutedPair

GREEDY, BEAM, BEAM_TOKENS = 20, 4, 10


def golden(name: str) -> bytes:
    config, tensors = pair_models.pair_tensors(name)
    model = RoutedPair(config, tensors)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, list] = {key: [] for key in (
        "sources", "tokens", "top_ids", "top_logprobs", "greedy", "greedy_margin", "beam_tokens",
        "beam_scores")}
    for source_length, length in pair_models.LENGTHS:
        source = torch.randint(4, config["vocab_size"], (source_length,), generator=generator)
        rest = torch.randint(4, config["vocab_size"], (length - 1,), generator=generator)
        prompt = torch.cat([torch.tensor([model.start]), rest])
        model.read(source)
        best = model.decoder.forward(prompt).log_softmax(-1).topk(make_goldens.TOP, dim=1)
        greedy, margin = model.greedy(source, prompt, GREEDY)
        beams = model.beams(source, prompt, BEAM, BEAM_TOKENS, {config["eos_token_id"]}, 1.0)
        padded = [tokens + [-1] * (BEAM_TOKENS - len(tokens)) for _, tokens in beams]
        for key, value in (
                ("sources", source), ("tokens", prompt), ("top_ids", best.indices),
                ("top_logprobs", best.values), ("greedy", greedy), ("greedy_margin", margin),
                ("beam_tokens", torch.tensor(padded)),
                ("beam_scores", torch.tensor([score for score, _ in beams]))):
            out[key].append(value)
    lengths = torch.tensor([[0, 0], *pair_models.LENGTHS]).cumsum(0)
    result = {key: (torch.stack if key.startswith(("greedy", "beam")) else torch.cat)(value)
              for key, value in out.items()}
    result["source_offsets"], result["offsets"] = lengths[:, 0], lengths[:, 1]
    result = {key: value.float() if value.is_floating_point() else value.to(torch.int32)
              for key, value in result.items()}
    meta = make_goldens.metadata(pair_models.folder_files(name), None)
    return safetensors_io.to_bytes({k: v.contiguous() for k, v in result.items()}, meta)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=pathlib.Path,
                           default=make_goldens.ROOT / "tests" / "golden" / "pairs")
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--only", nargs="+")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    problems = []
    for name in options.only or pair_models.PAIRS:
        for file, content in pair_models.folder_files(name).items():
            problems += make_goldens.emit(options.out / name / file, content, options.check)
        problems += make_goldens.emit(options.out / name / "golden.safetensors", golden(name),
                                      options.check)
        print(name, flush=True)
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
