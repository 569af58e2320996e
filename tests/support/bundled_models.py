"""The models of deploy/models by what they are: decoders, masked language models, translators.

  python3 bundled_models.py [MODEL_TYPE]

prints the folders of one kind, by default of the decoders, relative to the root of the sources.
"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = ROOT / "deploy/models"
DECODER = "routed_decoder"
ENCODER = "routed_encoder"
PAIR = "routed_encoder_decoder"


def folders(model_type: str = DECODER) -> list[pathlib.Path]:
    """The folders whose config.json has this `model_type`, in the order of their names."""
    return [path.parent for path in sorted(MODELS.glob("*/config.json"))
            if json.loads(path.read_text())["model_type"] == model_type]


if __name__ == "__main__":
    for folder in folders(*sys.argv[1:]):
        print(folder.relative_to(ROOT))
