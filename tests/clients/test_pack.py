"""Tests `moeserve pack`, which writes packed weights before a model is served."""

import os
import subprocess

import pytest

from conftest import binary, model


def run(*words):
    done = subprocess.run([binary(), *map(str, words)], text=True, capture_output=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def sizes(folder):
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_files_are_written_once_and_used(tmp_path):
    folder = tmp_path / "packed"
    status, said, errors = run("pack", model(), folder)
    assert status == 0, errors
    files = sizes(folder)
    assert len(files) > 0 and f"{len(files)} files written, 0 found" in said
    status, said, errors = run("pack", model(), folder)
    assert status == 0 and f"0 files written, {len(files)} found" in said, errors
    words = ["generate", model(), "--prompt", "Once", "--max-tokens", "8", "--temperature", "0"]
    status, cached, errors = run(*words, "--packed-cache", folder)
    assert status == 0, errors
    assert cached == run(*words)[1]
    assert sizes(folder) == files


def test_types_have_files_of_their_own(tmp_path):
    assert run("pack", model(), tmp_path)[0] == 0
    before = set(sizes(tmp_path))
    assert run("pack", model(), tmp_path, "--dtype", "int8-channel")[0] == 0
    assert before < set(sizes(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    status, _, errors = run("pack", model(), tmp_path / "packed")
    assert status == 1 and "packed" in errors


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    status, said, errors = run("pack", model(), path)
    assert status == 1 and said == "" and "file" in errors
