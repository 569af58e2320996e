"""Writes README.md of every bundled model from the results of evaluate.py and the training runs.

  python3 model_card.py --figures FIGURES.json --runs FOLDER --models deploy/models
"""

import argparse
import json
import pathlib
import textwrap
from typing import Any

from bundled_configs import BUNDLED

TITLES = {
    "dense": "dense decoder, the baseline for the other models",
    "smoe": "ordinary sparse mixture of experts: 8 experts, top-2 selection, gate weights "
            "renormalised",
    "x-moe": "X-MoE: 8 experts, cosine scores in 4 dimensions (half the number of experts) with a "
             "learned temperature, top-2 selection, gate weights renormalised",
    "mh-moe": "MH-MoE: each token is split into 4 sub-tokens of width 32, 48 experts, top-2 "
              "selection per sub-token, gate weights renormalised",
    "moa": "MoA: 32 attention experts that share one key and value head, top-4 selection, gate "
           "weights renormalised; the feed-forward layers are dense",
    "hmoe-topk": "HMoE: experts with 72 to 184 hidden units, top-2 selection, gate weights "
                 "renormalised",
    "hmoe-topp": "HMoE: experts with 72 to 184 hidden units, top-p selection, gate weights "
                 "renormalised",
}
# Deviations of a model's training from the common schedule, for training it again.
REMARKS = {
    "hmoe-topp": " The cosine schedule was set to end at step 3200 until about step 700, to end at "
                 "step 2500 until about step 1200, and then to end at step 1800. The router's "
                 "initial weights had half the standard deviation that train.py uses.",
    "mh-moe": " The cosine schedule was set to end at step 3200 and then at step 2500 until about "
              "step 600, and then to end at step 1800.",
}
LOSSES = {
    "dense": "cross entropy",
    "smoe": "cross entropy; load balance, weight 1e-2",
    "x-moe": "cross entropy; load balance, weight 1e-2, with the temperature fixed at 0.3 in this "
             "term",
    "mh-moe": "cross entropy; load balance over sub-tokens, weight 1e-2",
    "moa": "cross entropy; load balance, weight 1e-2; router z-loss, weight 1e-3",
    "hmoe-topk": "cross entropy; load balance, weight 1e-2; parameter penalty, whose weight "
                 "started at 0.1 and was adjusted during training until the activated parameters "
                 "met their budget",
    "hmoe-topp": "cross entropy; load balance, weight 1e-2; parameter penalty, weight 0.1; router "
                 "entropy, whose weight started at 1e-2 and was adjusted during training until the "
                 "activated parameters met their budget",
}


def _steering(name: str, run: dict[str, Any]) -> str:
    return f" (last weight {run['steering']:.4f})" if name.startswith("hmoe") else ""


def _schedule(run: dict[str, Any]) -> str:
    text = (f"100 steps of warm-up and then a cosine decay to 5 % of the peak that ends at step "
            f"{run['cycles'][0]}")
    for steps in run["cycles"][1:]:
        text += f", then another {steps} steps from half the peak"
    return text


def _shuffle(effects: dict[str, float]) -> str:
    if not effects:
        return "no routed layer"
    return ", ".join(f"layer {key.split('.')[0]}: +{value:.0f} %" for key, value in effects.items())


def card(name: str, figures: dict[str, Any], run: dict[str, Any], bigram: float) -> str:
    measured = figures[name]
    ratio = measured["activation_ratio"]
    select = BUNDLED[name]["feed_forward"].get("routing", {}).get("select", {})
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
    if select.get("kind") == "top_p":
        config = select["p"]
        rows.insert(3, ("p; mean summed width of the experts selected for a token",
                        f"{run.get('p', config)}; {measured['selected_width']:.1f} (budget 256)"))
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    paragraphs = [
        f"All seven bundled models have width 128, 4 layers, a vocabulary of 4096 and up to 8192 "
        f"positions. They were trained on the same tokens in the same order, in sequences of 256 "
        f"(70 %), 512 (20 %) and 1024 (10 %) tokens, and activate the same number of parameters "
        f"per token within 3 %.",
        f"Training: AdamW with betas 0.9 and 0.95, weight decay 0.1, peak learning rate "
        f"{run['rate']:g}, {_schedule(run)}, 2048 tokens per step, matrix products in bf16."
        f"{REMARKS.get(name, '')} Losses: {LOSSES[name]}{_steering(name, run)}.",
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
    body = "\n\n".join(textwrap.fill(text, 100) for text in paragraphs)
    return f"# {name}\n\n{textwrap.fill(title, 100)}\n\n| | |\n|---|---|\n{table}\n\n{body}\n"


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
