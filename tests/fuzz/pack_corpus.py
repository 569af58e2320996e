#!/usr/bin/env python3
"""Writes the files of a folder as the kept corpus of a fuzz target: pack_corpus.py TARGET FOLDER

The result, corpus/TARGET.zip, depends on the contents of the files alone.
"""

import hashlib
import io
import pathlib
import sys
import zipfile

CORPUS = pathlib.Path(__file__).parent / "corpus"


def archive_of(contents):
    """The bytes of an archive with these inputs."""
    named = {hashlib.sha1(content).hexdigest()[:16]: content for content in contents}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(named):
            archive.writestr(zipfile.ZipInfo(name), named[name], zipfile.ZIP_DEFLATED)
    return out.getvalue()


def pack(target, folder, max_bytes=None):
    """Packs the inputs of a folder; beyond `max_bytes`, leaves out the largest ones."""
    contents = sorted({p.read_bytes() for p in folder.iterdir() if p.is_file()}, key=lambda c: (len(c), c))
    archive = archive_of(contents)
    left_out = 0
    while max_bytes is not None and len(archive) > max_bytes:
        count = max(1, len(contents) // 50)
        left_out += count
        contents = contents[:-count]
        archive = archive_of(contents)
    CORPUS.mkdir(exist_ok=True)
    path = CORPUS / f"{target}.zip"
    path.write_bytes(archive)
    note = f", without the {left_out} largest" if left_out else ""
    print(f"{path}: {len(contents)} inputs, {len(archive)} bytes{note}")


def unpack(target, folder):
    """Writes the kept inputs of a target to a new folder."""
    folder.mkdir()
    path = CORPUS / f"{target}.zip"
    if path.exists():
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)


def count(target):
    """The number of kept inputs of a target."""
    path = CORPUS / f"{target}.zip"
    if not path.exists():
        return 0
    with zipfile.ZipFile(path) as archive:
        return len(archive.namelist())


if __name__ == "__main__":
    pack(sys.argv[1], pathlib.Path(sys.argv[2]))
