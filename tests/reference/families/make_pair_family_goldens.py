#!/usr/bin/env python3
"""Writes tiny random encoder-decoders of Hugging Face, with their answers.

Needs torch and transformers, which the tests do not need. Version 5.24 wrote the stored files, but
4.57.3 those of NLLB-MoE, of which 5.24 runs only two experts. Each case is a folder of
tests/golden/pairs in the family's own format; golden.safetensors beside its files has the tensors
that make_pair_goldens.py describes. Weights are bf16; answers are computed in f32.

    make_pair_family_goldens.py [--only SUBSTRING] [--out FOLDER]
"""

import argparse
import dataclasses
import json
import pathlib
import shutil

import torch
import transformers
from safetensors.torch import save_file

from make_family_goldens import randomize

LENGTHS = ((1, 1), (5, 1), (16, 3), (40, 1), (120, 30))
TOP, GREEDY, BEAM, BEAM_TOKENS = 8, 20, 4, 10


@dataclasses.dataclass
class Case:
    name: str
    family: str
    config: dict


BART = dict(vocab_size=96, d_model=32, encoder_layers=2, decoder_layers=3,
            encoder_attention_heads=4, decoder_attention_heads=2, encoder_ffn_dim=40,
            decoder_ffn_dim=48, max_position_embeddings=160, pad_token_id=1, bos_token_id=0,
            eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None)
MARIAN = {**BART, "pad_token_id": 95, "decoder_start_token_id": 95, "eos_token_id": 0}
NLLB = {**BART, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2,
        "encoder_layers": 4, "decoder_layers": 4, "router_dtype": "float32"}
