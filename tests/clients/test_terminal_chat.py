"""Tests `moeserve chat`, behind a pseudo terminal and without one."""

import json
import pathlib
import re
import subprocess

import pytest

from conftest import ROOT, binary, model, preload
from terminal import Terminal

CHAT = ["chat", str(model()), "--chat-template", str(ROOT / "tests/chat/templates/chatml.jinja"),
        "--max-tokens", "12"]
COMPLETION = ["chat", str(model()), "--completion", "--max-tokens", "12"]


def talk(arguments, *lines):
    """Gives lines to the program; returns (exit status, standard output, standard error)."""
    done = subprocess.run([binary(), *arguments], input="".join(line + "\n" for line in lines),
                          text=True, capture_output=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_plain_lines():
    status, out, errors = talk(CHAT, "/set temperature 0", "In the beginning", "/clear",
                               "In the beginning", "/exit", "never read")
    assert (status, errors) == (0, "")
    answers = out.strip("\n").split("\n")
    assert len(out) > 10 and out.count(answers[0]) >= 2, out


def test_the_conversation_goes_on(tmp_path):
    saved = tmp_path / "conversation.json"
    status, out, errors = talk(CHAT, "/system Be short.", "/set temperature 0", "God", "created",
                               f"/save {saved}", f"/save {saved}")
    assert (status, errors) == (0, "")
    assert f"saved to {saved}" in out and "File exists" in out
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [messages[i]["content"] for i in (0, 1, 3)] == ["Be short.", "God", "created"]
    assert saved.stat().st_mode & 0o077 == 0
    # The second answer depends on the first turn.
    alone = tmp_path / "alone.json"
    talk(CHAT, "/system Be short.", "/set temperature 0", "created", f"/save {alone}")
    assert json.loads(alone.read_text())["messages"][2]["content"] != messages[4]["content"]


def test_completion_continues_the_text(tmp_path):
    saved = tmp_path / "text"
    status, _, errors = talk(COMPLETION, "/set temperature 0", "In the beginning God created",
                             " and then", f"/save {saved}")
    assert (status, errors) == (0, "")
    text = saved.read_text()
    assert text.startswith("In the beginning God created") and " and then" in text
    once = subprocess.run([binary(), "generate", model(), "--prompt", "In the beginning God created",
                           "--max-tokens", "12", "--temperature", "0", "--echo"], text=True,
                          capture_output=True, timeout=60).stdout
    assert text.startswith(once.removesuffix("\n"))


def test_a_model_without_a_template():
    status, _, errors = talk(["chat", str(model())], "hello")
    assert status == 1 and "--chat-template" in errors and "--completion" in errors
    status, _, errors = talk([*COMPLETION, "--system", "x"])
    assert status == 1 and "--system" in errors


def test_experts_of_the_last_answer():
    status, out, _ = talk(CHAT, "/experts", "In the beginning", "/experts")
    assert status == 0
    before, _, after = out.partition("there is no answer yet\n")
    blocks = re.findall(r"^layer (\d+) (\w+): (.*)$", after, re.M)
    assert blocks
    for _, _, experts in blocks:
        shares = [float(s) for s in re.findall(r"\d+: ([\d.]+) %", experts)]
        assert 1 <= len(shares) <= 5 and sum(shares) <= 100.3
        assert shares == sorted(shares, reverse=True)
    # The table of `generate --stats`, of this answer alone.
    rows = re.findall(r"^ +\d+ +\S+ +\d+ +(\d+) ", after, re.M)
    assert len(rows) == len(blocks) and all(int(r) > 0 for r in rows)
    tokens = int(re.search(r"^tokens (\d+)", after, re.M)[1])
    assert 12 < tokens < 200


@pytest.mark.parametrize("line, answer", [
    ("/hlep", '"/hlep"; did you mean "/help"?'),
    ("/set temprature 1", 'did you mean "temperature"?'),
    ("/set temperature 3", "expected a number from 0 to 2"),
    ("/set top_k 1.5", "expected"),
    ("/set temperature nan", "expected"),
    ("/save", "expected the name of a file"),
    ("/save /nonexistent/folder/x", "cannot write /nonexistent/folder/x"),
    ("/help", "/experts"),
    ("/set", "repetition_penalty: default"),
])
def test_commands(line, answer):
    status, out, _ = talk(CHAT, line)
    assert status == 0 and answer in out, out


def test_a_prompt_that_does_not_fit_changes_nothing(tmp_path):
    saved = tmp_path / "saved"
    status, out, _ = talk(CHAT, "word " * 20000, "God", f"/save {saved}")
    assert status == 0 and "error: " in out
    assert [m["content"] for m in json.loads(saved.read_text())["messages"]][0] == "God"


def test_lines_that_end_in_a_backslash(tmp_path):
    saved = tmp_path / "saved"
    talk(CHAT, "one \\", "two", f"/save {saved}")
    assert json.loads(saved.read_text())["messages"][0]["content"] == "one \ntwo"


def test_editing_and_history():
    with Terminal(binary(), *CHAT) as terminal:
        at = terminal.wait_for(r"/help lists the commands.*> ")
        terminal.type("/set temperatur\x7f\x7fure 9\n")  # backspaces
        at = terminal.wait_for(r"expected a number from 0 to 2, found .9.*> ", at)
        terminal.type("\x1b[A\n")  # the line before
        at = terminal.wait_for(r"expected a number from 0 to 2, found .9.*> ", at)
        terminal.type("abc\x03")  # Ctrl-C gives the line up
        at = terminal.wait_for(r"\^C.*> ", at)
        terminal.type("/set\n")
        at = terminal.wait_for(r"max_tokens: default.*> ", at)
        terminal.type("\x04")  # Ctrl-D
        assert terminal.finish() == 0


@pytest.mark.parametrize("keys, end", [("\x04", r"top_k 5\n> \^D\n$"),
                                       ("abc\x03/exit\n", r"> abc\^C\n> /exit\n$")])
def test_keys_typed_as_soon_as_the_prompt_shows(tmp_path, keys, end):
    environment = preload(pathlib.Path(__file__).with_name("slow_modes.c"), tmp_path)
    with Terminal(binary(), *CHAT, **environment) as terminal:
        at = terminal.wait_for(r"/help lists the commands.*> ")
        terminal.type("/set top_k 5\n")
        terminal.wait_for(r"top_k 5\n> ", at)
        terminal.type(keys)
        assert terminal.finish(20) == 0
        assert re.search(end, terminal.plain()), terminal.plain()


def test_ctrl_c_ends_the_answer_only():
    arguments = [a if a != "12" else "4000" for a in CHAT]
    with Terminal(binary(), *arguments, "--threads", "1") as terminal:
        at = terminal.wait_for(r"> ")
        terminal.type("/set min_tokens 4000\n")
        at = terminal.wait_for(r"4000\n> ", at)
        terminal.type("In the beginning God created the heaven\n")
        at = terminal.wait_for(r"heaven\n.{3,}", at)
        terminal.type("\x03")
        at = terminal.wait_for(r"\(interrupted\)\n.*> ", at)
        terminal.type("/exit\n")
        assert terminal.finish() == 0


def test_a_server_answers(server, tmp_path):
    """The same lines give the same text with --url."""
    saved = [tmp_path / "local", tmp_path / "remote"]
    lines = ["/set temperature 0", "In the beginning God created", " and then"]
    talk(COMPLETION, *lines, f"/save {saved[0]}")
    remote = ["chat", "--url", f"{server.url}/v1", "--completion", "--max-tokens", "12"]
    status, out, errors = talk(remote, *lines, "/experts", f"/save {saved[1]}")
    assert (status, errors) == (0, "") and "/v1/experts/stats" in out
    assert saved[0].read_text() == saved[1].read_text() != ""
    # The server's refusal of a chat, since its model has no template.
    status, out, _ = talk(remote[:3], "hello")
    assert status == 0 and "no chat template" in out
    status, _, errors = talk([*remote, "--model", "x"])
    assert status == 2 and "--url" in errors and "--model" in errors


def test_no_server_answers():
    status, _, errors = talk(["chat", "--url", "http://127.0.0.1:1/v1"])
    assert status == 1 and "--url: 127.0.0.1:1: " in errors
    status, _, errors = talk(["chat", "--url", "https://x"])
    assert status == 1 and "--url" in errors
    status, _, errors = talk(["chat"])
    assert status == 1 and "--model" in errors and "--url" in errors
