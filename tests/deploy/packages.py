"""What the tests of packages share."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = pathlib.Path(os.environ.get("MOESERVE_MODEL", ROOT / "deploy/models/mh-moe"))


def program():
    path = pathlib.Path(os.environ.get("MOESERVE_BIN", ROOT / "build/release/moeserve")).resolve()
    if not path.exists():
        pytest.skip(f"{path} is not built")
    return path


def build_folder():
    """Returns the build folder of the program."""
    folder = program().parent
    if not (folder / "cmake_install.cmake").exists():
        pytest.skip(f"{folder} is no build folder")
    need("cmake")
    return folder


def need(*tools):
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


def check(*words, **options):
    """Runs a command; returns its output. Fails with its errors."""
    done = subprocess.run([str(w) for w in words], text=True, capture_output=True, **options)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout
