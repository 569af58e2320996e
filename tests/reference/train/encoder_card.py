"""Writes README.md of the bundled masked language models and translators from the figures of
evaluate_encoders.py and evaluate_pairs.py, and from the training runs.

  MOESERVE_BIN=build/release/moeserve python3 encoder_card.py --figures FIGURES.json --runs FOLDER \
      --models deploy/models
"""

import argparse
import json
import os
import pathlib
import subprocess
import textwrap
from typing import Any

from encoder_configs import (ENCODERS, EQUAL_LENGTH, MASKED_LMS, MLM_DEPTH, MLM_EXPERT_WIDTH,
                             MLM_EXPERTS, MLM_POSITIONS, PAIR_EXPERTS, PAIR_SELECTED,
                             translator_cost)
from evaluate_encoders import SHUFFLE_PARAGRAPHS
from model_card import _table

TITLES = {
    "x-moe-mlm": "X-MoE's masked language model: a bidirectional encoder of four layers, and in "
                 f"their middle a layer of {MLM_EXPERTS} experts without attention; an expert is "
                 f"{MLM_DEPTH} residual feed-forward sub-layers of {MLM_EXPERT_WIDTH} hidden "
                 f"units; cosine scores in {MLM_EXPERTS // 2} dimensions with a learned "
                 "temperature, top-1 selection",
    "dense-mlm": "The dense twin of x-moe-mlm: the layer in the middle has a single expert, which "
                 "every token uses",
    "moa-translator": "MoA's translator from English to Spanish: three layers of encoder and of "
                      f"decoder, whose attention and cross-attention select {PAIR_SELECTED} of "
                      f"{PAIR_EXPERTS} attention experts that share one key and value head",
    "dense-translator": "The dense twin of moa-translator, from English to Spanish: four heads in "
                        "every attention, and narrower feed-forward layers, so that both models "
                        "take equally many multiply-adds at 32 tokens",
}
X_MOE = [
    ("the routed layer, without attention, in the middle",
     "X-MoE section 4.1: after layer 6 of 12"),
    (f"`expert` residual, `depth` {MLM_DEPTH}", "X-MoE table 8"),
    ("`score` cosine", "X-MoE eq. 7"),
    ("`dim` half the number of experts", "X-MoE section 4.1 and table 5 (16 for 32)"),
    ("`gate` softmax, `temperature` divide, initially 0.3", "X-MoE eq. 8, table 8"),
    ("expert embeddings keep the norm 0.1", "X-MoE section 3.1"),
    ("`select` top_k 1", "X-MoE section 2.1"),
    ("load balance", "X-MoE eq. 9 and 10, weight of table 9"),
]
MOA = [
    ("routed self-attention in both stacks, routed cross-attention", "MoA section 4"),
    ("one key and value head for all experts", "MoA eq. 10 and 11"),
    ("`score` dot, `gate` softmax", "MoA eq. 7"),
    (f"`select` top_k {PAIR_SELECTED} of {PAIR_EXPERTS}",
     "MoA eq. 8; half of the experts, as MoA big has (16 of 32)"),
    ("`renormalize`, no gradient through the sum", "MoA eq. 9"),
    ("load balance, router z-loss", "MoA eq. 13 to 17, weights of section 4.3"),
    ("label smoothing 0.1, joint vocabulary, tied embeddings", "MoA section 5.1"),
]
SOURCES = {"x-moe-mlm": X_MOE, "moa-translator": MOA}
SCHEDULE = (
    "The training was cut short: the learning rate followed the schedule of 4,000 steps up to step "
    "1,337, and from there that of 2,500. ")
MLM_TEXT = (
    "Training text: that of the decoders (King James Bible, WordNet 3.0 glosses, Jargon File, The "
    "Devil's Dictionary, documentation of SQLite, PostgreSQL 15 and Python 3.11; public domain, "
    "WordNet, PostgreSQL and PSF licences), one paragraph per sequence, with a tokenizer of its "
    "own. <s> and </s> surround a text, and <mask> takes in the space before it. "
    f"At most {MLM_POSITIONS} tokens.")
PAIR_TEXT = (
    "Training text: the Bible in English (King James and World English Bible) and Spanish "
    "(Reina-Valera of 1909), all in the public domain, and messages of PostgreSQL, Django, Django "
    "REST framework, WTForms, sudo, xkeyboard-config, CUPS, p11-kit, Poedit, Sphinx and Vim, all "
    "under permissive licences; `tests/data/README.md` lists packages and licences. Verses are "
    "trained on whole and in clauses. The Spanish has the language and the spelling of 1909 where "
    "the text is like the Bible. </s> ends a source and a translation; the decoder begins with "
    "<s>.")


def inspected(folder: pathlib.Path) -> dict[str, Any]:
    program = os.environ["MOESERVE_BIN"]
    done = subprocess.run([program, "inspect", "--json", folder], check=True, capture_output=True,
                          text=True)
    return json.loads(done.stdout)


