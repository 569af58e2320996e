"""Tests the reports of progress on standard error, behind a pseudo terminal and without one."""

import re
import subprocess

import pytest

from conftest import binary, model
from terminal import Terminal

# Work that takes a known time.
LONG = ["bench", "load", "--model", model(), "--clients", "2", "--seconds", "4", "--prompt-tokens", "8",
        "--output-tokens", "8"]


def test_a_bar_on_a_terminal():
    with Terminal(binary(), *LONG, columns=60) as terminal:
        assert terminal.finish(120) == 0
        text = terminal.output
    assert "load" in text and re.search(r"\[\x1b\[36m#*\x1b\[0m-*\]", text), text
    bars = [part for part in re.split(r"[\r\n]", text) if part.startswith("load")]
    assert len(bars) > 3
    assert all(len(re.sub(r"\x1b\[[0-9;]*[mK]", "", bar)) < 60 for bar in bars)
    # At most ten a second, and the last one is removed.
    assert len(bars) < 400
    assert re.search(r"\r\x1b\[K(?!.*load)", text, re.S)


def test_no_color():
    with Terminal(binary(), *LONG, NO_COLOR="1") as terminal:
        assert terminal.finish(120) == 0
        assert "#" in terminal.output and "\x1b[36m" not in terminal.output


@pytest.mark.parametrize("quiet", [False, True])
def test_lines_without_a_terminal(quiet):
    done = subprocess.run([binary(), *LONG, *(["--quiet"] if quiet else [])], text=True,
                          capture_output=True, timeout=120)
    assert done.returncode == 0
    assert "\r" not in done.stderr and "\x1b" not in done.stderr
    lines = re.findall(r"^load: \d+ of 4 seconds, \d+ s left$", done.stderr, re.M)
    ends = re.findall(r"^load: 4 seconds in .*$", done.stderr, re.M)
    assert (lines, ends) == ([], []) if quiet else len(lines) >= 1 and len(ends) == 1, done.stderr
    assert "load:" not in done.stdout


def test_quiet_on_a_terminal():
    with Terminal(binary(), *LONG, "--quiet") as terminal:
        assert terminal.finish(120) == 0
        assert not re.search(r"load +\d+ %|load:", terminal.output) and "\x1b" not in terminal.output


def test_short_work_is_silent(tmp_path):
    text = tmp_path / "text"
    text.write_text("In the beginning God created the heaven and the earth.")
    for words in [["quantize", model(), tmp_path / "int8", "--dtype", "int8"],
                  ["convert", model(), tmp_path / "new"], ["score", model(), "--text", text],
                  ["generate", model(), "--prompt", "In", "--max-tokens", "1"]]:
        done = subprocess.run([binary(), *map(str, words)], text=True, capture_output=True,
                              timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), words


def test_scoring_reports_tokens(tmp_path):
    text = tmp_path / "text"
    text.write_text("In the beginning God created the heaven and the earth. " * 4000)
    with Terminal(binary(), "score", model(), "--text", text, "--threads", "1", streams=(2,),
                  columns=120) as terminal:
        terminal.wait_for(r"scoring +\d+ % \[[#-]+\]  \d+ of \d+ tokens, \d+ tokens/s, .* left")


def test_a_load_reports_seconds():
    with Terminal(binary(), "bench", "load", "--model", model(), "--clients", "2", "--seconds", "3",
                  "--prompt-tokens", "8", "--output-tokens", "8") as terminal:
        terminal.wait_for(r"load +\d+ % \[[#-]+\]  \d of 3 seconds, \d s left")
        assert terminal.finish() == 0
