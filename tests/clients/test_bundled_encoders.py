"""Tests the bundled translators and masked language models as they are served."""

import json
import re
import subprocess
import sys

import pytest

from conftest import ROOT, binary, post, start_server, stop_server

sys.path.append(str(ROOT / "tests/support"))
import bundled_models  # noqa: E402

PAIRS = ROOT / "tests/data/heldout_pairs.tsv"
TRANSLATORS = bundled_models.folders(bundled_models.PAIR)
MASKED = bundled_models.folders(bundled_models.ENCODER)

FLOOR = 0.4  # the share of the wanted words that a translation has
FILLED = [("The function returns <mask> if the table does not exist.", "NULL"),
          ("The <mask> of the Lord.", "name")]


def name_of(folder):
    return folder.name


def words(text):
    return set(re.findall(r"\w+", text.lower()))


@pytest.mark.parametrize("folder", TRANSLATORS, ids=name_of)
def test_translations_share_words_with_the_held_out_ones(folder):
    """A model whose weights or tokenizer are read wrongly translates nothing. What a good one
    reaches: evaluate_pairs.py."""
    pairs = [line.split("\t") for line in PAIRS.read_text(encoding="utf-8").splitlines()][:40]
    server = start_server("--dtype", "f32", folder=folder)
    try:
        common = total = 0
        for search in ({"temperature": 0}, {"use_beam_search": True, "num_beams": 4}):
            answer = post(server, "/v1/completions", {
                "model": server.name, "prompt": [source for _, source, _ in pairs],
                "max_tokens": 96, **search, "n": 1})
            assert len(answer["choices"]) == len(pairs)
            for choice, (_, _, target) in zip(answer["choices"], pairs):
                assert "</s>" not in choice["text"]
                common += len(words(choice["text"]) & words(target))
                total += len(words(target))
        assert common > FLOOR * total, common / total
    finally:
        assert stop_server(server) == 0


@pytest.mark.parametrize("folder", MASKED, ids=name_of)
def test_masks_are_filled(folder):
    server = start_server("--dtype", "f32", folder=folder)
    try:
        for text, word in FILLED:
            mask, = post(server, "/v1/fill-mask", {"input": text, "top_k": 5})["masks"]
            assert word in [token["token_str"].strip() for token in mask["tokens"]], mask
    finally:
        assert stop_server(server) == 0


@pytest.mark.parametrize("folder", TRANSLATORS + MASKED, ids=name_of)
def test_tasks(folder):
    done = subprocess.run([binary(), "inspect", "--json", folder], capture_output=True, check=True,
                          timeout=60)
    tasks = ["fill_mask"] if folder in MASKED else ["generate"]
    assert json.loads(done.stdout)["tasks"] == tasks
