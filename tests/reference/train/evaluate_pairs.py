"""Translates the held-out pairs with the server and prints chrF and BLEU of sacrebleu.

  MOESERVE_BIN=build/release/moeserve python3 evaluate_pairs.py [--out FIGURES.json] [MODEL ...]

MODEL is the name of a folder in deploy/models or a path; by default, all bundled translators are
measured. Every source is translated greedily and by beam search of width 4, in f32. The figures are
those of all pairs, of the verses and of the messages.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import sacrebleu

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/support"))

import bundled_models  # noqa: E402
from pair_file import HELDOUT_PAIRS, Pair, read_pairs  # noqa: E402

VERSES = ("kjv", "web")
CLIENTS = 16
MAX_TOKENS = 128
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "beam 4": {"use_beam_search": True, "num_beams": 4, "n": 1},
}


@contextlib.contextmanager
def serving(folder: pathlib.Path, dtype: str) -> Iterator[str]:
    """Runs the server on free ports. Yields its address."""
    program = os.environ.get("MOESERVE_BIN", ROOT / "build/release/moeserve")
    process = subprocess.Popen(
        [program, "serve", "--model", folder, "--dtype", dtype, "--http", "127.0.0.1:0", "--grpc",
         "127.0.0.1:0", "--log-level", "error"], stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        if not line.startswith("http listening on "):
            sys.exit(f"the server did not start with {folder}")
        yield "http://" + line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        process.stdout.close()


def translate(url: str, source: str, search: dict[str, Any]) -> str:
    body = {"prompt": source, "max_tokens": MAX_TOKENS, **search}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)["choices"][0]["text"].strip()


def scores(found: list[str], wanted: list[str]) -> dict[str, float]:
    return {"chrf": round(sacrebleu.corpus_chrf(found, [wanted]).score, 2),
            "bleu": round(sacrebleu.corpus_bleu(found, [wanted]).score, 2)}


def measure(folder: pathlib.Path, pairs: list[Pair], dtype: str) -> dict[str, Any]:
    """The scores by search and kind of pair, and the first translations."""
    kinds = {"all": pairs, "verses": [pair for pair in pairs if pair.origin in VERSES],
             "messages": [pair for pair in pairs if pair.origin not in VERSES]}
    out: dict[str, Any] = {}
    with serving(folder, dtype) as url, concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        for name, search in SEARCHES.items():
            texts = dict(zip(pairs, pool.map(
                lambda pair, search=search: translate(url, pair.source, search), pairs)))
            out[name] = {kind: scores([texts[pair] for pair in chosen],
                                      [pair.target for pair in chosen])
                         for kind, chosen in kinds.items() if chosen}
            out[name]["examples"] = [[pair.source, texts[pair], pair.target]
                                     for kind in ("verses", "messages") for pair in kinds[kind][:3]]
    return out


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--pairs", type=pathlib.Path, default=HELDOUT_PAIRS)
    arguments.add_argument("--dtype", default="f32")
    arguments.add_argument("--out", type=pathlib.Path, help="file of figures, which is extended")
    arguments.add_argument("models", nargs="*")
    options = arguments.parse_args()
    folders = [bundled_models.MODELS / name if (bundled_models.MODELS / name).is_dir()
               else pathlib.Path(name) for name in options.models]
    pairs = read_pairs(options.pairs)
    for folder in folders or bundled_models.folders(bundled_models.PAIR):
        found = measure(folder, pairs, options.dtype)
        for search, kinds in found.items():
            for kind in ("all", "verses", "messages"):
                if kind in kinds:
                    print(f"{folder.name}, {search}, {kind}: chrF {kinds[kind]['chrf']:.2f}, BLEU "
                          f"{kinds[kind]['bleu']:.2f}", flush=True)
        if options.out:
            figures = json.loads(options.out.read_text()) if options.out.exists() else {}
            figures.setdefault(folder.name, {})["translation"] = found
            options.out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
