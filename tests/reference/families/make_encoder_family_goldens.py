#!/usr/bin/env python3
"""Writes tiny random encoders and classifiers of Hugging Face, with their answers.

Needs torch and transformers, which the tests do not need; transformers 5.24 wrote the stored files.
Each case is a folder of tests/golden/encoders in the family's own format; golden.safetensors beside
its files has the tensors that make_encoder_goldens.py describes, without routes and bf16 results.
Weights are bf16; answers are computed in f32, one text at a time.

    make_encoder_family_goldens.py [--only SUBSTRING] [--out FOLDER]
"""

import argparse
import json
import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import save_file

import nomic
from encoder_cases import CASES
from make_family_goldens import randomize

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 150)
TOP = 8


def build(case):
    if case.family == "nomic":
        return nomic.Nomic(case.config).float().eval()
    config = dict(case.config)
    labels = config.pop("num_labels", None)
    made = transformers.AutoConfig.for_model(case.family, **config)
    if labels is not None:
        made.num_labels = labels
    made._attn_implementation = "eager"
    name = "AutoModel" if case.kind == "Model" else f"AutoModelFor{case.kind}"
    return getattr(transformers, name).from_config(made).float().eval()


def pooled(rows, kind):
    return {"mean": rows.mean(0), "cls": rows[0], "last": rows[-1]}[kind]


@torch.no_grad()
def answers(case, model, tokens, types):
    if case.family == "nomic":
        return {"texts": pooled(model(tokens, types), case.pooling)[None]}
    inputs = {"input_ids": tokens[None]}
    if case.types > 1:
        inputs["token_type_ids"] = types[None]
    out = model(**inputs, attention_mask=torch.ones_like(tokens)[None])
    if case.kind in ("Model", "TextEncoding"):
        return {"texts": pooled(out.last_hidden_state[0], case.pooling)[None]}
    if case.kind == "MaskedLM":
        logprobs = torch.log_softmax(out.logits[0].double(), -1).float()
        best = logprobs.topk(TOP, -1)
        return {"target_logprobs": logprobs.gather(1, tokens[:, None])[:, 0],
                "top_ids": best.indices.int(), "top_logprobs": best.values}
    if case.kind == "QuestionAnswering":
        return {"logits": torch.stack([out.start_logits[0], out.end_logits[0]], -1)}
    if case.kind == "TokenClassification":
        return {"logits": out.logits[0]}
    return {"texts": out.logits}


class _Untied:
    tie_word_embeddings = True


def write(case, number, out):
    folder = out / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = build(case)
    if case.family == "nomic":
        model.config = _Untied()
    randomize(model, 500 + number)
    generator = torch.Generator().manual_seed(700 + number)
    parts, offsets, everything, all_types = [], [0], [], []
    for length in LENGTHS:
        tokens = torch.randint(3, case.config["vocab_size"], (length,), generator=generator)
        types = (torch.arange(length) >= length // 2).long() * (case.types > 1)
        parts.append(answers(case, model, tokens, types))
        everything.append(tokens)
        all_types.append(types)
        offsets.append(offsets[-1] + length)
    tensors = {key: torch.cat([part[key] for part in parts]).contiguous() for key in parts[0]}
    tensors["tokens"] = torch.cat(everything).int()
    tensors["types"] = torch.cat(all_types).int()
    tensors["offsets"] = torch.tensor(offsets, dtype=torch.int32)
    model.bfloat16()
    if case.family == "nomic":
        save_file({k: v.contiguous() for k, v in model.state_dict().items()},
                  folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(
            {"architectures": ["NomicBertModel"], **case.config}))
    else:
        model.save_pretrained(folder)
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    stored.pop("transformers_version", None)
    path.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    save_file(tensors, folder / "golden.safetensors")
    print(case.name, sum(f.stat().st_size for f in folder.iterdir()) // 1024, "KiB", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="writes only cases whose name contains this text")
    parser.add_argument("--out", type=pathlib.Path,
                        default=pathlib.Path(__file__).parents[2] / "golden" / "encoders")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for number, case in enumerate(CASES):
        if args.only in case.name:
            write(case, number, args.out)


if __name__ == "__main__":
    sys.exit(main())
