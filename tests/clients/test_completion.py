"""Tests the completions of shells and the manual pages, which the program writes."""

import os
import re
import shutil
import subprocess

import pytest

from conftest import binary


def run(*arguments):
    return subprocess.run([binary(), *map(str, arguments)], check=True, text=True,
                          capture_output=True, timeout=30).stdout


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """Returns a function that completes the last of some words in bash."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    script = tmp_path_factory.mktemp("completion") / "moeserve.bash"
    script.write_text(run("completion", "bash"))

    def completed(*words, folder=None):
        code = ('source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
                '_moeserve 2>/dev/null; printf "%s\\n" "${COMPREPLY[@]}"')
        done = subprocess.run([bash, "--norc", "-c", code, "bash", script, "moeserve", *words],
                              text=True, capture_output=True, cwd=folder, check=True)
        return sorted(set(done.stdout.split("\n")) - {""})

    return completed


def test_bash_completes(complete, tmp_path):
    assert complete("se") == ["serve"]
    assert "serve" in complete("") and "chat" in complete("")
    assert complete("experts", "me") == ["merge"]
    assert complete("serve", "--max-num") == ["--max-num-seqs"]
    assert complete("serve", "--device", "") == ["cpu", "cuda"]
    assert complete("serve", "--device", "=", "cu") == ["cuda"]
    assert complete("completion", "") == ["bash", "fish", "zsh"]
    assert complete("bench", "load", "--lengths", "l") == ["log-uniform"]
    assert complete("serve", "--max-num-seqs", "") == []
    (tmp_path / "model.gguf").touch()
    assert complete("serve", "mod", folder=tmp_path) == ["model.gguf"]
    assert complete("serve", "--chat-template", "mo", folder=tmp_path) == ["model.gguf"]


@pytest.mark.parametrize("shell, check", [("bash", ["-n"]), ("zsh", ["-n"]),
                                          ("fish", ["--no-execute"])])
def test_scripts_are_valid(shell, check, tmp_path):
    script = tmp_path / "script"
    script.write_text(run("completion", shell))
    text = script.read_text()
    for word in ["serve", "max-num-seqs", "log-uniform"]:
        assert word in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, *check, script], text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    run("man", folder / "new", "--date", "2026-01-31")
    return sorted((folder / "new").iterdir())


def test_the_name_of_a_command_is_no_folder(tmp_path):
    done = subprocess.run([binary(), "man", "serve"], cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 1 and "man ./serve" in done.stderr and "serve --help" in done.stderr
    assert not list(tmp_path.iterdir())
    done = subprocess.run([binary(), "man", "./serve"], cwd=tmp_path, text=True,
                          capture_output=True)
    pages = list((tmp_path / "serve").iterdir())
    assert (done.returncode, done.stdout) == (0, f"{len(pages)} pages in ./serve\n")


def test_every_command_has_a_page(pages):
    names = {page.name for page in pages}
    assert {"moeserve.1", "moeserve-serve.1", "moeserve-experts-save.1", "moeserve-chat.1"} <= names
    commands = re.findall(r"^  (\w+) ", run("--help").partition("Commands:")[2], re.M)
    assert {f"moeserve-{command}.1" for command in commands} <= names
    serve = next(p for p in pages if p.name == "moeserve-serve.1").read_text()
    for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", run("serve", "--help"), re.M):
        assert option.replace("-", "\\-") in serve


def test_man_accepts_the_pages(pages):
    if shutil.which("man") is None:
        pytest.skip("man is not installed")
    for page in pages:
        done = subprocess.run(["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", page],
                              text=True, capture_output=True,
                              env={**os.environ, "LC_ALL": "C.UTF-8", "MANROFFSEQ": ""})
        assert (done.returncode, done.stderr) == (0, ""), page.name


def test_mandoc_accepts_the_pages(pages):
    if shutil.which("mandoc") is None:
        pytest.skip("mandoc is not installed")
    done = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", *pages], text=True,
                          capture_output=True)
    assert (done.returncode, done.stdout) == (0, "")
