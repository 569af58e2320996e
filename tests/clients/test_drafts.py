"""Speculative decoding: the options of `serve`, and answers, statistics and metrics with drafts."""

import json
import shutil
import struct
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


def with_prediction_layer(folder):
    """Copies the model and gives it a prediction layer: its last layer once more, behind a joining
    matrix that keeps the model's row and drops the next token."""
    shutil.copytree(model(), folder)
    config = json.loads((folder / "config.json").read_text())
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    config["prediction"] = {"num_hidden_layers": 1, "attention": config["attention"],
                            "feed_forward": config["feed_forward"]}
    (folder / "config.json").write_text(json.dumps(config))
    content = (folder / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8:8 + size]), content[8 + size:]

    def add(name, shape, values):
        nonlocal data
        header[name] = {"dtype": "BF16", "shape": shape,
                        "data_offsets": [len(data), len(data) + len(values)]}
        data += values

    last = f"blocks.{layers - 1}."
    for name, tensor in list(header.items()):
        if name.startswith(last):
            header["prediction.blocks.0." + name.removeprefix(last)] = tensor
    one, zero = b"\x80\x3f", b"\0\0"
    for norm in ("embed_norm", "hidden_norm", "norm"):
        add(f"prediction.{norm}.weight", [width], one * width)
    add("prediction.join.weight", [width, 2 * width],
        b"".join(one if column == width + row else zero
                 for row in range(width) for column in range(2 * width)))
    # The layer's tensors need bytes of their own.
    for name, tensor in list(header.items()):
        if name.startswith("prediction.blocks."):
            begin, end = tensor["data_offsets"]
            add(name, tensor["shape"], data[begin:end])
            header[name]["dtype"] = tensor["dtype"]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_prediction_layers_change_no_answer(tmp_path):
    folder = tmp_path / "predicting"
    with_prediction_layer(folder)
    found = []
    for options in (("--draft-tokens", "0"), ("--draft-mtp", "--draft-tokens", "3")):
        server = start_server(*options, folder=folder)
        try:
            found.append(answers(server))
            drafted, accepted, _ = metrics(server)
        finally:
            assert stop_server(server) == 0
    assert found[0] == found[1]
    assert 0 < accepted <= drafted


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
    assert "--draft-mtp: expected a checkpoint with prediction layers" in error(*serve,
                                                                                "--draft-mtp")
    assert "expected no --draft-model" in error(*serve, "--draft-mtp", "--draft-model", str(DRAFT))
    translator = str(DRAFT.parent / "dense-translator")
    message = error("--model", translator, "--draft-model", translator)
    assert "expected a decoder, found a model with an encoder" in message
