#!/usr/bin/env python3
"""Packs the binary files of tests/golden, and unpacks them.

    golden_files.py unpack    writes the files that are in the archives but not in their folders
    golden_files.py pack      writes the archives anew whose files have changed
    golden_files.py check     lists files that differ from their archives; exits 1 if there are any

packed/PATH.tar.xz has the weights and results of the folder PATH, which git ignores there. Files of
text, such as config.json, are in the folder itself. CMake unpacks when it configures the tests. After
a script of tests/reference has written files, run `pack`.

`unpack` keeps a file that was changed since, unless its archive changed, too. It removes files whose
archive is gone. packed/.unpacked.json records what it wrote.
"""

import argparse
import hashlib
import io
import json
import lzma
import os
import pathlib
import sys
import tarfile

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
SUFFIXES = {".bin", ".gguf", ".pt", ".safetensors"}
# Two bits of the position select the contexts of literals, so each byte of a float has its own.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6 | lzma.PRESET_EXTREME, "lc": 1, "lp": 2, "pb": 2}]


def archive_of(files):
    """Returns the archive of {name: bytes}; it depends on them alone."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.USTAR_FORMAT) as out:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size = len(files[name])
            out.addfile(entry, io.BytesIO(files[name]))
    return lzma.compress(tar.getvalue(), filters=FILTERS)


def files_of(archive):
    """Returns {name: bytes} of an archive's bytes."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:xz") as tar:
        files = {entry.name: tar.extractfile(entry).read() for entry in tar}
    for name in files:
        if pathlib.PurePosixPath(name).name != name or name.startswith("."):
            sys.exit(f"an archive of tests/golden has the odd name {name!r}")
    return files


def archives(golden):
    """Returns {PATH of a folder: file of its archive}."""
    packed = golden / "packed"
    return {str(file.relative_to(packed))[:-len(".tar.xz")]: file
            for file in sorted(packed.rglob("*.tar.xz"))}


def folder_files(folder):
    """Returns {name: bytes} of the files of a folder that belong into its archive."""
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*"))
            if file.is_file() and file.suffix in SUFFIXES}


def write(file, content):
    """Writes a file in one step, since several builds may be configured at a time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(file)


def read_record(golden):
    record = golden / "packed" / ".unpacked.json"
    return json.loads(record.read_text()) if record.exists() else {}


def write_record(golden, record):
    text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    write(golden / "packed" / ".unpacked.json", text.encode())


def remove(folder, names):
    for name in names:
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def unpack(golden):
    before, now = read_record(golden), {}
    for path, file in archives(golden).items():
        content, folder = file.read_bytes(), golden / path
        old = before.get(path, {"sha256": "", "files": []})
        now[path] = {"sha256": hashlib.sha256(content).hexdigest(), "files": old["files"]}
        changed = now[path] != old
        if not changed and all((folder / name).exists() for name in old["files"]):
            continue
        files = files_of(content)
        now[path]["files"] = sorted(files)
        for name, data in files.items():
            if not (folder / name).exists() or changed and (folder / name).read_bytes() != data:
                write(folder / name, data)
        remove(folder, set(old["files"]) - set(files))
    for path in before.keys() - now.keys():
        remove(golden / path, before[path]["files"])
    if now != before:
        write_record(golden, now)


def pack(golden):
    unpacked = read_record(golden)
    missing = archives(golden).keys() - unpacked.keys()
    if missing:
        sys.exit(f"run `{sys.argv[0]} unpack` first: {min(missing)} was never unpacked")
    folders = {str(file.parent.relative_to(golden)) for file in golden.rglob("*")
               if file.suffix in SUFFIXES}
    for path in sorted(folders | unpacked.keys()):
        files, archive = folder_files(golden / path), golden / "packed" / f"{path}.tar.xz"
        stored = archive.read_bytes() if archive.exists() else None
        if not files:
            archive.unlink(missing_ok=True)
            unpacked.pop(path, None)
            print(f"removed {archive}")
            continue
        if stored is None or files_of(stored) != files:
            stored = archive_of(files)
            write(archive, stored)
            print(f"wrote {archive}")
        unpacked[path] = {"sha256": hashlib.sha256(stored).hexdigest(), "files": sorted(files)}
    write_record(golden, unpacked)


def differences(golden):
    """Returns a line for each file that differs from its archive."""
    found, packed = [], archives(golden)
    for path, file in packed.items():
        stored, here = files_of(file.read_bytes()), folder_files(golden / path)
        for name in sorted(stored.keys() | here.keys()):
            if stored.get(name) != here.get(name):
                what = ("is missing" if name not in here else
                        "is not packed" if name not in stored else "differs from its archive")
                found.append(f"{golden / path / name} {what}")
    for file in sorted(golden.rglob("*")):
        if file.suffix in SUFFIXES and str(file.parent.relative_to(golden)) not in packed:
            found.append(f"{file} is not packed")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["unpack", "pack", "check"])
    parser.add_argument("--golden", type=pathlib.Path, default=GOLDEN,
                        help="the folder of golden files (default: tests/golden)")
    options = parser.parse_args()
    golden = options.golden.resolve()
    if options.command == "unpack":
        unpack(golden)
    elif options.command == "pack":
        pack(golden)
    else:
        found = differences(golden)
        print("\n".join(found), end="\n" if found else "")
        sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
