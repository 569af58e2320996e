#!/usr/bin/env python3
"""Measures how fast texts are turned into vectors, beside decoders of equal shape and beside other
engines, with random weights.

    encoders.py MOESERVE [--models FOLDER] [--llama PYTHON] [--transformers PYTHON]
                [--threads 2] [--rounds 5] [--json FILE]

Writes the models to FOLDER if they are not there. There are 64 texts with 8 to 256 tokens, as many
short as long ones on a logarithmic scale, and every measurement computes all of them twice.

1. An encoder (mean pooling) and a decoder that differ in attention and head only, dense and with 8
   experts of which a token uses 2: tokens per second of all texts in one step of the encoder
   (POST /v1/embeddings), and as prompts of the decoder (POST /v1/completions, one token each).
2. Models of the size of nomic-embed-text v1.5 (dense) and v2-moe (half of the layers with
   experts) with a small vocabulary, in bf16: texts per second of moeserve (POST /v1/embeddings,
   base64), of llama.cpp (llama_cpp of --llama, which needs the package gguf, too, in batches of
   256 tokens, the fastest of 256 to 8,192) and, dense only, of transformers (mean pooling, bf16,
   texts sorted by length in batches of 16). The table has the least cosine of a text's vector and
   ours.

Engines run in turns, in reverse order in every second round. A ratio is taken within a round; the
tables have medians and ranges.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np

import encoder_models
from cpu_common import spread, summary, table

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "clients"))
from conftest import post, start_server, stop_server  # noqa: E402

REPEATS = 2


@contextlib.contextmanager
def serving(folder, threads):
    server = start_server("--threads", str(threads), "--log-level", "error", "--max-step-tokens",
                          "16384", "--no-prefix-cache", folder=folder)
    try:
        yield server
    finally:
        stop_server(server)


def timed(work):
    """Returns the seconds of one run of `work`, of several after one that does not count."""
    work()
    start = time.monotonic()
    for _ in range(REPEATS):
        work()
    return (time.monotonic() - start) / REPEATS


def token_ids(texts):
    ids = {word: index for index, word in enumerate(encoder_models.vocabulary())}
    return [[encoder_models.FIRST, *(ids[word] for word in text.split()), encoder_models.LAST]
            for text in texts]


def our_vectors(a, name):
    texts = encoder_models.texts()
    with serving(a.models / name, a.threads) as server:
        seconds = timed(lambda: post(server, "/v1/embeddings",
                                     {"input": texts, "encoding_format": "base64"}))
        vectors = post(server, "/embed", {"inputs": texts})
    return seconds, np.array(vectors)


class Peer:
    """Another engine, whose script computes the texts."""

    def __init__(self, python, script, model):
        self.command = [str(python), str(HERE / "peers" / script), str(model)]

    def vectors(self, a):
        texts = {"texts": encoder_models.texts(), "ids": token_ids(encoder_models.texts()),
                 "repeats": REPEATS, "threads": a.threads}
        environment = {**os.environ, "OMP_NUM_THREADS": str(a.threads), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(self.command, input=json.dumps(texts), capture_output=True, text=True,
                              env=environment, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-2000:])
        answer = json.loads(done.stdout.splitlines()[-1])
        return answer["seconds"], np.array(answer["vectors"])


def write_models(a):
    for experts in (0, 8):
        kind = "moe" if experts else "dense"
        if not (a.models / f"encoder-{kind}").exists():
            encoder_models.write_equal_shapes(a.models, experts)
        folder = a.models / f"nomic-{kind}"
        gguf = a.models / f"nomic-{kind}.gguf"
        if folder.exists() and (gguf.exists() or not a.llama):
            continue
        tensors = encoder_models.nomic_tensors(experts)
        encoder_models.write_nomic(folder, experts, tensors)
        if a.llama:
            # The package gguf is one of the other engine's.
            subprocess.run([a.llama, "-c", (
                "import sys, gguf; sys.path.insert(0, sys.argv[1]); import encoder_models as m; "
                "n = int(sys.argv[2]); m.write_gguf(sys.argv[3], n, m.nomic_tensors(n), gguf)"),
                str(HERE), str(experts), str(gguf)], check=True)


def equal_shapes(a):
    """Returns by kind the rates of encoder and decoder in tokens per second, and their ratios."""
    texts = token_ids(encoder_models.texts())
    tokens = sum(map(len, texts))
    rates = {kind: {"encoder": [], "decoder": [], "ratio": []} for kind in ("dense", "moe")}
    for round_ in range(a.rounds):
        for kind, found in rates.items():
            with serving(a.models / f"encoder-{kind}", a.threads) as encoder, \
                    serving(a.models / f"decoder-{kind}", a.threads) as decoder:
                work = {
                    "encoder": lambda server=encoder: post(server, "/v1/embeddings", {
                        "input": texts, "encoding_format": "base64"}),
                    "decoder": lambda server=decoder: post(server, "/v1/completions", {
                        "prompt": texts, "max_tokens": 1, "temperature": 0})}
                for name in sorted(work, reverse=round_ % 2 == 1):
                    found[name].append(tokens / timed(work[name]))
            found["ratio"].append(found["encoder"][-1] / found["decoder"][-1])
    return {kind: {name: summary(values) for name, values in found.items()}
            for kind, found in rates.items()}


def peers(a):
    """Returns by kind and engine the rates in texts per second, our ratio and the similarity."""
    out = {}
    for kind in ("dense", "moe"):
        engines = {"moeserve": lambda name=f"nomic-{kind}": our_vectors(a, name)}
        if a.llama:
            peer = Peer(a.llama, "run_encoder_llama.py", a.models / f"nomic-{kind}.gguf")
            engines["llama.cpp"] = lambda peer=peer: peer.vectors(a)
        if a.transformers and kind == "dense":
            other = Peer(a.transformers, "run_encoder_transformers.py", a.models / f"nomic-{kind}")
            engines["transformers"] = lambda peer=other: peer.vectors(a)
        rates = {name: [] for name in engines}
        vectors = {}
        for round_ in range(a.rounds):
            for name in list(engines)[::-1 if round_ % 2 else 1]:
                seconds, vectors[name] = engines[name]()
                rates[name].append(len(vectors[name]) / seconds)
        ours = vectors["moeserve"]
        out[kind] = {name: {
            "rate": summary(values),
            "ratio": summary([x / y for x, y in zip(rates["moeserve"], values)]),
            "least_cosine": float(np.min(np.sum(ours * vectors[name], 1) / np.linalg.norm(
                ours, axis=1) / np.linalg.norm(vectors[name], axis=1)))}
            for name, values in rates.items()}
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("moeserve", type=pathlib.Path)
    parser.add_argument("--models", type=pathlib.Path, default=pathlib.Path("encoder-models"))
    parser.add_argument("--llama")
    parser.add_argument("--transformers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    a = parser.parse_args()
    os.environ["MOESERVE_BIN"] = str(a.moeserve.resolve())
    write_models(a)
    lengths = [len(ids) for ids in token_ids(encoder_models.texts())]
    report = {"threads": a.threads, "texts": len(lengths), "tokens": sum(lengths),
              "median_tokens": statistics.median(lengths), "equal_shapes": equal_shapes(a),
              "peers": peers(a)}
    print(table(["shape", "encoder, tokens/s", "decoder, tokens/s", "encoder / decoder"],
                [[kind, spread(found["encoder"], 0), spread(found["decoder"], 0),
                  spread(found["ratio"], 2)] for kind, found in report["equal_shapes"].items()]))
    print(table(["model", "engine", "texts/s", "moeserve / engine", "least cosine"],
                [[kind, name, spread(found["rate"]), spread(found["ratio"], 2),
                  f"{found['least_cosine']:.5f}"]
                 for kind, engines in report["peers"].items() for name, found in engines.items()]))
    if a.json:
        a.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
