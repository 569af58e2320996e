"""Trains the byte-level BPE tokenizer that the bundled models share.

`<|endoftext|>` (id 0) separates documents, so it begins and ends every text. The post-processor
adds no special token: a prompt that is to begin a document must contain the token.

  python3 train_tokenizer.py --data BUILD_FOLDER --out TOKENIZER_FOLDER
"""

import argparse
import json
import pathlib

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from prepare_data import SEPARATOR

VOCAB_SIZE = 4096


def train(text: pathlib.Path) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[SEPARATOR], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    documents = text.read_text(encoding="utf-8").split(SEPARATOR)
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, path: pathlib.Path) -> np.ndarray:
    """Returns the documents of a file as one stream of token ids, uint16 [tokens]. The separator
    follows each document."""
    separator = tokenizer.token_to_id(SEPARATOR)
    documents = path.read_text(encoding="utf-8").split(SEPARATOR)
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(documents):
        stream.extend(encoding.ids)
        stream.append(separator)
    return np.array(stream, dtype=np.uint16)


def write_companions(folder: pathlib.Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SEPARATOR, "eos_token": SEPARATOR, "add_bos_token": False,
        "model_max_length": 8192}, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({
        "bos_token_id": 0, "eos_token_id": 0, "temperature": 0.7, "top_p": 0.9}, indent=2) + "\n")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--data", type=pathlib.Path, required=True)
    arguments.add_argument("--out", type=pathlib.Path, required=True)
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train(options.data / "train.txt")
    tokenizer.save(str(options.out / "tokenizer.json"), pretty=False)
    write_companions(options.out)
    for part in ("train", "validation", "heldout"):
        ids = encode(tokenizer, options.data / f"{part}.txt")
        np.save(options.data / f"{part}.npy", ids)
        print(part, len(ids), "tokens")


if __name__ == "__main__":
    main()
