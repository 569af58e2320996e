"""Makes folders of small encoders that `serve` accepts: those of tests/golden/encoders with a
tokenizer of letters."""

import json
import pathlib
import shutil
import string

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden/encoders"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tokenizer():
    letters = string.ascii_lowercase
    words = SPECIAL + list(letters) + [f"##{letter}" for letter in letters]
    ids = {word: index for index, word in enumerate(words)}

    def special(name, kind):
        return {"SpecialToken": {"id": name, "type_id": kind}}

    def text(name, kind):
        return {"Sequence": {"id": name, "type_id": kind}}

    return {
        "version": "1.0",
        "added_tokens": [{"id": ids[name], "content": name, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True}
                         for name in SPECIAL],
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [special("[CLS]", 0), text("A", 0), special("[SEP]", 0)],
            "pair": [special("[CLS]", 0), text("A", 0), special("[SEP]", 0), text("B", 1),
                     special("[SEP]", 1)],
            "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]}
                               for name in ("[CLS]", "[SEP]")}},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": ids}}


def make(name, folder, **files):
    """Returns the folder of a model. `files` are further JSON files, without their extension."""
    out = pathlib.Path(folder) / name
    shutil.copytree(GOLDEN / name, out)
    for file, content in {"tokenizer": tokenizer(), **files}.items():
        (out / f"{file}.json").write_text(json.dumps(content))
    return out


def make_pair(source, folder):
    """Returns a folder of the encoder-decoder `source` with the tokenizer of letters. Tokens beyond
    the letters have texts that no text contains."""
    out = pathlib.Path(folder) / pathlib.Path(source).name
    shutil.copytree(source, out)
    letters = tokenizer()
    words = letters["model"]["vocab"]
    for index in range(len(words), json.loads((out / "config.json").read_text())["vocab_size"]):
        words[f"<{index}>"] = index
    (out / "tokenizer.json").write_text(json.dumps(letters))
    return out
