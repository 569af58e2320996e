#!/usr/bin/env python3
"""Compares the PyTorch reference with the families' own answers, through `moeserve convert`.

    check_reference.py --moeserve PROGRAM [--only SUBSTRING]

Every model of tests/golden/families is converted to the native format; the reference implementation
then computes the log-probabilities of golden.safetensors. So the reference, the conversion and the
readers of the families agree on what every setting means. Needs torch, but not transformers.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import torch

REFERENCE = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REFERENCE))

import routed_decoder  # noqa: E402
import safetensors_io  # noqa: E402

GOLDEN = REFERENCE.parent / "golden" / "families"
LIMIT = 1e-4


def is_long(config, tokens):
    """Whether long rope scaling treats a sequence of this many tokens as long."""
    settings = [config["position"], *(a.get("position", {}) for a in config["attention"])]
    scalings = [s["scaling"] for s in settings if s.get("scaling", {}).get("kind") == "long"]
    return any(tokens > s["original_positions"] for s in scalings)


def worst_difference(folder, program):
    golden, _ = safetensors_io.load(folder / "golden.safetensors")
    with tempfile.TemporaryDirectory() as parent:
        native = pathlib.Path(parent) / "native"
        subprocess.run([program, "convert", folder, native], check=True,
                       stdout=subprocess.DEVNULL)
        model = routed_decoder.RoutedDecoder.from_folder(native)
    worst = 0.0
    for tokens, expected in zip(golden["tokens"], golden["logprobs"]):
        model.is_long = is_long(model.config, len(tokens))
        logprobs = torch.log_softmax(model.forward(tokens.long()).double(), -1)
        worst = max(worst, (logprobs - expected.double()).abs().max().item())
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moeserve", required=True)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    folders = sorted(f for f in GOLDEN.iterdir() if options.only in f.name)
    for folder in folders:
        worst = worst_difference(folder, options.moeserve)
        if not worst <= LIMIT:
            failed += 1
            print(f"{folder.name}: largest difference {worst:.1e}, expected at most {LIMIT:.0e}")
    print(f"{len(folders)} models, {failed} differ")
    return 1 if failed or not folders else 0


if __name__ == "__main__":
    sys.exit(main())
