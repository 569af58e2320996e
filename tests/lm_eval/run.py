"""Runs lm_eval against the server and compares the results with the PyTorch reference.

For each model, lm_eval runs the shuffled-words task with its model type `local-completions` against
the server in f32. Each log-likelihood is compared with the reference, and the accuracy must exceed
ACCURACY_FLOOR. The perplexity of the held-out text is measured through `/v1/completions` with the
server in f32 and in bf16, and compared with the reference in f32.

  MOESERVE_BIN=build/release/moeserve python3 run.py [MODEL ...]

MODEL is the name of a folder in deploy/models or a path. Without MODEL, all sparse decoders in
deploy/models are tested.
"""

import argparse
import contextlib
import dataclasses
import http.client
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODELS = ROOT / "deploy" / "models"
sys.path[:0] = [str(ROOT / "tests" / "reference"), str(ROOT / "tests" / "support")]

import tokenizers  # noqa: E402
import torch  # noqa: E402

import bundled_models  # noqa: E402
import make_goldens  # noqa: E402
import make_task  # noqa: E402
import routed_decoder  # noqa: E402

TASK = "shuffled_words"
LOGLIKELIHOOD_TOLERANCE = 1e-3
PERPLEXITY_TOLERANCE = 1e-3
ACCURACY_FLOOR = 0.80
WINDOWS_PER_REQUEST = 8
START_SECONDS = 60
LM_EVAL_SECONDS = 900

# The forms of lm_eval's requests, each with lm_eval's batch size and model arguments: "ids" sends
# lists of token ids with lm_eval's defaults, "batches" sends batches of such lists over several
# connections, "text" sends plain text, which the server has to tokenize, and "remote" sends ids that
# lm_eval gets from the server's /tokenize instead of from the tokenizer's file.
FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "ids": (1, {}),
    "batches": (8, {"num_concurrent": 4}),
    "text": (1, {"tokenized_requests": False, "num_concurrent": 4}),
    "remote": (1, {"tokenizer_backend": "remote"}),
}


