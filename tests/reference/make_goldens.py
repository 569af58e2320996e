"""Writes the golden results that the server's tests compare with.

For every tiny model: the checkpoint folder and golden.safetensors. For every trained model:
golden.safetensors, and its perplexity in perplexity.json. All computed in fp32 from the stored
weights by routed_decoder.py.

golden.safetensors holds, for P prompts of 64 tokens:
  prompts I32 [P,64]; target_logprobs F32 [P,63]: log-probability of token i+1 at position i;
  top_ids I32, top_logprobs F32 [P,64,8]; greedy I32 [P,64]: continuation of the prompt;
  greedy_margin F32 [P,64]: lead of each greedy token over the second, in log-probability;
  bf16_target_logprobs F32 [P,63], bf16_top_logprobs F32 [P,64,8] (at top_ids): the same of a run with
  bf16 products and the fp32 run's routes;
  routes.<layer>.<attention|feed_forward>.{offsets I32 [rows+1], experts I32 [A], weights F32 [A]}:
  routes of the prompts; rows by prompt, then token, then sub-token; experts ascend in a row.

  python3 make_goldens.py [--check] [--only NAME ...] [--tiny | --trained]
  python3 make_goldens.py --tiny --fault split_reversed --out FOLDER
"""

import argparse
import hashlib
import json
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "support"))

import bundled_models
import routed_decoder
import safetensors_io
import selection
import tiny_models

ROOT = pathlib.Path(__file__).resolve().parents[2]
REFERENCE = pathlib.Path(__file__).resolve().parent
MODELS = ROOT / "deploy" / "models"
HELDOUT = ROOT / "tests" / "data" / "heldout.txt"

LENGTH = 64
TINY_PROMPTS, TRAINED_PROMPTS = 8, 20
TOP = 8
PERPLEXITY_TOKENS, PERPLEXITY_WINDOW = 20_000, 512
# How far a regenerated number may lie from the stored one: sums may run in another order on
# another machine. Integers must be equal.
TOLERANCE = 2e-4
# With bf16 products a sum that lands on the other side of a rounding boundary moves what follows by
# a bf16 step.
BF16_TOLERANCE = 2e-2


def hash_files(files: dict[str, bytes]) -> str:
    """sha256 over the files in the order of their names, each as name, 0, content."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name])
    return digest.hexdigest()


def reference_hash() -> str:
    return hash_files({path.name: path.read_bytes() for path in REFERENCE.glob("*.py")})


def read_folder(folder: pathlib.Path) -> dict[str, bytes]:
    """config.json and the weight files of a checkpoint folder."""
    paths = [folder / "config.json", *folder.glob("model*.safetensors*")]
    return {path.name: path.read_bytes() for path in paths}


def metadata(files: dict[str, bytes], fault: str | None) -> dict[str, str]:
    weights = {name: data for name, data in files.items() if name != "config.json"}
    out = {"reference_hash": reference_hash(), "weights_hash": hash_files(weights),
           "config_hash": hashlib.sha256(files["config.json"]).hexdigest()}
    if fault:
        out["fault"] = fault
    return out


def tiny_prompts(name: str, vocab: int) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (TINY_PROMPTS, LENGTH), generator=generator)


def heldout_tokens() -> torch.Tensor:
    """The held-out text as one stream; the separator between documents is a single token."""
    import tokenizers  # Only the trained models need it.
    tokenizer = tokenizers.Tokenizer.from_file(str(MODELS / "dense/tokenizer.json"))
    return torch.tensor(tokenizer.encode(HELDOUT.read_text(encoding="utf-8")).ids)


def trained_prompts(stream: torch.Tensor) -> torch.Tensor:
    """Prompts spread evenly over the held-out text."""
    step = (len(stream) - LENGTH) // TRAINED_PROMPTS
    return torch.stack([stream[i * step:i * step + LENGTH] for i in range(TRAINED_PROMPTS)])


def golden_tensors(model: routed_decoder.RoutedDecoder, narrow: routed_decoder.RoutedDecoder,
                   prompts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Results of `model`; `narrow` is the same model with bf16 products."""
    narrow_targets, narrow_top = [], []
    targets, top_ids, top_logprobs, greedy, margins = [], [], [], [], []
    recorded: list[dict[str, routed_decoder.Routes]] = []
    for prompt in prompts:
        logprobs = model.forward(prompt).log_softmax(-1)
        recorded.append(dict(model.recorded))
        targets.append(logprobs[:-1].gather(1, prompt[1:, None])[:, 0])
        best = logprobs.topk(TOP, dim=1)
        top_ids.append(best.indices.to(torch.int32))
        top_logprobs.append(best.values)
        narrow.replay = recorded[-1]
        narrow_logprobs = narrow.forward(prompt).log_softmax(-1)
        narrow_targets.append(narrow_logprobs[:-1].gather(1, prompt[1:, None])[:, 0])
        narrow_top.append(narrow_logprobs.gather(1, best.indices))
        tokens, margin = model.greedy(prompt, LENGTH)
        greedy.append(tokens)
        margins.append(margin)
    out = {"prompts": prompts.to(torch.int32), "target_logprobs": torch.stack(targets),
           "top_ids": torch.stack(top_ids), "top_logprobs": torch.stack(top_logprobs),
           "greedy": torch.stack(greedy), "greedy_margin": torch.stack(margins),
           "bf16_target_logprobs": torch.stack(narrow_targets),
           "bf16_top_logprobs": torch.stack(narrow_top)}
    for key in recorded[0]:
        routes = selection.concatenate_routes([routes[key] for routes in recorded])
        for field in ("offsets", "experts", "weights"):
            out[f"routes.{key}.{field}"] = getattr(routes, field)
    return out


