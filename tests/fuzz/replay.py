#!/usr/bin/env python3
"""Runs a fuzz target over its kept inputs and its seeds: replay.py PROGRAM TARGET

PROGRAM is fuzz_replay of an ordinary build. Fails if an input ends the program, after printing
which one, if it does not end in time, or if the parser accepts no input.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

import make_seeds
import pack_corpus

SECONDS = 60  # for one input; all inputs of a target together take a few


def run(program, target, inputs, seconds):
    """Whether all inputs pass, and what the program printed."""
    try:
        done = subprocess.run([program, target, *inputs], capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False, f"no end after {seconds} s"
    return done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")


def main():
    program, target = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        pack_corpus.unpack(target, folder / "kept")
        make_seeds.write(folder / "seeds")
        inputs = [folder / "kept", folder / "seeds" / target]
        passed, output = run(program, target, inputs, 10 * SECONDS)
        if not passed:
            for path in sorted(p for part in inputs for p in part.iterdir()):
                one, said = run(program, target, [path], SECONDS)
                if not one:
                    print(f"{target} FAILED with {path.relative_to(folder)}:\n{said[-4000:]}")
            sys.exit(f"{target} FAILED:\n{output[-4000:]}")
        count = re.search(r"^(\d+) inputs", output, re.MULTILINE)
        accepted = re.search(r"^accepted inputs: (\d+)", output, re.MULTILINE)
        print(f"{target}: {count[1]} inputs, {accepted[1] if accepted else 0} accepted")
        if not accepted or int(accepted[1]) == 0:
            sys.exit(f"{target} FAILED: the parser accepted no input, not even the seeds")


if __name__ == "__main__":
    main()
