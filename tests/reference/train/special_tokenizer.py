"""Trains the byte-level BPE tokenizers of the bundled encoders and translators.

  python3 special_tokenizer.py masked-lm --data BUILD_FOLDER --out TOKENIZER_FOLDER
  python3 special_tokenizer.py pairs --data BUILD_FOLDER --out TOKENIZER_FOLDER

masked-lm reads the texts of prepare_data.py, and has the special tokens of RoBERTa: a text is
between <s> and </s>, and <mask> takes in the space before it. pairs reads the pairs of
prepare_pairs.py; both languages share the tokenizer, and </s> ends a source. The texts' tokens go
to BUILD_FOLDER as one array per part and side, with the offsets of the texts.
"""

import argparse
import json
import pathlib
from collections.abc import Iterable

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from encoder_configs import BOS, EOS, MASK, PAD, SPECIAL_TOKENS, VOCABULARIES
from prepare_data import SEPARATOR

PARTS = ("train", "validation", "heldout")


def train(texts: Iterable[str], kind: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCABULARIES[kind], special_tokens=SPECIAL_TOKENS[kind], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    if MASK in SPECIAL_TOKENS[kind]:
        tokenizer.add_special_tokens([tokenizers.AddedToken(MASK, lstrip=True, special=True)])
    ends = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
    single, pair = f"$A {EOS}", f"$A {EOS} $B {EOS}"
    if kind == "masked-lm":
        single, pair = f"{BOS} {single}", f"{BOS} $A {EOS} {EOS} $B {EOS}"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair,
                                                             special_tokens=ends)
    return tokenizer


def save_encoded(path: pathlib.Path, tokenizer: tokenizers.Tokenizer, texts: list[str]) -> int:
    """Writes the tokens of all texts, uint16, and the offset of each text; no special tokens."""
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    offsets = np.cumsum([0] + [len(ids) for ids in encoded])
    tokens = np.array([token for ids in encoded for token in ids], dtype=np.uint16)
    np.savez(path, tokens=tokens, offsets=offsets)
    return len(tokens)


def write_companions(folder: pathlib.Path, kind: str) -> None:
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS[kind])}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS,
              "pad_token": PAD}
    generation = {"bos_token_id": ids[BOS], "eos_token_id": ids[EOS], "pad_token_id": ids[PAD]}
    if kind == "masked-lm":
        config.update(cls_token=BOS, sep_token=EOS, mask_token=MASK)
    else:
        generation.update(decoder_start_token_id=ids[BOS], num_beams=4, max_new_tokens=128)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def read_texts(kind: str, data: pathlib.Path, part: str) -> dict[str, list[str]]:
    """The texts of a part by side: the paragraphs of documents, or sources and targets."""
    if kind == "masked-lm":
        documents = (data / f"{part}.txt").read_text(encoding="utf-8").split(SEPARATOR)
        return {"text": [line for document in documents for line in document.split("\n") if line]}
    lines = (data / f"{part}.tsv").read_text(encoding="utf-8").splitlines()
    columns = [line.split("\t") for line in lines]
    return {"source": [column[1] for column in columns],
            "target": [column[2] for column in columns]}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("kind", choices=sorted(VOCABULARIES))
    arguments.add_argument("--data", type=pathlib.Path, required=True)
    arguments.add_argument("--out", type=pathlib.Path, required=True)
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    texts = read_texts(options.kind, options.data, "train")
    tokenizer = train((text for side in texts.values() for text in side), options.kind)
    tokenizer.save(str(options.out / "tokenizer.json"), pretty=False)
    write_companions(options.out, options.kind)
    for part in PARTS:
        for side, lines in read_texts(options.kind, options.data, part).items():
            count = save_encoded(options.data / f"{part}.{side}.npz", tokenizer, lines)
            print(part, side, len(lines), "texts", count, "tokens")


if __name__ == "__main__":
    main()
