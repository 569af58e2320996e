"""Compares every sampling field with a sampler in NumPy.

The server returns the log-probabilities of the whole vocabulary. From these, the sampling fields and
the documented uniform number of each draw, the NumPy sampler computes the next token.
"""

import numpy as np
import pytest

from conftest import post, start_server, stop_server

VOCABULARY = 4096
TOKENS = 12
PROMPTS = ["The king said", "In the first place, the list of", "A man of"]
MASK = (1 << 64) - 1


@pytest.fixture(scope="module")
def open_server():
    server = start_server("--max-logprobs", str(VOCABULARY))
    yield server
    stop_server(server)


def mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def uniform(seed, sample, step):
    """Returns the uniform number in [0, 1) of a draw: SplitMix64 over seed, sample and step."""
    golden = 0x9E3779B97F4A7C15
    z = mix(seed + golden & MASK)
    z = mix(z ^ (sample + golden & MASK))
    z = mix(z ^ (step * golden + 1 & MASK))
    return (z >> 11) * 2.0**-53


def changed(logprobs, fields, output):
    x = logprobs.copy()
    for token, bias in fields.get("logit_bias", {}).items():
        x[int(token)] += bias
    if "allowed_token_ids" in fields:
        mask = np.full(len(x), -np.inf)
        mask[fields["allowed_token_ids"]] = 0.0
        x += mask
    if len(output) < fields.get("min_tokens", 0):
        x[[0, *fields.get("stop_token_ids", [])]] = -np.inf
    counts = np.bincount(np.array(output, dtype=int), minlength=len(x))
    x -= fields.get("frequency_penalty", 0.0) * counts
    x -= fields.get("presence_penalty", 0.0) * (counts > 0)
    return x


def choose(x, fields, number):
    """Returns the sampled token, and the smallest distance of any value from a threshold that it is
    compared with. If the distance is small, rounding may change the token."""
    order = np.argsort(-x, kind="stable")
    temperature = fields.get("temperature", 1.0)
    if temperature == 0:
        return order[0], x[order[0]] - x[order[1]]
    weight = np.exp((x - x[order[0]]) / temperature)
    margins = [1.0]
    kept = len(x)
    if fields.get("top_k", 0) > 0:
        kept = min(fields["top_k"], kept)
        if kept < len(x):
            margins.append(x[order[kept - 1]] - x[order[kept]])
    total = weight[order[:kept]].sum()
    if "top_p" in fields:
        sums = np.cumsum(weight[order[:kept]])
        n = int(np.searchsorted(sums, fields["top_p"] * total)) + 1
        margins.append(np.abs(sums - fields["top_p"] * total).min() / total)
        kept = n
    keep = np.zeros(len(x), dtype=bool)
    keep[order[:kept]] = True
    if "min_p" in fields:
        margins.append(np.abs(weight - fields["min_p"]).min())
        keep &= weight >= fields["min_p"]
    sums = np.cumsum(np.where(keep, weight, 0.0))
    target = number * sums[-1]
    margins.append(np.abs(sums - target).min() / sums[-1])
    return int(np.searchsorted(sums, target, side="right")), min(margins)


CASES = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 12},
    {"top_p": 0.7},
    {"top_p": 0.9, "top_k": 40, "temperature": 0.8},
    {"min_p": 0.05},
    {"temperature": 0, "presence_penalty": 2.0},
    {"temperature": 0, "frequency_penalty": 1.5},
    {"presence_penalty": -1.0, "frequency_penalty": 0.5},
    {"logit_bias": {"17": 5, "300": -100, "263": 2.5}},
    {"allowed_token_ids": [5, 99, 250, 261, 300, 512, 1024, 4000]},
    {"min_tokens": 6, "stop_token_ids": [261, 263, 264], "top_k": 20},
]


@pytest.mark.parametrize("fields", CASES, ids=lambda f: "-".join(f"{k}" for k in f))
def test_field(open_server, fields):
    compared = 0
    for number, prompt in enumerate(PROMPTS):
        seed = 1000 * number + 7
        answer = post(open_server, "/v1/completions", {
            "prompt": prompt, "max_tokens": TOKENS, "seed": seed, "n": 2, "logprobs": VOCABULARY,
            "return_tokens_as_token_ids": True, "return_token_ids": True,
            # The defaults of the API, not those of the model.
            "temperature": 1.0, "top_p": 1.0, **fields})
        for choice in answer["choices"]:
            output = []
            rows = choice["logprobs"]["top_logprobs"]
            assert len(rows) == len(choice["token_ids"])
            for step, (token, row) in enumerate(zip(choice["token_ids"], rows)):
                logprobs = np.full(VOCABULARY, -np.inf)
                for key, value in row.items():
                    logprobs[int(key.removeprefix("token_id:"))] = value
                assert abs(np.exp(logprobs).sum() - 1) < 1e-4
                x = changed(logprobs, fields, output)
                wanted, margin = choose(x, fields, uniform(seed, choice["index"] % 2, step))
                if margin > 1e-5:
                    assert token == wanted, (prompt, step)
                    compared += 1
                output.append(token)
    assert compared > 10


def test_repetition_penalty(open_server):
    """With a large penalty, no token may be repeated. (Unit tests check the logits.)"""
    answer = post(open_server, "/v1/completions", {
        "prompt": "the the the", "max_tokens": 60, "temperature": 0, "repetition_penalty": 100.0,
        "return_token_ids": True})
    ids = answer["choices"][0]["token_ids"]
    assert len(set(ids)) == len(ids)


def test_bad_words(open_server):
    body = {"prompt": "He said that the", "max_tokens": 40, "temperature": 0}
    text = post(open_server, "/v1/completions", body)["choices"][0]["text"]
    word = max(text.split(), key=text.count)
    other = post(open_server, "/v1/completions", {**body, "bad_words": [word]})["choices"][0]["text"]
    assert word in text.split() and word not in other.split()


def test_prefix_cache(open_server):
    """The second request with the same prompt must reuse cached tokens and return the same text. A
    request with another salt must not reuse them."""
    body = {"prompt": list(range(100, 180)), "max_tokens": 8, "temperature": 0}
    first, second, salted = (
        post(open_server, "/v1/completions", {**body, **extra})
        for extra in ({}, {}, {"cache_salt": "mine"}))
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, second, salted)]
    assert cached == [0, 64, 0]
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
