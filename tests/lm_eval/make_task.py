"""Writes the documents of the shuffled-words task from the held-out text.

A document has two choices: a sentence of the text, and the same words in another order. A model
should assign the sentence the higher likelihood. Sentences and orders are selected by hashes of the
sentences, so the same text yields the same file on any machine.

  python3 make_task.py [--check]
"""

import argparse
import hashlib
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
HELDOUT = HERE.parent / "data" / "heldout.txt"
DOCUMENTS = HERE / "shuffled_words.jsonl"

COUNT = 200
MIN_WORDS, MAX_WORDS = 8, 30
SEPARATOR = "<|endoftext|>"

_BOUNDARY = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_SENTENCE = re.compile(r"[A-Z][A-Za-z ,;:'()-]*[.!?]")


def rank(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def sentences(text: str) -> list[str]:
    """Returns the distinct plain sentences of the text. They have no digits and no code, begin with
    a capital letter, and end with ".", "!" or "?"."""
    found: dict[str, None] = {}
    for document in text.split(SEPARATOR):
        for paragraph in document.splitlines():
            for candidate in _BOUNDARY.split(paragraph):
                words = candidate.split()
                if MIN_WORDS <= len(words) <= MAX_WORDS and _SENTENCE.fullmatch(candidate):
                    found[" ".join(words)] = None
    return list(found)


def shuffle(sentence: str) -> str:
    """Returns the words in an order that hashes determine and that differs from the given order."""
    words = sentence.split()
    for attempt in range(1000):
        order = sorted(range(len(words)), key=lambda i: rank(f"{attempt}:{i}:{sentence}"))
        shuffled = " ".join(words[i] for i in order)
        if shuffled != sentence:
            return shuffled
    raise ValueError(f"all words are the same: {sentence}")


def documents(text: str) -> list[dict[str, object]]:
    """Returns COUNT documents. The original sentence comes first in every second document."""
    chosen = sorted(sentences(text), key=rank)[:COUNT]
    if len(chosen) < COUNT:
        raise ValueError(f"only {len(chosen)} sentences fit, {COUNT} are needed")
    out: list[dict[str, object]] = []
    for number, sentence in enumerate(chosen):
        label = number % 2
        choices = [sentence, shuffle(sentence)]
        out.append({"id": number, "choices": choices[::-1] if label else choices, "label": label})
    return out


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="compare with the stored file")
    options = arguments.parse_args()
    lines = [json.dumps(one) + "\n" for one in documents(HELDOUT.read_text(encoding="utf-8"))]
    content = "".join(lines)
    if not options.check:
        DOCUMENTS.write_text(content, encoding="utf-8")
    elif not DOCUMENTS.exists() or DOCUMENTS.read_text(encoding="utf-8") != content:
        sys.exit(f"{DOCUMENTS.name} is not what the held-out text gives; run make_task.py")


if __name__ == "__main__":
    main()
