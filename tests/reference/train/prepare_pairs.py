"""Builds English-Spanish training, validation and held-out pairs from Debian packages.

Verses of the Bible: sword-text-kjv and sword-text-web beside sword-text-sparv (Reina-Valera of
1909), all in the public domain, read with mod2imp of libsword-utils. Messages of catalogues under
permissive licences: CATALOGUES below. tests/data/README.md names the licences.

The training text also has the clauses of verses, where both languages have equally many: words are
easier to align in short texts.

A hash of a verse's name, or of a message's words, selects the part that a pair belongs to. Both
English texts of a verse are in the same part. A pair whose English or Spanish words occur in a pair
of another part is left out of the training text, so nothing that is held out is trained on.

  python3 prepare_pairs.py --out BUILD_FOLDER [--root FOLDER] \
      [--heldout tests/data/heldout_pairs.tsv]

Packages that are unpacked but not installed are read below --root.
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import polib

from prepare_data import squeeze

SPANISH = "spaRV1909eb"
ENGLISH = {"kjv": "engKJV2006eb", "web": "engWEB2015eb"}
CLAUSES = "-clauses"
# The Debian package of each group of catalogues, and the files' places below the root.
CATALOGUES = {
    "postgresql": ("usr/share/locale/es/LC_MESSAGES", r"(?:pg_?\w+|postgres|psql|libpq5|initdb|"
                   r"plpgsql)-15\.mo"),  # postgresql-15, postgresql-client-15, libpq5
    "django": ("usr/lib/python3/dist-packages/django", r"es/LC_MESSAGES/\w+\.mo"),
    "rest-framework": ("usr/lib/python3/dist-packages/rest_framework", r"es/LC_MESSAGES/\w+\.mo"),
    "wtforms": ("usr/lib/python3/dist-packages/wtforms", r"es/LC_MESSAGES/\w+\.mo"),
    "sudo": ("usr/share/locale/es/LC_MESSAGES", r"sudo(?:ers)?\.mo"),
    "xkb": ("usr/share/locale/es/LC_MESSAGES", r"xkeyboard-config\.mo"),
    "cups": ("usr/share/cups/locale/es", r"cups_es\.po"),
    "p11-kit": ("usr/share/locale/es/LC_MESSAGES", r"p11-kit\.mo"),
    "poedit": ("usr/share/locale/es/LC_MESSAGES", r"poedit\.mo"),
    "sphinx": ("usr/share/locale/es/LC_MESSAGES", r"sphinx\.mo"),
    "vim": ("usr/share/vim", r"es/LC_MESSAGES/vim\.mo"),
}
MAX_CHARACTERS = 320
VALIDATION_PERMILLE, HELDOUT_PERMILLE = 10, 14
# What the file of held-out pairs has. Its messages have one licence only.
HELDOUT_VERSES, HELDOUT_MESSAGES = 150, 100
HELDOUT_CATALOGUE = "postgresql"


class Pair(NamedTuple):
    origin: str
    key: str  # selects the part
    source: str
    target: str


def words(text: str) -> str:
    """The letters and digits of a text in lower case: texts of equal words are repeats."""
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


def verse(markup: str) -> str:
    """The text of a verse, without notes and headings."""
    text = re.sub(r"<(note|title)\b[^>]*>.*?</\1>", " ", markup, flags=re.DOTALL)
    # Verses of the World English Bible lack the space behind a note.
    text = re.sub(r"(?<=[a-z,])(?=</?q\b[^>]*>\s*<w)", " ", text)
    text = re.sub(r"</?transChange[^>]*>", " ", text)
    text = squeeze(re.sub(r"<[^>]+>", "", text))
    return re.sub(r" +([,.;:?!])", r"\1", text)


def verses(module: str, sword: pathlib.Path) -> dict[str, str]:
    """The verses of a module by name, such as "Genesis 1:1"."""
    dump = subprocess.run(["mod2imp", module], check=True, capture_output=True, text=True,
                          env={**os.environ, "SWORD_PATH": str(sword)}).stdout
    out = {}
    for entry in dump.split("$$$")[1:]:
        name, _, markup = entry.partition("\n")
        if re.fullmatch(r".* [1-9]\d*:[1-9]\d*", name):
            out[name] = verse(markup)
    return out


def clauses(pair: Pair) -> Iterator[Pair]:
    """The clauses of a verse that ends one at the same marks in both languages."""
    source, target = (re.split(r"(?<=[.:;?!]) ", text) for text in (pair.source, pair.target))
    if len(source) == len(target) > 1:
        for one, other in zip(source, target):
            yield Pair(pair.origin + CLAUSES, pair.key, one, other)


def bible(root: pathlib.Path) -> Iterator[Pair]:
    sword = root / "usr/share/sword"
    spanish = verses(SPANISH, sword)
    for origin, module in ENGLISH.items():
        for name, text in verses(module, sword).items():
            pair = Pair(origin, name, text, spanish.get(name, ""))
            yield pair
            yield from clauses(pair)


def message(text: str) -> str:
    """A message without the marks of keyboard shortcuts."""
    return squeeze(re.sub(r"&(?=\w)", "", text))


def catalogue(origin: str, path: pathlib.Path) -> Iterator[Pair]:
    entries = polib.mofile(str(path)) if path.suffix == ".mo" else polib.pofile(str(path))
    for entry in entries:
        source, target = entry.msgid, entry.msgstr or entry.msgstr_plural.get(0, "")
        if "\n" not in source.strip() and not entry.obsolete and "fuzzy" not in entry.flags:
            yield Pair(origin, words(source), message(source), message(target))


def catalogues(root: pathlib.Path) -> Iterator[Pair]:
    for origin, (folder, pattern) in CATALOGUES.items():
        found = [path for path in sorted((root / folder).rglob("*"))
                 if re.search(f"(?:^|/){pattern}$", str(path))]
        if not found:
            raise FileNotFoundError(f"no catalogue of {origin} in {root / folder}")
        for path in found:
            yield from catalogue(origin, path)


def is_useful(pair: Pair) -> bool:
    source, target = words(pair.source), words(pair.target)
    lengths = len(pair.source), len(pair.target)
    return (source != "" and target != "" and source != target and max(lengths) <= MAX_CHARACTERS
            and re.search(r"[a-z]{2}", source) is not None
            and max(lengths) <= 2 * min(lengths) + 10)


def part_of(key: str) -> str:
    bucket = int.from_bytes(hashlib.sha256(("pair:" + key).encode()).digest()[:4], "big") % 1000
    if bucket < VALIDATION_PERMILLE:
        return "validation"
    return "heldout" if bucket < VALIDATION_PERMILLE + HELDOUT_PERMILLE else "train"


def order(pair: Pair) -> bytes:
    return hashlib.sha256(f"{pair.origin}\t{pair.source}".encode()).digest()


def split(pairs: list[Pair]) -> dict[str, list[Pair]]:
    """The parts in a fixed order, without repeats inside a part and between parts."""
    pairs = [pair for pair in pairs
             if part_of(pair.key) == "train" or not pair.origin.endswith(CLAUSES)]
    parts: dict[str, list[Pair]] = {"heldout": [], "validation": [], "train": []}
    taken: set[str] = set()
    for part, chosen in parts.items():
        own: set[str] = set()
        seen: set[tuple[str, str]] = set()
        for pair in sorted(pairs, key=order):
            texts = words(pair.source), words(pair.target)
            if part_of(pair.key) == part and taken.isdisjoint(texts) and texts not in seen:
                chosen.append(pair)
                seen.add(texts)
                own.update(texts)
        taken |= own
    return parts


def save(path: pathlib.Path, pairs: list[Pair]) -> None:
    path.write_text("".join(f"{pair.origin}\t{pair.source}\t{pair.target}\n" for pair in pairs),
                    encoding="utf-8")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=pathlib.Path, required=True)
    arguments.add_argument("--root", type=pathlib.Path, default=pathlib.Path("/"))
    arguments.add_argument("--heldout", type=pathlib.Path)
    options = arguments.parse_args()
    pairs = [pair for source in (bible(options.root), catalogues(options.root))
             for pair in source if is_useful(pair)]
    parts = split(pairs)
    options.out.mkdir(parents=True, exist_ok=True)
    counts: dict[str, dict[str, int]] = {}
    for part, chosen in parts.items():
        save(options.out / f"{part}.tsv", chosen)
        for pair in chosen:
            of_origin = counts.setdefault(pair.origin, dict.fromkeys(parts, 0))
            of_origin[part] += 1
    print(json.dumps(counts, indent=1))
    if options.heldout:
        from_bible = [pair for pair in parts["heldout"] if pair.origin in ENGLISH]
        messages = [pair for pair in parts["heldout"] if pair.origin == HELDOUT_CATALOGUE]
        save(options.heldout, from_bible[:HELDOUT_VERSES] + messages[:HELDOUT_MESSAGES])


if __name__ == "__main__":
    main()