def tiny_golden(name: str, fault: str | None) -> bytes:
    config, tensors = tiny_models.tiny_tensors(name)
    model, narrow = (routed_decoder.RoutedDecoder(config, tensors, fault=fault, bf16_products=bf16)
                     for bf16 in (False, True))
    golden = golden_tensors(model, narrow, tiny_prompts(name, config["vocab_size"]))
    return safetensors_io.to_bytes(golden, metadata(tiny_models.folder_files(name), fault))


def trained_golden(name: str, fault: str | None) -> bytes:
    model, narrow = (routed_decoder.RoutedDecoder.from_folder(MODELS / name, fault=fault,
                                                              bf16_products=bf16)
                     for bf16 in (False, True))
    golden = golden_tensors(model, narrow, trained_prompts(heldout_tokens()))
    return safetensors_io.to_bytes(golden, metadata(read_folder(MODELS / name), fault))


def perplexities(names: list[str]) -> dict[str, object]:
    tokens = heldout_tokens()[:PERPLEXITY_TOKENS]
    figures = {}
    for name in names:
        model = routed_decoder.RoutedDecoder.from_folder(MODELS / name)
        figures[name] = round(
            routed_decoder.perplexity(model, tokens, PERPLEXITY_WINDOW), 5)
    return {
        "text": "tests/data/heldout.txt", "tokens": PERPLEXITY_TOKENS,
        "window": PERPLEXITY_WINDOW, "predicted": PERPLEXITY_TOKENS - len(
            range(0, PERPLEXITY_TOKENS, PERPLEXITY_WINDOW)),
        "definition": "The text is encoded as a whole, <|endoftext|> as the special token, nothing "
                      "added; its first 20000 tokens are cut into windows of 512 tokens without "
                      "overlap, the last one of 32. Each window is a sequence of its own starting "
                      "at position 0 and predicts all of its tokens but the first. Perplexity is "
                      "exp of the mean negative natural log-probability of all predicted tokens.",
        "perplexity": figures}


