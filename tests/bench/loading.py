#!/usr/bin/env python3
"""Compares the time to load a model with the time to read its files, from a cold page cache.

    loading.py MOESERVE MODEL [--rounds N] [--warm] [--touch] [--option=VALUE ...]

MODEL is a folder or a .gguf file. In each round, the files are dropped from the page cache and read
from front to back in blocks of 8 MiB; then they are dropped again, and a server loads the model.
Prints the medians, their ratio, and the peak memory of the server as a share of the packed weights
plus the largest file. --warm reads the files before both measurements instead of dropping them.
--touch uses memory of 2.5 times the size of the files before each measurement and frees it again: a
virtual machine whose host takes free memory back pays several times as much for the first use of
memory as for later ones. Further options are passed to `moeserve serve`.
"""

import argparse
import mmap
import os
import pathlib
import re
import signal
import statistics
import subprocess
import time

BLOCK = 8 << 20
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def files_of(model):
    if model.is_file():
        return [model]
    return sorted(f for f in model.iterdir() if f.suffix in (".safetensors", ".bin", ".pt", ".gguf"))


def drop(files):
    """Removes the files from the page cache; dirty pages would stay, so they are written first."""
    for path in files:
        with open(path, "rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touch(size):
    """Uses and frees `size` bytes of memory, in a process of its own."""
    child = os.fork()
    if child == 0:
        with mmap.mmap(-1, size) as memory:
            for start in range(0, size, mmap.PAGESIZE):
                memory[start] = 1
        os._exit(0)
    os.waitpid(child, 0)


def read(files):
    buffer = bytearray(BLOCK)
    began = time.monotonic()
    for path in files:
        with open(path, "rb", buffering=0) as f:
            while f.readinto(buffer):
                pass
    return time.monotonic() - began


def load(program, model, options):
    """Starts a server and returns seconds of loading, peak memory and bytes of packed weights."""
    command = [program, "serve", "--model", str(model), "--http", "127.0.0.1:0", "--grpc",
               "127.0.0.1:0", "--max-num-seqs", "1", "--max-model-len", "64", *options]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    log = ""
    try:
        for line in server.stderr:
            log += line
            if ready := re.search(r"ready after (\d+) ms", line):
                weights = re.search(r"weights ([\d.]+) (\w+)", log)
                status = pathlib.Path(f"/proc/{server.pid}/status").read_text()
                peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
                return int(ready[1]) / 1e3, peak, float(weights[1]) * UNITS[weights[2]]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    raise SystemExit(f"the server did not start:\n{log}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("moeserve")
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--touch", action="store_true")
    options, others = parser.parse_known_args()
    files = files_of(options.model)
    size = sum(f.stat().st_size for f in files)
    prepare = read if options.warm else drop
    readings, loadings, peak, packed = [], [], 0, 0
    for _ in range(options.rounds):
        prepare(files)
        if options.touch:
            touch(5 * size // 2)
        readings.append(read(files))
        prepare(files)
        if options.touch:
            touch(5 * size // 2)
        seconds, memory, packed = load(options.moeserve, options.model, others)
        loadings.append(seconds)
        peak = max(peak, memory)
    reading, loading = statistics.median(readings), statistics.median(loadings)
    largest = max(f.stat().st_size for f in files)
    print(f"{len(files)} files, {size / (1 << 30):.2f} GiB, the largest {largest / (1 << 30):.2f}")
    print(f"reading {reading:.2f} s ({min(readings):.2f} to {max(readings):.2f}), "
          f"loading {loading:.2f} s ({min(loadings):.2f} to {max(loadings):.2f}), "
          f"ratio {loading / reading:.2f}")
    print(f"peak memory {peak / (1 << 30):.2f} GiB, packed weights {packed / (1 << 30):.2f} GiB: "
          f"{peak / (packed + largest):.2f} of packed weights and the largest file")


if __name__ == "__main__":
    main()