@dataclasses.dataclass
class Server:
    host: str
    port: int
    name: str

    def completions(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the response of `/v1/completions`. The connection ignores proxy settings."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=300)
        try:
            connection.request("POST", "/v1/completions", json.dumps({"model": self.name, **body}),
                               {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {content[:500]!r}")
        return json.loads(content)


@contextlib.contextmanager
def serving(binary: pathlib.Path, folder: pathlib.Path, dtype: str) -> Iterator[Server]:
    """Runs the server on a free port. Prints its log if it does not start."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [binary, "serve", "--model", folder, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
             "--dtype", dtype], stdout=subprocess.PIPE, stderr=log, text=True)
        overdue = threading.Timer(START_SECONDS, process.kill)
        overdue.start()
        try:
            address = next((line.split()[-1] for line in process.stdout
                            if line.startswith("http listening on ")), None)
            overdue.cancel()
            if address is None:
                log.seek(0)
                raise RuntimeError(f"the server did not start:\n{log.read()[-4000:]}")
            host, _, port = address.rpartition(":")
            yield Server(host, int(port), folder.name)
        finally:
            overdue.cancel()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def is_sparse(folder: pathlib.Path) -> bool:
    config = routed_decoder.complete_config(json.loads((folder / "config.json").read_text()))
    return any(layer["kind"] == "routed" for layer in config["attention"] + config["feed_forward"])


def find_models(names: list[str]) -> list[pathlib.Path]:
    if names:
        folders = [MODELS / name if (MODELS / name).is_dir() else pathlib.Path(name).resolve()
                   for name in names]
    else:
        folders = [folder for folder in bundled_models.folders() if is_sparse(folder)]
    for folder in folders:
        if not (folder / "config.json").exists():
            sys.exit(f"{folder} is no model folder")
    if not folders:
        sys.exit(f"no sparse model in {MODELS}")
    return folders


def documents() -> list[dict[str, Any]]:
    lines = make_task.DOCUMENTS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def run_lm_eval(server: Server, folder: pathlib.Path,
                form: str) -> tuple[float, list[list[float]]]:
    """Returns lm_eval's accuracy, and the log-likelihood of both choices per document."""
    batch_size, extra = FORMS[form]
    arguments = {"model": server.name, "tokenizer": folder, "tokenizer_backend": "huggingface",
                 "base_url": f"http://{server.host}:{server.port}/v1/completions", **extra}
    with tempfile.TemporaryDirectory() as scratch:
        out = pathlib.Path(scratch) / "out"
        environment = os.environ | {
            "HF_HOME": str(pathlib.Path(scratch) / "hub"), "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
            "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false",
            "PYTHONDONTWRITEBYTECODE": "1", "NO_PROXY": server.host, "no_proxy": server.host}
        finished = subprocess.run(
            [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions",
             "--model_args", ",".join(f"{key}={value}" for key, value in arguments.items()),
             "--batch_size", str(batch_size), "--include_path", HERE, "--tasks", TASK,
             "--output_path", out, "--log_samples"],
            env=environment, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=LM_EVAL_SECONDS, check=False)
        if finished.returncode != 0:
            raise RuntimeError(f"lm_eval ended with status {finished.returncode}:\n"
                               f"{finished.stdout[-6000:]}")
        results = json.loads(next(out.rglob("results_*.json")).read_text())
        lines = next(out.rglob(f"samples_{TASK}_*.jsonl")).read_text(encoding="utf-8").splitlines()
    samples = sorted((json.loads(line) for line in lines), key=lambda sample: sample["doc_id"])
    for sample, document in zip(samples, documents(), strict=True):
        if sample["doc"] != document:
            raise RuntimeError(f"lm_eval's document {sample['doc_id']} is not the stored one")
    figures = [[float(response[0][0]) for response in sample["resps"]] for sample in samples]
    return float(results["results"][TASK]["acc,none"]), figures


def reference_loglikelihoods(model: routed_decoder.RoutedDecoder,
                             folder: pathlib.Path) -> list[list[float]]:
    """Returns the reference's log-likelihood of both choices per document, given `<|endoftext|>` as
    context. The choices are tokenized without lm_eval's code."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    start = tokenizer.token_to_id(make_task.SEPARATOR)
    figures = []
    for document in documents():
        pair = []
        for choice in document["choices"]:
            ids = torch.tensor([start, *tokenizer.encode(choice, add_special_tokens=False).ids])
            logprobs = model.forward(ids)[:-1].double().log_softmax(-1)
            pair.append(float(logprobs.gather(1, ids[1:, None]).sum()))
        figures.append(pair)
    return figures


def server_perplexity(server: Server, stream: list[int]) -> float:
    """Returns the perplexity as routed_decoder.perplexity defines it. The windows are sent as
    prompts of token ids, and the server returns the prompts' log-probabilities (`echo`)."""
    window = make_goldens.PERPLEXITY_WINDOW
    windows = [stream[start:start + window] for start in range(0, len(stream), window)]
    windows = [piece for piece in windows if len(piece) > 1]
    total = 0.0
    count = 0
    for first in range(0, len(windows), WINDOWS_PER_REQUEST):
        batch = windows[first:first + WINDOWS_PER_REQUEST]
        answer = server.completions({"prompt": batch, "max_tokens": 0, "echo": True, "logprobs": 0,
                                     "temperature": 0})
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        for piece, choice in zip(batch, choices, strict=True):
            logprobs = choice["logprobs"]["token_logprobs"]
            if len(logprobs) != len(piece) or logprobs[0] is not None:
                raise RuntimeError(f"{len(logprobs)} log-probabilities for {len(piece)} tokens, "
                                   f"the first {logprobs[:1]}; expected as many and null first")
            total -= math.fsum(logprobs[1:])
            count += len(piece) - 1
    return math.exp(total / count)


def check_task(server: Server, folder: pathlib.Path, reference: list[list[float]],
               form: str) -> list[str]:
    accuracy, figures = run_lm_eval(server, folder, form)
    offs = [abs(ours - theirs) for pair, expected in zip(figures, reference, strict=True)
            for ours, theirs in zip(pair, expected, strict=True)]
    worst = max(offs)
    print(f"{folder.name:<10} lm_eval {form:<8} {len(offs)} log-likelihoods, worst difference "
          f"{worst:.2e}, accuracy {accuracy:.3f}", flush=True)
    problems = []
    beyond = [i for i, off in enumerate(offs) if not off <= LOGLIKELIHOOD_TOLERANCE]
    if beyond:
        problems.append(f"{folder.name} {form}: {len(beyond)} log-likelihoods differ by more than "
                        f"{LOGLIKELIHOOD_TOLERANCE}, the first of document {beyond[0] // 2}, "
                        f"choice {beyond[0] % 2}")
    if not accuracy > ACCURACY_FLOOR:
        problems.append(f"{folder.name} {form}: accuracy {accuracy:.3f} is not above "
                        f"{ACCURACY_FLOOR}")
    return problems


def check_perplexity(server: Server, folder: pathlib.Path, dtype: str, stream: list[int],
                     expected: float) -> list[str]:
    measured = server_perplexity(server, stream)
    off = measured / expected - 1
    print(f"{folder.name:<10} perplexity {dtype:<5} {measured:.4f}, reference {expected:.4f}, "
          f"difference {off:+.4%}", flush=True)
    if abs(off) <= PERPLEXITY_TOLERANCE:
        return []
    return [f"{folder.name}: perplexity in {dtype} is off by {off:+.4%}"]


def check_model(binary: pathlib.Path, folder: pathlib.Path, forms: list[str]) -> list[str]:
    model = routed_decoder.RoutedDecoder.from_folder(folder)
    reference = reference_loglikelihoods(model, folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = make_goldens.HELDOUT.read_text(encoding="utf-8")
    stream = tokenizer.encode(text).ids[:make_goldens.PERPLEXITY_TOKENS]
    expected = routed_decoder.perplexity(model, torch.tensor(stream),
                                         make_goldens.PERPLEXITY_WINDOW)
    problems = []
    with serving(binary, folder, "f32") as server:
        for form in forms:
            problems += check_task(server, folder, reference, form)
        problems += check_perplexity(server, folder, "f32", stream, expected)
    with serving(binary, folder, "bf16") as server:
        problems += check_perplexity(server, folder, "bf16", stream, expected)
    return problems


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__,
                                        formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("models", nargs="*", metavar="MODEL")
    arguments.add_argument("--all-forms", action="store_true",
                           help="send every form of request to every model, not only the first")
    options = arguments.parse_args()
    binary = pathlib.Path(os.environ.get("MOESERVE_BIN", ROOT / "build/release/moeserve")).resolve()
    if not binary.exists():
        sys.exit(f"{binary} is not built; MOESERVE_BIN names the program")
    problems = []
    for number, folder in enumerate(find_models(options.models)):
        every = options.all_forms or number == 0
        problems += check_model(binary, folder, list(FORMS) if every else ["ids"])
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
