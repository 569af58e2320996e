"""Tests the orders in which people give the arguments of `experts save`, `show` and `merge`."""

import subprocess

import pytest

from conftest import binary, model

TEXT = "The king said unto his people that the city was great.\n" * 20


def run(folder, *words):
    return subprocess.run([binary(), "experts", *map(str, words)], cwd=folder, text=True,
                          capture_output=True, timeout=60)


@pytest.fixture(name="folder")
def a_folder(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    return tmp_path


@pytest.mark.parametrize("words", [
    "OUT MODEL --text text", "MODEL OUT --text text", "--text text OUT MODEL",
    "--text text MODEL OUT", "OUT --text text MODEL", "MODEL --text text OUT",
    "OUT --text text --model MODEL",
    "--model MODEL --text text OUT", "-m MODEL OUT --text text", "MODEL --text text -o OUT",
    "-o OUT --text text MODEL", "--output OUT --model MODEL --text text", "--text=text MODEL OUT",
    "--quiet MODEL --text text OUT --window 64", "--text text -- MODEL OUT",
])
def test_save(folder, words):
    given = {"OUT": "out.profile", "MODEL": model()}
    done = run(folder, "save", *(given.get(word, word) for word in words.split()))
    assert done.returncode == 0, done.stderr
    first = (folder / "out.profile").read_bytes()
    # Over a profile that exists, it means the same.
    assert run(folder, "save", *(given.get(word, word) for word in words.split())).returncode == 0
    assert (folder / "out.profile").read_bytes() == first


@pytest.mark.parametrize("words, message", [
    ("--text text", "FILE is required"),
    ("MODEL --text text", "FILE is required"),
    ("OUT --text text", "--model is required"),
    ("OUT", "--text is required"),
    ("OUT MODEL EXTRA --text text", 'unknown argument "extra"'),
    ("OUT MODEL --model MODEL --text text", "MODEL"),
    ("OUT MODEL -o OUT --text text", "not expected: out.profile"),
    # A second text is not taken for the profile to write.
    ("MODEL --text text text2", 'a file that is no profile is not overwritten: "text2": '),
    ("MODEL --text text -o FOLDER", '"folder": expected a profile to write, found a folder'),
    ("OUT missing --text text", "missing: expected a model folder"),
    ("missing OUT --text text", "expected a model folder"),
])
def test_save_refuses(folder, words, message):
    (folder / "folder").mkdir()
    (folder / "text2").write_text(TEXT)
    given = {"OUT": "out.profile", "MODEL": model(), "EXTRA": "extra", "FOLDER": "folder"}
    done = run(folder, "save", *(given.get(word, word) for word in words.split()))
    assert done.returncode != 0
    assert message.replace("MODEL", str(model())) in done.stderr
    assert not (folder / "out.profile").exists()
    assert (folder / "text2").read_text() == TEXT


def test_show_and_merge(folder):
    assert run(folder, "save", "a", model(), "--text", "text").returncode == 0
    plain = run(folder, "show", "a").stdout
    assert plain
    shown = {run(folder, "show", *words).stdout
             for words in (["a", model()], [model(), "a"], ["a", "--model", model()],
                           ["-m", model(), "a"])}
    assert len(shown) == 1 and shown.isdisjoint({"", plain})
    assert run(folder, "show", model()).returncode != 0

    assert run(folder, "merge", "sum", "a", "a").returncode == 0
    for words in (["a", "a", "-o", "other"], ["--output", "other", "a", "a"],
                  ["a", "-o", "other", "a"]):
        assert run(folder, "merge", *words).returncode == 0
        assert (folder / "other").read_bytes() == (folder / "sum").read_bytes()
    assert run(folder, "merge", "-o", "same", "a").returncode == 0
    refused = run(folder, "merge", "a")
    assert refused.returncode != 0 and "is required" in refused.stderr
