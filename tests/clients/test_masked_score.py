"""Tests `moeserve score` of encoders: the pseudo-perplexity of a masked language model against
/v1/fill-mask, and the statistics of a model without probabilities of tokens."""

import json
import math
import subprocess

import numpy as np
import pytest

import encoder_models
from conftest import binary, model, post, start_server, stop_server

NAME = "bert-masked-lm"
TEXT = "rose a shrub of southern africa and a tree of the north"
WINDOW = 16
MASK = encoder_models.SPECIAL.index("[MASK]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = encoder_models.make(NAME, tmp_path_factory.mktemp("masked"))
    (out / "text.txt").write_text(TEXT)
    return out


@pytest.fixture(scope="module")
def server(folder):
    out = start_server("--dtype", "f32", name=NAME, folder=folder)
    yield out
    stop_server(out)


def score(folder, *arguments):
    done = subprocess.run(
        [binary(), "score", folder, "--dtype", "f32", "--text", folder / "text.txt", "--window",
         str(WINDOW), "--quiet", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def windows(server):
    """Returns the windows of the text, with special tokens."""
    ids = post(server, "/tokenize", {"prompt": TEXT, "add_special_tokens": False})["tokens"]
    step = WINDOW - 2
    return [[2, *ids[begin:begin + step], 3] for begin in range(0, len(ids), step)]


def logprobs(server, read, own):
    return post(server, "/v1/fill-mask", {"input": read, "logprobs": True,
                                          "targets_of": own})["logprobs"]


def test_each_token_in_turn(folder, server):
    total = []
    for own in windows(server):
        for place in range(1, len(own) - 1):
            read = [*own]
            read[place] = MASK
            total.append(logprobs(server, read, own)[place])
    found = json.loads(score(folder, "--mask", "each", "--json"))
    assert found["scored_tokens"] == len(total) == found["tokens"]
    assert found["mask"] == {"rule": "each"}
    assert found["nll_per_token"] == pytest.approx(-np.mean(total), abs=1e-6)
    assert found["pseudo_perplexity"] == pytest.approx(math.exp(-np.mean(total)), rel=1e-6)
    assert "perplexity" not in found


@pytest.mark.parametrize("rule, seed", [("all", 1), ("all", 7), ("bert", 1)])
def test_a_share_of_the_tokens(folder, server, tmp_path, rule, seed):
    dump = tmp_path / "dump"
    arguments = ("--mask", rule, "--mask-share", 0.4, "--seed", seed, "--json")
    found = json.loads(score(folder, *arguments, "--dump", dump))
    assert found == json.loads(score(folder, *arguments))
    own = np.concatenate(windows(server))
    files = {path.stem: path for path in dump.iterdir()}
    read = np.fromfile(files["tokens"], np.int32) if files["tokens"].suffix != ".npy" else np.load(
        files["tokens"])
    changed = np.flatnonzero(read != own)
    if rule == "bert":
        # Tokens that are kept are scored, too.
        assert len(changed) <= found["scored_tokens"]
        assert set(read[changed]) != {MASK}
        return
    assert set(read[changed]) == {MASK} and len(changed) == found["scored_tokens"]
    assert 0.2 < len(changed) / found["tokens"] < 0.6
    total, begin = [], 0
    for window in windows(server):
        part = slice(begin, begin + len(window))
        values = logprobs(server, read[part].tolist(), window)
        total += [values[i - begin] for i in changed if part.start <= i < part.stop]
        begin += len(window)
    assert found["nll_per_token"] == pytest.approx(-np.mean(total), abs=1e-6)


def test_the_text_states_the_rule(folder, tmp_path):
    page = tmp_path / "page.html"
    assert "(share 0.15 of the tokens, seed 1, all masked)" in score(folder, "--report", page)
    facts = page.read_text()
    assert "Pseudo-perplexity" in facts and "Bits per byte" not in facts
    assert "pseudo-perplexity" in score(folder, "--mask", "each")


def test_models_without_probabilities(tmp_path):
    folder = encoder_models.make("nomic-experts", tmp_path)
    (folder / "text.txt").write_text(TEXT)
    found = json.loads(score(folder, "--json"))
    assert found["scored_tokens"] == 0 and found["perplexity"] is None
    rows = {layer["rows"] for layer in found["experts"]["layers"]}
    assert len(rows) == 1 and rows.pop() > found["tokens"]
    page = tmp_path / "page.html"
    assert "gives tokens no probabilities" in score(folder, "--report", page)
    assert "erplexity" not in page.read_text()


def test_bad_options(folder):
    for options, part in ((("--mask", "some"), "--mask"), (("--mask-share", "0"), "--mask-share"),
                          (("--mask-share", "nan"), "nan not in range"),
                          (("--seed", "-1"), "-1 not in range"),
                          (("--text", str(folder)), "cannot read")):
        done = subprocess.run([binary(), "score", folder, "--text", folder / "text.txt", *options],
                              capture_output=True, text=True, check=False)
        assert done.returncode != 0 and part in done.stderr
    decoder = model()
    done = subprocess.run([binary(), "score", decoder, "--text", folder / "text.txt", "--mask",
                           "each"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "masked language model" in done.stderr