def effects(measured: dict[str, float]) -> str:
    if len(measured) == 1:
        return f"+{next(iter(measured.values())):.0f} %"
    return ", ".join(f"{key.replace('.', ' ')}: {value:+.0f} %" for key, value in measured.items())


def rows(name: str, figures: dict[str, Any], run: dict[str, Any],
         facts: dict[str, Any]) -> list[tuple[str, str]]:
    if name in MASKED_LMS:
        macs = facts["macs_per_token"]
        cost = macs["nominal"] + EQUAL_LENGTH * macs["attention_per_key"]["max"]
        unit = "token"
    else:
        cost, unit = translator_cost(ENCODERS[name], EQUAL_LENGTH), "source and target token"
    out = [
        ("parameters", f"{figures['parameters']:,}"),
        ("model.safetensors", f"{figures['file_bytes']:,} bytes (bf16, router f32)"),
        ("parameters that one token uses, embeddings included",
         f"{facts['activated_parameters']['nominal']:,}"),
        (f"multiply-adds per {unit} of texts of {EQUAL_LENGTH} tokens, without the head",
         f"{cost:,}"),
        ("training steps, training tokens",
         f"{run['steps']:,} steps, {run['tokens']:,} tokens"),
    ]
    if name in MASKED_LMS:
        out.append((f"pseudo-perplexity, {figures['texts']} held-out paragraphs",
                    f"{figures['perplexity']:.2f}"))
        out.append(("perplexity change when the networks of the layer in the middle give nothing "
                    f"({SHUFFLE_PARAGRAPHS} texts)", f"{figures['silent_effect_percent']:+.1f} %"))
    else:
        out.append((f"perplexity of {figures['texts']} held-out targets",
                    f"{figures['perplexity']:.2f}"))
        for search, kinds in figures["translation"].items():
            out.append((f"chrF / BLEU of held-out pairs, {search}", "; ".join(
                f"{kind} {kinds[kind]['chrf']:.1f} / {kinds[kind]['bleu']:.1f}"
                for kind in ("all", "verses", "messages"))))
    if "loads" in figures:
        out += [("dead experts (load below 5 % of the mean load)",
                 f"{figures['dead_experts']}; smallest load {figures['least_load']:.2f} of the "
                 "mean load"),
                (f"perplexity change when the experts of one block are permuted "
                 f"({SHUFFLE_PARAGRAPHS} texts)", effects(figures["shuffle_effect_percent"]))]
    return out


def card(name: str, figures: dict[str, Any], run: dict[str, Any], facts: dict[str, Any]) -> str:
    masked = name in MASKED_LMS
    title = (f"{TITLES[name]}. A small model in the native format, for trying the server and for "
             "its tests; do not rely on what it says.")
    loss = ("30 % of the tokens are hidden: 80 % become <mask>, 10 % another token, 10 % stay."
            if masked else "Labels are smoothed by 0.1.")
    training = (
        f"Training: AdamW with betas 0.9 and 0.95, weight decay 0.1, peak learning rate "
        f"{run['rate']:g}{' (router: an eighth)' if name == 'x-moe-mlm' else ''}, 100 steps of "
        f"warm-up and then a cosine decay to 5 % of the peak, about 4096 tokens per step, matrix "
        f"products in bf16. {loss} {'' if masked else SCHEDULE}This model and its twin saw the "
        "same batches in the same order.")
    definition = (
        "Pseudo-perplexity: exp of the mean of -ln p over all tokens of the first paragraphs of "
        "`tests/data/heldout.txt`; each token is hidden in turn while the rest is seen "
        "(`tests/reference/train/evaluate_encoders.py`)." if masked else
        "chrF and BLEU: sacrebleu with its defaults over `tests/data/heldout_pairs.tsv`, verses "
        "and messages that were not trained on, translated by the server in f32 "
        "(`tests/reference/train/evaluate_pairs.py` repeats it). Greedy, and beam search of width "
        "4.")
    parts = [f"# {name}", textwrap.fill(title, 100), _table(rows(name, figures, run, facts))]
    if name in SOURCES:
        parts += ["Settings of `config.json` and of the training, and where they come from "
                  "(`../README.md` says where\nthe training differs from the papers):",
                  _table(SOURCES[name], ("setting", "source"))]
    if not masked:
        examples = figures["translation"]["beam 4"]["examples"]
        parts += ["Held-out sources and their translations by beam search of width 4:",
                  _table([(source.replace("|", "\\|"), found.replace("|", "\\|"))
                          for source, found, _ in examples], ("source", "translation"))]
    return "\n\n".join(parts + [textwrap.fill(text, 100) for text in (
        training, definition, MLM_TEXT if masked else PAIR_TEXT)]) + "\n"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--figures", type=pathlib.Path, required=True)
    arguments.add_argument("--runs", type=pathlib.Path, required=True)
    arguments.add_argument("--models", type=pathlib.Path, required=True)
    options = arguments.parse_args()
    figures = json.loads(options.figures.read_text())
    for name in ENCODERS:
        if name in figures:
            folder = options.models / name
            run = json.loads((options.runs / f"{name}.json").read_text())
            text = card(name, figures[name], run, inspected(folder))
            (folder / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
