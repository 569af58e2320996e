"""Reads the held-out pairs."""

import pathlib
from typing import NamedTuple

HELDOUT_PAIRS = pathlib.Path(__file__).resolve().parents[2] / "data/heldout_pairs.tsv"


class Pair(NamedTuple):
    origin: str  # a text of the Bible or a group of catalogues, as in prepare_pairs.py
    source: str
    target: str


def read_pairs(path: pathlib.Path = HELDOUT_PAIRS) -> list[Pair]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Pair(*line.split("\t")) for line in lines]
