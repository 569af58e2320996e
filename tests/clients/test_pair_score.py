"""Tests `moeserve score --pairs` of an encoder-decoder against /v1/completions and NumPy."""

import json
import math
import subprocess

import numpy as np
import pytest

from conftest import binary, start_server, stop_server
from test_pairs import complete, folder  # noqa: F401 (a fixture)
from test_stacks import matrices, shapes

PAIRS = [("a rose", "a shrub of africa"), ("the north wind", "rose"), ("b", "c d e f")]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    out = tmp_path_factory.mktemp("texts") / "pairs.tsv"
    out.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS) + "\n")
    return out


@pytest.fixture(scope="module")
def answers(folder):  # noqa: F811
    """The echo of each translation, with its special tokens."""
    server = start_server("--dtype", "f32", "--log-level", "error", folder=folder)
    try:
        out = []
        for source, target in PAIRS:
            # The tokenizer puts [CLS] and [SEP] around texts, also around a source of that text.
            ids = complete(server, target, max_tokens=1)["choices"][0]["prompt_token_ids"]
            out.append(complete(server, source, decoder_prompt=ids, echo=True, logprobs=0,
                                max_tokens=1, prompt_logprobs=0)["choices"][0])
        return out
    finally:
        stop_server(server)


def run(folder, *arguments):  # noqa: F811
    return subprocess.run([binary(), "score", folder, "--dtype", "f32", "--quiet",
                           *map(str, arguments)], capture_output=True, text=True, check=False)


def score(folder, *arguments):  # noqa: F811
    done = run(folder, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_score_is_that_of_the_translations(folder, file, answers):  # noqa: F811
    found = score(folder, "--pairs", file)
    values = [value for answer in answers for entry in answer["prompt_logprobs"]
              for value in [next(iter(entry.values()))["logprob"]]]
    assert found["tokens"] == found["scored_tokens"] == len(values)
    assert found["nll_per_token"] == pytest.approx(-np.mean(values), abs=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(-np.mean(values)), rel=1e-6)


def test_stacks(folder, file, answers):  # noqa: F811
    sources = [len(answer["prompt_token_ids"]) for answer in answers]
    targets = [1 + len(answer["prompt_logprobs"]) for answer in answers]
    decoder = score(folder, "--pairs", file)
    encoder = score(folder, "--pairs", file, "--stack", "encoder")
    assert encoder["nll_per_token"] == decoder["nll_per_token"]
    assert encoder["experts"]["tokens"] == sum(sources)
    assert decoder["experts"]["tokens"] == sum(targets)
    assert {layer["stack"] for layer in encoder["experts"]["layers"]} == {"encoder"}
    # MACs: two of five or four experts of width 8 in two layers.
    cross = sum(math.prod(shape) for name, shape in shapes().items()
                if ".cross_attention.k." in name or ".cross_attention.v." in name)
    per_key = 2 * 2 * 8 * 2
    macs = encoder["macs_per_token"]
    assert macs["matrices"] == pytest.approx(matrices("encoder.blocks.") + cross)
    assert macs["attention"] == pytest.approx(
        per_key * sum(n * n for n in sources) / sum(sources))
    macs = decoder["macs_per_token"]
    assert macs["matrices"] == pytest.approx(matrices("decoder.blocks."))
    keys = sum(t * (t + 1) / 2 + t * s for s, t in zip(sources, targets))
    assert macs["attention"] == pytest.approx(per_key * keys / sum(targets))


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_reports(folder, file, tmp_path, stack):  # noqa: F811
    words = tmp_path / "words.txt"
    words.write_text("rose\nshrub\n")
    found = score(folder, "--pairs", file, "--stack", stack, "--words", words, "--dump",
                  tmp_path / "dump", "--report", tmp_path / "page.html", "--profile",
                  tmp_path / "profile")
    occurrences = {word["word"]: word["occurrences"] for word in found["word_experts"]["words"]}
    side = stack == "decoder"
    assert occurrences == {word: sum(word in pair[side].split() for pair in PAIRS)
                           for word in ("rose", "shrub")}
    tokens = np.load(tmp_path / "dump/tokens.npy")
    assert len(tokens) == found["experts"]["tokens"]
    layer = found["experts"]["layers"][0]
    experts = np.load(tmp_path / "dump/0.experts.npy")
    assert np.bincount(experts, minlength=layer["experts"]).tolist() == layer["counts"]
    # The page needs the routes, from which the MACs are then counted.
    assert found["macs_per_token"] == score(folder, "--pairs", file, "--stack",
                                            stack)["macs_per_token"]
    page = (tmp_path / "page.html").read_text()
    assert f"{stack} 0 attention" in page
    shown = subprocess.run([binary(), "experts", "show", tmp_path / "profile", "--json"],
                           capture_output=True, text=True, check=True)
    assert {one["stack"] for one in json.loads(shown.stdout)["layers"]} == {stack}


@pytest.mark.parametrize("content, arguments, part", [
    ("a rose\n", (), "no tab"),
    ("a\tb\tc\n", (), "several tabs"),
    ("\n", (), "in each line"),
    ("a\tb\n", ("--capacity", "gshard"), "--capacity"),
    ("a\tb\n", ("--text", __file__), "found both"),
    ("a " * 400 + "\tb\n", (), "source"),
])
def test_bad_pairs(folder, tmp_path, content, arguments, part):  # noqa: F811
    (tmp_path / "pairs").write_text(content)
    done = run(folder, "--pairs", tmp_path / "pairs", *arguments)
    assert done.returncode == 1 and part in done.stderr, done.stderr


def test_wrong_models(folder, file):  # noqa: F811
    done = run(folder, "--text", file)
    assert done.returncode == 1 and "--pairs" in done.stderr
    decoder = subprocess.run([binary(), "score", "--pairs", file, "--quiet", "--stack", "encoder",
                              binary().parents[2] / "deploy/models/mh-moe"],
                             capture_output=True, text=True, check=False)
    assert decoder.returncode == 1 and "single stack" in decoder.stderr