def first_difference(name: str, stored: dict[str, torch.Tensor],
                     fresh: dict[str, torch.Tensor]) -> str | None:
    """What is wrong with one stored tensor, or None.

    Integers are equal but for ties: two tokens of the top 8 with the same log-probability may
    change places, and a greedy continuation counts up to its first near tie.
    """
    old, new = stored[name], fresh[name]
    if old.shape != new.shape or old.dtype != new.dtype:
        return "has another shape or type"
    if old.dtype.is_floating_point:
        off = (old - new).abs()
        if name == "greedy_margin":
            off = off * _before_near_tie(fresh["greedy_margin"])
        worst = float(off.max()) if off.numel() else 0.0
        tolerance = BF16_TOLERANCE if name.startswith("bf16_") else TOLERANCE
        return f"is off by {worst:.2e}" if not worst <= tolerance else None
    differs = old != new
    if name == "greedy":
        differs &= _before_near_tie(fresh["greedy_margin"])
    if name == "top_ids":
        gaps = fresh["top_logprobs"][..., :-1] - fresh["top_logprobs"][..., 1:]
        near = torch.nn.functional.pad(gaps, (1, 1), value=0.0) < TOLERANCE
        differs &= ~(near[..., :-1] | near[..., 1:])
    return "differs" if bool(differs.any()) else None


def _before_near_tie(margins: torch.Tensor) -> torch.Tensor:
    """True [P, 64] for the greedy tokens up to the first whose lead is within the tolerance."""
    return (margins < TOLERANCE).cumsum(1) == 0


def compare(path: pathlib.Path, content: bytes) -> list[str]:
    """Differences between a stored file and regenerated content."""
    if not path.exists():
        return [f"{path} is missing"]
    if path.name == "perplexity.json":
        old, new = json.loads(path.read_text()), json.loads(content)
        figures = old.pop("perplexity"), new.pop("perplexity")
        close = figures[0].keys() == figures[1].keys() and all(
            abs(figures[0][name] / value - 1) < TOLERANCE for name, value in figures[1].items())
        return [] if old == new and close else [f"{path} differs"]
    if path.name != "golden.safetensors":
        return [] if path.read_bytes() == content else [f"{path} differs"]
    stored, stored_meta = safetensors_io.load(path)
    fresh, fresh_meta = safetensors_io.from_bytes(content)
    problems = [f"{path}: {key} is {stored_meta.get(key)}, expected {value}"
                for key, value in fresh_meta.items() if stored_meta.get(key) != value]
    if stored.keys() != fresh.keys():
        return problems + [f"{path}: tensors differ: {sorted(stored.keys() ^ fresh.keys())}"]
    for name in fresh:
        fault = first_difference(name, stored, fresh)
        if fault:
            problems.append(f"{path}: {name} {fault}")
    return problems


def emit(path: pathlib.Path, content: bytes, check: bool) -> list[str]:
    if check:
        return compare(path, content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return []


def run(options: argparse.Namespace) -> list[str]:
    problems: list[str] = []
    out = options.out
    trained = [folder.name for folder in bundled_models.folders()]
    chosen = set(options.only or [*tiny_models.TINY, *trained])
    if not options.trained:
        for name in tiny_models.TINY:
            if name in chosen:
                for file, content in tiny_models.folder_files(name).items():
                    problems += emit(out / name / file, content, options.check)
                problems += emit(out / name / "golden.safetensors",
                                 tiny_golden(name, options.fault), options.check)
                print(name, flush=True)
    if not options.tiny:
        names = [name for name in trained if name in chosen]
        for name in names:
            problems += emit(out / name / "golden.safetensors",
                             trained_golden(name, options.fault), options.check)
            print(name, flush=True)
        if not options.only and not options.fault:
            text = json.dumps(perplexities(names), indent=1) + "\n"
            problems += emit(out / "perplexity.json", text.encode(), options.check)
    return problems


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=pathlib.Path, default=ROOT / "tests" / "golden")
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--only", nargs="+")
    arguments.add_argument("--tiny", action="store_true")
    arguments.add_argument("--trained", action="store_true")
    arguments.add_argument("--fault", choices=routed_decoder.FAULTS)
    options = arguments.parse_args()
    if options.fault and options.out == ROOT / "tests" / "golden":
        sys.exit("goldens with a planted error need --out, another folder")
    torch.set_num_threads(1)
    problems = run(options)
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
