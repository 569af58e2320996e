"""Builds the training, validation and held-out texts from Debian packages.

Packages: bible-kjv, bible-kjv-text, wordnet-base, dict-jargon, dict-devil, sqlite3-doc,
postgresql-doc-15, python3.11-doc. Their texts are in the public domain or under permissive
licences; tests/data/README.md names each of them.

Every document belongs to exactly one of these three parts. A hash of the document's name selects
the part, so adding a source or changing the order of the sources moves no document.

  python3 prepare_data.py --out BUILD_FOLDER [--heldout tests/data/heldout.txt]
"""

import argparse
import gzip
import hashlib
import html.parser
import json
import pathlib
import re
import subprocess
from collections.abc import Iterator

SEPARATOR = "<|endoftext|>"
VALIDATION_PERMILLE = 12
HELDOUT_PERMILLE = 14
HELDOUT_BYTES = 300_000
MIN_PARAGRAPH = 40
DOC_ROOT = pathlib.Path("/usr/share/doc")

Document = tuple[str, str]  # the document's unique, stable name, and its text

_ASCII = str.maketrans({
    "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--",
    "\u2026": "...", "\u00a0": " ", "\u2212": "-", "\u2192": "->", "\u2022": "-", "\u00b6": "",
    "\u2265": ">=", "\u2264": "<=", "\u00d7": "x", "\u200b": "",
})


def squeeze(text: str) -> str:
    """Joins a paragraph to one line and replaces typographic characters by ASCII."""
    return re.sub(r"\s+", " ", text.translate(_ASCII)).strip()


def bible() -> Iterator[Document]:
    """Yields one document per chapter of the King James Bible."""
    lines = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], check=True, capture_output=True,
                           text=True).stdout.splitlines()
    chapters: dict[str, list[str]] = {}
    for line in lines:
        match = re.match(r"(\w+?)(\d+):(\d+) (.*)", line)
        if match:
            chapters.setdefault(f"{match[1]} {match[2]}", []).append(squeeze(match[4]))
    for name, verses in chapters.items():
        yield f"bible/{name}", " ".join(verses)


def wordnet(per_document: int = 24) -> Iterator[Document]:
    """Yields documents of `per_document` lines "words: definition". The file lists entries of
    related meaning next to each other."""
    for part in ("noun", "verb", "adj", "adv"):
        lines = []
        for line in open(f"/usr/share/wordnet/data.{part}", encoding="latin-1"):
            if line.startswith(" ") or "|" not in line:
                continue
            head, gloss = line.split("|", 1)
            fields = head.split()
            count = int(fields[3], 16)
            words = [re.sub(r"\(\w+\)$", "", fields[4 + 2 * i]).replace("_", " ")
                     for i in range(count)]
            lines.append(f"{', '.join(words)}: {squeeze(gloss)}.")
        for start in range(0, len(lines), per_document):
            yield f"wordnet/{part}/{start}", "\n".join(lines[start:start + per_document])


def _dictd(name: str) -> str:
    path = f"/usr/share/dictd/{name}.dict.dz"
    return gzip.decompress(pathlib.Path(path).read_bytes()).decode("utf-8", "replace")


def jargon() -> Iterator[Document]:
    """Yields one document per entry of the Jargon File. In the file, only the headwords are not
    indented."""
    text = _dictd("jargon").split("\n00-database-short", 1)[-1]
    entries = re.split(r"\n\n(?=\S)", text)[1:]
    for index, entry in enumerate(entries):
        head, _, body = entry.partition("\n\n")
        paragraphs = [squeeze(re.sub(r"[{}]", "", p)) for p in re.split(r"\n\s*\n", body)]
        word = squeeze(head.split("\n")[0])
        if body and len(body) > 100:
            yield f"jargon/{index}", "\n".join([f"{word}."] + [p for p in paragraphs if p])


def devil(per_document: int = 6) -> Iterator[Document]:
    """Yields documents of `per_document` entries of The Devil's Dictionary. Verse keeps its line
    breaks; the lines of a paragraph of prose are joined."""
    text = _dictd("devil").split("ABASEMENT", 1)[-1]
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith("    "):
            blocks.append("\n".join(squeeze(line) for line in block.splitlines()))
        else:
            blocks.append(squeeze(block.replace("_", "")))
    groups: list[list[str]] = []
    for block in blocks:
        if re.match(r"[A-Z' -]{3,},", block) or not groups:
            groups.append([])
        groups[-1].append(block)
    for start in range(0, len(groups), per_document):
        body = [block for group in groups[start:start + per_document] for block in group if block]
        yield f"devil/{start}", "\n".join(body)


