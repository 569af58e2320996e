#!/usr/bin/env python3
"""Writes tests/golden/beams.json: what beam search of `transformers` finds with folders of families.

Needs transformers, which the test does not need; version 5.24 wrote the stored file. `--check` compares
a new run with the stored file instead.

The file is a list of searches: {"model", "prompt", "max_tokens", "num_beams", "length_penalty",
"early_stopping", "ends", ..., "hypotheses": [{"tokens", "score"}]}. "ends" are the ids that end a text,
that of the folder among them. Some searches have rules: "no_repeat_ngram_size", "bad_words",
"min_tokens", "repetition_penalty". "tokens" are those behind the prompt. Searches with scores so close
that rounding could change their order are left out.
"""

import argparse
import itertools
import json
import pathlib
import sys

import torch
import transformers

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
STORED = GOLDEN / "beams.json"
MODELS = ["llama", "qwen3-moe", "mixtral", "lfm2"]
ENDS = [2, 11, 23, 35, 47, 59, 71, 83]
RULES = [{"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
         {"bad_words": [[5], [60], [17, 18], [90]], "min_tokens": 4}, {"repetition_penalty": 0.8}]
NAMES = {"no_repeat_ngram_size": "no_repeat_ngram_size", "bad_words": "bad_words_ids",
         "min_tokens": "min_new_tokens", "repetition_penalty": "repetition_penalty"}
TOLERANCE = 1e-4


def searches():
    number = 0
    for model in MODELS:
        shapes = [(4, p, e, {}) for p, e in itertools.product([1.0, 0.0, -1.0, 2.0],
                                                              [False, True, "never"])]
        shapes += [(3, 1.0, False, rules) for rules in RULES]
        shapes += [(2, 1.0, False, {}), (7, 0.5, "never", {})]
        for beams, penalty, early, rules in shapes:
            number += 1
            generator = torch.Generator().manual_seed(number)
            prompt = torch.randint(3, 96, (3 + number % 17,), generator=generator).tolist()
            yield {"model": model, "prompt": prompt, "max_tokens": 14, "num_beams": beams,
                   "length_penalty": penalty, "early_stopping": early, "ends": ENDS, **rules}


def run(model, search):
    prompt = torch.tensor([search["prompt"]])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=search["max_tokens"],
        num_beams=search["num_beams"], num_return_sequences=search["num_beams"], do_sample=False,
        length_penalty=search["length_penalty"], early_stopping=search["early_stopping"],
        eos_token_id=search["ends"], pad_token_id=0, return_dict_in_generate=True,
        output_scores=True, **{NAMES[key]: search[key] for key in NAMES if key in search})
    hypotheses = []
    for row, score in zip(out.sequences, out.sequences_scores):
        tokens = row[len(search["prompt"]):].tolist()
        for at, token in enumerate(tokens):
            if token in search["ends"]:
                tokens = tokens[:at + 1]
                break
        hypotheses.append({"tokens": tokens[:search["max_tokens"]], "score": round(float(score), 6)})
    return hypotheses


def close(hypotheses):
    scores = [h["score"] for h in hypotheses]
    return any(abs(a - b) < 1e-5 for a, b in zip(scores, scores[1:]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    transformers.logging.set_verbosity_error()
    made = []
    models = {name: transformers.AutoModelForCausalLM.from_pretrained(
        GOLDEN / "families" / name, dtype=torch.float32).eval() for name in MODELS}
    for search in searches():
        with torch.no_grad():
            hypotheses = run(models[search["model"]], search)
        if not close(hypotheses):
            made.append({**search, "hypotheses": hypotheses})
    if not check:
        lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in made)
        STORED.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        print(f"{len(made)} searches")
        return 0
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    wrong = len(made) != len(stored)
    for a, b in zip(made, stored):
        same = len(a["hypotheses"]) == len(b["hypotheses"]) and all(
            x["tokens"] == y["tokens"] and abs(x["score"] - y["score"]) < TOLERANCE
            for x, y in zip(a["hypotheses"], b["hypotheses"]))
        wrong |= not same
    print("differs" if wrong else "as stored")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
