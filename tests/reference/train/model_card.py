"""Writes README.md of every bundled model from the figures of evaluate.py and the training runs.

  python3 model_card.py --figures FIGURES.json --runs FOLDER --models deploy/models
"""

import argparse
import json
import pathlib
import textwrap
from typing import Any

from bundled_configs import BUNDLED

TITLES = {
    "dense": "dense decoder, the yardstick of the others",
    "smoe": "ordinary sparse mixture: 8 experts, top-2, weights renormalised",
    "x-moe": "X-MoE: cosine scores in 4 dimensions (half the experts) with a learned temperature, "
             "8 experts, top-2 renormalised",
    "mh-moe": "MH-MoE: tokens split into 4 sub-tokens, 48 experts on width 32, top-2 "
              "renormalised",
    "moa": "MoA: 32 attention experts over one shared key and value head, top-4 renormalised; "
           "dense feed-forward",
    "hmoe-topk": "HMoE: experts of 72 to 184 wide, top-2 renormalised",
    "hmoe-topp": "HMoE: experts of 72 to 184 wide, as many as reach p, renormalised",
}
# What differed from the common schedule, for whoever wants to train the model again.
REMARKS = {
    "hmoe-topp": " The cosine was laid out for 3200 steps until about step 700 and for 2500 until "
                 "about step 1200, then shortened to end at 1800; the router began at half the "
                 "spread of train.py.",
    "mh-moe": " The cosine was laid out for 3200 and then 2500 steps until about step 600, then "
              "shortened to end at 1800.",
}
LOSSES = {
    "dense": "cross entropy alone",
    "smoe": "cross entropy, balance 1e-2",
    "x-moe": "cross entropy, balance 1e-2 (temperature 0.3 held constant in it)",
    "mh-moe": "cross entropy, balance 1e-2 over sub-tokens",
    "moa": "cross entropy, balance 1e-2, router z-loss 1e-3",
    "hmoe-topk": "cross entropy, balance 1e-2, parameter penalty; its weight began at 0.1 and was "
                 "steered to meet the budget of activated parameters",
    "hmoe-topp": "cross entropy, balance 1e-2, parameter penalty 0.1, router entropy; the weight "
                 "of the entropy began at 1e-2 and was steered to meet the "
                 "budget of activated parameters",
}


def _steering(name: str, run: dict[str, Any]) -> str:
    return f" (last value {run['steering']:.4f})" if name.startswith("hmoe") else ""


def _schedule(run: dict[str, Any]) -> str:
    text = f"100 steps of warm-up and cosine to 5 % over {run['cycles'][0]} steps"
    for steps in run["cycles"][1:]:
        text += f", again over {steps} from half the peak"
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
        ("steps, tokens", f"{run['steps']:,} steps, {run['tokens']:,} tokens"),
        ("validation perplexity", f"{measured['validation_perplexity']:.2f}"),
        ("interpolated bigram model, same text", f"{bigram:.2f}"),
        ("dead experts (under 5 % of an equal load)",
         f"{measured['dead_experts']}, least load {measured['least_load']:.2f} of an equal one"),
        ("perplexity after moving one layer's experts around",
         _shuffle(measured["shuffle_effect_percent"])),
    ]
    if select.get("kind") == "top_p":
        config = select["p"]
        rows.insert(3, ("p, mean width of the selected experts",
                        f"{run.get('p', config)}, {measured['selected_width']:.1f} (budget 256)"))
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    paragraphs = [
        f"All seven bundled models have width 128, 4 layers, a vocabulary of 4096 and up to 8192 "
        f"positions (trained on 256, some 512 and 1024), saw the same tokens in the same order, "
        f"and activate the same number of parameters per token within 3 %. AdamW (0.9, 0.95), "
        f"weight decay 0.1, peak rate {run['rate']:g}, {_schedule(run)}, 2048 tokens per step, "
        f"bf16 products.{REMARKS.get(name, '')} Losses: {LOSSES[name]}{_steering(name, run)}.",
        "Activated parameters count every use of a weight by a token: attention, norms, routers, "
        "selected experts; the sub-tokens of a split layer each count. For top-p and unequal "
        "experts they are means over the validation text. Perplexity is per token of "
        "`tokenizer.json`, windows of 512.",
        "Training text: King James Bible, WordNet 3.0 glosses, Jargon File, The Devil's "
        "Dictionary, and the documentation of SQLite, PostgreSQL 15 and Python 3.11; public "
        "domain, WordNet, PostgreSQL and PSF licences. Sources and notices: "
        "`tests/data/README.md`. `<|endoftext|>` (id 0) stands before and after a document; "
        "nothing is added to a prompt.",
    ]
    title = (f"{TITLES[name][0].upper() + TITLES[name][1:]}. A small English model in the native "
             "format, for trying the server and for its tests: its text resembles its sources and "
             "says nothing to rely on.")
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
