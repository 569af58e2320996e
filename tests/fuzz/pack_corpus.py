#!/usr/bin/env python3
"""Packs and unpacks the kept inputs of the fuzz targets.

    pack_corpus.py TARGET FOLDER     writes the files of a folder to corpus/TARGET.tar.xz
    pack_corpus.py --unpack FOLDER   writes the kept inputs of every target to FOLDER/TARGET

An archive depends on the contents of the files alone. An input is named after its SHA-1.
"""

import argparse
import hashlib
import io
import lzma
import pathlib
import tarfile

CORPUS = pathlib.Path(__file__).parent / "corpus"


def archive_path(target):
    return CORPUS / f"{target}.tar.xz"


def archive_of(contents):
    """The bytes of an archive with these inputs; inputs of like size, which are often alike, are neighbours."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for content in sorted(set(contents), key=lambda c: (len(c), c)):
            entry = tarfile.TarInfo(hashlib.sha1(content).hexdigest()[:16])
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return lzma.compress(out.getvalue(), preset=9 | lzma.PRESET_EXTREME)


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
    path = archive_path(target)
    path.write_bytes(archive)
    note = f", without the {left_out} largest" if left_out else ""
    print(f"{path}: {len(contents)} inputs, {len(archive)} bytes{note}")


def unpack(target, folder):
    """Writes the kept inputs of a target to a new folder."""
    folder.mkdir(parents=True)
    path = archive_path(target)
    if path.exists():
        with tarfile.open(path) as archive:
            for entry in archive:
                (folder / pathlib.PurePosixPath(entry.name).name).write_bytes(
                    archive.extractfile(entry).read())


def count(target):
    """The number of kept inputs of a target."""
    path = archive_path(target)
    if not path.exists():
        return 0
    with tarfile.open(path) as archive:
        return len(archive.getnames())


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unpack", action="store_true")
    parser.add_argument("target", nargs="?")
    parser.add_argument("folder", type=pathlib.Path)
    options = parser.parse_args()
    if options.unpack == (options.target is not None):
        parser.error("name a target and a folder, or --unpack and a folder")
    if not options.unpack:
        pack(options.target, options.folder)
        return
    for path in sorted(CORPUS.glob("*.tar.xz")):
        target = path.name[:-len(".tar.xz")]
        unpack(target, options.folder / target)


if __name__ == "__main__":
    main()
