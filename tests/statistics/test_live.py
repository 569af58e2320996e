"""Checks that the expert statistics of a running server are consistent.

MOESERVE_BIN names the program. The model is the bundled mh-moe.
"""

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request

import numpy as np
import pytest

from test_statistics import MODELS, moeserve, read_profile


class Server:
    def __init__(self, *arguments):
        command = [os.environ["MOESERVE_BIN"], "serve", "--model", MODELS / "mh-moe"]
        command += ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        assert line.startswith("http listening on "), line
        self.url = "http://" + line.split()[-1]

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read()

    def complete(self, prompt, tokens=24):
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        request = urllib.request.Request(
            self.url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def server():
    running = Server("--hidden-samples", "100", "--router-stats-interval", "1")
    for prompt in ("In the beginning God created", "The parser of the language", "It was a day"):
        running.complete(prompt)
    yield running
    running.stop()


def test_profile_agrees_with_the_statistics(server, tmp_path):
    stats = json.loads(server.get("/v1/experts/stats"))
    path = tmp_path / "live"
    path.write_bytes(server.get("/v1/experts/profile"))
    arrays, _ = read_profile(path)
    shown = json.loads(moeserve("experts", "show", path, "--json"))
    assert shown["tokens"] == stats["tokens"] > 70
    for i, (layer, again) in enumerate(zip(stats["layers"], shown["layers"])):
        assert layer["counts"] == again["counts"] == arrays[f"blocks.{i}.selections"].tolist()
        table = arrays[f"blocks.{i}.token_counts"]
        assert table.sum(axis=0).tolist() == layer["counts"], "every selection has its token"
        # With --router-stats-interval 1, the router statistics cover every step.
        assert layer["router"]["rows"] == layer["rows"]
        assert layer["router"]["counts"] == layer["counts"]
        assert sum(layer["decode_counts"]) == 2 * 2 * 23 * 3, "the last token is never run"
        assert again["router"] == layer["router"]
        assert again["collapse"]["seen"] == layer["rows"]
        assert again["collapse"]["rows"] == 100


def test_addresses_agree_with_the_profile(server, tmp_path):
    path = tmp_path / "live"
    path.write_bytes(server.get("/v1/experts/profile"))
    show = ["experts", "show", path, "--json", "--min-count", 2, "--top", 3, "--eps", 0.5]
    shown = json.loads(moeserve(*show, "--model", MODELS / "mh-moe"))
    collapse = json.loads(server.get("/v1/experts/collapse"))["layers"]
    for layer, live in zip(shown["layers"], collapse):
        number = layer["layer"]
        assert live["value"] == pytest.approx(layer["collapse"]["value"], rel=1e-12)
        tokens = json.loads(
            server.get(f"/v1/experts/tokens?layer={number}&min_count=2&top=3")
        )
        assert tokens["experts"] == layer["top_tokens"]
        similarity = json.loads(server.get(f"/v1/experts/similarity?layer={number}&eps=0.5"))
        for kind in ("wasserstein", "total_variation", "kl"):
            # Values are None for experts that no token selected.
            found = np.array(similarity[kind]["matrix"], dtype=np.float64)
            expected = np.array(layer["similarity"][kind]["matrix"], dtype=np.float64)
            np.testing.assert_array_equal(found, expected)


def test_what_the_operator_did_not_allow_is_not_there():
    running = Server("--token-stats-mib", "0", "--router-stats-interval", "0")
    try:
        running.complete("In the beginning")
        stats = json.loads(running.get("/v1/experts/stats"))
        assert [layer["router"]["rows"] for layer in stats["layers"]] == [0] * 4
        for path in ("tokens?layer=0", "similarity?layer=0", "collapse"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                running.get(f"/v1/experts/{path}")
            assert refused.value.code == 404
            assert "--" in json.load(refused.value)["error"]["message"], "names the flag"
    finally:
        running.stop()
