"""Writes README.md of every bundled model from the results of evaluate.py and the training runs.

  python3 model_card.py --figures FIGURES.json --runs FOLDER --models deploy/models
"""

import argparse
import json
import pathlib
import textwrap
from typing import Any

from bundled_configs import BUNDLED, HMOE_WIDTHS

TITLES = {
    "dense": "dense decoder, the baseline for the other models",
    "smoe": "ordinary sparse mixture of experts: 8 experts of 128 hidden units, top-2 selection",
    "x-moe": "X-MoE: 8 experts of 128 hidden units, cosine scores in 4 dimensions with a learned "
             "temperature, top-2 selection",
    "mh-moe": "MH-MoE: each token is split into 2 sub-tokens of width 64, 8 experts of 232 hidden "
              "units, cosine scores in 8 dimensions with a learned temperature, top-2 selection "
              "per sub-token",
    "moa": "MoA: 32 attention experts that share one key and value head, top-4 selection; the "
           "feed-forward layers are dense",
    "hmoe-topk": "HMoE: 8 experts with 72 to 184 hidden units, top-2 selection",
    "hmoe-topp": "HMoE: 8 experts with 72 to 184 hidden units, top-p selection",
}
LOSSES = {
    "dense": "cross entropy",
    "smoe": "cross entropy; load balance, weight 1e-2",
    "x-moe": "cross entropy; load balance, weight 1e-2, with the temperature fixed at 0.3 in this "
             "term",
    "mh-moe": "cross entropy; load balance over sub-tokens, weight 1e-2, with the temperature "
              "fixed at 0.3 in this term",
    "moa": "cross entropy; load balance with normalized loads, weight 1e-2; router z-loss, weight "
           "1e-3",
    "hmoe-topk": "cross entropy; parameter penalty, weight 0.1",
    "hmoe-topp": "cross entropy; parameter penalty, weight 0.1; entropy of the router, weight 3e-2",
}
SLOWER_PARTS = {
    "x-moe": "The router's peak is an eighth of that, 5e-4, as in X-MoE's table 9. ",
    "mh-moe": "The peak of the router and of the split and merge projections is an eighth of that, "
              "5e-4, as in MH-MoE's table 10. ",
}
# Where the settings of config.json and the losses come from: pairs of a setting and its source.
SMOE_ROUTING = [
    ("`score` dot, `gate` softmax", "X-MoE eq. 1 and 3"),
    ("`select` top_k 2, `renormalize`", "X-MoE section 2.2: softmax over the selected experts"),
]
COSINE = [
    ("`score` cosine", "X-MoE eq. 7"),
    ("`temperature` divide, initially 0.3", "X-MoE eq. 8"),
    ("expert embeddings keep the norm 0.1", "X-MoE section 3.1"),
]
HMOE = [
    ("`expert` gated silu", "HMoE eq. 1 and 2"),
    ("`widths` 9, 11, ... 23 times 8", "HMoE: arithmetic strategy"),
    ("`score` dot, `gate` softmax", "HMoE eq. 7"),
]
PENALTY = ("parameter penalty", "HMoE eq. 4, widths divided by their mean; weight of appendix C")
SOURCES: dict[str, list[tuple[str, str]]] = {
    "dense": [],
    "smoe": SMOE_ROUTING + [("load balance", "X-MoE eq. 9 for scores without temperature")],
    "x-moe": COSINE + [
        ("`dim` 4, half the number of experts", "X-MoE section 4.1 (16 for 32 experts)"),
        ("`select` top_k 2, `renormalize`", "X-MoE section 2.2: softmax over the selected experts"),
        ("load balance", "X-MoE eq. 9 and 10, weight of table 9"),
    ],
    "mh-moe": [
        ("`split` into 2 heads", "MH-MoE eq. 3 and 4; bias as in its appendix E"),
        *COSINE,
        ("`dim` 8, 16 / h", "MH-MoE table 9"),
        ("`select` top_k 2", "MH-MoE table 9"),
        ("`renormalize` false", "MH-MoE eq. 5 and 6"),
        ("`split.residual`", "MH-MoE eq. 6"),
        ("merge projection", "MH-MoE eq. 7 to 9; bias as in its appendix E"),
        ("`widths` 232", "MH-MoE section 3.1: beta, which gives the model the parameters of smoe"),
        ("load balance", "MH-MoE eq. 10 and 11, weight of table 10"),
    ],
    "moa": [
        ("one key and value head for all experts", "MoA eq. 10 and 11"),
        ("`score` dot, `gate` softmax", "MoA eq. 7"),
        ("`select` top_k 4", "MoA eq. 8"),
        ("`renormalize`, no gradient through the sum", "MoA eq. 9"),
        ("sum over the selected experts", "MoA eq. 6 and 12"),
        ("load balance", "MoA eq. 13 to 15, with f and P normalized; weight of section 4.3"),
        ("router z-loss", "MoA eq. 16 and 17, weight of section 4.3"),
    ],
    "hmoe-topk": HMOE + [
        ("`select` top_k 2, `renormalize`", "HMoE eq. 6 and 8"),
        PENALTY,
    ],
    "hmoe-topp": HMOE + [
        ("`select` top_p 0.6, `compare` ge", "HMoE eq. 9 and 10"),
        ("`renormalize`", "HMoE eq. 6 and 11"),
        PENALTY,
        ("entropy of the router",
         "HMoE eq. 5 without the factor E, minimized; weight of appendix C"),
    ],
}


