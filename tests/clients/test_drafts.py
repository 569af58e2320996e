"""Speculative decoding: the options of `serve`, and answers, statistics and metrics with drafts."""

import json
import shutil
import subprocess
import urllib.request

from conftest import ROOT, binary, model, post, start_server, stop_server

DRAFT = ROOT / "deploy/models/dense"


def answers(server):
    """Returns the texts and log-probabilities of some completions; the prompts repeat themselves."""
    found = []
    for i in range(4):
        body = {"prompt": "And God said, Let there be light: and there was light. And God said, Let",
                "max_tokens": 48, "temperature": 0.5 * (i % 2), "seed": i, "ignore_eos": True}
        if i > 1:
            body["logprobs"] = 2
        choice = post(server, "/v1/completions", body)["choices"][0]
        found.append((choice["text"], json.dumps(choice["logprobs"])))
    return found


def metrics(server):
    text = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
    names = ("draft_tokens_total", "draft_accepted_tokens_total", "generation_tokens_total")
    return [sum(float(line.rpartition(" ")[2]) for line in text.splitlines()
                if line.startswith(f"moeserve_{name}{{")) for name in names]


def test_answers_are_the_same():
    expected = None
    for options in (("--draft-tokens", "0"), ("--draft-tokens", "16"),
                    ("--draft-model", str(DRAFT), "--draft-tokens", "3"), ()):
        server = start_server(*options)
        try:
            found = answers(server)
            drafted, accepted, generated = metrics(server)
            stats = json.load(urllib.request.urlopen(f"{server.url}/v1/experts/stats"))
        finally:
            assert stop_server(server) == 0
        if expected is None:
            expected = found
            assert drafted == 0
        assert found == expected
        assert accepted <= drafted
        assert accepted < generated == 4 * 48
        assert stats["rejected_tokens"] == drafted - accepted


def error(*options):
    done = subprocess.run([binary(), "serve", "--http", "127.0.0.1:0", *options],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    return done.stderr


def test_wrong_options(tmp_path):
    serve = ("--model", str(model()))
    assert "--draft-tokens" in error(*serve, "--draft-tokens", "65")
    assert "--draft-model" in error(*serve, "--draft-model", str(tmp_path / "nothing"))
    # A model with another tokenizer.
    folder = tmp_path / "other"
    shutil.copytree(DRAFT, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    token = next(text for text, number in vocabulary.items() if number == 300)
    vocabulary["something else"] = vocabulary.pop(token)
    tokenizer["model"]["merges"] = [merge for merge in tokenizer["model"]["merges"]
                                    if "".join(merge).replace(" ", "") != token
                                    and token not in (merge if isinstance(merge, list)
                                                      else merge.split(" "))]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = error(*serve, "--draft-model", str(folder))
    assert "--draft-model: expected the tokenizer of the model, in which token 300 is" in message
    assert "something else" in message
    assert "--draft-tokens" in error(*serve, "--draft-model", str(DRAFT), "--draft-tokens", "0")
    translator = str(DRAFT.parent / "dense-translator")
    message = error("--model", translator, "--draft-model", translator)
    assert "expected a decoder, found a model with an encoder" in message
