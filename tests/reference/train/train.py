"""Trains one bundled model on one core and exports it as a native checkpoint folder.

All models are trained on the same blocks of tokens in the same order, with the same batch size,
number of steps, optimizer and learning rate. The extra losses and their weights are those of the
papers:
  X-MoE eq. 9, MH-MoE eq. 10: load balance, weight 1e-2 (smoe too)
  MoA eq. 13 and 16:          load balance with normalized loads, weight 1e-2; router z-loss, weight
                              1e-3
  HMoE eq. 4 and 5:           parameter penalty with widths relative to their mean, weight 0.1; for
                              top-p also the router's entropy, which is minimized, weight 3e-2
As X-MoE prescribes, expert embeddings of cosine routers keep the norm that they start with.

  python3 train.py --model NAME --data FOLDER --tokenizer FOLDER --work FOLDER --export FOLDER
"""

import argparse
import json
import math
import pathlib
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import safetensors_io  # noqa: E402
from bundled_configs import BUNDLED, Config  # noqa: E402
from fast_model import FastModel, Statistics  # noqa: E402

BLOCK = 1024
BLOCKS_PER_STEP = 2
LENGTHS, LENGTH_SHARES = (256, 512, 1024), (0.7, 0.2, 0.1)
WARM_UP = 100
WEIGHT_DECAY = 0.1
BALANCE = 1e-2
Z_LOSS = 1e-3
PENALTY = 0.1
ENTROPY = 3e-2
# The learning rate of cosine routers and of the split and merge projections, relative to the other
# parameters'. With the default peak theirs is 5e-4, which is that of X-MoE and MH-MoE. At the full
# rate, one step turns an expert embedding of norm 0.1 by several degrees, and every step of a
# projection changes the inputs or outputs of all experts at once.
SLOW_FACTOR = 0.125
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def batches(data: np.ndarray, steps: int, seed: int):
    """Yields token batches [B, T+1]. Every block of BLOCK tokens of the stream occurs once per
    epoch."""
    generator = np.random.default_rng(seed)
    count = (len(data) - 1) // BLOCK
    order = np.concatenate([generator.permutation(count)
                            for _ in range(steps * BLOCKS_PER_STEP // count + 1)])
    for step in range(steps):
        length = int(generator.choice(LENGTHS, p=LENGTH_SHARES))
        rows = []
        for block in order[step * BLOCKS_PER_STEP:(step + 1) * BLOCKS_PER_STEP]:
            for start in range(block * BLOCK, (block + 1) * BLOCK, length):
                rows.append(data[start:start + length + 1])
        yield torch.from_numpy(np.stack(rows).astype(np.int64))


def extra_loss(name: str, stats: Statistics) -> torch.Tensor | float:
    """Returns the weighted sum of the losses that are added to the cross entropy."""
    if name == "hmoe-topk":
        return PENALTY * sum(stats.penalty)
    if name == "hmoe-topp":
        return PENALTY * sum(stats.penalty) + ENTROPY * sum(stats.entropy)
    if name == "moa":
        return BALANCE * sum(stats.balance) + Z_LOSS * sum(stats.z_loss)
    return BALANCE * sum(stats.balance)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Returns the learning rate of a step: a linear warm-up to `peak`, then a cosine decay to 5 %
    of it at step `steps`."""
    if step < WARM_UP:
        return peak * (step + 1) / WARM_UP
    progress = (step - WARM_UP) / max(1, steps - WARM_UP)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def is_slow(name: str) -> bool:
    """Returns whether the parameter `name` learns at SLOW_FACTOR times the rate of the others."""
    cosine_router = ".router." in name and not name.endswith(".router.weight")
    return cosine_router or ".split." in name or ".merge." in name


def make_optimizer(model: FastModel) -> torch.optim.AdamW:
    for value in model.parameters.values():
        value.requires_grad_(True)
    groups: dict[tuple[float, float], list[torch.Tensor]] = {}
    for name, value in model.parameters.items():
        decay = WEIGHT_DECAY if value.ndim == 2 and "router" not in name else 0.0
        groups.setdefault((decay, SLOW_FACTOR if is_slow(name) else 1.0), []).append(value)
    return torch.optim.AdamW([{"params": values, "weight_decay": decay, "factor": factor}
                              for (decay, factor), values in groups.items()],
                             lr=0.0, betas=(0.9, 0.95), fused=True)


@torch.no_grad()
def quick_validation(model: FastModel, data: np.ndarray, windows: int) -> tuple[float, float]:
    """Returns the perplexity and the mean selected width over the first windows of 256 tokens."""
    total = width = 0.0
    for start in range(0, windows, 16):
        rows = [data[i * 256:i * 256 + 257] for i in range(start, start + 16)]
        stats = Statistics()
        total += float(model.loss(torch.from_numpy(np.stack(rows).astype(np.int64)), stats))
        width += sum(stats.selected_width) / max(1, len(stats.selected_width))
    count = len(range(0, windows, 16))
    return math.exp(total / count), width / count


def export(model: FastModel, config: Config, folder: pathlib.Path,
           tokenizer: pathlib.Path) -> None:
    """Writes a native checkpoint folder with bf16 weights. Router tensors are in f32, because
    rounding them would change which experts run."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.float() if ".router." in name else value.to(torch.bfloat16)
               for name, value in model.native_tensors().items()}
    safetensors_io.save(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)


class Run:
    """Trains one model and saves a checkpoint every --save-seconds. Subclasses train other kinds of
    models: they bring other batches, losses and validations."""

    def __init__(self, options: argparse.Namespace, config: Config, model: Any) -> None:
        self.options = options
        self.config = config
        self.model = model
        self.optimizer = make_optimizer(self.model)
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.checkpoint = options.work / f"{options.model}.pt"
        if self.checkpoint.exists() and options.resume:
            state = torch.load(self.checkpoint, weights_only=False)
            with torch.no_grad():
                for name, value in self.model.parameters.items():
                    value.copy_(state["parameters"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.tokens = state["step"], state["tokens"]
            self.seconds = state["seconds"]

    def batches(self) -> Iterator[Any]:
        data = np.load(self.options.data / "train.npy")
        return batches(data, self.options.steps, self.options.seed)

    def tokens_of(self, batch: Any) -> int:
        return BLOCK * BLOCKS_PER_STEP

    def extra_loss(self, stats: Statistics) -> torch.Tensor | float:
        return extra_loss(self.options.model, stats)

    def validate(self) -> str:
        validation = np.load(self.options.data / "validation.npy")
        perplexity, width = quick_validation(self.model, validation, 160)
        return f"validation perplexity {perplexity:.2f}, selected width {width:.1f}"

    def save(self) -> None:
        partial = self.checkpoint.with_suffix(".part")
        torch.save({"parameters": {n: v.detach() for n, v in self.model.parameters.items()},
                    "optimizer": self.optimizer.state_dict(), "tokens": self.tokens,
                    "step": self.step, "seconds": self.seconds}, partial)
        partial.replace(self.checkpoint)
        export(self.model, self.config, self.options.export, self.options.tokenizer)

    def train_step(self, batch: Any) -> tuple[float, Statistics]:
        rate = learning_rate(self.step, self.options.steps, self.options.rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        stats = Statistics()
        loss = self.model.loss(batch, stats)
        (loss + self.extra_loss(stats)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.restore_embedding_norms()
        return float(loss.detach()), stats

    def run(self) -> None:
        last_save = began = time.monotonic()
        mean_loss = 0.0
        for index, batch in enumerate(self.batches()):
            if index < self.step:
                continue
            if self.step == self.options.until:
                break
            loss, stats = self.train_step(batch)
            self.step += 1
            self.tokens += self.tokens_of(batch)
            mean_loss = loss if not mean_loss else 0.95 * mean_loss + 0.05 * loss
            now = time.monotonic()
            if self.step % 50 == 0:
                self.report(mean_loss, stats, self.seconds + now - began)
            if now - last_save > self.options.save_seconds:
                last_save = now
                before, self.seconds = self.seconds, self.seconds + now - began
                self.save()
                self.seconds = before
        self.seconds += time.monotonic() - began
        self.save()
        print(f"done {self.options.model}: {self.step} steps, {self.seconds:.0f} s, "
              f"{self.validate()}", flush=True)
        (self.options.work / f"{self.options.model}.json").write_text(json.dumps({
            "steps": self.step, "tokens": self.tokens,
            "seconds": round(self.seconds), "rate": self.options.rate}))

    def report(self, loss: float, stats: Statistics, seconds: float) -> None:
        low = min((float(load.min() / load.mean()) for load in stats.loads), default=1.0)
        width = sum(stats.selected_width) / max(1, len(stats.selected_width))
        print(f"{self.options.model} step {self.step} loss {loss:.3f} {seconds:.0f} s "
              f"{self.tokens / seconds:.0f} tokens/s least load {low:.2f} width {width:.1f} "
              f"entropy {[round(float(e.detach()), 2) for e in stats.entropy]}", flush=True)


def parse_options(description: str | None, models: Iterable[str], steps: int,
                  rate: float) -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--model", choices=sorted(models), required=True)
    for name in ("data", "tokenizer", "work", "export"):
        arguments.add_argument(f"--{name}", type=pathlib.Path, required=True)
    arguments.add_argument("--steps", type=int, default=steps)
    arguments.add_argument("--rate", type=float, default=rate)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--save-seconds", type=float, default=120)
    arguments.add_argument("--until", type=int, help="stop earlier, at this step; see --resume")
    arguments.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    return options


def main() -> None:
    options = parse_options(__doc__, BUNDLED, steps=3600, rate=4e-3)
    config = BUNDLED[options.model]
    Run(options, config, FastModel(config, seed=options.seed)).run()


if __name__ == "__main__":
    main()