class _Prose(html.parser.HTMLParser):
    """Collects paragraphs, list items and headings; leaves out code, tables and navigation."""

    # Void tags and tags inside sentences neither end a paragraph nor change whether text is
    # skipped.
    _INLINE = {"br", "img", "hr", "meta", "link", "input", "col", "a", "span", "code", "em"}
    _SKIP = {"script", "style", "pre", "table", "nav", "title", "head", "button", "form", "svg"}
    _BLOCK = {"p", "li", "dd", "dt", "h1", "h2", "h3", "h4", "div", "section", "ul", "ol", "dl",
              "blockquote", "body"}
    _SKIP_CLASSES = ("navheader", "navfooter", "sphinxsidebar", "related", "footer", "toc",
                     "fancy_toc", "menu", "headerlink", "synopsis", "sig ", "topnav", "searchmenu",
                     "nosearch", "rightsidebar")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._text: list[str] = []
        self._stack: list[tuple[str, bool]] = []

    def _skipping(self) -> bool:
        return bool(self._stack) and self._stack[-1][1]

    def _flush(self) -> None:
        paragraph = squeeze("".join(self._text))
        self._text = []
        if len(paragraph) >= MIN_PARAGRAPH and _is_prose(paragraph):
            self.paragraphs.append(paragraph)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._INLINE:
            if tag == "br":
                self._text.append(" ")
            return
        if tag in self._BLOCK:
            self._flush()
        classes = (dict(attrs).get("class") or "") + " "
        skip = (self._skipping() or tag in self._SKIP
                or any(name in classes for name in self._SKIP_CLASSES))
        self._stack.append((tag, skip))

    def handle_endtag(self, tag: str) -> None:
        if tag in self._BLOCK:
            self._flush()
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index][0] == tag:
                del self._stack[index:]
                break

    def handle_data(self, data: str) -> None:
        if not self._skipping():
            self._text.append(data)


def _is_prose(paragraph: str) -> bool:
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    return letters >= 0.86 * len(paragraph) and paragraph.count(" ") >= 6


_NOT_PROSE = re.compile(
    r"genindex|py-modindex|whatsnew/changelog|release-\d|bookindex|crossref|search")


def html_pages(source: str, folder: pathlib.Path, per_document: int = 3000) -> Iterator[Document]:
    """Yields the prose of each HTML page, cut at paragraph ends into documents of at most about
    `per_document` characters."""
    for path in sorted(folder.rglob("*.html")):
        if _NOT_PROSE.search(str(path)):
            continue
        parser = _Prose()
        parser.feed(path.read_text(encoding="utf-8", errors="replace"))
        parser.close()
        chunk: list[str] = []
        size = 0
        number = 0
        name = f"{source}/{path.relative_to(folder)}"
        for paragraph in parser.paragraphs + [""]:
            if chunk and (not paragraph or size + len(paragraph) > per_document):
                yield f"{name}/{number}", "\n".join(chunk)
                chunk, size, number = [], 0, number + 1
            if paragraph:
                chunk.append(paragraph)
                size += len(paragraph)


def sources() -> dict[str, Iterator[Document]]:
    return {
        "bible": bible(),
        "wordnet": wordnet(),
        "jargon": jargon(),
        "devil": devil(),
        "sqlite": html_pages("sqlite", DOC_ROOT / "sqlite3"),
        "postgresql": html_pages("postgresql", DOC_ROOT / "postgresql-doc-15/html"),
        "python": html_pages("python", DOC_ROOT / "python3.11/html"),
    }


def without_repeats(text: str, seen: set[bytes]) -> str:
    """Drops paragraphs that occur in an earlier document, so that no held-out text is trained on.
    """
    kept = []
    for paragraph in text.split("\n"):
        key = hashlib.sha256(paragraph.encode()).digest()[:12]
        if len(paragraph) < MIN_PARAGRAPH or key not in seen:
            kept.append(paragraph)
        seen.add(key)
    return "\n".join(kept).strip()


def part_of(name: str) -> str:
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 1000
    if bucket < VALIDATION_PERMILLE:
        return "validation"
    return "heldout" if bucket < VALIDATION_PERMILLE + HELDOUT_PERMILLE else "train"


def _order(document: Document) -> bytes:
    return hashlib.sha256(("order:" + document[0]).encode()).digest()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=pathlib.Path, required=True)
    arguments.add_argument("--heldout", type=pathlib.Path)
    options = arguments.parse_args()

    parts: dict[str, list[Document]] = {"train": [], "validation": [], "heldout": []}
    sizes: dict[str, dict[str, int]] = {}
    seen: set[bytes] = set()
    for source, documents in sources().items():
        sizes[source] = dict.fromkeys(parts, 0)
        for name, text in documents:
            text = without_repeats(text, seen)
            if len(text) >= 120:
                part = part_of(name)
                parts[part].append((name, text))
                sizes[source][part] += len(text.encode())

    options.out.mkdir(parents=True, exist_ok=True)
    for part, documents in parts.items():
        documents.sort(key=_order)
        joined = SEPARATOR.join(text for _, text in documents)
        (options.out / f"{part}.txt").write_text(joined, encoding="utf-8")
    (options.out / "sizes.json").write_text(json.dumps(sizes, indent=1))
    print(json.dumps(sizes, indent=1))
    if options.heldout:
        taken: list[str] = []
        total = 0
        for _, text in parts["heldout"]:
            if total + len(text.encode()) <= HELDOUT_BYTES:
                taken.append(text)
                total += len(text.encode()) + len(SEPARATOR)
        options.heldout.write_text(SEPARATOR.join(taken), encoding="utf-8")


if __name__ == "__main__":
    main()
