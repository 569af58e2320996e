#!/usr/bin/env python3
"""Compares tokens per second of whole models between the server and PyTorch.

    gpu_models.py --moeserve PROGRAM [--json FILE] [--seconds N] [--models FOLDER]
                  [--device cuda|cpu] [--tiny]

  model/NAME/B1       Decodes one sequence with a bundled model: with `moeserve bench`, and with the
                      PyTorch reference and its KV cache, eager and compiled.
  mixtral/B.../L...   Decodes with 8 layers of Mixtral-8x7B with random weights, whose routes are
                      almost uniform: with `moeserve bench`, and with generate() of Hugging Face
                      transformers at the same batch size, context length and number of tokens.
                      Prompts have the same length, too.

Every measurement runs in its own process with a time limit. A measurement that fails is recorded in
FILE with the field "error".
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from gpu_common import Line, Results, Tensor

ROOT = pathlib.Path(__file__).resolve().parents[3]
MODELS = ("smoe", "mh-moe", "hmoe-topp", "moa", "x-moe", "hmoe-topk", "dense")
CONTEXT, TOKENS = 64, 64
MIXTRAL = ((1, 1024), (32, 1024))
PREFIX = "result: "


# The measurements. Each runs in a separate process.

def reference(folder: pathlib.Path, device: str, compiled: bool, tokens: int) -> Line:
    """Times greedy decoding with tests/reference/routed_decoder.py."""
    import torch
    sys.path.insert(0, str(ROOT / "tests" / "reference"))
    import routed_decoder

    torch.set_grad_enabled(False)
    config, tensors = routed_decoder.load_folder(folder)
    model = routed_decoder.RoutedDecoder(config, {n: t.to(device) for n, t in tensors.items()},
                                         dtype=torch.bfloat16)
    torch.set_default_device(device)
    forward = torch.compile(model.forward, dynamic=True) if compiled else model.forward
    cache = model.new_cache()
    prompt = (torch.arange(CONTEXT) * 7 + 3) % 500
    token = model.forward(prompt, cache)[-1:].argmax(-1)

    def steps(count: int, token: Tensor) -> Tensor:
        for _ in range(count):
            token = forward(token, cache)[-1:].argmax(-1)
        if device == "cuda":
            torch.cuda.synchronize()
        return token

    token = steps(8, token)
    start = time.perf_counter()
    steps(tokens, token)
    return {"tokens_per_second": tokens / (time.perf_counter() - start)}


def transformers_generate(batch: int, context: int, tokens: int, device: str, tiny: bool,
                          variant: str) -> Line:
    """Times generate() of transformers on a Mixtral with random weights.

    `variant` names the implementation of the experts ("eager", "grouped_mm" or "batched_mm"), or is
    "static": "grouped_mm" with a static KV cache, with which transformers compiles the decoding.
    """
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.set_grad_enabled(False)
    sizes: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336,
                             "num_hidden_layers": 8, "vocab_size": 32000}
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                 "vocab_size": 500, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(**sizes, max_position_embeddings=32768, sliding_window=None,
                           eos_token_id=None, pad_token_id=0)
    # Older versions of transformers ignore these settings.
    config._attn_implementation = "sdpa"
    config._experts_implementation = "grouped_mm" if variant == "static" else variant
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = MixtralForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        else:
            parameter.fill_(1.0)
    model.eval()
    prompt = torch.randint(1, sizes["vocab_size"], (batch, context), device=device)
    extra = {"cache_implementation": "static"} if variant == "static" else {}

    def generate(count: int) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                             max_new_tokens=count, min_new_tokens=count, use_cache=True, **extra)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if out.shape[1] != context + count:
            raise ValueError(f"{out.shape[1] - context} tokens, expected {count}")
        return seconds

    generate(tokens + 1)  # warms up and compiles
    prompts = sorted(generate(1) for _ in range(3))
    whole = sorted(generate(tokens + 1) for _ in range(3))
    return {"tokens_per_second": batch * tokens / (whole[1] - prompts[1]),
            "prompt_tokens_per_second": batch * context / prompts[1],
            "implementation": getattr(config, "_experts_implementation", None)}


# The parent process, which starts the measurements.

def in_process(arguments: list[str], limit: float) -> Line:
    """Runs one of the measurements in a process and returns its result.

    Raises RuntimeError with the last line of the output if the process failed.
    """
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(PREFIX):
            return json.loads(line[len(PREFIX):])
    said = (done.stderr or done.stdout).strip().splitlines()
    raise RuntimeError(said[-1][:300] if said else f"exit status {done.returncode}")


def serve_bench(program: pathlib.Path, device: str, arguments: list[str], limit: float,
                ) -> dict[str, Line]:
    """Runs `moeserve bench` and returns {name: case} for its cases."""
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "bench.json"
        command = [str(program), "bench", "--device", device, "--json", str(output), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        if done.returncode != 0 or not output.exists():
            said = (done.stderr or done.stdout).strip().splitlines()
            raise RuntimeError(said[-1][:300] if said else f"exit status {done.returncode}")
        return {case["name"]: case for case in json.loads(output.read_text())["cases"]}


class Run:
    """Runs the measurements one after the other while there is time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.results = Results(arguments.json)
        self.end = time.monotonic() + arguments.seconds

    def left(self) -> float:
        return self.end - time.monotonic()

    def add(self, names: list[str], method: str, limit: float, measure: Any) -> None:
        """Runs `measure(limit)`, which returns a result for every name."""
        if all(self.results.has(name, method) for name in names) or self.left() < 10:
            return
        limit = min(limit, self.left())
        try:
            lines = measure(limit)
        except subprocess.TimeoutExpired:
            lines = [{"error": f"not done after {limit:.0f} s"}] * len(names)
        except Exception as error:  # a failing measurement must not end the run
            lines = [{"error": f"{type(error).__name__}: {error}"[:400]}] * len(names)
        for name, line in zip(names, lines):
            self.results.add({"name": name, "method": method, **line})

    def bundled(self, name: str) -> None:
        a = self.arguments
        folder = a.models / name
        tokens = 8 if a.tiny else TOKENS
        batches = (1, 32)
        limit = 60 if a.device == "cuda" else 120

        def ours(limit: float) -> list[Line]:
            cases = serve_bench(a.moeserve, a.device,
                                ["--model", str(folder), "--batch", "1,32", "--context",
                                 str(CONTEXT), "--tokens", str(tokens), "--dtype", "bf16"], limit)
            return [_ours(cases[f"decode {b}"]) for b in batches]

        self.add([f"model/{name}/B{b}" for b in batches], "moeserve", limit, ours)
        self.reference(name, "eager", limit)

    def reference(self, name: str, method: str, limit: float) -> None:
        a = self.arguments
        self.add([f"model/{name}/B1"], f"reference {method}", limit,
                 lambda limit: [in_process(["--one", method, str(a.models / name), "--device",
                                            a.device, "--tokens", str(8 if a.tiny else TOKENS)],
                                           limit)])

    def mixtral(self) -> None:
        a = self.arguments
        tokens = 8 if a.tiny else TOKENS
        context = 16 if a.tiny else MIXTRAL[0][1]
        batches = [2] if a.tiny else [b for b, _ in MIXTRAL]
        names = [f"mixtral/B{b}/L{context}" for b in batches]

        def ours(limit: float) -> list[Line]:
            cases = serve_bench(a.moeserve, a.device,
                                ["--synthetic", "small" if a.tiny else "mixtral", "--dtype", "bf16",
                                 "--batch", ",".join(map(str, batches)), "--context", str(context),
                                 "--tokens", str(tokens), "--prompt", str(context),
                                 "--chunk", "2048"], limit)
            lines = [_ours(cases[f"decode {b}"]) for b in batches]
            for line in lines:
                line["prompt_tokens_per_second"] = \
                    cases[f"prompt {context}"]["tokens_per_second"]
            return lines

        self.add(names, "moeserve", 180, ours)
        for variant in ("grouped_mm", "static", "batched_mm", "eager"):
            for name, batch in zip(names, batches):
                self.add([name], f"transformers {variant}", 120,
                         lambda limit: [in_process(
                             ["--one", variant, str(batch), str(context), "--device", a.device,
                              "--tokens", str(tokens), *(["--tiny"] if a.tiny else [])], limit)])


def _ours(case: Line) -> Line:
    line = {"tokens_per_second": case["tokens_per_second"]}
    if "share" in case:
        line["share_of_floor"] = case["share"]
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moeserve", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--models", type=pathlib.Path, default=ROOT / "deploy" / "models")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        what, *rest = arguments.one
        if what in ("eager", "compiled") and len(rest) == 1:
            line = reference(pathlib.Path(rest[0]), arguments.device, what == "compiled",
                             arguments.tokens)
        else:
            line = transformers_generate(int(rest[0]), int(rest[1]), arguments.tokens,
                                         arguments.device, arguments.tiny, what)
        print(PREFIX + json.dumps(line))
        return
    if arguments.moeserve is None:
        parser.error("--moeserve: expected the program")
    run = Run(arguments)
    run.bundled(MODELS[0])
    run.mixtral()
    others = MODELS[1:2] if arguments.tiny else MODELS[1:]
    for name in others:
        run.bundled(name)
    # The compiled reference runs last, since compiling its loop over experts can take minutes.
    for name in (MODELS[0], *others):
        run.reference(name, "compiled", 90)


if __name__ == "__main__":
    main()
