"""Folders with random models of the families, which have no tokenizer in the sources."""

import json
import pathlib
import shutil
import string

from mpi_runs import ROOT


def random_model(folder, name):
    """Writes a random model of a family with a tokenizer of words and letters; returns its path."""
    model = pathlib.Path(folder) / name
    source = ROOT / "tests/golden/families" / name
    model.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(source / file, model)
    letters = string.ascii_lowercase
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + c for c in letters),
             "cat", "dog", "once", "there", "time", "tree", "upon", "was"]
    size = json.loads((source / "config.json").read_text())["vocab_size"]
    words += [f"word{i}" for i in range(len(words), size)]
    (model / "vocab.txt").write_text("\n".join(words) + "\n")
    return model
