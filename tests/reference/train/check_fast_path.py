"""Compares fast_model.py, with which the models are trained, with the reference implementation.

Both run one exported model in fp32, although training computes its matrix products in bf16. The
next token's log-probabilities are compared.

  python3 check_fast_path.py --folder FOLDER --data FOLDER
"""

import argparse
import pathlib
import sys

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import grouped_ops  # noqa: E402
import routed_decoder  # noqa: E402
from bundled_configs import Config  # noqa: E402
from fast_model import FastModel, Statistics  # noqa: E402


def load_fast(config: Config, tensors: dict[str, torch.Tensor]) -> FastModel:
    """Returns a FastModel with the tensors of a native checkpoint. Gate and up projections become
    one matrix, the gate's rows first."""
    model = FastModel(config)
    for name, value in model.parameters.items():
        if name.endswith("gate_up.weight"):
            source = torch.cat([tensors[name.replace("gate_up", part)] for part in ("gate", "up")])
        else:
            source = tensors[name]
        value.copy_(source.float())
    return model


@torch.no_grad()
def compare(folder: pathlib.Path, tokens: torch.Tensor) -> tuple[float, float]:
    """Returns the mean and the largest difference of the next token's log-probability over the
    sequence `tokens` [T+1]."""
    config, tensors = routed_decoder.load_folder(folder)
    reference = routed_decoder.RoutedDecoder(config, tensors)
    fast = load_fast(config, tensors)
    wanted = tokens[1:, None]
    exact = reference.forward(tokens[:-1]).log_softmax(1).gather(1, wanted)
    states = fast.hidden(tokens[None, :-1], Statistics())
    trained = (states @ fast.parameters["embed.weight"].t()).log_softmax(1).gather(1, wanted)
    difference = (exact - trained).abs()
    return float(difference.mean()), float(difference.max())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--folder", type=pathlib.Path, required=True)
    arguments.add_argument("--data", type=pathlib.Path, required=True)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    grouped_ops.low_dtype = torch.float32
    data = torch.from_numpy(np.load(options.data / "validation.npy")[:513].astype(np.int64))
    mean, largest = compare(options.folder, data)
    print(f"{options.folder.name}: mean difference {mean:.2e}, largest {largest:.2e}")
    if mean > 1e-5:
        sys.exit("the training path disagrees with the reference")


if __name__ == "__main__":
    main()
