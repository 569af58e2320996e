"""Loads the task's documents for lm_eval. shuffled_words.yaml refers to this module."""

import json
import pathlib
from typing import Any

import datasets

DOCUMENTS = pathlib.Path(__file__).resolve().parent / "shuffled_words.jsonl"


def load(**_: Any) -> dict[str, datasets.Dataset]:
    """One split, read from the file beside this one: no hub, no cache, any working folder."""
    lines = DOCUMENTS.read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}