T5 = dict(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3,
          num_heads=4, relative_attention_num_buckets=8, relative_attention_max_distance=20,
          pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
SWITCH = {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
          "expert_capacity": 4096}

CASES = [
    Case("bart", "bart", BART),
    Case("bart-scaled-relu", "bart", {**BART, "scale_embedding": True, "activation_function": "relu"}),
    Case("mbart", "mbart", BART),
    Case("mbart-scaled", "mbart", {**BART, "scale_embedding": True, "decoder_layers": 1}),
    Case("m2m-100", "m2m_100", BART),
    Case("m2m-100-unscaled", "m2m_100", {**BART, "scale_embedding": False, "encoder_layers": 1}),
    Case("marian", "marian", {**MARIAN, "activation_function": "swish", "scale_embedding": True}),
    Case("marian-gelu", "marian", MARIAN),
    Case("pegasus", "pegasus", {**BART, "scale_embedding": True}),
    Case("pegasus-one-layer", "pegasus", {**BART, "encoder_layers": 1, "decoder_layers": 1}),
    Case("t5", "t5", {**T5, "feed_forward_proj": "relu"}),
    Case("t5-gated-untied", "t5", {**T5, "feed_forward_proj": "gated-gelu",
                                   "tie_word_embeddings": False, "scale_decoder_outputs": False}),
    Case("mt5", "mt5", {**T5, "feed_forward_proj": "gated-gelu"}),
    Case("mt5-one-layer", "mt5", {**T5, "num_layers": 1, "num_decoder_layers": 1,
                                  "feed_forward_proj": "gated-silu"}),
    Case("switch", "switch_transformers", SWITCH),
    Case("switch-all-sparse", "switch_transformers",
         {**SWITCH, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 3,
          "num_experts": 3}),
    Case("nllb-moe", "nllb-moe", NLLB),
    Case("nllb-moe-every-layer", "nllb-moe",
         {**NLLB, "encoder_sparse_step": 1, "decoder_sparse_step": 3, "num_experts": 3,
          "moe_token_dropout": 0.1, "encoder_layers": 2, "decoder_layers": 3}),
    Case("umt5", "umt5", {**T5, "feed_forward_proj": "gated-gelu"}),
]


@torch.no_grad()
def answers(case, model, number):
    generator = torch.Generator().manual_seed(900 + number)
    vocab, start = case.config["vocab_size"], case.config["decoder_start_token_id"]
    out = {key: [] for key in ("sources", "tokens", "top_ids", "top_logprobs", "greedy",
                               "greedy_margin", "beam_tokens", "beam_scores")}
    for source_length, length in LENGTHS:
        source = torch.randint(3, vocab - 1, (source_length,), generator=generator)
        rest = torch.randint(3, vocab - 1, (length - 1,), generator=generator)
        prompt = torch.cat([torch.tensor([start]), rest])

        def logprobs(text):
            # The tokens after padding would lose their places.
            made = model(input_ids=source[None], attention_mask=torch.ones_like(source)[None],
                         decoder_input_ids=text[None], use_cache=False)
            return made.logits[0].double().log_softmax(-1)

        best = logprobs(prompt).topk(TOP, -1)
        text, greedy, margin = prompt, [], []
        for _ in range(GREEDY):
            two = logprobs(text)[-1].topk(2)
            greedy.append(int(two.indices[0]))
            margin.append(float(two.values[0] - two.values[1]))
            text = torch.cat([text, two.indices[:1]])
        made = model.generate(
            input_ids=source[None], attention_mask=torch.ones_like(source)[None],
            decoder_input_ids=prompt[None], num_beams=BEAM, num_return_sequences=BEAM,
            max_new_tokens=BEAM_TOKENS, length_penalty=1.0, early_stopping=False, do_sample=False, use_cache=False,
            forced_eos_token_id=None, bad_words_ids=None, output_scores=True,
            return_dict_in_generate=True)
        beams = made.sequences[:, length:]
        padded = torch.full((BEAM, BEAM_TOKENS), -1)
        for i, tokens in enumerate(beams.tolist()):
            ends = [j for j, token in enumerate(tokens) if token == case.config["eos_token_id"]]
            kept = tokens[:ends[0] + 1] if ends else tokens
            padded[i, :len(kept)] = torch.tensor(kept)
        for key, value in (
                ("sources", source), ("tokens", prompt), ("top_ids", best.indices),
                ("top_logprobs", best.values), ("greedy", torch.tensor(greedy)),
                ("greedy_margin", torch.tensor(margin)), ("beam_tokens", padded),
                ("beam_scores", made.sequences_scores)):
            out[key].append(value)
    lengths = torch.tensor([[0, 0], *LENGTHS]).cumsum(0)
    result = {key: (torch.stack if key.startswith(("greedy", "beam")) else torch.cat)(value)
              for key, value in out.items()}
    result["source_offsets"], result["offsets"] = lengths[:, 0], lengths[:, 1]
    return {key: (value.float() if value.is_floating_point() else value.int()).contiguous()
            for key, value in result.items()}


def write(case, number, out):
    folder = out / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = transformers.AutoConfig.for_model(case.family, **case.config)
    config._attn_implementation = "eager"
    config.dropout = config.attention_dropout = config.activation_dropout = 0.0
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).float().eval()
    tables = {name: parameter.data.clone() for name, parameter in model.named_parameters()
              if not parameter.requires_grad}
    randomize(model, 1000 + number)
    for name, value in tables.items():  # sinusoids
        model.get_parameter(name).data.copy_(value)
    if hasattr(model, "final_logits_bias"):
        generator = torch.Generator().manual_seed(1100 + number)
        bias = torch.randn(model.final_logits_bias.shape, generator=generator) * 0.3
        model.final_logits_bias.copy_(bias.bfloat16().float())
    tensors = answers(case, model, number)
    model.bfloat16()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    stored.pop("transformers_version", None)
    path.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    save_file(tensors, folder / "golden.safetensors")
    print(case.name, sum(f.stat().st_size for f in folder.iterdir()) // 1024, "KiB, margin",
          f"{tensors['greedy_margin'].min():.1e}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="writes only cases whose name contains this text")
    parser.add_argument("--out", type=pathlib.Path,
                        default=pathlib.Path(__file__).parents[2] / "golden" / "pairs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    old = transformers.__version__.startswith("4.")
    for number, case in enumerate(CASES):
        if args.only in case.name and (case.family == "nllb-moe") == old:
            write(case, number, args.out)


if __name__ == "__main__":
    main()
