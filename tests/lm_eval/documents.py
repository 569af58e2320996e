"""Loads the documents of the shuffled-words task. shuffled_words.yaml refers to this module."""

import json
import pathlib
from typing import Any

import datasets

DOCUMENTS = pathlib.Path(__file__).resolve().parent / "shuffled_words.jsonl"


def load(**_: Any) -> dict[str, datasets.Dataset]:
    """Returns the split "test", read from shuffled_words.jsonl in this file's folder. It needs no
    Hugging Face hub and no cache."""
    lines = DOCUMENTS.read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}