def _table(rows: list[tuple[str, str]], head: tuple[str, str] = ("", "")) -> str:
    lines = [f"| {head[0]} | {head[1]} |" if head[0] else "| | |", "|---|---|"]
    return "\n".join(lines + [f"| {key} | {value} |" for key, value in rows])


def _shuffle(effects: dict[str, float]) -> str:
    if not effects:
        return "no routed layer"
    return ", ".join(f"layer {key.split('.')[0]}: +{value:.0f} %" for key, value in effects.items())


def card(name: str, figures: dict[str, Any], run: dict[str, Any], bigram: float) -> str:
    measured = figures[name]
    ratio = measured["activation_ratio"]
    rows = [
        ("parameters", f"{measured['parameters']:,}"),
        ("model.safetensors", f"{measured['file_bytes']:,} bytes (bf16, router f32)"),
        ("activated parameters per token, without embeddings",
         f"{measured['activated_parameters']:,}"),
        ("activation ratio of the expert parameters", f"{ratio:.4f}" if ratio else "1 (dense)"),
        ("training steps, training tokens",
         f"{run['steps']:,} steps, {run['tokens']:,} tokens"),
        ("validation perplexity", f"{measured['validation_perplexity']:.2f}"),
        ("perplexity of an interpolated bigram model on the same text", f"{bigram:.2f}"),
        ("dead experts (load below 5 % of the mean load)",
         f"{measured['dead_experts']}; smallest load {measured['least_load']:.2f} of the "
         "mean load"),
        ("perplexity increase when the experts of one layer are permuted",
         _shuffle(measured["shuffle_effect_percent"])),
    ]
    if name.startswith("hmoe"):
        rows.insert(3, ("mean summed width of the experts selected for a token",
                        f"{measured['selected_width']:.1f} of {sum(HMOE_WIDTHS)}"))
    paragraphs = [
        f"All seven bundled models have width 128, 4 layers, a vocabulary of 4096 and up to 8192 "
        f"positions. They were trained on the same tokens in the same order, in sequences of 256 "
        f"(70 %), 512 (20 %) and 1024 (10 %) tokens, each of them once.",
        f"Training: AdamW with betas 0.9 and 0.95, weight decay 0.1, peak learning rate "
        f"{run['rate']:g}, 100 steps of warm-up and then a cosine decay to 5 % of the peak, 2048 "
        f"tokens per step, matrix products in bf16. {SLOWER_PARTS.get(name, '')}Losses: "
        f"{LOSSES[name]}.",
        "The number of activated parameters counts a weight every time a token uses it: in "
        "attention, norms, routers and selected experts, and once for each sub-token of a split "
        "layer. For top-p and for experts of unequal widths it is the mean over the validation "
        "text. Perplexity is per token of `tokenizer.json`, over windows of 512 tokens.",
        "Training text: King James Bible, WordNet 3.0 glosses, Jargon File, The Devil's "
        "Dictionary, and the documentation of SQLite, PostgreSQL 15 and Python 3.11. Licences: "
        "public domain, WordNet, PostgreSQL and PSF; `tests/data/README.md` lists sources and "
        "notices. `<|endoftext|>` (id 0) was put before and after every document. The tokenizer "
        "adds no special token to a prompt.",
    ]
    title = (f"{TITLES[name][0].upper() + TITLES[name][1:]}. A small English model in the native "
             "format, for trying the server and for the server's tests. Its output resembles its "
             "training text; do not rely on what it says.")
    parts = [f"# {name}", textwrap.fill(title, 100), _table(rows)]
    if SOURCES[name]:
        parts += ["Settings of `config.json` and of the training, and where they come from "
                  "(`../README.md` says where\nthe training differs from the papers):",
                  _table(SOURCES[name], ("setting", "source"))]
    return "\n\n".join(parts + [textwrap.fill(text, 100) for text in paragraphs]) + "\n"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--figures", type=pathlib.Path, required=True)
    arguments.add_argument("--runs", type=pathlib.Path, required=True)
    arguments.add_argument("--models", type=pathlib.Path, required=True)
    options = arguments.parse_args()
    figures = json.loads(options.figures.read_text())
    bigram = figures["bigram"]["validation_perplexity"]
    for name in BUNDLED:
        if name in figures:
            run = json.loads((options.runs / f"{name}.json").read_text())
            (options.models / name / "README.md").write_text(card(name, figures, run, bigram))


if __name__ == "__main__":
    main()
