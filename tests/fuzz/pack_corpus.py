#!/usr/bin/env python3
"""Writes the files of a folder as the kept corpus of a fuzz target: pack_corpus.py TARGET FOLDER

The result, corpus/TARGET.zip, depends on the contents of the files alone.
"""

import hashlib
import pathlib
import sys
import zipfile


def main():
    target, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    contents = {p.read_bytes() for p in folder.iterdir() if p.is_file()}
    path = pathlib.Path(__file__).parent / "corpus" / f"{target}.zip"
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        named = {hashlib.sha1(content).hexdigest()[:16]: content for content in contents}
        for name in sorted(named):
            archive.writestr(zipfile.ZipInfo(name), named[name], zipfile.ZIP_DEFLATED)
    print(f"{path}: {len(named)} inputs, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
