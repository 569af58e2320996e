"""Checks the pages of deploy/models/papers: each has a row for every equation, figure and table of
its paper, and the files, names and links that it mentions exist.

Run as a script, it prints what it finds and exits with status 1 if that is anything.
"""

import pathlib
import re
import sys

PAGES = "deploy/models/papers"
# How many of each kind the papers have.
ITEMS = {
    "x-moe": {"eq.": 11, "fig.": 3, "table": 10},
    "mh-moe": {"eq.": 24, "fig.": 10, "table": 12, "algorithm": 1},
    "moa": {"eq.": 20, "fig.": 4, "table": 7},
    "hmoe": {"eq.": 11, "fig.": 13, "table": 3},
}
SUFFIXES = {".cc", ".cu", ".cuh", ".h", ".inl", ".js", ".json", ".md", ".py", ".sh"}
CODE = re.compile(r"`([^`]+)`")
# A path and the names that it is mentioned for: `path` (`name`, `name`).
NAMED = re.compile(r"`([^` ]+)` \((`[^`]+`(?:, `[^`]+`)*)")
LINK = re.compile(r"\]\(([^)#]+)(#[^)]*)?\)")


def numbers_of(item):
    """Returns the kind and the numbers of an item, such as "eq. 4 to 6, 9" or "fig. 2 (a), (b)"."""
    kind, _, rest = item.partition(" ")
    numbers = []
    for part in re.sub(r"\(\w\)", "", rest).split(","):
        ends = [int(end) for end in part.split(" to ") if end.strip().isdigit()]
        if ends:
            numbers += range(ends[0], ends[-1] + 1)
    return kind, numbers


def missing_items(text, expected):
    """Returns the items of a paper that no row is about."""
    found = {kind: set() for kind in expected}
    for line in text.splitlines():
        if line.startswith("| "):
            kind, numbers = numbers_of(line[2:].partition(" |")[0])
            if kind in found:
                found[kind].update(numbers)
    return [
        f"{kind} {number}"
        for kind, count in expected.items()
        for number in range(1, count + 1)
        if number not in found[kind]
    ]


def wrong_paths(root, text):
    """Returns the files that are mentioned and do not exist."""
    tops = {path.name for path in root.iterdir() if path.is_dir()}
    paths = set()
    for code in CODE.findall(text):
        for word in code.split():
            if "/" not in word or word.startswith("/"):  # no path, or a route
                continue
            path = pathlib.PurePosixPath(word)
            if path.suffix in SUFFIXES or path.parts[0] in tops:
                paths.add(word)
    return [f"{path} does not exist" for path in sorted(paths) if not (root / path).exists()]


def wrong_names(root, text):
    faults = []
    for path, names in NAMED.findall(text):
        if not (root / path).is_file():
            continue  # wrong_paths() reports it if it should be a file
        source = (root / path).read_text(encoding="utf-8")
        for name in CODE.findall(names):
            if not re.search(rf"\b{re.escape(name)}(?!\w)", source):
                faults.append(f"{path} does not contain {name}")
    return faults


def wrong_links(page, text):
    return [
        f"the link {link} leads nowhere"
        for link, _ in LINK.findall(text)
        if "://" not in link and not (page.parent / link).exists()
    ]


def check(root):
    faults = []
    pages = {path.stem: path for path in sorted((root / PAGES).glob("*.md"))}
    if set(pages) != set(ITEMS):
        faults.append(f"{PAGES}: expected {sorted(ITEMS)}, found {sorted(pages)}")
    for name, page in pages.items():
        text = page.read_text(encoding="utf-8")
        found = [f"no row about {item}" for item in missing_items(text, ITEMS.get(name, {}))]
        found += wrong_paths(root, text) + wrong_names(root, text) + wrong_links(page, text)
        faults += [f"{PAGES}/{page.name}: {fault}" for fault in found]
    return faults


def main():
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]
    faults = check(root)
    print("\n".join(faults) or "the pages of the papers are complete, and what they name exists")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
