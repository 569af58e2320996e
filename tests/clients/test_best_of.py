"""best_of of completions: the samples that n = best_of returns, ordered by their mean
log-probability."""

import json
import urllib.error

import pytest

from conftest import post

PROMPTS = ["In the beginning", "The king said"]
FIELDS = {"max_tokens": 12, "temperature": 1.3, "seed": 7}


def complete(server, **fields):
    return post(server, "/v1/completions", {"prompt": PROMPTS, **FIELDS, **fields})


def mean(choice):
    values = choice["logprobs"]["token_logprobs"]
    return sum(values) / len(values)


@pytest.mark.parametrize("n", [1, 2, 6])
def test_returns_the_best_of_the_same_samples(server, n):
    every = complete(server, n=6, logprobs=0)
    best = complete(server, n=n, best_of=6)
    assert [c["index"] for c in best["choices"]] == list(range(len(PROMPTS) * n))
    for prompt in range(len(PROMPTS)):
        samples = every["choices"][6 * prompt: 6 * prompt + 6]
        assert len({mean(c) for c in samples}) == 6, "the order is known"
        if n < 6:
            samples.sort(key=mean, reverse=True)
        got = best["choices"][n * prompt: n * prompt + n]
        assert [c["text"] for c in got] == [c["text"] for c in samples[:n]]
        assert [c["finish_reason"] for c in got] == [c["finish_reason"] for c in samples[:n]]
        assert all(c["logprobs"] is None for c in got)
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]
    assert best["usage"]["prompt_tokens"] == every["usage"]["prompt_tokens"]


def test_log_probabilities_belong_to_their_choices(server):
    every = complete(server, n=4, logprobs=2)
    best = complete(server, n=1, best_of=4, logprobs=2)
    for prompt, choice in enumerate(best["choices"]):
        expected = max(every["choices"][4 * prompt: 4 * prompt + 4], key=mean)
        assert choice["logprobs"] == expected["logprobs"]


@pytest.mark.parametrize("fields", [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True},
                                    {"best_of": 1000}])
def test_refusals_name_the_field(server, fields):
    with pytest.raises(urllib.error.HTTPError) as refused:
        complete(server, **fields)
    assert refused.value.code == 400
    assert json.load(refused.value)["error"]["param"] == "best_of"
