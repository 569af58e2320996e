"""Runs the program of this package."""

import os
import pathlib
import sys


def path() -> pathlib.Path:
    """Returns the path of the program."""
    return pathlib.Path(__file__).resolve().parent / "bin/moeserve"


def main() -> None:
    """Replaces this process by the program, with the same arguments."""
    program = path()
    # Unpackers of wheels other than pip may lose this bit.
    if not os.access(program, os.X_OK):
        program.chmod(0o755)
    os.execv(program, ["moeserve", *sys.argv[1:]])
